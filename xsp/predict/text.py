"""A prediction as text that fits a terminal, as plain values, and as a section of the run's report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xsp import sections
from xsp.advise.text import duration
from xsp.predict import prediction, training
from xsp.predict.hoststep import Lane
from xsp.predict.prediction import EXPOSED, PARTS, WAITING
from xsp.predict.scaling import LIMITS, Changed, Point, Scaling, sharing_cores
from xsp.predict.schedule import Cause, Schedule
from xsp.predict.training import ALL
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

WIDTH = 79
SECTION = "predict"
BINS = 60
"""Number of time intervals in the chart of a step."""

_SHORT = {EXPOSED: "exposed", WAITING: "waiting", str(Cause.SERVING): "serving"}


def page(found: Scaling) -> str:
    """Return the step on each number of ranks, its parts, and the gain of improving each constant, as text."""
    recorded, job = found.recorded, found.job
    samples = f", {found.original.samples:g} samples per rank" if found.original.samples else ""
    step_text = f"{_interval(recorded.step, recorded.ends)} a step"
    lines = wrapped(f"{plain(recorded.name)}: {step_text}, recorded on {_count(recorded.ranks, 'rank')}{samples}", "  ")
    lines += wrapped(f"link   {plain(job.link.about)}", "       ")
    lines += wrapped(f"job    {_job(found)}", "       ")
    lines += [
        "",
        *columns(("ranks", "step", "from", "to", "samples/s", "efficiency", "bound by"), map(_row, found.points)),
    ]
    names = [part for part in PARTS if any(point.predicted.parts[part] for point in found.points)]
    lines += ["", "a step of the average rank, in ms", *columns(
        ("ranks", *(_SHORT.get(name, name) for name in names), "hidden"),
        ([_number(point.ranks), *(_ms(point.predicted.parts[name]) for name in names), _ms(point.predicted.hidden)]
         for point in found.points),
    )]  # fmt: skip
    if found.worth:
        last = found.points[-1]
        head = ("constant", "saves if halved", "per percent", "of the step")
        step = last.predicted.step or math.inf
        rows = (
            [gain.constant, duration(1e3 * gain.if_halved), duration(1e3 * gain.per_percent),
             f"{100 * gain.if_halved / step:.1f} %"] for gain in found.worth
        )  # fmt: skip
        lines += ["", f"what to buy, on {_count(last.ranks, 'rank')}", *columns(head, rows, left=1)]
    if found.changed:
        heads = ("what if", "step", "from", "to", "samples/s", "faster")
        lines += [
            "",
            f"on {_count(found.points[-1].ranks, 'rank')}",
            *columns(heads, map(_change_row, found.changed), left=1),
        ]
    lines += [
        "",
        *listed("from", recorded.sources),
        *listed("not known", recorded.unknown),
        *listed("note", _notes(found)),
    ]
    return "\n".join(lines)


def as_json(found: Scaling) -> dict[str, Any]:
    """Return the same as plain values; durations are in seconds, with `_s` in their keys."""
    recorded, job = found.recorded, found.job
    low, high = recorded.ends or (None, None)
    return {
        "xsp_predict": 1,
        "name": plain(recorded.name),
        "recorded": {
            "step_s": recorded.step, "low_s": low, "high_s": high, "ranks": recorded.ranks,
            "samples": found.original.samples, "gradient_bytes": sum(recorded.work.arrivals),
            "layers": len(recorded.work.layers),
        },
        "link": {
            "name": plain(job.link.name), "alpha_s": job.link.alpha, "beta_s_per_byte": job.link.beta,
            "gamma_s_per_byte": job.link.gamma, "source": plain(job.link.source), "quoted": job.link.quoted,
        },
        "job": {
            "algorithm": str(job.algorithm), "bucket_bytes": job.bucket, "accumulate": job.accumulate,
            "samples": recorded.samples, "sharded": job.sharded, "ranks_on_a_link": job.on_link,
            "ranks_on_a_disk": job.on_disk,
            "compress": job.compress, "straggler": {"factor": job.straggler.factor, "who": str(job.straggler.who)},
        },
        "ranks": [
            {
                "ranks": point.ranks, "step_s": point.predicted.step, "low_s": point.low, "high_s": point.high,
                "samples_per_s": point.samples_per_s, "efficiency": point.efficiency,
                "bound_by": point.predicted.bound_by,
                "parts_s": dict(point.predicted.parts), "critical_path_s": dict(point.predicted.path),
                "communication_s": point.predicted.communication, "hidden_s": point.predicted.hidden,
                "overlap": point.predicted.overlap, "steady": point.predicted.steady,
            }
            for point in found.points
        ],
        "worth": [
            {"constant": gain.constant, "saves_s_if_halved": gain.if_halved, "saves_s_per_percent": gain.per_percent}
            for gain in found.worth
        ],
        "what_if": [
            {
                "change": plain(change.name), "step_s": change.point.predicted.step, "low_s": change.point.low,
                "high_s": change.point.high, "samples_per_s": change.point.samples_per_s, "faster": change.faster,
                "bound_by": change.point.predicted.bound_by,
            }
            for change in found.changed
        ],
        "check": None if found.check is None else {
            "predicted_s": found.check.step, "recorded_s": found.measured, "ranks": recorded.ranks
        },
        "rebuilt": None if found.rebuilt is None else {
            "predicted_s": found.rebuilt.step, "exposed_s": found.rebuilt.parts[EXPOSED],
            "recorded_s": found.measured, "recorded_exposed_s": recorded.exposed,
        },
        "from": list(map(plain, recorded.sources)),
        "unknown": list(map(plain, recorded.unknown)),
        "notes": list(_notes(found)),
    }  # fmt: skip


def _job(found: Scaling) -> str:
    job, recorded = found.job, found.recorded
    gradients = sum(recorded.work.arrivals)
    if job.plan is not None:
        cut = f"in the {_count(len(job.plan), 'bucket')} of the run"
    else:
        limit = "25 MiB, the first 1 MiB" if job.bucket is None else f"{job.bucket / (1 << 20):.4g} MiB"
        cut = f"in buckets of {limit}"
    by = f"by {job.algorithm}" if job.link.measured is None else "as timed here"
    parts = [f"{gradients / 1e6:.4g} MB of gradients {cut}", f"all-reduce {by}"]
    if job.sharded:
        parts[1] = "sharded: all-gather twice and reduce-scatter, on a ring"
    if job.compress != 1.0:
        parts.append(f"gradients are compressed by {job.compress:g}")
    if job.accumulate > 1:
        parts.append(f"{job.accumulate} batches per update")
    if recorded.samples != found.original.samples:
        parts.append(f"batches of {recorded.samples:g} samples")
    if job.straggler.factor != 1.0:
        who = {"one": "one rank", "turns": "each rank in turn", "together": "one step of N, on all ranks at once,"}
        parts.append(f"{who[str(job.straggler.who)]} takes {job.straggler.factor:g} times as long")
    parts += [
        f"{count} ranks on a {what}" for what, count in (("link", job.on_link), ("disk", job.on_disk)) if count > 1
    ]
    return "; ".join(parts)


def _notes(found: Scaling) -> list[str]:
    curves = found.job.link.measured
    notes = list(LIMITS)
    if curves is not None:
        plan = training.plan_of(found.recorded.work, found.job)
        sizes = found.recorded.work.arrivals
        largest = max((sum(sizes[index] for index in bucket) for bucket in plan), default=0)
        notes = curves.notes([point.ranks for point in found.points], largest)
    if found.job.link.quoted:
        notes.insert(0, "The constants of the link are figures of its manufacturer, not measured; programs reach less.")
    if found.job.sharded and found.recorded.frozen:
        notes.append(f"{found.recorded.frozen / 1e6:.4g} MB of parameters are frozen; gathering them is not included.")
    if found.recorded.plan is not None and found.job.bucket and found.job.bucket < max(found.recorded.work.arrivals):
        notes.append("Only the buckets of the run are known, no gradients: a smaller --bucket does not divide them.")
    measured = found.measured or math.inf
    deviation = 0.0 if found.check is None else round(100 * (found.check.step / measured - 1), 1) + 0.0  # no "-0.0"
    if found.check is None:
        notes.append(
            f"No check: the run has {_count(found.recorded.ranks, 'rank')}, and their time over "
            f"{'no link' if found.job.link is training.NO_LINK else 'this link'} is unknown."
        )
    elif found.recorded.ranks == 1:
        notes.append(f"Check: the simulated step of one rank is {deviation:+.1f} % from the measured one.")
    else:
        notes.append(
            f"Check: for the {_count(found.recorded.ranks, 'rank')} of the run, the prediction over this link is "
            f"{duration(1e3 * found.check.step)}, {deviation:+.1f} % from what was measured over the run's own link."
        )
    if found.rebuilt is not None:
        deviation = round(100 * (found.rebuilt.step / measured - 1), 1) + 0.0
        notes.append(
            f"Check: with each all-reduce as long as in the run, the simulated step is "
            f"{duration(1e3 * found.rebuilt.step)}, {deviation:+.1f} % from the measured one; "
            f"{duration(1e3 * found.rebuilt.parts[EXPOSED])} of it are exposed communication, in the run "
            f"{duration(1e3 * found.recorded.exposed)}."
        )
    if not all(point.predicted.steady for point in found.points):
        notes.append("The simulated steps did not become periodic; figures are means of the later ones.")
    return notes


def _row(point: Point) -> list[str]:
    rate = "–" if point.samples_per_s is None else _number(point.samples_per_s)
    return [_number(point.ranks), *map(_duration, (point.predicted.step, point.low, point.high)), rate,
            f"{100 * point.efficiency:.1f} %", point.predicted.bound_by]  # fmt: skip


def _change_row(change: Changed) -> list[str]:
    point = change.point
    rate = "–" if point.samples_per_s is None else _number(point.samples_per_s)
    return [plain(change.name), *map(_duration, (point.predicted.step, point.low, point.high)), rate,
            f"{100 * change.faster:+.1f} %"]  # fmt: skip


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> list[str]:
    """Return lines of right-aligned columns; the first `left` columns and "bound by" are left-aligned."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    texts = {place for place in range(len(head)) if place < left or head[place] == "bound by"}
    return [
        " " + "  ".join(
            cell.ljust(width) if place in texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]  # fmt: skip


def listed(what: str, texts: Sequence[str]) -> list[str]:
    """Return the wrapped lines of texts, each with `what` before it."""
    lines = []
    for text in texts:
        lines += wrapped(f"{what}: {plain(text)}", "  ")
    return lines


def wrapped(text: str, indent: str) -> list[str]:
    """Return the lines of a text; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _interval(value: float, ends: tuple[float, float] | None) -> str:
    text = duration(1e3 * value)
    return text if ends is None else f"{text} [{duration(1e3 * ends[0])} … {duration(1e3 * ends[1])}]"


def _duration(value: float | None) -> str:
    return "–" if value is None else duration(1e3 * value)


def _number(value: float) -> str:
    if abs(value) >= 1e10:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ms(value: float) -> str:
    if value >= 1e6:
        return f"{1e3 * value:.3g}"
    return f"{1e3 * value:,.2f}" if value < 10 else f"{1e3 * value:,.0f}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


# --- the section of a report -------------------------------------------------------------------------------------


def section(found: Scaling) -> Section:
    """Return the section of a run's report: scaling, parts of a step, and the predicted next to the recorded step."""
    rank_counts = tuple(point.ranks for point in found.points)
    parts: list[sections.Part] = [
        Text(plain(f"{_job(found)}. Link: {found.job.link.about}. " + " ".join(_notes(found))))
    ]
    if found.recorded.samples:
        rates = tuple(point.samples_per_s for point in found.points)
        samples = found.recorded.samples * found.job.accumulate
        has_interval = found.recorded.ends is not None  # either all points have whiskers or none has
        low, high = (
            tuple(
                samples * point.ranks / step if step else None for point, step in zip(found.points, steps, strict=True)
            )
            if has_interval
            else ()
            for steps in ([point.high for point in found.points], [point.low for point in found.points])
        )
        single_step = found.points[0].efficiency * found.points[0].predicted.step
        perfect = tuple(samples * ranks / single_step if single_step else None for ranks in rank_counts)
        lines = (Series("predicted", rates, low, high), Series("perfect scaling", perfect))
        parts.append(Chart("lines", "Scaling", "samples/s", rank_counts, lines, over="ranks", log=("at", "values")))
    names = [part for part in PARTS if any(point.predicted.parts[part] for point in found.points)]
    stacked = tuple(Series(name, tuple(1e3 * point.predicted.parts[name] for point in found.points)) for name in names)
    parts.append(
        Chart("stacked", "Average step of a rank", "ms", tuple(_count(count, "rank") for count in rank_counts), stacked)
    )
    parts += _pictures(found)
    if found.worth:
        rows = tuple((gain.constant, 1e3 * gain.if_halved, 1e3 * gain.per_percent) for gain in found.worth)
        title = f"Gain from each constant on {_count(rank_counts[-1], 'rank')}"
        parts.append(Table(("constant", "saves if halved_ms", "saves per percent_ms"), rows, title))
    if found.changed:
        change_rows = tuple(
            (plain(change.name), 1e3 * change.point.predicted.step, change.point.samples_per_s, 100 * change.faster)
            for change in found.changed
        )
        title = f"What if, on {_count(rank_counts[-1], 'rank')}"
        parts.append(Table(("change", "step_ms", "samples/s", "faster_percent"), change_rows, title))
    if found.recorded.unknown:
        parts.append(Table(("not known",), tuple((plain(text),) for text in found.recorded.unknown)))
    return Section("Prediction", tuple(parts))


def keep(found: Scaling, place: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.write_if_run(Path(place), SECTION, section(found))


def _pictures(found: Scaling) -> list[sections.Part]:
    """Return charts of the recorded and the predicted step over the same time: the busy share of each interval."""
    largest = found.points[-1]
    predicted = lanes(
        prediction.predict(
            sharing_cores(found.recorded, largest.predicted.job), largest.predicted.job, fine=True
        ).schedule
    )
    ends = [end for step_lanes in (predicted, found.recorded.lanes) for lane in step_lanes.values() for _, end in lane]
    total = max(ends, default=0.0)
    if not total or not math.isfinite(total):
        return []
    charts = []
    titles = (
        (found.recorded.lanes, "The step as recorded, with the cost of profiling"),
        (predicted, f"Predicted on {_count(largest.ranks, 'rank')}"),
    )
    for step_lanes, title in titles:
        if step_lanes:
            rows = tuple(Series(name, _shares(lane, total)) for name, lane in step_lanes.items())
            centers = tuple(float(f"{1e3 * total * (place + 0.5) / BINS:.3g}") for place in range(BINS))
            charts.append(Chart("grid", title, "share of the time", centers, rows, over="ms"))
    return list(charts)


_ROWS = {Cause.INPUT: "input", Cause.COPY: "copy", Cause.FORWARD: "forward", Cause.BACKWARD: "backward",
         Cause.COMMUNICATION: "communication", Cause.UPDATE: "update", Cause.OTHER: "other",
         Cause.SERVING: "for communication"}  # fmt: skip


def lanes(found: Schedule) -> dict[str, Lane]:
    """Return the intervals of each activity of a rank of the first class in the last simulated step."""
    step = found.tasks[-1].step
    selected = [
        (number, task)
        for number, task in enumerate(found.tasks)
        if task.step == step and task.rank in (0, ALL) and task.seconds > 0
    ]
    begin = min((found.starts[number] for number, task in selected if "compute 0" in task.on), default=0.0)
    intervals: dict[str, list[tuple[float, float]]] = {}
    for number, task in sorted(selected, key=lambda entry: found.starts[entry[0]]):
        if found.ends[number] > begin:
            span = (max(0.0, found.starts[number] - begin), found.ends[number] - begin)
            intervals.setdefault(_ROWS[task.cause], []).append(span)
    return {name: tuple(intervals[name]) for name in _ROWS.values() if name in intervals}


def _shares(lane: Lane, total: float) -> tuple[float, ...]:
    """Return the share of each of `BINS` equal intervals that a lane covers."""
    width = total / BINS
    covered = [0.0] * BINS
    for start, end in lane:
        for place in range(max(0, int(start / width)), min(BINS - 1, int(end / width)) + 1):
            covered[place] += max(0.0, min(end, (place + 1) * width) - max(start, place * width))
    return tuple(min(1.0, seconds / width) for seconds in covered)
