"""A bound as a section of a page: ladder, differences, waterfall by layer, and the calls with the longest path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from xsp import sections
from xsp.bound.ladder import BY_NODE, NAMES, ORDER, Bound, Layer, Rung, between
from xsp.bound.text import MOST_PROBLEMS
from xsp.graph import section as graphs
from xsp.graph.node import KnownBy
from xsp.graph.text import shapes
from xsp.scrub import plain
from xsp.sections import Branch, Cell, Chart, Section, Series, Table, Text, Tree

SECTION = "bound"
MOST_LAYERS = 40
MOST_CALLS = 5_000
"""Most nodes of a graph whose calls are shown singly: a page with more opens slowly."""

PATHS = (Rung.BEST, Rung.AS_RUN, Rung.CEILING, Rung.IN_PLACE)
"""Rungs whose longest path is marked, the first that has one."""


def section(bound: Bound) -> Section:
    """Return the section of a report: ladder with intervals, named differences, waterfall by layer, calls, holes."""
    ladder = bound.ladder
    totals = [bound.rungs[each.value] for each in ladder]
    bars = Series("step", *(tuple(map(_ms, those)) for those in (
        [each.sequential for each in totals], [each.low for each in totals], [each.high for each in totals]
    )))  # fmt: skip
    parts: list[sections.Part] = [Text(plain(_told(bound)))]
    if ladder:
        at = tuple(
            NAMES[each] + (" (at least)" if total.at_least else "") for each, total in zip(ladder, totals, strict=True)
        )
        parts.append(Chart("bars", "Ladder", "ms", at, (bars,)))
    if bound.differences:
        rows = tuple((each.name, NAMES[each.below], NAMES[each.above], _ms(each.ns)) for each in bound.differences)
        parts.append(Table(("difference", "from", "to", "time_ms"), rows, "Differences; they add up exactly"))
    parts += [*_waterfall(bound), *_calls(bound)]
    if bound.holes:
        rows_ = tuple((each.op, each.reason, each.calls, _ms(each.expected_ns)) for each in bound.holes)
        parts.append(Table(("operator", "why", "calls", "expected_ms"), rows_, "Without a figure"))
    return Section("Bound", tuple(parts))


def keep(bound: Bound, place: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.kept(Path(place), SECTION, section(bound))


# --- the waterfall --------------------------------------------------------------------------------------------------


def _waterfall(bound: Bound) -> list[sections.Part]:
    """Return a bar for each of the layers with the largest differences, and what has no bar."""
    drawn = [(each, steps) for each in bound.layers if len(steps := _steps(each)) > 1]
    if not drawn:
        return []
    shown = drawn[:MOST_LAYERS]
    there = {name for _, steps in shown for name, _ in steps}
    order = list(dict.fromkeys([*(NAMES[each] for each in BY_NODE[:-1]), *ORDER, *sorted(there)]))
    series = tuple(
        Series(name, tuple(_ms(dict(steps).get(name)) for _, steps in shown)) for name in order if name in there
    )
    at = tuple(plain(layer.name) for layer, _ in shown)
    parts: list[sections.Part] = [Chart("stacked", "Waterfall by layer", "ms", at, series)]
    said = []
    if len(drawn) > len(shown):
        said.append(f"These are the {len(shown)} of {len(drawn):,} layers with the largest differences.")
    if len(drawn) < len(bound.layers):
        left = f"{len(bound.layers) - len(drawn):,} of {len(bound.layers):,} layers"
        said.append(f"{left} have no bar: all of their calls have a figure on one rung at most.")
    return [*parts, *([Text(" ".join(said))] if said else [])]


def _steps(layer: Layer) -> list[tuple[str, float]]:
    """Return the parts of a layer's bar: its lowest rung, and the differences from each rung to the next.

    A rung on which a call of the layer has no figure is left out, so that the bar ends at the highest rung.
    """
    known = [(rung, ns) for rung in BY_NODE if (ns := layer.ns.get(rung)) is not None]
    if not known:
        return []
    (lowest, least), *_ = known
    return [(NAMES[lowest], least), *((between(a, b), high - low) for (a, low), (b, high) in pairwise(known))]


# --- the calls ------------------------------------------------------------------------------------------------------


def _calls(bound: Bound) -> list[sections.Part]:
    """Return the longest path in words, and the modules with their calls and times; calls on the path are marked."""
    have = [each for each in BY_NODE if any(bound.figures.get(each.value) or ())]
    if not have:
        return []
    rung = next((each for each in PATHS if bound.rungs[each.value].path), None)
    said = [Text(_path(bound, rung))]
    if len(bound.graph.nodes) > MOST_CALLS:
        return [*said, Text(f"Its {len(bound.graph.nodes):,} calls are not shown singly: up to {MOST_CALLS:,} are.")]
    path: set[int] = set() if rung is None else set(bound.rungs[rung.value].path)

    def times(numbers: Sequence[int]) -> tuple[Cell, ...]:
        """Return the time of calls on each rung; None if one has no figure."""
        found: list[Cell] = []
        for each in have:
            figures = [bound.figures[each.value][number] for number in numbers if bound.counted[number]]
            known = [figure.ns for figure in figures if figure is not None]
            found.append(_ms(math.fsum(known)) if known and len(known) == len(figures) else None)
        return tuple(found)

    def leaf(number: int) -> Branch:
        node = bound.graph.nodes[number]
        return Branch(plain(node.call.op), (plain(shapes(node)), *times([number])), number in path)

    def sums(numbers: Sequence[int]) -> tuple[Cell, ...]:
        return f"{len(numbers):,} calls", *times(numbers)

    whole = graphs.branch("the step", graphs.tree(bound.graph, sections.MOST_LEVELS - 3), leaf, sums)
    mark = "" if rung is None else f"calls on the longest path through the data flow, by the times of {NAMES[rung]}"
    columns = ("inputs", *(f"{NAMES[each]}_ms" for each in have))
    return [*said, Tree(columns, (whole,), "Calls and the longest path", mark)]


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
        f"The longest path through the data flow has {len(total.path):,} of {sum(bound.counted):,} calls, and takes "
        f"{total.parallel / 1e6:.3g} ms of {total.sequential / 1e6:.3g} ms by the times of the rung {NAMES[rung]}."
    )


def _told(bound: Bound) -> str:
    found = bound.coverage
    time_ = "" if found.time is None else f", {100 * found.time:.1f} % of the expected time"
    absent = "; ".join(f"{NAMES[Rung(rung)]}: {reason}" for rung, reason in bound.absent.items())
    known = f"{found.nodes} of {found.of_nodes} calls have a figure{time_}."
    doubts = "".join(f" {each[:1].upper()}{each[1:].rstrip('.')}." for each in bound.problems[:MOST_PROBLEMS])
    return known + (f" Missing rungs: {absent}." if absent else "") + doubts


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6
