"""Do different sources give the same graph? Captured steps against programs of torch.export and execution traces.

For models of torchvision and timm that the seed selects, keys (as a multiset) and data edges are compared. A program is
exported with real weights and runs without values; an execution trace is of a step on this CPU. A trace has six
decimals of a number, and only the type of a number that stands for a tensor (`x * 0.5`): the column "as told" compares
keys reduced to this information. Differences are listed by operator. A model that queries whether it is being exported,
and then makes other calls, is captured again with this query answered yes; if it then matches, it is listed and counted
separately. With `--out` the comparisons are kept, so that runs of a few minutes add up.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from parts import turns

import xsp
from xsp import models
from xsp.errors import XspError
from xsp.graph import keys, observed
from xsp.graph.node import EdgeKind, Graph

GOALS = {"program": 100, "execution trace": 30}
QUICK = 2
MOST_WEIGHTS = 100_000_000
"""Maximum number of parameters of a model: larger ones need a dedicated machine."""

FILE = "compared.jsonl"

GraphBuilder = Callable[[str, Any], Graph]
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=600, help="time limit (default: 600)")
    parser.add_argument("--models", nargs="+", help="models (default: a selection by the seed)")
    parser.add_argument("--out", type=Path, help="keep comparisons here, and continue from them")
    options = turns.parse(parser, arguments)
    specs = options.models or [name for source in ("torchvision", "timm") for name in models.names(source)]
    if not options.models:
        random.Random(options.seed).shuffle(specs)
    report = turns.Report(
        "graph_sources",
        "Captured steps compared with other sources of the same step",
        ("source", "models", "same keys", "as told", "same edges", "goal", "ask", "not made"),
    )
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        stored = _StoredRows((options.out or Path(folder)) / FILE)
        for source, build in (("execution trace", _observed), ("program", _program)):
            count = len(specs) if options.models else QUICK if options.quick else GOALS[source]
            rows: list[Row] = []
            with report.until_interrupted():
                rows.extend(_compare(source, build, specs, count, deadline, stored))
            _add(report, source, rows)
            if not report.is_complete:
                break
    report.finish(options)


class _StoredRows:
    """The stored rows of compared models, by source and model."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, str], Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self.rows[row["source"], row["model"]] = row
                except (ValueError, LookupError, TypeError):
                    continue  # the line was cut off when a run was interrupted

    def add(self, row: Row) -> Row:
        """Store a row."""
        self.rows[row["source"], row["model"]] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row


def _compare(
    source: str, build: GraphBuilder, specs: Sequence[str], count: int, deadline: float, stored: _StoredRows
) -> Iterator[Row]:
    """Yield the rows of `count` comparable models and of failed ones; fewer if the time ends first."""
    rows = compared = 0
    for spec in specs:
        if compared >= count:
            break
        row = stored.rows.get((source, spec))
        if row is None and time.monotonic() < deadline:
            row = stored.add({"source": source, "model": spec, **_row(source, build, spec)})
            turns.say(f"{source} {rows + 1} {spec} {row.get('differs') or row.get('error') or ''}")
        if row is not None and "skipped" not in row:
            rows, compared = rows + 1, compared + ("keys" in row)
            yield row


def _row(source: str, build: GraphBuilder, spec: str) -> Row:
    try:
        captured = xsp.graph.of(spec)
    except XspError as error:
        return {"error": f"it cannot be captured: {_first_line(error)}"}
    if (captured.parameters or 0) > MOST_WEIGHTS or "meta" not in captured.settings["rung"]:
        return {"skipped": "too large, or captured with values"}
    try:
        rebuilt = build(spec, models.build(spec, models.Settings()))
    except Exception as error:  # torch.export raises no specific class for what it does not support
        return {"error": f"{type(error).__name__}: {_first_line(error)}"}
    reduced = captured
    if source == "execution trace":
        nodes = [replace(node, key=keys.key(observed.as_recorded_in_trace(node.call))) for node in captured.nodes]
        reduced = replace(captured, nodes=tuple(nodes))
    if source == "program" and not _is_same(rebuilt, captured):
        import torch

        with mock.patch.object(torch.compiler, "is_exporting", return_value=True):
            if _is_same(rebuilt, xsp.graph.of(spec)):
                return {"asks": True}
    extra, missing = _keys(rebuilt) - _keys(reduced), _keys(reduced) - _keys(rebuilt)
    operators = Counter(
        node.call.op for graph in (rebuilt, reduced) for node in graph.nodes if node.key in extra | missing
    )
    return {
        "keys": _keys(rebuilt) == _keys(captured),
        "told": not (extra or missing),
        "edges": _edges(rebuilt) == _edges(captured),
        "differs": ", ".join(f"{count} {op}" for op, count in operators.most_common(5)),
    }


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:160]


def _is_same(a: Graph, b: Graph) -> bool:
    return _keys(a) == _keys(b) and _edges(a) == _edges(b)


def _add(report: turns.Report, source: str, rows: Sequence[Row]) -> None:
    comparable = [row for row in rows if "keys" in row]
    counts = {field: sum(row[field] for row in comparable) for field in ("keys", "told", "edges")}
    equal = sum(row["told"] and row["edges"] for row in comparable)
    verdict = "met" if equal == len(comparable) >= GOALS[source] else "missed"
    cells = [str(len(comparable)), *map(str, counts.values()), f"{GOALS[source]} alike, {verdict}"]
    report.add([source, *cells, str(sum("asks" in row for row in rows)), str(sum("error" in row for row in rows))])
    report.notes += [f"{source}, {row['model']}: {row['error']}" for row in rows if "error" in row]
    report.notes += [
        f"{source}, {row['model']}: it makes different calls when exported; those are the same in both"
        for row in rows
        if "asks" in row
    ]
    report.notes += [
        f"{source}, {row['model']}: {row['differs'] or 'edges'}"
        for row in comparable
        if not (row["told"] and row["edges"])
    ]


def _keys(graph: Graph) -> Counter[str]:
    return Counter(node.key for node in graph.nodes)


def _edges(graph: Graph) -> list[tuple[int, int]]:
    return sorted((edge.before, edge.after) for edge in graph.edges_of(EdgeKind.DATA))


def _program(spec: str, built: Any) -> Graph:
    import torch

    with torch.no_grad():
        built.model.eval()(*built.args, **built.kwargs)  # warm-up: what only the first step creates does not count
        return xsp.graph.of(torch.export.export(built.model, built.args, built.kwargs))


def _observed(spec: str, built: Any) -> Graph:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(path))
        with torch.inference_mode():
            built.model.eval()(*built.args, **built.kwargs)
            observer.start()
            built.model(*built.args, **built.kwargs)
            observer.stop()
        observer.unregister_callback()
        return xsp.graph.of(path)


if __name__ == "__main__":
    main()
