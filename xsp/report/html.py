"""One page with the timeline, the charts and the tables of a trace. It opens offline, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.analyses import ANALYSES
from xsp.report import trust
from xsp.report.answers import Answer, Answers
from xsp.report.charts import charts
from xsp.report.timeline import timeline
from xsp.report.verdict import Verdict, verdict
from xsp.span import Grade
from xsp.trace import Trace

Row = Mapping[str, Any]

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


def _data(trace: Trace) -> Any:
    answers = Answers(trace)
    found = {name: answers[name] for name in ANALYSES}
    said, believed = verdict(answers), trust.trust(trace)
    return _sayable(
        {
            "name": trace.name,
            "verdict": [said.verdict, *said.next] if said else [],
            "headline": _headline(found["A1"].dicts(), found["ledger"].dicts(), said, believed["attributed"]),
            "facts": _facts(trace.run),
            "health": believed,
            "timeline": timeline(trace),
            "charts": charts(answers),
            "ledger": found["ledger"].dicts(),
            "tables": [_table(trace, name, answer) for name, answer in found.items() if answer.refused is None],
            "refused": [(name, answer.refused) for name, answer in found.items() if answer.refused is not None],
        }
    )


def _sayable(value: Any) -> Any:
    """Replace what JSON cannot say: numbers that are not finite, and types that it does not know."""
    if isinstance(value, dict):
        return {key: _sayable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sayable(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _headline(
    models: Sequence[Row], ledger: Sequence[Row], said: Verdict | None, attributed: Sequence[tuple[str, int, float]]
) -> list[tuple[str, str, str]]:
    """Return the figures that stand on top: what, how much, and how sure."""
    return [*_latency(models), *_device(said, attributed), *_profiling(models, ledger)]


def _latency(models: Sequence[Row]) -> list[tuple[str, str, str]]:
    if not models:
        return [("latency", "–", "no timed step")]
    row = models[0]
    several = row["steps"] > 1
    shown = [("latency of a step", f"{row['latency_ms']:.4g} ms", _between(row) if several else "one step")]
    if row.get("samples_per_s") is not None:
        shown.append(("throughput", f"{row['samples_per_s']:.4g} samples/s", f"batch size {row['batch_size']}"))
    if several:
        about = f"median {row['median_ms']:.4g} ms, {row['steps']} steps"
        shown.append(("90th percentile", f"{row['p90_ms']:.4g} ms", about))
    return shown


def _device(said: Verdict | None, attributed: Sequence[tuple[str, int, float]]) -> list[tuple[str, str, str]]:
    """Return how busy the devices are, what is lost most, and how much of their time has a layer."""
    if said is None:
        return []
    shown = [("device busy", f"{said.busy_percent:.1f} %", "of the time from its first work to its last")]
    if said.losses and said.losses[0].ms:
        worst = said.losses[0]
        shown.append(("lost most to", worst.name, f"{worst.percent:.1f} % of the time, {worst.ms:.4g} ms"))
    whole = sum(ms for _, _, ms in attributed)
    if whole:
        known = sum(ms for grade, _, ms in attributed if grade != Grade.UNKNOWN)
        shown.append(("device time with a layer", f"{100 * known / whole:.1f} %", "see below how surely"))
    return shown


def _profiling(models: Sequence[Row], ledger: Sequence[Row]) -> list[tuple[str, str, str]]:
    shown = [("cost of profiling", *_cost(ledger))] if len(ledger) > 1 else []
    if len(models) > 1:
        sizes = ", ".join(str(model["batch_size"]) for model in models[1:])
        shown.append(("also measured", f"{len(models) - 1} more", f"batch size {sizes}: see A1"))
    return shown


def _cost(ledger: Sequence[Row]) -> tuple[str, str]:
    """Return what all rungs together add; where none can be told from the noise, that is said instead."""
    true, full, rung = ledger[0]["step_ms"], ledger[-1]["step_ms"], ledger[-1]["rung"]
    added = f"{full - true:+.3g} ms"
    told = any(row.get("low_ms") is None or not row["low_ms"] <= 0 <= row["high_ms"] for row in ledger[1:])
    share = f"{100 * (full / true - 1):+.1f} %, a step with {rung} on; see the ledger"
    return (added, share) if told else ("in the noise", f"{added}, {share}")


def _between(row: Row) -> str:
    if row.get("low_ms") is None or row.get("high_ms") is None:
        return "too few steps for an interval"
    return f"95 % interval {row['low_ms']:.4g} to {row['high_ms']:.4g} ms"


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return when, where and with what the run was made."""
    machine = run.get("machine") or {}
    system = " ".join(str(machine[part]) for part in ("system", "kernel", "machine") if machine.get(part))
    versions = {"xsp": run.get("xsp"), "Python": machine.get("python"), **(machine.get("packages") or {})}
    facts = [
        ("recorded", str(run.get("created") or "").replace("T", " ").replace("Z", " UTC")),
        ("levels", str(run.get("levels") or "")),
        ("processor", f"{machine['cpu']}, {machine.get('cores', '?')} cores" if machine.get("cpu") else ""),
        ("devices", _counted(machine.get("devices") or [])),
        ("system", system),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    return [(what, text) for what, text in facts if text]


def _counted(names: Sequence[Any]) -> str:
    """Return names with how many times they occur: `8 × NVIDIA A100`."""
    return ", ".join(
        f"{count} × {name}" if count > 1 else str(name) for name, count in Counter(map(str, names)).items()
    )


def _table(trace: Trace, name: str, answer: Answer) -> dict[str, Any]:
    """Return a table's rows, as many as the page shows, without the columns that hold nothing."""
    columns, rows, most, chosen = answer.columns, answer.rows, MOST_ROWS, "the first"
    if name in DEAREST:
        by, most = DEAREST[name]
        rows = _by(rows, columns.index(by))
        chosen = f"those with the highest {by}"
    kept = [place for place in range(len(columns)) if not rows or any(row[place] is not None for row in rows)]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"
    return {
        "id": name,
        "title": ANALYSES[name].title,
        "about": ANALYSES[name].about,
        "columns": [columns[place] for place in kept],
        "empty": [column for place, column in enumerate(columns) if place not in kept],
        "rows": [[row[place] for place in kept] for row in rows[:most]],
        "total": len(rows),
        "chosen": chosen,
        "command": f"xsp analyze {run} {name} --limit {len(rows)}",
    }


def _by(rows: Sequence[tuple[Any, ...]], place: int) -> list[tuple[Any, ...]]:
    """Return the rows with those first that have the most in one column."""
    return sorted(rows, key=lambda row: (row[place] is None, -(row[place] or 0)))
