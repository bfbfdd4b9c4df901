"""Which charts stand in the page, as one table: each draws columns of an analysis, in a section, in a way.

A chart computes nothing: what it shows is in the table of the same analysis. Where the analysis refuses, or the
column that it draws was not measured, the section says so instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_POINTS = 20_000
"""Rows that a chart draws; of more, the first, and the chart says so."""

Rows = Sequence[Sequence[Any]]


class Chart(NamedTuple):
    """A chart: the analysis that it draws, where, how (see `charts.js`), and which column is what in the drawing."""

    analysis: str
    section: str
    kind: str
    title: str
    unit: str
    columns: Mapping[str, str]
    series: Sequence[tuple[str, str]] = ()
    """For stacked bars: each column with what the legend calls it."""

    @property
    def drawn(self) -> list[str]:
        """The columns without which nothing can be drawn: any of them must hold something."""
        return [column for column, _ in self.series] or [self.columns["value"]]


_LAYER = {"at": "layer_index", "name": "name", "group": "type"}
_BY_TYPE = {"name": "type"}

CHARTS: tuple[Chart, ...] = (
    Chart(
        "A2", "time", "layers", "A2, A3 Layer latency", "ms",
        {**_LAYER, "value": "self_ms", "whole": "latency_ms", "low": "latency_low_ms", "high": "latency_high_ms"},
    ),
    Chart("A6", "time", "shares", "A6 Layer latency by type", "ms", {**_BY_TYPE, "value": "latency_ms"}),
    Chart(
        "A13", "time", "stack", "A13 Kernel against other latency", "% of the layer",
        {"at": "layer_index", "name": "layer_name"}, (("kernel_ms", "kernels"), ("other_ms", "other")),
    ),
    Chart("A10", "time", "shares", "A10 Kernels by name", "ms", {"name": "name", "value": "latency_ms"}),
    Chart("A5", "time", "shares", "A5 Layer type distribution", "layers", {**_BY_TYPE, "value": "layers"}),
    Chart("A4", "memory", "layers", "A4 Layer memory allocation", "MiB", {**_LAYER, "value": "alloc_mib"}),
    Chart("A7", "memory", "shares", "A7 Layer memory allocation by type", "MiB", {**_BY_TYPE, "value": "alloc_mib"}),
)  # fmt: skip
"""All charts, in the order of the page."""


def of(analysis: str) -> list[Chart]:
    """Return the charts of an analysis."""
    return [chart for chart in CHARTS if chart.analysis == analysis]


def in_order(charts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return charts in the order of the page."""
    titles = [chart.title for chart in CHARTS]
    return sorted(charts, key=lambda chart: titles.index(chart["title"]))


def missing(chart: Chart, reason: str) -> dict[str, Any]:
    """Return what the page says where there is nothing to draw."""
    return {"section": chart.section, "id": chart.analysis, "title": chart.title, "missing": reason}


def drawn(chart: Chart, columns: Sequence[str], rows: Rows) -> dict[str, Any]:
    """Return what the page draws of an analysis, or why there is nothing to draw.

    Args:
        chart: of the analysis.
        columns: that the analysis has.
        rows: all of them.
    """
    places = {column: place for place, column in enumerate(columns)}
    if not any(row[places[column]] is not None for column in chart.drawn if column in places for row in rows):
        return missing(chart, f"{chart.analysis}: {_words(chart.drawn)} was not measured")
    shown = rows[:MOST_POINTS]
    return {
        "section": chart.section,
        "kind": chart.kind,
        "id": chart.analysis,
        "title": chart.title,
        "unit": chart.unit,
        "left_out": len(rows) - len(shown),
        "data": {role: [row[places[name]] for row in shown] for role, name in chart.columns.items() if name in places},
        "series": [
            {"name": name, "values": [row[places[column]] for row in shown]}
            for column, name in chart.series
            if column in places
        ],
    }


def _words(columns: Sequence[str]) -> str:
    return " or ".join(column.replace("_", " ") for column in columns)
