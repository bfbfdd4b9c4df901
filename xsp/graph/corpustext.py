"""The layers that models of a corpus share, as a document and as plain values."""

from __future__ import annotations

import heapq
from typing import Any

from xsp.graph import sharing
from xsp.graph.sharing import Corpus
from xsp.sections import Chart, Part, Section, Series, Table, Text
from xsp.texts import percent_of

MOST_PAIRS = 10
GROWTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Numbers of models at which the growth is shown."""


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


def section(corpus: Corpus) -> Section:
    """Return the same data as a document: growth, the grid in the order of the clustering, pairs, groups and holes."""
    report = as_json(corpus)
    settings = corpus.settings
    mode = f"batch {settings.get('batch', '?')}, {'training step' if settings.get('train') else 'inference'}"
    parts: list[Part] = [Text(f"{report['models']} of {len(corpus.rows)} models have a graph, {mode}.")]
    growth = report["growth"]
    if growth:
        parts.append(Text(f"{report['computing']:,} computing calls, {report['unique']:,} distinct."))
        computing, distinct = (tuple(row[name] for row in growth) for name in ("computing", "unique"))
        labels = tuple(f"{number}: {row['model']}" for number, row in enumerate(growth, 1))
        counts = sorted({*(size for size in GROWTH if size < len(growth)), len(growth)})
        rows = tuple(
            (count, computing[count - 1], distinct[count - 1], percent_of(distinct[count - 1], computing[count - 1]))
            for count in counts
        )
        title = "Distinct layers"
        over = "layers (computing calls) so far"
        parts.append(Chart("lines", title, "layers", computing, (Series("distinct", distinct),), over, (), labels))
        parts += [Table(("models", "layers", "distinct", "share_percent"), rows, "Layers (computing calls) so far")]
        parts += _grid(report)
    if report["groups"]:
        groups = tuple((len(group["models"]), group["mean_jaccard"], ", ".join(group["models"]))
                       for group in sorted(report["groups"], key=lambda group: -len(group["models"])))  # fmt: skip
        title = f"Groups of similar models: mean Jaccard index ≥ {sharing.MIN_SIMILARITY}"
        parts.append(Table(("number", "mean", "models"), groups, title))
    elif growth:
        parts.append(Text(f"No models are similar: no two have a Jaccard index of {sharing.MIN_SIMILARITY} or more."))
    if corpus.holes:
        title = f"{len(corpus.holes)} without a graph, and not in these figures"
        parts.append(Table(("model", "reason"), tuple(corpus.holes), title))
    return Section(f"Layers that the models in {corpus.path} share", tuple(parts))


def _grid(report: dict[str, Any]) -> list[Part]:
    """Return the Jaccard indexes as a chart, and the most similar pairs as a table."""
    names, indexes = report["order"], report["jaccard"]
    order = names[:MOST_DRAWN]
    series = tuple(Series(name, tuple(row[: len(order)])) for name, row in zip(order, indexes, strict=False))
    parts: list[Part] = [Chart("grid", "Jaccard index of distinct layers, by clustering", "of 1", tuple(order), series)]
    if len(order) < len(names):
        parts.append(Text(f"The first {len(order)} of {len(names)} models; --only selects others."))
    pairs = ((indexes[row][column] or 0.0, f"{names[column]}, {names[row]}")
             for row in range(len(names)) for column in range(row))  # fmt: skip
    best = tuple(heapq.nlargest(MOST_PAIRS, pairs))
    return [*parts, *([Table(("Jaccard index", "models"), best, "Most similar pairs")] if best else [])]


def _index(value: float) -> float | None:
    return None if value != value else round(float(value), 4)
