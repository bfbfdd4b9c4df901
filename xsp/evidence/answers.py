"""Statements on one or two runs in the JSON form: summary, health, where the time goes, comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from xsp.comparison import ComparedRow, Comparison, compare
from xsp.comparison.conclusion import conclusion
from xsp.errors import UsageError, nearest
from xsp.evidence import citations, tables
from xsp.evidence.form import NONE, Citation, Document, document, left_out, statement
from xsp.health import grade, health
from xsp.health.finding import Finding, Severity
from xsp.report.firstscreen import first_screen
from xsp.store.trace import Trace

ROWS_OF_TIME = 12
"""Default number of rows of each table of `time`."""

_TIME_COLUMNS = (
    ("phases", "phase", "ms", "percent_of_iteration", "of the iteration"),
    ("critical-path-summary", "name", "dur_ms", "percent_of_path", "of the critical path"),
    ("layers", "name", "host_self_ms", "percent_of_host_time", "of the host's time in layers"),
    ("ops", "name", "device_ms", "percent_of_device_time", "of device time"),
    ("modules", "path", "self_device_ms", "self_percent_of_device_time", "of device time"),
    ("A10", "name", "latency_ms", "percent_of_kernel_time", "of kernel time"),
)
"""Tables of where time goes: the columns of the name, the time and the share, and what the share is of, in words."""

_HOST_COLUMNS = {
    "ops": ("host_self_ms", "percent_of_host_time", "of the host's time in operators"),
    "A10": ("latency_ms", "percent_of_host_time", "of the host's time"),
    "modules": ("host_self_ms", "percent_of_host_time", "of the host's time in modules, including inner modules"),
}
"""The same columns for traces without device work."""

_TOTALS = ("iteration",)
_NO_LAYER = "time outside layers"


def summary(trace: Trace, source: Mapping[str, Any]) -> Document:
    """Return what was recorded, the times of a step and of the loop, device activity, and the grade."""
    run = trace.run
    step = citations.of_step(trace)
    statements = _of_account(trace, step)
    tops = [tables.top(trace, name, limit) for name, limit in (("A1", 4), ("loop", 4), ("device-activity", 16))]
    latency, loop, activity = tops
    for row in tables.dicts(latency[0]) if latency else []:
        figures = {name: row[name] for name in _A1_FIGURES if name in row}
        sentence = f"a step takes {_ms(row['latency_ms'])}{_interval(row)}, of {row['steps']} timed steps"
        statements.append(statement(sentence, figures, step, "A1"))
    for row in tables.dicts(loop[0]) if loop else []:
        if row["iteration_ms"] is not None:
            sentence = f"an iteration of the loop ({row['scope']}, kind {row['kind']}) takes {_ms(row['iteration_ms'])}"
            statements.append(
                statement(sentence, {name: row[name] for name in _LOOP_FIGURES if name in row}, step, "loop")
            )
    for row in tables.dicts(activity[0]) if activity else []:
        subject = "all devices together" if row["rank"] is None else f"device {row['device']} of rank {row['rank']}"
        window = f"{_ms(row['window_ms'])} from its first work to its last"
        sentence = f"{subject}: busy {_ms(row['busy_ms'])} of {window}"
        statements.append(statement(sentence, {name: row[name] for name in _DEVICE_FIGURES}, step, "device-activity"))
    result = grade(health(trace))
    reasons = "; ".join(result.reasons)
    statements.append(
        statement(
            f"grade {result.letter} (A to F: how reliable these figures are){': ' + reasons if reasons else ''}",
            {"grade": result.letter},
            step,
            "health",
        )
    )
    description = {
        "imported": run.imported is not None,
        "finished": run.finished,
        "levels": run.levels,
        "kind_of_step": trace.kind,
        "kinds": [{"kind": kind.kind, "name": kind.name} for kind in run.kinds][:20],
        "rank": trace.rank,
        "ranks": len(run.ranks) or 1,
        "devices": list(run.machine.devices)[:16],
        "spans": _count(trace, "spans"),
        "spans_of_merged_step": _count(trace, "merged"),
    }
    notes = [note for table in tops if table is not None for note in table[1]]
    return document("summary", source, run=description, statements=statements, left_out=notes)


def _of_account(trace: Trace, step: Citation) -> list[Document]:
    """Return what limits, and the parts of an iteration on both sides, as on the first screen."""
    screen = first_screen(trace, pieces=())
    statements = [statement(sentence, {}, step, "account") for sentence in screen.sentences]
    for name, side in (("host", screen.host), (screen.device_name, screen.device)):
        for line in side:
            sentence = f"{name}: {line.name} takes {_ms(line.ms)}, {_percent(line.percent)} of an iteration"
            statements.append(statement(sentence, {"ms": line.ms, "percent": line.percent}, step, "account"))
    return statements


_A1_FIGURES = (
    "batch_size",
    "latency_ms",
    "low_ms",
    "high_ms",
    "median_ms",
    "p90_ms",
    "p99_ms",
    "samples_per_s",
    "steps",
)
_LOOP_FIGURES = ("steps", "iteration_ms", "low_ms", "high_ms", "step_ms", "data_ms", "between_ms", "samples_per_s",
            "percent_of_loop")  # fmt: skip
_DEVICE_FIGURES = (
    "window_ms",
    "busy_ms",
    "computation_ms",
    "exposed_communication_ms",
    "exposed_copy_ms",
    "idle_ms",
)


def findings(trace: Trace, source: Mapping[str, Any], first: int, limit: int) -> Document:
    """Return what is missing or doubtful, the most important first, and the resulting grade."""
    all_findings = health(trace)
    step = citations.of_step(trace)
    entries = [_finding(finding, step) for finding in all_findings[first : first + limit]]
    remaining = len(all_findings) - first - len(entries)
    notes = [left_out("statements", remaining, f"first={first + len(entries)}")] if remaining > 0 else []
    return document(
        "health", source, grade=grade(all_findings)._asdict(), statements=entries, first=first, left_out=notes
    )


def _finding(finding: Finding, step: Citation) -> Document:
    figures = {"best_grade": finding.best_grade}
    citation = NONE if finding.severity is Severity.NOTE and finding.best_grade == "A" else step
    return statement(finding.text, figures, citation, "health", subject=finding.subject, severity=str(finding.severity))


def time(trace: Trace, source: Mapping[str, Any], limit: int = ROWS_OF_TIME) -> Document:
    """Return where the time of a step goes: phases, critical path, layers, operators and kernels."""
    statements, contents, notes = [], [], []
    for name, column, ms, percent, total_text in _TIME_COLUMNS:
        top = tables.top(trace, name, limit)
        if top is None:
            continue
        content, table_notes = top
        if name in _HOST_COLUMNS and not any(row.get(percent) is not None for row in tables.dicts(content)):
            ms, percent, total_text = _HOST_COLUMNS[name]
        contents.append(content)
        notes += table_notes
        pairs = zip(tables.dicts(content), content["row_spans"], content["row_spans_in_all"], strict=True)
        candidates = [pair for pair in pairs if pair[0][ms] is not None and _has_sentence(pair[0], column)]
        largest = sorted(candidates, key=lambda pair: -pair[0][ms])
        for row, spans, span_count in largest if name == "phases" else largest[:3]:
            sentence = f"{row[column] or _NO_LAYER} takes {_ms(row[ms])}, {_percent(row[percent])} {total_text}"
            statements.append(
                statement(sentence, {ms: row[ms], percent: row[percent]}, Citation(spans, span_count), name)
            )
    return document("time", source, statements=statements, tables=contents, left_out=notes)


def _has_sentence(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a row gets a sentence: totals do not, nor do groupings of the critical path except by layer."""
    return row[column] not in _TOTALS and row.get("grouped_by") in (None, "layer")


# --- two runs -----------------------------------------------------------------------------------------------------


def comparison(
    a: Trace,
    b: Trace,
    sources: Mapping[str, Any],
    section: str | None,
    first: int,
    limit: int,
) -> Document:
    """Return the comparison of B with A: the conclusion, other differences, and rows.

    Args:
        a: the run before.
        b: the run after.
        sources: the sources of both, by `a` and `b`.
        section: section of the requested rows; None for all.
        first: index of the first row, from 0.
        limit: maximum number of rows.

    Raises:
        AnalysisError: the runs have nothing in common.
        UsageError: there is no such section.
    """
    comparison = compare(a, b)
    sections = list(dict.fromkeys(row.section for row in comparison.rows))
    if section is not None and section not in sections:
        raise UsageError(
            f"there is no section {section!r}{nearest(section, sections) or ''}; there are: {', '.join(sections)}"
        )
    rows = comparison.rows if section is None else comparison.section(section)
    page = rows[first : first + limit]
    of_a, of_b = ([_row_citation(trace, row, side) for row in page] for side, trace in enumerate((a, b)))
    content = {
        "name": "compare",
        "title": "B against A",
        "about": "Times in milliseconds per step; low and high are the ends of the 95 % interval of the change.",
        "columns": [{"name": field.name, "type": str(field.type)} for field in fields(ComparedRow)],
        "rows": [list(asdict(row).values()) for row in page],
        "row_spans": [citation.spans for citation in of_a],
        "row_spans_in_all": [citation.total for citation in of_a],
        "row_spans_b": [citation.spans for citation in of_b],
        "row_spans_b_in_all": [citation.total for citation in of_b],
        "first": first,
        "rows_in_all": len(rows),
    }
    remaining = len(rows) - first - len(page)
    notes = [left_out("rows of compare", remaining, f"first={first + len(page)}")] if remaining > 0 else []
    return document(
        "compare",
        sources,
        statements=_conclusions(comparison, a, b),
        sections=sections,
        tables=[content],
        left_out=notes,
    )


def _conclusions(comparison: Comparison, a: Trace, b: Trace) -> list[Document]:
    step = {name: value for name, value in asdict(comparison.step).items() if isinstance(value, (int, float))}
    of_a, of_b = citations.of_step(a), citations.of_step(b)
    spans_of_b = {"spans_b": of_b.spans, "spans_b_in_all": of_b.total}
    statements = [statement(text, step, of_a, "compare", **spans_of_b) for text in conclusion(comparison)]
    statements += [
        statement(
            f"other difference: {difference.subject}: {difference.a} / {difference.b}",
            {},
            of_a,
            "compare",
            **spans_of_b,
        )
        for difference in comparison.differences
    ]
    return statements


def _row_citation(trace: Trace, row: ComparedRow, side: int) -> Citation:
    """Return the spans of a row on one side; a name that changed has the form `A → B`."""
    if row.section in ("step", "loop"):
        return citations.of_step(trace)
    if row.section == "phase":
        return citations.of_phase(trace, row.name)
    parts = row.name.split(" → ")
    return citations.of_name(trace, parts[min(side, len(parts) - 1)])


# --- words --------------------------------------------------------------------------------------------------------


def _count(trace: Trace, name: str) -> int:
    ((count,),) = trace.con.execute(f"SELECT count(*) FROM {name}").fetchall()
    return int(count)


def _ms(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.4g} ms"


def _percent(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.1f} %"


def _interval(row: Mapping[str, Any]) -> str:
    if row.get("low_ms") is None or row.get("high_ms") is None:
        return ""
    return f" (95 % interval {row['low_ms']:.4g} to {row['high_ms']:.4g} ms)"
