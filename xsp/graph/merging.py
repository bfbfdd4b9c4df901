"""Rewriting rules that replace many equal calls by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from xsp.graph import keys
from xsp.graph.draft import Draft, DraftCall, PreparedTensor, Web, with_inputs
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

# --- a loop over samples ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """The same tensor of each sample, and the place of the samples when all are in one tensor."""

    sample: Tensor
    rows: int | None
    """Number of rows that each sample takes in a first dimension; None if samples have no such dimension."""

    def batch_tensor(self, count: int) -> Tensor:
        """Return the tensor of all samples."""
        shape, stride = self.sample.shape or (), strides(self.sample)
        if self.rows is None:
            extent = max([prod(shape), *(length * step for length, step in zip(shape, stride, strict=True))])
            return tensor_with_strides(self.sample.dtype, (count, *shape), (extent, *stride))
        first = max(prod(shape[1:]), stride[0]) if self.rows == 1 else stride[0]
        return tensor_with_strides(self.sample.dtype, (count * self.rows, *shape[1:]), (first, *stride[1:]))


ELEMENTWISE = (
    "relu gelu sigmoid tanh silu add mul sub div exp log sqrt rsqrt pow neg abs hardswish hardtanh relu6 leaky_relu "
    "elu softplus mish hardsigmoid clamp dropout to _to_copy clone contiguous square sin cos"
).split()
"""Operators that treat each element in the same way."""


PARTS = ("split", "split_with_sizes", "chunk", "unbind")


def loops(draft: Draft) -> Iterator[RuleMatch]:
    """Replace equal calls on the samples of a batch, whose results are then joined, by calls on the whole batch."""
    for number in list(draft.order):
        end = draft.steps[number]
        is_join = end.op in ("cat", "stack", "concat") and len(end.operands) > 1 and end.is_pure
        if is_join and number in draft.order:
            finding = _Loop(draft, number).rewrite()
            if finding is not None:
                yield finding


class _Loop:
    """Equal calls on the samples of a batch, up to the call that joins their results."""

    def __init__(self, draft: Draft, end: int) -> None:
        self.draft, self.end, self.web = draft, end, draft.web()
        self.count = len(draft.steps[end].operands)
        self.lanes: dict[tuple[Origin, ...], tuple[_Lane, Origin | None]] = {}
        """Tensors of the samples → their lane, and the joined tensor if there is one."""

        self.groups: list[tuple[int, ...]] = []
        self.leaves: set[int] = set()
        self.sources: set[Origin] = set()

    def rewrite(self) -> RuleMatch | None:
        """Replace the loop; return None if it is no loop, or a call may not treat samples separately."""
        draft, join_step = self.draft, self.draft.steps[self.end]
        operands = join_step.operands
        lane = self._lane(operands) if join_step.option("dim") in (0, None) else None
        if lane is None or not any(draft.steps[group[0]].computes for group in self.groups):
            return None
        output = join_step.call.outputs[0]
        if (lane.rows is None) != (join_step.op == "stack") or lane.batch_tensor(self.count) != output:
            return None
        calls = {number for group in self.groups for number in group}
        if not self._is_closed(calls):
            return None
        added = self._build()
        if added is None:
            return None
        draft.redirect({(self.end, 0): self._batched_origin(operands)})
        computing = [draft.steps[group[0]] for group in self.groups if draft.steps[group[0]].computes]
        draft.remove({*calls, self.end})
        unread = draft.sweep(keep=lambda step: step.computes)
        ops = f"{computing[0].op} and {len(computing) - 1} more" if len(computing) > 1 else computing[0].op
        message = f"{ops}, once for each of {self.count} samples: one call on the whole batch computes the same"
        return RuleMatch("loop", (*calls, self.end, *unread), (), tuple(added), message)

    # --- finding ------------------------------------------------------------------------------------------

    def _lane(self, origins: tuple[Origin, ...]) -> _Lane | None:
        if origins in self.lanes:
            return self.lanes[origins][0]
        if len(set(origins)) != self.count or any(origin[0] < 0 for origin in origins):
            return None
        lane = self._leaf(origins)
        if lane is None:
            lane = self._group(origins)
        return lane

    def _leaf(self, origins: tuple[Origin, ...]) -> _Lane | None:
        """Return the lane of the parts of one tensor, if they are in order."""
        steps = [self.draft.steps[origin[0]] for origin in origins]
        first_step = steps[0]
        source = first_step.operands[0] if first_step.operands else None
        if source is None or first_step.kind is not NodeKind.VIEW:
            return None
        if any(step.operands[:1] != (source,) for step in steps):
            return None
        full, sample = first_step.call.inputs[0], first_step.call.outputs[0]
        shape = full.shape or ()
        if not shape or any(
            step.call.outputs[origin[1]].shape != sample.shape for step, origin in zip(steps, origins, strict=True)
        ):
            return None
        rows: int | None = (sample.shape or (0,))[0]
        if first_step.op in (*PARTS, "tensor_split"):
            from_one_call = len({origin[0] for origin in origins}) == 1 and [origin[1] for origin in origins] == [
                *range(self.count)
            ]
            fits = from_one_call and len(first_step.call.outputs) == self.count
            rows = None if first_step.op == "unbind" else rows
        elif first_step.op == "select":
            fits = [step.option("index") % shape[0] for step in steps if step.op == "select"] == [*range(self.count)]
            rows = None
        elif first_step.op == "slice":
            starts = [step.option("start") or 0 for step in steps if step.op == "slice" and step.option("step") == 1]
            fits = bool(rows) and starts == [place * (rows or 0) for place in range(self.count)]
        else:
            return None
        if not fits or any(step.option("dim") != 0 for step in steps) or shape[0] != self.count * (rows or 1):
            return None
        lane = _Lane(sample, rows)
        if lane.batch_tensor(self.count).shape != shape:
            return None
        self.lanes[origins] = (lane, source)
        self.leaves.update(origin[0] for origin in origins)
        self.sources.add(source)
        return lane

    def _group(self, origins: tuple[Origin, ...]) -> _Lane | None:
        """Return the lane of the results of equal calls on lanes and on tensors that all samples share."""
        numbers = tuple(origin[0] for origin in origins)
        steps = [self.draft.steps[number] for number in numbers]
        first_step = steps[0]
        output = origins[0][1]
        if any(
            step.call.outputs != first_step.call.outputs or origin[1] != output
            for step, origin in zip(steps, origins, strict=True)
        ):
            return None
        if len({keys.key(step.call) for step in steps}) > 1:
            return None
        if first_step.is_random or first_step.phase is not Phase.FORWARD:
            return None
        if first_step.kind not in (NodeKind.COMPUTE, NodeKind.VIEW) or first_step.written_inputs not in ((), (0,)):
            return None
        if len(first_step.call.outputs) != 1 and first_step.op not in PARTS:
            return None
        inputs: list[_Lane | None] = []
        for place in range(len(first_step.operands)):
            operands = tuple(step.operands[place] for step in steps)
            lane = None if len(set(operands)) == 1 else self._lane(operands)
            if lane is None and len(set(operands)) > 1:
                return None
            inputs.append(lane)
        rows = _rows(first_step, inputs)
        if rows is False or (first_step.written_inputs and first_step.operands[0][0] in self.leaves):
            return None
        for place, tensor in enumerate(first_step.call.outputs):
            self.lanes[tuple((number, place) for number in numbers)] = (_Lane(tensor, rows), None)
        self.groups.append(numbers)
        return self.lanes[origins][0]

    def _is_closed(self, calls: set[int]) -> bool:
        """Return whether nothing else reads the results of the loop's calls, or changes what they read."""
        for number in calls:
            step = self.draft.steps[number]
            if any(self.draft.storage(step.operands[index])[0] not in calls for index in step.written_inputs):
                return False
            for place in range(len(step.call.outputs)):
                storage = self.draft.storage((number, place))
                if storage[0] >= 0 and storage[0] in calls:
                    if self.web.outlives_step(storage) or any(
                        user not in calls and user != self.end for user in self.web.users.get(storage, ())
                    ):
                        return False
                elif any(
                    reader not in calls and reader != self.end for reader in self.web.readers.get((number, place), ())
                ):
                    return False
        first_call = min((*calls, *self.leaves), key=lambda number: self.web.positions[number])
        storages = {self.draft.storage(operand) for number in calls for operand in self.draft.steps[number].operands}
        internal = {storage for storage in storages if storage[0] in calls}
        return not any(self.web.is_written_between(storage, first_call, self.end) for storage in storages - internal)

    # --- building -----------------------------------------------------------------------------------------

    def _batched_origin(self, origins: tuple[Origin, ...]) -> Origin:
        origin = self.lanes[origins][1]
        assert origin is not None
        return origin

    def _build(self) -> list[int] | None:
        added: list[int] = []
        for group in sorted(self.groups, key=lambda numbers: self.web.positions[numbers[0]]):
            steps = [self.draft.steps[number] for number in group]
            first_step = steps[0]
            lane_key = tuple((number, 0) for number in group)
            lane = self.lanes[lane_key][0]
            if first_step.op in ("unsqueeze", "squeeze", "select") and first_step.operands[0][0] >= 0:
                previous = self.lanes[tuple(step.operands[0] for step in steps)]
                if (previous[0].rows is None) != (lane.rows is None):
                    self.lanes[lane_key] = (lane, previous[1])  # the dimension of the samples exists already
                    continue
            operands, tensors, lanes = [], [], []
            for place, tensor in enumerate(first_step.call.inputs):
                origins = tuple(step.operands[place] for step in steps)
                entry = self.lanes.get(origins) if len(set(origins)) > 1 else None
                lanes.append(None if entry is None else entry[0])
                operands.append(origins[0] if entry is None else self._batched_origin(origins))
                tensors.append(tensor if entry is None else entry[0].batch_tensor(self.count))
            call = _batched(with_inputs(first_step.call, tensors), first_step, lane, self.count)
            lane_keys = [tuple((number, place) for number in group) for place in range(len(first_step.call.outputs))]
            outputs = tuple(self.lanes[members][0].batch_tensor(self.count) for members in lane_keys)
            step = replace(first_step, call=replace(call, outputs=outputs), operands=tuple(operands))
            added.append(self.draft.add(step, self.end))
            self.lanes.update(
                {members: (self.lanes[members][0], (added[-1], place)) for place, members in enumerate(lane_keys)}
            )
        return added


def _rows(step: DraftCall, lanes: Sequence[_Lane | None]) -> int | bool | None:
    """Return the rows of each sample in the result of a call on all samples at once (None: it has no such dimension);
    False if the call does not treat samples separately, or may not."""
    batched = [lane for lane in lanes if lane is not None]
    if not batched or any((lane.rows is None) != (batched[0].rows is None) for lane in batched):
        return False
    rows, op = batched[0].rows, step.op.rstrip("_")
    shape, result_shape = batched[0].sample.shape or (), step.call.outputs[0].shape or ()
    at_front = lanes[0] is not None
    result_rows = rows if rows is None or (result_shape and result_shape[0] == rows) else False
    is_single = at_front and len(batched) == 1
    if op in ELEMENTWISE:
        limit = len(result_shape) if rows is None else len(result_shape) - 1
        other_shapes = [
            tensor.shape or () for tensor, lane in zip(step.call.inputs, lanes, strict=True) if lane is None
        ]
        same_rank = all(len(lane.sample.shape or ()) == len(result_shape) for lane in batched)
        return result_rows if same_rank and all(len(dims) <= limit for dims in other_shapes) else False
    if op == "unsqueeze" and is_single and rows is None and step.option("dim") == 0:
        return 1
    if (
        is_single
        and rows == 1
        and ((op == "squeeze" and step.option("dim") == 0) or (op == "select" and step.option("dim") == 0))
    ):
        return None
    if op in PARTS:
        return result_rows if is_single and (rows is None or step.option("dim") % len(shape)) else False
    if op in ("flatten", "view", "reshape", "transpose", "permute", "softmax", "log_softmax", "mean", "sum", "amax"):
        return result_rows if is_single and _keeps_samples(step, op, rows, len(shape)) else False
    if op == "linear":
        return result_rows if is_single and (rows is None or len(shape) > 1) else False
    if op == "layer_norm":
        dims = len(shape) + (rows is None)
        return result_rows if is_single and len(step.option("normalized_shape")) < dims else False
    if op in ("batch_norm", "group_norm"):
        return result_rows if is_single and rows is not None and not step.option("training") else False
    if op.startswith(("conv", "max_pool", "avg_pool", "adaptive_")) and op[-2:] in ("1d", "2d", "3d"):
        planes = int(op[-2]) + 1
        return result_rows if is_single and len(shape) == planes + (rows is not None) else False
    if op in ("matmul", "mm"):
        left, right = (len(tensor.shape or ()) for tensor in step.call.inputs)
        if step.op == "mm" and rows is None:
            return False
        if lanes[1] is None:
            return result_rows if right == 2 and left >= (1 if rows is None else 2) else False
        if lanes[0] is None:
            return False
        return result_rows if left == right and left >= (2 if rows is None else 3) else False
    if op == "embedding":
        return result_rows if lanes[0] is None and len(batched) == 1 else False
    if op == "scaled_dot_product_attention":
        mask = (step.call.inputs[3].shape or ()) if len(lanes) == 4 and lanes[3] is None else ()
        shared = len(lanes) == 3 or (len(lanes) == 4 and lanes[3] is None and len(mask) == 2)
        return result_rows if all(lanes[:3]) and shared and len(shape) >= (3 if rows is not None else 2) else False
    return False


def _keeps_samples(step: DraftCall, op: str, rows: int | None, dims: int) -> bool:
    """Return whether a call on dimensions leaves the dimension of the samples unchanged."""
    if rows is None:
        return op != "flatten" or bool(dims)
    if op == "permute":
        return bool(step.option("dims")[0] % dims == 0)
    if op == "transpose":
        return all(step.option(name) % dims for name in ("dim0", "dim1"))
    if op == "flatten":
        return bool(step.option("start_dim") % dims)
    if op in ("softmax", "log_softmax"):
        return bool(step.option("dim") % dims)
    if op in ("mean", "sum", "amax"):
        reduced = step.option("dim")
        return isinstance(reduced, tuple) and bool(reduced) and all(dim % dims for dim in reduced)
    return True


def _batched(call: Call, first: DraftCall, lane: _Lane, count: int) -> Call:
    """Return a call with its options adapted to all samples at once."""
    op = first.op.rstrip("_")
    tensor = lane.batch_tensor(count)
    options: dict[str, Any] = {}
    if op in ("view", "reshape"):
        options = {"size": tensor.shape, "shape": tensor.shape}
    elif lane.rows is None:

        def shift(dim: int) -> int:
            return dim + 1 if dim >= 0 else dim

        if op == "permute":
            dims = len(first.call.outputs[0].shape or ())
            options = {"dims": (0, *(dim % dims + 1 for dim in first.option("dims")))}
        elif op in ("transpose", "softmax", "log_softmax", "flatten", "unsqueeze", *PARTS):
            names = ("dim", "dim0", "dim1", "start_dim", "end_dim")
            options = {name: shift(value) for name, value in call.arguments if name in names and isinstance(value, int)}
        elif op in ("mean", "sum", "amax"):
            options = {"dim": tuple(map(shift, first.option("dim")))}
    return replace(call, arguments=tuple((name, options.get(name, value)) for name, value in call.arguments))


# --- linear layers on one input -----------------------------------------------------------------------------


def linears(draft: Draft) -> Iterator[RuleMatch]:
    """Replace several linear layers on one input by one with joined weights."""
    groups: dict[Any, list[int]] = {}
    for number in draft.order:
        step = draft.steps[number]
        if step.op == "linear" and step.is_pure and step.phase is Phase.FORWARD:
            groups.setdefault(
                (step.operands[0], step.call.inputs[0], len(step.operands), step.call.outputs[0].dtype), []
            ).append(number)
    for numbers in groups.values():
        if len(numbers) > 1:
            finding = _join(draft, draft.web(), numbers)
            if finding is not None:
                yield finding


def _join(draft: Draft, web: Web, numbers: list[int]) -> RuleMatch | None:
    steps = [draft.steps[number] for number in numbers]
    weights = [draft.steps[number].operands[1:] for number in numbers]
    lasting = all(
        draft.are_parameters(*operands) and not any(web.is_written(draft.storage(origin)) for origin in operands)
        for operands in weights
    )
    if not lasting or web.is_written_between(draft.storage(steps[0].operands[0]), numbers[0], numbers[-1]):
        return None
    if any(
        web.is_written(draft.storage((number, 0))) or web.outlives_step(draft.storage((number, 0)))
        for number in numbers
    ):
        return None
    weight_tensors = [step.call.inputs[1] for step in steps]
    rows = tuple(int((tensor.shape or (0,))[0]) for tensor in weight_tensors)
    parameters = [Tensor(weight_tensors[0].dtype, (sum(rows), *(weight_tensors[0].shape or ())[1:]))]
    parameters += [Tensor(tensor.dtype, (sum(rows),)) for tensor in steps[0].call.inputs[2:]]
    prepared = tuple(
        draft.prepare(PreparedTensor(tensor, "join", tuple(operands[place] for operands in weights)))
        for place, tensor in enumerate(parameters)
    )
    source = steps[0].call.inputs[0]
    output = Tensor(steps[0].call.outputs[0].dtype, (*(source.shape or ())[:-1], sum(rows)))
    readings = _Relayout(draft, web)
    parts = [
        tensor_with_strides(output.dtype, (*(output.shape or ())[:-1], width), contiguous_strides(output.shape or ()))
        for width in rows
    ]
    if not all(readings.relayout((number, 0), tensor) for number, tensor in zip(numbers, parts, strict=True)):
        return None
    call = replace(with_inputs(steps[0].call, [source, *parameters]), outputs=(output,))
    merged = draft.add(replace(steps[0], call=call, operands=(steps[0].operands[0], *prepared)), numbers[0])
    split_call = Call("aten::split_with_sizes", (("self", output), ("split_sizes", rows), ("dim", -1)), tuple(parts))
    split = draft.add(
        replace(steps[0], call=split_call, kind=NodeKind.VIEW, operands=((merged, 0),), aliases=(0,) * len(rows)),
        numbers[0],
    )
    removed, added = readings.apply()
    draft.redirect({(number, 0): (split, place) for place, number in enumerate(numbers)})
    draft.remove(numbers)
    message = f"{len(rows)} linear layers on one input: one layer with concatenated weights computes the same"
    return RuleMatch("joined", (*numbers, *removed), (), (merged, split, *added), message)


class _Relayout:
    """New descriptions of the calls that read tensors whose layout is going to change."""

    def __init__(self, draft: Draft, web: Web) -> None:
        self.draft, self.web = draft, web
        self.calls: dict[int, Call] = {}

    def relayout(self, origin: Origin, tensor: Tensor) -> bool:
        """Describe the readers of a tensor with its new layout; return whether all of them can read it."""
        for number in self.web.readers.get(origin, ()):
            step = self.draft.steps[number]
            call = self.calls.get(number, step.call)
            inputs = [
                tensor if operand == origin else current
                for operand, current in zip(step.operands, call.inputs, strict=True)
            ]
            call = with_inputs(call, inputs)
            if step.kind is NodeKind.VIEW:
                view = _view_result(step, tensor)
                if view is None:
                    return False
                call = replace(call, outputs=(view,))
            self.calls[number] = call
            if step.kind is NodeKind.VIEW and not self.relayout((number, 0), call.outputs[0]):
                return False
        return True

    def apply(self) -> tuple[list[int], list[int]]:
        """Insert the new calls; return the numbers of the removed calls, and of their replacements."""
        removed, added = [], []
        for number, call in self.calls.items():
            added.append(self.draft.add(replace(self.draft.steps[number], call=call), number))
            removed.append(number)
        replacements = {(before, 0): (after, 0) for before, after in zip(removed, added, strict=True)}
        self.draft.redirect(replacements)
        self.draft.remove(removed)
        return removed, added


def _view_result(step: DraftCall, tensor: Tensor) -> Tensor | None:
    """Return the result of a view on a tensor with a new layout; None if unknown."""
    old_shape, new_shape = step.call.inputs[0].shape or (), step.call.outputs[0].shape or ()
    if len(step.call.outputs) != 1:
        return None
    if step.op in ("transpose", "permute"):
        order = step.option("dims")
        if order is None:
            order = list(range(len(old_shape)))
            first, second = (step.option(name) % len(old_shape) for name in ("dim0", "dim1"))
            order[first], order[second] = order[second], order[first]
        return permute(tensor, [dim % len(old_shape) for dim in order])
    if step.op in ("view", "reshape", "unflatten") and new_shape[: len(old_shape) - 1] == old_shape[:-1]:
        last_strides = [stride * strides(tensor)[-1] for stride in contiguous_strides(new_shape[len(old_shape) - 1 :])]
        return tensor_with_strides(tensor.dtype, new_shape, (*strides(tensor)[:-1], *last_strides))
    return tensor if step.op in ("dropout", "to", "detach", "alias") and old_shape == new_shape else None
