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

from xsp.graph.draft import Draft, Step
from xsp.graph.node import Call, NodeKind, Origin, Phase, Tensor, contiguous, permuted, strides, tensor_with_strides
from xsp.graph.rules import Finding

SOFTMAX = ("softmax", "_softmax", "special_softmax", "_safe_softmax")
PRODUCTS = ("matmul", "bmm", "einsum", "linalg_matmul")
RESHAPES = ("view", "reshape", "_unsafe_view", "unflatten", "flatten")
NOTHING = ("dropout", "contiguous", "to", "alias", "detach", "_to_copy", "expand", "type_as")
"""Calls between the softmax and the products that keep all values if they are views or casts."""

LOW = -1e4
"""Upper bound of the values that may be filled in for masked scores."""


@dataclass
class _Pattern:
    """The calls and properties found on the way from the softmax to the products."""

    inside: list[int] = field(default_factory=list)
    scale: float = 1.0
    mask: Origin | None = None
    inverted: bool = False
    """Whether the mask is true at scores that are left out."""

    shape: tuple[int, ...] = ()
    """Shape of the scores to which the mask is applied."""

    factors: tuple[tuple[Origin, Tensor], tuple[Origin, Tensor]] | None = None
    """Query, and key with its last dimensions in the order length, width."""


def attention(draft: Draft) -> Iterator[Finding]:
    """Replace hand-written attention by one call of `scaled_dot_product_attention`."""
    for number in list(draft.order):
        if number in draft.steps and draft.steps[number].op in SOFTMAX and number in set(draft.order):
            found = _Attention(draft, number).replaced()
            if found is not None:
                yield found


class _Attention:
    """Hand-written attention around one softmax."""

    def __init__(self, draft: Draft, softmax: int) -> None:
        self.draft, self.softmax = draft, softmax
        self.web = draft.web()
        self.seen = _Pattern()
        self.added: list[int] = []

    def replaced(self) -> Finding | None:
        """Replace the attention; return None if it is not attention or cannot be replaced."""
        step = self.draft.steps[self.softmax]
        shape = step.call.outputs[0].shape or ()
        if len(shape) < 3 or step.option("dim") not in (-1, len(shape) - 1) or step.phase is not Phase.FORWARD:
            return None
        result = None
        if step.plain and self._down() and self._up() and self._closed(set(self.seen.inside)):
            result = self._built()
        if result is None or self.draft.tensor(result) != self.draft.steps[self.last].call.outputs[0]:
            self.draft.remove(self.added)
            return None
        seen, last = self.seen, self.last
        calls = {*seen.inside, last}
        self.draft.redirect({(last, 0): result})
        self.draft.remove(calls)
        unread = self.draft.sweep()
        masked = "" if seen.mask is None else ", mask"
        message = f"attention written out (product{masked}, softmax, product): one scaled_dot_product_attention does it"
        return Finding("attention", (*calls, *unread), (), tuple(self.added), message)

    # --- finding ------------------------------------------------------------------------------------------

    def _down(self) -> bool:
        """Follow the weights to the product with the values; return whether it was found."""
        self.seen.inside.append(self.softmax)
        origin: Origin = (self.softmax, 0)
        while True:
            readers = self.web.readers.get(origin, [])
            if len(readers) != 1:
                return False
            step = self.draft.steps[readers[0]]
            if step.op in PRODUCTS and len(step.takes) == 2 and step.takes[0] == origin and step.takes[1] != origin:
                self.last, self.weights = readers[0], origin
                return step.plain and len(step.call.outputs) == 1
            if not self._passes(step) or step.takes[0] != origin:
                return False
            self.seen.inside.append(readers[0])
            origin = (readers[0], 0)

    def _passes(self, step: Step) -> bool:
        """Return whether a call preserves the values and the last two dimensions."""
        if not step.plain or len(step.call.outputs) != 1:
            return False
        before, after = step.call.inputs[0].shape or (), step.call.outputs[0].shape or ()
        if step.op in RESHAPES or step.op in ("unsqueeze", "squeeze"):
            return before[-2:] == after[-2:] and len(after) >= 3
        if step.op not in NOTHING or before != after:
            return False
        return step.kind is NodeKind.VIEW or step.op in ("to", "_to_copy", "type_as", "contiguous")

    def _up(self) -> bool:
        """Follow the scores to the product of query and key; return whether it was found."""
        origin = self.draft.steps[self.softmax].takes[0]
        self.seen.shape = self.draft.tensor(origin).shape or ()
        while origin[0] >= 0:
            number, step = origin[0], self.draft.steps[origin[0]]
            if step.random or len(step.call.outputs) != 1:
                return False
            self.seen.inside.append(number)
            if step.op in PRODUCTS and len(step.takes) == 2:
                return self._factors(step, step.takes, step.call.inputs)
            if step.op == "baddbmm":
                return self._with_bias(step)
            previous = self._before(step)
            if previous is None:
                return False
            origin = previous
        return False

    def _before(self, step: Step) -> Origin | None:
        """Record a call on the scores; return the scores before it, or None if the call is not allowed."""
        seen, draft = self.seen, self.draft
        op, first = step.op.rstrip("_"), step.takes[0] if step.takes else None
        if first is None:
            return None
        shape = step.call.outputs[0].shape or ()
        if op in ("mul", "div", "true_divide"):
            other = _number(step.option("other"), draft, step.input_named("other"))
            if (
                not isinstance(other, (int, float))
                or isinstance(other, bool)
                or not other
                or step.option("rounding_mode")
            ):
                return None
            seen.scale *= float(other) if op == "mul" else 1.0 / float(other)
            return first if step.call.inputs[0].shape == shape else None
        if self._passes(step):
            return first
        if seen.mask is not None or seen.scale != 1.0:  # a scale after the mask would scale the mask too
            return None
        if op == "add" and len(step.takes) == 2 and step.option("alpha") in (1, None):
            sides = [
                place
                for place in (0, 1)
                if step.call.inputs[place].shape == shape and self._is_score(step.takes[place])
            ]
            if not sides or (step.changes and sides[0] != 0):
                return None
            self._mask(step.takes[1 - sides[0]], shape)
            return step.takes[sides[0]]
        if op == "masked_fill" and _is_low(step.option("value"), draft, step.input_named("value")):
            self._mask(step.input_named("mask"), shape, inverted=True)
            return first
        if op == "where" and len(step.takes) >= 2 and _is_low(step.option("other"), draft, step.input_named("other")):
            self._mask(step.input_named("condition"), shape)
            return step.input_named("self")
        return None

    def _is_score(self, origin: Origin) -> bool:
        """Return whether a tensor comes from a product by calls that are allowed on scores."""
        while origin[0] >= 0:
            step = self.draft.steps[origin[0]]
            if step.op in (*PRODUCTS, "baddbmm"):
                return True
            if step.op.rstrip("_") not in ("mul", "div") and not self._passes(step):
                return False
            origin = step.takes[0]
        return False

    def _mask(self, mask: Origin | None, shape: tuple[int, ...], inverted: bool = False) -> None:
        self.seen.mask, self.seen.shape, self.seen.inverted = mask, shape, inverted

    def _with_bias(self, step: Step) -> bool:
        """Record a product with an added tensor: a mask, or nothing if its factor is 0."""
        alpha, beta = step.option("alpha"), step.option("beta")
        if not isinstance(alpha, (int, float)) or not alpha:
            return False
        if beta not in (0, 1) or (beta == 1 and (self.seen.mask is not None or self.seen.scale != 1.0)):
            return False
        if beta == 1:
            self._mask(step.takes[0], step.call.outputs[0].shape or ())
        self.seen.scale *= float(alpha)
        return self._factors(step, step.takes[1:], step.call.inputs[1:])

    def _factors(self, step: Step, takes: Sequence[Origin], tensors: Sequence[Tensor]) -> bool:
        if step.changes or len(takes) != 2 or (takes[0] == takes[1] and step.op != "einsum"):
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
            first = self._permuted(takes[0], tensors[0], [left.index(letter) for letter in (*batch, query, *width)])
            second = self._permuted(takes[1], tensors[1], [right.index(letter) for letter in (*batch, key, *width)])
            self.seen.factors = (first, second)
            return True
        left_shape, right_shape = tensors[0].shape or (), tensors[1].shape or ()
        if len(left_shape) != len(right_shape) or left_shape[:-2] != right_shape[:-2] or len(left_shape) < 3:
            return False
        order = [*range(len(right_shape) - 2), len(right_shape) - 1, len(right_shape) - 2]
        self.seen.factors = ((takes[0], tensors[0]), self._permuted(takes[1], tensors[1], order))
        return True

    def _closed(self, calls: set[int]) -> bool:
        """Return whether only the found calls read their results, and they change nothing else."""
        for number in calls:
            step = self.draft.steps[number]
            storage = self.draft.storage((number, 0))
            if storage[0] < 0 or storage[0] not in calls or self.web.outlives(storage):
                return False
            if any(user not in calls and user != self.last for user in self.web.users.get(storage, ())):
                return False
            if any(self.draft.storage(step.takes[index]) != storage for index in step.changes):
                return False
        assert self.seen.factors is not None
        value = self.draft.steps[self.last].takes[1]
        origins = [
            self.seen.factors[0][0],
            self.seen.factors[1][0],
            value,
            *([self.seen.mask] if self.seen.mask else []),
        ]
        storages = [self.draft.storage(origin) for origin in origins]
        first = min(calls, key=lambda number: self.web.at[number])
        return not any(self.web.written_between(storage, first, self.last) for storage in storages)

    # --- building -----------------------------------------------------------------------------------------

    def _built(self) -> Origin | None:
        draft, seen = self.draft, self.seen
        assert seen.factors is not None
        (query, query_tensor), (key, key_tensor) = seen.factors
        end = draft.steps[self.last]
        value = self._value(end)
        if value is None:
            return None
        (values, value_tensor), order = value
        types = {query_tensor.dtype, key_tensor.dtype, value_tensor.dtype}
        if len(types) != 1 or types.pop() not in ("float16", "bfloat16", "float32", "float64"):
            return None
        batch = seen.shape[:-2]
        parts = [
            self._split(origin, tensor, batch)
            for origin, tensor in ((query, query_tensor), (key, key_tensor), (values, value_tensor))
        ]
        if None in parts:
            return None
        (query, query_tensor), (key, key_tensor), (values, value_tensor) = (part for part in parts if part is not None)
        lengths = (query_tensor.shape or ())[-2], (key_tensor.shape or ())[-2]
        if seen.shape[-2:] != lengths or (value_tensor.shape or ())[-2] != lengths[1]:
            return None
        masked = self._masked(query_tensor.dtype)
        if masked is None:
            return None
        mask, mask_tensor = masked
        shape = (*batch, lengths[0], (value_tensor.shape or ())[-1])
        arguments = (
            ("query", query_tensor),
            ("key", key_tensor),
            ("value", value_tensor),
            ("attn_mask", mask_tensor),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", seen.scale),
            ("enable_gqa", False),
        )
        call = Call("aten::scaled_dot_product_attention", arguments, (Tensor(query_tensor.dtype, shape),))
        takes = (query, key, values, *(() if mask is None else (mask,)))
        result = self._add(call, NodeKind.COMPUTE, takes, (None,))
        return self._as_it_was(result, call.outputs[0], end.call.outputs[0], order)

    def _value(self, end: Step) -> tuple[tuple[Origin, Tensor], list[int] | None] | None:
        """Return the values, with length and width last, and the final order of the result's dimensions."""
        values, tensor = end.takes[1], end.call.inputs[1]
        if end.op != "einsum":
            weights_shape, values_shape = end.call.inputs[0].shape or (), tensor.shape or ()
            return (
                ((values, tensor), None)
                if weights_shape[:-2] == values_shape[:-2] and len(weights_shape) == len(values_shape)
                else None
            )
        letters = _equation(end)
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
        return self._permuted(values, tensor, order), [dimensions.index(letter) for letter in result]

    def _masked(self, dtype: str | None) -> tuple[Origin | None, Tensor | None] | None:
        """Return the mask in the form that attention takes, (None, None) if there is none; None if impossible."""
        seen, draft = self.seen, self.draft
        if seen.mask is None:
            return None, None
        tensor = draft.tensor(seen.mask)
        shape = tensor.shape or ()
        full = seen.shape
        if len(shape) > len(full) or any(
            a not in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False)
        ):
            return None
        if len(shape) < 2:  # the fused kernels need at least two dimensions
            expanded = tensor_with_strides(
                tensor.dtype, (*(1,) * (2 - len(shape)), *shape), (*(0,) * (2 - len(shape)), *strides(tensor))
            )
            call = Call("aten::expand", (("self", tensor), ("size", expanded.shape), ("implicit", False)), (expanded,))
            return self._inverted(self._add(call, NodeKind.VIEW, (seen.mask,), (0,)), expanded, dtype)
        return self._inverted(seen.mask, tensor, dtype)

    def _inverted(self, mask: Origin, tensor: Tensor, dtype: str | None) -> tuple[Origin, Tensor] | None:
        if tensor.dtype != "bool":
            return (mask, tensor) if tensor.dtype == dtype and not self.seen.inverted else None
        if not self.seen.inverted:
            return mask, tensor
        maker = self.draft.maker(mask)
        if maker is not None and maker.op in ("bitwise_not", "logical_not") and maker.call.inputs[0] == tensor:
            return maker.takes[0], tensor
        inverted = replace(tensor, stride=None)
        return self._add(
            Call("aten::logical_not", (("self", tensor),), (inverted,)), NodeKind.COMPUTE, (mask,), (None,)
        ), inverted

    def _split(self, origin: Origin, tensor: Tensor, batch: tuple[int, ...]) -> tuple[Origin, Tensor] | None:
        """Return a tensor whose batch dimensions are those at which the mask is applied."""
        shape, stride = tensor.shape or (), strides(tensor)
        if shape[:-2] == batch:
            return origin, tensor
        if len(shape) != 3 or shape[0] != prod(batch):
            return None
        view = tensor_with_strides(
            tensor.dtype,
            (*batch, *shape[-2:]),
            (*(stride[0] * step for step in contiguous(batch)), *stride[-2:]),
        )
        call = Call("aten::view", (("self", tensor), ("size", view.shape)), (view,))
        return self._add(call, NodeKind.VIEW, (origin,), (0,)), view

    def _as_it_was(self, origin: Origin, tensor: Tensor, expected: Tensor, order: list[int] | None) -> Origin:
        """Return the result with the dimensions that its readers expect."""
        if order is not None and order != list(range(len(order))):
            origin, tensor = self._permuted(origin, tensor, order)
        if tensor.shape != expected.shape:
            call = Call("aten::reshape", (("self", tensor), ("shape", expected.shape)), (expected,))
            return self._add(call, NodeKind.VIEW, (origin,), (0,))
        if tensor != expected and origin[0] in self.added and len(self.added) >= 1:
            step = self.draft.steps[origin[0]]
            self.draft.steps[origin[0]] = replace(step, call=replace(step.call, outputs=(expected,)))
        return origin

    def _permuted(self, origin: Origin, tensor: Tensor, order: list[int]) -> tuple[Origin, Tensor]:
        if order == list(range(len(order))):
            return origin, tensor
        maker = self.draft.maker(origin)
        if (
            maker is not None
            and maker.op == "transpose"
            and maker.kind is NodeKind.VIEW
            and origin[0] not in self.added
        ):
            source = maker.call.inputs[0]
            if permuted(tensor, order) == source and self._swaps(maker, order):
                return maker.takes[0], source
        result = permuted(tensor, order)
        call = Call("aten::permute", (("self", tensor), ("dims", tuple(order))), (result,))
        return self._add(call, NodeKind.VIEW, (origin,), (0,)), result

    def _swaps(self, maker: Step, order: list[int]) -> bool:
        """Return whether a transposition is the same as an order of dimensions."""
        count = len(order)
        first, second = (int(maker.option(name)) % count for name in ("dim0", "dim1"))
        swapped = list(range(count))
        swapped[first], swapped[second] = second, first
        return swapped == order

    def _add(self, call: Call, kind: NodeKind, takes: tuple[Origin, ...], aliases: tuple[int | None, ...]) -> Origin:
        end = self.draft.steps[self.last]
        step = Step(call, kind, end.module, end.phase, takes, aliases)
        self.added.append(self.draft.add(step, self.last))
        return (self.added[-1], 0)


def _equation(step: Step) -> tuple[list[str], list[str], list[str]] | None:
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
    return isinstance(value, float) and (isinf(value) or value <= LOW) and value < 0


def _number(value: Any, draft: Draft, origin: Origin | None) -> Any:
    """Return a number from a number or a tensor of one element; a tensor of unknown value is returned unchanged."""
    maker = draft.maker(origin) if isinstance(value, Tensor) else None
    if maker is None or maker.op not in ("full", "full_like", "scalar_tensor", "new_full") or value.elements != 1:
        return value
    return maker.option("s" if maker.op == "scalar_tensor" else "fill_value")
