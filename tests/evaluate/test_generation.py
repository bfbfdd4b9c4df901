"""Loads of generated text: what is drawn, what a batch generates, and the times of its tokens."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from depth import deep

from xsp.cli import main
from xsp.errors import ManifestError, XspError
from xsp.evaluate import reading, results
from xsp.evaluate.generation import driving, endpoint, prompts, timing
from xsp.evaluate.generation.timing import Generated
from xsp.evaluate.load import Requests, VirtualClock, schedules
from xsp.evaluate.manifest import Generation, Lengths, Scenario
from xsp.evaluate.web import policy

MS = 1_000_000
TINY = "transformers:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=256&n_positions=64"


def generation(prompt: Any = 8, output: Any = 5, **of: Any) -> Generation:
    return Generation(
        prompt=Lengths.model_validate(prompt), output=Lengths.model_validate(output), vocabulary=256, **of
    )


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "mean", "least", "most"),
    [
        (16, 16, 16, 16),
        ([3, 9], 6, 3, 9),
        ({"distribution": "uniform", "least": 10, "most": 20}, 15, 10, 20),
        ({"distribution": "normal", "mean": 100, "std": 10, "most": 130}, 100, 1, 130),
        ({"distribution": "lognormal", "mean": 50, "std": 50, "most": 2000}, 50, 1, 2000),
    ],
)
def test_lengths_have_the_mean_and_the_limits_of_their_distribution(
    lengths: Any, mean: float, least: int, most: int
) -> None:
    counts = prompts.draw(generation(lengths), 4000, seed=1).counts
    assert abs(counts.mean() / mean - 1) < 0.06
    assert least <= counts.min() <= counts.max() <= most <= prompts.longest(Lengths.model_validate(lengths))


def test_a_request_depends_only_on_the_seed_and_its_number() -> None:
    asked = generation({"distribution": "normal", "mean": 20, "std": 8}, [1, 2, 3])
    few, many, other = (prompts.draw(asked, count, seed) for count, seed in ((5, 1), (50, 1), (5, 2)))
    assert [tokens.tolist() for tokens in few.tokens] == [tokens.tolist() for tokens in many.tokens[:5]]
    assert few.output_counts.tolist() == many.output_counts[:5].tolist()
    assert few.checksum != other.checksum


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ({"kind": "concurrent"}, "needs generation"),
        ({"kind": "cold-start", "generation": {"prompt": 4, "output": 4}}, "but not cold-start"),
        ({"batch": 2, "generation": {"prompt": 4, "output": 4}}, "one prompt"),
        ({"generation": {"prompt": {"distribution": "normal"}, "output": 4}}, "needs mean"),
        ({"generation": {"prompt": {"distribution": "uniform"}, "output": 4}}, "needs most"),
        ({"generation": {"prompt": [], "output": 4}}, "need values"),
        ({"generation": {"prompt": {"mean": 4, "least": 9, "most": 3}, "output": 4}}, "above most"),
    ],
)
def test_a_load_that_does_not_exist_is_refused_with_the_reason(scenario: Any, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        reading.of_plain({"model": {"name": "x", "source": TINY}, "scenario": scenario})


# --- what a batch generates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        TINY,
        deep("transformers:llama?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&num_key_value_heads=2"
             "&intermediate_size=64&vocab_size=256"),
        deep("transformers:opt?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&ffn_dim=64&vocab_size=256"
             "&word_embed_proj_dim=32"),
        deep("transformers:bloom?n_layer=2&hidden_size=32&n_head=4&vocab_size=256"),
    ],
)  # fmt: skip
def test_requests_that_join_and_leave_a_batch_get_what_transformers_generates_for_each_alone(source: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from xsp import models
    from xsp.evaluate.generation.batching import CausalSequences

    built = models.build(source, models.Settings(prefill=40))
    assert isinstance(built, models.ModelCall)
    model = built.model.eval().double()
    drawn = prompts.draw(generation([3, 11, 17], [4, 9, 13]), 7, seed=3)
    sequences = CausalSequences(model, "cpu")
    found: dict[int, list[int]] = {}
    running: set[int] = set()
    waiting = list(range(7))
    while waiting or running:
        if waiting and len(running) < 3:  # one joins between any two steps
            number = waiting.pop(0)
            found[number] = [sequences.begin(number, drawn.tokens[number])]
            running.add(number)
        for number, token in sequences.step().items():
            found[number].append(token)
        complete = [number for number in running if len(found[number]) == drawn.output_counts[number]]
        sequences.end(complete)
        running -= set(complete)
    for number, tokens in enumerate(drawn.tokens):
        ids = torch.from_numpy(tokens)[None]
        count = int(drawn.output_counts[number])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert found[number] == alone[0, len(tokens) :].tolist(), number


# --- the times of tokens ----------------------------------------------------------------------------------------------


class Timed:
    """A model that reads a prompt in 10 ms and generates tokens in 2 ms, however many requests it has."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.running, self.most = clock, list[int](), 0

    def begin(self, number: int, prompt: Any) -> int:
        self.clock.advance(10 * MS)
        self.running.append(number)
        self.most = max(self.most, len(self.running))
        return 0

    def step(self) -> dict[int, int]:
        self.clock.advance(2 * MS)
        return dict.fromkeys(self.running, 0)

    def end(self, numbers: Sequence[int]) -> None:
        self.running = [number for number in self.running if number not in numbers]


def driven(schedule: schedules.Schedule, slots: int, users: int = 1, output: int = 5) -> tuple[Generated, Timed]:
    clock = VirtualClock()
    model = Timed(clock)
    drawn = prompts.draw(generation(8, output), len(schedule), 0)
    return driving.drive_together(schedule, drawn, model, slots=slots, users=users, clock=clock), model


def test_one_user_waits_for_a_prompt_and_then_a_step_per_token() -> None:
    found, _ = driven(schedules.online(3), slots=8)
    assert found.ttft_ns.tolist() == [10 * MS] * 3
    assert found.itl_ns.tolist() == [2 * MS] * 12
    assert found.tpot_ns.tolist() == [2 * MS] * 3
    assert found.requests.latency_ns.tolist() == [18 * MS] * 3


def test_the_prompt_of_one_request_delays_the_tokens_of_another() -> None:
    # the second is due while the first generates: its prompt is read between two of the first one's tokens
    found, _ = driven(schedules.replay([0.0, 0.013]), slots=2)
    assert (found.token_ns[0] / MS).tolist() == [10, 12, 14, 26, 28]
    assert (found.token_ns[1] / MS).tolist() == [24, 26, 28, 30, 32]
    assert sorted(found.ttft_ns.tolist()) == [10 * MS, 11 * MS]


def test_a_request_waits_in_the_queue_until_a_slot_is_free_and_its_first_token_counts_from_when_it_was_due() -> None:
    found, model = driven(schedules.replay([0.0, 0.0, 0.0]), slots=1)
    assert model.most == 1
    assert found.ttft_ns.tolist() == [10 * MS, 28 * MS, 46 * MS]
    found, model = driven(schedules.online(20), slots=3, users=8)
    assert model.most == 3
    assert (found.requests.due_ns[:8] == found.requests.due_ns[0]).all()


def test_a_request_of_one_token_ends_with_its_prompt() -> None:
    found, _ = driven(schedules.online(2), slots=2, output=1)
    assert found.requests.latency_ns.tolist() == [10 * MS] * 2
    figures = timing.figures(found, Scenario(generation=generation()))
    assert figures["itl_mean_ms"] is None
    assert "itl_p50_ms" not in figures


def test_statistics_of_tokens_are_those_computed_by_hand() -> None:
    due, end = np.array([0, 0, 100]) * MS, np.array([50, 130, 300]) * MS
    requests = Requests(due, due, due, end, np.ones(3, np.int64))
    token_ns = tuple(np.array(times) * MS for times in ([20, 30, 50], [30, 130], [300]))
    scenario = Scenario(latency_ms=150, generation=generation(ttft_ms=100, tpot_ms=50))
    found = timing.figures(Generated(requests, np.array([4, 5, 6]), token_ns, np.array([3, 2, 1])), scenario)
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (30, 200)
    assert (found["itl_p50_ms"], found["itl_p99_ms"]) == (20, 100)
    assert found["tpot_mean_ms"] == pytest.approx((15 + 100) / 2)
    assert found["output_tokens_per_s"] == pytest.approx(6 / 0.3)
    assert found["prompt_tokens_per_s"] == pytest.approx(15 / 0.3)
    assert found["goodput_per_s"] == pytest.approx(1 / 0.3)  # the second is slow per token, the third at its first


# --- a server ---------------------------------------------------------------------------------------------------------


class Scripted(http.server.BaseHTTPRequestHandler):
    """Sends the first of five tokens after 100 ms, and each further one after 40 ms; two of them in one message."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[Any]] = []
    status = 200
    extra = b""

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.status != 200:
            self.wfile.write(b"the model\n does not exist")
            return
        self.wfile.write(b": comment\n\n" + self.extra)
        for text, pause_s in (("a", 0.1), ("b", 0.04), ("cd", 0.04), ("e", 0.04)):
            time.sleep(pause_s)
            self.wfile.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode())
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    scripted = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=scripted.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    Scripted.asked.clear()
    yield f"http://127.0.0.1:{scripted.server_address[1]}/v1"
    scripted.shutdown()
    thread.join()
    scripted.server_close()


@pytest.mark.parametrize("schedule", [schedules.online(4), schedules.replay([0.0, 0.05, 0.05, 0.1])])
def test_the_tokens_that_a_server_streams_are_timed(server: str, schedule: schedules.Schedule) -> None:
    client = endpoint.Endpoint(server, "some")
    found = endpoint.drive_endpoint(schedule, prompts.draw(generation(), 4, 0), client, users=2)
    client.close()
    assert found.output_counts.tolist() == [5] * 4
    assert min(found.ttft_ns) >= 100 * MS
    assert np.median(found.ttft_ns) < 190 * MS
    assert 38 * MS < np.median(found.itl_ns) < 70 * MS
    assert len(found.itl_ns) == 4 * 3  # gaps between messages, as clients see them
    assert np.median(found.tpot_ns) == pytest.approx(np.median(found.itl_ns) * 3 / 4, rel=0.4)
    asked = Scripted.asked[0]
    assert (asked["model"], asked["max_tokens"], len(asked["prompt"]), asked["stream"]) == ("some", 5, 8, True)


def test_a_server_that_refuses_or_is_not_there_is_an_error_with_its_reason(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(address: str) -> str:
        client = endpoint.Endpoint(address, "some")
        with pytest.raises(ManifestError) as caught:
            endpoint.drive_endpoint(schedules.poisson(100, 3, 0), prompts.draw(generation(), 3, 0), client)
        return str(caught.value)

    monkeypatch.setattr(Scripted, "extra", b"data: {broken\n\n")
    assert "model.endpoint" in error_of(server)
    monkeypatch.setattr(Scripted, "status", 404)
    assert "answers 404 (the model" in error_of(server)
    assert "refused" in error_of("http://127.0.0.1:9/v1")
    with pytest.raises(ManifestError, match="is not an address"):
        endpoint.Endpoint("127.0.0.1:8000", "some")


# --- evaluations ------------------------------------------------------------------------------------------------------


def written(folder: Path, source: str = TINY, scenario: Any = None, **model: Any) -> Path:
    load = {"kind": "concurrent", "streams": 3, "requests": 12,
            "generation": {"prompt": [4, 9], "output": [2, 6], "vocabulary": 256, "slots": 2, "ttft_ms": 60_000,
                           **(scenario or {})}}  # fmt: skip
    named = {"name": "tiny", **({"source": source} if "endpoint" not in model else {}), **model}
    path = folder / "asked.yaml"
    path.write_text(json.dumps({"model": named, "scenario": load}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_manifest_of_generated_text_is_evaluated_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path, store = written(tmp_path), tmp_path / "store"
    assert main(["evaluate", "check", str(path), "-q"]) == 0
    for _ in range(2):
        assert main(["evaluate", "run", str(path), "--store", str(store), "--trace", "M", "-q"]) == 0
    said = capsys.readouterr().out
    assert "first token" in said
    assert "generated tokens/s; goodput" in said
    assert "100.0 %" in said
    assert "xsp profile MODEL --decode" in said
    one, other = results.read_all(store)[0]
    found = one.parts[0]["generation"]
    assert found["output_tokens"] == int(prompts.draw(generation([4, 9], [2, 6]), 12, 0).output_counts.sum())
    assert one.content["outputs"]["digest"] == other.content["outputs"]["digest"]
    assert main(["evaluate", "compare", one.name, other.name, "--store", str(store)]) == 0
    assert "ttft p99 ms" in capsys.readouterr().out
    assert main(["evaluate", "list", "--store", str(store)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "scenario", "reason"),
    [
        ("transformers:bert?num_hidden_layers=1", {}, "not a causal language model"),
        ("micro:path-3", {}, "not a causal language model"),
        (TINY, {"prompt": 70}, "takes up to 64 tokens"),
        (TINY, {"vocabulary": 5000}, "generation.vocabulary"),
        ("transformers:mamba?num_hidden_layers=1&hidden_size=32&vocab_size=256", {}, "give slots: 1"),
        ("model.onnx", {}, "model.source: not used"),
    ],
)
def test_what_generates_no_text_is_refused_by_check_and_run_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, scenario: Any, reason: str
) -> None:
    pytest.importorskip("transformers")
    path = written(tmp_path, source, scenario)
    assert main(["evaluate", "check", str(path), "-q"]) == 3
    assert reason in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", "run", str(path), "--store", str(tmp_path / "store"), "-q"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


FAILING = """\
import torch, transformers

def net(batch):
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=256, n_positions=64)
    model, calls = transformers.GPT2LMHeadModel(config), []

    def fail(*_):
        calls.append(1)
        if len(calls) > {calls}:
            raise RuntimeError("{error}")

    model.register_forward_pre_hook(fail)
    {opened}
    return model, torch.ones(batch, 4, dtype=torch.long)
"""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("stand-in out of memory: 3 GiB", "standin:0 has too little memory free: give {}, or end what else uses it"),
        ("stand-in error: an illegal address", "standin:0 is lost for this process: run it again once the device"),
    ],
)
@pytest.mark.parametrize(
    ("calls", "opened"), [(0, ""), (25, ""), (0, "model.to = lambda *_, **__: fail()")], ids=["first", "load", "open"]
)
def test_a_device_that_fails_while_text_is_generated_is_named_with_what_to_do(
    error: str, says: str, calls: int, opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("transformers")
    import standin

    standin.install(tmp_path / "site", monkeypatch)
    (tmp_path / "net.py").write_text(FAILING.format(error=error, calls=calls, opened=opened))
    path = written(tmp_path, "net.py:net")
    content = json.loads(path.read_text()) | {"hardware": {"gpu": "any"}}
    path.write_text(json.dumps(content))
    store = tmp_path / "store"
    assert main(["evaluate", "run", str(path), "--store", str(store), "-q"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    smaller = "a smaller model or precision" if opened else "fewer slots, or shorter prompts and outputs"
    assert says.format(smaller) in said
    assert said.count("standin:0") == (2 if opened else 1)
    assert not list(store.glob("*/result.json")), "no result of a device that failed is kept"


def test_an_endpoint_is_evaluated(tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, store = written(tmp_path, endpoint=server), tmp_path / "store"
    assert main(["evaluate", "run", str(path), "--store", str(store), "-q"]) == 0
    (stored,), damaged = results.read_all(store)
    assert not damaged
    assert stored.parts[0]["generation"]["output_tokens"] == 12 * 5
    assert [text.item() for text in stored.outputs().values()] == ["abcde"] * 4
    assert "generated tokens/s" in capsys.readouterr().out


def test_a_manifest_from_a_network_calls_no_server_and_asks_for_no_endless_text(tmp_path: Path) -> None:
    def objections(**scenario: Any) -> str:
        load = {"requests": 2, "generation": {"prompt": 4, "output": 4, **scenario}}
        asked: dict[str, Any] = {"model": {"name": "x", "source": TINY}, "scenario": load}
        if not scenario:
            asked["model"] = {"name": "x", "endpoint": "http://127.0.0.1:1/v1"}
        return "; ".join(policy.objections(policy.of_json(asked).manifest))

    assert "no server is called" in objections()
    assert "scenario.generation.output: 100,000" in objections(output=100_000)
    assert not objections(output=40)
    with pytest.raises(XspError, match="exclude each other"):
        reading.of_plain({"model": {"name": "x", "source": TINY, "endpoint": "http://127.0.0.1:1/v1"}})
