"""Writes the saved figures into docs/understand/benchmarks.md, starting with the ratios against peers."""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "understand" / "benchmarks.md"

BEGIN, END = "<!-- begin generated: figures -->", "<!-- end generated: figures -->"
NOTICE = "<!-- Written from benchmarks/results/*.json. Run `make figures`. -->"


VERDICT = re.compile(r"(?:^|: |, )(met|missed)\??(?=$|[,.;) ])")

COLUMNS: dict[str, tuple[str, ...]] = {
    "block_timings": ("s", "again, median", "90th"),
    "compare_runs": ("false alarms %", "5 % slower found %"),
    "cupti_decode": ("ns a record [95 %]",),
    "generation_load": ("xsp ÷ server", "xsp ÷ guidellm"),
    "gpu_attribution": ("exact %",),
    "gpu_drops": ("kernels a second, recorded", "dropped or lost"),
    "gpu_kineto": ("same names", "sum: cupti / kineto"),
    "gpu_rungs": ("M/L %", "cupti / torch.profiler"),
    "gpu_true_time": ("true / bare",),
    "graph_memory": ("error",),
    "graph_sources": ("models", "same keys", "same edges"),
    "idle_cost": ("more than empty, ns",),
    "import_time": ("more than `pass`, ms [95 %]",),
    "language_lengths": ("error",),
    "layer_overhead": ("M/L %",),
    "long_run": ("budget kept", "program MB, more per 1000 steps"),
    "measures_latency": ("FLOPs", "bytes", "longest path"),
    "op_overhead": ("xsp adds %", "torch.profiler adds %"),
    "otlp_loss": ("lost", "spans/s"),
    "otlp_million": ("s", "API, ms"),
    "phases": ("stated: off by", "recorded: off by"),
    "predict_scaling": ("with it",),
    "same_results": ("inference", "training", "xsp run"),
    "true_time": ("true / bare", "error %"),
}
"""The columns of a table that answer the question of a benchmark."""

ROWS: dict[str, tuple[str, str]] = {
    "estimators": ("estimator", "geometric mean"),
    "estimators_training": ("estimator", "geometric mean"),
    "graph_corpus": ("source", "captured"),
    "graph_corpus_transformers": ("source", "captured"),
    "load_generator": ("what", "found"),
    "serve_load": ("checkout", "spans/s"),
    "service_cost": ("requests", "median to bare"),
    "shared_layers": ("question", "answer"),
    "spark_ranks": ("ranks", "Spark / DuckDB"),
    "step_cost": ("step", "xsp / torch + file"),
}
"""The columns of a table whose rows have different units or meanings: what a row is of, and its figure."""

NOTES: dict[str, tuple[str, ...]] = {
    "advice": ("right advice", "no advice", "error of"),
    "bare": ("Iterations", "The interval", "Profiling added", "What xsp says"),
    "construction": ("Timed calls",),
    "construction_batch1_threads2": ("Timed calls",),
    "construction_batch8_threads1": ("Timed calls",),
    "construction_batch8_threads2": ("Timed calls",),
    "construction_hundred": ("Timed calls",),
    "predict_buckets": ("Kendall",),
    "predict_configurations": ("what is computed: ", "what was chosen, each kind by itself: "),
    "predict_curves": ("Held out", "A second run"),
    "predict_ddp": ("Mean error",),
    "predict_repeated": ("Within",),
    "predict_ddp_4": ("Mean error",),
    "rank_scale": ("import", "analyses"),
    "same_evaluation": ("unchanged", "changed"),
    "share_load": ("Best", "Worst"),
    "share_models": ("Loading and first call",),
    "short_steps": ("Goal met", "xsp's interval"),
}
"""The beginnings of the notes of a result that answer the question of a benchmark."""


class Ratio(NamedTuple):
    """A row of the table of ratios."""

    question: str
    peer: str
    of: str
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
    """Return the page with the table of the saved results between its markers, ratios against peers first."""
    ratios: dict[tuple[str, str, str], list[Ratio]] = {}
    for ratio in against_peers(saved):
        question = f"{ratio.question}, against {ratio.peer}"
        ratios.setdefault((ratio.script, question, ratio.date), []).append(ratio)
    body = [
        [f"`{script}`", question, "; ".join(f"{ratio.of}: {ratio.value}" for ratio in found), "", date]
        for (script, question, date), found in ratios.items()
    ]
    body += [row for row in (_row(name, result) for name, result in saved.items()) if row[2]]
    table = _table(["benchmark", "question", "result", "goals", "measured on"], body)
    before, _, remainder = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{NOTICE}\n\n{table}\n{END}{remainder.partition(END)[2]}"


def _row(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of a benchmark: question, figures that answer it, goals met, day and processor."""
    machine = result["machine"]
    device = re.search(r"NVIDIA \w+", " ".join(result["notes"]))
    date = f"{result['date']}, {device.group() if device else machine['cpu'].split('(')[0].split()[0]}"
    figures = [_spread(result, column) for column in COLUMNS.get(name, ())]
    if columns := ROWS.get(name):
        figures += ["; ".join(f"{row[columns[0]]}: {row[columns[1]]}" for row in result["table"])]
    figures += [note.rstrip(".") for note in result["notes"] if note.startswith(NOTES.get(name, ("\0",)))]
    return [f"`{name}`", _question(name), "; ".join(figures), _goals(result), date]


def _question(result: str) -> str:
    """Return the question in the docstring of a result's script; `estimators_training` is of `estimators`."""
    script = next(
        path for path in sorted((ROOT / "benchmarks").glob("*.py"), reverse=True) if result.startswith(path.stem)
    )
    if script.stem != result:
        return f"`{script.stem}` with other options"
    text = script.read_text(encoding="utf-8")
    return re.split(r"(?<=[?.])\s", (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0])[0]


def _spread(result: dict[str, Any], column: str) -> str:
    """Return the median of a column over the rows of a table, with the least and the most: `error %: 1 (0.2 … 3)`."""
    cells = [str(row.get(column, "")) for row in result["table"]]
    found = [number.group() for cell in cells if (number := re.match(r"[-+]?\d[\d,]*(\.\d+)?(?<!,)", cell))]
    if not found:
        return f"{column}: {', '.join(dict.fromkeys(cells))}"
    values = sorted((float(text.replace(",", "")), text.lstrip("+")) for text in found)
    middle = values[(len(values) - 1) // 2][1]
    return f"{column}: {middle}" + (f" ({values[0][1]} … {values[-1][1]})" if len(values) > 1 else "")


def _goals(result: dict[str, Any]) -> str:
    """Return how many verdicts of a table and its notes are `met`; a verdict ends a cell or a clause."""
    cells = [str(cell) for row in result["table"] for cell in row.values()]
    verdicts = [verdict for text in (*cells, *result["notes"]) for verdict in VERDICT.findall(text)]
    return f"{verdicts.count('met')} of {len(verdicts)} met" if verdicts else ""


def against_peers(saved: dict[str, dict[str, Any]]) -> Iterator[Ratio]:
    """Yield the ratios between the saved figures of xsp and those of other tools for the same work."""
    if result := saved.get("op_overhead"):
        column = "xsp step / torch.profiler step"
        middle = statistics.median(float(row[column].split()[0]) for row in result["table"])
        peer = f"torch.profiler of torch {_version(result, 'torch')}"
        models = len(result["table"])
        question = "a step with model, layer and op levels on, xsp's time / its"
        yield Ratio(question, peer, f"median of {models} models", f"{middle:.3f} ×", "op_overhead", result["date"])
    if result := saved.get("otlp_encode"):
        peer = f"opentelemetry-sdk {_version(result, 'opentelemetry-sdk')}"
        for row in result["table"]:
            if value := row["times the SDK from the same [95 %]"]:
                source = row["spans → OTLP requests"].removeprefix("xsp, ")
                yield Ratio("spans a second, xsp's / its", peer, source, f"{value} ×", "otlp_encode", result["date"])
    if result := saved.get("kineto_peers"):
        for row in result["table"]:
            trace, peer = row["trace · peer"].split(" · ")
            versions = dict.fromkeys(turn["version"] for turn in result["data"][row["trace · peer"]]["turns"])
            peer = " ".join([peer.split()[0], *versions])
            of = f"{trace}, {row['events']} events, load"
            parts = ((of, row["peer: load"]), ("analyse", row["peer: its analyses"]), ("memory", _memory(row)))
            for part, value in parts:
                yield Ratio("time and memory, its / xsp's", peer, part, value, "kineto_peers", result["date"])


def _memory(row: dict[str, str]) -> str:
    own_mb, peer_mb = (float(row[f"{tool}: peak MB"].replace(",", "")) for tool in ("xsp", "peer"))
    return f"{peer_mb / own_mb:.1f} ×"


def _version(result: dict[str, Any], package: str) -> str:
    return str(result["machine"]["packages"].get(package, "of unknown version"))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")
