"""A bound as a section of a page: the ladder, its differences, and the waterfall by layer."""

from __future__ import annotations

from pathlib import Path

from xsp import sections
from xsp.bound.ladder import BY_NODE, NAMES, ORDER, Bound, Layer, Rung
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

SECTION = "bound"
MOST_LAYERS = 40


def section(bound: Bound) -> Section:
    """Return the section of a report: ladder with intervals, named differences, waterfall by layer, holes."""
    ladder = bound.ladder
    totals = [bound.rungs[each.value] for each in ladder]
    bars = Series("step", *(tuple(map(_ms, those)) for those in (
        [each.sequential for each in totals], [each.low for each in totals], [each.high for each in totals]
    )))  # fmt: skip
    parts: list[sections.Part] = [Text(plain(_told(bound)))]
    if ladder:
        parts.append(Chart("bars", "Ladder", "ms", tuple(NAMES[each] for each in ladder), (bars,)))
    if bound.differences:
        rows = tuple((each.name, NAMES[each.below], NAMES[each.above], _ms(each.ns)) for each in bound.differences)
        parts.append(Table(("difference", "from", "to", "time_ms"), rows, "Differences; they add up exactly"))
    names, shown = _names(bound), _shown(bound)
    if shown and names:
        series = tuple(Series(name, tuple(_ms(dict(_steps(layer)).get(name)) for layer in shown)) for name in names)
        at = tuple(plain(layer.name) for layer in shown)
        parts.append(Chart("stacked", "Waterfall by layer", "ms", at, series))
    if bound.holes:
        rows_ = tuple((each.op, each.reason, each.calls, _ms(each.expected_ns)) for each in bound.holes)
        parts.append(Table(("operator", "why", "calls", "expected_ms"), rows_, "Without a figure"))
    return Section("Bound", tuple(parts))


def keep(bound: Bound, place: Path | str) -> Path | None:
    """Write the section into a run directory for `xsp report`; return None if it is none, or cannot be written."""
    return sections.kept(Path(place), SECTION, section(bound))


def _shown(bound: Bound) -> list[Layer]:
    return [each for each in bound.layers if each.differences][:MOST_LAYERS]


def _names(bound: Bound) -> list[str]:
    return list(dict.fromkeys(name for layer in bound.layers for name, _ in _steps(layer)))


def _steps(layer: Layer) -> list[tuple[str, float]]:
    """Return the lowest rung of a layer, then its differences in the order of the ladder."""
    lowest = next(((rung, layer.ns.get(rung)) for rung in BY_NODE if layer.ns.get(rung) is not None), None)
    order = {name: place for place, name in enumerate(ORDER)}
    apart = sorted(layer.differences, key=lambda each: order.get(each[0], 0))
    return [*([] if lowest is None or lowest[1] is None else [(NAMES[lowest[0]], lowest[1])]), *apart]


def _told(bound: Bound) -> str:
    found = bound.coverage
    time_ = "" if found.time is None else f", {100 * found.time:.1f} % of the expected time"
    absent = "; ".join(f"{NAMES[Rung(rung)]}: {reason}" for rung, reason in bound.absent.items())
    known = f"{found.nodes} of {found.of_nodes} calls have a figure{time_}."
    return known + (f" Missing rungs: {absent}." if absent else "")


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6
