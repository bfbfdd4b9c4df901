"""Rewriting rules that replace many equal calls by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from xsp.graph import keys
from xsp.graph.draft import Draft, Prepared, Step, Web, given
from xsp.graph.node import Call, NodeKind, Origin, Phase, Tensor, contiguous, laid, permuted, strides
from xsp.graph.rules import Found

# --- a loop over samples ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """The same tensor of each sample, and the place of the samples when all are in one tensor."""

    sample: Tensor
    rows: int | None
    """Number of rows that each sample takes in a first dimension; None if samples have no such dimension."""

    def whole(self, count: int) -> Tensor:
        """Return the tensor of all samples."""
        shape, stride = self.sample.shape or (), strides(self.sample)
        if self.rows is None:
            reach = max([prod(shape), *(length * step for length, step in zip(shape, stride, strict=True))])
            return laid(self.sample.dtype, (count, *shape), (reach, *stride))
        first = max(prod(shape[1:]), stride[0]) if self.rows == 1 else stride[0]
        return laid(self.sample.dtype, (count * self.rows, *shape[1:]), (first, *stride[1:]))


SAME = (
    "relu gelu sigmoid tanh silu add mul sub div exp log sqrt rsqrt pow neg abs hardswish hardtanh relu6 leaky_relu "
    "elu softplus mish hardsigmoid clamp dropout to _to_copy clone contiguous square sin cos"
).split()
"""Operators that treat each element alike."""


PARTS = ("split", "split_with_sizes", "chunk", "unbind")


def loops(draft: Draft) -> Iterator[Found]:
    """Replace equal calls on the samples of a batch, whose results are then joined, by calls on the whole batch."""
    for number in list(draft.order):
        end = draft.steps[number]
        joins = end.op in ("cat", "stack", "concat") and len(end.takes) > 1 and end.plain
        if joins and number in draft.order:
            found = _Loop(draft, number).replaced()
            if found is not None:
                yield found


class _Loop:
    """Equal calls on the samples of a batch, up to the call that joins their results."""

    def __init__(self, draft: Draft, end: int) -> None:
        self.draft, self.end, self.web = draft, end, draft.web()
        self.count = len(draft.steps[end].takes)
        self.lanes: dict[tuple[Origin, ...], tuple[_Lane, Origin | None]] = {}
        """Tensors of the samples → their lane, and the joined tensor if there is one."""

        self.groups: list[tuple[int, ...]] = []
        self.leaves: set[int] = set()
        self.sources: set[Origin] = set()

    def replaced(self) -> Found | None:
        """Replace the loop; return None if it is no loop, or a call may not treat samples separately."""
        draft, last = self.draft, self.draft.steps[self.end]
        takes = last.takes
        lane = self._lane(takes) if last.option("dim") in (0, None) else None
        if lane is None or not any(draft.steps[each[0]].computes for each in self.groups):
            return None
        if (lane.rows is None) != (last.op == "stack") or lane.whole(self.count) != last.call.outputs[0]:
            return None
        inside = {each for group in self.groups for each in group}
        if not self._closed(inside):
            return None
        added = self._built()
        if added is None:
            return None
        draft.read_instead({(self.end, 0): self._now(takes)})
        computing = [draft.steps[group[0]] for group in self.groups if draft.steps[group[0]].computes]
        draft.remove({*inside, self.end})
        swept = draft.sweep(keep=lambda step: step.computes)
        ops = f"{computing[0].op} and {len(computing) - 1} more" if len(computing) > 1 else computing[0].op
        said = f"{ops}, once for each of {self.count} samples: one call on the whole batch computes the same"
        return Found("loop", (*inside, self.end, *swept), (), tuple(added), said)

    # --- finding ------------------------------------------------------------------------------------------

    def _lane(self, origins: tuple[Origin, ...]) -> _Lane | None:
        if origins in self.lanes:
            return self.lanes[origins][0]
        if len(set(origins)) != self.count or any(each[0] < 0 for each in origins):
            return None
        found = self._leaf(origins)
        if found is None:
            found = self._group(origins)
        return found

    def _leaf(self, origins: tuple[Origin, ...]) -> _Lane | None:
        """Return the lane of the parts of one tensor, if they are in order."""
        steps = [self.draft.steps[each[0]] for each in origins]
        first = steps[0]
        source = first.takes[0] if first.takes else None
        if source is None or any(step.takes[:1] != (source,) for step in steps) or first.kind is not NodeKind.VIEW:
            return None
        whole, sample = first.call.inputs[0], first.call.outputs[0]
        shape = whole.shape or ()
        if not shape or any(
            step.call.outputs[each[1]].shape != sample.shape for step, each in zip(steps, origins, strict=True)
        ):
            return None
        rows: int | None = (sample.shape or (0,))[0]
        if first.op in (*PARTS, "tensor_split"):
            together = len({each[0] for each in origins}) == 1 and [each[1] for each in origins] == [*range(self.count)]
            fits = together and len(first.call.outputs) == self.count
            rows = None if first.op == "unbind" else rows
        elif first.op == "select":
            fits = [step.option("index") % shape[0] for step in steps if step.op == "select"] == [*range(self.count)]
            rows = None
        elif first.op == "slice":
            starts = [step.option("start") or 0 for step in steps if step.op == "slice" and step.option("step") == 1]
            fits = bool(rows) and starts == [place * (rows or 0) for place in range(self.count)]
        else:
            return None
        if not fits or any(step.option("dim") != 0 for step in steps) or shape[0] != self.count * (rows or 1):
            return None
        lane = _Lane(sample, rows)
        if lane.whole(self.count).shape != shape:
            return None
        self.lanes[origins] = (lane, source)
        self.leaves.update(each[0] for each in origins)
        self.sources.add(source)
        return lane

    def _group(self, origins: tuple[Origin, ...]) -> _Lane | None:
        """Return the lane of the results of equal calls on lanes and on tensors that all samples share."""
        numbers = tuple(each[0] for each in origins)
        steps = [self.draft.steps[each] for each in numbers]
        first = steps[0]
        output = origins[0][1]
        if any(
            step.call.outputs != first.call.outputs or each[1] != output
            for step, each in zip(steps, origins, strict=True)
        ):
            return None
        if len({keys.key(step.call) for step in steps}) > 1 or first.random or first.phase is not Phase.FORWARD:
            return None
        if first.kind not in (NodeKind.COMPUTE, NodeKind.VIEW) or first.changes not in ((), (0,)):
            return None
        if len(first.call.outputs) != 1 and first.op not in PARTS:
            return None
        inputs: list[_Lane | None] = []
        for place in range(len(first.takes)):
            own = tuple(step.takes[place] for step in steps)
            lane = None if len(set(own)) == 1 else self._lane(own)
            if lane is None and len(set(own)) > 1:
                return None
            inputs.append(lane)
        rows = _rows(first, inputs)
        if rows is False or (first.changes and first.takes[0][0] in self.leaves):
            return None
        for place, tensor in enumerate(first.call.outputs):
            self.lanes[tuple((each, place) for each in numbers)] = (_Lane(tensor, rows), None)
        self.groups.append(numbers)
        return self.lanes[origins][0]

    def _closed(self, inside: set[int]) -> bool:
        """Return whether nothing else reads the results of the loop's calls, or changes what they read."""
        for number in inside:
            step = self.draft.steps[number]
            if any(self.draft.storage(step.takes[each])[0] not in inside for each in step.changes):
                return False
            for place in range(len(step.call.outputs)):
                storage = self.draft.storage((number, place))
                if storage[0] >= 0 and storage[0] in inside:
                    if self.web.outlives(storage) or any(
                        each not in inside and each != self.end for each in self.web.users.get(storage, ())
                    ):
                        return False
                elif any(each not in inside and each != self.end for each in self.web.readers.get((number, place), ())):
                    return False
        first = min((*inside, *self.leaves), key=lambda each: self.web.at[each])
        stored = {self.draft.storage(take) for each in inside for take in self.draft.steps[each].takes}
        mine = {each for each in stored if each[0] in inside}
        return not any(self.web.written_between(each, first, self.end) for each in stored - mine)

    # --- building -----------------------------------------------------------------------------------------

    def _now(self, origins: tuple[Origin, ...]) -> Origin:
        found = self.lanes[origins][1]
        assert found is not None
        return found

    def _built(self) -> list[int] | None:
        added: list[int] = []
        for group in sorted(self.groups, key=lambda numbers: self.web.at[numbers[0]]):
            steps = [self.draft.steps[each] for each in group]
            first = steps[0]
            own = tuple((each, 0) for each in group)
            lane = self.lanes[own][0]
            if first.op in ("unsqueeze", "squeeze", "select") and first.takes[0][0] >= 0:
                before = self.lanes[tuple(step.takes[0] for step in steps)]
                if (before[0].rows is None) != (lane.rows is None):
                    self.lanes[own] = (lane, before[1])  # the dimension of the samples exists already
                    continue
            takes, tensors, lanes = [], [], []
            for place, tensor in enumerate(first.call.inputs):
                origins = tuple(step.takes[place] for step in steps)
                known = self.lanes.get(origins) if len(set(origins)) > 1 else None
                lanes.append(None if known is None else known[0])
                takes.append(origins[0] if known is None else self._now(origins))
                tensors.append(tensor if known is None else known[0].whole(self.count))
            call = _together(given(first.call, tensors), first, lanes, lane, self.count)
            made = [tuple((each, place) for each in group) for place in range(len(first.call.outputs))]
            outputs = tuple(self.lanes[each][0].whole(self.count) for each in made)
            step = replace(first, call=replace(call, outputs=outputs), takes=tuple(takes))
            added.append(self.draft.add(step, self.end))
            self.lanes.update({each: (self.lanes[each][0], (added[-1], place)) for place, each in enumerate(made)})
        return added


def _rows(step: Step, lanes: Sequence[_Lane | None]) -> int | bool | None:
    """Return the rows of each sample in the result of a call on all samples at once (None: it has no such dimension);
    False if the call does not treat samples separately, or may not."""
    data = [each for each in lanes if each is not None]
    if not data or any((each.rows is None) != (data[0].rows is None) for each in data):
        return False
    rows, op = data[0].rows, step.op.rstrip("_")
    shape, made = data[0].sample.shape or (), step.call.outputs[0].shape or ()
    at_front = lanes[0] is not None
    kept = rows if rows is None or (made and made[0] == rows) else False
    alone = at_front and len(data) == 1
    if op in SAME:
        least = len(made) if rows is None else len(made) - 1
        others = [tensor.shape or () for tensor, lane in zip(step.call.inputs, lanes, strict=True) if lane is None]
        same = all(len(each.sample.shape or ()) == len(made) for each in data)
        return kept if same and all(len(each) <= least for each in others) else False
    if op == "unsqueeze" and alone and rows is None and step.option("dim") == 0:
        return 1
    if (
        alone
        and rows == 1
        and ((op == "squeeze" and step.option("dim") == 0) or (op == "select" and step.option("dim") == 0))
    ):
        return None
    if op in PARTS:
        return kept if alone and (rows is None or step.option("dim") % len(shape)) else False
    if op in ("flatten", "view", "reshape", "transpose", "permute", "softmax", "log_softmax", "mean", "sum", "amax"):
        return kept if alone and _apart(step, op, rows, len(shape)) else False
    if op == "linear":
        return kept if alone and (rows is None or len(shape) > 1) else False
    if op == "layer_norm":
        return kept if alone and len(step.option("normalized_shape")) < len(shape) + (rows is None) else False
    if op in ("batch_norm", "group_norm"):
        return kept if alone and rows is not None and not step.option("training") else False
    if op.startswith(("conv", "max_pool", "avg_pool", "adaptive_")) and op[-2:] in ("1d", "2d", "3d"):
        planes = int(op[-2]) + 1
        return kept if alone and len(shape) == planes + (rows is not None) else False
    if op in ("matmul", "mm"):
        return _product(lanes, step, rows, kept)
    if op == "embedding":
        return kept if lanes[0] is None and len(data) == 1 else False
    if op == "scaled_dot_product_attention":
        mask = (step.call.inputs[3].shape or ()) if len(lanes) == 4 and lanes[3] is None else ()
        shared = len(lanes) == 3 or (len(lanes) == 4 and lanes[3] is None and len(mask) == 2)
        return kept if all(lanes[:3]) and shared and len(shape) >= (3 if rows is not None else 2) else False
    return False


def _product(lanes: Sequence[_Lane | None], step: Step, rows: int | None, kept: int | None) -> int | None:
    one, two = (len(each.shape or ()) for each in step.call.inputs)
    if step.op == "mm" and rows is None:
        return False
    if lanes[1] is None:
        return kept if two == 2 and one >= (1 if rows is None else 2) else False
    if lanes[0] is None:
        return False
    return kept if one == two and one >= (2 if rows is None else 3) else False


def _apart(step: Step, op: str, rows: int | None, dims: int) -> bool:
    """Return whether a call on dimensions leaves the dimension of the samples unchanged."""
    if rows is None:
        return op != "flatten" or bool(dims)
    if op == "permute":
        return bool(step.option("dims")[0] % dims == 0)
    if op == "transpose":
        return all(step.option(each) % dims for each in ("dim0", "dim1"))
    if op == "flatten":
        return bool(step.option("start_dim") % dims)
    if op in ("softmax", "log_softmax"):
        return bool(step.option("dim") % dims)
    if op in ("mean", "sum", "amax"):
        over = step.option("dim")
        return isinstance(over, tuple) and bool(over) and all(each % dims for each in over)
    return True


def _together(call: Call, first: Step, lanes: Sequence[_Lane | None], lane: _Lane, count: int) -> Call:
    """Return a call with its options adapted to all samples at once."""
    op = first.op.rstrip("_")
    made = lane.whole(count)
    changed: dict[str, Any] = {}
    if op in ("view", "reshape"):
        changed = {"size": made.shape, "shape": made.shape}
    elif lane.rows is None:

        def shift(dim: int) -> int:
            return dim + 1 if dim >= 0 else dim

        if op == "permute":
            dims = len(first.call.outputs[0].shape or ())
            changed = {"dims": (0, *(each % dims + 1 for each in first.option("dims")))}
        elif op in ("transpose", "softmax", "log_softmax", "flatten", "unsqueeze", *PARTS):
            names = ("dim", "dim0", "dim1", "start_dim", "end_dim")
            changed = {name: shift(value) for name, value in call.arguments if name in names and isinstance(value, int)}
        elif op in ("mean", "sum", "amax"):
            changed = {"dim": tuple(map(shift, first.option("dim")))}
    return replace(call, arguments=tuple((name, changed.get(name, value)) for name, value in call.arguments))


# --- linear layers on one input -----------------------------------------------------------------------------


def joined(draft: Draft) -> Iterator[Found]:
    """Replace several linear layers on one input by one with joined weights."""
    groups: dict[Any, list[int]] = {}
    for number in draft.order:
        step = draft.steps[number]
        if step.op == "linear" and step.plain and step.phase is Phase.FORWARD:
            groups.setdefault(
                (step.takes[0], step.call.inputs[0], len(step.takes), step.call.outputs[0].dtype), []
            ).append(number)
    for numbers in groups.values():
        if len(numbers) > 1:
            found = _joined(draft, draft.web(), numbers)
            if found is not None:
                yield found


def _joined(draft: Draft, web: Web, numbers: list[int]) -> Found | None:
    steps = [draft.steps[each] for each in numbers]
    weights = [draft.steps[each].takes[1:] for each in numbers]
    lasting = all(draft.lasting(*each) and not any(web.written(draft.storage(one)) for one in each) for each in weights)
    if not lasting or web.written_between(draft.storage(steps[0].takes[0]), numbers[0], numbers[-1]):
        return None
    if any(web.written(draft.storage((each, 0))) or web.outlives(draft.storage((each, 0))) for each in numbers):
        return None
    of_weight = [each.call.inputs[1] for each in steps]
    rows = tuple(int((each.shape or (0,))[0]) for each in of_weight)
    parameters = [Tensor(of_weight[0].dtype, (sum(rows), *(of_weight[0].shape or ())[1:]))]
    parameters += [Tensor(each.dtype, (sum(rows),)) for each in steps[0].call.inputs[2:]]
    prepared = tuple(
        draft.prepare(Prepared(tensor, "join", tuple(each[place] for each in weights)))
        for place, tensor in enumerate(parameters)
    )
    source = steps[0].call.inputs[0]
    out = Tensor(steps[0].call.outputs[0].dtype, (*(source.shape or ())[:-1], sum(rows)))
    readings = _Readings(draft, web)
    parts = [laid(out.dtype, (*(out.shape or ())[:-1], width), contiguous(out.shape or ())) for width in rows]
    if not all(readings.lie((number, 0), tensor) for number, tensor in zip(numbers, parts, strict=True)):
        return None
    call = replace(given(steps[0].call, [source, *parameters]), outputs=(out,))
    one = draft.add(replace(steps[0], call=call, takes=(steps[0].takes[0], *prepared)), numbers[0])
    cut = Call("aten::split_with_sizes", (("self", out), ("split_sizes", rows), ("dim", -1)), tuple(parts))
    parted = draft.add(
        replace(steps[0], call=cut, kind=NodeKind.VIEW, takes=((one, 0),), aliases=(0,) * len(rows)), numbers[0]
    )
    removed, added = readings.apply()
    draft.read_instead({(number, 0): (parted, place) for place, number in enumerate(numbers)})
    draft.remove(numbers)
    said = f"{len(rows)} linear layers on one input: one layer with concatenated weights computes the same"
    return Found("joined", (*numbers, *removed), (), (one, parted, *added), said)


class _Readings:
    """New descriptions of the calls that read tensors whose layout is going to change."""

    def __init__(self, draft: Draft, web: Web) -> None:
        self.draft, self.web = draft, web
        self.calls: dict[int, Call] = {}

    def lie(self, origin: Origin, tensor: Tensor) -> bool:
        """Describe the readers of a tensor with its new layout; return whether all of them can read it."""
        for number in self.web.readers.get(origin, ()):
            step = self.draft.steps[number]
            call = self.calls.get(number, step.call)
            inputs = [tensor if each == origin else old for each, old in zip(step.takes, call.inputs, strict=True)]
            call = given(call, inputs)
            if step.kind is NodeKind.VIEW:
                made = _viewed(step, tensor)
                if made is None:
                    return False
                call = replace(call, outputs=(made,))
            self.calls[number] = call
            if step.kind is NodeKind.VIEW and not self.lie((number, 0), call.outputs[0]):
                return False
        return True

    def apply(self) -> tuple[list[int], list[int]]:
        """Insert the new calls; return the numbers of the removed calls, and of their replacements."""
        removed, added = [], []
        for number, call in self.calls.items():
            added.append(self.draft.add(replace(self.draft.steps[number], call=call), number))
            removed.append(number)
        new = {(old, 0): (now, 0) for old, now in zip(removed, added, strict=True)}
        self.draft.read_instead(new)
        self.draft.remove(removed)
        return removed, added


def _viewed(step: Step, tensor: Tensor) -> Tensor | None:
    """Return the result of a view on a tensor with a new layout; None if unknown."""
    before, after = step.call.inputs[0].shape or (), step.call.outputs[0].shape or ()
    if len(step.call.outputs) != 1:
        return None
    if step.op in ("transpose", "permute"):
        order = step.option("dims")
        if order is None:
            order = list(range(len(before)))
            one, other = (step.option(each) % len(before) for each in ("dim0", "dim1"))
            order[one], order[other] = order[other], order[one]
        return permuted(tensor, [each % len(before) for each in order])
    if step.op in ("view", "reshape", "unflatten") and after[: len(before) - 1] == before[:-1]:
        last = [each * strides(tensor)[-1] for each in contiguous(after[len(before) - 1 :])]
        return laid(tensor.dtype, after, (*strides(tensor)[:-1], *last))
    return tensor if step.op in ("dropout", "to", "detach", "alias") and before == after else None
