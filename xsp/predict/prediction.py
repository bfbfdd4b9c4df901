"""Time of a step on N ranks, its parts and waits, and the gain of improving each constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from xsp.predict import schedule, training
from xsp.predict.schedule import Cause, Schedule
from xsp.predict.training import ALL, NO_LINK, Input, Job, Slow, Straggler, Work

STEPS = (8, 32, 128)
"""Numbers of simulated steps, the next one if the steps have not become periodic."""

EXPOSED = "exposed communication"
WAITING = "waiting for another rank"
PARTS = (*(str(each) for each in Cause if each is not Cause.COMMUNICATION), EXPOSED, WAITING)
"""Parts of a step as seen by a rank; they add up to the step."""


@dataclass(frozen=True)
class Predicted:
    """A step of a job; durations are seconds."""

    job: Job
    step: float
    parts: Mapping[str, float]
    """The step as seen by the mean rank, by `PARTS`."""

    path: Mapping[str, float]
    """The step along its critical path, by cause."""

    communication: float
    """All collectives of a step, hidden or not; 0 on one rank."""

    overlap: float | None
    """The share of communication that DistributedDataParallel's own log calls overlapped (see `_overlap`), 0 to 1; None
    on one rank, without gradients, and if parameters are sharded."""

    steady: bool
    """Whether steps became periodic; if not, the figures are means over the later half."""

    schedule: Schedule
    """Schedule of the last simulated steps."""

    @property
    def bound_by(self) -> str:
        """The largest part of the critical path: computation, input, copy or communication."""
        totals: dict[str, float] = defaultdict(float)
        for cause, seconds in self.path.items():
            if cause == Cause.SERVING:  # time that collectives take from the cores
                cause = str(Cause.COMMUNICATION)
            totals["computation" if cause in map(str, schedule.COMPUTING) else cause] += seconds
        return max(totals, key=lambda kind: totals[kind]) if totals else "computation"

    @property
    def hidden(self) -> float:
        """Communication while the rank computes or waits for other ranks; never negative."""
        return max(0.0, self.communication - self.parts[EXPOSED])


def predict(work: Work, job: Job, *, fine: bool = False) -> Predicted:
    """Return the time of a step in the steady state, and its parts, in seconds.

    Args:
        work: the step of one rank.
        job: number of ranks, link and other settings.
        fine: keep a task for each layer, for a chart.

    Raises:
        UsageError: a value is negative or not finite, or there are no layers.
    """
    slow = job.straggler
    if slow.who is Slow.TOGETHER and slow.factor != 1.0:
        return _together(work, job, fine)
    simulated, period, step, steady = _simulated(work, job, fine)
    rank_classes = training.classes(job)
    updates = [_updates(simulated, rank) for rank in range(len(rank_classes))]
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for rank, (count, _) in enumerate(rank_classes):
        for part, seconds in _account(simulated, rank, updates[rank][-1 - period], updates[rank][-1]).items():
            parts[part] += seconds / period * count / job.ranks
    window = sum(task.seconds for task in simulated.tasks if task.cause is Cause.COMMUNICATION)
    steps = simulated.tasks[-1].step + 1
    return Predicted(
        job, step, parts, _along(simulated, updates, period, step), window / steps, _overlap(simulated, job, period),
        steady, _of_steps(simulated, steps - period),
    )  # fmt: skip


def _together(work: Work, job: Job, fine: bool) -> Predicted:
    """Return the weighted mean of fast and slow steps, since all ranks are slow in the same one of N steps."""
    fast = predict(work, replace(job, straggler=Straggler()), fine=fine)
    factor = job.straggler.factor
    slow = predict(work.scaled(computing=factor, update=factor), replace(job, straggler=Straggler()), fine=fine)
    share = 1 / job.ranks

    def mean(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
        return {key: first.get(key, 0.0) * (1 - share) + second.get(key, 0.0) * share for key in {**first, **second}}

    step = fast.step * (1 - share) + slow.step * share
    overlap = fast.overlap
    if overlap is not None and slow.overlap is not None:
        overlap += (slow.overlap - overlap) * share
    return replace(
        fast, job=job, step=step, parts=mean(fast.parts, slow.parts), path=mean(fast.path, slow.path),
        overlap=overlap,
        steady=fast.steady and slow.steady,
    )  # fmt: skip


def _simulated(work: Work, job: Job, fine: bool) -> tuple[Schedule, int, float, bool]:
    """Return the schedule of simulated steps, their period, the time of a step, and whether steps became periodic."""
    for steps in STEPS:
        simulated = schedule.simulate(training.tasks(work, job, steps, fine=fine))
        ends = [max(rank_ends) for rank_ends in zip(*([simulated.ends[number] for number in _updates(simulated, rank)]
                                              for rank in range(len(training.classes(job)))), strict=True)]  # fmt: skip
        repeats = schedule.steady(ends, 2 * work.input.workers + 2)
        if repeats is not None:
            return simulated, *repeats, True
    half = len(ends) // 2
    return simulated, half, (ends[-1] - ends[-1 - half]) / half, False


def _updates(simulated: Schedule, rank: int) -> list[int]:
    return [number for number, task in enumerate(simulated.tasks) if task.cause is Cause.UPDATE and task.rank == rank]


def _of_steps(simulated: Schedule, first: int) -> Schedule:
    """Return the schedule from step `first` on, without dependencies on earlier steps."""
    numbers = [number for number, task in enumerate(simulated.tasks) if task.step >= first]
    new_numbers = {number: new for new, number in enumerate(numbers)}
    tasks = [
        simulated.tasks[number]._replace(
            after=tuple(
                new_numbers[dependency] for dependency in simulated.tasks[number].after if dependency in new_numbers
            )
        )
        for number in numbers
    ]
    return Schedule(
        tasks, [simulated.starts[number] for number in numbers], [simulated.ends[number] for number in numbers],
        [new_numbers.get(simulated.because[number], -1) for number in numbers],
    )  # fmt: skip


# --- where the time goes -----------------------------------------------------------------------------------------


def _account(simulated: Schedule, rank: int, since: int, until: int) -> dict[str, float]:
    """Return the seconds of work and of waits of a rank between the ends of two of its updates, by part."""
    parts: dict[str, float] = defaultdict(float)
    stream = f"compute {rank}"
    clock = simulated.ends[since]
    for number in range(since + 1, until + 1):
        task = simulated.tasks[number]
        if stream not in task.on:
            continue
        for cause, seconds in _waited(simulated, number, clock):
            parts[_seen(simulated, cause, rank)] += seconds
        parts[str(task.cause)] += task.seconds
        clock = simulated.ends[number]
    return parts


def _waited(simulated: Schedule, number: int, since: float) -> Iterable[tuple[int, float]]:
    """Yield the tasks that a task waited for after a point in time, and the seconds of each wait."""
    until = simulated.starts[number]
    number = simulated.because[number]
    while number >= 0 and until > since:
        begin = max(simulated.starts[number], since)
        yield number, until - begin
        until, number = begin, simulated.because[number]


def _seen(simulated: Schedule, number: int, rank: int) -> str:
    """Return the part of a rank's step that a wait for a task belongs to."""
    task = simulated.tasks[number]
    if task.rank == ALL:
        return EXPOSED
    return str(task.cause) if task.rank == rank else WAITING


def _overlap(simulated: Schedule, job: Job, period: int) -> float | None:
    """Return the share of communication within the backward pass, as DistributedDataParallel counts it.

    In its log (`_get_ddp_logging_data`, `reducer.cpp`) communication lasts from the launch of the first bucket until
    all gradients are back in place, also while nothing is sent, and is overlapped until the backward pass has ended.
    This is not a share of the time of collectives: a short one that is launched early counts with all of the backward
    pass that follows.
    """
    if job.ranks == 1 or job.sharded:
        return None
    if not job.overlap:
        return 0.0 if any(task.cause is Cause.COMMUNICATION for task in simulated.tasks) else None
    first = simulated.tasks[-1].step + 1 - period
    shares = []
    for rank, (count, _) in enumerate(training.classes(job)):
        launched: dict[int, float] = {}
        computed: dict[int, float] = {}
        update_starts: dict[int, float] = {}
        for number, task in enumerate(simulated.tasks):
            step = task.step
            if step < first:
                continue
            if task.cause is Cause.COMMUNICATION and step not in launched:
                rank_ends = [simulated.ends[index] for index in task.after if simulated.tasks[index].rank == rank]
                launched[step] = max(rank_ends, default=simulated.starts[number])
            elif task.rank == rank and task.cause is Cause.UPDATE:
                update_starts[step] = simulated.starts[number]
            elif task.rank == rank and task.cause in (Cause.BACKWARD, Cause.SERVING) and task.name != training.OUT:
                computed[step] = simulated.ends[number]
        total = sum(update_starts[step] - launch for step, launch in launched.items())
        if total > 0:
            overlapped = sum(max(0.0, computed[step] - launch) for step, launch in launched.items())
            shares.append((count, min(1.0, overlapped / total)))
    ranks = sum(count for count, _ in shares)
    return sum(count * share for count, share in shares) / ranks if ranks else None


def _along(simulated: Schedule, last: list[list[int]], period: int, step: float) -> dict[str, float]:
    """Return the seconds of a step along the critical path, by cause.

    The path always ends in the last update, whatever limits the steps. It is therefore evaluated in the middle of all
    steps, where it has reached the limiting tasks.
    """
    final = max((updates[-1] for updates in last), key=lambda number: simulated.ends[number])
    window = period * step
    periods_back = min(len(last[0]) // period // 2, int(simulated.ends[final] / window) - 1 if window else 0)
    until = simulated.ends[final] - max(0, periods_back) * window
    parts: dict[str, float] = defaultdict(float)
    for number in simulated.path(final):
        seconds = min(simulated.ends[number], until) - max(simulated.starts[number], until - window)
        if seconds > 0:
            parts[str(simulated.tasks[number].cause)] += seconds / period
    return dict(parts)


# --- what if -----------------------------------------------------------------------------------------------------


class Worth(NamedTuple):
    """The gain of improving a constant of a step."""

    constant: str
    per_percent: float
    """Seconds of a step that are saved if the constant is one percent smaller."""

    if_halved: float
    """Seconds of a step that are saved if the constant is halved."""


_CONSTANTS = (
    "computation", "update", "reading", "decoding", "copying", "latency of the link", "bandwidth of the link",
    "adding in collectives", "slower ranks",
)  # fmt: skip


def worth(work: Work, job: Job) -> list[Worth]:
    """Return the time that improving each constant of the step saves, the largest first.

    `slower ranks` is the additional time of slow ranks compared with the others.
    """
    current = predict(work, job).step
    gains = []
    for constant in _CONSTANTS:
        if not _has(constant, work, job):
            continue
        less, half = (current - predict(*_changed(constant, work, job, factor)).step for factor in (0.99, 0.5))
        gains.append(Worth(constant, max(0.0, less), max(0.0, half)))
    return sorted(gains, key=lambda entry: -entry.if_halved)


def _has(constant: str, work: Work, job: Job) -> bool:
    loader, link = work.input, job.link if job.ranks > 1 else NO_LINK
    return {
        "computation": any(layer.forward or layer.backward for layer in work.layers) or work.other > 0,
        "update": work.update > 0,
        "reading": loader.read > 0,
        "decoding": loader.decode > 0,
        "copying": loader.copy > 0,
        "latency of the link": link.alpha > 0 and bool(work.arrivals),
        "bandwidth of the link": link.beta > 0 and bool(work.arrivals),
        "adding in collectives": link.gamma > 0 and bool(work.arrivals),
        "slower ranks": job.straggler.factor > 1,
    }[constant]


def _changed(constant: str, work: Work, job: Job, factor: float) -> tuple[Work, Job]:
    loader, link, slow = work.input, job.link, job.straggler
    inputs: dict[str, Input] = {
        "reading": replace(loader, read=loader.read * factor),
        "decoding": replace(loader, decode=loader.decode * factor),
        "copying": replace(loader, copy=loader.copy * factor),
    }
    links = {
        "latency of the link": replace(link, alpha=link.alpha * factor),
        "bandwidth of the link": replace(link, beta=link.beta * factor),
        "adding in collectives": replace(link, gamma=link.gamma * factor),
    }
    if constant in inputs:
        return replace(work, input=inputs[constant]), job
    if constant in links:
        return work, replace(job, link=links[constant])
    if constant == "slower ranks":
        return work, replace(job, straggler=replace(slow, factor=1 + (slow.factor - 1) * factor))
    return work.scaled(**{"computing" if constant == "computation" else "update": factor}), job
