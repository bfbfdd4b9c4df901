"""Work that algebra saves: products in a costly order, with one-hot vectors or by broadcasting; inverses; gradients of
which most rows are zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind
from xsp.stats import Interval
from xsp.texts import counted

PRODUCTS = ("aten::matmul", "aten::mm", "aten::mv")

MOST_SHARE = 0.5
"""Maximum share of the multiplications that the other order may need for the advice to be worth a line."""

MOST_ROWS = 0.25
"""Maximum share of a table's rows that a step may look up for a sparse gradient to be worth a line."""

_Sizes = tuple[int, int, int, int]
"""m, k, n, p of (m×k @ k×n) @ n×p."""

_ROW_WRITES = 2
"""Minimum number of times that a row of a sparse gradient is written; a row of a dense gradient is written once."""


@question("product-order", "Are matrix products computed in the more expensive order?", number="Q4", shapes=True)
def product_order(context: AdviceContext) -> Iterator[Advice]:
    """Two products in a module that need fewer multiplications as A(Bx) than as (AB)x, or as (xA)B than as x(AB).

    Only shapes are known, not which tensors they belong to: the advice holds where the second product takes the result
    of the first. Products inside layers are left out, and so are backward passes; a layer may be the second product,
    as of a low-rank update of weights. Looking rows up is a product, too: of rows that are looked up several times each
    is multiplied as often.
    """
    step_ms = calls.step_ms(context)
    yield from _repeated_rows(context, step_ms)
    found: dict[tuple[str | None, _Sizes, bool], list[Sequence[HostCall]]] = {}
    for parent in calls.walk(context):
        if parent.is_op or parent.kind == Kind.BACKWARD or parent.phase == "backward":
            continue
        children = [call for call in parent.children if call.computes]
        for index, first in enumerate(children):
            chain = _chain(first, children[index + 1 :])
            if chain is not None:
                following, sizes, is_right = chain
                found.setdefault((first.module, sizes, is_right), []).append((first, *following))
    for (_, (m, k, n, p), is_right), chains in found.items():
        matmuls = [call for each in chains for call in each]
        # the products of gradients have the sizes of both products, too: they shrink by the same factor
        all_calls = calls.with_gradients(context, matmuls)
        ms = sum(call.ns for call in all_calls) / 1e6
        left_count, right_count = m * k * n + m * n * p, k * n * p + m * k * p
        gain = ms * (1 - right_count / left_count)
        if gain < calls.LEAST_MS:
            continue
        what = "both products" if len(matmuls) == 2 * len(chains) else "both products with factors of their elements"
        product = (
            f"{p:,}×{n:,} @ ({n:,}×{k:,} @ {k:,}×{m:,})" if is_right else f"({m:,}×{k:,} @ {k:,}×{n:,}) @ {n:,}×{p:,}"
        )
        yield Advice(
            "product-order",
            f"{product} takes {left_count / right_count:.3g} times the multiplications of the other order",
            calls.places(matmuls),
            calls.interval(gain, calls.interval_factors(context, all_calls)).limit(min(ms, step_ms)),
            True,
            100 * gain / step_ms,
            (
                f"{left_count:,} multiplications in this order, {right_count:,} in the other; {what}"
                f"{calls.gradients_text(matmuls, all_calls)} take {ms:.3g} ms",
                f"inferred from shapes: valid if the {'right' if is_right else 'left'} factor of the second product is "
                "the result of the first",
            ),
            _OTHER_ORDER[is_right],
        )


LEAST_REPEATED = 2
"""Least number of times that each row is looked up in the mean for its products to be worth a line."""


def _repeated_rows(context: AdviceContext, step_ms: float) -> Iterator[Advice]:
    """Yield advice on products of rows that were looked up several times each, as of the edges of a graph."""
    ops = [call for call in calls.outer_ops(context) if call.computes and call.phase != "backward"]
    found: dict[tuple[int, int], list[tuple[HostCall, HostCall]]] = {}
    for lookup, product in pairwise(ops):
        table, rows = lookup.first_shape, product.shape(0)
        if lookup.name not in _LOOKUPS or product.name not in _ROW_PRODUCTS or not table or not rows:
            continue
        used = math.prod(rows[:-1])
        is_taken = len(table) == 2 and rows[-1] == table[1] and _rows_read(lookup) in (0, used)
        if is_taken and used >= LEAST_REPEATED * table[0] > 0:
            found.setdefault((table[0], used), []).append((lookup, product))
    for (rows_known, used), pairs in found.items():
        products = [product for _, product in pairs]
        all_calls = calls.with_gradients(context, products)
        ms = sum(call.ns for call in all_calls) / 1e6
        gain = ms * (1 - rows_known / used) - sum(_longer_ns(*pair) for pair in pairs) / 1e6
        if gain >= calls.LEAST_MS:
            yield Advice(
                "product-order",
                f"a product takes {used:,} rows that are looked up among {rows_known:,}: each is multiplied "
                f"{used / rows_known:.3g} times",
                calls.places(products),
                calls.interval(gain, calls.interval_factors(context, all_calls)).limit(min(ms, step_ms)),
                True,
                100 * gain / step_ms,
                (
                    f"the products{calls.gradients_text(products, all_calls)} take {ms:.3g} ms",
                    "inferred from shapes: valid if the product takes the rows that were looked up right before it",
                ),
                "multiply all rows once, and look up rows of the result: linear(x)[index] instead of linear(x[index])",
            )


def _longer_ns(lookup: HostCall, product: HostCall) -> float:
    """Return how much longer it takes to look up rows of a product's result, if they are longer than those it takes."""
    rows, weight = product.shape(0), product.shape(1)
    if not rows or not weight or len(weight) != 2:
        return 0.0
    columns = weight[0] if product.name == "aten::linear" else weight[1]
    return lookup.ns * max(0.0, columns / rows[-1] - 1)


_OTHER_ORDER = (
    "write A @ (B @ x) instead of A @ B @ x, which Python reads as (A @ B) @ x, or torch.linalg.multi_dot, which "
    "chooses the order; results differ by rounding",
    "write (x @ A) @ B instead of x @ (A @ B), as of a low-rank update of weights: linear(linear(x, A), B) of its two "
    "factors, whose product is not needed; results differ by rounding",
)
"""What to write instead where the result of the first product is the left factor of the second, or the right one."""

_Chain = tuple[Sequence[HostCall], _Sizes, bool]
"""Calls up to the product that takes the result of another one, sizes of both, and whether as its right factor."""


def _chain(first: HostCall, later: Sequence[HostCall]) -> _Chain | None:
    """Return the product that may take the result of one, next to it or after factors of its elements; None without.

    These factors are as large as the result, and smaller in the other order, too.
    """
    if not (first.name in PRODUCTS and first.is_op and later):
        return None
    sizes = _sizes(first, later[0])
    if sizes is not None and not _is_used(sizes, later[1:]):
        return later[:1], sizes, False
    for place, call in enumerate(later):
        sizes = _right_sizes(first, call)
        if sizes is not None:
            return later[: place + 1], sizes, True
        if call.name not in _FACTORS or call.shape(0) != _result(first) or call.shape(1):
            return None
    return None


_FACTORS = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")


def _result(product: HostCall) -> tuple[int, int] | None:
    """Return the shape of the product of two matrices; None for any other."""
    a, b = _matrix(product, 0), _matrix(product, 1)
    return (a[0], b[1]) if a is not None and b is not None and len(a) == len(b) == 2 and a[1] == b[0] else None


def _right_sizes(first: HostCall, second: HostCall) -> _Sizes | None:
    """Return m, k, n, p of p×n @ (n×k @ k×m), also of transposed factors, if the other order is worth it, else None.

    If the second product's left factor has the shape of the first one's result, that may be it.
    """
    result, left = _result(first), second.shape(0)
    is_layer = second.name == "aten::linear"
    right = _matrix(second, 1)
    if not (second.name in PRODUCTS or is_layer) or not second.is_op or result is None or not left or right is None:
        return None
    if len(right) != 2 or left[-1] not in right or result not in (right, right[::-1]):
        return None
    p, n, k = math.prod(left[:-1]), left[-1], (_matrix(first, 1) or (0,))[0]
    m = right[0] if is_layer else right[1]
    if (p, n) == result or min(m, k, n, p) < 1:
        return None
    return (m, k, n, p) if k * n * p + m * k * p <= MOST_SHARE * (m * k * n + m * n * p) else None


def _sizes(first: HostCall, second: HostCall) -> _Sizes | None:
    """Return m, k, n, p of (m×k @ k×n) @ n×p if the other order is worth it, else None."""
    if not (first.name in PRODUCTS and second.name in PRODUCTS and first.is_op and second.is_op):
        return None
    a, b, ab, x = (_matrix(call, index) for call in (first, second) for index in (0, 1))
    if a is None or b is None or ab is None or x is None or len(a) != 2 or len(b) != 2 or len(ab) != 2:
        return None
    m, k, n, p = a[0], a[1], b[1], x[1] if len(x) == 2 else 1
    if b[0] != k or ab != (m, n) or x[0] != n or min(m, k, n, p) < 1:
        return None
    return (m, k, n, p) if k * n * p + m * k * p <= MOST_SHARE * (m * k * n + m * n * p) else None


def _is_used(sizes: _Sizes, later_calls: Sequence[HostCall]) -> bool:
    """Return whether two products may share their left factor, and a later call takes the result of the first.

    This is possible only if both left factors have the same shape. Later products do not count.
    """
    m, k, n, _ = sizes
    return k == n and any([m, n] in call.shapes for call in later_calls if call.name not in PRODUCTS)


def _matrix(call: HostCall, index: int) -> tuple[int, ...] | None:
    """Return the shape of an input that is a vector or a matrix, else None."""
    shape = call.shape(index)
    return shape if shape is not None and len(shape) <= 2 else None


@question(
    "dense-gradient", "Is the gradient of a large table dense, although few rows are used?", number="Q4", shapes=True
)
def dense_gradient(context: AdviceContext) -> Iterator[Advice]:
    """Gradients of tables that are zero except in the few rows that a step looked up, by whatever operator.

    A table is what operators of the optimizer update. The time is that of the lookups' backward nodes and of the
    optimizer's operators on all rows; of an operator over lists of tensors, the table's share of the elements counts.
    """
    step_ms = calls.step_ms(context)
    for table, lookups in _lookups(context).items():
        rows, ops = table[0], calls.gradients(context, lookups)
        used_rows = _rows_used(lookups, ops)
        optimizer_ms = sum(_update_times(context, {table})) / 1e6
        ms = sum(call.ns for call in ops) / 1e6 + optimizer_ms
        gain = ms * (1 - _ROW_WRITES * used_rows / rows) if rows else 0.0
        if not (ops and optimizer_ms and used_rows) or used_rows > MOST_ROWS * rows or gain < calls.LEAST_MS:
            continue
        modules = tuple(dict.fromkeys(call.module for call in lookups))
        spans = tuple(call.span_id for call in ops)[:MOST_SPANS]
        yield Advice(
            "dense-gradient",
            f"the gradient of an embedding of {rows:,} rows is dense, although at most {used_rows:,} rows are used",
            tuple(Place(module, ops[0].name.rpartition(" ")[2], spans, len(ops)) for module in modules),
            Interval(gain, gain, gain).limit(step_ms),
            False,
            100 * gain / step_ms,
            (f"{ms:.3g} ms to write {rows:,} rows, most of them zeros, {optimizer_ms:.3g} ms of it in the optimizer",),
            f"{_sparse_form(lookups)}, with plain torch.optim.SGD or SparseAdam for it; not if its weight is "
            "shared with another layer",
            "SparseAdam does not update rows that a step did not look up, Adam does; plain SGD gives the same results",
        )


_LOOKUPS = {
    "aten::embedding": "Embedding(…, sparse=True)",
    "aten::embedding_bag": "EmbeddingBag(…, sparse=True)",
    "aten::index": "torch.nn.functional.embedding(indices, weight, sparse=True) in place of weight[indices]",
    "aten::index_select": "torch.nn.functional.embedding(indices, weight, sparse=True) in place of index_select",
}
"""Operators that read numbered rows of their first input, and how to call them for a sparse gradient."""


def _lookups(context: AdviceContext) -> dict[tuple[int, ...], list[HostCall]]:
    """Return the lookups of a step in the forward pass, by the shape of their table."""
    by_table: dict[tuple[int, ...], list[HostCall]] = {}
    for call in calls.walk(context):
        table = call.first_shape if call.name in _LOOKUPS and call.is_outer_op else None
        if table and (call.name == _INDEX or _rows_read(call)):
            by_table.setdefault(table, []).append(call)
    return by_table


_INDEX = "aten::index"
"""The operator of `weight[indices]`, of whose indices PyTorch does not record the shapes."""


def _rows_used(lookups: Sequence[HostCall], gradients: Sequence[HostCall]) -> int:
    """Return the number of rows of a table that lookups read at most; 0 if it is unknown.

    Args:
        lookups: lookups in the table.
        gradients: backward nodes of them, which add as many rows as were read where indices have no shape.
    """
    known = [_rows_read(lookup) for lookup in lookups]
    if all(known):
        return sum(known)
    table = lookups[0].first_shape
    added = [
        math.prod(values[:-1])
        for node in gradients
        for op in node.walk()
        if op.name == "aten::_index_put_impl_" and op.first_shape == table and (values := op.shape(2))
    ]
    return sum(known) + sum(added) if len(added) >= known.count(0) else 0


def _rows_read(lookup: HostCall) -> int:
    """Return the number of rows that a lookup reads at most; 0 if unknown, or if it numbers more than rows."""
    _, *others = lookup.shapes
    # `aten::index` takes a list of tensors, one for each dimension: a table has one
    lists = [other for other in others if isinstance(other, list) and other and isinstance(other[0], list)]
    if any(len(tensors) > 1 for tensors in lists):
        return 0
    shapes = map(calls.tensor_shape, [*(tensors[0] for tensors in lists), *others])
    return math.prod(next((shape for shape in shapes if shape is not None), (0,)))


def _sparse_form(lookups: Sequence[HostCall]) -> str:
    return ", ".join(dict.fromkeys(_LOOKUPS[call.name] for call in lookups))


def _update_times(context: AdviceContext, tables: set[tuple[int, ...]]) -> Iterator[float]:
    """Yield the time in ns that each operator of the optimizer takes for tensors of the shapes in `tables`."""
    for root in (call for call in calls.walk(context) if call.kind == Kind.OPTIMIZER):
        for op in (inner for inner in root.walk() if inner.is_outer_op and inner.shapes):
            argument = op.shapes[0]
            if op.first_shape in tables:
                yield op.ns
            elif isinstance(argument, list) and argument and all(isinstance(shape, list) for shape in argument):
                sizes = [(math.prod(shape), tuple(shape) in tables) for shape in argument]
                yield op.ns * sum(size for size, is_table in sizes if is_table) / max(1, sum(size for size, _ in sizes))


@question("one-hot", "Are table rows looked up by a product with one-hot vectors?", number="Q4", shapes=True)
def one_hot(context: AdviceContext) -> Iterator[Advice]:
    """Products of one-hot vectors with a matrix, which copy rows of the matrix by multiplying mostly by zero.

    Shapes identify the products that take the vectors. The gradient in the backward pass is a product as well.
    """
    step_ms = calls.step_ms(context)
    outer_ops = calls.outer_ops(context)
    for encoding in (call for call in outer_ops if call.name == "aten::one_hot" and call.first_shape):
        rows = max((call.first_shape or (0,) for call in encoding.walk()), key=math.prod)
        if encoding.first_shape is None or rows[:-1] != encoding.first_shape:
            continue
        later_ops = [call for call in outer_ops if call.start_ns >= encoding.end_ns]
        products = [
            call for call in later_ops if call.name in _ROW_PRODUCTS and call.first_shape in (rows, _flat_shape(rows))
        ]
        casts = [call for call in later_ops if call.first_shape == rows and call.name in ("aten::to", "aten::_to_copy")]
        shapes = {_flat_shape(rows), _flat_shape(rows)[::-1]}
        gradients = [
            call
            for root in calls.walk(context)
            if root.kind == Kind.BACKWARD
            for call in root.walk()
            if call.name in ("aten::mm", "aten::bmm") and any(_matrix(call, index) in shapes for index in (0, 1))
        ]
        all_calls = [encoding, *casts, *products, *gradients]
        ms = sum(call.ns for call in all_calls) / 1e6
        if not products or ms < calls.LEAST_MS:
            continue
        yield Advice(
            "one-hot",
            f"{math.prod(rows[:-1]):,} rows of {rows[-1]:,} are looked up by a product with one-hot vectors",
            calls.places([*products, encoding]),
            calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"making the vectors, converting and multiplying them take {ms:.3g} ms, with "
                f"{len(gradients)} products of their gradient",
                "inferred from shapes: valid if the product takes these vectors",
            ),
            "torch.nn.functional.embedding(indices, weight) or weight[indices] reads the same rows; the weight of a "
            "Linear layer has to be transposed",
        )


_ROW_PRODUCTS = ("aten::linear", "aten::matmul", "aten::mm")


def _flat_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return math.prod(shape[:-1]), shape[-1]


BROADCAST_TIMES = 4
"""Minimum size of a tensor made by broadcasting, as a multiple of its larger factor, to be worth a line."""

_ELEMENTWISE = {
    "aten::mul": ("products", "torch.einsum, `@` or torch.bmm multiply and add in one operator"),
    "aten::sub": ("differences", "torch.cdist computes the distances of all pairs"),
}
_PAIRWISE = {
    "aten::cosine_similarity": ("elements", "normalize(a) @ normalize(b).T has the cosines of all pairs"),
    "aten::pairwise_distance": ("differences", "torch.cdist computes the distances of all pairs"),
}
"""Operators that compute with all elements of both inputs, broadcast against each other, and sum what they made."""

_BROADCASTING = {**_ELEMENTWISE, **_PAIRWISE}
_PASS_THROUGH = ("aten::pow", "aten::square", "aten::abs", "aten::mul", "aten::sqrt", "aten::pow_", "aten::abs_")
_SUMS = ("aten::sum", "aten::mean", "aten::norm", "aten::linalg_vector_norm")


@question(
    "broadcast-product",
    "Are products or distances computed by broadcasting, and then summed?",
    number="Q4",
    shapes=True,
)
def broadcast_product(context: AdviceContext) -> Iterator[Advice]:
    """Tensors that broadcasting makes many times as large as both factors, and that a sum reduces right away.

    A matrix product multiplies and adds without writing such a tensor. Shapes and the order of the calls identify them.
    """
    step_ms = calls.step_ms(context)
    chains_by_op: dict[tuple[str, str], list[list[HostCall]]] = {}
    for parent in calls.walk(context):
        if parent.is_op or parent.kind == Kind.BACKWARD or parent.phase == "backward":
            continue
        children = [call for call in parent.children if call.computes]
        for index, op in enumerate(children):
            chain = _sum_chain(children, index)
            if chain:
                shapes = (shape for shape in op.shapes[:2] if isinstance(shape, list))
                factor_text = " and ".join("×".join(map(str, shape)) for shape in shapes)
                chains_by_op.setdefault((op.name, factor_text), []).append(chain)
    for (name, factors), chains in chains_by_op.items():
        forward = [call for chain in chains for call in chain]
        all_calls = calls.with_gradients(context, forward)
        ms = sum(call.ns for call in all_calls) / 1e6
        if ms < calls.LEAST_MS:
            continue
        noun, hint = _BROADCASTING[name]
        count = math.prod(_broadcast_shape(chains[0][0]) or ())
        yield Advice(
            "broadcast-product",
            f"{count:,} {noun} of {factors} are written to memory, and then summed",
            calls.places(forward),
            calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"{len(forward)} calls{calls.gradients_text(forward, all_calls)} take {ms:.3g} ms",
                "inferred from shapes: valid if the sum is over the dimensions that both factors share",
            ),
            f"{hint}; results differ by rounding",
        )


def _sum_chain(children: Sequence[HostCall], index: int) -> list[HostCall]:
    """Return a call that broadcasts and the calls up to the sum of its result; empty if its result is not summed."""
    shape = _broadcast_shape(children[index])
    chain = [children[index]]
    if shape is not None and chain[0].name in _PAIRWISE:
        return chain
    for call in (children[position] for position in range(index + 1, len(children) if shape is not None else 0)):
        if call.first_shape != shape or call.name not in (*_PASS_THROUGH, *_SUMS):
            return []
        chain.append(call)
        if call.name in _SUMS:
            return chain
    return []


def _broadcast_shape(call: HostCall) -> tuple[int, ...] | None:
    """Return the shape that an operator on elements makes of two much smaller tensors; None for any other call."""
    if call.name not in _BROADCASTING or not call.is_op:
        return None
    shapes = [shape for index in (0, 1) if (shape := call.shape(index)) is not None]
    if len(shapes) != 2:
        return None
    rank = max(map(len, shapes))
    left, right = ((1,) * (rank - len(shape)) + shape for shape in shapes)
    if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
        return None
    result = tuple(max(a, b) for a, b in zip(left, right, strict=True))
    return result if math.prod(result) >= BROADCAST_TIMES * max(math.prod(left), math.prod(right), 1) else None


_INVERSES = ("aten::inverse", "aten::linalg_inv", "aten::linalg_pinv")

SOLVE_SHARE = 1 / 3
"""Operations of a factorisation relative to those of an inverse: 2/3 n³ to 2 n³ (Golub and Van Loan, 3.2 and 3.4)."""


@question("inverse", "Is a matrix inverted only to be multiplied?", number="Q4", shapes=True)
def inverse(context: AdviceContext) -> Iterator[Advice]:
    """Inverses of matrices that a product takes: solving only factorises, which is a third of the work."""
    step_ms = calls.step_ms(context)
    outer_ops = [op for op in calls.outer_ops(context) if op.phase != "backward"]
    ops: list[HostCall] = []
    for index, op in enumerate(outer_ops):
        size = op.first_shape
        if op.name not in _INVERSES or size is None or len(size) < 2 or size[-1] != size[-2]:
            continue
        readers = (
            reader
            for reader in outer_ops[index + 1 :]
            if reader.name in (*PRODUCTS, "aten::bmm", "aten::linear", "aten::einsum")
        )
        if any(list(size) in reader.shapes for reader in readers):
            ops.append(op)
    ms = sum(op.ns for op in ops) / 1e6
    gain = ms * (1 - SOLVE_SHARE)
    if gain < calls.LEAST_MS:
        return
    yield Advice(
        "inverse",
        f"{len(ops)} matri{'ces are' if len(ops) > 1 else 'x is'} inverted, {ms:.3g} ms, only to be multiplied",
        calls.places(ops),
        calls.interval(gain, calls.interval_factors(context, ops)).limit(step_ms),
        False,
        100 * gain / step_ms,
        ("a factorisation takes a third of the multiplications of an inverse, and rounds less",),
        "torch.linalg.solve(A, b) instead of torch.linalg.inv(A) @ b; torch.linalg.lu_factor or cholesky once before "
        "the loop, if the matrix does not change",
        "results differ by rounding, and are more accurate",
    )


_DECOMPOSITIONS = {
    "_linalg_svd": "singular values",
    "linalg_svd": "singular values",
    "linalg_svdvals": "singular values",
    "_linalg_eigh": "eigenvalues",
    "linalg_eigh": "eigenvalues",
    "linalg_eig": "eigenvalues",
    "linalg_eigvals": "eigenvalues",
    "linalg_qr": "an orthogonal basis",
    "linalg_matrix_exp": "an exponential",
    "matrix_exp": "an exponential",
}
"""Operators that decompose matrices, without `aten::` → what they compute."""

LEAST_DECOMPOSING_PERCENT = 10.0
"""Minimum percentage of the step that decompositions must take to be worth a line: some programs need them."""


@question("decompositions", "Are matrices decomposed in each step?", number="Q4")
def decompositions(context: AdviceContext) -> Iterator[Advice]:
    """Singular values, eigenvalues and the like of whole matrices, as for a spectral norm, with their gradients.

    All of it is gained where an approximation or the decomposition of an earlier step does.
    """
    step_ms = calls.step_ms(context)
    found: dict[str, list[HostCall]] = {}
    for op in calls.outer_ops(context):
        names = (inner.name.removeprefix("aten::") for inner in op.walk())
        what = next((_DECOMPOSITIONS[name] for name in names if name in _DECOMPOSITIONS), None)
        if what is not None and op.phase != "backward":
            found.setdefault(what, []).append(op)
    for what, ops in found.items():
        # a weight that is divided by its norm
        scaled = [after for op in ops if (after := _next_op(op)) is not None and after.stem in ("div", "mul")]
        all_calls = calls.with_gradients(context, [*ops, *scaled])
        ms = sum(call.ns for call in all_calls) / 1e6
        if ms < calls.LEAST_MS or 100 * ms / step_ms < LEAST_DECOMPOSING_PERCENT:
            continue
        yield Advice(
            "decompositions",
            f"each step computes {what} of {'a matrix' if len(ops) == 1 else f'{len(ops)} matrices'}",
            calls.places(ops),
            calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"{counted(len(ops), 'call')}{', scaling by the result' * bool(scaled)}"
                f"{calls.gradients_text([*ops, *scaled], all_calls)} take {ms:.3g} ms",
            ),
            "a few products approximate the largest ones (torch.nn.utils.parametrizations.spectral_norm, "
            "torch.svd_lowrank, torch.lobpcg); or decompose each N steps, if the matrix changes slowly",
            "an approximation, or that of an earlier step",
        )


def _next_op(op: HostCall) -> HostCall | None:
    """Return the next operator that computes after one in the same call; None if there is none."""
    later = op.parent.children[op.parent.children.index(op) + 1 :] if op.parent is not None else []
    return next((call for call in later if call.is_op and call.computes), None)
