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
        found: dict[str, float] = defaultdict(float)
        for cause, took in self.path.items():
            if cause == Cause.SERVING:  # time that collectives take from the cores
                cause = str(Cause.COMMUNICATION)
            found["computation" if cause in map(str, schedule.COMPUTING) else cause] += took
        return max(found, key=lambda each: found[each]) if found else "computation"

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
    found, period, step, steady = _simulated(work, job, fine)
    those = training.classes(job)
    last = [_updates(found, rank) for rank in range(len(those))]
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for rank, (count, _) in enumerate(those):
        for part, took in _account(found, rank, last[rank][-1 - period], last[rank][-1]).items():
            parts[part] += took / period * count / job.ranks
    window = sum(each.seconds for each in found.tasks if each.cause is Cause.COMMUNICATION)
    steps = found.tasks[-1].step + 1
    return Predicted(
        job, step, parts, _along(found, last, period, step), window / steps, _overlap(found, job, period), steady,
        _of_steps(found, steps - period),
    )  # fmt: skip


def _together(work: Work, job: Job, fine: bool) -> Predicted:
    """Return the weighted mean of fast and slow steps, since all ranks are slow in the same one of N steps."""
    fast = predict(work, replace(job, straggler=Straggler()), fine=fine)
    factor = job.straggler.factor
    slow = predict(work.scaled(computing=factor, update=factor), replace(job, straggler=Straggler()), fine=fine)
    share = 1 / job.ranks

    def mean(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {each: one.get(each, 0.0) * (1 - share) + other.get(each, 0.0) * share for each in {**one, **other}}

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
        found = schedule.simulate(training.tasks(work, job, steps, fine=fine))
        ends = [max(those) for those in zip(*([found.ends[each] for each in _updates(found, rank)]
                                              for rank in range(len(training.classes(job)))), strict=True)]  # fmt: skip
        repeats = schedule.steady(ends, 2 * work.input.workers + 2)
        if repeats is not None:
            return found, *repeats, True
    half = len(ends) // 2
    return found, half, (ends[-1] - ends[-1 - half]) / half, False


def _updates(found: Schedule, rank: int) -> list[int]:
    return [number for number, task in enumerate(found.tasks) if task.cause is Cause.UPDATE and task.rank == rank]


def _of_steps(found: Schedule, first: int) -> Schedule:
    """Return the schedule from step `first` on, without dependencies on earlier steps."""
    kept = [number for number, task in enumerate(found.tasks) if task.step >= first]
    place = {number: new for new, number in enumerate(kept)}
    tasks = [
        found.tasks[each]._replace(after=tuple(place[one] for one in found.tasks[each].after if one in place))
        for each in kept
    ]
    return Schedule(
        tasks, [found.starts[each] for each in kept], [found.ends[each] for each in kept],
        [place.get(found.because[each], -1) for each in kept],
    )  # fmt: skip


# --- where the time goes -----------------------------------------------------------------------------------------


def _account(found: Schedule, rank: int, since: int, until: int) -> dict[str, float]:
    """Return the seconds of work and of waits of a rank between the ends of two of its updates, by part."""
    parts: dict[str, float] = defaultdict(float)
    stream = f"compute {rank}"
    at = found.ends[since]
    for number in range(since + 1, until + 1):
        task = found.tasks[number]
        if stream not in task.on:
            continue
        for cause, took in _waited(found, number, at):
            parts[_seen(found, cause, rank)] += took
        parts[str(task.cause)] += task.seconds
        at = found.ends[number]
    return parts


def _waited(found: Schedule, number: int, since: float) -> Iterable[tuple[int, float]]:
    """Yield the tasks that a task waited for after a point in time, and the seconds of each wait."""
    until = found.starts[number]
    number = found.because[number]
    while number >= 0 and until > since:
        begin = max(found.starts[number], since)
        yield number, until - begin
        until, number = begin, found.because[number]


def _seen(found: Schedule, number: int, rank: int) -> str:
    """Return the part of a rank's step that a wait for a task belongs to."""
    task = found.tasks[number]
    if task.rank == ALL:
        return EXPOSED
    return str(task.cause) if task.rank == rank else WAITING


def _overlap(found: Schedule, job: Job, period: int) -> float | None:
    """Return the share of communication within the backward pass, as DistributedDataParallel counts it.

    In its log (`_get_ddp_logging_data`, `reducer.cpp`) communication lasts from the launch of the first bucket until
    all gradients are back in place, also while nothing is sent, and is overlapped until the backward pass has ended.
    This is not a share of the time of collectives: a short one that is launched early counts with all of the backward
    pass that follows.
    """
    if job.ranks == 1 or job.sharded:
        return None
    if not job.overlap:
        return 0.0 if any(each.cause is Cause.COMMUNICATION for each in found.tasks) else None
    first = found.tasks[-1].step + 1 - period
    shares = []
    for rank, (count, _) in enumerate(training.classes(job)):
        launched: dict[int, float] = {}
        computed: dict[int, float] = {}
        back: dict[int, float] = {}
        for number, task in enumerate(found.tasks):
            step = task.step
            if step < first:
                continue
            if task.cause is Cause.COMMUNICATION and step not in launched:
                own = [found.ends[each] for each in task.after if found.tasks[each].rank == rank]
                launched[step] = max(own, default=found.starts[number])
            elif task.rank == rank and task.cause is Cause.UPDATE:
                back[step] = found.starts[number]
            elif task.rank == rank and task.cause in (Cause.BACKWARD, Cause.SERVING) and task.name != training.OUT:
                computed[step] = found.ends[number]
        whole = sum(back[step] - at for step, at in launched.items())
        if whole > 0:
            beside = sum(max(0.0, computed[step] - at) for step, at in launched.items())
            shares.append((count, min(1.0, beside / whole)))
    ranks = sum(count for count, _ in shares)
    return sum(count * share for count, share in shares) / ranks if ranks else None


def _along(found: Schedule, last: list[list[int]], period: int, step: float) -> dict[str, float]:
    """Return the seconds of a step along the critical path, by cause.

    The path always ends in the last update, whatever limits the steps. It is therefore evaluated in the middle of all
    steps, where it has reached the limiting tasks.
    """
    final = max((those[-1] for those in last), key=lambda each: found.ends[each])
    whole = period * step
    back = min(len(last[0]) // period // 2, int(found.ends[final] / whole) - 1 if whole else 0)
    until = found.ends[final] - max(0, back) * whole
    parts: dict[str, float] = defaultdict(float)
    for number in found.path(final):
        took = min(found.ends[number], until) - max(found.starts[number], until - whole)
        if took > 0:
            parts[str(found.tasks[number].cause)] += took / period
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
    now = predict(work, job).step
    found = []
    for constant in _CONSTANTS:
        if not _has(constant, work, job):
            continue
        less, half = (now - predict(*_changed(constant, work, job, factor)).step for factor in (0.99, 0.5))
        found.append(Worth(constant, max(0.0, less), max(0.0, half)))
    return sorted(found, key=lambda each: -each.if_halved)


def _has(constant: str, work: Work, job: Job) -> bool:
    given, link = work.input, job.link if job.ranks > 1 else NO_LINK
    return {
        "computation": any(each.forward or each.backward for each in work.layers) or work.other > 0,
        "update": work.update > 0,
        "reading": given.read > 0,
        "decoding": given.decode > 0,
        "copying": given.copy > 0,
        "latency of the link": link.alpha > 0 and bool(work.arrivals),
        "bandwidth of the link": link.beta > 0 and bool(work.arrivals),
        "adding in collectives": link.gamma > 0 and bool(work.arrivals),
        "slower ranks": job.straggler.factor > 1,
    }[constant]


def _changed(constant: str, work: Work, job: Job, factor: float) -> tuple[Work, Job]:
    given, link, slow = work.input, job.link, job.straggler
    inputs: dict[str, Input] = {
        "reading": replace(given, read=given.read * factor),
        "decoding": replace(given, decode=given.decode * factor),
        "copying": replace(given, copy=given.copy * factor),
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
