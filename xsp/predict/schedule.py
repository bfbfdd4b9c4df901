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
    resources: tuple[str, ...]
    """Resources that the task occupies while it runs."""

    dependencies: tuple[int, ...]
    """Indices of the tasks that must end first; smaller than the index of the task."""

    rank: int = 0
    """The class of ranks that the task belongs to; -1 for a task of all ranks."""

    step: int = 0


class SimulatedSchedule(NamedTuple):
    """Start and end of each task."""

    tasks: Sequence[Task]
    starts: list[float]
    ends: list[float]
    blockers: list[int]
    """For each task, the index of the task whose end allowed it to begin; -1 if it waited for none."""

    def path(self, task: int) -> Iterator[int]:
        """Yield the critical path to a task, from last to first: each task ends when the one yielded before begins."""
        while task >= 0:
            yield task
            task = self.blockers[task]


def check_duration(value: float, label: str) -> float:
    """Check a duration, and return it.

    Raises:
        UsageError: the duration is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{label} is {value}: it must be a finite number, and not negative")
    return float(value)


def simulate(tasks: Sequence[Task]) -> SimulatedSchedule:
    """Return start and end of each task.

    Args:
        tasks: the tasks, each after the tasks that it waits for.

    Raises:
        UsageError: a duration is negative or not finite, or a task waits for itself or a later one.
    """
    count = len(tasks)
    dependency_counts = [len(task.dependencies) for task in tasks]
    dependents: list[list[int]] = [[] for _ in range(count)]
    for number, task in enumerate(tasks):
        if not (math.isfinite(task.seconds) and task.seconds >= 0):
            raise UsageError(f"{task.name} takes {task.seconds} s: it must be a finite number, and not negative")
        for dependency in task.dependencies:
            if not 0 <= dependency < number:
                raise UsageError(f"{task.name} waits for itself or for a later task")
            dependents[dependency].append(number)
    starts, ends, blockers = [0.0] * count, [0.0] * count, [-1] * count
    free_times: dict[str, float] = {}
    last_tasks: dict[str, int] = {}
    ready_tasks = [(0.0, number) for number in range(count) if not dependency_counts[number]]
    heapq.heapify(ready_tasks)
    while ready_tasks:
        ready_time, number = heapq.heappop(ready_tasks)
        task = tasks[number]
        start = ready_time
        for name in task.resources:
            if free_times.get(name, 0.0) > start:
                start, blockers[number] = free_times[name], last_tasks[name]
        starts[number], ends[number] = start, start + task.seconds
        for name in task.resources:
            free_times[name], last_tasks[name] = ends[number], number
        for dependent in dependents[number]:
            dependency_counts[dependent] -= 1
            if not dependency_counts[dependent]:
                latest = max(tasks[dependent].dependencies, key=lambda index: ends[index])
                blockers[dependent] = latest
                heapq.heappush(ready_tasks, (ends[latest], dependent))
    return SimulatedSchedule(tasks, starts, ends, blockers)


MOST_PERIOD = 24
"""Maximum period of a steady state in steps, for example with that many workers."""


def find_period(step_ends: Sequence[float], minimum: int = 0) -> tuple[int, float] | None:
    """Return the period of a steady state in steps, and the time of one step.

    Args:
        step_ends: ends of the steps, in order.
        minimum: minimum number of repeating steps: several rounds of the workers, which deliver at once in the first.

    Returns:
        None if the last steps are not periodic.
    """
    durations = [after - before for before, after in itertools.pairwise(step_ends)]
    tolerance = 1e-9 * max(durations, default=0.0)
    for period in range(1, min(MOST_PERIOD, len(durations) // 3) + 1):
        last_durations = durations[-max(3 * period, minimum) :]
        pairs = zip(last_durations, last_durations[period:], strict=False)
        if len(durations) > minimum and all(
            abs(duration - later_duration) <= tolerance for duration, later_duration in pairs
        ):
            return period, sum(last_durations[-period:]) / period
    return None
