"""The process that times, as its parent sees it: sittings are sent to it, and what crashes it is named.

A spec that crashes the process, takes too long or more memory than it may is marked, and the others of its sitting are
sent to another process.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from xsp import processes
from xsp.bench.environment import caches
from xsp.bench.spec import Spec, Status, Timing, slowed, untimed
from xsp.bench.worker import CELL
from xsp.errors import BenchError
from xsp.version import __version__

_CODE = processes.calling("xsp.bench.worker", "work")

START_S = 60.0
"""For a process to import torch."""

GRACE_S = 3.0
"""After the end of a sitting, for what ran then to end."""

LOOK_S = 0.5
DISTURBED = 1.05

MOST_ROTATED_BYTES = 64 << 20
LEAST_ROTATED_BYTES = 16 << 20

Told = Callable[[Spec, int], None]
"""Called with a spec that was timed, and how many of the sitting are."""


@dataclass(frozen=True)
class Limits:
    """What one spec may take."""

    seconds: float = 20.0
    """For one batch, or to be prepared."""

    memory_bytes: int | None = None
    """For its tensors and what it allocates; half of what is free unless told otherwise."""


def rotated_bytes() -> int:
    """Return how much the copies of weights take together: a quarter more than the last cache, within limits."""
    last = max((size for _, size in caches()), default=LEAST_ROTATED_BYTES)
    return min(max(last * 5 // 4, LEAST_ROTATED_BYTES), MOST_ROTATED_BYTES)


class Turns:
    """Times sittings of specs of one number of threads."""

    def __init__(self, threads: int, limits: Limits = Limits()) -> None:
        self.threads = threads
        self.limits = limits
        self.memory_bytes = limits.memory_bytes or (_free_bytes() or 4 << 30) // 2
        self._process: processes.Asked | None = None

    def __enter__(self) -> Turns:
        # a mapped file says what runs: a message for each batch would wake this process beside what is timed
        self._file = tempfile.TemporaryFile()
        self._file.truncate(CELL.size)
        self._cell = mmap.mmap(self._file.fileno(), CELL.size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._cell.close()
        self._file.close()

    def start(self) -> float:
        """Start the process unless it runs, and return the seconds until it was ready: it imports torch.

        Raises:
            BenchError: torch is not installed, or the process cannot be started.
        """
        began = time.monotonic()
        if self._process is None:
            self._started()
        return time.monotonic() - began

    def sit(
        self, specs: Sequence[Spec], until: float, told: Told = lambda spec, done: None, seed: int = 0
    ) -> list[Timing]:
        """Return the timings of specs that take turns; those that the time is not enough for are not among them.

        Args:
            specs: all of the number of threads of these turns.
            until: as `time.monotonic` counts.
            told: see `Told`.
            seed: of the order in a round.

        Raises:
            BenchError: torch is not installed, or the process cannot be started.
        """
        left = list(specs)
        found: list[Timing] = []
        while left and time.monotonic() < until:
            process = self._process or self._started()
            asked = {
                "specs": [each.to_plain() for each in left],
                "seconds": max(0.0, until - time.monotonic()),
                "rotated_bytes": rotated_bytes(),
                "seed": seed,
            }
            self._cell[:] = CELL.pack(-1, 0)
            self._asked_at = time.monotonic()
            process.ask(asked)
            answers, ratio = self._answers(process, left, until, told, len(found))
            found += [_stamped(each, ratio) for each in answers.values()]
            if ratio is not None:
                break
            crashed = self._crashed(left, answers, until)
            if crashed is not None:
                found.append(_stamped(crashed, None))
            done = {each.key for each in found}
            left = [each for each in left if each.key not in done]
        return found

    def _answers(
        self, process: processes.Asked, specs: Sequence[Spec], until: float, told: Told, before: int
    ) -> tuple[dict[int, Timing], float | None]:
        """Return the timings by place, and the drift of the canaries; None if the process did not come to an end."""
        found: dict[int, Timing] = {}
        while True:
            ended = process.has_ended()  # before the look: what it told at its end is read first
            line = process.answer(time.monotonic() + LOOK_S)
            if line:
                answer = json.loads(line)
                if "canary_ratio" in answer:
                    return found, float(answer["canary_ratio"])
                place = answer["place"]
                found[place] = _timing(specs[place], answer["timing"])
                told(specs[place], before + len(found))
            elif ended or self._is_late(until):
                return found, None

    def _is_late(self, until: float) -> bool:
        place, since = CELL.unpack(self._cell[:])
        now = time.monotonic()
        if since == 0:  # it has not read the question
            return now > max(until, self._asked_at + START_S)
        allowed = self.limits.seconds if place >= 0 else START_S
        return now - since / 1e9 > allowed or now > until + max(GRACE_S, self.limits.seconds)

    def _crashed(self, specs: Sequence[Spec], answers: dict[int, Timing], until: float) -> Timing | None:
        """End a process that did not come to an end, and return what is known of the spec that it ran."""
        assert self._process is not None
        late = not self._process.has_ended()
        place, since = CELL.unpack(self._cell[:])
        code = self._end()
        if since == 0 or not 0 <= place < len(specs) or place in answers:
            if late or answers:  # the others are timed in another process
                return None
            raise BenchError(f"the process that times ended by itself ({processes.ending(code)})")
        if late and time.monotonic() - since / 1e9 <= self.limits.seconds:
            return None  # the budget is over
        if late:
            said = f"one batch of it takes more than {self.limits.seconds:g} s"
            return untimed(specs[place], Status.TIMED_OUT, said)
        if code == -signal.SIGKILL:
            said = "the process that ran it was killed, as the system does where memory ends"
            return untimed(specs[place], Status.TOO_LARGE, said)
        return untimed(specs[place], Status.FAILED, f"it ended the process that ran it ({processes.ending(code)})")

    def _started(self) -> processes.Asked:
        """Return a process that has imported torch."""
        process = self._start()
        until = time.monotonic() + START_S
        while not process.answer(time.monotonic() + LOOK_S):
            late = time.monotonic() > until
            if late or process.has_ended():
                code = self._end()
                why = f"it was not ready within {START_S:.0f} s" if late else processes.ending(code)
                raise BenchError(f"the process that times did not start ({why}); `xsp doctor` says what is missing")
        return process

    def _start(self) -> processes.Asked:
        environment = {
            **processes.environment(),
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
        }
        handle = self._file.fileno()
        try:
            self._process = processes.Asked(
                _CODE, str(os.getpid()), str(self.threads), str(handle), str(self.memory_bytes),
                env=environment, pass_fds=(handle,),
            )  # fmt: skip
        except OSError as error:
            raise BenchError(f"the process that times cannot be started ({error.strerror})") from error
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        return 0 if process is None else process.end()


def _timing(spec: Spec, found: dict[str, Any]) -> Timing:
    named = {**found, "status": Status(found["status"]), "kernels": tuple(found["kernels"])}
    return replace(untimed(spec), **named)


def _stamped(timing: Timing, ratio: float | None) -> Timing:
    """Return a timing with the drift of its whole sitting."""
    ratio = max(filter(None, (ratio, timing.canary_ratio)), default=None)
    if timing.trimmed_ns is None or ratio is None:
        return replace(timing, taken_ns=timing.taken_ns or time.time_ns(), xsp=__version__)
    reasons = [timing.reason] if timing.reason else []
    if ratio >= DISTURBED:
        reasons.append(f"disturbed: fixed work of the same sitting took {slowed(ratio)}")
    return replace(timing, canary_ratio=ratio, reason="; ".join(reasons))


def _free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
