"""Ranks of gloo that are timed: their batches, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xsp.bench import ranks, transfers


@pytest.mark.slow
def test_ranks_end_when_what_started_them_is_killed() -> None:
    pytest.importorskip("torch")
    code = (
        "from xsp.bench.ranks import Ranks\nfrom xsp.bench.partner import Partner\nimport time\n"
        "if __name__ == '__main__':\n"
        "    those, other = Ranks(2, 1), Partner(4096)\n"
        "    print(*[each.pid for each in those._processes], other._process.pid, flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    numbers = [int(each) for each in process.stdout.readline().split()]
    assert len(numbers) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(map(_runs, numbers)):
        time.sleep(0.05)
    assert not any(map(_runs, numbers))


def _runs(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_rank_that_cannot_start_says_so_without_a_message_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.distributed, "FileStore", fail)
    monkeypatch.setattr(ranks.processes, "end_with_parent", lambda parent: None)
    answers, end = os.pipe()
    ranks.run_rank(os.getppid(), 0, 2, torch.get_num_threads(), -1, end)
    with os.fdopen(answers) as stream:
        assert json.loads(stream.read()) == {"error": "gloo cannot be used: AssertionError"}


@pytest.mark.parametrize(("first_ns", "count", "many"), [(1_250_000, 4, 40), (200_000_000, 4, 1), (1_250_000, 2, 1)])
def test_batches_of_more_ranks_than_cores_are_long(
    monkeypatch: pytest.MonkeyPatch, first_ns: int, count: int, many: int
) -> None:
    pytest.importorskip("torch")
    asked: list[int] = []

    class Four:
        def measure_ns(self, what: object, calls: int) -> int:
            asked.append(calls)
            return first_ns * calls

    monkeypatch.setattr("xsp.processes.cores", lambda: 2)
    monkeypatch.setattr(ranks, "_ranks", lambda count, threads: Four())
    *_, spec = transfers.of_collectives(["together-product"], (count,))
    prepared = ranks.Collectives().prepare(spec, 0, 1 << 30)
    assert prepared.timed(3) == 3 * first_ns
    assert asked == [1, 3 * many]


def test_more_ranks_than_cores_compute_for_as_long_as_all_of_them_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rank:
        def __init__(self, began: int, ended: int) -> None:
            self.said = json.dumps({"began": began, "ended": ended})

        def ask(self, what: object) -> None:
            pass

        def answer(self, until: float) -> str:
            return self.said

    monkeypatch.setattr("xsp.processes.cores", lambda: 2)
    those = ranks.Ranks.__new__(ranks.Ranks)
    those._processes = [Rank(0, 100), Rank(10, 110), Rank(100, 200), Rank(110, 210)]  # type: ignore[list-item]
    assert those.measure_ns({"what": "together-product", "ranks": 4}, 1) == 210
    assert those.measure_ns({"what": "all_reduce", "ranks": 4}, 1) == 100
    assert those.measure_ns({"what": "together-product", "ranks": 2}, 1) == 100
