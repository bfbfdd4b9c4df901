"""Requests of transformers' continuous batching, on a processor: their figures against the client's own clock."""

from __future__ import annotations

import queue
import random
import statistics
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import Told  # noqa: E402
from smallllama import small_llama  # noqa: E402

from xsp import serving, stats  # noqa: E402
from xsp.serving import PARTS, RequestAccount  # noqa: E402
from xsp_collectors import batching  # noqa: E402
from xsp_collectors.batching import ContinuousBatching  # noqa: E402

SLACK_NS = 5_000_000
"""What the client's thread may wait for a core or the lock of the interpreter, beside 2 %."""


@pytest.fixture(scope="module", autouse=True)
def api() -> Any:
    """The module of continuous batching, which takes seconds to import: not where tests are only collected."""
    found = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    for owner, names in batching.NEEDED.items():
        if any(not hasattr(getattr(found, owner, None), name) for name in names):
            pytest.skip("this transformers has another continuous batching")
    return found


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 256) for _ in range(length)]


def manager_of(net: Any, **config: Any) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = {"num_blocks": 512, "max_batch_tokens": 256, **config}
    generation = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return net.init_continuous_batching(generation, ContinuousBatchingConfig(**config))


@pytest.fixture(autouse=True)
def nothing_is_left(api: Any) -> Iterator[None]:
    before = [getattr(getattr(api, owner), name) for owner, names in batching.NEEDED.items() for name in names]
    finders = list(sys.meta_path)
    yield
    assert before == [getattr(getattr(api, owner), name) for owner, names in batching.NEEDED.items() for name in names]
    assert sys.meta_path == finders
    assert serving._sinks == []


@pytest.fixture
def told() -> Iterator[Told]:
    log, collector = Told(keeps_segments=True), ContinuousBatching()
    serving.attach(log)
    collector.open()
    threads, interval_s = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # else the client's clock waits 5 ms for the lock of the interpreter
    yield log
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval_s)
    collector.close()
    serving.detach(log)
    log.close()
    assert list(collector.notes()) == []


class Inbox(queue.Queue[Any]):
    """The client's queue, which notes when a result is put there: its thread may run later, on a busy machine much."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        item.came_ns = time.perf_counter_ns()
        super().put(item, block, timeout)


class Client:
    """A client that notes when it sent requests, and when it got tokens."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        manager.output_router.output_queue = Inbox()
        self.sent: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.status: dict[str, str] = {}

    def send(self, name: str, ids: list[int], new: int, **options: Any) -> None:
        self.sent[name] = time.perf_counter_ns()
        self.manager.add_request(ids, request_id=name, max_new_tokens=new, streaming=True, **options)

    def receive(self, count: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while sum(status in ("FINISHED", "FAILED") for status in self.status.values()) < count:
            assert time.monotonic() < deadline, self.status
            result = self.manager.get_result(timeout=0.5)
            if result is None:
                continue
            now = result.came_ns
            if result.generated_tokens:
                self.first.setdefault(result.request_id, now)
            self.last[result.request_id] = now
            self.tokens[result.request_id] = list(result.generated_tokens)
            self.status[result.request_id] = result.status.name


def serve(net: Any, requests: Sequence[tuple[str, int, int, float]], **config: Any) -> Client:
    """Send requests with a name, lengths of prompt and answer, and seconds to wait before; return the client."""
    manager = manager_of(net, **config)
    client = Client(manager)
    manager.start()

    def send() -> None:
        for seed, (name, length, new, wait_s) in enumerate(requests):
            time.sleep(wait_s)
            client.send(name, prompt(length, seed), new)

    sender = threading.Thread(target=send)
    sender.start()
    client.receive(len(requests))
    sender.join()
    manager.stop(block=True)
    return client


def is_close(ours_ns: float, theirs_ns: float) -> bool:
    return abs(ours_ns - theirs_ns) <= max(SLACK_NS, 0.02 * theirs_ns)


@pytest.mark.slow
def test_200_requests_add_up_and_agree_with_the_clients_clock_and_no_token_changes(told: Told) -> None:
    draw = random.Random(1)
    drawn = [(f"r{n}", draw.randint(1, 120), draw.randint(1, 24), draw.expovariate(100)) for n in range(200)]
    net = small_llama(layers=2, hidden=64)
    client = serve(net, drawn)
    told.drain()
    told.drain()
    accounts = {account.request: account for account in told.accounts}
    assert len(told.accounts) == len(accounts) == 200
    assert told.notes == []
    ours: dict[str, list[int]] = {"first": [], "last": []}
    theirs: dict[str, list[int]] = {"first": [], "last": []}
    for name, length, new, _ in drawn:
        account = accounts[name]
        assert account.status == "ok"
        assert (account.prompt_tokens, account.output_tokens) == (length, new) == (length, len(client.tokens[name]))
        assert sum(account.parts) == account.latency_ns
        assert account.has_arrival
        assert account.first_token_ns is not None
        ours["first"].append(account.first_token_ns - account.arrival_ns)
        ours["last"].append(account.latency_ns)
        theirs["first"].append(client.first[name] - client.sent[name])
        theirs["last"].append(client.last[name] - client.sent[name])
    for figure, values in ours.items():
        late = [theirs_ns - ours_ns for ours_ns, theirs_ns in zip(values, theirs[figure], strict=True)]
        assert min(late) >= -1_000_000  # a client gets a token after it was computed
        assert statistics.median(late) <= SLACK_NS
        for share in (0.5, 0.9):
            assert is_close(stats.percentile(values, share), stats.percentile(theirs[figure], share))
    serving.detach(told)
    again = serve(net, drawn)
    assert again.tokens == client.tokens


def reason(accounts: Sequence[RequestAccount], name: str) -> dict[str, int]:
    [account] = [account for account in accounts if account.request == name]
    return dict(zip(PARTS, account.parts, strict=True))


@pytest.mark.slow
def test_a_planted_long_neighbour_and_a_planted_queue_are_seen(told: Told) -> None:
    net = small_llama(layers=2, hidden=256)
    short = [(f"s{n}", 8, 30, 0.0) for n in range(4)]
    serve(net, [*short, ("long", 1800, 2, 0.05)], max_batch_tokens=2048)
    told.drain()
    told.drain()
    for account in told.accounts:
        if account.request != "long" and account.largest_prefill is not None:
            assert account.largest_prefill[0] == "long"
            parts = dict(zip(PARTS, account.parts, strict=True))
            parts.pop("queue")  # also the start of the loop
            assert parts["others_prefill"] == max(parts.values())
    assert sum(account.largest_prefill is not None for account in told.accounts if account.request != "long") == 4
    told.accounts.clear()
    serve(net, [(f"q{n}", 8, 20, 0.0) for n in range(9)], max_requests_per_batch=2)
    told.drain()
    told.drain()
    last = max(told.accounts, key=lambda account: account.latency_ns)
    parts = dict(zip(PARTS, last.parts, strict=True))
    assert parts["queue"] == max(parts.values())
    assert parts["queue"] > 0.6 * last.latency_ns


@pytest.mark.slow
def test_cancelled_and_failed_requests_are_said_to_be_so(told: Told) -> None:
    net = small_llama(layers=2, hidden=64)
    manager = manager_of(net)
    client = Client(manager)
    client.send("waiting", prompt(5, 0), 500)
    manager.cancel_request("waiting")
    client.send("runs", prompt(5, 1), 500)
    client.send("ends", prompt(5, 2), 4)
    client.send("fails", prompt(5, 3), 4, temperature=0.0, no_such_processor=1)
    manager.start()
    client.receive(1)
    time.sleep(0.1)
    manager.cancel_request(request_id="runs")
    client.send("after", prompt(5, 4), 4)
    while client.status.get("after") != "FINISHED" or client.status.get("ends") != "FINISHED":
        client.receive(sum(s in ("FINISHED", "FAILED") for s in client.status.values()) + 1)
    time.sleep(0.2)
    manager.stop(block=True)
    told.drain()
    told.drain()
    statuses = {account.request: account.status for account in told.accounts}
    assert {name: statuses[name] for name in ("waiting", "runs", "ends", "after")} == {
        "waiting": "cancelled", "runs": "cancelled", "ends": "ok", "after": "ok",
    }  # fmt: skip
    expected = client.status.get("fails")
    assert statuses["fails"] == "ok" if expected == "FINISHED" else statuses["fails"].startswith("error:")


def test_a_model_that_raises_fails_its_requests_and_the_step(told: Told) -> None:
    net, calls = small_llama(layers=2, hidden=64), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("mine")

    handle = net.register_forward_pre_hook(fail)
    manager = manager_of(net)
    client = Client(manager)
    manager.start()
    for number in range(3):
        client.send(f"r{number}", prompt(6, number), 50)
    client.receive(3)
    handle.remove()
    manager.stop(block=True)
    told.drain()
    told.drain()
    assert {account.status for account in told.accounts} == {"error:ZeroDivisionError"}
    assert len(told.accounts) == 3
    assert [step.status for _, step in told.steps][-1] == "error:ZeroDivisionError"
    for account in told.accounts:
        assert sum(account.parts) == account.latency_ns


def test_several_engines_and_a_restart_in_the_middle(told: Told) -> None:
    one, two = small_llama(layers=2, hidden=64), small_llama(hidden=64)
    managers = [manager_of(one), manager_of(two), manager_of(two)]
    clients = [Client(manager) for manager in managers]
    for manager in managers:
        manager.start()
    for client in clients:
        for number in range(3):
            client.send(f"same{number}", prompt(9, number), 5)
    for client in clients:
        client.receive(3)
    managers[0].stop(block=True, keep_for_next_session=True)
    managers[0].start()
    clients[0].send("same0", prompt(9, 0), 5)  # an id of the session before
    clients[0].receive(3)
    time.sleep(0.1)
    clients[0].status.clear()
    clients[0].send("same1", prompt(9, 1), 5)
    clients[0].receive(1)
    for manager in managers:
        manager.stop(block=True)
    told.drain()
    told.drain()
    assert len(told.accounts) == 9 + 2
    assert {account.status for account in told.accounts} == {"ok"}
    assert {account.output_tokens for account in told.accounts} == {5}
    assert told.notes == []


@pytest.mark.slow
def test_a_program_that_imports_transformers_later_is_seen() -> None:
    code = """
import sys
from xsp import serving
from xsp_collectors.batching import ContinuousBatching
collector = ContinuousBatching()
collector.open()
assert collector.module not in sys.modules
import transformers.generation.continuous_batching.continuous_api as api
assert api.ContinuousBatchingManager.add_request.__wrapped__
wrapped = api.ContinuousBatchingManager.add_request
collector.close()
assert api.ContinuousBatchingManager.add_request is not wrapped
assert not hasattr(api.ContinuousBatchingManager.add_request, '__wrapped__')
assert not [f for f in sys.meta_path if type(f).__module__.startswith('xsp')]
assert type(api.__loader__).exec_module
assert 'exec_module' not in vars(api.__loader__)
"""
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_another_continuous_batching_is_left_alone_with_a_note(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    monkeypatch.delattr(api.ContinuousBatchProcessor, "update_batch")
    before = api.ContinuousBatchingManager.add_request
    collector = ContinuousBatching()
    collector.open()
    assert api.ContinuousBatchingManager.add_request is before
    collector.close()
    [note] = collector.notes()
    assert "has no ContinuousBatchProcessor.update_batch" in note
    monkeypatch.undo()


def test_a_library_whose_objects_differ_runs_as_without_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(names: Sequence[str]) -> dict[str, Any]:
        return {name: lambda self, *_, **__: "own" for name in names}

    module = types.ModuleType(batching.ContinuousBatching.module)
    for owner, names in batching.NEEDED.items():
        setattr(module, owner, type(owner, (), calls(names)))
    monkeypatch.setitem(sys.modules, batching.ContinuousBatching.module, module)
    collector = ContinuousBatching()
    collector.open()
    try:
        for owner, names in batching.NEEDED.items():
            instance = getattr(module, owner)  # its objects have no attributes at all
            for name in names:
                if name != "__post_init__":
                    assert getattr(instance(), name)(1, 2, 3, other=4) == "own", name
    finally:
        collector.close()
    assert "incomplete: AttributeError" in " ".join(collector.notes())
    assert module.ContinuousBatchingManager().stop() == "own"
