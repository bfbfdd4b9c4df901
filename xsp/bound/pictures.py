"""A bound as a page of its own, and as a section of a run's report: the ladder, and the waterfall by layer."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from xsp import atomic, rundir, sections
from xsp.bound.ladder import BY_NODE, NAMES, ORDER, Bound, Layer, Rung
from xsp.bound.text import time
from xsp.errors import OutputError, TraceError
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

SECTION = "bound"
MOST_LAYERS = 40
_COLOURS = ("#8fb3d9", "#3c78b4", "#e0a13c", "#c9506b", "#8a6fb0")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .3em 0 1em } td, th { padding: .1em .9em .1em 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } small { color: #666 } svg { display: block }
.bar { fill: #3c78b4 } .whisker { stroke: #c33; stroke-width: 2 } i { display: inline-block; height: 1em }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } small { color: #999 } }
"""


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
        parts.append(Table(("difference", "from", "to", "time_ms"), rows, "Differences, which add up exactly"))
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
    """Put the section into a run directory, where `xsp report` finds it; None where the place is none, or is full."""
    run = Path(place)
    try:
        if not run.is_dir():
            return None
        rundir.read_run(run)
        return sections.write(run, SECTION, section(bound))
    except (OutputError, TraceError):
        return None


def write(bound: Bound, path: Path | str) -> None:
    """Write a page of its own, without network and script.

    Raises:
        OutputError: it cannot be written; nothing is left of the attempt.
    """
    text = "\n".join(_lines(bound))
    try:
        with atomic.written(Path(path)) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: the page cannot be written ({error.strerror or error})") from error


def _lines(bound: Bound) -> Iterator[str]:
    title = _text(bound.graph.name)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1><p>{_text(_told(bound))}<h2>Ladder</h2>"
    yield from _bars(bound)
    yield '<h2>Differences</h2><table><tr><th>name<th>from<th>to<th class="n">time'
    for each in bound.differences:
        calls = "" if each.calls is None else f"{each.calls} "
        yield (
            f"<tr><td>{_text(calls + each.name)}<td>{NAMES[each.below]}<td>{NAMES[each.above]}"
            f'<td class="n">{time(each.ns)}'
        )
    yield "</table>"
    yield from _waterfall(bound)
    for heading, lines in (
        ("Without a figure", [f"{each.calls} × {each.op}: {each.reason}" for each in bound.holes]),
        ("What could not be seen", list(bound.problems)),
    ):
        if lines:
            yield f"<h2>{heading}</h2><ul>"
            yield from (f"<li>{_text(line)}" for line in lines)
            yield "</ul>"


def _bars(bound: Bound) -> Iterator[str]:
    """Draw a bar a rung, with a whisker over its interval."""
    most = max((bound.rungs[each.value].high or 0.0 for each in bound.ladder), default=0.0) or 1.0
    height = 26 * len(bound.ladder)
    yield f'<svg viewBox="0 0 900 {height}" width="900" height="{height}" role="img" aria-label="ladder">'
    for place, rung in enumerate(bound.ladder):
        total = bound.rungs[rung.value]
        middle = 26 * place + 13
        low, value, high = (620 * (each or 0.0) / most for each in (total.low, total.sequential, total.high))
        least = "≥ " if total.at_least else ""
        yield f'<text x="0" y="{middle + 4}" fill="currentColor">{NAMES[rung]}</text>'
        yield f'<rect class="bar" x="120" y="{middle - 9}" width="{value:.1f}" height="18"/>'
        if total.half_ns:
            yield f'<line class="whisker" x1="{120 + low:.1f}" x2="{120 + high:.1f}" y1="{middle}" y2="{middle}"/>'
        right = 126 + max(value, high)
        yield f'<text x="{right:.1f}" y="{middle + 4}" fill="currentColor">{least}{time(total.sequential)}</text>'
    yield "</svg>"


def _waterfall(bound: Bound) -> Iterator[str]:
    """Draw a row a layer: its lowest rung, then its differences; what is negative has no length, and is told."""
    names, shown = _names(bound), _shown(bound)
    if not shown:
        return
    most = max(sum(max(0.0, ns) for _, ns in _steps(layer)) for layer in shown) or 1.0
    yield f"<h2>Waterfall by layer</h2><p>{'; '.join(_swatch(names, name) + _text(name) for name in names)}"
    if len(bound.layers) > len(shown):
        yield f"<p><small>{len(shown)} of {len(bound.layers)} layers, those with the largest difference</small>"
    yield "<table>"
    for layer in shown:
        steps = dict(_steps(layer))
        told = ", ".join(f"{name} {time(ns)}" for name, ns in steps.items())
        drawn = "".join(_swatch(names, name, 500 * max(0.0, ns) / most) for name, ns in steps.items())
        yield f'<tr title="{_text(told)}"><td>{_text(layer.name)}<td>{drawn}<td><small>{_text(told)}</small>'
    yield "</table>"


def _swatch(names: list[str], name: str, width: float = 12) -> str:
    return f'<i style="width:{width:.1f}px;background:{_COLOURS[names.index(name) % len(_COLOURS)]}"></i>'


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
    return known + (f" Not there: {absent}." if absent else "")


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _text(text: str) -> str:
    return escape(plain(text))
