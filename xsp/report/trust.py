"""How far a trace can be believed, for the page: the grade, the share of device time by attribution, the findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xsp.health import grade, health
from xsp.health.finding import Finding
from xsp.schema import Grade, Level
from xsp.store.trace import Trace


def trust(trace: Trace) -> dict[str, Any]:
    """Return what the page says of it.

    `grade` with its reasons; `findings` as (severity, subject, text); `absent`: collectors that had nothing to observe
    or could not, each with the reason, which are no findings; `attributed`: device time by how surely it has a layer.
    """
    findings, absent = health(trace), trace.run.get("absent", {})
    return {
        "grade": grade(findings)._asdict(),
        "findings": [
            [str(found.severity), found.subject, found.text] for found in findings if not _is_of(found, absent)
        ],
        "absent": [[str(name), str(reason)] for name, reason in absent.items()],
        "attributed": attributed(trace),
    }


def _is_of(finding: Finding, absent: Mapping[str, Any]) -> bool:
    """Return whether a finding says no more than that a collector is absent, and why."""
    return finding.subject in absent and finding.text.endswith(str(absent[finding.subject]))


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
