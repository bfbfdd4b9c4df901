"""A model from its blocks of each size, as text for 80 columns, as plain values, and as a section of a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xsp import sections, terminal
from xsp.bound import targets
from xsp.bound.construct import Construction
from xsp.bound.curves import Curve
from xsp.scrub import plain
from xsp.sections import Chart, Part, Section, Series, Table, Text
from xsp.texts import at_least, counted, milliseconds, ns_text

MOST_HOLES = 3


def page(curve: Curve, source: str, step: str = "") -> str:
    """Return the curve as text, and the command that times the missing blocks."""
    is_partial = any(point.construction.is_lower_limit for point in curve.points)
    command = f"{shlex.quote(source)} {step}".rstrip()
    return terminal.page(section(curve), targets.filled(f"xsp bound {command} --curve", "5m") if is_partial else "")


def _remarks(curve: Curve) -> Iterator[str]:
    """Yield texts on facts that are not in the table."""
    threads = counted(curve.threads, "thread")
    measured = "no run to compare with (--run DIR)" if curve.measured_ns is None else ns_text(curve.measured_ns)
    yield f"{plain(curve.graph.name)} from blocks of G consecutive calls, {threads}; measured: {measured}."
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
    over = "calls of a block, G"
    rows = []
    for point in curve.points:
        found = point.construction
        total = milliseconds(found.ns)
        rows.append((
            found.granularity, len(found.windows), found.unique, found.coverage.nodes,
            at_least(ns_text(found.ns), True) if total is not None and found.is_lower_limit else total,
            milliseconds(found.half_ns), None if point.error is None else 100 * point.error,
            milliseconds(found.once_ns),
        ))  # fmt: skip
    numbers = [row[4] if not isinstance(row[4], str) else None for row in rows]
    halves = [row[5] or 0.0 for row in rows]
    pairs = list(zip(numbers, halves, strict=True))
    totals = Series(
        "blocks",
        tuple(numbers),
        tuple(None if number is None else number - half for number, half in pairs),
        tuple(None if number is None else number + half for number, half in pairs),
    )
    step = () if curve.measured_ns is None else (Series("measured step", (curve.measured_ns / 1e6,) * len(sizes)),)
    once = Series("one run of each distinct block", tuple(row[7] for row in rows))
    parts: list[Part] = [Text(text) for text in _remarks(curve)]
    parts.append(Chart("lines", "The model from its blocks", "ms", sizes, (totals, *step, once), over))
    if any(point.error is not None for point in curve.points):
        errors = Series("error", tuple(row[6] for row in rows))
        parts.append(Chart("lines", "Error against the measured step", "%", sizes, (errors,), over))
    columns = (
        "G", "blocks", "distinct", "timed", "blocks_ms", "blocks_half_ms", "error_percent",
        "one_of_each_ms",
    )  # fmt: skip
    return Section("Blocks", (*parts, Table(columns, tuple(rows), "By size of the blocks")))
