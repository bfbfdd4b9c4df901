"""One page with the timeline, the charts and the tables of a trace. It opens offline, and loads nothing."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.health import health
from xsp.span import Kind
from xsp.trace import Trace

MOST_SPANS = 200_000
"""Spans in the timeline; of a longer trace the longest are shown, and the page says so."""

MOST_ROWS = 500
"""Rows of a table; below it stands the command that prints the others."""


def write(trace: Trace, path: str | Path) -> Path:
    """Write the page of a trace in one piece.

    Args:
        trace: any.
        path: of the page.

    Returns:
        The page's path.

    Raises:
        OSError: it cannot be written.
    """
    page = Path(path)
    rundir.write_whole(page, render(trace).encode())
    return page


def render(trace: Trace) -> str:
    """Return the page of a trace."""
    assets = files("xsp.report") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    # The data come last: nothing in them is taken for a placeholder.
    page = asset("report.html")
    for place, content in {
        "__TITLE__": html.escape(f"{trace.name} · xsp"),
        "__CSS__": asset("report.css"),
        "__ECHARTS__": asset("echarts.min.js"),
        "__JS__": asset("report.js"),
        "__DATA__": _as_json(_data(trace)),
    }.items():
        before, _, after = page.partition(place)
        page = before + content + after
    return page


def _as_json(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever text is in it."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _finite(value: Any) -> Any:
    """Replace what JSON cannot say: numbers that are not finite, and types that it does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _data(trace: Trace) -> dict[str, Any]:
    tables, refused = _tables(trace)
    return {
        "name": trace.name,
        "headline": _headline(tables),
        "machine": _machine(trace.run),
        "health": [tuple(map(str, finding)) for finding in health(trace)],
        **_timeline(trace),
        "tables": tables,
        "refused": refused,
    }


def _headline(tables: list[dict[str, Any]]) -> str:
    """Return latency and throughput in one line."""
    found = next((table for table in tables if table["id"] == "A1"), None)
    if found is None or not found["rows"]:
        return "no timed step"
    row = dict(zip(found["columns"], found["rows"][0], strict=True))
    text = f"{row['latency_ms']:.2f} ms a step"
    if row.get("low_ms") is not None:
        text += f" (95 % interval {row['low_ms']:.2f} to {row['high_ms']:.2f})"
    if row.get("samples_per_s") is not None:
        text += f", {row['samples_per_s']:.1f} samples/s at batch size {row['batch_size']}"
    return text


def _machine(run: dict[str, Any]) -> str:
    machine = run.get("machine", {})
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    parts = [
        run.get("created"),
        machine.get("cpu") and f"{machine['cpu']}, {machine.get('cores')} cores",
        ", ".join(machine.get("devices") or []),
        machine.get("python") and f"Python {machine['python']}",
        versions,
        run.get("levels") and f"levels {run['levels']}",
    ]
    return " · ".join(str(part) for part in parts if part)


def _tables(trace: Trace) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return all analyses that this trace can carry, and why it cannot carry the others."""
    tables, refused = [], []
    for name, each in ANALYSES.items():
        try:
            relation = each(trace)
        except AnalysisError as error:
            refused.append((name, str(error)))
            continue
        columns, rows = relation.columns, relation.fetchall()
        kept = [place for place in range(len(columns)) if not rows or any(row[place] is not None for row in rows)]
        tables.append(
            {
                "id": name,
                "title": each.title,
                "about": each.about,
                "columns": [columns[place] for place in kept],
                "rows": [[row[place] for place in kept] for row in rows[:MOST_ROWS]],
                "total": len(rows),
                "command": f"xsp analyze {trace.path.name if trace.path else 'RUN'} {name} --limit {len(rows)}",
            }
        )
    return tables, refused


_COLUMNS = (
    "span_id", "parent_id", "level", "kind", "name", "type", "phase", "start_ns", "dur_ns", "raw_ns", "true_ns",
    "true_lo_ns", "true_hi_ns", "cause", "input_shapes", "flops", "parent_rule", "thread", "device", "stream", "status",
)  # fmt: skip


_SHOWN = ("level", "kind", "name", "type", "phase", "raw_ns", "true_ns", "cause", "flops", "thread", "status")


def _timeline(trace: Trace) -> dict[str, Any]:
    """Return the merged step's spans, lane by lane, as columns; times are nanoseconds from the step's start."""
    rows = [
        dict(zip(_COLUMNS, row, strict=True))
        for row in trace.con.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM merged ORDER BY dur_ns DESC LIMIT {MOST_SPANS}"
        ).fetchall()
    ]
    total = trace.con.execute("SELECT count(*) FROM merged").fetchall()[0][0]
    zero = next((row["start_ns"] for row in rows if row["kind"] == Kind.STEP), None)
    if zero is None:
        zero = min((row["start_ns"] for row in rows), default=0)
    lanes = _lanes(rows)
    ordered = [row for _, spans in lanes for row in spans]
    place = {row["span_id"]: number for number, row in enumerate(ordered)}
    bounds, first = [], 0
    for title, spans in lanes:
        bounds.append((title, first, first + len(spans)))
        first += len(spans)
    note = f"{len(rows):,} spans of one real step of the deepest rung; true times in the panel."
    if total > len(rows):
        note += f" The {total - len(rows):,} shortest spans are left out."
    return {
        "timeline_note": note,
        "lanes": bounds,
        "range": (
            min((row["start_ns"] - zero for row in ordered), default=0),
            max((row["start_ns"] - zero + row["dur_ns"] for row in ordered), default=0),
        ),
        "spans": {
            "start": [row["start_ns"] - zero for row in ordered],
            "dur": [row["dur_ns"] for row in ordered],
            "parent": [place.get(row["parent_id"]) for row in ordered],
            "lo": [row["true_lo_ns"] for row in ordered],
            "hi": [row["true_hi_ns"] for row in ordered],
            "rule": [row["parent_rule"] for row in ordered],
            "shape": [row["input_shapes"] for row in ordered],
            **{name: [row[name] for row in ordered] for name in _SHOWN},
        },
    }


def _lanes(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Put spans in lanes in which none overlaps another: a track for each thread and stream, nested by time.

    A span without a thread (a primitive) stands on its parent's track.
    """
    by_id = {row["span_id"]: row for row in rows}
    tracks: dict[tuple[int, Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        on_device = row["device"] is not None
        thread = row["thread"] if row["thread"] is not None else by_id.get(row["parent_id"], {}).get("thread")
        tracks[(1, row["device"], row["stream"]) if on_device else (0, thread or 0, 0)].append(row)
    lanes = []
    busiest = sorted(tracks, key=lambda track: (track[0], -sum(row["dur_ns"] for row in tracks[track])))
    for number, track in enumerate(busiest, start=1):
        title = f"device {track[1]} stream {track[2]}" if track[0] else f"thread {number}"
        for depth, lane in enumerate(_nested(tracks[track])):
            lanes.append((title if depth == 0 else f"{title} · {depth}", lane))
    return lanes


def _nested(track: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Put each span in the first lane, from its enclosing span's downwards, that is free when it starts."""
    lanes: list[list[dict[str, Any]]] = []
    ends: list[int] = []
    for row in sorted(track, key=lambda row: (row["start_ns"], row["level"], -row["dur_ns"])):
        free = next((place for place, end in enumerate(ends) if end <= row["start_ns"]), len(ends))
        while any(end > row["start_ns"] for end in ends[free + 1 :]):
            free += 1
        if free == len(ends):
            ends.append(0)
            lanes.append([])
        ends[free] = row["start_ns"] + row["dur_ns"]
        lanes[free].append(row)
    return lanes
