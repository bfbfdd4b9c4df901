"""A recorded step on several numbers of ranks: its predicted time with intervals, and the most useful improvements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xsp.predict import chakra, prediction, training
from xsp.predict.collectives import Link
from xsp.predict.prediction import PredictedStep, Worth
from xsp.predict.recorded import RecordedStep
from xsp.predict.training import NO_LINK, Job, Work

LIMITS = (
    "Nothing was measured on several ranks: the step of one rank is combined with the stated constants of a link.",
    "Assumed: collectives do not slow down computation that they overlap with; all ranks have equal links.",
)


@dataclass(frozen=True)
class ScalingPoint:
    """The prediction for a number of ranks; durations are seconds."""

    ranks: int
    predicted: PredictedStep
    low: float | None
    high: float | None
    """Interval of the step, from those of the recorded step and of a measured link; None if neither has one."""

    samples_per_s: float | None
    """Samples per second of all ranks together."""

    efficiency: float
    """Step of one rank over this step: the share of perfect scaling, with the same batch on each rank."""


class WhatIf(NamedTuple):
    """A requested change: its name, and the step and job with it."""

    name: str
    recorded: RecordedStep
    job: Job


class ChangePrediction(NamedTuple):
    """The prediction with a change on the largest number of ranks."""

    name: str
    point: ScalingPoint
    speedup: float
    """Samples per second over those without the change, minus 1."""


@dataclass(frozen=True)
class Scaling:
    """The answer of `xsp predict`."""

    recorded: RecordedStep
    job: Job
    points: tuple[ScalingPoint, ...]
    worth: tuple[Worth, ...]
    """The gain of improving each constant on the largest number of ranks."""

    check: PredictedStep | None
    """The prediction for the recorded number of ranks; None if the link has no costs for it."""

    replay: PredictedStep | None
    """The same with the recorded duration of each collective; None if the run lacks them."""

    change_predictions: tuple[ChangePrediction, ...]
    """The predictions with changes, in the order of the request."""

    original: RecordedStep
    """The step of the run without any change."""

    @property
    def measured_step(self) -> float:
        """The measured seconds of the recorded step."""
        return self.original.step


def of(
    recorded: RecordedStep,
    job: Job,
    ranks: Sequence[int],
    original: RecordedStep | None = None,
    changes: Sequence[WhatIf] = (),
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
    single_step = _single_rank_step(recorded, job)
    points = tuple(_point(recorded, replace(job, ranks=count), single_step) for count in sorted(set(ranks)))
    largest = replace(job, ranks=max(ranks))
    original_job = Job(
        recorded.ranks, job.link, job.algorithm, job.bucket, job.plan, accumulate=original.accumulated_batches,
        ranks_per_link=job.ranks_per_link,
    )  # fmt: skip
    check = prediction.predict(original.work, original_job) if _has_cost(job.link, original.ranks) else None
    worth = tuple(prediction.worth(work_on_shared_cores(recorded, largest), largest))
    replay = None
    if original.collective_seconds and original.ranks > 1:
        replay_job = Job(
            original.ranks,
            plan=original.plan,
            collective_seconds=original.collective_seconds,
            accumulate=original.accumulated_batches,
        )
        replay = prediction.predict(original.work, replay_job)
    changed = tuple(_change_prediction(change, points[-1], job.accumulate) for change in changes)
    return Scaling(recorded, job, points, worth, check, replay, changed, original)


def _single_rank_step(recorded: RecordedStep, job: Job) -> float:
    """Return the predicted seconds of the step on one rank, without stragglers."""
    single_job = replace(job, ranks=1, plan=None, straggler=type(job.straggler)())
    return prediction.predict(work_on_shared_cores(recorded, single_job), single_job).step


def _change_prediction(change: WhatIf, base: ScalingPoint, batches: int) -> ChangePrediction:
    """Return the prediction with a change; `faster` compares samples, as a step of more samples may last longer."""
    single_step = _single_rank_step(change.recorded, change.job)
    point = _point(change.recorded, replace(change.job, ranks=base.ranks), single_step)
    if point.samples_per_s and base.samples_per_s:
        return ChangePrediction(change.name, point, point.samples_per_s / base.samples_per_s - 1)
    steps = base.predicted.step / point.predicted.step if point.predicted.step else 1.0
    return ChangePrediction(change.name, point, steps * change.job.accumulate / batches - 1)


def to_chakra(answer: Scaling, folder: Path) -> int:
    """Write the step on the largest number of ranks as execution traces; return their number (see `chakra.write`)."""
    job = answer.points[-1].predicted.job
    step = prediction.predict(work_on_shared_cores(answer.recorded, job), job, per_layer=True)
    arrivals = answer.recorded.work.arrivals
    plan = training.plan_of(answer.recorded.work, job) if job.ranks > 1 else ()
    return chakra.write(step, [sum(arrivals[index] for index in bucket) for bucket in plan], folder)


def work_on_shared_cores(recorded: RecordedStep, job: Job) -> Work:
    """Return the step of a rank that shares cores with the others, if the link was measured on shared cores.

    The recorded step already includes the slowdown of the recorded number of ranks.
    """
    curves = job.link.curves
    if curves is None:
        return recorded.work
    target, source = curves.sharing_at(job.ranks), curves.sharing_at(recorded.ranks)
    return recorded.work.scaled(
        computing=target.compute_factor / source.compute_factor, update=target.copy_factor / source.copy_factor
    )


def _has_cost(link: Link, ranks: int) -> bool:
    """Return whether a link has the cost of collectives for a number of ranks."""
    return ranks == 1 or (link is not NO_LINK if link.curves is None else link.curves.has_curve("all_reduce", ranks))


def _interval_ends(recorded: RecordedStep, work: Work, job: Job) -> list[tuple[tuple[Work, Job], tuple[Work, Job]]]:
    """Return step and job at both ends of the interval of each independent source.

    The sources are the recorded step, and, of ranks of a measured link, collectives, the difference between processes
    that do the same work, and page faults: how much memory a process gives back to the system depends on what else it
    holds, so ranks may lack those of the recorded process.
    """
    ends = []
    if recorded.interval is not None and recorded.step:
        low, high = (max(0.0, end) / recorded.step for end in recorded.interval)
        ends.append(((work.scaled(low, low, low), job), (work.scaled(high, high, high), job)))
    curves = job.link.curves
    if curves is not None and job.ranks > 1:
        factor = math.exp(curves.drift.collectives)
        ends.append((
            (work, replace(job, link=job.link.scaled(1 / factor))), (work, replace(job, link=job.link.scaled(factor))),
        ))  # fmt: skip
        if job.ranks != recorded.ranks:
            factor = math.exp(curves.drift.computing)
            ends.append(((work.scaled(1 / factor, 1 / factor), job), (work.scaled(factor, factor), job)))
            if recorded.step:
                rest = 1 - min(1.0, recorded.page_faults / recorded.step)
                ends.append(((work.scaled(rest, rest), job), (work, job)))
    return ends


def _point(recorded: RecordedStep, job: Job, single_step: float) -> ScalingPoint:
    work = work_on_shared_cores(recorded, job)
    predicted = prediction.predict(work, job)
    low = high = None
    variants = _interval_ends(recorded, work, job)
    if variants:
        shorter, longer = (
            [prediction.predict(*ends[index]).step - predicted.step for ends in variants] for index in (0, 1)
        )
        low = max(0.0, predicted.step - math.hypot(*(min(0.0, delta) for delta in shorter)))
        high = predicted.step + math.hypot(*(max(0.0, delta) for delta in longer))
    samples = recorded.samples * job.ranks * job.accumulate if recorded.samples else None
    return ScalingPoint(
        job.ranks, predicted, low, high,
        samples / predicted.step if samples and predicted.step else None,
        single_step / predicted.step if predicted.step else 1.0,
    )  # fmt: skip
