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

from xsp import analyses
from xsp.advise.data import BETWEEN_PERCENT
from xsp.advise.verdict import Verdict, verdict
from xsp.analyses import A1, Analysis, optimal_batch
from xsp.analyses.answers import Answer, Answers, rows_of
from xsp.errors import AnalysisError
from xsp.health import grade, health
from xsp.health.finding import Finding, Severity
from xsp.report.fitting import FittingColumn, FittingTable
from xsp.report.words import attributed, devices_text, number, used_devices
from xsp.scrub import plain
from xsp.store.iterations import iterations
from xsp.store.trace import Trace

MISSING = "–"
_PROSE_COLUMN = "finding"
"""The column that holds sentences, in any table."""

_PHASES = ("phase", "calls", "ms", "percent_of_iteration")
_LOOP = ("name", "steps", "iteration_ms", "step_ms", "data_ms", "between_ms", "samples_per_s", "percent_of_loop")
_BETWEEN = ("line", "calls", "ms", "percent")
_A1 = ("batch_size", "latency_ms", "low_ms", "high_ms", "p90_ms", "samples_per_s", "loop_ms", "loop_samples_per_s",
       "samples_from")  # fmt: skip
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

_LAYERS = ("name", "type", "calls", "shape", "host_self_ms", "percent_of_host_time", "alloc_mib")
_LEDGER = ("deepest", "steps", "step_ms", "added_ms", "low_ms", "high_ms", "added_percent", "ns_per_span")
_COLOURS = {Severity.WARNING: "yellow", Severity.NOTE: "dim", Severity.GOOD: "green"}


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
            column for column, index in zip(fitting_columns, indices, strict=True) if _has_type(rows, index, kind)
        )
        for column in itertools.islice(candidates, 1):
            column.is_main = True
    for column, index in zip(fitting_columns, indices, strict=True):
        column.is_main |= names[index] in main
    hidden = len(rows) - len(shown_rows)
    return FittingTable(title, fitting_columns, [f"{hidden:,} more row{'s' * (hidden > 1)}"] if hidden else [])


def _column(name: str, values: Sequence[Any], row_count: int, kernels: Sequence[str] = ()) -> FittingColumn:
    is_numeric = any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    cells = [cell(value) for value in values[:row_count]]
    heading = name.replace("_", " ")
    return FittingColumn(heading, cells, is_numeric, is_prose=name == _PROSE_COLUMN, has_kernels=name in kernels)


def _has_type(rows: Sequence[Sequence[Any]], index: int, kind: type) -> bool:
    return any(isinstance(row[index], kind) for row in rows)


def cell(value: Any) -> str:
    """Return a value as text for a table: four significant digits, names without control characters."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return plain(str(value))


def health_table(trace: Trace) -> RenderableType:
    """Return the findings on a trace, the most important first."""
    return _findings(health(trace))


def _findings(findings: Sequence[Finding]) -> RenderableType:
    grid = Table(
        title=Text("What is missing or doubtful", style="bold"), title_justify="left", show_header=False, box=None
    )
    for finding in findings:
        style = _COLOURS[finding.severity]
        grid.add_row(Text(str(finding.severity), style=style), Text(plain(finding.subject)), Text(plain(finding.text)))
    return grid


def overview(trace: Trace) -> RenderableType:
    """Return the overview: verdict, reasons and next steps for a trace with device work, else latency and layers."""
    answers = Answers(trace)
    conclusion = verdict(answers)
    return _device_overview(answers, conclusion) if conclusion is not None else _host_overview(trace)


def _host_overview(trace: Trace) -> RenderableType:
    """Return phases, latency, the most expensive layers, time by type, ledger, health."""
    ranks = _ranks_of_loop(trace)
    loop = _LOOP if ranks == 1 else ("scope", *_LOOP)  # the scope of a row is a rank or the job
    parts = [
        _analysis_table(analyses.phases, trace, columns=_PHASES),
        *([_analysis_table(analyses.program_loop, trace, columns=loop)] if ranks else []),
        *(
            [_analysis_table(analyses.lines_between_steps, trace, 5, columns=_BETWEEN)]
            if _has_much_between(trace)
            else []
        ),
        _analysis_table(analyses.A1, trace, columns=_A1),
        _analysis_table(analyses.layers, trace, 10, columns=_LAYERS),
        _analysis_table(analyses.A6, trace, 8),
        _analysis_table(analyses.ledger, trace, columns=_LEDGER),
        health_table(trace),
    ]
    return Group(*(part for pair in parts for part in (pair, Text())))


def _has_much_between(trace: Trace) -> bool:
    """Return whether the lines that ran between steps are known, and take a large part of the loop."""
    if analyses.lines_between_steps.refusal(trace) is not None:
        return False
    durations = [(row.between_ns or 0.0, row.mean_ns or 0.0) for row in iterations(trace.con)]
    return any(between > BETWEEN_PERCENT / 100 * mean for between, mean in durations if mean)


def _ranks_of_loop(trace: Trace) -> int:
    ((ranks,),) = trace.con.execute("SELECT count(DISTINCT rank) FROM loop").fetchall()
    return int(ranks)


def _device_overview(answers: Answers, conclusion: Verdict) -> RenderableType:
    """Return one screen: verdict, reasons, next steps, the longest layers and kernels, and the grade."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("verdict", Text(conclusion.verdict, style="bold"))
    for word, sentences in (
        ("why", conclusion.why),
        ("next", conclusion.next_steps),
        ("layers known", _attribution_text(answers.trace)),
    ):
        for index, sentence in enumerate(sentences):
            grid.add_row("" if index else word, Text(plain(sentence.replace("`", ""))))
    findings = health(answers.trace)
    grid.add_row("grade", f"{grade(findings).letter} (from A to F: how reliable these figures are)")
    parts: list[RenderableType] = [Text(plain(_trace_title(answers)), style="bold"), grid, Text()]
    count = len(used_devices(answers.trace))
    suffix = f", on {count} GPUs together" if count > 1 else ""
    for identity, title, columns in _TOP_TABLES:
        if answers[identity].rows:
            kernels = KERNEL_COLUMNS.get(identity, ())
            parts += [_top_rows(answers[identity], f"{title}{suffix} ({identity})", columns, kernels)]
    warnings = [finding for finding in findings if finding.severity is Severity.WARNING]
    if warnings:
        parts += [_findings(warnings)]
    return Group(*parts)


_TOP = 5
_TOP_TABLES = (
    ("ops", "Operators by GPU time", ("name", "shapes", "device_ms", "percent_of_device_time", "roof_percent")),
    (
        "modules",
        "Modules by GPU time of their own",
        ("path", "modules", "calls", "self_device_ms", "self_percent_of_device_time"),
    ),
    ("A10", "Kernels that take most", ("name", "calls", "latency_ms", "percent_of_kernel_time")),
)


def _trace_title(answers: Answers) -> str:
    """Return the trace's name, its devices, and the latency of a step."""
    parts = [answers.trace.name, *filter(None, [devices_text(answers.trace)])]
    if (row := answers.latency()) is not None:
        parts.append(f"{row['steps']} step{'s' * (row['steps'] > 1)} of {number(row['latency_ms'])} ms")
    return ", ".join(parts)


def _attribution_text(trace: Trace) -> list[str]:
    """Return the shares of device time by grade of attribution, in a sentence."""
    shares = attributed(trace)
    total = sum(ms for _, _, ms in shares)
    labels = [f"{100 * ms / total:.0f} % {grade}" for grade, _, ms in shares] if total else []
    return [f"{', '.join(labels)} (of device time)"] if labels else []


def _top_rows(answer: Answer, title: str, columns: Sequence[str], kernels: Sequence[str]) -> RenderableType:
    """Return the rows that take most time, over all devices, with those of the columns that hold a value."""
    measure = next(column for column in columns if column.endswith("_ms"))
    rows = sorted((row for row in answer.dicts() if row.get("device") is None), key=lambda row: -(row[measure] or 0))[
        :_TOP
    ]
    values_by_name = {column: [row[column] for row in rows] for column in columns}
    columns_by_name = {
        name: _column(name, values, len(rows), kernels)
        for name, values in values_by_name.items()
        if any(value is not None for value in values)
    }
    for name, column in columns_by_name.items():
        column.is_main = name in (columns[0], measure)
    return FittingTable(title, list(columns_by_name.values()))


def _analysis_table(
    analysis: Analysis,
    trace: Trace,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> RenderableType:
    """Return an analysis as a table, or the reason why this trace lacks the data for it."""
    try:
        relation = analysis(trace)
    except AnalysisError as error:
        return Text(plain(str(error)), style="dim")
    title = f"{analysis.title} ({analysis.id})"
    return table(
        relation, title, limit, columns, MAIN_COLUMNS.get(analysis.id, ()), KERNEL_COLUMNS.get(analysis.id, ())
    )


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
