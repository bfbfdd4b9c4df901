"""The layers that models of a corpus share, as text for a terminal of 80 columns, and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xsp.graph import sharing
from xsp.graph.sharing import Corpus, Group
from xsp.scrub import plain
from xsp.sections import Chart, Part, Section, Series, Table, Text
from xsp.texts import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH = 80
MOST_IN_GRID = 10
"""Most models for which the grid fits the width; for more models, the groups and the most similar pairs are shown."""

MOST_PAIRS = MOST_GROUPS = MOST_HOLES = 10
GROWTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Numbers of models at which the growth is shown."""


def page(corpus: Corpus) -> str:
    """Return the numbers of layers and of different layers, groups of similar models, and models without a graph."""
    curve = sharing.growth(corpus.members)
    settings = corpus.settings
    mode = f"batch {settings.get('batch', '?')}, {'training step' if settings.get('train') else 'inference'}"
    lines = [plain(str(corpus.path)), f"{len(corpus.members)} of {len(corpus.rows)} models have a graph, {mode}"]
    if corpus.members:
        indexes = sharing.jaccard(corpus.members)
        groups = sharing.groups(indexes)
        lines += ["", *_growth(curve), "", *_groups(corpus, groups)]
        lines += ["", *(_grid if len(corpus.members) <= MOST_IN_GRID else _pairs)(corpus, indexes, groups)]
    if corpus.holes:
        lines += ["", f"{len(corpus.holes)} without a graph, and not in these figures:"]
        lines += [line for hole in corpus.holes[:MOST_HOLES] for line in _wrapped(f"{hole[0]}: {hole[1]}")]
        remaining = len(corpus.holes) - MOST_HOLES
        lines += [f"and {remaining} more"] if remaining > 0 else []
    return "\n".join(lines)


def as_json(corpus: Corpus) -> dict[str, Any]:
    """Return what `xsp graph CORPUS --format json` prints.

    Returns:
        `settings`; `models`, `computing`, `unique`; `growth` with a row for each model in the order of the capture and
        the numbers of calls and different calls so far; `order`, names in the order of the clustering; `jaccard`, the
        matrix in that order; `groups`; and `holes`.
    """
    indexes = sharing.jaccard(corpus.members)
    groups = sharing.groups(indexes)
    order = [place for group in groups for place in group.places]
    names = [member.spec for member in corpus.members]
    curve = sharing.growth(corpus.members)
    computing, unique = curve[-1] if curve else (0, 0)
    return {
        "settings": corpus.settings,
        "models": len(names),
        "computing": computing,
        "unique": unique,
        "growth": [
            {"model": name, "computing": calls, "unique": keys, "of_it": len(member.unique)}
            for name, member, (calls, keys) in zip(names, corpus.members, curve, strict=True)
        ],
        "order": [names[place] for place in order],
        "jaccard": [[_index(indexes[row, column]) for column in order] for row in order],
        "groups": [
            {"models": [names[place] for place in group.places], "mean_jaccard": _index(group.similarity)}
            for group in groups
            if len(group.places) > 1
        ],
        "holes": [{"model": spec, "reason": reason} for spec, reason in corpus.holes],
    }


MOST_DRAWN = 300
"""Most models in the chart of the grid."""


def sections(corpus: Corpus) -> list[Section]:
    """Return the same data as sections of a page: growth, the grid in the order of the clustering, groups and holes."""
    report = as_json(corpus)
    share = f"{100 * report['unique'] / report['computing']:.1f} %" if report["computing"] else "none"
    growth = report["growth"]
    lines = Chart(
        "lines",
        "Distinct layers by number of models",
        "layers",
        tuple(row["computing"] for row in growth),
        (Series("different", tuple(row["unique"] for row in growth)),),
        over="layers (computing calls) so far",
        labels=tuple(f"{number}: {row['model']}" for number, row in enumerate(growth, 1)),
    )
    order = report["order"][:MOST_DRAWN]
    rows = (Series(name, tuple(row[: len(order)])) for name, row in zip(order, report["jaccard"], strict=False))
    grid = Chart("grid", "Jaccard index of distinct layers, by clustering", "of 1", tuple(order), tuple(rows))
    notice = [Text(f"The first {len(order)} of {len(report['order'])} models; --only selects others.")]
    groups = tuple(
        (", ".join(group["models"]), len(group["models"]), group["mean_jaccard"]) for group in report["groups"]
    )
    holes = tuple((hole["model"], hole["reason"]) for hole in report["holes"])
    summary = (
        f"{report['models']} models, {report['computing']:,} computing calls, {report['unique']:,} distinct: {share}."
    )
    parts: list[Part] = [Text(summary), lines, grid, *(notice if len(order) < len(report["order"]) else [])]
    parts.append(Table(("models", "number", "mean Jaccard index"), groups, "Groups of similar models"))
    parts += [Table(("model", "reason"), holes, "Without a graph, and not in these figures")] if holes else []
    return [Section("Layers that models share", tuple(parts))]


def _index(value: float) -> float | None:
    return None if value != value else round(float(value), 4)


def _growth(curve: Sequence[tuple[int, int]]) -> list[str]:
    lines = ["Layers (computing calls), in the order of capture", f"{'models':>8} {'layers':>12} {'distinct':>12}"]
    for count in sorted({*(size for size in GROWTH if size < len(curve)), len(curve)}):
        calls, keys = curve[count - 1]
        lines.append(f"{count:8,} {calls:12,} {keys:12,}" + (f"  {100 * keys / calls:5.1f} %" if calls else ""))
    return lines


def _groups(corpus: Corpus, groups: Sequence[Group]) -> list[str]:
    large = sorted((group for group in groups if len(group.places) > 1), key=lambda group: -len(group.places))
    if not large:
        return [f"No models are similar: no two have a Jaccard index of {sharing.MIN_SIMILARITY} or more"]
    lines = [f"Models that share most of their distinct layers: mean Jaccard index ≥ {sharing.MIN_SIMILARITY}"]
    for group in large[:MOST_GROUPS]:
        names = sorted(corpus.members[place].spec for place in group.places)
        lines += _wrapped(f"{group.similarity:.2f}  " + ", ".join(_without_prefix(names)), indent=6)
    remaining = len(large) - MOST_GROUPS
    single_count = len(groups) - len(large)
    lines += [f"{remaining} more groups"] if remaining > 0 else []
    return [*lines, f"{single_count} models are in no group"] if single_count else lines


def _grid(corpus: Corpus, indexes: NDArray[Any], groups: Sequence[Group]) -> list[str]:
    order = [place for group in groups for place in group.places]
    lines = [
        "Jaccard index of distinct layers",
        " " * 30 + "".join(f"{number:5}" for number in range(1, len(order) + 1)),
    ]
    for number, row in enumerate(order, 1):
        cells = "".join(
            "    –" if indexes[row, column] != indexes[row, column] else f"{indexes[row, column]:5.2f}"
            for column in order
        )
        lines.append(f"{number:2} {cut(plain(corpus.members[row].spec), 27):27}{cells}")
    return lines


def _pairs(corpus: Corpus, indexes: NDArray[Any], groups: Sequence[Group]) -> list[str]:
    import numpy as np

    first, second = np.triu_indices(len(indexes), 1)
    values = np.nan_to_num(indexes[first, second], nan=-1.0)
    best = np.argsort(-values, kind="stable")[:MOST_PAIRS]
    lines = [f"Most similar pairs, by Jaccard index (--only shows a grid of up to {MOST_IN_GRID} models)"]
    for pair in best:
        names = (cut(plain(corpus.members[side[pair]].spec), 35) for side in (first, second))
        lines.append(f"{values[pair]:.2f}  " + "  ".join(f"{name:35}" for name in names).rstrip())
    return lines


def _without_prefix(names: Sequence[str]) -> list[str]:
    """Return names, omitting the source of a name if the previous name has the same."""
    shortened, previous = [], ""
    for name in names:
        source, colon, stem = plain(name).rpartition(":")
        shortened.append(stem if colon and source == previous else plain(name))
        previous = source
    return shortened


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(plain(text), WIDTH, subsequent_indent=" " * indent, break_long_words=True) or [""]
