"""A model from its blocks of each size, as text for 80 columns, as plain values, and as a section of a page."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xsp import sections
from xsp.bound.construct import Construction
from xsp.bound.curves import Curve, Point
from xsp.scrub import plain
from xsp.sections import Chart, Part, Section, Series, Table, Text
from xsp.texts import at_least, ns_text

WIDTH = 80
MOST_HOLES = 3


def page(curve: Curve, source: str, step: str = "") -> str:
    """Return a table with a line for each size of blocks, the best cover, and the next command."""
    lines = [
        plain(
            f"{curve.graph.name} from blocks of G consecutive calls, {curve.threads} thread{'s' * (curve.threads > 1)}"
        ),
        "measured: "
        + ("no run to compare with (--run DIR)" if curve.measured_ns is None else ns_text(curve.measured_ns)),
        "",
        f"{'G':>2} {'blocks':>7} {'distinct':>9} {'timed':>7} "
        f"{'blocks take':>12} {'± 95 %':>9} {'error':>8} {'one of each':>12}",
        *map(_line, curve.points),
        "",
        *(line for text in _remarks(curve) for line in textwrap.wrap(plain(text), WIDTH)),
    ]
    if any(point.construction.is_lower_limit for point in curve.points):
        lines += [
            "",
            f"time the missing blocks: xsp bound {plain(f'{shlex.quote(source)} {step}'.rstrip())} --curve --fill 5m",
        ]
    return "\n".join(lines)


def _line(point: Point) -> str:
    construction = point.construction
    share = f"{100 * construction.coverage.nodes / construction.coverage.of_nodes:.0f} %"
    total = "–" if construction.ns is None else at_least(ns_text(construction.ns), construction.is_lower_limit)
    half = "–" if construction.half_ns is None else ns_text(construction.half_ns)
    error = "–" if point.error is None else f"{100 * point.error:+.1f} %"
    once = "–" if construction.once_ns is None else ns_text(construction.once_ns)
    counts = f"{construction.granularity:2} {len(construction.windows):7,} {construction.unique:9,} {share:>7}"
    return f"{counts} {total:>12} {half:>9} {error:>8} {once:>12}"


def _remarks(curve: Curve) -> Iterator[str]:
    """Yield texts on facts that are not in the table."""
    best = curve.best
    glue = curve.points[0].construction.glue_ns if curve.points else None
    if best is not None and best.error is not None:
        yield f"Smallest error at G = {best.construction.granularity}: {100 * best.error:+.1f} %."
    if glue is not None:
        yield f"The error includes {ns_text(glue)} that the framework adds; the time of the blocks does not."
    elif curve.measured_ns is not None:
        yield "What the framework adds between calls is not timed: the error is that of the blocks only."
    if isinstance(curve.cover, str):
        yield f"No cover by timed blocks: {curve.cover}."
    else:
        cover = curve.cover
        yield (
            f"Best cover by blocks of up to {cover.granularity} calls, at any offset: {ns_text(cover.ns)} by "
            f"{len(cover.blocks)} of {cover.arcs:,} timed ones; the median cover is {100 * cover.spread:.1f} % longer."
        )
    smallest = curve.points[0].construction if curve.points else None
    for hole in smallest.holes[:MOST_HOLES] if smallest is not None else ():
        yield f"{hole.op}: {hole.count} times {hole.status.value}{f', {hole.reason}' if hole.reason else ''}"
    yield from curve.problems


def as_json(curve: Curve) -> dict[str, Any]:
    """Return the output of `xsp bound SOURCE --curve --format json`; times in nanoseconds, null if unknown."""
    cover = curve.cover
    return {
        "name": curve.graph.name,
        "threads": curve.threads,
        "measured_ns": curve.measured_ns,
        "points": [{**_plain(point.construction), "error": point.error} for point in curve.points],
        "cover": {"reason": cover}
        if isinstance(cover, str)
        else {
            "granularity": cover.granularity,
            "ns": cover.ns,
            "median_ns": cover.median_ns,
            "spread": cover.spread,
            "blocks": [[window.start, window.stop, window.ns] for window in cover.blocks],
            "timed_blocks": cover.arcs,
        },
        "problems": list(curve.problems),
    }


def _plain(construction: Construction) -> dict[str, Any]:
    return {
        "granularity": construction.granularity,
        "blocks": len(construction.windows),
        "unique": construction.unique,
        "timed": construction.coverage.nodes,
        "coverage_time": construction.coverage.time,
        "ns": construction.ns,
        "half_ns": construction.half_ns,
        "at_least": construction.is_lower_limit,
        "framework_ns": construction.glue_ns,
        "once_ns": construction.once_ns,
        "holes": [
            {"op": hole.op, "count": hole.count, "status": hole.status.value, "reason": hole.reason}
            for hole in construction.holes
        ],
    }


def write_section(curve: Curve, run: Path | str) -> Path | None:
    """Write the section into a run directory for the report; return None if it is none, or cannot be written."""
    return sections.write_if_run(Path(run), "blocks", section(curve))


def section(curve: Curve) -> Section:
    """Return the curve as a section: error and time over the size of blocks."""
    sizes = tuple(point.construction.granularity for point in curve.points)
    constructions = [point.construction for point in curve.points]
    halves = [
        (construction.ns, construction.half_ns or 0.0)
        if construction.ns is not None and not construction.is_lower_limit
        else None
        for construction in constructions
    ]
    totals = Series(
        "blocks",
        tuple(None if pair is None else pair[0] / 1e6 for pair in halves),
        tuple(None if pair is None else (pair[0] - pair[1]) / 1e6 for pair in halves),
        tuple(None if pair is None else (pair[0] + pair[1]) / 1e6 for pair in halves),
    )
    once = Series(
        "one run of each distinct block",
        tuple(None if construction.once_ns is None else construction.once_ns / 1e6 for construction in constructions),
    )
    step = () if curve.measured_ns is None else (Series("measured step", (curve.measured_ns / 1e6,) * len(sizes)),)
    parts: list[Part] = [Text(text) for text in _remarks(curve)]
    parts.append(
        Chart("lines", "The model from its blocks", "ms", sizes, (totals, *step, once), over="calls of a block, G")
    )
    if any(point.error is not None for point in curve.points):
        errors = tuple(None if point.error is None else 100 * point.error for point in curve.points)
        parts.append(
            Chart(
                "lines",
                "Error against the measured step",
                "%",
                sizes,
                (Series("error", errors),),
                over="calls of a block, G",
            )
        )
    columns = ("G", "blocks", "distinct", "timed", "blocks_ms", "blocks_half_ms", "error_percent", "one_of_each_ms")
    rows = tuple(
        (
            construction.granularity,
            len(construction.windows),
            construction.unique,
            construction.coverage.nodes,
            None if construction.ns is None or construction.is_lower_limit else construction.ns / 1e6,
            None if construction.half_ns is None else construction.half_ns / 1e6,
            None if point.error is None else 100 * point.error,
            None if construction.once_ns is None else construction.once_ns / 1e6,
        )
        for point, construction in zip(curve.points, constructions, strict=True)
    )
    parts.append(Table(columns, rows, "By size of the blocks"))
    return Section("Blocks", tuple(parts))
