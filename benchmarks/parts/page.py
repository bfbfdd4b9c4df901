"""Writes the saved figures into docs/understand/benchmarks.md, starting with the ratios against peers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "understand" / "benchmarks.md"

BEGIN, END = "<!-- begin generated: figures -->", "<!-- end generated: figures -->"
NOTICE = "<!-- Written from benchmarks/results/*.json. Run `make figures`. -->"


class Ratio(NamedTuple):
    """A row of the table of ratios."""

    question: str
    peer: str
    value: str
    script: str
    date: str


def update() -> None:
    """Rewrite the page with the saved results."""
    PAGE.write_text(page_text(results()), encoding="utf-8")


def results() -> dict[str, dict[str, Any]]:
    """Return the saved results by benchmark."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def page_text(saved: dict[str, dict[str, Any]]) -> str:
    """Return the page with the saved results between its markers."""
    lines = ["question", "peer", "ratio [95 %]", "script", "date"]
    ratios = _table(lines, [list(ratio) for ratio in against_peers(saved)])
    parts = [f"{BEGIN}\n{NOTICE}", "### Ratios against peers", ratios, *map(_section, saved.values())]
    before, _, remainder = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + "\n\n".join(parts) + "\n" + END + remainder.partition(END)[2]


def against_peers(saved: dict[str, dict[str, Any]]) -> Iterator[Ratio]:
    """Yield the ratios between the saved figures of xsp and those of other tools for the same work."""
    if result := saved.get("op_overhead"):
        column = "xsp step / torch.profiler step"
        middle = statistics.median(float(row[column].split()[0]) for row in result["table"])
        peer = f"torch.profiler of torch {_version(result, 'torch')}"
        models = len(result["table"])
        question = f"a step with model, layer and op levels on: xsp's time / its time (median of {models} models)"
        yield Ratio(question, peer, f"{middle:.3f} ×", "op_overhead", result["date"])
    if result := saved.get("otlp_encode"):
        peer = f"opentelemetry-sdk {_version(result, 'opentelemetry-sdk')}"
        for row in result["table"]:
            if value := row["times the SDK from the same [95 %]"]:
                encoding_question = f"spans encoded a second, {row['spans → OTLP requests']}: xsp's / its"
                yield Ratio(encoding_question, peer, f"{value} ×", "otlp_encode", result["date"])
    if result := saved.get("kineto_peers"):
        for row in result["table"]:
            trace, peer = row["trace · peer"].split(" · ")
            versions = dict.fromkeys(turn["version"] for turn in result["data"][row["trace · peer"]]["turns"])
            peer = " ".join([peer.split()[0], *versions])
            size_text = f"{trace}, {row['events']} events"
            yield Ratio(f"load {size_text}: its time / xsp's", peer, row["peer: load"], "kineto_peers", result["date"])
            analysis_question = f"analyse {size_text}: its time / xsp's"
            yield Ratio(analysis_question, peer, row["peer: its analyses"], "kineto_peers", result["date"])
            yield Ratio(f"memory for {size_text}: its peak / xsp's", peer, _memory(row), "kineto_peers", result["date"])


def _memory(row: dict[str, str]) -> str:
    own_mb, peer_mb = (float(row[f"{tool}: peak MB"].replace(",", "")) for tool in ("xsp", "peer"))
    return f"{peer_mb / own_mb:.1f} ×"


def _version(result: dict[str, Any], package: str) -> str:
    return str(result["machine"]["packages"].get(package, "of unknown version"))


def _section(result: dict[str, Any]) -> str:
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    about = (
        f"{result['date']}, xsp {result['xsp']}; {machine['cpu']}, {machine['cores']} cores, {machine['system']} "
        f"{machine['kernel']}; Python {machine['python']}, {packages}; load before {result['load']:.1f}"
        f"{', memory kept' if result['options'].get('keep_memory') else ''}."
    )
    rows = result["table"]
    table = _table(list(rows[0]), [list(row.values()) for row in rows]) if rows else "No rows."
    return "\n\n".join([f"### {result['benchmark']}", about, table, *result["notes"]])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")
