"""Plan for a trace that is too large: which spans are kept, folded, and in which detail trace; arrays, no tables.

`xsp.otlp.zoom` describes the rules; it reads the arrays from a table and writes the plan back into tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NONE = -1


class SpanColumns(NamedTuple):
    """The spans of one trace, an array per column."""

    row: Indices
    span: npt.NDArray[np.uint64]
    parent: Indices
    """Index of the parent in these arrays; NONE if it is not in them."""

    outside: Mask
    """Whether the parent is not in this trace: there is none, or it is a span of the caller."""

    level: Indices
    start: Indices
    dur: Indices
    fold_class: Indices
    lump: Indices
    owner: Indices


def spans_of(columns: dict[str, npt.NDArray[Any]]) -> SpanColumns:
    """Return the spans of a trace from its columns, in which `parent` holds the parents' ids, 0 for none."""
    # the index of each parent among the spans, NONE if it is missing; no span has the id 0
    spans = columns["span"]
    parents = columns.pop("parent")
    order = np.argsort(spans, kind="stable")
    position = np.minimum(np.searchsorted(spans, parents, sorter=order), len(spans) - 1)
    parent = np.where(spans[order[position]] == parents, order[position], NONE)
    # remove the parents of spans that are their own ancestors, and of the spans below them
    ancestor = np.where(parent < 0, np.arange(len(parent)), parent)
    for _ in range(len(parent).bit_length()):
        ancestor = ancestor[ancestor]
    return SpanColumns(parent=np.where(parent[ancestor] < 0, parent, NONE), outside=parent < 0, **columns)


def _climb(parent: Indices, is_stop: Mask) -> Indices:
    """Return for each span the nearest one in `is_stop`, the span itself or an ancestor, or else its root.

    Each round doubles the distance that all spans have climbed, so a chain of 50,000 takes 16 rounds.
    """
    target = np.where(is_stop | (parent < 0), np.arange(len(parent)), parent)
    while True:
        next_target = target[target]
        if np.array_equal(next_target, target):
            return target
        target = next_target


class Folds(NamedTuple):
    """The folded spans of an overview; places are indices into the trace's arrays, NONE if there is none."""

    first: Indices
    """The span of the fold that began first."""

    anchor: Indices
    """The kept span that is the parent of the fold."""

    outer: Indices
    """The fold that is the parent, if no span above was kept."""

    top: Indices
    """The outermost folded span above the first span, if its parent is outside."""

    lump: Mask


class FoldingPlan(NamedTuple):
    """The plan for the spans of one trace."""

    spans: SpanColumns
    fold: Indices
    """Number of each span's fold; NONE for kept spans."""

    detail: Indices
    is_separated: Mask
    """Whether the span is sent in another trace than its parent."""

    anchor: Indices
    """The nearest kept span above each span."""

    folds: Folds
    details: Indices
    """The first span of each detail trace."""


def plan(spans: SpanColumns, budget: int, details_budget: int) -> FoldingPlan:
    """Return the plan for the spans of a trace.

    Args:
        spans: spans of the trace, more than the budget.
        budget: maximum number of spans of the overview.
        details_budget: maximum number of spans of a detail trace, including its root.
    """
    kept, fold, lump = _choose(spans, budget)
    nearest = _climb(spans.parent, kept)
    kept_ancestor = np.where(spans.parent >= 0, nearest[spans.parent], NONE)
    anchor = np.where((kept_ancestor >= 0) & kept[kept_ancestor], kept_ancestor, NONE)
    top = _climb(spans.parent, ~kept & ((spans.parent < 0) | kept[spans.parent]))
    detail, details = _distribute(spans, ~kept, anchor, top, details_budget - 1)
    is_cut_off = np.where(kept, (spans.parent >= 0) & ~kept[spans.parent], True)
    is_separated = is_cut_off & ~((spans.parent >= 0) & (detail == detail[spans.parent]) & ~kept)
    folds = _describe_folds(spans, fold, lump, anchor, top)
    return FoldingPlan(spans, fold, detail, is_separated, anchor, folds, details)


def _choose(spans: SpanColumns, budget: int) -> tuple[Mask, Indices, Mask]:
    """Return which spans are kept, the fold of each other span, and which folds are lumps."""
    for kept in _cuts(spans):
        room = budget - int(kept.sum())
        lumps = _fold_by_class(spans, kept, spans.lump) if room > 0 else None
        if lumps is not None and lumps.max() < room:
            return kept, *_limit_folds(spans, _fold_by_class(spans, kept, spans.fold_class), lumps, room)
    lumps = np.unique(spans.lump, return_inverse=True)[1]
    candidates = (kept for kept in _cuts(spans) if kept.sum() <= budget // 2 and kept.sum() + lumps.max() < budget)
    kept = next(candidates, np.zeros(len(spans.row), np.bool_))
    fold = _fold_by_class(spans, kept, spans.fold_class)
    return kept, *_limit_folds(spans, fold, np.where(kept, NONE, lumps), int(budget - kept.sum()))


def _cuts(spans: SpanColumns) -> Iterator[Mask]:
    """Yield for each level which spans are kept down to it, beginning with the second deepest level."""
    for level in np.unique(spans.level)[-2::-1]:
        yield spans.level <= level


def _fold_by_class(spans: SpanColumns, kept: Mask, classes: Indices) -> Indices:
    """Return the fold of each span that is not kept, from 0: a fold is the spans of one class under one kept span."""
    kept_ancestor = _climb(spans.parent, kept)
    anchor = np.where(kept[kept_ancestor], kept_ancestor, NONE)[~kept]
    fold = np.full(len(kept), NONE)
    fold[~kept] = np.unique((anchor + 1) * (classes.max() + 1) + classes[~kept], return_inverse=True)[1]
    return fold


def _limit_folds(spans: SpanColumns, fold: Indices, lumps: Indices, room: int) -> tuple[Indices, Mask]:
    """Keep the folds with the largest totals, and lump the others together if they do not all fit.

    Args:
        spans: spans of the trace.
        fold: fold of each span; NONE for kept spans.
        lumps: lump of each span, used if its fold does not fit.
        room: maximum number of folds and lumps.
    """
    folds = int(fold.max()) + 1
    if folds <= room:
        return fold, np.zeros(folds, np.bool_)
    folded = fold >= 0
    totals = np.bincount(fold[folded], spans.dur[folded], folds)
    largest = np.argsort(-totals, kind="stable")[: max(0, room - len(np.unique(lumps[folded])))]
    number = np.full(folds, NONE)
    number[largest] = np.arange(len(largest))
    assigned = np.full(len(fold), NONE)
    assigned[folded] = number[fold[folded]]
    remaining = folded & (assigned < 0)
    distinct, assigned[remaining] = np.unique(lumps[remaining], return_inverse=True)
    assigned[remaining] += len(largest)
    return assigned, np.arange(len(largest) + len(distinct)) >= len(largest)


def _describe_folds(spans: SpanColumns, fold: Indices, lump: Mask, anchor: Indices, top: Indices) -> Folds:
    """Return the first span and the parent of each fold."""
    order = np.lexsort((spans.span, spans.start, fold))
    order = order[np.searchsorted(fold[order], 0) :]
    first = order[np.searchsorted(fold[order], np.arange(len(lump)))]
    outer = np.full(len(lump), NONE)
    for level in np.unique(spans.level[first[anchor[first] < 0]]):
        is_outer = spans.level < level
        outer_span = _climb(spans.parent, is_outer)[first]
        selected = (anchor[first] < 0) & (spans.level[first] == level) & is_outer[outer_span]
        outer[selected] = fold[outer_span[selected]]
    top = np.where(spans.outside[top], top, NONE)
    return Folds(first, anchor[first], outer, top[first], lump)


def _distribute(
    spans: SpanColumns, folded: Mask, anchor: Indices, top: Indices, capacity: int
) -> tuple[Indices, Indices]:
    """Return the detail trace of each folded span, and the first span of each detail trace."""
    tops, unit, sizes = np.unique(top[folded], return_inverse=True, return_counts=True)
    parents = anchor[tops]
    unit_order = np.lexsort(
        (spans.span[tops], spans.start[tops], spans.span[parents], spans.start[parents], spans.owner[tops])
    )
    rank = np.empty(len(tops), np.int64)
    rank[unit_order] = np.arange(len(tops))
    members = np.flatnonzero(folded)
    order = members[np.lexsort((spans.span[members], spans.start[members], rank[unit]))]
    bounds = _pack(sizes[unit_order], capacity)
    detail = np.full(len(folded), NONE)
    detail[order] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return detail, order[bounds[:-1]]


def _pack(sizes: Indices, capacity: int) -> Indices:
    """Return where detail traces begin and end; a unit is split only if it exceeds the capacity of a trace."""
    ends = np.cumsum(sizes)
    bounds, unit = [0], 0
    while unit < len(sizes):
        stop = int(np.searchsorted(ends, bounds[-1] + capacity, side="right"))
        if stop == unit:
            bounds += range(bounds[-1] + capacity, int(ends[unit]), capacity)
            stop = unit + 1
        bounds.append(int(ends[stop - 1]))
        unit = stop
    return np.array(bounds)
