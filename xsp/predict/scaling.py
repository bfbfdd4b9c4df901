"""A recorded step on several numbers of ranks: its predicted time with intervals, and the most useful improvements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xsp.predict import chakra, prediction, training
from xsp.predict.collectives import Link
from xsp.predict.prediction import Predicted, Worth
from xsp.predict.recorded import Recorded
from xsp.predict.training import NO_LINK, Job, Work

LIMITS = (
    "Nothing was measured on several ranks: the step of one rank is combined with the stated constants of a link.",
    "Assumed: collectives do not slow down computation that they overlap with; all ranks are connected alike.",
)


@dataclass(frozen=True)
class Point:
    """The prediction for a number of ranks; durations are seconds."""

    ranks: int
    predicted: Predicted
    low: float | None
    high: float | None
    """Interval of the step, from that of the recorded step; None if that has none. A link has no interval."""

    samples_per_s: float | None
    """Samples per second of all ranks together."""

    efficiency: float
    """Step of one rank over this step: the share of perfect scaling, with the same batch on each rank."""


class Change(NamedTuple):
    """A requested change: its name, and the step and job with it."""

    name: str
    recorded: Recorded
    job: Job


class Changed(NamedTuple):
    """The prediction with a change on the largest number of ranks."""

    name: str
    point: Point
    faster: float
    """Samples per second over those without the change, minus 1."""


@dataclass(frozen=True)
class Scaling:
    """The answer of `xsp predict`."""

    recorded: Recorded
    job: Job
    points: tuple[Point, ...]
    worth: tuple[Worth, ...]
    """The gain of improving each constant on the largest number of ranks."""

    check: Predicted | None
    """The prediction for the recorded number of ranks; None if the link has no costs for it."""

    rebuilt: Predicted | None
    """The same with the recorded duration of each collective; None if the run lacks them."""

    changed: tuple[Changed, ...]
    """The predictions with changes, in the order of the request."""

    original: Recorded
    """The step of the run without any change."""

    @property
    def measured(self) -> float:
        """The measured seconds of the recorded step."""
        return self.original.step


def of(
    recorded: Recorded,
    job: Job,
    ranks: Sequence[int],
    original: Recorded | None = None,
    changes: Sequence[Change] = (),
) -> Scaling:
    """Return the predicted step on each number of ranks.

    Args:
        recorded: the step of a run.
        job: all settings but the number of ranks.
        ranks: the numbers of ranks.
        original: the step without any change, whose prediction is compared with the measured step.
        changes: changes to predict on the largest number of ranks.
    """
    original = original or recorded
    single_job = replace(job, ranks=1, plan=None, straggler=type(job.straggler)())
    single = prediction.predict(sharing_cores(recorded, single_job), single_job)
    points = tuple(_point(recorded, replace(job, ranks=count), single.step) for count in sorted(set(ranks)))
    largest = replace(job, ranks=max(ranks))
    unchanged = Job(
        recorded.ranks, job.link, job.algorithm, job.bucket, job.plan, accumulate=original.accumulated,
        on_link=job.on_link,
    )  # fmt: skip
    check = prediction.predict(original.work, unchanged) if _covers(job.link, original.ranks) else None
    worth = tuple(prediction.worth(sharing_cores(recorded, largest), largest))
    rebuilt = None
    if original.collective_seconds and original.ranks > 1:
        recorded_job = Job(
            original.ranks,
            plan=original.plan,
            collective_seconds=original.collective_seconds,
            accumulate=original.accumulated,
        )
        rebuilt = prediction.predict(original.work, recorded_job)
    changed = tuple(_changed(change, points[-1], job.accumulate) for change in changes)
    return Scaling(recorded, job, points, worth, check, rebuilt, changed, original)


def _changed(change: Change, base: Point, batches: int) -> Changed:
    """Return the prediction with a change; `faster` compares samples, as a step of more samples may last longer."""
    single_job = replace(change.job, ranks=1, plan=None, straggler=type(change.job.straggler)())
    single = prediction.predict(sharing_cores(change.recorded, single_job), single_job)
    point = _point(change.recorded, replace(change.job, ranks=base.ranks), single.step)
    if point.samples_per_s and base.samples_per_s:
        return Changed(change.name, point, point.samples_per_s / base.samples_per_s - 1)
    steps = base.predicted.step / point.predicted.step if point.predicted.step else 1.0
    return Changed(change.name, point, steps * change.job.accumulate / batches - 1)


def to_chakra(found: Scaling, folder: Path) -> int:
    """Write the step on the largest number of ranks as execution traces; return their number (see `chakra.write`)."""
    job = found.points[-1].predicted.job
    step = prediction.predict(sharing_cores(found.recorded, job), job, fine=True)
    arrivals = found.recorded.work.arrivals
    plan = training.plan_of(found.recorded.work, job) if job.ranks > 1 else ()
    return chakra.write(step, [sum(arrivals[index] for index in bucket) for bucket in plan], folder)


def sharing_cores(recorded: Recorded, job: Job) -> Work:
    """Return the step of a rank that shares cores with the others, if the link was measured on shared cores.

    The recorded step already includes the slowdown of the recorded number of ranks.
    """
    measured = job.link.measured
    if measured is None:
        return recorded.work
    target, source = measured.at(job.ranks), measured.at(recorded.ranks)
    return recorded.work.scaled(computing=target.computing / source.computing, update=target.copying / source.copying)


def _covers(link: Link, ranks: int) -> bool:
    """Return whether a link has the cost of collectives for a number of ranks."""
    return ranks == 1 or (link is not NO_LINK if link.measured is None else link.measured.covers("all_reduce", ranks))


def _point(recorded: Recorded, job: Job, single_step: float) -> Point:
    work = sharing_cores(recorded, job)
    predicted = prediction.predict(work, job)
    low = high = None
    if recorded.ends is not None and recorded.step:
        shorter, longer = (
            prediction.predict(work.scaled(factor, factor, factor), job).step
            for factor in (max(0.0, end) / recorded.step for end in recorded.ends)
        )
        low, high = min(shorter, predicted.step), max(longer, predicted.step)
    samples = recorded.samples * job.ranks * job.accumulate if recorded.samples else None
    return Point(
        job.ranks, predicted, low, high,
        samples / predicted.step if samples and predicted.step else None,
        single_step / predicted.step if predicted.step else 1.0,
    )  # fmt: skip
