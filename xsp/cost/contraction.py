"""Multiply-adds of contractions of several tensors, by the pairs into which PyTorch divides them.

PyTorch contracts two tensors at a time, from left to right or along a path that `opt_einsum` found. A pair without a
common dimension to sum over is multiplied element by element, which the convention of `xsp.cost.flops` does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple


class ContractedPair(NamedTuple):
    """The contraction of two tensors with the same number of dimensions; absent dimensions have length 1."""

    flops: int
    sizes: list[int]
    """Lengths of the result, 1 for the dimensions that were summed."""


def pair(left: Sequence[int], right: Sequence[int], summed: Collection[int]) -> ContractedPair:
    """Return the operations and the result of a product of two tensors that is summed over some dimensions.

    A summed dimension that only one of them has is summed before the product.
    """
    sizes = [max(a, b) if 0 not in (a, b) else 0 for a, b in zip(left, right, strict=True)]
    result = [1 if place in summed else size for place, size in enumerate(sizes)]
    common = prod(left[place] for place in summed if left[place] != 1 and right[place] != 1)
    return ContractedPair(2 * prod(result) * common if summed else 0, result)


def einsum(equation: str, shapes: Sequence[Sequence[int]], path: Sequence[int] | None = None) -> int:
    """Return the operations of an einsum.

    Args:
        equation: in the notation of `torch.einsum`, with or without `->`, also with `...`.
        shapes: shapes of the operands.
        path: positions of the two operands of each pair, one after the other, as the operator takes them; without it,
            the operands are contracted from left to right. The result of a pair becomes the last operand (with a path)
            or the first one.

    Raises:
        ValueError: the equation does not describe these operands.
    """
    terms, arrow, target = equation.replace(" ", "").partition("->")
    names = [_names(term, len(shape)) for term, shape in zip(terms.split(","), shapes, strict=True)]
    counts = Counter(name for term in names for name in term)
    kept = {name for name in counts if name.startswith(".")} if not arrow or "..." in target else set()
    kept |= set(target) if arrow else {name for name, count in counts.items() if count == 1}
    order = list(counts)
    operands = [_aligned(term, shape, order) for term, shape in zip(names, shapes, strict=True)]
    remaining = [sum(operand[place] != 1 for operand in operands) for place in range(len(order))]
    steps = iter(path or ())
    flops = 0
    while len(operands) > 1:
        first, second = sorted((next(steps), next(steps))) if path else (0, 1)
        right, left = operands.pop(second), operands.pop(first)
        summed = []
        for place, name in enumerate(order):
            if name in kept:
                continue
            if left[place] != 1 and right[place] != 1:
                remaining[place] -= 1
                if remaining[place] == 1:
                    summed.append(place)
            elif remaining[place] == 1:
                left[place] = right[place] = 1  # only this one has the dimension: it is summed by itself
        contracted = pair(left, right, summed)
        flops += contracted.flops
        operands.insert(len(operands) if path else 0, contracted.sizes)
    return flops


def _names(term: str, rank: int) -> list[str]:
    """Return a name for each dimension of an operand; those of `...` are numbered from the last one."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise ValueError(f"{term!r} does not describe {rank} dimensions")
    return [*before, *(f".{number}" for number in range(hidden, 0, -1)), *after]


def _aligned(names: Sequence[str], shape: Sequence[int], order: Sequence[str]) -> list[int]:
    """Return the length of each dimension in `order`; a dimension that is named twice is a diagonal."""
    lengths = dict(zip(names, shape, strict=True))
    return [lengths.get(name, 1) for name in order]


def tensordot(left: Sequence[int], right: Sequence[int], dims_left: Sequence[int], dims_right: Sequence[int]) -> int:
    """Return the operations of a product that is summed over pairs of dimensions.

    Raises:
        ValueError, IndexError: the dimensions do not go together.
    """
    axes = [(a % len(left), b % len(right)) for a, b in zip(dims_left, dims_right, strict=True)]
    common = prod(left[a] for a, b in axes if left[a] != 1 and right[b] != 1)
    free_left = prod(size for place, size in enumerate(left) if place not in {a for a, _ in axes})
    free_right = prod(size for place, size in enumerate(right) if place not in {b for _, b in axes})
    return 2 * free_left * common * free_right


def chain(shapes: Sequence[Sequence[int]]) -> int:
    """Return the operations of a product of several matrices in the cheapest order; the outer ones may be vectors.

    Raises:
        ValueError: they are not the factors of a product.
    """
    first, *others = [list(shape) for shape in shapes]
    first = [1, *first] if len(first) == 1 else first
    if others and len(others[-1]) == 1:
        others[-1] = [*others[-1], 1]
    if any(len(shape) != 2 for shape in (first, *others)):
        raise ValueError("not matrices")
    lengths = [first[0], *(shape[0] for shape in others), (others[-1] if others else first)[1]]
    count = len(lengths) - 1
    best = [[0] * count for _ in range(count)]
    for span in range(1, count):
        for start in range(count - span):
            end = start + span
            best[start][end] = min(
                best[start][middle] + best[middle + 1][end] + lengths[start] * lengths[middle + 1] * lengths[end + 1]
                for middle in range(start, end)
            )
    return 2 * best[0][count - 1] if count else 0


def power(shape: Sequence[int], exponent: int) -> int:
    """Return the operations of a power of square matrices, by repeated squaring.

    Raises:
        ValueError: the exponent is negative: the operations of the inverse are unknown.
    """
    if exponent < 0:
        raise ValueError("an inverse")
    products = max(0, exponent.bit_length() - 1) + max(0, exponent.bit_count() - 1)
    return 2 * prod(shape) * shape[-1] * products


def trilinear(shapes: Sequence[Sequence[int]], expanded: Sequence[Collection[int]], summed: Collection[int]) -> int:
    """Return the operations of `aten::_trilinear`: the sum of a product of three tensors, two pairs one after another.

    Args:
        shapes: shapes of the three tensors.
        expanded: for each of them, the dimensions of the result that it lacks.
        summed: the dimensions over which the product is summed.
    """
    rank = len(shapes[0]) + len(expanded[0])
    first, second, third = (
        [1 if place in lacking else next(lengths) for place in range(rank)]
        for lacking, lengths in zip(expanded, map(iter, shapes), strict=True)
    )
    without_third = {place for place in summed if place in expanded[2]}
    with_third = {place for place in summed if place not in expanded[2]}
    inner = pair(first, second, without_third)
    return inner.flops + pair(inner.sizes, third, with_third).flops
