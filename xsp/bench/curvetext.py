"""Curves of transfers and collectives as text for a terminal of 80 columns, as plain values, and as a section."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from xsp.bench.shapes import Known, Shape
from xsp.bench.spec import Timing, slowed
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, STORAGE, Curve, Ratio, ratios, slower
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

WIDTH = 79
NAME = 30
SECTION = {COLLECTIVES: "bench-collectives", "transfers": "bench-transfers"}
BARS = " ▁▂▃▄▅▆▇█"
KEPT = "\u00a0"
"""Stands for a space at which a line must not be wrapped."""

DISTURBED = 1.05
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def page(what: str, timings: Timings, found: Sequence[Curve], seconds: float | None, left: int, made: int) -> str:
    """Return a page: curve shapes, a chart of rates, ratios, missing sizes with reasons, and caveats on the figures.

    Args:
        what: `transfers` or `collectives`.
        timings: the table that the curves come from.
        found: fitted curves.
        seconds: time spent by this command; None if it timed nothing.
        left: number of specs without a timing.
        made: number of specs that this command timed.
    """
    count = sum(len(each.timings) for each in found)
    spent = "" if seconds is None else f", {made:,} of them now, in {seconds:.1f} s"
    lines = [f"{what}: {count:,} timings{spent}", plain(timings.environment.name)]
    again = "run it without --list" if seconds is None else "run it again"
    lines += [f"{left:,} sizes have no timing yet: {again}"] if left else []
    shaped = [each for each in found if each.shape is not None]
    if shaped:
        lines += ["", f"{'family':{NAME}} {'latency':>9} {'GB/s':>7} {'±%':>4} {'best':>7} {'at':>8}  knees"]
        for each in shaped:
            rows = textwrap.wrap(_row(each), WIDTH, subsequent_indent=" " * (NAME + 1))
            lines += [row.replace(KEPT, " ") for row in rows]
        lines += ["", "latency: α of the first piece; GB/s: 1/β of the last one; best: highest rate"]
        if any(each.ranks and each.threads > 1 for each in found):
            lines += ["ranks × N: N threads per rank"]
        low, high = _range(shaped)
        lines += ["", f"GB/s by size, {size(low)} to {size(high)}, each row up to its own best"]
        lines += [f"{plain(each.name)[:NAME]:{NAME}} {_bars(each, low, high)}" for each in shaped]
        lines += ["", *_wrapped(_fits(shaped))]
    single = [each for each in found if each.shape is None and each.timings]
    texts = [f"{plain(each.name):{NAME}} {_single(each)}" for each in single]
    lines += ["", *_wrapped(texts)] if texts else []
    texts = [
        f"{plain(each.name)}: {each.value:.2f} [{each.low:.2f} … {each.high:.2f}], {each.what}"
        for each in ratios(found)
    ]
    lines += ["", *_wrapped(texts)] if texts else []
    lines += _slower(found)
    said = notes(found, timings.cores)
    lines += [""] if said else []
    lines += _wrapped(said)
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
    knees = ", ".join(size(each.value).replace(" ", KEPT) for each in shape.knees) or "none"
    name = plain(curve.name)
    return f"{name[:NAME]:{NAME}} {_latency(shape.alpha):>9} {rate} {best[1] / 1e9:7.2f} {size(best[0]):>8}  {knees}"


def _fits(shaped: Sequence[Curve]) -> list[str]:
    """Return lines on the quality of the fits: held-out error, sizes that leave the model, range of extrapolation."""
    those = [(each, each.shape) for each in shaped if each.shape is not None]
    worst = max(those, key=lambda each: each[1].worst)
    held = [each.held_out for _, each in those if each.held_out is not None]
    middle = sorted(held)[len(held) // 2] if held else None
    lines = []
    if middle is not None:
        lines.append(f"every other size, predicted from the rest: {100 * middle:.1f}% error (median over the curves)")
    if worst[1].leaves:
        where = f"{worst[0].name} at {size(worst[1].worst_at)}, {100 * worst[1].worst:.0f}%"
        count = sum(each.leaves for _, each in those)
        lines.append(f"{count} of {len(those)} differ from their fit by more than 10% somewhere; most: {plain(where)}")
    far = sum(each.reach > each.pieces[-1].until for _, each in those)
    lines.append(f"beyond the largest size: {far} of {len(those)} may be extrapolated 2× or 4×, the others not at all")
    return lines


def _single(curve: Curve) -> str:
    texts = []
    for bytes_, each in curve.timings:
        of = f" {size(bytes_)}" if bytes_ else ""
        texts.append(f"{_time((each.trimmed_ns or 0) / 1e9)}{of}")
    return ", ".join(texts)


def _slower(found: Sequence[Curve]) -> list[str]:
    lines = []
    for each in slower(found):
        of = f" of {each.threads} threads" if each.threads > 1 else ""
        what = {"product": "products", "copy": "copies"}[each.what]
        lines.append(f"{each.ranks} ranks{of} at once: {what} take {each.factor:.2f} times as long as on one")
    return ["", *lines] if lines else []


def _range(shaped: Sequence[Curve]) -> tuple[float, float]:
    every = [bytes_ for each in shaped for bytes_, _ in each.timings]
    return min(every), max(every)


def _bars(curve: Curve, low: float, high: float, width: int = WIDTH - NAME - 1) -> str:
    """Return a curve's rates over the logarithm of the size as bar characters; blank where there is no timing."""
    best = (curve.best or (0, 1.0))[1]
    found = [" "] * width
    for bytes_, each in curve.timings:
        place = round((width - 1) * math.log(bytes_ / low) / (math.log(high / low) or 1.0))
        found[place] = BARS[max(1, min(8, math.ceil(8 * curve.rate(bytes_, each) / best)))]
    return "".join(found).rstrip()


def notes(found: Sequence[Curve], cores: int | None) -> list[str]:
    """Return caveats on the figures, and the reasons why some sizes are missing.

    Args:
        found: curves to comment on.
        cores: number of cores of the machine on which the curves were timed; None if unknown.
    """
    made = []
    if any(each.ranks for each in found):
        made.append("The ranks are processes on this machine: loopback is not a network.")
        most = max(each.ranks * each.threads for each in found)
        if cores is None or most >= cores:
            made.append(
                f"Cores are shared: ranks, gloo's own threads and the system have {cores or 'an unknown number of'} "
                "cores."
            )
    if any(each.family.group == STORAGE for each in found):
        made.append("Storage is shared with the system and, in a virtual machine, with others; the host may cache it.")
    drift = max((each.canary for each in found if each.canary is not None), default=1.0)
    if drift >= DISTURBED:
        made.append(f"disturbed: fixed work took {slowed(drift)} meanwhile; repeat with --again on a quiet machine")
    reasons: dict[str, int] = {}
    for curve in found:
        for _, each in curve.holes:
            reasons[f"{curve.name}: {each.status.value}, {each.reason}"] = 1 + reasons.get(
                f"{curve.name}: {each.status.value}, {each.reason}", 0
            )
    made += [f"{plain(reason)} ({count} sizes)" for reason, count in list(reasons.items())[:5]]
    made += [f"more reasons: {len(reasons) - 5}; --format json has all"] if len(reasons) > 5 else []
    return made


def size(value: float) -> str:
    """Return a number of bytes as text with a binary unit, such as `64 KiB`."""
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g} B"


def _latency(alpha: Known) -> str:
    return _time(alpha.value) if alpha.value else f"<{_time(alpha.high)}" if alpha.high else "–"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


# --- plain values ------------------------------------------------------------------------------------------------


def as_json(what: str, timings: Timings, found: Sequence[Curve], seconds: float | None, left: int, made: int) -> Any:
    """Return the content of `page` as plain values; the names of the keys contain the units."""
    return {
        "xsp_transfers": 1,
        "what": what,
        "environment": timings.environment.hash,
        "folder": str(timings.folder),
        "seconds": seconds,
        "timed_now": made,
        "missing": left,
        "curves": [_curve(each) for each in found],
        "ratios": [_ratio(each) for each in ratios(found)],
        "slower_together": [each._asdict() for each in slower(found)],
        "notes": notes(found, timings.cores),
        "problems": list(timings.problems),
    }


def _ratio(each: Ratio) -> dict[str, Any]:
    return {"name": each.name, "value": each.value, "low": each.low, "high": each.high, "what": each.what}


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "family": curve.family.name, "group": curve.family.group, "threads": curve.threads,
        "ranks": curve.ranks or None, "filesystem": curve.how or None,
        "traffic_factor": curve.family.traffic, "bus_factor": curve.bus_factor,
        "sizes": [_point(bytes_, each) for bytes_, each in (*curve.timings, *curve.holes)],
        "shape": None if curve.shape is None else shape_as_json(curve.shape),
    }  # fmt: skip


def _point(bytes_: int, each: Timing) -> dict[str, Any]:
    return {
        "bytes": bytes_, "status": each.status.value, "reason": each.reason, "trimmed_ns": each.trimmed_ns,
        "low_ns": each.low_ns, "high_ns": each.high_ns, "canary_ratio": each.canary_ratio, "key": each.key,
    }  # fmt: skip


def shape_as_json(shape: Shape) -> dict[str, Any]:
    """Return a shape as plain values."""
    return {
        "alpha_s": shape.alpha._asdict(),
        "beta_s_per_byte": shape.beta._asdict(),
        "knees_bytes": [each._asdict() for each in shape.knees],
        "pieces": [
            {"since_bytes": each.since, "until_bytes": each.until, "alpha_s": each.start._asdict(),
             "beta_s_per_byte": each.per_byte._asdict()} for each in shape.pieces
        ],
        "residual_median_percent": 100 * shape.residual,
        "residual_worst_percent": 100 * shape.worst,
        "residual_worst_bytes": shape.worst_at,
        "held_out_percent": None if shape.held_out is None else 100 * shape.held_out,
        "extrapolates_to_bytes": shape.reach,
    }  # fmt: skip


# --- the section of a report -------------------------------------------------------------------------------------


def section(what: str, timings: Timings, found: Sequence[Curve]) -> Section:
    """Return the section of a run's report: one chart of rates over sizes per group, and a table of shapes."""
    said = notes(found, timings.cores)
    parts: list[Any] = [Text(" ".join(map(plain, said)) or "Rates by size, and their fitted curves.")]
    shaped = [each for each in found if each.shape is not None]
    for group in dict.fromkeys(each.family.group for each in shaped):
        those = [each for each in shaped if each.family.group == group]
        at = tuple(sorted({bytes_ for each in those for bytes_, _ in each.timings}))
        series = []
        for each in those:
            by_size = {bytes_: each.rate(bytes_, timing) / 1e9 for bytes_, timing in each.timings}
            series.append(Series(plain(each.name), tuple(by_size.get(one) for one in at)))
        parts.append(Chart("lines", f"Rates of {group}", "GB/s", at, tuple(series), over="bytes", log=("at", "values")))
    columns = ("family", "alpha_us", "low_us", "high_us", "GB/s", "knees", "held out_percent", "extrapolates to")
    rows = []
    for each in shaped:
        shape = each.shape
        assert shape is not None
        alpha = [1e6 * value for value in shape.alpha]
        rows.append(
            (plain(each.name), *alpha, _rate(shape.beta), ", ".join(size(knee.value) for knee in shape.knees),
             None if shape.held_out is None else 100 * shape.held_out, size(shape.reach))
        )  # fmt: skip
    if rows:
        parts.append(Table(columns, tuple(rows), "Shapes"))
    if known := ratios(found):
        parts.append(
            Table(("ratio", "value", "low", "high", "of"),
                  tuple((plain(each.name), each.value, each.low, each.high, each.what) for each in known), "Ratios")
        )  # fmt: skip
    return Section(what.capitalize(), tuple(parts))


def _rate(beta: Known) -> float | None:
    return 1e-9 / beta.value if beta.value else None
