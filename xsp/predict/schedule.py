"""Simulation of tasks on resources: start and end of each task, the critical path, and the causes of gaps.

Times are seconds. A task begins when all tasks before it have ended and all of its resources are free. A resource
serves tasks in the order in which they became ready, as a stream does; of those that became ready at the same time, in
the order in which they are listed.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp.errors import UsageError


class Cause(str, enum.Enum):
    """The kind of a task, which also names waits for it."""

    INPUT = "input"
    COPY = "copy"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    UPDATE = "update"
    OTHER = "other"
    SERVING = "cores for communication"

    def __str__(self) -> str:
        return self.value


COMPUTING = (Cause.FORWARD, Cause.BACKWARD, Cause.UPDATE, Cause.OTHER, Cause.SERVING)
"""Causes of a rank's own work between input and communication."""


class Task(NamedTuple):
    """One piece of work."""

    name: str
    cause: Cause
    seconds: float
    on: tuple[str, ...]
    """Resources that the task holds while it runs."""

    after: tuple[int, ...]
    """Indices of the tasks that must end first; smaller than the index of the task."""

    rank: int = 0
    """The class of ranks that the task belongs to; -1 for a task of all ranks."""

    step: int = 0


class Schedule(NamedTuple):
    """Start and end of each task."""

    tasks: Sequence[Task]
    starts: list[float]
    ends: list[float]
    because: list[int]
    """For each task, the index of the task whose end allowed it to begin; -1 if it waited for none."""

    def path(self, last: int) -> Iterator[int]:
        """Yield the critical path to a task, from last to first: each task ends when the one yielded before begins."""
        while last >= 0:
            yield last
            last = self.because[last]


def seconds(value: float, what: str) -> float:
    """Check a duration, and return it.

    Raises:
        UsageError: the duration is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{what} is {value}: it must be a finite number, and not negative")
    return float(value)


def simulate(tasks: Sequence[Task]) -> Schedule:
    """Return start and end of each task.

    Args:
        tasks: the tasks, each behind the tasks that it waits for.

    Raises:
        UsageError: a duration is negative or not finite, or a task waits for itself or a later one.
    """
    count = len(tasks)
    waiting = [len(task.after) for task in tasks]
    waiters: list[list[int]] = [[] for _ in range(count)]
    for number, task in enumerate(tasks):
        if not (math.isfinite(task.seconds) and task.seconds >= 0):
            raise UsageError(f"{task.name} takes {task.seconds} s: it must be a finite number, and not negative")
        for dependency in task.after:
            if not 0 <= dependency < number:
                raise UsageError(f"{task.name} waits for itself or for a later task")
            waiters[dependency].append(number)
    starts, ends, because = [0.0] * count, [0.0] * count, [-1] * count
    free: dict[str, float] = {}
    user: dict[str, int] = {}
    ready = [(0.0, number) for number in range(count) if not waiting[number]]
    heapq.heapify(ready)
    while ready:
        ready_at, number = heapq.heappop(ready)
        task = tasks[number]
        start = ready_at
        for name in task.on:
            if free.get(name, 0.0) > start:
                start, because[number] = free[name], user[name]
        starts[number], ends[number] = start, start + task.seconds
        for name in task.on:
            free[name], user[name] = ends[number], number
        for follower in waiters[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                latest = max(tasks[follower].after, key=lambda index: ends[index])
                because[follower] = latest
                heapq.heappush(ready, (ends[latest], follower))
    return Schedule(tasks, starts, ends, because)


MOST_PERIOD = 24
"""Maximum period of a steady state in steps, for example with that many workers."""


def steady(ends: Sequence[float], least: int = 0) -> tuple[int, float] | None:
    """Return the period of a steady state in steps, and the time of one step.

    Args:
        ends: ends of the steps, in order.
        least: minimum number of repeating steps: several rounds of the workers, since in the first all deliver at once.

    Returns:
        None if the last steps are not periodic.
    """
    durations = [after - before for before, after in itertools.pairwise(ends)]
    tolerance = 1e-9 * max(durations, default=0.0)
    for period in range(1, min(MOST_PERIOD, len(durations) // 3) + 1):
        last = durations[-max(3 * period, least) :]
        pairs = zip(last, last[period:], strict=False)
        if len(durations) > least and all(abs(first - second) <= tolerance for first, second in pairs):
            return period, sum(last[-period:]) / period
    return None
