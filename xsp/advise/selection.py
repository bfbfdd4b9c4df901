"""Costly selection of values: sorts for a few, probabilities to find the largest, copies of masked values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind
from xsp.texts import counted

_SORTS = ("aten::sort", "aten::argsort")
_SLICES = ("aten::slice", "aten::select")

FEW_SHARE = 0.1
"""Maximum share of the sorted values that may be taken for a sort to be worth a line."""


@question("sort-for-few", "Is a whole dimension sorted to use a few values?", number="Q4", shapes=True)
def sort_for_few(context: AdviceContext) -> Iterator[Advice]:
    """Sorts whose results are only sliced, where the narrowest slice takes a tenth of the values or less."""
    step_ms = calls.step_ms(context)
    sorts: list[HostCall] = []
    used_width, total_width = 0, 0
    for parent in calls.walk(context):
        for index, op in enumerate(parent.children if not parent.is_op else ()):
            size = op.first_shape
            if op.name not in _SORTS or size is None:
                continue
            readers = [reader for reader in parent.children[index + 1 :] if reader.is_op and reader.first_shape == size]
            widths = [_slice_width(reader) for reader in readers if reader.name in _SLICES]
            narrowest = min((width for width in widths if width is not None), default=size[-1])
            if readers and all(reader.name in _SLICES for reader in readers) and narrowest <= FEW_SHARE * size[-1]:
                sorts.append(op)
                used_width, total_width = max(used_width, narrowest), max(total_width, size[-1])
    ms = sum(op.ns for op in sorts) / 1e6
    if ms < calls.LEAST_MS:
        return
    yield Advice(
        "sort-for-few",
        f"{total_width:,} values are sorted, and {used_width:,} of them are used",
        calls.places(sorts),
        calls.interval(ms, calls.interval_factors(context, sorts)).limit(step_ms),
        True,
        100 * ms / step_ms,
        (f"{counted(len(sorts), 'sort')} take{'s' * (len(sorts) == 1)} {ms:.3g} ms",),
        "torch.topk(values, k) finds the largest (largest=False: the smallest) without sorting the others; "
        "torch.max or torch.kthvalue for one",
    )


def _slice_width(call: HostCall) -> int | None:
    """Return how many values of the last dimension a slice takes; None if it slices another one, or is unknown."""
    size, scalars = call.first_shape or (), call.scalars
    if len(scalars) < 3 or type(scalars[1]) is not int or not size or scalars[1] % len(size) != len(size) - 1:
        return None
    if call.name == "aten::select":
        return 1
    first, last = (
        min(size[-1], max(0, bound + size[-1] * (bound < 0))) if type(bound) is int else default
        for bound, default in ((scalars[2], 0), (scalars[3] if len(scalars) > 3 else None, size[-1]))
    )
    return max(0, last - first)


_PROBABILITIES = ("aten::softmax", "aten::log_softmax", "aten::sigmoid")


@question("largest", "Are probabilities computed to find the largest one?", number="Q4", shapes=True)
def largest(context: AdviceContext) -> Iterator[Advice]:
    """Softmax and sigmoid of which only the index of the largest value is used.

    They keep the order of values, so that the largest score has the same index.
    """
    step_ms = calls.step_ms(context)
    outer_ops = _forward_ops(context)
    ops = [
        op
        for index, op in enumerate(outer_ops)
        if op.name in _PROBABILITIES
        and (readers := _readers(op, outer_ops[index + 1 :]))
        and all(reader.name == "aten::argmax" for reader in readers)
    ]
    ms = sum(op.ns for op in ops) / 1e6
    if ms < calls.LEAST_MS:
        return
    size = ops[0].first_shape or ()
    yield Advice(
        "largest",
        f"{_short(ops[0])} of {'×'.join(map(str, size))} scores; argmax reads only the largest one's position",
        calls.places(ops),
        calls.interval(ms, calls.interval_factors(context, ops)).limit(step_ms),
        True,
        100 * ms / step_ms,
        (f"{ms:.3g} ms; inferred from shapes: valid if nothing else reads the probabilities",),
        "use argmax of the scores: it is at the same position",
    )


_REDUCTIONS = ("aten::sum", "aten::mean", "aten::max", "aten::min", "aten::norm", "aten::linalg_vector_norm")


_COMPARISONS = ("aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge")

LEAST_GROUPS = 8
"""Minimum number of masks by which the rows of a tensor are selected in one place for them to be groups of rows."""

LEAST_PERCENT = 2.0
"""Minimum percentage of the step for selecting rows group by group to be worth a line."""


@question("mask-indexing", "Are values selected by a mask copied only to be summed?", number="Q4", shapes=True)
def mask_indexing(context: AdviceContext) -> Iterator[Advice]:
    """Indexing by a mask (`x[mask]`) whose result one reduction takes, and by a mask for each group of rows.

    The elements of a mask are counted, listed and gathered; with a mask for each group each of them is read for all.
    """
    step_ms = calls.step_ms(context)
    outer_ops = [op for op in _forward_ops(context) if op.computes]
    ops = [
        op
        for op, next_op in pairwise(outer_ops)
        if _is_by_mask(op) and next_op.name in _REDUCTIONS and len(next_op.first_shape or (0, 0)) == 1
    ]
    all_ops = calls.with_gradients(context, ops)
    ms = sum(op.ns for op in all_ops) / 1e6
    if ms >= calls.LEAST_MS:
        yield Advice(
            "mask-indexing",
            f"values selected by a mask are copied {counted(len(ops), 'time')} in a step only to be reduced",
            calls.places(ops),
            calls.interval(ms, calls.interval_factors(context, all_ops)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"listing the positions and gathering the values{calls.gradients_text(ops, all_ops)} take "
                f"{ms:.3g} ms; on a device this waits for their number",
                "inferred from shapes: valid if the reduction takes the selected values",
            ),
            "torch.where(mask, x, 0).sum(), divided by mask.sum() for a mean; results differ by rounding",
        )
    yield from _groups(context, step_ms, set(ops))


def _is_by_mask(op: HostCall) -> bool:
    return op.name == "aten::index" and any(
        inner.name in ("aten::nonzero", "aten::nonzero_numpy") for inner in op.walk()
    )


def _groups(context: AdviceContext, step_ms: float, known: AbstractSet[HostCall]) -> Iterator[Advice]:
    """Yield the advice on rows that are selected by one mask after the other, as for each class or each graph."""
    masks: dict[tuple[str | None, tuple[int, ...] | None], list[HostCall]] = {}
    passes: dict[tuple[str | None, tuple[int, ...] | None], list[HostCall]] = {}
    for parent in calls.walk(context):
        if parent.is_op or parent.kind == Kind.BACKWARD or parent.phase == "backward":
            continue
        children: list[HostCall | None] = [call for call in parent.children if call.is_op and call.computes]
        for before, op, after in zip([None, *children], children, [*children[1:], None], strict=False):
            if op is None or op in known or not _is_by_mask(op):
                continue
            key = parent.module, op.first_shape
            masks.setdefault(key, []).append(op)
            makes_mask = before is not None and before.name in _COMPARISONS and _rows(before) == _rows(op)
            reduces = after is not None and after.name in _REDUCTIONS
            around = [call for call, is_of_pass in ((before, makes_mask), (after, reduces)) if call and is_of_pass]
            passes.setdefault(key, []).extend([op, *around])
    for key, ops in masks.items():
        all_calls = calls.with_gradients(context, passes[key])
        ms = sum(call.ns for call in all_calls) / 1e6
        gain = ms * (1 - 1 / len(ops))
        if len(ops) < LEAST_GROUPS or gain < calls.LEAST_MS or 100 * gain / step_ms < LEAST_PERCENT:
            continue
        yield Advice(
            "mask-indexing",
            f"rows are selected by {len(ops)} masks in turn, each of which is read for all"
            + (f" {_rows(ops[0]):,} rows" if _rows(ops[0]) else " rows"),
            calls.places(ops),
            calls.interval(gain, calls.interval_factors(context, all_calls)).limit(step_ms),
            True,
            100 * gain / step_ms,
            (
                f"masks, selected rows and what is reduced{calls.gradients_text(passes[key], all_calls)} take "
                f"{ms:.3g} ms; each gradient is as large as the whole tensor",
            ),
            "torch.index_add, scatter_reduce or segment_reduce compute sums, means and maxima of all groups at once; "
            "for other work on each group sort the rows by group once, and take slices (torch.split)",
        )


def _rows(call: HostCall) -> int:
    return (call.first_shape or (0,))[0]


def _forward_ops(context: AdviceContext) -> list[HostCall]:
    """Return the operators that the program calls itself outside backward passes, in order of time."""
    ops = [op for op in calls.outer_ops(context) if op.phase != "backward"]
    forward = (op for op in ops if op.parent is None or op.parent.kind != Kind.BACKWARD)
    return sorted(forward, key=lambda op: op.start_ns)


def _readers(producer: HostCall, later_calls: Sequence[HostCall]) -> list[HostCall]:
    """Return the calls that may read the result of a shape-preserving operator, up to the next call of it."""
    size = producer.first_shape
    readers: list[HostCall] = []
    for call in later_calls:
        if size is None or (call.name == producer.name and call.first_shape == size):
            break
        if call.has_input(size):
            readers.append(call)
    return readers


def _short(call: HostCall) -> str:
    return call.name.removeprefix("aten::")
