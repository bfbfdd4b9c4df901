"""Steps that run beside another one, on another thread: timed and counted, and never recorded."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

from xsp.clock import monotonic_ns
from xsp.collector import Outline
from xsp.record.kinds import Kinds
from xsp.record.loop import UNKNOWN, Loop, Status
from xsp.record.phases import UNTIMED
from xsp.record.schedule import SETTLE, Schedule
from xsp.record.storing import Storing
from xsp.record.threads import Gap, Threads


class EndedStep(NamedTuple):
    """A step that ended beside another one, and is not in the loop yet."""

    words: tuple[tuple[Any, ...], ...]
    stated_samples: int | None
    thread: int
    start_ns: int
    dur_ns: int
    gap: Gap
    data_ns: int
    is_disturbed: bool
    status: Status


class StepsBeside(Protocol):
    """The part of `xsp.record.steps.Steps` that is used here."""

    batch_size: int | None
    beside: deque[EndedStep]
    kinds: Kinds
    loop: Loop
    outline: Outline
    schedule: Schedule
    step_count: int
    storing: Storing
    threads: Threads

    @property
    def rank(self) -> int:
        """Number of this process in its job."""

    @property
    def is_recording(self) -> bool:
        """Whether the collectors are on."""


class BesideStep:
    """One step that runs while another thread has a step open. Any number of threads may have one."""

    def __init__(self, steps: StepsBeside, stated_samples: int | None, by_call: bool, entered_ns: int) -> None:
        """Begin the step.

        Args:
            steps: the steps of the block.
            stated_samples: samples in it according to the program.
            by_call: whether it begins with the call that was noted last on this thread.
            entered_ns: when the program entered it.
        """
        self._steps, self._stated_samples = steps, stated_samples
        self._thread = threading.get_native_id()
        steps.outline.begin_beside(self._thread, by_call)
        gap = steps.threads.begin(self._thread, entered_ns)
        self._gap = gap if gap is not None else Gap(UNKNOWN, 0)
        self._is_disturbed = steps.is_recording or steps.storing.is_underway
        self._start_ns = monotonic_ns()

    def close(self, is_ok: bool) -> None:
        """End the step."""
        end_ns, steps = monotonic_ns(), self._steps
        steps.threads.end(self._thread, end_ns)
        steps.beside.append(
            EndedStep(
                steps.outline.end_beside(self._thread),
                self._stated_samples,
                self._thread,
                self._start_ns,
                end_ns - self._start_ns,
                self._gap,
                steps.threads.take_wait(self._thread),
                self._is_disturbed or steps.is_recording or steps.storing.is_underway,
                Status.OK if is_ok else Status.ERROR,
            )
        )
        steps.threads.go_on(self._thread, monotonic_ns())

    def abandon(self) -> None:
        """Discard the step."""
        self._steps.outline.end_beside(self._thread)
        self._steps.threads.end(self._thread, monotonic_ns())


def add_to_loop(steps: StepsBeside) -> None:
    """Add the steps that ended beside others to the loop; only the thread that has the turn may call this."""
    while steps.beside:
        step = steps.beside.popleft()
        kind, batch = steps.kinds.count_step(step.words, step.stated_samples or steps.batch_size, is_next=False)
        steps.loop.add((
            steps.rank, steps.step_count, 1, kind.number, SETTLE.rung, UNKNOWN if step.is_disturbed else 0,
            step.start_ns, step.dur_ns, step.gap.before_ns, step.data_ns, 0,
            batch.size if batch.size is not None else UNKNOWN, step.status, UNKNOWN, UNKNOWN, step.thread,
            step.gap.beside_ns, *UNTIMED,
        ))  # fmt: skip
        steps.step_count += 1
        steps.schedule.count_step(SETTLE, kind.number, step.dur_ns)
