"""Time of a step on N ranks, its parts and waits, and the gain of improving each constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from xsp.predict import schedule, training
from xsp.predict.schedule import Cause, SimulatedSchedule
from xsp.predict.training import ALL_RANKS, NO_LINK, Input, Job, SlowRanks, Straggler, Work

STEPS = (8, 32, 128)
"""Numbers of simulated steps, the next one if the steps have not become periodic."""

EXPOSED = "exposed communication"
WAITING = "waiting for another rank"
PARTS = (*(str(cause) for cause in Cause if cause is not Cause.COMMUNICATION), EXPOSED, WAITING)
"""Parts of a step as seen by a rank; they add up to the step."""


@dataclass(frozen=True)
class PredictedStep:
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

    is_steady: bool
    """Whether steps became periodic; if not, the figures are means over the later half."""

    schedule: SimulatedSchedule
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


def predict(work: Work, job: Job, *, per_layer: bool = False) -> PredictedStep:
    """Return the time of a step in the steady state, and its parts, in seconds.

    Args:
        work: the step of one rank.
        job: number of ranks, link and other settings.
        per_layer: keep a task for each layer, for a chart.

    Raises:
        UsageError: a value is negative or not finite, or there are no layers.
    """
    straggler = job.straggler
    if straggler.slow_ranks is SlowRanks.TOGETHER and straggler.factor != 1.0:
        return _mean_of_steps(work, job, per_layer)
    simulation, period, step, steady = _simulate(work, job, per_layer)
    rank_classes = training.rank_classes(job)
    updates = [_update_indices(simulation, rank) for rank in range(len(rank_classes))]
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for rank, (count, _) in enumerate(rank_classes):
        for part, seconds in _rank_parts(simulation, rank, updates[rank][-1 - period], updates[rank][-1]).items():
            parts[part] += seconds / period * count / job.ranks
    window = sum(task.seconds for task in simulation.tasks if task.cause is Cause.COMMUNICATION)
    steps = simulation.tasks[-1].step + 1
    return PredictedStep(
        job, step, parts, _critical_path(simulation, updates, period, step), window / steps,
        _overlap(simulation, job, period), steady, _last_steps(simulation, steps - period),
    )  # fmt: skip


def _mean_of_steps(work: Work, job: Job, per_layer: bool) -> PredictedStep:
    """Return the weighted mean of fast and slow steps, since all ranks are slow in the same one of N steps."""
    fast = predict(work, replace(job, straggler=Straggler()), per_layer=per_layer)
    factor = job.straggler.factor
    slow = predict(
        work.scaled(computing=factor, update=factor), replace(job, straggler=Straggler()), per_layer=per_layer
    )
    slow_share = 1 / job.ranks

    def mean(fast_values: Mapping[str, float], slow_values: Mapping[str, float]) -> dict[str, float]:
        return {
            key: fast_values.get(key, 0.0) * (1 - slow_share) + slow_values.get(key, 0.0) * slow_share
            for key in {**fast_values, **slow_values}
        }

    step = fast.step * (1 - slow_share) + slow.step * slow_share
    overlap = fast.overlap
    if overlap is not None and slow.overlap is not None:
        overlap += (slow.overlap - overlap) * slow_share
    return replace(
        fast, job=job, step=step, parts=mean(fast.parts, slow.parts), path=mean(fast.path, slow.path),
        overlap=overlap,
        is_steady=fast.is_steady and slow.is_steady,
    )  # fmt: skip


def _simulate(work: Work, job: Job, per_layer: bool) -> tuple[SimulatedSchedule, int, float, bool]:
    """Return the schedule of simulated steps, their period, the time of a step, and whether steps became periodic."""
    for steps in STEPS:
        simulation = schedule.simulate(training.tasks(work, job, steps, per_layer=per_layer))
        ends_by_rank = [
            [simulation.ends[number] for number in _update_indices(simulation, rank)]
            for rank in range(len(training.rank_classes(job)))
        ]
        step_ends = [max(rank_ends) for rank_ends in zip(*ends_by_rank, strict=True)]
        steady_state = schedule.find_period(step_ends, 2 * work.input.workers + 2)
        if steady_state is not None:
            return simulation, *steady_state, True
    half = len(step_ends) // 2
    return simulation, half, (step_ends[-1] - step_ends[-1 - half]) / half, False


def _update_indices(simulation: SimulatedSchedule, rank: int) -> list[int]:
    return [number for number, task in enumerate(simulation.tasks) if task.cause is Cause.UPDATE and task.rank == rank]


def _last_steps(simulation: SimulatedSchedule, first_step: int) -> SimulatedSchedule:
    """Return the schedule from step `first_step` on, without dependencies on earlier steps."""
    numbers = [number for number, task in enumerate(simulation.tasks) if task.step >= first_step]
    new_numbers = {number: new for new, number in enumerate(numbers)}
    tasks = [
        simulation.tasks[number]._replace(
            dependencies=tuple(
                new_numbers[dependency]
                for dependency in simulation.tasks[number].dependencies
                if dependency in new_numbers
            )
        )
        for number in numbers
    ]
    return SimulatedSchedule(
        tasks, [simulation.starts[number] for number in numbers], [simulation.ends[number] for number in numbers],
        [new_numbers.get(simulation.blockers[number], -1) for number in numbers],
    )  # fmt: skip


# --- where the time goes -----------------------------------------------------------------------------------------


def _rank_parts(simulation: SimulatedSchedule, rank: int, first_update: int, last_update: int) -> dict[str, float]:
    """Return the seconds of work and of waits of a rank between the ends of two of its updates, by part."""
    parts: dict[str, float] = defaultdict(float)
    stream = f"compute {rank}"
    clock = simulation.ends[first_update]
    for number in range(first_update + 1, last_update + 1):
        task = simulation.tasks[number]
        if stream not in task.resources:
            continue
        for cause, seconds in _waits(simulation, number, clock):
            parts[_wait_part(simulation, cause, rank)] += seconds
        parts[str(task.cause)] += task.seconds
        clock = simulation.ends[number]
    return parts


def _waits(simulation: SimulatedSchedule, number: int, begin_limit: float) -> Iterable[tuple[int, float]]:
    """Yield the tasks that a task waited for after a point in time, and the seconds of each wait."""
    wait_end = simulation.starts[number]
    number = simulation.blockers[number]
    while number >= 0 and wait_end > begin_limit:
        begin = max(simulation.starts[number], begin_limit)
        yield number, wait_end - begin
        wait_end, number = begin, simulation.blockers[number]


def _wait_part(simulation: SimulatedSchedule, number: int, rank: int) -> str:
    """Return the part of a rank's step that a wait for a task belongs to."""
    task = simulation.tasks[number]
    if task.rank == ALL_RANKS:
        return EXPOSED
    return str(task.cause) if task.rank == rank else WAITING


def _overlap(simulation: SimulatedSchedule, job: Job, period: int) -> float | None:
    """Return the share of communication within the backward pass, as DistributedDataParallel counts it.

    In its log (`_get_ddp_logging_data`, `reducer.cpp`) communication lasts from the launch of the first bucket until
    all gradients are back in place, also while nothing is sent, and is overlapped until the backward pass has ended.
    This is not a share of the time of collectives: a short one that is launched early counts with all of the backward
    pass that follows.
    """
    if job.ranks == 1 or job.sharded:
        return None
    if not job.overlap:
        return 0.0 if any(task.cause is Cause.COMMUNICATION for task in simulation.tasks) else None
    first_step = simulation.tasks[-1].step + 1 - period
    shares = []
    for rank, (count, _) in enumerate(training.rank_classes(job)):
        launches: dict[int, float] = {}
        compute_ends: dict[int, float] = {}
        update_starts: dict[int, float] = {}
        for number, task in enumerate(simulation.tasks):
            step = task.step
            if step < first_step:
                continue
            if task.cause is Cause.COMMUNICATION and step not in launches:
                rank_ends = [
                    simulation.ends[index] for index in task.dependencies if simulation.tasks[index].rank == rank
                ]
                launches[step] = max(rank_ends, default=simulation.starts[number])
            elif task.rank == rank and task.cause is Cause.UPDATE:
                update_starts[step] = simulation.starts[number]
            elif task.rank == rank and task.cause in (Cause.BACKWARD, Cause.SERVING) and task.name != training.COPY_OUT:
                compute_ends[step] = simulation.ends[number]
        total = sum(update_starts[step] - launch for step, launch in launches.items())
        if total > 0:
            overlap_seconds = sum(max(0.0, compute_ends[step] - launch) for step, launch in launches.items())
            shares.append((count, min(1.0, overlap_seconds / total)))
    ranks = sum(count for count, _ in shares)
    return sum(count * share for count, share in shares) / ranks if ranks else None


def _critical_path(
    simulation: SimulatedSchedule, updates_by_rank: list[list[int]], period: int, step: float
) -> dict[str, float]:
    """Return the seconds of a step along the critical path, by cause.

    The path always ends in the last update, whatever limits the steps. It is therefore evaluated in the middle of all
    steps, where it has reached the limiting tasks.
    """
    final_update = max((updates[-1] for updates in updates_by_rank), key=lambda number: simulation.ends[number])
    window = period * step
    periods_back = min(
        len(updates_by_rank[0]) // period // 2, int(simulation.ends[final_update] / window) - 1 if window else 0
    )
    window_end = simulation.ends[final_update] - max(0, periods_back) * window
    parts: dict[str, float] = defaultdict(float)
    for number in simulation.path(final_update):
        seconds = min(simulation.ends[number], window_end) - max(simulation.starts[number], window_end - window)
        if seconds > 0:
            parts[str(simulation.tasks[number].cause)] += seconds / period
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
        if not _is_present(constant, work, job):
            continue
        percent_gain, halved_gain = (
            current - predict(*_with_constant_scaled(constant, work, job, factor)).step for factor in (0.99, 0.5)
        )
        gains.append(Worth(constant, max(0.0, percent_gain), max(0.0, halved_gain)))
    return sorted(gains, key=lambda entry: -entry.if_halved)


def _is_present(constant: str, work: Work, job: Job) -> bool:
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


def _with_constant_scaled(constant: str, work: Work, job: Job, factor: float) -> tuple[Work, Job]:
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
