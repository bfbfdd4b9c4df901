"""The rule that detects hand-written attention: query times key, a softmax, times value.

Allowed between these are a scale, a mask (added, filled in, or chosen by `where`), casts around the softmax, an idle
drop-out, and views that split or join the dimensions of batch and heads. If there is anything else in between, or an
intermediate result is read elsewhere, the attention stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isinf, prod
from typing import Any

from xsp.graph.draft import Draft, DraftCall
from xsp.graph.node import (
    Call,
    NodeKind,
    Origin,
    Phase,
    Tensor,
    contiguous_strides,
    permute,
    strides,
    tensor_with_strides,
)
from xsp.graph.rules import RuleMatch

SOFTMAX = ("softmax", "_softmax", "special_softmax", "_safe_softmax")
PRODUCTS = ("matmul", "bmm", "einsum", "linalg_matmul")
RESHAPES = ("view", "reshape", "_unsafe_view", "unflatten", "flatten")
NEUTRAL = ("dropout", "contiguous", "to", "alias", "detach", "_to_copy", "expand", "type_as")
"""Calls between the softmax and the products that keep all values if they are views or casts."""

MAX_MASK_VALUE = -1e4
"""Upper bound of the values that may be filled in for masked scores."""


@dataclass
class _Pattern:
    """The calls and properties found on the way from the softmax to the products."""

    calls: list[int] = field(default_factory=list)
    scale: float = 1.0
    mask: Origin | None = None
    is_inverted: bool = False
    """Whether the mask is true at scores that are left out."""

    shape: tuple[int, ...] = ()
    """Shape of the scores to which the mask is applied."""

    factors: tuple[tuple[Origin, Tensor], tuple[Origin, Tensor]] | None = None
    """Query, and key with its last dimensions in the order length, width."""


def attention(draft: Draft) -> Iterator[RuleMatch]:
    """Replace hand-written attention by one call of `scaled_dot_product_attention`."""
    for number in list(draft.order):
        if number in draft.steps and draft.steps[number].op in SOFTMAX and number in set(draft.order):
            finding = _Attention(draft, number).rewrite()
            if finding is not None:
                yield finding


class _Attention:
    """Hand-written attention around one softmax."""

    def __init__(self, draft: Draft, softmax: int) -> None:
        self.draft, self.softmax = draft, softmax
        self.web = draft.web()
        self.pattern = _Pattern()
        self.added: list[int] = []

    def rewrite(self) -> RuleMatch | None:
        """Replace the attention; return None if it is not attention or cannot be replaced."""
        step = self.draft.steps[self.softmax]
        shape = step.call.outputs[0].shape or ()
        if len(shape) < 3 or step.option("dim") not in (-1, len(shape) - 1) or step.phase is not Phase.FORWARD:
            return None
        result = None
        if (
            step.is_pure
            and self._find_value_product()
            and self._find_score_product()
            and self._is_closed(set(self.pattern.calls))
        ):
            result = self._build()
        if result is None or self.draft.tensor(result) != self.draft.steps[self.last].call.outputs[0]:
            self.draft.remove(self.added)
            return None
        pattern, last = self.pattern, self.last
        calls = {*pattern.calls, last}
        self.draft.redirect({(last, 0): result})
        self.draft.remove(calls)
        unread = self.draft.sweep()
        masked = "" if pattern.mask is None else ", mask"
        message = f"attention written out (product{masked}, softmax, product): one scaled_dot_product_attention does it"
        return RuleMatch("attention", (*calls, *unread), (), tuple(self.added), message)

    # --- finding ------------------------------------------------------------------------------------------

    def _find_value_product(self) -> bool:
        """Follow the weights to the product with the values; return whether it was found."""
        self.pattern.calls.append(self.softmax)
        origin: Origin = (self.softmax, 0)
        while True:
            readers = self.web.readers.get(origin, [])
            if len(readers) != 1:
                return False
            step = self.draft.steps[readers[0]]
            if (
                step.op in PRODUCTS
                and len(step.operands) == 2
                and step.operands[0] == origin
                and step.operands[1] != origin
            ):
                self.last, self.weights = readers[0], origin
                return step.is_pure and len(step.call.outputs) == 1
            if not self._keeps_values(step) or step.operands[0] != origin:
                return False
            self.pattern.calls.append(readers[0])
            origin = (readers[0], 0)

    def _keeps_values(self, step: DraftCall) -> bool:
        """Return whether a call preserves the values and the last two dimensions."""
        if not step.is_pure or len(step.call.outputs) != 1:
            return False
        old_shape, new_shape = step.call.inputs[0].shape or (), step.call.outputs[0].shape or ()
        if step.op in RESHAPES or step.op in ("unsqueeze", "squeeze"):
            return old_shape[-2:] == new_shape[-2:] and len(new_shape) >= 3
        if step.op not in NEUTRAL or old_shape != new_shape:
            return False
        return step.kind is NodeKind.VIEW or step.op in ("to", "_to_copy", "type_as", "contiguous")

    def _find_score_product(self) -> bool:
        """Follow the scores to the product of query and key; return whether it was found."""
        origin = self.draft.steps[self.softmax].operands[0]
        self.pattern.shape = self.draft.tensor(origin).shape or ()
        while origin[0] >= 0:
            number, step = origin[0], self.draft.steps[origin[0]]
            if step.is_random or len(step.call.outputs) != 1:
                return False
            self.pattern.calls.append(number)
            if step.op in PRODUCTS and len(step.operands) == 2:
                return self._find_factors(step, step.operands, step.call.inputs)
            if step.op == "baddbmm":
                return self._find_biased_factors(step)
            previous = self._previous_scores(step)
            if previous is None:
                return False
            origin = previous
        return False

    def _previous_scores(self, step: DraftCall) -> Origin | None:
        """Record a call on the scores; return the scores before it, or None if the call is not allowed."""
        pattern, draft = self.pattern, self.draft
        op, scores = step.op.rstrip("_"), step.operands[0] if step.operands else None
        if scores is None:
            return None
        shape = step.call.outputs[0].shape or ()
        if op in ("mul", "div", "true_divide"):
            factor = _number(step.option("other"), draft, step.input_named("other"))
            if (
                not isinstance(factor, (int, float))
                or isinstance(factor, bool)
                or not factor
                or step.option("rounding_mode")
            ):
                return None
            pattern.scale *= float(factor) if op == "mul" else 1.0 / float(factor)
            return scores if step.call.inputs[0].shape == shape else None
        if self._keeps_values(step):
            return scores
        if pattern.mask is not None or pattern.scale != 1.0:  # a scale after the mask would scale the mask too
            return None
        if op == "add" and len(step.operands) == 2 and step.option("alpha") in (1, None):
            score_indices = [
                index
                for index in (0, 1)
                if step.call.inputs[index].shape == shape and self._is_score(step.operands[index])
            ]
            if not score_indices or (step.written_inputs and score_indices[0] != 0):
                return None
            self._set_mask(step.operands[1 - score_indices[0]], shape)
            return step.operands[score_indices[0]]
        if op == "masked_fill" and _is_low(step.option("value"), draft, step.input_named("value")):
            self._set_mask(step.input_named("mask"), shape, inverted=True)
            return scores
        if (
            op == "where"
            and len(step.operands) >= 2
            and _is_low(step.option("other"), draft, step.input_named("other"))
        ):
            self._set_mask(step.input_named("condition"), shape)
            return step.input_named("self")
        return None

    def _is_score(self, origin: Origin) -> bool:
        """Return whether a tensor comes from a product by calls that are allowed on scores."""
        while origin[0] >= 0:
            step = self.draft.steps[origin[0]]
            if step.op in (*PRODUCTS, "baddbmm"):
                return True
            if step.op.rstrip("_") not in ("mul", "div") and not self._keeps_values(step):
                return False
            origin = step.operands[0]
        return False

    def _set_mask(self, mask: Origin | None, shape: tuple[int, ...], inverted: bool = False) -> None:
        self.pattern.mask, self.pattern.shape, self.pattern.is_inverted = mask, shape, inverted

    def _find_biased_factors(self, step: DraftCall) -> bool:
        """Record a product with an added tensor: a mask, or nothing if its factor is 0."""
        alpha, beta = step.option("alpha"), step.option("beta")
        if not isinstance(alpha, (int, float)) or not alpha:
            return False
        if beta not in (0, 1) or (beta == 1 and (self.pattern.mask is not None or self.pattern.scale != 1.0)):
            return False
        if beta == 1:
            self._set_mask(step.operands[0], step.call.outputs[0].shape or ())
        self.pattern.scale *= float(alpha)
        return self._find_factors(step, step.operands[1:], step.call.inputs[1:])

    def _find_factors(self, step: DraftCall, operands: Sequence[Origin], tensors: Sequence[Tensor]) -> bool:
        if step.written_inputs or len(operands) != 2 or (operands[0] == operands[1] and step.op != "einsum"):
            return False
        if step.op == "einsum":
            letters = _equation(step)
            if letters is None:
                return False
            left, right, result = letters
            batch, query, key = result[:-2], result[-2], result[-1]
            width = [letter for letter in left if letter in right and letter not in result]
            if len(width) != 1 or sorted(left) != sorted([*batch, query, *width]):
                return False
            if sorted(right) != sorted([*batch, key, *width]):
                return False
            query_factor = self._permute(
                operands[0], tensors[0], [left.index(letter) for letter in (*batch, query, *width)]
            )
            key_factor = self._permute(
                operands[1], tensors[1], [right.index(letter) for letter in (*batch, key, *width)]
            )
            self.pattern.factors = (query_factor, key_factor)
            return True
        left_shape, right_shape = tensors[0].shape or (), tensors[1].shape or ()
        if len(left_shape) != len(right_shape) or left_shape[:-2] != right_shape[:-2] or len(left_shape) < 3:
            return False
        order = [*range(len(right_shape) - 2), len(right_shape) - 1, len(right_shape) - 2]
        self.pattern.factors = ((operands[0], tensors[0]), self._permute(operands[1], tensors[1], order))
        return True

    def _is_closed(self, calls: set[int]) -> bool:
        """Return whether only the found calls read their results, and they change nothing else."""
        for number in calls:
            step = self.draft.steps[number]
            storage = self.draft.storage((number, 0))
            if storage[0] < 0 or storage[0] not in calls or self.web.outlives_step(storage):
                return False
            if any(user not in calls and user != self.last for user in self.web.users.get(storage, ())):
                return False
            if any(self.draft.storage(step.operands[index]) != storage for index in step.written_inputs):
                return False
        assert self.pattern.factors is not None
        value = self.draft.steps[self.last].operands[1]
        origins = [
            self.pattern.factors[0][0],
            self.pattern.factors[1][0],
            value,
            *([self.pattern.mask] if self.pattern.mask else []),
        ]
        storages = [self.draft.storage(origin) for origin in origins]
        first_call = min(calls, key=lambda number: self.web.positions[number])
        return not any(self.web.is_written_between(storage, first_call, self.last) for storage in storages)

    # --- building -----------------------------------------------------------------------------------------

    def _build(self) -> Origin | None:
        draft, pattern = self.draft, self.pattern
        assert pattern.factors is not None
        (query, query_tensor), (key, key_tensor) = pattern.factors
        product = draft.steps[self.last]
        factor = self._value_factor(product)
        if factor is None:
            return None
        (values, value_tensor), order = factor
        types = {query_tensor.dtype, key_tensor.dtype, value_tensor.dtype}
        if len(types) != 1 or types.pop() not in ("float16", "bfloat16", "float32", "float64"):
            return None
        batch = pattern.shape[:-2]
        parts = [
            self._split_batch(origin, tensor, batch)
            for origin, tensor in ((query, query_tensor), (key, key_tensor), (values, value_tensor))
        ]
        if None in parts:
            return None
        (query, query_tensor), (key, key_tensor), (values, value_tensor) = (part for part in parts if part is not None)
        lengths = (query_tensor.shape or ())[-2], (key_tensor.shape or ())[-2]
        if pattern.shape[-2:] != lengths or (value_tensor.shape or ())[-2] != lengths[1]:
            return None
        mask_pair = self._build_mask(query_tensor.dtype)
        if mask_pair is None:
            return None
        mask, mask_tensor = mask_pair
        shape = (*batch, lengths[0], (value_tensor.shape or ())[-1])
        arguments = (
            ("query", query_tensor),
            ("key", key_tensor),
            ("value", value_tensor),
            ("attn_mask", mask_tensor),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", pattern.scale),
            ("enable_gqa", False),
        )
        call = Call("aten::scaled_dot_product_attention", arguments, (Tensor(query_tensor.dtype, shape),))
        operands = (query, key, values, *(() if mask is None else (mask,)))
        result = self._add(call, NodeKind.COMPUTE, operands, (None,))
        return self._restore_layout(result, call.outputs[0], product.call.outputs[0], order)

    def _value_factor(self, product: DraftCall) -> tuple[tuple[Origin, Tensor], list[int] | None] | None:
        """Return the values, with length and width last, and the final order of the result's dimensions."""
        values, tensor = product.operands[1], product.call.inputs[1]
        if product.op != "einsum":
            weights_shape, values_shape = product.call.inputs[0].shape or (), tensor.shape or ()
            return (
                ((values, tensor), None)
                if weights_shape[:-2] == values_shape[:-2] and len(weights_shape) == len(values_shape)
                else None
            )
        letters = _equation(product)
        if letters is None:
            return None
        weights, factor, result = letters
        batch, query, key = weights[:-2], weights[-2], weights[-1]
        width = [letter for letter in factor if letter not in weights]
        if len(width) != 1 or sorted(factor) != sorted([*batch, key, *width]) or key in result:
            return None
        if sorted(result) != sorted([*batch, query, *width]):
            return None
        order = [factor.index(letter) for letter in (*batch, key, *width)]
        dimensions = [*batch, query, *width]
        return self._permute(values, tensor, order), [dimensions.index(letter) for letter in result]

    def _build_mask(self, dtype: str | None) -> tuple[Origin | None, Tensor | None] | None:
        """Return the mask in the form that attention takes, (None, None) if there is none; None if impossible."""
        pattern, draft = self.pattern, self.draft
        if pattern.mask is None:
            return None, None
        tensor = draft.tensor(pattern.mask)
        shape = tensor.shape or ()
        full = pattern.shape
        if len(shape) > len(full) or any(
            a not in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False)
        ):
            return None
        if len(shape) < 2:  # the fused kernels need at least two dimensions
            expanded = tensor_with_strides(
                tensor.dtype, (*(1,) * (2 - len(shape)), *shape), (*(0,) * (2 - len(shape)), *strides(tensor))
            )
            call = Call("aten::expand", (("self", tensor), ("size", expanded.shape), ("implicit", False)), (expanded,))
            return self._apply_inversion(self._add(call, NodeKind.VIEW, (pattern.mask,), (0,)), expanded, dtype)
        return self._apply_inversion(pattern.mask, tensor, dtype)

    def _apply_inversion(self, mask: Origin, tensor: Tensor, dtype: str | None) -> tuple[Origin, Tensor] | None:
        if tensor.dtype != "bool":
            return (mask, tensor) if tensor.dtype == dtype and not self.pattern.is_inverted else None
        if not self.pattern.is_inverted:
            return mask, tensor
        producer = self.draft.producer(mask)
        if producer is not None and producer.op in ("bitwise_not", "logical_not") and producer.call.inputs[0] == tensor:
            return producer.operands[0], tensor
        inverted = replace(tensor, stride=None)
        return self._add(
            Call("aten::logical_not", (("self", tensor),), (inverted,)), NodeKind.COMPUTE, (mask,), (None,)
        ), inverted

    def _split_batch(self, origin: Origin, tensor: Tensor, batch: tuple[int, ...]) -> tuple[Origin, Tensor] | None:
        """Return a tensor whose batch dimensions are those at which the mask is applied."""
        shape, stride = tensor.shape or (), strides(tensor)
        if shape[:-2] == batch:
            return origin, tensor
        if len(shape) != 3 or shape[0] != prod(batch):
            return None
        view = tensor_with_strides(
            tensor.dtype,
            (*batch, *shape[-2:]),
            (*(stride[0] * step for step in contiguous_strides(batch)), *stride[-2:]),
        )
        call = Call("aten::view", (("self", tensor), ("size", view.shape)), (view,))
        return self._add(call, NodeKind.VIEW, (origin,), (0,)), view

    def _restore_layout(self, origin: Origin, tensor: Tensor, expected: Tensor, order: list[int] | None) -> Origin:
        """Return the result with the dimensions that its readers expect."""
        if order is not None and order != list(range(len(order))):
            origin, tensor = self._permute(origin, tensor, order)
        if tensor.shape != expected.shape:
            call = Call("aten::reshape", (("self", tensor), ("shape", expected.shape)), (expected,))
            return self._add(call, NodeKind.VIEW, (origin,), (0,))
        if tensor != expected and origin[0] in self.added and len(self.added) >= 1:
            step = self.draft.steps[origin[0]]
            self.draft.steps[origin[0]] = replace(step, call=replace(step.call, outputs=(expected,)))
        return origin

    def _permute(self, origin: Origin, tensor: Tensor, order: list[int]) -> tuple[Origin, Tensor]:
        if order == list(range(len(order))):
            return origin, tensor
        producer = self.draft.producer(origin)
        if (
            producer is not None
            and producer.op == "transpose"
            and producer.kind is NodeKind.VIEW
            and origin[0] not in self.added
        ):
            source = producer.call.inputs[0]
            if permute(tensor, order) == source and self._is_same_order(producer, order):
                return producer.operands[0], source
        result = permute(tensor, order)
        call = Call("aten::permute", (("self", tensor), ("dims", tuple(order))), (result,))
        return self._add(call, NodeKind.VIEW, (origin,), (0,)), result

    def _is_same_order(self, transposition: DraftCall, order: list[int]) -> bool:
        """Return whether a transposition is the same as an order of dimensions."""
        count = len(order)
        first, second = (int(transposition.option(name)) % count for name in ("dim0", "dim1"))
        swapped = list(range(count))
        swapped[first], swapped[second] = second, first
        return swapped == order

    def _add(self, call: Call, kind: NodeKind, operands: tuple[Origin, ...], aliases: tuple[int | None, ...]) -> Origin:
        product = self.draft.steps[self.last]
        step = DraftCall(call, kind, product.module, product.phase, operands, aliases)
        self.added.append(self.draft.add(step, self.last))
        return (self.added[-1], 0)


def _equation(step: DraftCall) -> tuple[list[str], list[str], list[str]] | None:
    """Return the letters of both factors and of the result of an einsum; None if the equation is not of that form."""
    equation = str(step.option("equation")).replace(" ", "")
    left, arrow, result = equation.partition("->")
    parts = left.split(",")
    if (
        not arrow
        or len(parts) != 2
        or "." in equation
        or any(len(set(letters)) != len(letters) for letters in (*parts, result))
    ):
        return None
    return list(parts[0]), list(parts[1]), list(result)


def _is_low(value: Any, draft: Draft, origin: Origin | None) -> bool:
    """Return whether a filled-in value takes all weight from a score."""
    value = _number(value, draft, origin)
    return isinstance(value, float) and (isinf(value) or value <= MAX_MASK_VALUE) and value < 0


def _number(value: Any, draft: Draft, origin: Origin | None) -> Any:
    """Return a number from a number or a tensor of one element; a tensor of unknown value is returned unchanged."""
    producer = draft.producer(origin) if isinstance(value, Tensor) else None
    if producer is None or producer.op not in ("full", "full_like", "scalar_tensor", "new_full") or value.elements != 1:
        return value
    return producer.option("s" if producer.op == "scalar_tensor" else "fill_value")
