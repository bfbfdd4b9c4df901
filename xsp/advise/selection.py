"""Costly selection of values: sorts for a few, probabilities to find the largest, copies of masked values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import Advice, Asked
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Kind

_SORTS = ("aten::sort", "aten::argsort")
_PARTS = ("aten::slice", "aten::select")

FEW = 0.1
"""Maximum share of the sorted values that may be taken for a sort to be worth a line."""


@question("sort-for-few", "Is a whole dimension sorted to use a few values?", number="Q4")
def sort_for_few(asked: Asked) -> Iterator[Advice]:
    """Sorts whose results are only sliced, where the narrowest slice takes a tenth of the values or less."""
    whole = calls.step_ms(asked)
    found: list[Call] = []
    most, of = 0, 0
    for around in calls.every(asked):
        for at, each in enumerate(around.inside if not around.is_op else ()):
            size = each.first_shape
            if each.name not in _SORTS or size is None:
                continue
            later = [one for one in around.inside[at + 1 :] if one.is_op and one.first_shape == size]
            parts = [_taken(one) for one in later if one.name in _PARTS]
            few = min((part for part in parts if part is not None), default=size[-1])
            if later and all(one.name in _PARTS for one in later) and few <= FEW * size[-1]:
                found.append(each)
                most, of = max(most, few), max(of, size[-1])
    ms = sum(each.ns for each in found) / 1e6
    if ms < calls.LEAST_MS:
        return
    yield Advice(
        "sort-for-few",
        f"{of:,} values are sorted, and {most:,} of them are used",
        calls.places(found),
        calls.interval(ms, calls.ends(asked, found)).within(whole),
        True,
        100 * ms / whole,
        (f"{len(found)} sort{'s' * (len(found) > 1)} take{'s' * (len(found) == 1)} {ms:.3g} ms",),
        "torch.topk(values, k) finds the largest (largest=False: the smallest) without sorting the others; "
        "torch.max or torch.kthvalue for one",
    )


def _taken(call: Call) -> int | None:
    """Return how many values of the last dimension a slice takes; None if it slices another one, or is unknown."""
    size, told = call.first_shape or (), call.scalars
    if len(told) < 3 or type(told[1]) is not int or not size or told[1] % len(size) != len(size) - 1:
        return None
    if call.name == "aten::select":
        return 1
    first, last = (
        min(size[-1], max(0, each + size[-1] * (each < 0))) if type(each) is int else default
        for each, default in ((told[2], 0), (told[3] if len(told) > 3 else None, size[-1]))
    )
    return max(0, last - first)


_PROBABILITIES = ("aten::softmax", "aten::log_softmax", "aten::sigmoid")


@question("largest", "Are probabilities computed to find the largest one?", number="Q4")
def largest(asked: Asked) -> Iterator[Advice]:
    """Softmax and sigmoid of which only the index of the largest value is used.

    They keep the order of values, so that the largest score has the same index.
    """
    whole = calls.step_ms(asked)
    outer = _outer(asked)
    found = [
        each
        for at, each in enumerate(outer)
        if each.name in _PROBABILITIES
        and (readers := _readers(each, outer[at + 1 :]))
        and all(one.name == "aten::argmax" for one in readers)
    ]
    ms = sum(each.ns for each in found) / 1e6
    if ms < calls.LEAST_MS:
        return
    size = found[0].first_shape or ()
    yield Advice(
        "largest",
        f"{_short(found[0])} of {'×'.join(map(str, size))} scores; argmax reads only the largest one's position",
        calls.places(found),
        calls.interval(ms, calls.ends(asked, found)).within(whole),
        True,
        100 * ms / whole,
        (f"{ms:.3g} ms; inferred from shapes: valid if nothing else reads the probabilities",),
        "use argmax of the scores: it is at the same position",
    )


_REDUCED = ("aten::sum", "aten::mean", "aten::max", "aten::min", "aten::norm", "aten::linalg_vector_norm")


@question("mask-indexing", "Are values selected by a mask copied only to be summed?", number="Q4")
def mask_indexing(asked: Asked) -> Iterator[Advice]:
    """Indexing by a mask (`x[mask]`) whose result one reduction takes: elements are counted, listed and gathered."""
    whole = calls.step_ms(asked)
    outer = [each for each in _outer(asked) if each.computes]
    found = [
        each
        for each, after in pairwise(outer)
        if each.name == "aten::index"
        and any(inner.name in ("aten::nonzero", "aten::nonzero_numpy") for inner in each.every())
        and after.name in _REDUCED
        and len(after.first_shape or (0, 0)) == 1
    ]
    every = [*found, *calls.gradients(asked, found)]
    ms = sum(each.ns for each in every) / 1e6
    if ms < calls.LEAST_MS:
        return
    yield Advice(
        "mask-indexing",
        f"values selected by a mask are copied {len(found)} time{'s' * (len(found) > 1)} in a step only to be reduced",
        calls.places(found),
        calls.interval(ms, calls.ends(asked, every)).within(whole),
        True,
        100 * ms / whole,
        (
            f"listing the positions and gathering the values{' and their gradients' * (len(every) > len(found))} take "
            f"{ms:.3g} ms; on a device this waits for their number",
            "inferred from shapes: valid if the reduction takes the selected values",
        ),
        "torch.where(mask, x, 0).sum(), divided by mask.sum() for a mean; results differ by rounding",
    )


def _outer(asked: Asked) -> list[Call]:
    """Return the operators that the program calls itself outside backward passes, in order of time."""
    found = [each for each in calls.every(asked) if each.is_outer_op and each.phase != "backward"]
    kept = (each for each in found if each.around is None or each.around.kind != Kind.BACKWARD)
    return sorted(kept, key=lambda each: each.start_ns)


def _readers(made: Call, later: Sequence[Call]) -> list[Call]:
    """Return the calls that may read the result of a shape-preserving operator, up to the next call of it."""
    size = made.first_shape
    found: list[Call] = []
    for each in later:
        if size is None or (each.name == made.name and each.first_shape == size):
            break
        if each.takes(size):
            found.append(each)
    return found


def _short(call: Call) -> str:
    return call.name.removeprefix("aten::")
