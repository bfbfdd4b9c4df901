"""A prediction as text that fits a terminal, as plain values, and as a section of the run's report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xsp import sections
from xsp.predict import prediction, training
from xsp.predict.hoststep import Lane
from xsp.predict.prediction import EXPOSED, PARTS, WAITING
from xsp.predict.scaling import LIMITS, ChangePrediction, Point, Scaling, work_on_shared_cores
from xsp.predict.schedule import Cause, Schedule
from xsp.predict.training import ALL_RANKS
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text
from xsp.texts import seconds_text, short_number

WIDTH = 79
SECTION = "predict"
BINS = 60
"""Number of time intervals in the chart of a step."""

_SHORT_NAMES = {EXPOSED: "exposed", WAITING: "waiting", str(Cause.SERVING): "serving"}


def page(scaling: Scaling) -> str:
    """Return the step on each number of ranks, its parts, and the gain of improving each constant, as text."""
    recorded, job = scaling.recorded, scaling.job
    samples = f", {scaling.original.samples:g} samples per rank" if scaling.original.samples else ""
    step_text = f"{_interval(recorded.step, recorded.interval)} a step"
    lines = wrap_lines(
        f"{plain(recorded.name)}: {step_text}, recorded on {_count(recorded.ranks, 'rank')}{samples}", "  "
    )
    lines += wrap_lines(f"link   {plain(job.link.description)}", "       ")
    lines += wrap_lines(f"job    {_job(scaling)}", "       ")
    lines += [
        "",
        *column_lines(
            ("ranks", "step", "from", "to", "samples/s", "efficiency", "bound by"), map(_row, scaling.points)
        ),
    ]
    names = [part for part in PARTS if any(point.predicted.parts[part] for point in scaling.points)]
    lines += ["", "a step of the average rank, in ms", *column_lines(
        ("ranks", *(_SHORT_NAMES.get(name, name) for name in names), "hidden"),
        ([short_number(point.ranks), *(_ms(point.predicted.parts[name]) for name in names), _ms(point.predicted.hidden)]
         for point in scaling.points),
    )]  # fmt: skip
    if scaling.worth:
        largest = scaling.points[-1]
        headings = ("constant", "saves if halved", "per percent", "of the step")
        step = largest.predicted.step or math.inf
        rows = (
            [gain.constant, seconds_text(gain.if_halved), seconds_text(gain.per_percent),
             f"{100 * gain.if_halved / step:.1f} %"] for gain in scaling.worth
        )  # fmt: skip
        lines += ["", f"what to buy, on {_count(largest.ranks, 'rank')}", *column_lines(headings, rows, left=1)]
    if scaling.change_predictions:
        change_headings = ("what if", "step", "from", "to", "samples/s", "faster")
        lines += [
            "",
            f"on {_count(scaling.points[-1].ranks, 'rank')}",
            *column_lines(change_headings, map(_change_row, scaling.change_predictions), left=1),
        ]
    lines += [
        "",
        *labelled_lines("from", recorded.sources),
        *labelled_lines("not known", recorded.unknown),
        *labelled_lines("note", _notes(scaling)),
    ]
    return "\n".join(lines)


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
        grouping = f"in the {_count(len(job.plan), 'bucket')} of the run"
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
            f"No check: the run has {_count(scaling.recorded.ranks, 'rank')}, and their time over "
            f"{'no link' if scaling.job.link is training.NO_LINK else 'this link'} is unknown."
        )
    elif scaling.recorded.ranks == 1:
        notes.append(f"Check: the simulated step of one rank is {deviation:+.1f} % from the measured one.")
    else:
        notes.append(
            f"Check: for the {_count(scaling.recorded.ranks, 'rank')} of the run, the prediction over this link is "
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


def _row(point: Point) -> list[str]:
    return [short_number(point.ranks), *_step_cells(point), f"{100 * point.efficiency:.1f} %", point.predicted.bound_by]


def _change_row(change: ChangePrediction) -> list[str]:
    return [plain(change.name), *_step_cells(change.point), f"{100 * change.speedup:+.1f} %"]


def _step_cells(point: Point) -> list[str]:
    """Return the step, its interval and the samples per second as cells of a table."""
    rate = "–" if point.samples_per_s is None else short_number(point.samples_per_s)
    return [*map(seconds_text, (point.predicted.step, point.low, point.high)), rate]


def column_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> list[str]:
    """Return lines of right-aligned columns; the first `left` columns and "bound by" are left-aligned."""
    cells = [list(headings), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    left_columns = {column for column in range(len(headings)) if column < left or headings[column] == "bound by"}
    return [
        " " + "  ".join(
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]  # fmt: skip


def labelled_lines(label: str, texts: Sequence[str]) -> list[str]:
    """Return the wrapped lines of texts, each with `label` before it."""
    lines = []
    for text in texts:
        lines += wrap_lines(f"{label}: {plain(text)}", "  ")
    return lines


def wrap_lines(text: str, indent: str) -> list[str]:
    """Return the lines of a text; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _interval(value: float, interval: tuple[float, float] | None) -> str:
    text = seconds_text(value)
    return text if interval is None else f"{text} [{seconds_text(interval[0])} … {seconds_text(interval[1])}]"


def _ms(value: float) -> str:
    if value >= 1e6:
        return f"{1e3 * value:.3g}"
    return f"{1e3 * value:,.2f}" if value < 10 else f"{1e3 * value:,.0f}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# --- the section of a report -------------------------------------------------------------------------------------


def section(scaling: Scaling) -> Section:
    """Return the section of a run's report: scaling, parts of a step, and the predicted next to the recorded step."""
    rank_counts = tuple(point.ranks for point in scaling.points)
    parts: list[sections.Part] = [
        Text(plain(f"{_job(scaling)}. Link: {scaling.job.link.description}. " + " ".join(_notes(scaling))))
    ]
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
        parts.append(Chart("lines", "Scaling", "samples/s", rank_counts, lines, over="ranks", log=("at", "values")))
    names = [part for part in PARTS if any(point.predicted.parts[part] for point in scaling.points)]
    stacked = tuple(
        Series(name, tuple(1e3 * point.predicted.parts[name] for point in scaling.points)) for name in names
    )
    parts.append(
        Chart("stacked", "Average step of a rank", "ms", tuple(_count(count, "rank") for count in rank_counts), stacked)
    )
    parts += _step_charts(scaling)
    if scaling.worth:
        rows = tuple((gain.constant, 1e3 * gain.if_halved, 1e3 * gain.per_percent) for gain in scaling.worth)
        title = f"Gain from each constant on {_count(rank_counts[-1], 'rank')}"
        parts.append(Table(("constant", "saves if halved_ms", "saves per percent_ms"), rows, title))
    if scaling.change_predictions:
        change_rows = tuple(
            (plain(change.name), 1e3 * change.point.predicted.step, change.point.samples_per_s, 100 * change.speedup)
            for change in scaling.change_predictions
        )
        title = f"What if, on {_count(rank_counts[-1], 'rank')}"
        parts.append(Table(("change", "step_ms", "samples/s", "faster_percent"), change_rows, title))
    if scaling.recorded.unknown:
        parts.append(Table(("not known",), tuple((plain(text),) for text in scaling.recorded.unknown)))
    return Section("Prediction", tuple(parts))


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
        (predicted, f"Predicted on {_count(largest.ranks, 'rank')}"),
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


def lanes(schedule_: Schedule) -> dict[str, Lane]:
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
