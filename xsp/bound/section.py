"""A bound as a section of a page: ladder, differences, waterfall by layer, and the calls with the longest path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from xsp import sections
from xsp.bound.ladder import BY_NODE, NAMES, ORDER, Bound, Layer, Rung, difference_name
from xsp.bound.text import MOST_PROBLEMS
from xsp.graph import section as graphs
from xsp.graph.node import KnownBy
from xsp.graph.text import shapes
from xsp.scrub import plain
from xsp.sections import Branch, Cell, Chart, Section, Series, Table, Text, Tree
from xsp.texts import milliseconds

SECTION = "bound"
MOST_LAYERS = 40
MOST_CALLS = 5_000
"""Most nodes of a graph whose calls are shown singly: a page with more opens slowly."""

PATHS = (Rung.BEST, Rung.AS_RUN, Rung.CEILING, Rung.IN_PLACE)
"""Rungs whose longest path is marked, the first that has one."""


def section(bound: Bound) -> Section:
    """Return the section of a report: ladder with intervals, named differences, waterfall by layer, calls, holes."""
    ladder = bound.ladder
    totals = [bound.rungs[rung.value] for rung in ladder]
    bars = Series("step", *(tuple(map(milliseconds, row)) for row in (
        [total.sequential for total in totals], [total.low for total in totals], [total.high for total in totals]
    )))  # fmt: skip
    parts: list[sections.Part] = [Text(plain(_summary(bound)))]
    if ladder:
        labels = tuple(
            NAMES[rung] + (" (at least)" if total.is_lower_limit else "")
            for rung, total in zip(ladder, totals, strict=True)
        )
        parts.append(Chart("bars", "Ladder", "ms", labels, (bars,)))
    if bound.differences:
        rows = tuple(
            (difference.name, NAMES[difference.below], NAMES[difference.above], milliseconds(difference.ns))
            for difference in bound.differences
        )
        parts.append(Table(("difference", "from", "to", "time_ms"), rows, "Differences; they add up exactly"))
    parts += [*_waterfall(bound), *_calls(bound)]
    if bound.holes:
        rows_ = tuple((hole.op, hole.reason, hole.calls, milliseconds(hole.expected_ns)) for hole in bound.holes)
        parts.append(Table(("operator", "why", "calls", "expected_ms"), rows_, "Without a figure"))
    return Section("Bound", tuple(parts))


def write_section(bound: Bound, run: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.write_if_run(Path(run), SECTION, section(bound))


# --- the waterfall --------------------------------------------------------------------------------------------------


def _waterfall(bound: Bound) -> list[sections.Part]:
    """Return a bar for each of the layers with the largest differences, and what has no bar."""
    bars = [(layer, steps) for layer in bound.layers if len(steps := _steps(layer)) > 1]
    if not bars:
        return []
    largest = bars[:MOST_LAYERS]
    names = {name for _, steps in largest for name, _ in steps}
    order = list(dict.fromkeys([*(NAMES[rung] for rung in BY_NODE[:-1]), *ORDER, *sorted(names)]))
    series = tuple(
        Series(name, tuple(milliseconds(dict(steps).get(name)) for _, steps in largest))
        for name in order
        if name in names
    )
    labels = tuple(plain(layer.name) for layer, _ in largest)
    parts: list[sections.Part] = [Chart("stacked", "Waterfall by layer", "ms", labels, series)]
    notes = []
    if len(bars) > len(largest):
        notes.append(f"These are the {len(largest)} of {len(bars):,} layers with the largest differences.")
    if len(bars) < len(bound.layers):
        skipped = f"{len(bound.layers) - len(bars):,} of {len(bound.layers):,} layers"
        notes.append(f"{skipped} have no bar: all of their calls have a figure in one estimate at most.")
    return [*parts, *([Text(" ".join(notes))] if notes else [])]


def _steps(layer: Layer) -> list[tuple[str, float]]:
    """Return the parts of a layer's bar: its lowest rung, and the differences from each rung to the next.

    A rung on which a call of the layer has no figure is left out, so that the bar ends at the highest rung.
    """
    rungs = [(rung, ns) for rung in BY_NODE if (ns := layer.ns.get(rung)) is not None]
    if not rungs:
        return []
    (lowest, least), *_ = rungs
    return [(NAMES[lowest], least), *((difference_name(a, b), high - low) for (a, low), (b, high) in pairwise(rungs))]


# --- the calls ------------------------------------------------------------------------------------------------------


def _calls(bound: Bound) -> list[sections.Part]:
    """Return the longest path in words, and the modules with their calls and times; calls on the path are marked."""
    rungs = [rung for rung in BY_NODE if any(bound.figures.get(rung.value) or ())]
    if not rungs:
        return []
    rung = next((rung for rung in PATHS if bound.rungs[rung.value].path), None)
    notes = [Text(_path(bound, rung))]
    if len(bound.graph.nodes) > MOST_CALLS:
        return [*notes, Text(f"Its {len(bound.graph.nodes):,} calls are not shown singly: up to {MOST_CALLS:,} are.")]
    path: set[int] = set() if rung is None else set(bound.rungs[rung.value].path)

    def times(numbers: Sequence[int]) -> tuple[Cell, ...]:
        """Return the time of calls on each rung; None if one has no figure."""
        cells: list[Cell] = []
        for rung in rungs:
            figures = [bound.figures[rung.value][number] for number in numbers if bound.is_computing[number]]
            known_ns = [figure.ns for figure in figures if figure is not None]
            cells.append(milliseconds(math.fsum(known_ns)) if known_ns and len(known_ns) == len(figures) else None)
        return tuple(cells)

    def leaf(number: int) -> Branch:
        node = bound.graph.nodes[number]
        return Branch(plain(node.call.op), (plain(shapes(node)), *times([number])), number in path)

    def sums(numbers: Sequence[int]) -> tuple[Cell, ...]:
        return f"{len(numbers):,} calls", *times(numbers)

    root = graphs.branch("the step", graphs.tree(bound.graph, sections.MAX_LEVELS - 3), leaf, sums)
    mark = "" if rung is None else f"calls on the longest path through the data flow, by the times of {NAMES[rung]}"
    columns = ("inputs", *(f"{NAMES[rung]}_ms" for rung in rungs))
    return [*notes, Tree(columns, (root,), "Calls and the longest path", mark)]


def _path(bound: Bound, rung: Rung | None) -> str:
    """Return what the longest path takes on a rung; why there is none, without a rung."""
    if rung is None:
        if bound.graph.known_by is KnownBy.ORDER:
            return "There is no longest path: the source tells the order of calls, and no data flow."
        return "There is no longest path: too few calls have a figure."
    total = bound.rungs[rung.value]
    assert total.parallel is not None
    assert total.sequential is not None
    return (
        f"The longest path through the data flow has {len(total.path):,} of {sum(bound.is_computing):,} calls, and "
        f"takes {total.parallel / 1e6:.3g} ms of {total.sequential / 1e6:.3g} ms by the times of the estimate "
        f"{NAMES[rung]}."
    )


def _summary(bound: Bound) -> str:
    coverage = bound.coverage
    time_ = "" if coverage.time is None else f", {100 * coverage.time:.1f} % of the expected time"
    absent = "; ".join(f"{NAMES[Rung(rung)]}: {reason}" for rung, reason in bound.absent.items())
    sentence = f"{coverage.nodes} of {coverage.of_nodes} calls have a figure{time_}."
    doubts = "".join(f" {problem[:1].upper()}{problem[1:].rstrip('.')}." for problem in bound.problems[:MOST_PROBLEMS])
    sentence += f" Figures are {bound.scope_note}."
    return sentence + (f" Missing estimates: {absent}." if absent else "") + doubts
