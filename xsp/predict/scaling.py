"""A recorded step on several numbers of ranks: what it takes, with intervals, and what is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xsp.predict import chakra, prediction, training
from xsp.predict.prediction import Predicted, Worth
from xsp.predict.recorded import Recorded
from xsp.predict.training import Job, Work

LIMITS = (
    "No figure of several devices is measured here: the step of one rank is put together with what a link is said to "
    "take.",
    "Collectives are taken to slow no computation beside them, and all ranks to be connected alike.",
)


@dataclass(frozen=True)
class Point:
    """A number of ranks; durations are seconds."""

    ranks: int
    found: Predicted
    low: float | None
    high: float | None
    """Of the step, from the interval of the recorded one; None if that has none. A link has none."""

    samples_per_s: float | None
    """Of all ranks together."""

    efficiency: float
    """The step of one rank over this one: the share of perfect scaling, with the same batch on each rank."""


@dataclass(frozen=True)
class Scaling:
    """The answer of `xsp predict`."""

    recorded: Recorded
    job: Job
    points: tuple[Point, ...]
    worth: tuple[Worth, ...]
    """What each constant is worth on the largest number of ranks."""

    check: Predicted
    """The step as it was recorded, predicted."""

    rebuilt: Predicted | None
    """The same with each collective as long as it was; None where the run does not tell."""

    measured: float
    """What that step took."""


def of(recorded: Recorded, job: Job, ranks: Sequence[int], original: Recorded | None = None) -> Scaling:
    """Return what a step takes on each number of ranks.

    Args:
        recorded: the step of a run.
        job: everything but the ranks.
        ranks: how many.
        original: the step before anything of it was changed, which is held against what was measured.
    """
    original = original or recorded
    one = prediction.predict(recorded.work, replace(job, ranks=1, plan=None, straggler=type(job.straggler)()))
    points = tuple(_point(recorded, replace(job, ranks=each), one.step) for each in sorted(set(ranks)))
    largest = replace(job, ranks=max(ranks))
    bare = Job(
        recorded.ranks, job.link, job.algorithm, job.bucket, job.plan, accumulate=original.accumulated,
        on_link=job.on_link,
    )  # fmt: skip
    check = prediction.predict(original.work, bare)
    worth = tuple(prediction.worth(sharing_cores(recorded.work, largest), largest))
    rebuilt = None
    if original.lasted and original.ranks > 1:
        own = Job(original.ranks, plan=original.plan, lasting=original.lasted, accumulate=original.accumulated)
        rebuilt = prediction.predict(original.work, own)
    return Scaling(recorded, job, points, worth, check, rebuilt, original.step)


def to_chakra(found: Scaling, folder: Path) -> int:
    """Write the step on the largest number of ranks as execution traces, and return how many (see `chakra.write`)."""
    job = found.points[-1].found.job
    step = prediction.predict(sharing_cores(found.recorded.work, job), job, fine=True)
    arrivals = found.recorded.work.arrivals
    plan = training.plan_of(found.recorded.work, job) if job.ranks > 1 else ()
    return chakra.write(step, [sum(arrivals[each] for each in bucket) for bucket in plan], folder)


def sharing_cores(work: Work, job: Job) -> Work:
    """Return the step of a rank that shares cores with the others, where the link was measured on such."""
    if job.link.measured is None:
        return work
    shared = job.link.measured.at(job.ranks)
    return work.scaled(computing=shared.computing, update=shared.copying)


def _point(recorded: Recorded, job: Job, alone: float) -> Point:
    work = sharing_cores(recorded.work, job)
    found = prediction.predict(work, job)
    low = high = None
    if recorded.ends is not None and recorded.step:
        shorter, longer = (
            prediction.predict(work.scaled(factor, factor, factor), job).step
            for factor in (max(0.0, each) / recorded.step for each in recorded.ends)
        )
        low, high = min(shorter, found.step), max(longer, found.step)
    samples = recorded.samples * job.ranks * job.accumulate if recorded.samples else None
    return Point(
        job.ranks, found, low, high,
        samples / found.step if samples and found.step else None, alone / found.step if found.step else 1.0,
    )  # fmt: skip
