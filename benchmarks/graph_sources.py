"""Do different sources give one graph? Captured steps against programs of torch.export and execution traces.

Of models that the seed chooses among those of torchvision and timm, keys (as a multiset) and edges of data are
compared. A program is made with real weights and runs without values, an execution trace is of a step on this
processor, whose kernels may return other strides: what differs is named by operator.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parts import turns

import xsp
from xsp import models
from xsp.graph.node import Graph, Why

GOALS = {"program": 100, "execution trace": 30}
QUICK = 2
MOST_WEIGHTS = 100_000_000
"""Parameters of a model: those with more take a machine of their own."""

Made = Callable[[str, Any], Graph]


def main(arguments: Sequence[str] | None = None) -> None:
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--seconds", type=float, default=600, help="for each source; fewer models then (default: 600)")
    options = turns.parse(made, arguments)
    specs = [name for source in ("torchvision", "timm") for name in models.names(source)]
    random.Random(options.seed).shuffle(specs)
    report = turns.Report(
        "graph_sources",
        "Captured steps against other sources of the same step",
        ("source", "models", "same keys", "same edges", "goal", "not made"),
    )
    warnings.simplefilter("ignore")
    for source, make in (("program", _program), ("execution trace", _observed)):
        _compare(report, source, make, specs, QUICK if options.quick else GOALS[source], options.seconds)
    report.finish(options)


def _compare(report: turns.Report, source: str, make: Made, specs: Sequence[str], wanted: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    tried = keys = edges = failed = 0
    for spec in specs:
        if tried == wanted or time.monotonic() > until:
            break
        captured = xsp.graph.of(spec)
        if (captured.parameters or 0) > MOST_WEIGHTS or "meta" not in captured.settings["rung"]:
            continue
        try:
            other = make(spec, models.build(spec, models.Settings()))
        except Exception as error:  # of torch.export: what it cannot do has no class of its own
            failed += 1
            report.notes.append(f"{source}, {spec}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        tried += 1
        turns.say(f"{source} {tried}/{wanted} {spec}")
        more, less = _keys(other) - _keys(captured), _keys(captured) - _keys(other)
        keys += not (more or less)
        edges += _edges(other) == _edges(captured)
        if more or less:
            named = Counter(
                node.call.op for graph in (other, captured) for node in graph.nodes if node.key in more | less
            )
            report.notes.append(f"{source}, {spec}: {', '.join(f'{count} {op}' for op, count in named.most_common(5))}")
    met = "met" if keys == edges == tried >= GOALS[source] else "missed"
    report.add([source, str(tried), str(keys), str(edges), f"{GOALS[source]} alike, {met}", str(failed)])


def _keys(graph: Graph) -> Counter[str]:
    return Counter(each.key for each in graph.nodes)


def _edges(graph: Graph) -> list[tuple[int, int]]:
    return sorted((each.before, each.after) for each in graph.edges_of(Why.DATA))


def _program(spec: str, built: Any) -> Graph:
    import torch

    with torch.no_grad():
        return xsp.graph.of(torch.export.export(built.model.eval(), built.args, built.kwargs))


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
