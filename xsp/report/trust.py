"""How far a trace can be believed, for the page: the grade, the share of device time by attribution, the findings."""

from __future__ import annotations

from typing import Any

from xsp.health import grade, health
from xsp.span import Grade, Level
from xsp.trace import Trace


def trust(trace: Trace) -> dict[str, Any]:
    """Return the grade, findings as (severity, subject, text), and device time by how surely its layer is known."""
    findings = health(trace)
    return {
        "grade": grade(findings)._asdict(),
        "findings": [[str(part) for part in finding[:3]] for finding in findings],
        "attributed": attributed(trace),
    }


def attributed(trace: Trace) -> list[tuple[str, int, float]]:
    """Return grade, spans and milliseconds of device work, exact first; nothing without device work."""
    found = trace.con.execute(
        f"""
        SELECT coalesce(grade, '{Grade.UNKNOWN}') AS held, count(*), sum(dur_ns) / 1e6 FROM spans
        WHERE level = {int(Level.KERNEL)} AND device IS NOT NULL GROUP BY held
        """
    ).fetchall()
    order = [each.value for each in Grade]
    return sorted(found, key=lambda row: order.index(row[0]))
