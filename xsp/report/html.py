"""One page with the timeline, the charts and the tables of a trace. It opens offline, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.report import charts, trust
from xsp.report.timeline import timeline
from xsp.trace import Trace

MOST_ROWS = 1000
"""Rows of a table; below it stands the command that prints the others."""

DEAREST = {"A8": ("latency_us", 200)}
"""Tables of which only so many rows are shown, those with the most of something."""

SCRIPTS = ("echarts.min.js", "spans.js", "timeline.js", "words.js", "charts.js", "ledger.js", "tables.js", "report.js")
"""The page's scripts, in the order in which they run."""


def write(trace: Trace, path: str | Path) -> Path:
    """Write the page of a trace in one piece.

    Args:
        trace: any.
        path: of the page.

    Returns:
        The page's path.

    Raises:
        OutputError: it cannot be written; a page that was there before is still there.
    """
    page = Path(path)
    rundir.write_whole(page, render(trace).encode("utf-8", "replace"))
    return page


def render(trace: Trace) -> str:
    """Return the page of a trace."""
    scripts = [_asset(name) for name in SCRIPTS]
    contents = {
        "__TITLE__": html.escape(f"{trace.name} · xsp"),
        "__CSS__": _asset("report.css"),
        "__ALLOWED__": " ".join(_allowed(script) for script in scripts),
        "__SCRIPTS__": "\n".join(f"<script>{script}</script>" for script in scripts),
        "__DATA__": _as_json(_data(trace)),
    }
    # In one pass: what is put in is never looked through for placeholders.
    return re.sub("|".join(contents), lambda found: contents[found.group()], _asset("report.html"))


def _asset(name: str) -> str:
    return (files("xsp.report") / "assets" / name).read_text(encoding="utf-8")


def _allowed(script: str) -> str:
    """Return how a content security policy names a script that may run; no other one may."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _as_json(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever text is in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _sayable(value: Any) -> Any:
    """Replace what JSON cannot say: numbers that are not finite, and types that it does not know."""
    if isinstance(value, (float, Decimal)):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _data(trace: Trace) -> dict[str, Any]:
    tables, charted, refused = _analyses(trace)
    rows = {table["id"]: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] for table in tables}
    return {
        "name": trace.name,
        "headline": _headline(rows.get("A1", []), rows.get("ledger", [])),
        "facts": _facts(trace.run),
        "health": trust.trust(trace),
        "timeline": timeline(trace),
        "charts": charted,
        "ledger": rows.get("ledger", []),
        "tables": tables,
        "refused": refused,
    }


def _headline(models: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the figures that stand on top: what, how much, and how sure."""
    if not models:
        return [("latency", "–", "no timed step")]
    row = models[0]
    shown = [("latency of a step", f"{row['latency_ms']:.4g} ms", _between(row, "ms"))]
    if row.get("samples_per_s") is not None:
        shown.append(("throughput", f"{row['samples_per_s']:.4g} samples/s", f"batch size {row['batch_size']}"))
    shown.append(
        ("90th percentile", f"{row['p90_ms']:.4g} ms", f"median {row['median_ms']:.4g} ms, {row['steps']} steps")
    )
    if len(ledger) > 1:
        shown.append(("cost of profiling", *_cost(ledger)))
    if len(models) > 1:
        sizes = ", ".join(str(model["batch_size"]) for model in models[1:])
        shown.append(("also measured", f"{len(models) - 1} more", f"batch size {sizes}: see A1"))
    return shown


def _cost(ledger: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return what all rungs together add; where none can be told from the noise, that is said instead."""
    true, full, rung = ledger[0]["step_ms"], ledger[-1]["step_ms"], ledger[-1]["rung"]
    added = f"{full - true:+.3g} ms"
    told = any(row.get("low_ms") is None or not row["low_ms"] <= 0 <= row["high_ms"] for row in ledger[1:])
    share = f"{100 * (full / true - 1):+.1f} %, a step with {rung} on; see the ledger"
    return (added, share) if told else ("in the noise", f"{added}, {share}")


def _between(row: Mapping[str, Any], unit: str) -> str:
    if row.get("low_ms") is None or row.get("high_ms") is None:
        return "too few steps for an interval"
    return f"95 % interval {row['low_ms']:.4g} to {row['high_ms']:.4g} {unit}"


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return when, where and with what the run was made."""
    machine = run.get("machine") or {}
    system = " ".join(str(machine[part]) for part in ("system", "kernel", "machine") if machine.get(part))
    versions = {"xsp": run.get("xsp"), "Python": machine.get("python"), **(machine.get("packages") or {})}
    facts = [
        ("recorded", str(run.get("created") or "").replace("T", " ").replace("Z", " UTC")),
        ("levels", str(run.get("levels") or "")),
        ("processor", f"{machine['cpu']}, {machine.get('cores', '?')} cores" if machine.get("cpu") else ""),
        ("devices", ", ".join(map(str, machine.get("devices") or []))),
        ("system", system),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    return [(what, text) for what, text in facts if text]


def _analyses(trace: Trace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the tables that this trace can carry, the charts, and why the other analyses refuse."""
    tables, charted, refused = [], [], []
    for name, each in ANALYSES.items():
        try:
            relation = each(trace)
        except AnalysisError as error:
            refused.append((name, str(error)))
            charted += [charts.missing(chart, str(error)) for chart in charts.of(name)]
            continue
        columns = relation.columns
        rows = [[_sayable(cell) for cell in row] for row in relation.fetchall()]
        tables.append({"id": name, "title": each.title, "about": each.about, **_table(trace, name, columns, rows)})
        charted += [charts.drawn(chart, columns, rows) for chart in charts.of(name)]
    return tables, charts.in_order(charted), refused


def _table(trace: Trace, name: str, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """Return a table's rows, as many as the page shows, without the columns that hold nothing."""
    total, chosen = len(rows), "the first"
    most = MOST_ROWS
    if name in DEAREST:
        by, most = DEAREST[name]
        rows = _by(rows, columns.index(by))
        chosen = f"those with the highest {by}"
    kept = [place for place in range(len(columns)) if not rows or any(row[place] is not None for row in rows)]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"
    return {
        "columns": [columns[place] for place in kept],
        "empty": [column for place, column in enumerate(columns) if place not in kept],
        "rows": [[row[place] for place in kept] for row in rows[:most]],
        "total": total,
        "chosen": chosen,
        "command": f"xsp analyze {run} {name} --limit {total}",
    }


def _by(rows: list[list[Any]], place: int) -> list[list[Any]]:
    """Return the rows with those first that have the most in one column."""
    return sorted(rows, key=lambda row: (row[place] is None, -(row[place] or 0)))
