"""Tables that fit a terminal.

Names in a trace are foreign text: they are shown literally, never interpreted as markup.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import duckdb
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from xsp.analyses import A1, optimal_batch
from xsp.analyses.answers import rows_of
from xsp.report.fitting import FittingColumn, FittingTable
from xsp.scrub import plain
from xsp.store.trace import Trace
from xsp.terminal import cell
from xsp.texts import counted

_PROSE_COLUMN = "finding"
"""The column that holds sentences, in any table."""

MAIN_COLUMNS = {
    "loop": ("step_ms", "data_ms", "samples_per_s"),
    "A1": ("samples_per_s", "loop_ms", "loop_samples_per_s", "samples_from"),
}
"""Columns that a narrow terminal shows too: without those of the loop, a step seems to be the whole program."""

KERNEL_COLUMNS = {
    **dict.fromkeys(("A8", "A9", "A10", "counters", "critical-path", "critical-path-summary"), ("name",)),
    "ops": ("longest_kernel",),
    "idle-gaps": ("next_work",),
}
"""Columns that hold names of kernels, by analysis."""


def table(
    relation: duckdb.DuckDBPyRelation,
    title: str,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    main: Sequence[str] = (),
    kernels: Sequence[str] = (),
) -> RenderableType:
    """Return a relation as a table that fits the width in which it is printed; a number is never cut.

    Args:
        relation: the rows, in their order.
        title: title above the table.
        limit: rows to show; a line below them has the number of the others.
        columns: columns to show; by default all that hold a value.
        main: columns that a narrow terminal shows too.
        kernels: columns with names of kernels, which are shown in their readable form.
    """
    names, rows = relation.columns, rows_of(relation)
    shown_rows = rows if limit is None else rows[:limit]
    indices = [
        index
        for index, name in enumerate(names)
        if (name in columns if columns is not None else any(row[index] is not None for row in rows) or not rows)
    ]
    fitting_columns = [
        _column(names[index], [row[index] for row in rows], len(shown_rows), kernels) for index in indices
    ]
    for kind in (str, float):  # a narrow terminal too shows a name and a figure
        candidates = (
            column
            for column, index in zip(fitting_columns, indices, strict=True)
            if any(isinstance(row[index], kind) for row in rows)
        )
        for column in itertools.islice(candidates, 1):
            column.is_main = True
    for column, index in zip(fitting_columns, indices, strict=True):
        column.is_main |= names[index] in main
    hidden = len(rows) - len(shown_rows)
    return FittingTable(title, fitting_columns, [f"{counted(hidden, 'more row')}"] if hidden else [])


def _column(name: str, values: Sequence[Any], row_count: int, kernels: Sequence[str] = ()) -> FittingColumn:
    is_numeric = any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    cells = [cell(value) for value in values[:row_count]]
    heading = name.replace("_", " ")
    return FittingColumn(heading, cells, is_numeric, is_prose=name == _PROSE_COLUMN, has_kernels=name in kernels)


# --- optimum -----------------------------------------------------------------------------------------------------
# A sweep over batch sizes as a table, with the optimal size by each reading of the rule.


def sweep(traces: Sequence[Trace], target_ms: float | None = None) -> RenderableType:
    """Return A1 over the runs of a sweep, and the optimal batch size.

    Args:
        traces: one per batch size.
        target_ms: the longest acceptable latency, if there is one.
    """
    title = Text(f"{A1.title} (A1): {plain(traces[0].name)}", style="bold")
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("batch", "latency ms", "95 % interval", "p90 ms", "p99 ms", "samples/s", "gain", "steps"):
        grid.add_column(column, justify="right")
    columns = "batch_size, latency_ms, low_ms, high_ms, p90_ms, p99_ms, samples_per_s, steps"
    rows = sorted(row for trace in traces for row in A1(trace).select(columns).fetchall())
    previous: float | None = None
    for batch, latency, low, high, p90, p99, rate, steps in rows:
        interval = f"{low:.2f} … {high:.2f}" if low is not None else "–"
        gain = f"{100 * (rate / previous - 1):+.1f} %" if previous else "–"
        grid.add_row(
            str(batch), f"{latency:.2f}", interval, f"{p90:.2f}", f"{p99:.2f}", f"{rate:.1f}", gain, str(steps)
        )
        previous = rate
    optimum = optimal_batch([row[0] for row in rows], [row[1] for row in rows], target_ms)
    is_within = optimum.first_plateau < rows[-1][0]
    reason = "the first whose doubling gains at most 5 %" if is_within else "the largest here: try larger ones"
    lines = [
        f"optimal batch size: {optimum.first_plateau} ({reason}), {optimum.max_throughput} (the highest throughput)"
    ]
    if target_ms is not None:
        answer = "no size meets it" if optimum.within_target is None else f"batch size {optimum.within_target}"
        lines.append(f"latency target {target_ms:g} ms: {answer}")
    return Group(grid, *lines)
