"""A bound as a document: ladder, differences, coverage, layers; on a page the waterfall, and the calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from xsp import sections
from xsp.bound.ladder import BY_NODE, NAMES, ORDER, Bound, LadderLayer, Rung, difference_name
from xsp.graph import section as graphs
from xsp.graph.node import KnownBy
from xsp.graph.section import phase, shapes
from xsp.scrub import plain
from xsp.sections import Branch, Cell, Chart, Part, Section, Series, Table, Text, Tree
from xsp.texts import at_least, milliseconds, ns_text

SECTION = "bound"
MOST_LAYERS = 40
LARGEST_LAYERS = 5
MOST_HOLES = 4
"""Operators without a figure that are listed where there is little room."""

MOST_PROBLEMS = 4
MOST_CALLS = 5_000
"""Most nodes of a graph whose calls are shown singly: a page with more opens slowly."""

PATHS = (Rung.BEST, Rung.AS_RUN, Rung.CEILING, Rung.IN_PLACE)
"""Rungs whose longest path is marked, the first that has one."""


def section(bound: Bound, *, details: bool = True) -> Section:
    """Return a bound as a document: ladder with intervals, named differences, coverage, layers, and holes.

    Args:
        bound: any bound.
        details: whether to add what a page has room for: the waterfall by layer, and the calls.
    """
    parts: list[Part] = [Text(text) for text in _conditions(bound)]
    parts += [*_ladder(bound), *map(Text, _parallel(bound)), *map(Text, _coverage(bound)), *_layers(bound)]
    parts += [*_waterfall(bound), *_calls(bound)] if details else []
    if bound.holes:
        holes = bound.holes if details else bound.holes[:MOST_HOLES]
        rows = tuple((hole.op, milliseconds(hole.expected_ns), hole.calls, hole.reason) for hole in holes)
        count = f"{sum(hole.calls for hole in bound.holes):,} calls of {len(bound.holes)} operators"
        title = f"{'Not timed' if _has_figures(bound, Rung.AS_RUN) else 'Without a ceiling'}: {count}"
        parts.append(Table(("operator", "expected_ms", "calls", "reason"), rows, title))
    parts += [Text(problem) for problem in bound.problems[:MOST_PROBLEMS]]
    if len(bound.problems) > MOST_PROBLEMS:
        parts.append(Text(f"{len(bound.problems) - MOST_PROBLEMS} more in --format json"))
    return Section("Bound" if details else bound.graph.name, tuple(parts))


def write_section(bound: Bound, run: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.write_if_run(Path(run), SECTION, section(bound))


def is_foreign(bound: Bound) -> bool:
    """Return whether the bound is for another device than that of the timings."""
    return "environment" not in bound.settings


def _conditions(bound: Bound) -> Iterator[str]:
    """Yield what the figures are of."""
    graph, settings = bound.graph, bound.settings
    conditions = [f"{sum(bound.is_computing):,} computing calls"]
    for name, text in (("batch", "batch {}"), ("dtype", "{}")):
        if graph.settings.get(name):
            conditions.append(text.format(graph.settings[name]))
    if phase(graph):
        conditions.append(phase(graph))
    elif graph.settings.get("train") is not None:
        conditions.append("training step" if graph.settings["train"] else "inference")
    if settings.get("threads") and not settings.get("device"):
        conditions.append(f"{settings['threads']} threads")
    if settings.get("state"):
        conditions.append(f"caches {settings['state']}")
    yield ", ".join(conditions)
    if settings.get("ceilings") is not None:
        yield f"ceilings of {settings['ceilings']['name']}"
    if settings.get("device"):
        yield f"timings of {settings['machine']}"
    if settings.get("processor_note") or bound.limit_text:
        yield settings.get("processor_note") or bound.limit_text
    for text in (bound.caches_text, bound.energy_text):
        if text:
            yield text
    yield bound.scope_note


def _ladder(bound: Bound) -> Iterator[Part]:
    """Yield the rungs as bars, why some are missing, and the differences."""
    totals = {rung: bound.rungs[rung.value] for rung in bound.ladder}
    if totals:
        bars = Series("step", *(tuple(map(milliseconds, row)) for row in (
            [total.sequential for total in totals.values()], [total.low for total in totals.values()],
            [total.high for total in totals.values()]
        )))  # fmt: skip
        labels = tuple(NAMES[rung] + " (at least)" * total.is_lower_limit for rung, total in totals.items())
        yield Chart("bars", "Ladder", "ms", labels, (bars,))
    timed = [] if is_foreign(bound) else [Rung.BEST, Rung.AS_RUN]
    requested = [Rung.BLOCKS] if bound.settings.get("granularity") else []
    whole = [Rung.REPLAYED, Rung.ISSUED] if bound.settings.get("device") else []
    for rung in (Rung.CEILING, *timed, *requested, *whole, Rung.MEASURED):
        if rung not in totals and bound.absent.get(rung.value):
            yield Text(f"{NAMES[rung]}: {bound.absent[rung.value]}")
    if bound.differences:
        top = totals[bound.ladder[-1]].sequential or 1.0
        rows = tuple(
            (delta.name if delta.calls is None else f"{delta.calls} {delta.name}", NAMES[delta.below],
             NAMES[delta.above], milliseconds(delta.ns), 100 * delta.ns / top)
            for delta in bound.differences
        )  # fmt: skip
        title = f"Differences, in percent of {NAMES[bound.ladder[-1]]}; they add up exactly"
        yield Table(("difference", "from", "to", "time_ms", "share_percent"), rows, title)


def _parallel(bound: Bound) -> Iterator[str]:
    rung = next((rung for rung in (Rung.BEST, Rung.CEILING) if bound.rungs[rung.value].parallel is not None), None)
    if rung is not None:
        total = bound.rungs[rung.value]
        without_limit = at_least(ns_text(total.parallel), total.is_lower_limit)
        figures = f"{without_limit} without limit, at least {ns_text(total.machine)} here"
        yield f"{NAMES[rung]}, in parallel: {figures}, {ns_text(total.schedule)} scheduled"
    elif bound.graph.known_by is KnownBy.ORDER:
        yield "in parallel: unknown, a trace has only the order of calls"


def _coverage(bound: Bound) -> Iterator[str]:
    for rung, label in ((Rung.CEILING, "ceilings"), (Rung.AS_RUN, "timings")):
        coverage = bound.rungs[rung.value].coverage
        if coverage.nodes or (rung is Rung.AS_RUN and not is_foreign(bound)):
            time_ = "" if coverage.time is None else f", {100 * coverage.time:.1f} % of the expected time"
            yield f"{label} of {coverage.nodes:,} of {coverage.of_nodes:,} calls{time_}"
    if bound.join is not None:
        rules = ", ".join(f"{count} by {name}" for name, count in bound.join.rules.items() if count)
        planned, unplanned = len(bound.join.unmatched_nodes), len(bound.join.unmatched_calls)
        yield f"trace {rules}; only in the graph {planned}, only in the trace {unplanned}"
    if bound.ratio is not None:
        faster = (
            f"at most {1 / bound.ratio:.2f} times as fast with these calls"
            if bound.ratio < 1
            else "the step is faster than its calls alone"
        )
        yield f"best / measured {bound.ratio:.3f}: {faster}"
    if bound.below_ceiling:
        yield f"{bound.below_ceiling} calls are below their ceiling: cached data, or a machine busy when measured"
    if bound.settings.get("at_the_floor"):
        yield f"{bound.settings['at_the_floor']} calls take no longer than an empty call"


def _layers(bound: Bound) -> Iterator[Part]:
    rungs = [rung for rung in BY_NODE if _has_figures(bound, rung)]
    largest = [layer for layer in bound.layers if layer.differences][:LARGEST_LAYERS]
    if largest:
        columns = ("layer", "largest difference", "time_ms", *(f"{NAMES[rung]}_ms" for rung in rungs))
        rows = tuple(
            (layer.name, name, milliseconds(ns), *(milliseconds(layer.ns.get(rung)) for rung in rungs))
            for layer in largest
            for name, ns in layer.differences[:1]
        )
        yield Table(columns, rows, "Layers with the largest differences")


def _has_figures(bound: Bound, rung: Rung) -> bool:
    return any(bound.figures.get(rung.value) or ())


# --- the waterfall --------------------------------------------------------------------------------------------------


def _waterfall(bound: Bound) -> list[Part]:
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
    parts: list[Part] = [Chart("stacked", "Waterfall by layer", "ms", labels, series)]
    notes = []
    if len(bars) > len(largest):
        notes.append(f"These are the {len(largest)} of {len(bars):,} layers with the largest differences.")
    if len(bars) < len(bound.layers):
        skipped = f"{len(bound.layers) - len(bars):,} of {len(bound.layers):,} layers"
        notes.append(f"{skipped} have no bar: all of their calls have a figure in one estimate at most.")
    return [*parts, *([Text(" ".join(notes))] if notes else [])]


def _steps(layer: LadderLayer) -> list[tuple[str, float]]:
    """Return the parts of a layer's bar: its lowest rung, and the differences from each rung to the next.

    A rung on which a call of the layer has no figure is left out, so that the bar ends at the highest rung.
    """
    rungs = [(rung, ns) for rung in BY_NODE if (ns := layer.ns.get(rung)) is not None]
    if not rungs:
        return []
    (lowest, least), *_ = rungs
    return [(NAMES[lowest], least), *((difference_name(a, b), high - low) for (a, low), (b, high) in pairwise(rungs))]


# --- the calls ------------------------------------------------------------------------------------------------------


def _calls(bound: Bound) -> list[Part]:
    """Return the longest path in words, and the modules with their calls and times; calls on the path are marked."""
    rungs = [rung for rung in BY_NODE if _has_figures(bound, rung)]
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
