"""How many models of torchvision, timm and transformers can be captured, and how many of their layers are distinct?

Every model, or a sample that the seed selects, is captured on tensors without values by `xsp.graph.corpus`. Models that
are already in the folder are not captured again, so that an interrupted corpus can be resumed. A model type of
transformers has its default configuration, but four layers if the default has more than 48 or is a mixture of experts;
a result of transformers alone is saved separately.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parts import turns

from xsp import models
from xsp.graph import corpus, files

GOAL = {"torchvision": 0.97, "timm": 0.97, "transformers": 0.8}
"""Goals: share of the models of a source that are captured; many types of transformers take several kinds of inputs."""

GOAL_DISTINCT = 0.12
QUICK, SAMPLE = 3, 60
MOST_TYPES = 310
"""Number of model types of transformers to draw from, selected by the seed."""

MOST_LAYERS = 48
SOURCES = ("torchvision", "timm")


def select_models(sources: Sequence[str], number: int | None, seed: int) -> list[str]:
    """Return names of models: all of them, or `number` of them selected by the seed."""
    draw = random.Random(seed)
    names = [name for source in sources if source != "transformers" for name in models.names(source)]
    if "transformers" in sources:
        types = models.names("transformers")
        names += map(with_few_layers, sorted(draw.sample(types, min(MOST_TYPES, len(types)))))
    return names if number is None or number >= len(names) else sorted(draw.sample(names, number))


def with_few_layers(spec: str) -> str:
    """Return the name of a model type of transformers, with fewer layers if it is very deep or a mixture of experts."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(spec.partition(":")[2])
    except Exception:  # then it cannot be captured either, and its row in the corpus has the reason
        return spec
    layers = getattr(config, "num_hidden_layers", None)
    has_experts = any(
        "experts" in name and isinstance(value, int) and value > 1 for name, value in vars(config).items()
    )
    is_deep = isinstance(layers, int) and layers > 4 and (layers > MOST_LAYERS or has_experts)
    return f"{spec}?num_hidden_layers=4" if is_deep else spec


def distinct(out: Path, specs: Iterable[str]) -> list[tuple[int, int]]:
    """Return, after each model of a corpus, the numbers of computing nodes and of different keys so far."""
    nodes, keys, curve = 0, set(), []
    for spec in specs:
        if corpus.graph_path(out, spec).is_file():
            computing = files.load(corpus.graph_path(out, spec)).computing
            nodes += len(computing)
            keys |= {node.key for node in computing}
            curve.append((nodes, len(keys)))
    return curve


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--models", type=int, help=f"how many, chosen by the seed (default: {SAMPLE}, quick: {QUICK})")
    parser.add_argument("--all", action="store_true", help="all models")
    parser.add_argument(
        "--sources", nargs="+", default=list(SOURCES), choices=list(GOAL), help=f"(default: {' '.join(SOURCES)})"
    )
    parser.add_argument("--out", type=Path, help="keep graphs and measures here, and continue from them")
    options = turns.parse(parser, arguments)
    count = None if options.all else options.models or (QUICK if options.quick else SAMPLE)
    specs = select_models(options.sources, count, options.seed)
    available = sum(len(models.names(source)) for source in options.sources)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        rows = corpus.collect(
            specs, out, progress=lambda label, completed, total: turns.say(f"{completed}/{total} {label}")
        )
        curve = distinct(out, specs)
    report = turns.Report(
        "graph_corpus_transformers" if options.sources == ["transformers"] else "graph_corpus",
        f"Graphs of {len(specs)} of the {available:,} models of {' and '.join(options.sources)}",
        ("source", "tried", "captured", "goal", "without values", "nodes, median", "s a model, median"),
    )
    for source in options.sources:
        source_rows = [row for row in rows if row["spec"].startswith(f"{source}:")]
        if source_rows:
            report.add(_cells(source, source_rows))
    nodes, keys = curve[-1] if curve else (0, 0)
    report.notes.append(
        f"Of {nodes:,} computing nodes {keys:,} are distinct, {keys / max(nodes, 1):.1%}; the goal of "
        f"{GOAL_DISTINCT:.0%} is for 1,000 models or more: fewer models have fewer siblings among them."
    )
    report.notes += [f"{row['spec']}: {row['error']}" for row in rows if "error" in row]
    report.data["growth"] = curve[:: max(1, len(curve) // 50)]
    report.data["models"] = [{key: row.get(key) for key in ("spec", "nodes", "unique", "longest_path")} for row in rows]
    report.finish(options)


def _cells(source: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    captured = [row for row in rows if "error" not in row]
    bare = sum("meta" in row["settings"]["rung"] for row in captured)
    share = len(captured) / len(rows)
    return [
        source,
        str(len(rows)),
        f"{len(captured)} ({share:.1%})",
        f"{GOAL[source]:.0%}, {'met' if share >= GOAL[source] else 'missed'}",
        str(bare),
        f"{statistics.median(row['nodes'] for row in captured):.0f}" if captured else "",
        f"{statistics.median(row['seconds'] for row in captured):.2f}" if captured else "",
    ]


if __name__ == "__main__":
    main()
