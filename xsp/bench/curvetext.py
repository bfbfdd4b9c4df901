"""Curves of transfers and collectives as a document, and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from xsp.bench.shapes import Shape
from xsp.bench.spec import Timing, slowdown_text
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, STORAGE, TransferCurve, ratios, slowdowns
from xsp.scrub import plain
from xsp.sections import Cell, Chart, Part, Section, Series, Table, Text
from xsp.texts import ns_text, size_text

SECTION = {COLLECTIVES: "bench-collectives", "transfers": "bench-transfers"}
DISTURBED = 1.05


def document(
    target: str, timings: Timings, curves: Sequence[TransferCurve], seconds: float | None, missing: int, new_count: int
) -> Section:
    """Return what a command shows: rates and shapes of the curves, ratios, missing sizes with reasons, and caveats.

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
    texts = [f"{target}: {count:,} timings{spent}", timings.environment.name]
    hint = "run it without --list" if seconds is None else "run it again"
    here = [device.get("name") for device in timings.environment.properties.get("devices") or ()]
    if len(here) > 1 and any(curve.family.device for curve in curves):
        texts.append(f"transfers of a device are those of the first, {here[0]}")
    texts += [f"{missing:,} sizes have no timing yet: {hint}"] if missing else []
    return Section(texts[0], (*map(Text, texts[1:]), *_parts(timings, curves)))


def section(target: str, timings: Timings, curves: Sequence[TransferCurve]) -> Section:
    """Return the section of a run's report: one chart of rates over sizes per group, tables of shapes and ratios."""
    return Section(target.capitalize(), tuple(_parts(timings, curves)))


def _parts(timings: Timings, curves: Sequence[TransferCurve]) -> Iterator[Part]:
    shaped = [(curve, curve.shape) for curve in curves if curve.shape is not None]
    if shaped:
        columns = ("family", "latency_ns", "low_ns", "high_ns", "GB/s", "±_percent", "best GB/s", "at", "knees",
                   "held out_percent", "extrapolates to")  # fmt: skip
        yield Table(columns, tuple(_row(curve, shape) for curve, shape in shaped), "Shapes")
        yield Text("latency: α of the first piece; GB/s: 1/β of the last one; best: highest rate.")
        if any(curve.ranks and curve.threads > 1 for curve in curves):
            yield Text("ranks × N: N threads per rank.")
        for group in dict.fromkeys(curve.family.group for curve, _ in shaped):
            yield _rates(group, [curve for curve, _ in shaped if curve.family.group == group])
        yield from map(Text, _fits(shaped))
    single = tuple((curve.name, _times(curve)) for curve in curves if curve.shape is None and curve.timings)
    if single:
        yield Table(("family", "times"), single)
    if rows := ratios(curves):
        values = tuple((row.name, row.value, row.low, row.high, row.description) for row in rows)
        yield Table(("ratio", "value", "low", "high", "of"), values, "Ratios")
    for slowdown in slowdowns(curves):
        suffix = f" of {slowdown.threads} threads" if slowdown.threads > 1 else ""
        work = {"product": "products", "copy": "copies"}[slowdown.what]
        yield Text(f"{slowdown.ranks} ranks{suffix} at once: {work} take {slowdown.factor:.2f} times as long as on one")
    yield from map(Text, notes(curves, timings.cores))


def _row(curve: TransferCurve, shape: Shape) -> tuple[Cell, ...]:
    alpha, beta = shape.alpha, shape.beta
    rate = (1e-9 / beta.value, 50 * (beta.high - beta.low) / beta.value) if beta.value else (None, None)
    size, best = curve.best or (0.0, 0.0)
    knees = ", ".join(size_text(knee.value) for knee in shape.knees) or "none"
    held_out = None if shape.held_out is None else 100 * shape.held_out
    latency = [1e9 * alpha.value or None, *(1e9 * seconds for seconds in alpha.ends)]
    return curve.name, *latency, *rate, best / 1e9, size_text(size), knees, held_out, size_text(shape.reach)


def _rates(group: str, curves: Sequence[TransferCurve]) -> Chart:
    sizes = tuple(sorted({bytes_ for curve in curves for bytes_, _ in curve.timings}))
    series = []
    for curve in curves:
        by_size = {bytes_: curve.rate(bytes_, timing) / 1e9 for bytes_, timing in curve.timings}
        series.append(Series(curve.name, tuple(by_size.get(bytes_) for bytes_ in sizes)))
    return Chart("lines", f"Rates of {group}", "GB/s", sizes, tuple(series), over="bytes", log=("at", "values"))


def _fits(shaped: Sequence[tuple[TransferCurve, Shape]]) -> Iterator[str]:
    """Yield texts on the quality of the fits: held-out error, sizes that leave the model, range of extrapolation."""
    errors = sorted(shape.held_out for _, shape in shaped if shape.held_out is not None)
    if errors:
        median = 100 * errors[len(errors) // 2]
        yield f"every other size, predicted from the rest: {median:.1f}% error (median over the curves)"
    curve, worst = max(shaped, key=lambda pair: pair[1].worst)
    if worst.has_outlier:
        location = f"{curve.name} at {size_text(worst.worst_at)}, {100 * worst.worst:.0f}%"
        count = sum(shape.has_outlier for _, shape in shaped)
        yield f"{count} of {len(shaped)} differ from their fit by more than 10% somewhere; most: {location}"
    extrapolated = sum(shape.reach > shape.pieces[-1].until for _, shape in shaped)
    yield (
        f"beyond the largest size: {extrapolated} of {len(shaped)} may be extrapolated 2× or 4×, the others not at all"
    )


def _times(curve: TransferCurve) -> str:
    """Return the times of a curve without a shape, with the size where there is one."""
    texts = (f"{ns_text(timing.trimmed_ns or 0)} {size_text(size) if size else ''}" for size, timing in curve.timings)
    return ", ".join(text.rstrip() for text in texts)


def notes(curves: Sequence[TransferCurve], cores: int | None) -> list[str]:
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


# --- plain values ------------------------------------------------------------------------------------------------


def as_json(
    target: str, timings: Timings, curves: Sequence[TransferCurve], seconds: float | None, missing: int, new_count: int
) -> Any:
    """Return the content of `document` as plain values; the names of the keys contain the units."""
    return {
        "xsp_transfers": 1,
        "what": target,
        "environment": timings.environment.hash,
        "folder": str(timings.folder),
        "seconds": seconds,
        "timed_now": new_count,
        "missing": missing,
        "curves": [_curve(curve) for curve in curves],
        "ratios": [
            {"name": ratio.name, "value": ratio.value, "low": ratio.low, "high": ratio.high, "what": ratio.description}
            for ratio in ratios(curves)
        ],
        "slower_together": [slowdown._asdict() for slowdown in slowdowns(curves)],
        "notes": notes(curves, timings.cores),
        "problems": timings.remarks,
    }


def _curve(curve: TransferCurve) -> dict[str, Any]:
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
