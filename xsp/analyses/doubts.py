"""`health`: what is missing or doubtful in a trace, as a table."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis, values
from xsp.health import health
from xsp.store.trace import Trace

_COLUMNS = {"severity": "VARCHAR", "subject": "VARCHAR", "finding": "VARCHAR", "best_grade": "VARCHAR"}


@analysis("health", "What is missing or doubtful")
def health_findings(trace: Trace) -> Table:
    """What is missing or doubtful in a trace, the most important first; see docs/understand/true-times.md.

    `best_grade` is the best grade that a trace can have of which the finding is true; the worst of them is its grade.
    """
    rows = [(str(each.severity), each.subject, each.text, each.best) for each in health(trace)]
    return values(trace, "findings", _COLUMNS, rows)
