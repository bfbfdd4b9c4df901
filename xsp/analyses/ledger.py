"""How far figures can be trusted: the overhead ledger, measured = true + overhead, and what is missing or doubtful.

The ledger compares two independent measurements. Leveled experimentation measures what a level adds to whole steps. The
calibration measures what one span of a collector costs on its own (`xsp.record.calibration`); this cost times the
number of spans is the explained overhead. The residual is the difference: caches, memory, and chance.
"""

from __future__ import annotations

from typing import Any

from xsp.analyses.contract import Table, analysis, values
from xsp.health import health
from xsp.levels import depth, rung_name
from xsp.schema import Level
from xsp.store.trace import Rung, Trace
from xsp.store.views import LAYERS
from xsp.texts import milliseconds

_COLUMNS = {
    "deepest": "VARCHAR",
    "rung": "VARCHAR",
    "steps": "BIGINT",
    **dict.fromkeys(("step_ms", "added_ms", "low_ms", "high_ms", "added_percent"), "DOUBLE"),
    "spans": "BIGINT",
    "ns_per_span": "DOUBLE",
    "why_null": "VARCHAR",
    **dict.fromkeys(("explained_ms", "residual_ms"), "DOUBLE"),
}


@analysis("ledger", "Overhead ledger", Level.MODEL)
def ledger(trace: Trace) -> Table:
    """The overhead of each level set: what it adds to a step, per span, and against the calibration.

    `deepest` is the level that the steps of a row record in addition to those of the row before; `rung` is the set of
    recorded levels, see docs/understand/concepts.md. `added_percent` is a percentage of the step in the first row.
    `ns_per_span` is null if the interval does not lie above 0, and `why_null` has the reason.
    """
    rows: list[tuple[Any, ...]] = []
    rungs = trace.rungs
    outer_level = int(Level.APPLICATION)
    for rung in rungs:
        # spans times calibrated cost, in nanoseconds, over the levels that a rung adds
        explained = None
        for cost in trace.run.costs.values():
            if outer_level < cost.level <= rung.level:
                spans = trace.con.execute("SELECT count(*) FROM merged WHERE level = ?", [cost.level]).fetchall()[0][0]
                explained = (explained or 0.0) + spans * cost.ns_per_span
        added, bounds = rung.added_ns, rung.added_interval
        why_null = _no_cost_per_span(rung)
        rows.append(
            (
                depth(rung.level),
                rung_name(rung.level),
                rung.steps,
                rung.step_ns / 1e6,
                milliseconds(added),
                milliseconds(bounds.low if bounds else None),
                milliseconds(bounds.high if bounds else None),
                100 * added / rungs[0].step_ns if added is not None else None,
                rung.spans if added is not None else None,
                rung.per_span_ns if added is not None and why_null is None else None,
                why_null,
                milliseconds(explained) if added is not None else None,
                milliseconds(added - explained) if added is not None and explained is not None else None,
            )
        )
        outer_level = rung.level
    return values(trace, "ledger", _COLUMNS, rows)


def _no_cost_per_span(rung: Rung) -> str | None:
    """Return why the cost of one span of a rung is unknown; None if it is known, or if the rung adds nothing."""
    if rung.added_ns is None:
        return None
    if not rung.spans:
        return "no spans are added"
    if rung.added_interval is None:
        return "too few steps for an interval"
    return None if rung.added_interval.low > 0 else "cannot be distinguished from noise"


_SHARES = """
    sum(raw_ns) / 1e6 AS measured_ms, sum(true_ns) / 1e6 AS true_ms,
    sum(raw_ns - true_ns) / 1e6 AS overhead_ms, sum(explained_ns) / 1e6 AS explained_ms,
    sum(raw_ns - true_ns - explained_ns) / 1e6 AS residual_ms
"""


@analysis("ledger-layers", "Overhead ledger by layer", Level.LAYER)
def ledger_by_layer(trace: Trace) -> Table:
    """For each layer: time measured with all collectors on, true time, and overhead explained by the spans inside it.

    The cost per span is derived from whole steps, so it explains the overhead of all layers together, and the residual
    of a layer is its difference from the average.
    """
    return trace.sql(
        f"""
        WITH {LAYERS}
        SELECT layer_index, name, type, {_SHARES} FROM layers
        GROUP BY layer_index, name, type ORDER BY layer_index
        """
    )


@analysis("ledger-kinds", "Overhead ledger by kind of span", Level.MODEL)
def ledger_by_kind(trace: Trace) -> Table:
    """For each kind of span: number of spans, measured time, true time, overhead, explained overhead, residual.

    Spans of one kind nest, so a sum can exceed the step.
    """
    return trace.sql(
        f"""
        SELECT kind, min(level) AS level, count(*) AS spans, {_SHARES}
        FROM merged GROUP BY kind ORDER BY level, kind
        """
    )


_FINDINGS = {"severity": "VARCHAR", "subject": "VARCHAR", "finding": "VARCHAR", "best_grade": "VARCHAR"}


@analysis("health", "What is missing or doubtful")
def health_findings(trace: Trace) -> Table:
    """Findings on what is missing or doubtful in a trace, most important first; see docs/understand/true-times.md.

    `best_grade` is the best grade that a trace with this finding can have; the worst of them is the trace's grade.
    """
    rows = [(str(finding.severity), finding.subject, finding.text, finding.best_grade) for finding in health(trace)]
    return values(trace, "findings", _FINDINGS, rows)
