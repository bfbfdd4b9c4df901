"""`xsp.instrument`: what hangs under a request's span, what does not, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk")

import services
import torch
from depth import deep
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from realparts import free_ports
from services import Service, X, model
from torch import nn

import xsp
from xsp.errors import PluginError, UsageError
from xsp.instrumentation.provider import Handover
from xsp.instrumentation.worker import CallRequest, RecordedCalls, _Sender, spans_of
from xsp.testing import spans

HALF = 1 << 63


# --- under the request's span -----------------------------------------------------------------------------


def test_a_models_layers_and_operators_hang_under_the_requests_own_span(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with service.request():
            net(X)
        assert traced.flush()
        assert traced.counts.lost == {}
        assert traced.counts.delivered == len(service.spans) - 2
    assert service.tree_text() == (
        "shop GET /\n  shop Sequential\n    shop.layer Sequential\n      shop.layer 0\n      shop.layer 1"
    )
    assert len({span.context.trace_id for span in service.spans}) == 1
    assert "shop.op" in service.levels()


def test_the_spans_carry_what_the_table_says_under_its_names(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider), service.request():
        net(X)
    spans = {(span.resource.attributes["service.name"], span.name): span for span in service.spans}
    forward, layer = spans["shop", "Sequential"], spans["shop.layer", "0"]
    assert forward.attributes["xsp.batch_size"] == 4
    assert forward.attributes["xsp.sample"] == 1.0
    assert layer.attributes["xsp.type"] == "Linear"
    for span in (forward, layer):
        assert span.attributes["xsp.duration_ns"] == span.end_time - span.start_time
    assert forward.start_time <= layer.start_time <= layer.end_time <= forward.end_time
    assert layer.resource.attributes["host.id"].startswith("host-")


def test_a_model_that_is_called_twice_has_two_spans_and_both_have_their_layers(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with service.request():
            net(X)
            net(X)
        traced.flush()
        assert traced.counts[:3] == (2, 2, 2)
    assert service.tree_text().count("shop Sequential") == 2
    assert service.tree_text().count("shop.layer 0") == 2


def test_a_processor_that_raises_at_the_end_of_a_models_span_ends_no_thread_of_xsp(service: Service) -> None:
    class Raises(SpanProcessor):
        """Raises once."""

        left = 1

        def on_end(self, span: Any) -> None:
            if span.name == "Sequential" and self.left:
                self.left -= 1
                raise KeyError("mine")

    net = model()
    service.provider.add_span_processor(Raises())
    with xsp.instrument(net, sample=1.0, levels="model/layer", provider=service.provider) as traced:
        for _ in range(3):
            with service.request():
                net(X)
            traced.flush()
        assert traced.counts[:3] == (3, 3, 3)
        assert traced.counts.delivered == 3 * 3


def test_levels_say_how_deep_to_look(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, levels="model/layer", provider=service.provider), service.request():
        net(X)
    assert service.levels() == {"shop": 2, "shop.layer": 3}


@pytest.mark.slow
def test_a_batch_processor_with_a_short_queue_drops_nothing() -> None:
    service, net = Service(batch=True), nn.Sequential(*[nn.ReLU() for _ in range(3000)])
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with service.request():
            net(X)
        assert traced.flush()
        assert traced.counts.delivered > 6000
        assert len(service.spans) == traced.counts.delivered + 2
    service.provider.shutdown()


# --- which requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace_id", "sampled"), [(HALF - 1, 1), (HALF, 0), deep(5 << 64 | 7, 1), deep(5 << 64 | HALF, 0)]
)
def test_a_request_is_chosen_by_its_trace_id(service: Service, trace_id: int, sampled: int) -> None:
    net = model()
    with xsp.instrument(net, sample=0.5, provider=service.provider) as traced:
        with service.request(trace_id):
            net(X)
        assert traced.counts[:2] == (1, sampled)
    assert len(service.levels()) == (4 if sampled and "shop.library" in service.levels() else 3 if sampled else 1)


def test_calls_outside_requests_and_in_requests_that_the_service_does_not_sample_are_not_recorded() -> None:
    service, net = Service(sampler=ALWAYS_OFF), model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        net(X)
        with service.request():
            net(X)
        assert traced.counts[:2] == (2, 0)
    assert service.spans == []


def test_calls_of_other_models_are_not_recorded_and_those_of_modules_around_the_model_are(service: Service) -> None:
    net, other = model(), model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with service.request():
            other(X)
            nn.Sequential(other, net)(X)
        assert traced.counts[:2] == (1, 1)
    assert "shop.layer 1.1" in service.tree_text()


def test_a_second_model_can_be_named(service: Service) -> None:
    net, other = model(), nn.Sequential(nn.Tanh())
    with xsp.instrument(net, other, sample=1.0, provider=service.provider), service.request():
        other(X)
        net(X)
    assert [line.strip() for line in service.tree_text().splitlines() if "shop.layer" not in line] == [
        "shop GET /",
        "shop Sequential",
        "shop Sequential",
    ]


# --- batches ----------------------------------------------------------------------------------------------


def test_a_batch_links_to_each_request_and_the_requests_that_are_open_link_back(service: Service) -> None:
    net = model()
    first, second = service.tracer.start_span("GET /1"), service.tracer.start_span("GET /2")
    waiting = [trace.set_span_in_context(first), second.get_span_context()]
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced, traced.batch(waiting):
        net(X)
    first.end()
    second.end()
    spans = {span.name: span for span in service.spans}
    batch = next(span for span in service.spans if span.name == "Sequential" and span.links)
    assert {link.context.span_id for link in batch.links} == {s.get_span_context().span_id for s in (first, second)}
    assert batch.parent.span_id == first.get_span_context().span_id
    assert [link.context.span_id for link in spans["GET /1"].links] == [batch.context.span_id]


def test_a_batch_hangs_under_the_span_that_it_runs_in_and_is_recorded_if_one_request_is_chosen(
    service: Service,
) -> None:
    net = model()
    requests = [
        trace.SpanContext(number, 1, is_remote=False, trace_flags=trace.TraceFlags(1)) for number in (HALF, 1, 0)
    ]
    with xsp.instrument(net, sample=0.5, provider=service.provider) as traced:
        with service.tracer.start_as_current_span("batch") as around:
            with traced.batch(requests):
                net(X)
            with traced.batch(requests[:1]):
                net(X)
        assert traced.counts[:2] == (2, 1)
    forward = next(span for span in service.spans if span.links)
    assert forward.parent.span_id == around.get_span_context().span_id
    assert [link.context.trace_id for link in forward.links] == [HALF, 1]


# --- what a service does ----------------------------------------------------------------------------------


def test_an_error_in_the_model_passes_unchanged_and_shows_without_its_message(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), service.request():
            net(torch.ones(4, 7))
        traced.flush()
        assert traced.counts.lost == {}
    spans = {(span.resource.attributes["service.name"], span.name): span for span in service.spans}
    for name in (("shop", "Sequential"), ("shop.layer", "Sequential"), ("shop.layer", "0")):
        assert spans[name].status.description == "error:RuntimeError"
        assert spans[name].attributes["error.type"] == "RuntimeError"
        assert not spans[name].events


def test_a_call_inside_an_error_handler_is_no_error(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider), service.request():
        try:
            raise KeyError
        except KeyError:
            net(X)
    assert {span.status.is_ok for span in service.spans} == {True}


@pytest.mark.slow
def test_a_compiled_model_works_and_is_called_by_its_own_name(service: Service) -> None:
    net = model()
    compiled = torch.compile(net, backend="eager")
    with xsp.instrument(net, sample=1.0, provider=service.provider):
        for _ in range(2):
            with service.request():
                assert torch.equal(compiled(X), net(X))
    models = [span for span in service.spans if span.attributes.get("xsp.kind") == "forward"]
    assert [span.name for span in models] == ["Sequential"] * 4


def test_a_service_whose_sampler_refuses_the_models_span_is_told_so(service: Service) -> None:
    net, off = model(), Service(sampler=ALWAYS_OFF)
    with xsp.instrument(net, sample=1.0, provider=off.provider) as traced:
        with service.request():
            net(X)
        traced.flush()
        assert traced.counts.lost == {"the service's sampler refused the model's span": 1}


def test_device_work_belongs_to_the_call_that_launched_it() -> None:
    rows = spans("""
        forward Net 0-100
        module net 5-95
        op aten::relu 20-40
        launch cudaLaunchKernel 25-30 correlation_id=7
        kernel relu 110-180 correlation_id=7
        forward Net 0-100 thread=2
        op aten::tanh 20-40 thread=2
        launch cudaLaunchKernel 26-31 thread=2 correlation_id=8
        kernel tanh 60-80 correlation_id=8
        primitive matmul 28-29
    """)
    call = CallRequest(0, f"{5:032x}", f"{1:016x}", rung=70, collectors=[], otlp=None, resource={})
    ((own, strangers, ambiguous),) = spans_of(RecordedCalls(1, [call], [tuple(row) for row in rows]))
    parents = {row.name: next((p.name for p in own if p.span_id == row.parent_id), row.parent_id) for row in own}
    assert parents == {"net": f"{1:016x}", "aten::relu": "net", "cudaLaunchKernel": "aten::relu", "relu": "aten::relu"}
    assert {row.layer_index for row in own if row.kind == "module"} == {0}
    assert strangers == 5  # of the other thread, and the primitive that could be of either
    assert ambiguous == 1


@pytest.mark.slow
def test_a_call_of_very_many_spans_is_sent_as_an_overview_and_details(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    rows = [*spans("forward Net 0-60000"), *spans("\n".join(f"op aten::relu {n}-{n + 1}" for n in range(12_000)))]
    call = CallRequest(0, f"{5:032x}", f"{1:016x}", rung=40, collectors=[], otlp=None, resource={})
    ((own, strangers, _),) = spans_of(RecordedCalls(1, [call], [tuple(row) for row in rows]))
    sending = _Sender(str(tmp_path / "spans.jsonl"), {"service.name": "shop"})
    sent, problem = sending(own)
    sending._exporter.close()
    assert (sent > 12_000, strangers, problem) == (True, 0, None)
    traces: Counter[str] = Counter()
    for line in (tmp_path / "spans.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            traces.update(span["traceId"] for scope in resource["scopeSpans"] for span in scope["spans"])
    assert 0 < traces.pop(f"{5:032x}") < max(traces.values()) <= 10_000


# --- what goes wrong --------------------------------------------------------------------------------------


def test_what_the_processors_do_not_take_is_counted(service: Service) -> None:
    class Full(SimpleSpanProcessor):
        def force_flush(self, timeout_millis: int = 0) -> bool:
            return False

    service.provider.add_span_processor(Full(InMemorySpanExporter()))
    net = nn.Sequential(*[nn.ReLU() for _ in range(600)])
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        with service.request():
            net(X)
        traced.flush()
        assert traced.counts.delivered == 128
        assert traced.counts.lost == {"the service's span processors did not take all spans in time": 1}


def test_a_second_process_that_was_killed_costs_one_call_and_is_started_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        for number in range(3):
            with service.request():
                net(X)
            assert traced.flush()
            if number == 0:
                correlator = traced._process.calls._handover._correlator
                assert correlator is not None
                os.kill(correlator.process, signal.SIGKILL)
        reason = "the process that correlates has ended; the next call starts it again"
        assert traced.counts.lost == {reason: 1}
    assert service.tree_text().count("shop.layer 0") == 2
    assert reason in caplog.text


@pytest.mark.slow
def test_a_receiver_that_is_not_there_costs_its_spans_and_not_the_time_of_closing(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    traced = xsp.instrument(net, sample=1.0, provider=service.provider, otlp=f"http://127.0.0.1:{free_ports(1)[0]}")
    for _ in range(3):
        with service.request():
            net(X)
    traced.close(timeout=0.5)
    assert traced.counts.lost == {"not delivered when the handle was closed": 3}
    assert service.levels() == {"shop": 6}
    assert "of 3 sampled calls, these lack spans" in caplog.text


def test_a_collector_that_fails_is_left_out_and_the_request_does_not_notice(service: Service) -> None:
    from xsp.collector import Collector

    class Broken(Collector):
        name = "broken"
        levels = (xsp.Level.OP,)

        def start(self, rung: xsp.Level, describe: bool) -> None:
            raise RuntimeError("no")

    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider, collectors=["modules", Broken()]) as traced:
        with service.request():
            assert net(X).shape == (4, 8)
        assert traced.notes == ["broken: start failed and the collector was left out: RuntimeError: no"]
    assert service.levels() == {"shop": 2, "shop.layer": 3}


def test_without_a_provider_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"set_tracer_provider\(TracerProvider\(\.\.\.\)\) before xsp\.instrument"):
        xsp.instrument(model(), provider=trace.NoOpTracerProvider())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sample": 1.5}, "between 0 and 1"),
        ({"sample": "all"}, "between 0 and 1"),
        ({"levels": "M/X"}, "levels 'M/X'"),
        ({"otlp": "http://"}, "not an endpoint"),
        ({"otlp": "spans.jsonl"}, "sends to a receiver"),
    ],
)
def test_settings_that_make_no_sense_are_refused(service: Service, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        xsp.instrument(model(), provider=service.provider, **wrong)


def test_what_is_no_module_is_refused(service: Service) -> None:
    with pytest.raises(UsageError, match="function is not one"):
        xsp.instrument(model, provider=service.provider)


def test_without_the_collector_of_calls_it_says_so(service: Service) -> None:
    with pytest.raises(PluginError, match=r"'modules'.*name it among"):
        xsp.instrument(model(), provider=service.provider, collectors=["torchops"])


# --- processes --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forked_worker_goes_on_by_itself() -> None:
    """As with gunicorn and a preloaded application: instrumented before the fork, called after it."""
    program = Path(services.__file__).with_name("forking_service.py")
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["child", "shop.layer,0", "child", "shop.layer,0", "parent", "shop.layer,0"]


@pytest.mark.slow
def test_a_process_that_ends_without_closing_delivers_what_it_recorded() -> None:
    code = (
        "import torch, xsp; from torch import nn\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter\n"
        "provider = TracerProvider(); provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))\n"
        "net = nn.Sequential(nn.ReLU()); xsp.instrument(net, sample=1.0, provider=provider)\n"
        "with provider.get_tracer('app').start_as_current_span('GET /'): net(torch.ones(1))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stderr == ""
    assert '.op"' in run.stdout


def test_the_services_threads_wait_less_for_the_interpreter_while_ours_compute() -> None:
    usual = sys.getswitchinterval()
    handover = Handover()
    with handover.short_switch_interval():
        with handover.short_switch_interval():
            assert sys.getswitchinterval() < usual
        assert sys.getswitchinterval() < usual, "another thread of ours still computes"
    assert sys.getswitchinterval() == usual
    try:
        with handover.short_switch_interval():
            sys.setswitchinterval(0.003)
        assert sys.getswitchinterval() == pytest.approx(0.003), "what the service sets meanwhile stays"
    finally:
        sys.setswitchinterval(usual)


def test_a_forked_child_has_the_services_own_switch_interval() -> None:
    usual = sys.getswitchinterval()
    handover = Handover()
    with handover.short_switch_interval():
        handover.forget()
        assert sys.getswitchinterval() == usual
    assert sys.getswitchinterval() == usual
