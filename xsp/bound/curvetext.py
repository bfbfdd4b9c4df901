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
from xsp.bound.text import time
from xsp.scrub import plain
from xsp.sections import Chart, Part, Section, Series, Table, Text

WIDTH = 80
MOST_HOLES = 3


def page(found: Curve, source: str, step: str = "") -> str:
    """Return a table with a line for each size of blocks, the best cover, and the next command."""
    lines = [
        plain(
            f"{found.graph.name} from blocks of G consecutive calls, {found.threads} thread{'s' * (found.threads > 1)}"
        ),
        "measured: " + ("no run to compare with (--run DIR)" if found.measured_ns is None else time(found.measured_ns)),
        "",
        f"{'G':>2} {'blocks':>7} {'distinct':>9} {'timed':>7} "
        f"{'blocks take':>12} {'± 95 %':>9} {'error':>8} {'one of each':>12}",
        *map(_line, found.points),
        "",
        *(line for text in _told(found) for line in textwrap.wrap(plain(text), WIDTH)),
    ]
    if any(each.construction.at_least for each in found.points):
        lines += [
            "",
            f"time the missing blocks: xsp bound {plain(f'{shlex.quote(source)} {step}'.rstrip())} --curve --fill 5m",
        ]
    return "\n".join(lines)


def _line(point: Point) -> str:
    made = point.construction
    share = f"{100 * made.coverage.nodes / made.coverage.of_nodes:.0f} %"
    taken = "–" if made.ns is None else ("≥ " if made.at_least else "") + time(made.ns)
    half = "–" if made.half_ns is None else time(made.half_ns)
    error = "–" if point.error is None else f"{100 * point.error:+.1f} %"
    once = "–" if made.once_ns is None else time(made.once_ns)
    counts = f"{made.granularity:2} {len(made.windows):7,} {made.unique:9,} {share:>7}"
    return f"{counts} {taken:>12} {half:>9} {error:>8} {once:>12}"


def _told(found: Curve) -> Iterator[str]:
    """Yield texts on facts that are not in the table."""
    best = found.best
    glue = found.points[0].construction.glue_ns if found.points else None
    if best is not None and best.error is not None:
        yield f"Smallest error at G = {best.construction.granularity}: {100 * best.error:+.1f} %."
    if glue is not None:
        yield f"The error includes {time(glue)} that the framework adds; the time of the blocks does not."
    elif found.measured_ns is not None:
        yield "What the framework adds between calls is not timed: the error is that of the blocks only."
    if isinstance(found.cover, str):
        yield f"No cover by timed blocks: {found.cover}."
    else:
        made = found.cover
        yield (
            f"Best cover by blocks of up to {made.granularity} calls, at any offset: {time(made.ns)} by "
            f"{len(made.blocks)} of {made.arcs:,} timed ones; the median cover is {100 * made.spread:.1f} % longer."
        )
    first = found.points[0].construction if found.points else None
    for hole in first.holes[:MOST_HOLES] if first is not None else ():
        yield f"{hole.op}: {hole.count} times {hole.status.value}{f', {hole.reason}' if hole.reason else ''}"
    yield from found.problems


def as_json(found: Curve) -> dict[str, Any]:
    """Return the output of `xsp bound SOURCE --curve --format json`; times in nanoseconds, null if unknown."""
    made = found.cover
    return {
        "name": found.graph.name,
        "threads": found.threads,
        "measured_ns": found.measured_ns,
        "points": [{**_plain(each.construction), "error": each.error} for each in found.points],
        "cover": {"reason": made}
        if isinstance(made, str)
        else {
            "granularity": made.granularity,
            "ns": made.ns,
            "median_ns": made.median_ns,
            "spread": made.spread,
            "blocks": [[each.start, each.stop, each.ns] for each in made.blocks],
            "timed_blocks": made.arcs,
        },
        "problems": list(found.problems),
    }


def _plain(made: Construction) -> dict[str, Any]:
    return {
        "granularity": made.granularity,
        "blocks": len(made.windows),
        "unique": made.unique,
        "timed": made.coverage.nodes,
        "coverage_time": made.coverage.time,
        "ns": made.ns,
        "half_ns": made.half_ns,
        "at_least": made.at_least,
        "framework_ns": made.glue_ns,
        "once_ns": made.once_ns,
        "holes": [
            {"op": each.op, "count": each.count, "status": each.status.value, "reason": each.reason}
            for each in made.holes
        ],
    }


def keep(found: Curve, place: Path | str) -> Path | None:
    """Write the section into a run directory for the report; return None if it is none, or cannot be written."""
    return sections.kept(Path(place), "blocks", section(found))


def section(found: Curve) -> Section:
    """Return the curve as a section: error and time over the size of blocks."""
    sizes = tuple(each.construction.granularity for each in found.points)
    made = [each.construction for each in found.points]
    halves = [(each.ns, each.half_ns or 0.0) if each.ns is not None and not each.at_least else None for each in made]
    taken = Series(
        "blocks",
        tuple(None if each is None else each[0] / 1e6 for each in halves),
        tuple(None if each is None else (each[0] - each[1]) / 1e6 for each in halves),
        tuple(None if each is None else (each[0] + each[1]) / 1e6 for each in halves),
    )
    once = Series(
        "one run of each distinct block", tuple(None if each.once_ns is None else each.once_ns / 1e6 for each in made)
    )
    step = () if found.measured_ns is None else (Series("measured step", (found.measured_ns / 1e6,) * len(sizes)),)
    parts: list[Part] = [Text(text) for text in _told(found)]
    parts.append(
        Chart("lines", "The model from its blocks", "ms", sizes, (taken, *step, once), over="calls of a block, G")
    )
    if any(each.error is not None for each in found.points):
        errors = tuple(None if each.error is None else 100 * each.error for each in found.points)
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
    columns = ("G", "blocks", "different", "timed", "blocks_ms", "half_ms", "error_percent", "one_of_each_ms")
    rows = tuple(
        (
            each.granularity,
            len(each.windows),
            each.unique,
            each.coverage.nodes,
            None if each.ns is None or each.at_least else each.ns / 1e6,
            None if each.half_ns is None else each.half_ns / 1e6,
            None if point.error is None else 100 * point.error,
            None if each.once_ns is None else each.once_ns / 1e6,
        )
        for point, each in zip(found.points, made, strict=True)
    )
    parts.append(Table(columns, rows, "By size of the blocks"))
    return Section("Blocks", tuple(parts))
