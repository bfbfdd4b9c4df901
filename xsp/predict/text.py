"""A prediction as text that fits a terminal, as plain values, and as a section of the run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xsp import sections, terminal
from xsp.predict import prediction, training
from xsp.predict.hoststep import Lane
from xsp.predict.prediction import EXPOSED, PARTS, WAITING
from xsp.predict.scaling import LIMITS, Scaling, ScalingPoint, work_on_shared_cores
from xsp.predict.schedule import Cause, SimulatedSchedule
from xsp.predict.training import ALL_RANKS
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text
from xsp.texts import counted, seconds_text

SECTION = "predict"
BINS = 60
"""Number of time intervals in the chart of a step."""

_SHORT_NAMES = {EXPOSED: "exposed", WAITING: "waiting", str(Cause.SERVING): "serving"}


def page(scaling: Scaling) -> str:
    """Return the step on each number of ranks, its parts, and the gain of improving each constant, as text."""
    return terminal.page(section(scaling, has_charts=False))


def as_json(scaling: Scaling) -> dict[str, Any]:
    """Return the prediction as plain values; durations are in seconds, with `_s` in their keys."""
    recorded, job = scaling.recorded, scaling.job
    low, high = recorded.interval or (None, None)
    return {
        "xsp_predict": 1,
        "name": plain(recorded.name),
        "recorded": {
            "step_s": recorded.step, "low_s": low, "high_s": high, "ranks": recorded.ranks,
            "samples": scaling.original.samples, "gradient_bytes": sum(recorded.work.arrivals),
            "layers": len(recorded.work.layers),
        },
        "link": {
            "name": plain(job.link.name), "alpha_s": job.link.alpha, "beta_s_per_byte": job.link.beta,
            "gamma_s_per_byte": job.link.gamma, "source": plain(job.link.source), "quoted": job.link.is_quoted,
        },
        "job": {
            "algorithm": str(job.algorithm), "bucket_bytes": job.bucket, "accumulate": job.accumulate,
            "samples": recorded.samples, "sharded": job.sharded, "ranks_on_a_link": job.ranks_per_link,
            "ranks_on_a_disk": job.ranks_per_disk,
            "compress": job.compress,
            "straggler": {"factor": job.straggler.factor, "who": str(job.straggler.slow_ranks)},
        },
        "ranks": [
            {
                "ranks": point.ranks, "step_s": point.predicted.step, "low_s": point.low, "high_s": point.high,
                "samples_per_s": point.samples_per_s, "efficiency": point.efficiency,
                "bound_by": point.predicted.bound_by,
                "parts_s": dict(point.predicted.parts), "critical_path_s": dict(point.predicted.path),
                "communication_s": point.predicted.communication, "hidden_s": point.predicted.hidden,
                "overlap": point.predicted.overlap, "steady": point.predicted.is_steady,
            }
            for point in scaling.points
        ],
        "worth": [
            {"constant": gain.constant, "saves_s_if_halved": gain.if_halved, "saves_s_per_percent": gain.per_percent}
            for gain in scaling.worth
        ],
        "what_if": [
            {
                "change": plain(change.name), "step_s": change.point.predicted.step, "low_s": change.point.low,
                "high_s": change.point.high, "samples_per_s": change.point.samples_per_s, "faster": change.speedup,
                "bound_by": change.point.predicted.bound_by,
            }
            for change in scaling.change_predictions
        ],
        "check": None if scaling.check is None else {
            "predicted_s": scaling.check.step, "recorded_s": scaling.measured_step, "ranks": recorded.ranks
        },
        "rebuilt": None if scaling.replay is None else {
            "predicted_s": scaling.replay.step, "exposed_s": scaling.replay.parts[EXPOSED],
            "recorded_s": scaling.measured_step, "recorded_exposed_s": recorded.exposed_reductions,
        },
        "from": list(map(plain, recorded.sources)),
        "unknown": list(map(plain, recorded.unknown)),
        "notes": list(_notes(scaling)),
    }  # fmt: skip


def _job(scaling: Scaling) -> str:
    job, recorded = scaling.job, scaling.recorded
    gradients = sum(recorded.work.arrivals)
    if job.plan is not None:
        grouping = f"in the {counted(len(job.plan), 'bucket')} of the run"
    else:
        limit = "25 MiB, the first 1 MiB" if job.bucket is None else f"{job.bucket / (1 << 20):.4g} MiB"
        grouping = f"in buckets of {limit}"
    algorithm_text = f"by {job.algorithm}" if job.link.curves is None else "as timed here"
    parts = [f"{gradients / 1e6:.4g} MB of gradients {grouping}", f"all-reduce {algorithm_text}"]
    if job.sharded:
        parts[1] = "sharded: all-gather twice and reduce-scatter, on a ring"
    if job.compress != 1.0:
        parts.append(f"gradients are compressed by {job.compress:g}")
    if job.accumulate > 1:
        parts.append(f"{job.accumulate} batches per update")
    if recorded.samples != scaling.original.samples:
        parts.append(f"batches of {recorded.samples:g} samples")
    if job.straggler.factor != 1.0:
        rank_texts = {
            "one": "one rank",
            "turns": "each rank in turn",
            "together": "one step of N, on all ranks at once,",
        }
        parts.append(f"{rank_texts[str(job.straggler.slow_ranks)]} takes {job.straggler.factor:g} times as long")
    parts += [
        f"{count} ranks on a {resource}"
        for resource, count in (("link", job.ranks_per_link), ("disk", job.ranks_per_disk))
        if count > 1
    ]
    return "; ".join(parts)


def _notes(scaling: Scaling) -> list[str]:
    curves = scaling.job.link.curves
    notes = list(LIMITS)
    if curves is not None:
        plan = training.plan_of(scaling.recorded.work, scaling.job)
        sizes = scaling.recorded.work.arrivals
        largest = max((sum(sizes[index] for index in bucket) for bucket in plan), default=0)
        notes = curves.notes([point.ranks for point in scaling.points], largest)
    if scaling.job.link.is_quoted:
        notes.insert(0, "The constants of the link are figures of its manufacturer, not measured; programs reach less.")
    if scaling.job.sharded and scaling.recorded.frozen_bytes:
        notes.append(
            f"{scaling.recorded.frozen_bytes / 1e6:.4g} MB of parameters are frozen; gathering them is not included."
        )
    if (
        scaling.recorded.plan is not None
        and scaling.job.bucket
        and scaling.job.bucket < max(scaling.recorded.work.arrivals)
    ):
        notes.append("Only the buckets of the run are known, no gradients: a smaller --bucket does not divide them.")
    measured_step = scaling.measured_step or math.inf
    deviation = (
        0.0 if scaling.check is None else round(100 * (scaling.check.step / measured_step - 1), 1) + 0.0
    )  # no "-0.0"
    if scaling.check is None:
        notes.append(
            f"No check: the run has {counted(scaling.recorded.ranks, 'rank')}, and their time over "
            f"{'no link' if scaling.job.link is training.NO_LINK else 'this link'} is unknown."
        )
    elif scaling.recorded.ranks == 1:
        notes.append(f"Check: the simulated step of one rank is {deviation:+.1f} % from the measured one.")
    else:
        notes.append(
            f"Check: for the {counted(scaling.recorded.ranks, 'rank')} of the run, the prediction over this link is "
            f"{seconds_text(scaling.check.step)}, {deviation:+.1f} % from what was measured over the run's own link."
        )
    if scaling.replay is not None:
        deviation = round(100 * (scaling.replay.step / measured_step - 1), 1) + 0.0
        notes.append(
            f"Check: with each all-reduce as long as in the run, the simulated step is "
            f"{seconds_text(scaling.replay.step)}, {deviation:+.1f} % from the measured one; "
            f"{seconds_text(scaling.replay.parts[EXPOSED])} of it are exposed communication, in the run "
            f"{seconds_text(scaling.recorded.exposed_reductions)}."
        )
    if not all(point.predicted.is_steady for point in scaling.points):
        notes.append("The simulated steps did not become periodic; figures are means of the later ones.")
    return notes


def _interval(value: float, interval: tuple[float, float] | None) -> str:
    text = seconds_text(value)
    return text if interval is None else f"{text} [{seconds_text(interval[0])} … {seconds_text(interval[1])}]"


# --- the section of a report -------------------------------------------------------------------------------------


def section(scaling: Scaling, has_charts: bool = True) -> Section:
    """Return the section of a run's report: scaling, parts of a step, and the predicted next to the recorded step.

    Args:
        scaling: the prediction.
        has_charts: whether it has charts; those of a step are simulated, which takes as long as a prediction.
    """
    recorded, points = scaling.recorded, scaling.points
    samples = f", {scaling.original.samples:g} samples per rank" if scaling.original.samples else ""
    step_text = f"{_interval(recorded.step, recorded.interval)} a step"
    count = counted(recorded.ranks, "rank")
    names = [part for part in PARTS if any(point.predicted.parts[part] for point in points)]
    on_largest = f"on {counted(points[-1].ranks, 'rank')}"
    step_columns = ("step_ms", "from_ms", "to_ms", "samples/s")
    parts: list[sections.Part] = [
        Text(f"{recorded.name}: {step_text}, {recorded.origin} on {count}{samples}"),
        Text(f"link: {scaling.job.link.description}"),
        Text(f"job: {_job(scaling)}"),
        Table(
            ("ranks", *step_columns, "efficiency_percent", "bound by"),
            tuple((point.ranks, *_step_cells(point), 100 * point.efficiency, point.predicted.bound_by)
                  for point in points),
        ),
        Table(
            ("ranks", *(f"{_SHORT_NAMES.get(name, name)}_ms" for name in names), "hidden_ms"),
            tuple((point.ranks, *(1e3 * point.predicted.parts[name] for name in names), 1e3 * point.predicted.hidden)
                  for point in points),
            "A step of the average rank",
        ),
        *(_charts(scaling, names) if has_charts else []),
    ]  # fmt: skip
    if scaling.worth:
        step = points[-1].predicted.step or math.inf
        rows = tuple(
            (gain.constant, 1e3 * gain.if_halved, 1e3 * gain.per_percent, 100 * gain.if_halved / step)
            for gain in scaling.worth
        )
        columns = ("constant", "saves if halved_ms", "per percent_ms", "of the step_percent")
        parts.append(Table(columns, rows, f"What to buy, {on_largest}"))
    if scaling.change_predictions:
        changes = tuple(
            (plain(change.name), *_step_cells(change.point), 100 * change.speedup)
            for change in scaling.change_predictions
        )
        parts.append(Table(("what if", *step_columns, "faster_percent"), changes, f"What if, {on_largest}"))
    labels = (("from", recorded.sources), ("not known", recorded.unknown), ("note", _notes(scaling)))
    parts += [Text(f"{label}: {text}") for label, texts in labels for text in texts]
    return Section("Prediction", tuple(Text(plain(part.text)) if isinstance(part, Text) else part for part in parts))


def _step_cells(point: ScalingPoint) -> tuple[float | None, ...]:
    """Return the step and its interval in milliseconds, and the samples per second."""
    seconds = (point.predicted.step, point.low, point.high)
    return (*(None if value is None else 1e3 * value for value in seconds), point.samples_per_s)


def _charts(scaling: Scaling, names: Sequence[str]) -> list[sections.Part]:
    """Return charts of the rates and of the parts of a step over the ranks, and of the last step over its time."""
    rank_counts = tuple(point.ranks for point in scaling.points)
    charts: list[sections.Part] = []
    if scaling.recorded.samples:
        rates = tuple(point.samples_per_s for point in scaling.points)
        samples = scaling.recorded.samples * scaling.job.accumulate
        has_interval = scaling.recorded.interval is not None  # either all points have whiskers or none has
        low, high = (
            tuple(
                samples * point.ranks / step if step else None
                for point, step in zip(scaling.points, steps, strict=True)
            )
            if has_interval
            else ()
            for steps in ([point.high for point in scaling.points], [point.low for point in scaling.points])
        )
        single_step = scaling.points[0].efficiency * scaling.points[0].predicted.step
        perfect_rates = tuple(samples * ranks / single_step if single_step else None for ranks in rank_counts)
        lines = (Series("predicted", rates, low, high), Series("perfect scaling", perfect_rates))
        charts.append(Chart("lines", "Scaling", "samples/s", rank_counts, lines, over="ranks", log=("at", "values")))
    stacked = tuple(
        Series(name, tuple(1e3 * point.predicted.parts[name] for point in scaling.points)) for name in names
    )
    bars = tuple(counted(count, "rank") for count in rank_counts)
    return [*charts, Chart("stacked", "Average step of a rank", "ms", bars, stacked), *_step_charts(scaling)]


def save_section(scaling: Scaling, path: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.write_if_run(Path(path), SECTION, section(scaling))


def _step_charts(scaling: Scaling) -> list[sections.Part]:
    """Return charts of the recorded and the predicted step over the same time: the busy share of each interval."""
    largest = scaling.points[-1]
    predicted = lanes(
        prediction.predict(
            work_on_shared_cores(scaling.recorded, largest.predicted.job), largest.predicted.job, per_layer=True
        ).schedule
    )
    ends = [
        end for step_lanes in (predicted, scaling.recorded.lanes) for lane in step_lanes.values() for _, end in lane
    ]
    duration_s = max(ends, default=0.0)
    if not duration_s or not math.isfinite(duration_s):
        return []
    charts = []
    titles = (
        (scaling.recorded.lanes, "The step as recorded, with the cost of profiling"),
        (predicted, f"Predicted on {counted(largest.ranks, 'rank')}"),
    )
    for step_lanes, title in titles:
        if step_lanes:
            rows = tuple(Series(name, _shares(lane, duration_s)) for name, lane in step_lanes.items())
            centers = tuple(float(f"{1e3 * duration_s * (index + 0.5) / BINS:.3g}") for index in range(BINS))
            charts.append(Chart("grid", title, "share of the time", centers, rows, over="ms"))
    return list(charts)


_LANE_NAMES = {Cause.INPUT: "input", Cause.COPY: "copy", Cause.FORWARD: "forward", Cause.BACKWARD: "backward",
         Cause.COMMUNICATION: "communication", Cause.UPDATE: "update", Cause.OTHER: "other",
         Cause.SERVING: "for communication"}  # fmt: skip


def lanes(schedule_: SimulatedSchedule) -> dict[str, Lane]:
    """Return the intervals of each activity of a rank of the first class in the last simulated step."""
    step = schedule_.tasks[-1].step
    step_tasks = [
        (number, task)
        for number, task in enumerate(schedule_.tasks)
        if task.step == step and task.rank in (0, ALL_RANKS) and task.seconds > 0
    ]
    begin = min((schedule_.starts[number] for number, task in step_tasks if "compute 0" in task.resources), default=0.0)
    intervals: dict[str, list[tuple[float, float]]] = {}
    for number, task in sorted(step_tasks, key=lambda entry: schedule_.starts[entry[0]]):
        if schedule_.ends[number] > begin:
            span = (max(0.0, schedule_.starts[number] - begin), schedule_.ends[number] - begin)
            intervals.setdefault(_LANE_NAMES[task.cause], []).append(span)
    return {name: tuple(intervals[name]) for name in _LANE_NAMES.values() if name in intervals}


def _shares(lane: Lane, total: float) -> tuple[float, ...]:
    """Return the share of each of `BINS` equal intervals that a lane covers."""
    width = total / BINS
    covered_seconds = [0.0] * BINS
    for start, end in lane:
        for index in range(max(0, int(start / width)), min(BINS - 1, int(end / width)) + 1):
            covered_seconds[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width))
    return tuple(min(1.0, seconds / width) for seconds in covered_seconds)
