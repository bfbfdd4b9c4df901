"""Words for codes: the recorded levels of a step, the devices of a trace, and the reliability of the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from xsp.health import grade, health
from xsp.levels import depth
from xsp.schema import Grade, Level
from xsp.store.trace import Trace
from xsp.texts import counted


def describe_rungs(rungs: Iterable[str]) -> str:
    """Return rungs with the levels that they record: `steps and calls (M), layers too (M/L)`."""
    return ", ".join(f"{depth(rung)}{' too' if index else ''} ({rung})" for index, rung in enumerate(rungs))


def used_devices(trace: Trace) -> list[tuple[int, int]]:
    """Return rank and number of each device that work of the trace ran on."""
    return trace.con.execute(
        f"SELECT DISTINCT rank, device FROM spans WHERE level = {int(Level.KERNEL)} AND device IS NOT NULL ORDER BY ALL"
    ).fetchall()


def devices_text(trace: Trace) -> str:
    """Return the devices that work ran on, and how many the machine has; an empty text if none is known.

    `2 × NVIDIA A100 (of 8 in the machine)`; a trace of one GPU has one device, however many the machine has.
    """
    installed = list(trace.run.machine.devices)
    used_pairs = used_devices(trace)
    if not used_pairs:
        return f"{_with_counts(installed)} (no work of it in the trace)" if installed else ""
    names = [_name(installed, device) for _, device in used_pairs]
    has_idle = len(installed) > len(used_pairs)
    return _with_counts(names) + (f" (of {len(installed)} in the machine)" if has_idle else "")


def _name(installed: list[str], device: int) -> str:
    if len(set(installed)) == 1:
        return installed[0]
    return installed[device] if 0 <= device < len(installed) else _UNNAMED


def _with_counts(names: Iterable[str]) -> str:
    """Return names with their numbers of occurrences: `8 × NVIDIA A100`."""
    return ", ".join(
        counted(count, "GPU") if name == _UNNAMED else f"{count} × {name}" if count > 1 else name
        for name, count in Counter(names).items()
    )


_UNNAMED = ""
"""Placeholder for the name of a device that the trace does not name."""


# --- trust -------------------------------------------------------------------------------------------------------
# The reliability of a trace, for the page: the grade, the share of device time by attribution, the findings.


def reliability(trace: Trace) -> dict[str, Any]:
    """Return the data of the page on the reliability of a trace.

    `grade` with its reasons; `findings` as (severity, subject, text); `absent`: collectors that had nothing to observe
    or could not work, with the reasons; these are not findings; `attributed`: device time by certainty of its layer.
    """
    findings, absent = health(trace), trace.run.absent
    # without those that only report that a collector is absent, and why
    return {
        "grade": grade(findings)._asdict(),
        "findings": [
            [str(finding.severity), finding.subject, finding.text]
            for finding in findings
            if not (finding.subject in absent and finding.text.endswith(str(absent[finding.subject])))
        ],
        "absent": [[str(name), str(reason)] for name, reason in absent.items()],
        "attributed": attributed(trace),
    }


def attributed(trace: Trace) -> list[tuple[str, int, float]]:
    """Return grade, spans and milliseconds of device work, exact first; nothing without device work."""
    rows = trace.con.execute(
        f"""
        SELECT coalesce(grade, '{Grade.UNKNOWN}') AS known_grade, count(*), sum(dur_ns) / 1e6 FROM spans
        WHERE level = {int(Level.KERNEL)} AND device IS NOT NULL GROUP BY known_grade
        """
    ).fetchall()
    order = [entry.value for entry in Grade]
    return sorted(rows, key=lambda row: order.index(row[0]))
