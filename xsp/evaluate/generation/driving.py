"""Apply a schedule of requests to a model in this process that continues several of them together.

A waiting request is read as soon as a slot is free, before the next token of the others, so its prompt delays them: as
servers do that do not split prompts. Time to the first token counts from when a request was due.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from xsp.evaluate.generation.batching import Sequences
from xsp.evaluate.generation.prompts import Prompts
from xsp.evaluate.generation.timing import Generated
from xsp.evaluate.load import Clock, Progress, Requests, Schedule


def drive_together(
    schedule: Schedule,
    prompts: Prompts,
    sequences: Sequences,
    *,
    slots: int,
    users: int = 1,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Generated:
    """Send the requests of a schedule to a model, and return the times of their tokens.

    Args:
        schedule: when requests are due.
        prompts: what each asks for.
        sequences: the model.
        slots: most requests that it continues together.
        users: in a closed loop, how many requests wait or run at any time.
        clock: real time, if not given.
        progress: called after each request.
    """
    return _Run(schedule, prompts, sequences, slots, users, clock or Clock(), progress).run()


class _Run:
    """The execution of a schedule."""

    def __init__(
        self, schedule: Schedule, prompts: Prompts, sequences: Sequences, slots: int, users: int, clock: Clock,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._schedule, self._prompts, self._sequences = schedule, prompts, sequences
        self._slots, self._clock, self._progress = slots, clock, progress
        self._is_open = schedule.due_ns is not None
        n = self._count = len(schedule)
        begin = clock.now_ns()
        self._due = np.full(n, begin, np.int64) if schedule.due_ns is None else schedule.due_ns + begin
        self._issued, self._start, self._end = (np.zeros(n, np.int64) for _ in range(3))
        self._token_ns: list[list[int]] = [[] for _ in range(n)]
        self._waiting: deque[int] = deque()
        self._running: set[int] = set()
        self._arrived = self._ended = 0
        if not self._is_open:
            for _ in range(min(users, n)):
                self._arrive(begin, begin)

    def run(self) -> Generated:
        """Serve all requests."""
        while self._ended < self._count:
            now = self._clock.now_ns()
            if self._is_open:
                while self._arrived < self._count and self._due[self._arrived] <= now:
                    self._arrive(int(self._due[self._arrived]), int(self._due[self._arrived]))
            if not self._waiting and not self._running:
                due = int(self._due[self._arrived])
                self._clock.wait_until(due)
                self._arrive(due, self._clock.now_ns())
            while self._waiting and len(self._running) < self._slots:
                self._begin(self._waiting.popleft())
            if self._running:
                self._count_tokens(list(self._sequences.step()))
        requests = Requests(
            self._due, self._issued, self._start, self._end, np.ones(self._count, np.int64),
            is_open_loop=self._is_open, servers=self._slots, schedule_length=self._count,
        )  # fmt: skip
        return Generated(requests, self._prompts.counts, tuple(np.array(times, np.int64) for times in self._token_ns),
                         self._prompts.output_counts.copy())  # fmt: skip

    def _arrive(self, due: int, issued: int) -> None:
        number = self._arrived
        self._due[number], self._issued[number] = due, issued
        self._waiting.append(number)
        self._arrived += 1

    def _begin(self, number: int) -> None:
        self._start[number] = self._clock.now_ns()
        self._sequences.begin(number, self._prompts.tokens[number])
        self._running.add(number)
        self._count_tokens([number])

    def _count_tokens(self, numbers: list[int]) -> None:
        """Note the time of a new token of each of some requests, and end those that have all of theirs."""
        now = self._clock.now_ns()
        complete = []
        for number in numbers:
            self._token_ns[number].append(now)
            if len(self._token_ns[number]) == self._prompts.output_counts[number]:
                complete.append(number)
        if not complete:
            return
        self._sequences.end(complete)
        for number in complete:
            self._running.remove(number)
            self._end[number] = now
            self._ended += 1
            if self._progress is not None:
                self._progress(self._ended, self._count)
            if not self._is_open and self._arrived < self._count:
                self._arrive(now, now)
