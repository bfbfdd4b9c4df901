"""What algebra saves: products in a costly order, products with one-hot vectors, gradients that are mostly 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, Asked, Interval, Place
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Kind
from xsp.store.selftimes import BOOKKEEPING

PRODUCTS = ("aten::matmul", "aten::mm", "aten::mv")

MOST_SHARE = 0.5
"""Of the multiplications, that the other order may need for it to be worth a line."""

MOST_ROWS = 0.25
"""Of a table, that a step may look up at most for a sparse gradient to be worth a line."""

_Sizes = tuple[int, int, int, int]
"""m, k, n, p of (m×k @ k×n) @ n×p."""

_PASSES = 2
"""Least times that a row of a sparse gradient is written, where one of a dense gradient is written once."""


@question("product-order", "Are products of matrices taken in the costly order?", number="Q4")
def product_order(asked: Asked) -> Iterator[Advice]:
    """Two products, one right after the other in a module, that need fewer multiplications as A(Bx) than as (AB)x.

    Shapes tell it, and not which tensors these are: the advice holds where the second product takes the result of the
    first. Layers (`aten::linear`) are left out, since their weights are given, and so is what a backward pass does.
    """
    whole = calls.step_ms(asked)
    found: dict[tuple[str | None, _Sizes], list[tuple[Call, Call]]] = {}
    for around in calls.every(asked):
        if around.is_op or around.kind == Kind.BACKWARD or around.phase == "backward":
            continue
        busy = [each for each in around.inside if not each.is_op or _computes(each)]
        for at, (first, second) in enumerate(pairwise(busy)):
            sizes = _sizes(first, second)
            if sizes is not None and not _is_used(sizes, busy[at + 2 :]):
                found.setdefault((first.module, sizes), []).append((first, second))
    for (_, (m, k, n, p)), pairs in found.items():
        those = [each for pair in pairs for each in pair]
        ms = sum(each.ns for each in those) / 1e6
        now, then = m * k * n + m * n * p, k * n * p + m * k * p
        gain = ms * (1 - then / now)
        if gain < calls.LEAST_MS:
            continue
        yield Advice(
            "product-order",
            f"({m:,}×{k:,} @ {k:,}×{n:,}) @ {n:,}×{p:,} needs {now / then:.3g} times the multiplications of the other "
            "order",
            calls.places(those),
            calls.interval(gain, calls.ends(asked, those)).within(min(ms, whole)),
            True,
            100 * gain / whole,
            (
                f"{now:,} multiplications one after the other, {then:,} from the right; both products take {ms:.3g} ms",
                "shapes tell it: it holds where the second product takes the result of the first as its left factor",
            ),
            "write A @ (B @ x) in place of A @ B @ x, which Python reads as (A @ B) @ x, or torch.linalg.multi_dot, "
            "which chooses the order; results differ by rounding",
        )


def _sizes(first: Call, second: Call) -> _Sizes | None:
    """Return m, k, n, p of (m×k @ k×n) @ n×p where the other order is worth it; None of anything else."""
    if not (first.name in PRODUCTS and second.name in PRODUCTS and first.is_op and second.is_op):
        return None
    a, b, ab, x = (_matrix(each.shapes, at) for each in (first, second) for at in (0, 1))
    if a is None or b is None or ab is None or x is None or len(a) != 2 or len(b) != 2 or len(ab) != 2:
        return None
    m, k, n, p = a[0], a[1], b[1], x[1] if len(x) == 2 else 1
    if b[0] != k or ab != (m, n) or x[0] != n or min(m, k, n, p) < 1:
        return None
    return (m, k, n, p) if k * n * p + m * k * p <= MOST_SHARE * (m * k * n + m * n * p) else None


def _is_used(sizes: _Sizes, later: list[Call]) -> bool:
    """Return whether two products may have their left factor in common, and something later takes the first's result.

    Only where shapes leave that open: both left factors are of one size. What is later no product tells.
    """
    m, k, n, _ = sizes
    return k == n and any([m, n] in each.shapes for each in later if each.name not in PRODUCTS)


def _matrix(shapes: list[object], at: int) -> tuple[int, ...] | None:
    shape = shapes[at] if at < len(shapes) else None
    if not isinstance(shape, list) or len(shape) not in (1, 2) or not all(type(size) is int for size in shape):
        return None
    return tuple(shape)


def _computes(call: Call) -> bool:
    return call.name.removeprefix("aten::") not in BOOKKEEPING


@question("dense-gradient", "Is the gradient of a large table made dense for a few of its rows?", number="Q4")
def dense_gradient(asked: Asked) -> Iterator[Advice]:
    """Gradients of embeddings that are zero but for the rows that a step looked up, which are few of all.

    The operator that makes the gradient counts, and what the optimizer does with all rows: of an operator over lists of
    tensors the table's share of the elements.
    """
    whole = calls.step_ms(asked)
    tables = [each for each in calls.every(asked) if each.name == "aten::embedding" and each.first_shape]
    made: dict[tuple[int, int], list[Call]] = {}
    for each in calls.every(asked):
        if each.name == "aten::embedding_dense_backward" and each.scalars[2:3] and type(each.scalars[2]) is int:
            made.setdefault((each.scalars[2], _looked_up(each)), []).append(each)
    for (rows, used), those in made.items():
        of = [each for each in tables if each.first_shape and each.first_shape[0] == rows]
        updated = sum(_updating(asked, {each.first_shape for each in of if each.first_shape})) / 1e6
        ms = sum(each.ns for each in those) / 1e6 + updated
        gain = ms * (1 - _PASSES * used / rows) if rows else 0.0
        if not used or used > MOST_ROWS * rows or gain < calls.LEAST_MS:
            continue
        modules = tuple(dict.fromkeys(each.module for each in of))
        spans = tuple(each.span_id for each in those)[:MOST_SPANS]
        yield Advice(
            "dense-gradient",
            f"the gradient of an embedding of {rows:,} rows is made dense for at most {used:,} of them",
            tuple(Place(module, those[0].name, spans, len(those)) for module in modules or (None,)),
            Interval(gain, gain, gain).within(whole),
            True,
            100 * gain / whole,
            (f"{ms:.3g} ms to write {rows:,} rows, most of them zeros, {updated:.3g} ms of it in the optimizer",),
            "Embedding(…, sparse=True), with plain torch.optim.SGD or SparseAdam for it; not if its weight is "
            "shared with another layer",
            "SparseAdam leaves rows alone that a step did not look up, where Adam moves them; plain SGD gives the same",
        )


def _updating(asked: Asked, tables: set[tuple[int, ...]]) -> Iterator[float]:
    """Yield what operators of the optimizer take for tensors of some shapes, in ns."""
    for root in (each for each in calls.every(asked) if each.kind == Kind.OPTIMIZER):
        for each in (inner for inner in root.every() if inner.is_outer_op and inner.shapes):
            first = each.shapes[0]
            if each.first_shape in tables:
                yield each.ns
            elif isinstance(first, list) and first and all(isinstance(shape, list) for shape in first):
                sizes = [(math.prod(shape), tuple(shape) in tables) for shape in first]
                yield each.ns * sum(size for size, is_of in sizes if is_of) / max(1, sum(size for size, _ in sizes))


def _looked_up(call: Call) -> int:
    """Return how many indices a gradient is made for; 0 where shapes do not tell."""
    shape = call.shapes[1] if len(call.shapes) > 1 else None
    if not isinstance(shape, list) or not shape or not all(type(size) is int for size in shape):
        return 0
    return math.prod(shape)


@question("one-hot", "Are rows of a table looked up by a product with one-hot vectors?", number="Q4")
def one_hot(asked: Asked) -> Iterator[Advice]:
    """Products of one-hot vectors with a matrix, which copy rows of it, with all their multiplications by zero.

    Shapes tell which products take them. Their gradient is a product as well, in the backward pass.
    """
    whole = calls.step_ms(asked)
    outer = [each for each in calls.every(asked) if each.is_outer_op]
    for made in (each for each in outer if each.name == "aten::one_hot" and each.first_shape):
        rows = max((each.first_shape or (0,) for each in made.every()), key=math.prod)
        if made.first_shape is None or rows[:-1] != made.first_shape:
            continue
        later = [each for each in outer if each.start_ns >= made.end_ns]
        products = [each for each in later if each.name in _OF_ROWS and each.first_shape in (rows, _flat(rows))]
        casts = [each for each in later if each.first_shape == rows and each.name in ("aten::to", "aten::_to_copy")]
        taken = {_flat(rows), _flat(rows)[::-1]}
        gradients = [
            each
            for root in calls.every(asked)
            if root.kind == Kind.BACKWARD
            for each in root.every()
            if each.name in ("aten::mm", "aten::bmm") and any(_matrix(each.shapes, at) in taken for at in (0, 1))
        ]
        every = [made, *casts, *products, *gradients]
        ms = sum(each.ns for each in every) / 1e6
        if not products or ms < calls.LEAST_MS:
            continue
        yield Advice(
            "one-hot",
            f"{math.prod(rows[:-1]):,} rows of {rows[-1]:,} are looked up by a product with one-hot vectors",
            calls.places([*products, made]),
            calls.interval(ms, calls.ends(asked, every)).within(whole),
            True,
            100 * ms / whole,
            (
                f"making the vectors, converting and multiplying them take {ms:.3g} ms, with "
                f"{len(gradients)} products of their gradient",
                "shapes tell it: it holds where the product takes the vectors",
            ),
            "torch.nn.functional.embedding(indices, weight) or weight[indices] reads the same rows; of a Linear layer "
            "the weight is transposed",
        )


_OF_ROWS = ("aten::linear", "aten::matmul", "aten::mm")


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return math.prod(shape[:-1]), shape[-1]
