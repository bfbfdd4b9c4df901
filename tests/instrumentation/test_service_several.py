"""`xsp.instrument` called several times in a process, and requests that are served at the same time."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk")

import torch
from opentelemetry import trace
from services import Service, X, model
from torch import nn

import xsp
from xsp.instrumentation import instrument as service_module
from xsp.instrumentation.worker import CallRequest, RecordedCalls, spans_of
from xsp.testing import spans


class Waits(nn.Module):
    """Is in its call until it may go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()
        self.tanh = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.set()
        self.go.wait(20)
        return self.tanh(x)


def requested(service: Service, call: Callable[[torch.Tensor], Any]) -> None:
    with service.request():
        call(X)


def request_during(service: Service, waits: Waits, net: nn.Module) -> None:
    """Serve a request while another one is in its call."""
    thread = threading.Thread(target=requested, args=(service, waits))
    thread.start()
    waits.inside.wait(20)
    requested(service, net)
    waits.go.set()
    thread.join()


# --- a thread that makes batches ---


@pytest.mark.parametrize("declares", [False, True])
def test_a_batching_thread_outside_any_span_is_told_to_declare_its_requests(
    service: Service, declares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, waiting, answered = model(), queue.Queue[Any](), threading.Semaphore(0)

    def serve() -> None:
        for _ in range(30):
            request = waiting.get()
            with traced.batch([request]) if declares else contextlib.nullcontext():
                net(X)
            answered.release()

    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced, caplog.at_level("WARNING", "xsp"):
        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(30):
            with service.request():
                waiting.put(trace.get_current_span())
                answered.acquire(timeout=20)
        thread.join()
        assert traced.counts.calls == 30
        assert (traced.counts.sampled > 0) is declares
        assert any("traced.batch(" in note for note in traced.notes) is not declares
    assert sum("traced.batch(" in record.message for record in caplog.records) == (0 if declares else 1)


# --- several handles --------------------------------------------------------------------------------------


def test_models_are_instrumented_one_by_one_each_with_its_own_settings(service: Service) -> None:
    other, first, second = Service(), model(), nn.Sequential(nn.Tanh())
    one = xsp.instrument(first, sample=1.0, provider=service.provider)
    two = xsp.instrument(second, sample=0.5, levels="model/layer", provider=other.provider)
    for trace_id in (1, 1 << 63):
        with service.request(trace_id):
            first(X)
            second(X)
    assert one.flush()
    assert two.flush()
    assert (one.counts[:3], two.counts[:3]) == ((2, 2, 2), (2, 1, 1))
    assert other.levels() == {"shop": 1, "shop.layer": 2}  # the request's own span is the first service's
    assert service.levels()["shop.layer"] == 6
    assert "shop.op" in service.levels()
    one.close()
    two.close()
    other.provider.shutdown()


def test_one_handle_is_closed_while_the_other_goes_on(service: Service) -> None:
    first, second = model(), nn.Sequential(nn.Tanh())
    one = xsp.instrument(first, sample=1.0, provider=service.provider)
    two = xsp.instrument(second, sample=1.0, provider=service.provider)
    one.close()
    with service.request():
        first(X)
        second(X)
    two.close()
    assert (one.counts[:3], two.counts[:3]) == ((0, 0, 0), (1, 1, 1))
    assert service.tree_text() == "shop GET /\n  shop Sequential\n    shop.layer Sequential\n      shop.layer 0"


def test_a_model_that_is_named_again_belongs_to_the_later_handle_and_has_one_span(service: Service) -> None:
    net = model()
    one = xsp.instrument(net, sample=0.0, provider=service.provider)
    two = xsp.instrument(net, sample=1.0, levels="model/layer", provider=service.provider)
    with service.request():
        net(X)
    one.close()  # has nothing any more
    with service.request():
        net(X)
    two.close()
    assert (one.counts[:3], two.counts[:3]) == ((0, 0, 0), (2, 2, 2))
    assert service.levels() == {"shop": 4, "shop.layer": 6}


def test_a_later_handle_may_look_deeper_and_the_first_ones_spans_stay_as_they_were(service: Service) -> None:
    first, second = model(), nn.Sequential(nn.Tanh())
    with xsp.instrument(first, sample=1.0, levels="model/layer", provider=service.provider) as one:
        with xsp.instrument(second, sample=1.0, provider=service.provider) as two:
            requested(service, first)
            requested(service, second)
            assert one.flush()
            assert two.flush()
            assert one.counts.delivered == 3
            assert two.counts.delivered > 2
        requested(service, first)
        assert one.flush()
        assert one.counts[:4] == (2, 2, 2, 0)


def test_a_later_handle_may_bring_a_collector_of_its_own(service: Service) -> None:
    first, second = model(), nn.Sequential(nn.Tanh())
    with (
        xsp.instrument(first, sample=1.0, provider=service.provider, collectors=["modules"]) as one,
        xsp.instrument(second, sample=1.0, provider=service.provider, collectors=["modules", "torchops"]) as two,
    ):
        requested(service, first)
        requested(service, second)
        assert one.flush()
        assert two.flush()
        assert (one.counts.delivered, one.counts.layers_only) == (3, 0)
        assert two.counts.delivered > 2
    assert {span.name for span in service.spans if span.name.startswith("aten::")} == {"aten::tanh"}


def test_a_call_of_a_module_that_contains_models_of_two_handles_is_of_the_outermost(service: Service) -> None:
    inner = model()
    outer = nn.Sequential(inner, nn.Tanh())
    around = nn.Sequential(outer)
    with (
        xsp.instrument(inner, sample=1.0, levels="model/layer", provider=service.provider) as one,
        xsp.instrument(outer, sample=1.0, levels="model/layer", provider=service.provider) as two,
    ):
        for each in (inner, outer, around):
            requested(service, each)
        assert (one.counts[:2], two.counts[:2]) == ((1, 1), (2, 2))


@pytest.mark.slow
def test_a_model_that_is_replaced_is_not_kept_alive_and_its_successor_is_instrumented(service: Service) -> None:
    handles, net = [], model()
    for _ in range(3):
        net = model()
        handles.append(xsp.instrument(net, sample=1.0, provider=service.provider))
        gone = weakref.ref(net)
        requested(service, net)
        assert handles[-1].flush()
    del net
    gc.collect()
    assert gone() is None
    assert [handle.counts[:3] for handle in handles] == [(1, 1, 1)] * 3
    assert service_module._active is not None
    assert service_module._active._models.by_id == {}
    for handle in handles:
        handle.close()


def test_a_second_call_that_is_refused_leaves_the_first_handle_as_it_was(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with pytest.raises(xsp.XspError, match="between 0 and 1"):
            xsp.instrument(net, sample=2.0, provider=service.provider)
        requested(service, net)
        assert traced.flush()
        assert traced.counts[:3] == (1, 1, 1)


def test_each_model_of_a_handle_has_counts_of_its_own(service: Service) -> None:
    first, second, third = model(), model(), nn.Identity()
    with xsp.instrument(first, second, third, sample=1.0, provider=service.provider) as traced:
        requested(service, second)
        requested(service, third)
        assert traced.flush()
        assert {name: counts[:3] for name, counts in traced.models.items()} == {
            "Sequential": (0, 0, 0),
            "Sequential 2": (1, 1, 1),
            "Identity": (1, 1, 1),
        }


def test_handles_come_and_go_while_requests_are_served(service: Service) -> None:
    net, ends = model(), threading.Event()

    def serve() -> int:
        served = 0
        while not ends.is_set():
            with service.request():
                assert net(X).shape == (4, 8)
            served += 1
            ends.wait(0.05)
        return served

    with xsp.instrument(net, sample=1.0, levels="model/layer", provider=service.provider) as traced:
        with ThreadPoolExecutor(3) as pool:
            serving = [pool.submit(serve) for _ in range(3)]
            for _ in range(2):
                other = model()
                with xsp.instrument(other, sample=1.0, provider=service.provider) as more:
                    requested(service, other)
                assert more.counts[:2] == (1, 1)
            ends.set()
            served = sum(each.result() for each in serving)
        assert traced.flush(60)
        counts = traced.counts
        assert counts[:2] == (served, served)
        assert counts.recorded + sum(counts.lost.values()) == served


# --- requests at the same time ----------------------------------------------------------------------------


def test_calls_at_the_same_time_each_have_their_own_layers_and_operators(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xsp.instrumentation.windows.OPEN_NS", 60 * 10**9)
    net, waits = model(), Waits()
    with xsp.instrument(net, waits, sample=1.0, provider=service.provider) as traced:
        request_during(service, waits, net)
        assert traced.flush()
        assert traced.counts[:4] == (2, 2, 2, 0)
        assert traced.counts.lost == {}
    by_id = {span.context.span_id: span for span in service.spans}
    for operator, layers in (("aten::tanh", ["tanh", "Waits"]), ("aten::addmm", ["0", "Sequential"])):
        span = next(span for span in service.spans if span.name == operator)
        names = []
        while span.parent is not None:
            span = by_id[span.parent.span_id]
            names += [span.name] if span.attributes.get("xsp.level") == "layer" else []
        assert names == layers


def test_a_call_that_comes_when_a_window_takes_nobody_in_has_layers_and_says_what_is_missing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xsp.instrumentation.windows.OPEN_NS", 0)
    net, waits = model(), Waits()
    with xsp.instrument(net, waits, sample=1.0, provider=service.provider) as traced:
        request_during(service, waits, net)
        assert traced.flush()
        assert traced.counts[:4] == (2, 2, 2, 1)
        reason = "operators: the collectors were busy with earlier calls"
        assert traced.counts.lost == {reason: 1}
        assert traced.models["Sequential"].layers_only == 1
    left = next(span for span in service.spans if "xsp.left_out" in span.attributes)
    assert (left.attributes["xsp.left_out"], left.attributes["xsp.rung"]) == (reason, 30)
    assert service.tree_text().count("shop.layer 0") == 1


def test_six_threads_with_every_request_chosen_all_have_layers_and_those_without_operators_say_so(
    service: Service,
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]).eval()
    image, begin = torch.randn(2, 8, 48, 48), threading.Barrier(6)

    def serve(_: int) -> None:
        begin.wait()
        for _ in range(7):
            with service.request(), torch.inference_mode():
                net(image)

    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(serve, range(6)))
        assert traced.flush(60)
        counts = traced.counts
    assert counts[:3] == (42, 42, 42)
    assert counts.lost == (
        {"operators: the collectors were busy with earlier calls": counts.layers_only} if counts.layers_only else {}
    )
    layers, operators = Counter(), Counter()
    for span in service.spans:
        level = span.attributes.get("xsp.level")
        layers[span.context.trace_id] += level == "layer"
        operators[span.context.trace_id] += level == "op"
    assert set(layers.values()) == {19}
    without = {span.context.trace_id for span in service.spans if "xsp.left_out" in span.attributes}
    assert {trace_id for trace_id, number in operators.items() if not number} == without
    assert len(without) == counts.layers_only


def test_work_that_tells_no_thread_is_of_a_call_only_if_it_cannot_be_anothers() -> None:
    rows = spans("""
        forward Net 0-100
        module net 5-95
        op aten::relu 20-40
        forward Net 0-100 thread=2
        module net 5-95 thread=2
        op aten::tanh 30-60 thread=2
        primitive doubtful 32-35
        primitive certain 50-55
    """)
    calls = [
        CallRequest(row, f"{5 + row:032x}", f"{1 + row:016x}", rung=70, collectors=[], otlp=None, resource={})
        for row in (0, 3)
    ]
    first, second = spans_of(RecordedCalls(1, calls, [tuple(row) for row in rows]))
    assert [span.name for span in first.spans] == ["net", "aten::relu"]
    assert [span.name for span in second.spans] == ["net", "aten::tanh", "certain"]
    assert {span.trace_id for span in second.spans} == {f"{8:032x}"}
    assert ((first.strangers, first.ambiguous), (second.strangers, second.ambiguous)) == ((1, 1), (0, 1))


def test_a_model_that_is_a_stranger_first_has_its_layers_names_when_it_is_recorded_itself(service: Service) -> None:
    waits, net = Waits(), model()
    with xsp.instrument(waits, net, sample=0.5, provider=service.provider) as traced:

        def unchosen() -> None:
            with service.request(1 << 63):
                waits(X)

        thread = threading.Thread(target=unchosen)
        thread.start()
        waits.inside.wait(20)
        for _ in range(2):  # its inner call ends while another is recorded, its outermost does not
            with service.request(1):
                net(X)
                waits.go.set()
                thread.join()
        with service.request(2):
            waits(X)
        assert traced.flush()
    assert "tanh" in {span.name for span in service.spans if span.attributes.get("xsp.level") == "layer"}
