"""A page with the timeline, the charts and the tables of a trace. It opens offline, and loads no other files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

from xsp import rundir, sections, table
from xsp.account import served
from xsp.account.requests import reasons as reasons_of
from xsp.account.sentences import percent_text
from xsp.account.serving import lives
from xsp.analyses import ANALYSES
from xsp.analyses.answers import Answers, AnswerTable
from xsp.analyses.loop import kinds_of
from xsp.levels import depth
from xsp.report import timeline, words
from xsp.report.charts import charts
from xsp.report.firstscreen import FirstScreen, first_screen, gain_text
from xsp.report.headline import headline
from xsp.report.loop import kinds_data, loop
from xsp.report.words import describe_rungs, devices_text
from xsp.store.trace import Trace
from xsp.texts import ms_text

MOST_ROWS = 1000
"""Maximum rows of a table; the command that prints all rows is below it."""

MOST_LOADED = 100_000
"""Most spans of a run directory that are read into memory at once, because all analyses run."""

LEAST_SPANS = 20_000
"""Least number of spans for the timeline of each further kind of step; all of them share `timeline.MOST_SPANS`."""

LARGEST_ROWS = {"A8": ("latency_us", 200)}
"""Tables that show only the rows with the highest values of a column: column, number of rows."""

SCRIPTS = (
    "echarts.min.js", "spans.js", "lanes.js", "timeline.js", "words.js", "charts.js", "loop.js", "serving.js",
    "ledger.js", "tables.js", "sections.js", "report.js",
)  # fmt: skip
"""The page's scripts, in the order in which they run."""


def write(trace: Trace, path: str | Path, other_kinds: Sequence[Trace] = ()) -> Path:
    """Write the page of a trace atomically.

    Args:
        trace: any trace.
        path: path of the page.
        other_kinds: traces of the same run with other kinds of steps; the page has a choice between them.

    Returns:
        The page's path.

    Raises:
        OutputError: it cannot be written; an existing page is unchanged.
    """
    page = Path(path)
    rundir.write_atomically(page, render(trace, other_kinds).encode("utf-8", "replace"))
    return page


_SECTIONS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src __ALLOWED__; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<title>__TITLE__</title>
<style>__CSS__</style>
</head>
<body>
<header><h1>__TITLE__</h1></header>
<nav aria-label="sections"><a href="#tables" hidden>tables</a></nav>
<main><div id="others"></div></main>
<script type="application/json" id="data">__DATA__</script>
__SCRIPTS__
</body>
</html>
"""


def write_sections(path: str | Path, title: str, page_sections: Sequence[sections.Section]) -> Path:
    """Write a page of sections alone, without a trace, atomically; it opens offline like the page of a trace.

    Args:
        path: path of the page.
        title: title of the page.
        page_sections: its sections, in their order.

    Returns:
        The page's path.

    Raises:
        OutputError: it cannot be written; an existing page is unchanged.
    """
    scripts = [_asset(name) for name in ("echarts.min.js", "words.js", "charts.js", "tables.js", "sections.js")]
    scripts.insert(1, "const timeline = { redraw() {} };")
    scripts.append("drawSections();")
    entries = [{"name": str(number), **sections.plain(section)} for number, section in enumerate(page_sections, 1)]
    contents = {
        "__TITLE__": html.escape(title),
        "__CSS__": _asset("report.css"),
        "__ALLOWED__": " ".join(_script_hash(script) for script in scripts),
        "__SCRIPTS__": "\n".join(f"<script>{script}</script>" for script in scripts),
        "__DATA__": _as_json({"sections": entries, "damaged": []}),
    }
    text = re.sub("|".join(contents), lambda match: contents[match.group()], _SECTIONS_PAGE)
    page = Path(path)
    rundir.write_atomically(page, text.encode("utf-8", "replace"))
    return page


def render(trace: Trace, other_kinds: Sequence[Trace] = ()) -> str:
    """Return the page of a trace, with a choice between it and others: the same run with other kinds of steps."""
    scripts = [_asset(name) for name in SCRIPTS]
    traces = [trace, *other_kinds]
    pages, span_budget = [], timeline.MOST_SPANS
    for kind_trace in traces:
        pages.append(_data(kind_trace, span_budget))
        span_budget = max(LEAST_SPANS, span_budget - pages[-1]["timeline"]["count"])
    common = {
        "name": trace.name,
        "facts": _facts(trace),
        "advise": f"xsp advise {shlex.quote(trace.path.name if trace.path else 'RUN')}",
        "loop": loop(trace),
        "serving": serving(trace),
        **_added_sections(trace),
        "kinds": kinds_data(trace, traces),
    }
    contents = {
        "__TITLE__": html.escape(f"{trace.name} · xsp"),
        "__CSS__": _asset("report.css"),
        "__ALLOWED__": " ".join(_script_hash(script) for script in scripts),
        "__SCRIPTS__": "\n".join(f"<script>{script}</script>" for script in scripts),
        "__DATA__": _as_json({**common, **pages[0]}),
        "__OTHERS__": "\n".join(
            f'<script type="application/json" id="kind-{index}">{_as_json(page)}</script>'
            for index, page in enumerate(pages[1:], 1)
        ),
    }
    # In one pass: inserted content is never searched for placeholders.
    return re.sub("|".join(contents), lambda match: contents[match.group()], _asset("report.html"))


def _asset(name: str) -> str:
    return (files("xsp.report") / "assets" / name).read_text(encoding="utf-8")


def _script_hash(script: str) -> str:
    """Return the hash by which a content security policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _as_json(data: Any) -> str:
    """Return JSON that is safe inside a script element, whatever text it has; other types than JSON's become text."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    try:
        text = encoder.encode(data)
    except ValueError:  # some numbers are not finite, which is rare
        text = encoder.encode(sections.finite(data))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _data(trace: Trace, most_spans: int) -> dict[str, Any]:
    """Return the data that the page shows of one kind of step."""
    trace.load_into_memory(MOST_LOADED)
    with ThreadPoolExecutor(1) as executor:  # both spend most of their time in the engine
        drawing = executor.submit(timeline.timeline, trace, most_spans, table.cursor(trace.con))
        answers = Answers(trace)
        results = {name: answers[name] for name in ANALYSES if name != "health"}  # the page has a section of it
        screen, reliability = first_screen(trace), words.reliability(trace)
        ledger = results["ledger"].dicts()
        return {
            "screen": screen_data(screen),
            "headline": headline(answers, reliability["attributed"]),
            "health": reliability,
            "charts": charts(answers),
            "ledger": [{**row, "records": depth(row["rung"])} for row in ledger],
            "rungs": describe_rungs(row["rung"] for row in ledger),
            "tables": [_table(trace, name, answer) for name, answer in results.items() if answer.reason is None],
            "refused": [(name, answer.reason) for name, answer in results.items() if answer.reason is not None],
            "timeline": drawing.result(),
        }


def screen_data(screen: FirstScreen) -> dict[str, Any]:
    """Return the first screen for the page: heading, sentence, advice, and both sides of the account as texts."""
    sides = [("host", screen.host), (screen.device_name, screen.device)]
    return {
        "heading": screen.heading.removeprefix(screen.name).lstrip(",: "),
        "sentences": screen.sentences,
        "advice": [(gain_text(piece), piece.what, piece.do.replace("`", "")) for piece in screen.advice],
        "sides": [
            {
                "name": name,
                "total": ms_text(sum(line.ms for line in lines)),
                "parts": [(line.name, line.ms, percent_text(line.percent), ms_text(line.ms)) for line in lines],
            }
            for name, lines in sides
            if lines
        ],
    }


def _added_sections(trace: Trace) -> dict[str, Any]:
    """Return the sections in the run directory, and the files there that are not sections."""
    if trace.path is None or not trace.path.is_dir():
        return {"sections": [], "damaged": []}
    content = sections.read(trace.path)
    entries = [{"name": name, **sections.plain(section)} for name, section in content.sections.items()]
    return {"sections": entries, "damaged": [f"{rundir.SECTIONS}/{line}" for line in content.damaged]}


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Return when and where the run was recorded, and with which versions."""
    run, machine = trace.run, trace.run.machine
    system = " ".join(filter(None, (machine.system, machine.kernel, machine.machine)))
    versions = {"xsp": run.xsp, "Python": machine.python, **machine.packages}
    facts = [
        ("recorded", (run.created or "").replace("T", " ").replace("Z", " UTC")),
        ("recorded levels", describe_rungs(run.rungs) or run.levels or ""),
        ("processor", f"{machine.cpu}, {machine.cores or '?'} cores" if machine.cpu else ""),
        ("devices", devices_text(trace)),
        ("system", system),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    return [(label, text) for label, text in facts if text]


def _table(trace: Trace, name: str, answer: AnswerTable) -> dict[str, Any]:
    """Return as many rows of a table as the page shows, without columns that hold nothing."""
    columns, rows, max_rows, selection = answer.columns, answer.rows, MOST_ROWS, "the first"
    if name in LARGEST_ROWS:
        measure, max_rows = LARGEST_ROWS[name]
        measured = columns.index(measure)
        rows = sorted(rows, key=lambda row: (row[measured] is None, -(row[measured] or 0)))
        selection = f"those with the highest {measure}"
    indices = [index for index in range(len(columns)) if not rows or any(row[index] is not None for row in rows)]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"
    kind = f" --kind {trace.kind}" if len(kinds_of(trace, trace.rank)) > 1 else ""
    return {
        "id": name,
        "title": ANALYSES[name].title,
        "about": ANALYSES[name].about,
        "columns": [columns[index] for index in indices],
        "empty": [column for index, column in enumerate(columns) if index not in indices],
        "rows": [[row[index] for index in indices] for row in rows[:max_rows]],
        "total": len(rows),
        "chosen": selection,
        "command": f"xsp analyze {run} {name} --limit {len(rows)}{kind}",
    }


MOST_STEPS, MOST_REQUESTS = 5_000, 40
"""Maximum numbers of steps and of requests that are drawn; of more, the longest ones."""


def serving(trace: Trace) -> dict[str, Any] | None:
    """Return steps of engines, and what happened to the longest requests, in seconds since the first; None without."""
    steps, requests = served.steps(trace), served.requests(trace)
    if not steps and not requests:
        return None
    start_ns = min([each.start_ns for each in steps[:1]] + [each.start_ns for each in requests[:1]])
    drawn = sorted(sorted(steps, key=lambda step: -step.dur_ns)[:MOST_STEPS], key=lambda step: step.start_ns)
    reasons = reasons_of(trace)

    def seconds(ns: int) -> float:
        return round((ns - start_ns) / 1e9, 7)

    return {
        "steps": [
            {
                "kind": step.kind, "start": seconds(step.start_ns), "end": seconds(step.end_ns),
                "requests": step.requests, "prefill": step.prefill_tokens, "decode": step.decode_tokens,
                "number": step.number, "engine": step.engine,
            }
            for step in drawn
        ],
        "requests": [
            {
                "name": each.request, "status": each.status, "ms": each.latency_ns / 1e6,
                "prompt": each.prompt_tokens, "output": each.output_tokens,
                "slow_by": reasons.get((each.rank, each.engine, each.request, each.start_ns), ""),
                "life": [(part.name, seconds(part.start_ns), seconds(part.end_ns), part.steps, part.tokens)
                         for part in parts],
            }
            for each, parts in lives(trace, MOST_REQUESTS)
        ],
        "left_out": [len(steps) - len(drawn), max(0, len(requests) - MOST_REQUESTS)],
    }  # fmt: skip
