"""Curves of transfers and collectives as text for a terminal of 80 columns, as plain values, and as a section."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from xsp.bench.shapes import Shape
from xsp.bench.spec import Timing, slowdown_text
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, STORAGE, Curve, Ratio, ratios, slowdowns
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text
from xsp.stats import Interval
from xsp.texts import ns_text, seconds_text, size_text

WIDTH = 79
NAME = 30
SECTION = {COLLECTIVES: "bench-collectives", "transfers": "bench-transfers"}
BARS = " ▁▂▃▄▅▆▇█"
NO_BREAK_SPACE = "\u00a0"
"""A space at which a line must not be wrapped."""

DISTURBED = 1.05


def page(
    target: str, timings: Timings, curves: Sequence[Curve], seconds: float | None, missing: int, new_count: int
) -> str:
    """Return a page: curve shapes, a chart of rates, ratios, missing sizes with reasons, and caveats on the figures.

    Args:
        target: `transfers` or `collectives`.
        timings: the table that the curves come from.
        curves: fitted curves.
        seconds: time spent by this command; None if it timed nothing.
        missing: number of specs without a timing.
        new_count: number of specs that this command timed.
    """
    count = sum(len(curve.timings) for curve in curves)
    spent = "" if seconds is None else f", {new_count:,} of them now, in {seconds:.1f} s"
    lines = [f"{target}: {count:,} timings{spent}", plain(timings.environment.name)]
    hint = "run it without --list" if seconds is None else "run it again"
    lines += [f"{missing:,} sizes have no timing yet: {hint}"] if missing else []
    shaped = [curve for curve in curves if curve.shape is not None]
    if shaped:
        lines += ["", f"{'family':{NAME}} {'latency':>9} {'GB/s':>7} {'±%':>4} {'best':>7} {'at':>8}  knees"]
        for curve in shaped:
            rows = textwrap.wrap(_row(curve), WIDTH, subsequent_indent=" " * (NAME + 1))
            lines += [row.replace(NO_BREAK_SPACE, " ") for row in rows]
        lines += ["", "latency: α of the first piece; GB/s: 1/β of the last one; best: highest rate"]
        if any(curve.ranks and curve.threads > 1 for curve in curves):
            lines += ["ranks × N: N threads per rank"]
        low, high = _range(shaped)
        lines += ["", f"GB/s by size, {size_text(low)} to {size_text(high)}, each row up to its own best"]
        lines += [f"{plain(curve.name)[:NAME]:{NAME}} {_bars(curve, low, high)}" for curve in shaped]
        lines += ["", *_wrapped(_fits(shaped))]
    single = [curve for curve in curves if curve.shape is None and curve.timings]
    texts = [f"{plain(curve.name):{NAME}} {_single(curve)}" for curve in single]
    lines += ["", *_wrapped(texts)] if texts else []
    texts = [
        f"{plain(ratio.name)}: {ratio.value:.2f} [{ratio.low:.2f} … {ratio.high:.2f}], {ratio.description}"
        for ratio in ratios(curves)
    ]
    lines += ["", *_wrapped(texts)] if texts else []
    lines += _slower(curves)
    caveats = notes(curves, timings.cores)
    lines += [""] if caveats else []
    lines += _wrapped(caveats)
    return "\n".join(lines)


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _row(curve: Curve) -> str:
    shape, best = curve.shape, curve.best
    assert shape is not None
    assert best is not None
    beta = shape.beta
    half = 100 * (beta.high - beta.low) / 2 / beta.value if beta.value else math.inf
    rate = f"{1e-9 / beta.value:7.2f} {min(half, 999):4.0f}" if beta.value else f"{'–':>7} {'–':>4}"
    knees = ", ".join(size_text(knee.value).replace(" ", NO_BREAK_SPACE) for knee in shape.knees) or "none"
    name = plain(curve.name)
    return (
        f"{name[:NAME]:{NAME}} {_latency(shape.alpha):>9} {rate} {best[1] / 1e9:7.2f} {size_text(best[0]):>8}  {knees}"
    )


def _fits(shaped: Sequence[Curve]) -> list[str]:
    """Return lines on the quality of the fits: held-out error, sizes that leave the model, range of extrapolation."""
    pairs = [(curve, curve.shape) for curve in shaped if curve.shape is not None]
    worst = max(pairs, key=lambda pair: pair[1].worst)
    errors = [shape.held_out for _, shape in pairs if shape.held_out is not None]
    median = sorted(errors)[len(errors) // 2] if errors else None
    lines = []
    if median is not None:
        lines.append(f"every other size, predicted from the rest: {100 * median:.1f}% error (median over the curves)")
    if worst[1].has_outlier:
        location = f"{worst[0].name} at {size_text(worst[1].worst_at)}, {100 * worst[1].worst:.0f}%"
        count = sum(shape.has_outlier for _, shape in pairs)
        lines.append(
            f"{count} of {len(pairs)} differ from their fit by more than 10% somewhere; most: {plain(location)}"
        )
    extrapolated = sum(shape.reach > shape.pieces[-1].until for _, shape in pairs)
    lines.append(
        f"beyond the largest size: {extrapolated} of {len(pairs)} may be extrapolated 2× or 4×, the others not at all"
    )
    return lines


def _single(curve: Curve) -> str:
    texts = []
    for bytes_, timing in curve.timings:
        suffix = f" {size_text(bytes_)}" if bytes_ else ""
        texts.append(f"{ns_text(timing.trimmed_ns or 0)}{suffix}")
    return ", ".join(texts)


def _slower(curves: Sequence[Curve]) -> list[str]:
    lines = []
    for slowdown in slowdowns(curves):
        suffix = f" of {slowdown.threads} threads" if slowdown.threads > 1 else ""
        work = {"product": "products", "copy": "copies"}[slowdown.what]
        lines.append(
            f"{slowdown.ranks} ranks{suffix} at once: {work} take {slowdown.factor:.2f} times as long as on one"
        )
    return ["", *lines] if lines else []


def _range(shaped: Sequence[Curve]) -> tuple[float, float]:
    sizes = [bytes_ for curve in shaped for bytes_, _ in curve.timings]
    return min(sizes), max(sizes)


def _bars(curve: Curve, low: float, high: float, width: int = WIDTH - NAME - 1) -> str:
    """Return a curve's rates over the logarithm of the size as bar characters; blank where there is no timing."""
    best = (curve.best or (0, 1.0))[1]
    cells = [" "] * width
    for bytes_, timing in curve.timings:
        column = round((width - 1) * math.log(bytes_ / low) / (math.log(high / low) or 1.0))
        cells[column] = BARS[max(1, min(8, math.ceil(8 * curve.rate(bytes_, timing) / best)))]
    return "".join(cells).rstrip()


def notes(curves: Sequence[Curve], cores: int | None) -> list[str]:
    """Return caveats on the figures, and the reasons why some sizes are missing.

    Args:
        curves: curves to comment on.
        cores: number of cores of the machine on which the curves were timed; None if unknown.
    """
    caveats = []
    if any(curve.ranks for curve in curves):
        caveats.append("The ranks are processes on this machine: loopback is not a network.")
        largest = max(curve.ranks * curve.threads for curve in curves)
        if cores is None or largest >= cores:
            caveats.append(
                f"Cores are shared: ranks, gloo's own threads and the system have {cores or 'an unknown number of'} "
                "cores."
            )
    if any(curve.family.group == STORAGE for curve in curves):
        caveats.append(
            "Storage is shared with the system and, in a virtual machine, with others; the host may cache it."
        )
    drift = max((curve.canary for curve in curves if curve.canary is not None), default=1.0)
    if drift >= DISTURBED:
        caveats.append(
            f"disturbed: fixed work took {slowdown_text(drift)} meanwhile; repeat with --again on an idle machine"
        )
    reasons: dict[str, int] = {}
    for curve in curves:
        for _, timing in curve.holes:
            reasons[f"{curve.name}: {timing.status.value}, {timing.reason}"] = 1 + reasons.get(
                f"{curve.name}: {timing.status.value}, {timing.reason}", 0
            )
    caveats += [f"{plain(reason)} ({count} sizes)" for reason, count in list(reasons.items())[:5]]
    caveats += [f"more reasons: {len(reasons) - 5}; --format json has all"] if len(reasons) > 5 else []
    return caveats


def _latency(alpha: Interval) -> str:
    return seconds_text(alpha.value) if alpha.value else f"<{seconds_text(alpha.high)}" if alpha.high else "–"


# --- plain values ------------------------------------------------------------------------------------------------


def as_json(
    target: str, timings: Timings, curves: Sequence[Curve], seconds: float | None, missing: int, new_count: int
) -> Any:
    """Return the content of `page` as plain values; the names of the keys contain the units."""
    return {
        "xsp_transfers": 1,
        "what": target,
        "environment": timings.environment.hash,
        "folder": str(timings.folder),
        "seconds": seconds,
        "timed_now": new_count,
        "missing": missing,
        "curves": [_curve(curve) for curve in curves],
        "ratios": [_ratio(ratio) for ratio in ratios(curves)],
        "slower_together": [slowdown._asdict() for slowdown in slowdowns(curves)],
        "notes": notes(curves, timings.cores),
        "problems": list(timings.problems),
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"name": ratio.name, "value": ratio.value, "low": ratio.low, "high": ratio.high, "what": ratio.description}


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "family": curve.family.name, "group": curve.family.group, "threads": curve.threads,
        "ranks": curve.ranks or None, "filesystem": curve.conditions or None,
        "traffic_factor": curve.family.traffic, "bus_factor": curve.bus_factor,
        "sizes": [_point(bytes_, timing) for bytes_, timing in (*curve.timings, *curve.holes)],
        "shape": None if curve.shape is None else shape_as_json(curve.shape),
    }  # fmt: skip


def _point(bytes_: int, timing: Timing) -> dict[str, Any]:
    return {
        "bytes": bytes_, "status": timing.status.value, "reason": timing.reason, "trimmed_ns": timing.trimmed_ns,
        "low_ns": timing.low_ns, "high_ns": timing.high_ns, "canary_ratio": timing.canary_ratio, "key": timing.key,
    }  # fmt: skip


def shape_as_json(shape: Shape) -> dict[str, Any]:
    """Return a shape as plain values."""
    return {
        "alpha_s": asdict(shape.alpha),
        "beta_s_per_byte": asdict(shape.beta),
        "knees_bytes": [asdict(knee) for knee in shape.knees],
        "pieces": [
            {"since_bytes": piece.since, "until_bytes": piece.until, "alpha_s": asdict(piece.start),
             "beta_s_per_byte": asdict(piece.per_byte)} for piece in shape.pieces
        ],
        "residual_median_percent": 100 * shape.residual,
        "residual_worst_percent": 100 * shape.worst,
        "residual_worst_bytes": shape.worst_at,
        "held_out_percent": None if shape.held_out is None else 100 * shape.held_out,
        "extrapolates_to_bytes": shape.reach,
    }  # fmt: skip


# --- the section of a report -------------------------------------------------------------------------------------


def section(target: str, timings: Timings, curves: Sequence[Curve]) -> Section:
    """Return the section of a run's report: one chart of rates over sizes per group, and a table of shapes."""
    caveats = notes(curves, timings.cores)
    parts: list[Any] = [Text(" ".join(map(plain, caveats)) or "Rates by size, and their fitted curves.")]
    shaped = [curve for curve in curves if curve.shape is not None]
    for group in dict.fromkeys(curve.family.group for curve in shaped):
        group_curves = [curve for curve in shaped if curve.family.group == group]
        sizes = tuple(sorted({bytes_ for curve in group_curves for bytes_, _ in curve.timings}))
        series = []
        for curve in group_curves:
            by_size = {bytes_: curve.rate(bytes_, timing) / 1e9 for bytes_, timing in curve.timings}
            series.append(Series(plain(curve.name), tuple(by_size.get(bytes_) for bytes_ in sizes)))
        parts.append(
            Chart("lines", f"Rates of {group}", "GB/s", sizes, tuple(series), over="bytes", log=("at", "values"))
        )
    columns = ("family", "alpha_us", "low_us", "high_us", "GB/s", "knees", "held out_percent", "extrapolates to")
    rows = []
    for curve in shaped:
        shape = curve.shape
        assert shape is not None
        alpha = [1e6 * value for value in (shape.alpha.value, *shape.alpha.ends)]
        rows.append(
            (plain(curve.name), *alpha, _rate(shape.beta), ", ".join(size_text(knee.value) for knee in shape.knees),
             None if shape.held_out is None else 100 * shape.held_out, size_text(shape.reach))
        )  # fmt: skip
    if rows:
        parts.append(Table(columns, tuple(rows), "Shapes"))
    if ratio_rows := ratios(curves):
        parts.append(
            Table(("ratio", "value", "low", "high", "of"),
                  tuple((plain(row.name), row.value, row.low, row.high, row.description) for row in ratio_rows),
                  "Ratios")
        )  # fmt: skip
    return Section(target.capitalize(), tuple(parts))


def _rate(beta: Interval) -> float | None:
    return 1e-9 / beta.value if beta.value else None
