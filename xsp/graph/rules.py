"""Rewriting rules that look at few calls: dead and equal calls, casts, copies, norms that can be folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xsp.graph import keys
from xsp.graph.draft import Draft, DraftCall, PreparedTensor, Web, with_inputs
from xsp.graph.node import NodeKind, Origin, Phase, Tensor, permute


@dataclass(frozen=True)
class RuleMatch:
    """A change by a rule at one place of a draft, with the numbers of calls in the draft."""

    rule: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    added: tuple[int, ...]
    description: str
    changes_numbers: str | None = None


# --- dead -------------------------------------------------------------------------------------------------


def dead(draft: Draft) -> Iterator[RuleMatch]:
    """Remove calls whose results are not read, module by module."""
    unread = draft.sweep()
    by_module: dict[str, list[int]] = defaultdict(list)
    for number in unread:
        by_module[draft.steps[number].module].append(number)
    for numbers in by_module.values():
        ops = _names([draft.steps[number] for number in numbers if draft.steps[number].computes])
        if ops:
            yield RuleMatch("dead", tuple(numbers), (), (), f"the result of {ops} is never read")


def _names(steps: Sequence[DraftCall]) -> str:
    """Return the three most frequent operators of calls as text."""
    counts: dict[str, int] = defaultdict(int)
    for step in steps:
        counts[step.op] += 1
    ordered = sorted(counts, key=lambda op: -counts[op])
    suffix = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(f"{op} ({counts[op]} times)" if counts[op] > 1 else op for op in ordered[:3]) + suffix


# --- equal ------------------------------------------------------------------------------------------------


def equal(draft: Draft) -> Iterator[RuleMatch]:
    """Remove calls that repeat an earlier call on the same values."""
    web = draft.web()
    first_calls: dict[Any, int] = {}
    replacements: dict[Origin, Origin] = {}
    pairs: list[tuple[int, int]] = []
    for number in draft.order:
        step = draft.steps[number]
        if not step.is_pure or step.op.endswith("_") or not step.operands:
            continue
        operands = tuple(replacements.get(origin, origin) for origin in step.operands)
        identity = (keys.key(step.call), operands, step.call.outputs, step.kind)
        first = first_calls.setdefault(identity, number)
        if first == number:
            continue
        if step.computes and not _is_same(draft, web, first, number):
            first_calls[identity] = number
            continue
        pairs.append((first, number))
        replacements.update({(number, place): (first, place) for place in range(len(step.call.outputs))})
    if not any(draft.steps[number].computes for _, number in pairs):
        return
    draft.redirect(replacements)
    draft.remove(number for _, number in pairs)
    views = tuple(number for _, number in pairs if not draft.steps[number].computes)
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for first, number in pairs:
        if draft.steps[number].computes:
            groups[draft.steps[number].module].append((first, number))
    for module, group in groups.items():
        ops = _names([draft.steps[number] for _, number in group])
        first_module = draft.steps[group[0][0]].module
        location = f" in {first_module}" if first_module and first_module != module else ""
        message = f"{ops} computes again a result that was computed before{location}"
        yield RuleMatch(
            "equal", (*views, *(number for _, number in group)), tuple(first for first, _ in group), (), message
        )
        views = ()


def _is_same(draft: Draft, web: Web, first: int, second: int) -> bool:
    """Return whether two equal calls on the same tensors give the same values for as long as these are read."""
    original, repeated = draft.steps[first], draft.steps[second]
    if original.phase is not repeated.phase:  # the backward phase recomputes to save memory
        return False
    # a cast to the same type is possibly a copy to another device
    if original.op in CASTS and original.call.inputs[0].dtype == original.call.outputs[0].dtype:
        return False
    if any(web.is_written_between(draft.storage(origin), first, second) for origin in repeated.operands):
        return False
    for place in range(len(original.call.outputs)):
        original_storage, repeated_storage = draft.storage((first, place)), draft.storage((second, place))
        if web.is_written(original_storage) or web.is_written(repeated_storage) or web.outlives_step(repeated_storage):
            return False
    return True


# --- copies -----------------------------------------------------------------------------------------------


def copies(draft: Draft) -> Iterator[RuleMatch]:
    """Remove copies that are not written to, if the readers of a copy can read the original."""
    while True:
        change = _copy(draft) or _copy_of_copy(draft)
        if change is None:
            return
        yield change


def _copy(draft: Draft) -> RuleMatch | None:
    web = draft.web()
    for number in draft.order:
        step = draft.steps[number]
        if not (_is_copy(step) and step.call.outputs[0] == step.call.inputs[0]):
            continue
        if not _can_replace(draft, web, step.operands[0], (number, 0)):
            continue
        draft.redirect({(number, 0): step.operands[0]})
        draft.remove([number])
        unread = draft.sweep()
        return RuleMatch(
            "copy", (number, *unread), (), (), f"neither the copy that {step.op} makes nor its original is written to"
        )
    return None


def _is_copy(step: DraftCall) -> bool:
    """Return whether a call only copies its first tensor."""
    if step.kind is not NodeKind.COMPUTE or not step.is_pure or len(step.call.outputs) != 1 or not step.operands:
        return False
    if step.op in ("pad", "constant_pad_nd"):
        return not any(step.option("pad") or ())
    if step.op == "repeat":
        return all(count == 1 for count in step.option("repeats") or ())
    if step.op == "cat":
        return len(step.operands) == 1
    return step.op in ("clone", "contiguous") or (step.op == "to" and step.option("copy") is True)


def _can_replace(draft: Draft, web: Web, source: Origin, target: Origin) -> bool:
    """Return whether the readers of a tensor can read the tensor that it was made from, which has the same values."""
    source_storage, target_storage = draft.storage(source), draft.storage(target)
    return not (
        web.outlives_step(target_storage)
        or web.is_written(target_storage)
        or web.is_written_after(source_storage, target[0])
    )


PERMUTES = ("transpose", "permute", "t", "swapaxes", "swapdims", "numpy_T", "adjoint")


def _copy_of_copy(draft: Draft) -> RuleMatch | None:
    """Make a copy read the source of the preceding copy; only permutations may be in between."""
    web = draft.web()
    for number in draft.order:
        second_copy = draft.steps[number]
        if (
            not (_is_copy(second_copy) or (second_copy.op == "reshape" and second_copy.computes))
            or second_copy.call.outputs[0].stride is not None
        ):
            continue
        chain: list[int] = []
        origin = second_copy.operands[0]
        while (
            origin[0] >= 0
            and draft.steps[origin[0]].op in PERMUTES
            and web.readers[origin] == [chain[-1] if chain else number]
        ):
            chain.append(origin[0])
            origin = draft.steps[origin[0]].operands[0]
        first_copy = draft.producer(origin)
        if first_copy is None or not _is_copy(first_copy):
            continue
        storage = draft.storage(origin)
        source = first_copy.operands[0]
        if (
            web.outlives_step(storage)
            or web.is_written(storage)
            or set(web.users[storage]) != {*chain, number}
            or web.is_written_after(draft.storage(source), origin[0])
        ):
            continue
        added = []
        tensor, current = first_copy.call.inputs[0], source
        for place in reversed(chain):
            step = draft.steps[place]
            tensor_after = _permuted(step, tensor)
            if tensor_after is None:
                break
            call = replace(with_inputs(step.call, [tensor]), outputs=(tensor_after,))
            added.append(draft.add(replace(step, call=call, operands=(current,)), number))
            tensor, current = tensor_after, (added[-1], 0)
        else:
            call = with_inputs(second_copy.call, [tensor])
            added.append(draft.add(replace(second_copy, call=call, operands=(current,)), number))
            draft.redirect({(number, 0): (added[-1], 0)})
            removed = (origin[0], *chain, number)
            draft.remove(removed)
            return RuleMatch(
                "copy", removed, (), tuple(added), f"{second_copy.op} copies what {first_copy.op} has just copied"
            )
        draft.remove(added)
    return None


def _permuted(step: DraftCall, tensor: Tensor) -> Tensor | None:
    """Return the result of a permutation of a tensor; None if unknown."""
    shape = tensor.shape or ()
    order = list(range(len(shape)))
    if step.op == "permute":
        order = [dim % len(shape) for dim in step.option("dims")]
    elif step.op in ("transpose", "swapaxes", "swapdims"):
        names = [name for name, value in step.call.arguments if isinstance(value, int)]
        first, second = (step.option(name) % len(shape) for name in names[:2])
        order[first], order[second] = order[second], order[first]
    elif step.op == "t" and len(shape) == 2:
        order = [1, 0]
    elif step.op != "t":
        return None
    return permute(tensor, order)


# --- casts ------------------------------------------------------------------------------------------------

CASTS = ("to", "_to_copy", "type_as")

_FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""Type → bits of exponent and of fraction."""

_INTEGERS = {"bool": (0, 1), "uint8": (0, 8), "int8": (1, 7), "int16": (1, 15), "int32": (1, 31), "int64": (1, 63)}
"""Type → number of sign bits, and other bits."""

WIDE, NARROW = "float64", "float32"


def can_represent(wide: str | None, narrow: str | None) -> bool:
    """Return whether a type can represent all values of another one."""
    if narrow in _FLOATS and wide in _FLOATS:
        return all(a >= b for a, b in zip(_FLOATS[wide], _FLOATS[narrow], strict=True))
    if narrow in _INTEGERS and wide in _INTEGERS:
        return all(a >= b for a, b in zip(_INTEGERS[wide], _INTEGERS[narrow], strict=True))
    return narrow in _INTEGERS and wide in _FLOATS and _FLOATS[wide][1] + 1 >= _INTEGERS[narrow][1]


def casts(draft: Draft) -> Iterator[RuleMatch]:
    """Remove casts there and back; then narrow computation in float64 between two casts to float32."""
    while (finding := _round_trip(draft)) is not None:
        yield finding
    tried: set[int] = set()
    while (narrowed := _in_float64(draft, tried)) is not None:
        yield narrowed


def _is_cast(step: DraftCall | None) -> bool:
    if step is None or step.op not in CASTS or not step.is_pure or not step.computes:
        return False
    return step.call.inputs[0].dtype != step.call.outputs[0].dtype


def _round_trip(draft: Draft) -> RuleMatch | None:
    web = draft.web()
    for number in draft.order:
        last_cast = draft.steps[number]
        first_cast = draft.producer(last_cast.operands[0]) if _is_cast(last_cast) else None
        if first_cast is None or not _is_cast(first_cast) or first_cast.call.inputs[0] != last_cast.call.outputs[0]:
            continue
        if not _can_replace(draft, web, first_cast.operands[0], (number, 0)):
            continue
        if web.is_written_after(draft.storage(first_cast.operands[0]), last_cast.operands[0][0]) or web.is_written(
            draft.storage(last_cast.operands[0])
        ):
            continue
        narrow, wide = last_cast.call.outputs[0].dtype, last_cast.call.inputs[0].dtype
        draft.redirect({(number, 0): first_cast.operands[0]})
        draft.remove([number])
        changes = None if can_represent(wide, narrow) else f"values are no longer rounded to {wide}"
        message = f"cast from {narrow} to {wide} and back"
        return RuleMatch("cast", (number, *draft.sweep()), (), (), message, changes)
    return None


def _in_float64(draft: Draft, tried: set[int]) -> RuleMatch | None:
    for number in draft.order:
        step = draft.steps[number]
        if number in tried or not _is_cast(step) or step.call.outputs[0].dtype != WIDE:
            continue
        tried.add(number)
        region = _Region(draft)
        if region.grow(number):
            finding = region.narrow()
            if finding is not None:
                return finding
    return None


class _Region:
    """A region of calls that compute in float64, between casts to it and casts from it."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.web = draft, draft.web()
        self.casts_in: set[int] = set()
        self.calls: set[int] = set()
        self.casts_out: set[int] = set()

    def grow(self, start: int) -> bool:
        """Collect all calls connected to a cast; return whether that succeeds, and the region can be narrowed."""
        pending = [start]
        while pending:
            number = pending.pop()
            if number in self.casts_in | self.calls | self.casts_out:
                continue
            step = self.draft.steps[number]
            if not (step.is_pure and not step.op.endswith("_")):
                return False
            if _is_cast(step) and step.call.inputs[0].dtype == WIDE:
                self.casts_out.add(number)
                if step.call.outputs[0].dtype not in _FLOATS:
                    return False
                pending.append(step.operands[0][0])
                continue
            (self.casts_in if _is_cast(step) else self.calls).add(number)
            if not _is_cast(step):
                for operand, tensor in zip(step.operands, step.call.inputs, strict=True):
                    if tensor.dtype == WIDE and operand[0] < 0 and not self.draft.are_parameters(operand):
                        return False
                    if tensor.dtype == WIDE and operand[0] >= 0:
                        pending.append(operand[0])
            for place, tensor in enumerate(step.call.outputs):
                if tensor.dtype != WIDE:
                    continue
                storage = self.draft.storage((number, place))
                if self.web.outlives_step(storage) or self.web.is_written(storage):
                    return False
                pending += self.web.readers.get((number, place), [])
        return bool(self.casts_out) and any(
            self.draft.steps[number].call.inputs[0].dtype in _FLOATS for number in self.casts_in
        )

    def narrow(self) -> RuleMatch | None:
        """Replace the calls by the same calls in float32; return None if the layout of a tensor would change."""
        draft = self.draft
        region = [number for number in draft.order if number in self.casts_in | self.calls | self.casts_out]
        replacements: dict[Origin, Origin] = {}
        added: list[int] = []
        for number in region:
            step = draft.steps[number]
            origins = [replacements.get(origin, origin) for origin in step.operands]
            if number not in self.calls:
                tensor, output = _narrow(step.call.inputs[0]), _narrow(step.call.outputs[0])
                if tensor.dtype == output.dtype:
                    if tensor != output or self.web.is_written_after(draft.storage(step.operands[0]), number):
                        draft.remove(added)
                        return None
                    replacements[number, 0] = origins[0]
                    continue
            operands = tuple(
                draft.prepare(PreparedTensor(_narrow(tensor), NARROW, (origin,)))
                if origin[0] < 0 and tensor.dtype == WIDE
                else origin
                for origin, tensor in zip(origins, step.call.inputs, strict=True)
            )
            arguments = tuple((name, _narrow_value(value)) for name, value in step.call.arguments)
            call = replace(step.call, arguments=arguments, outputs=tuple(map(_narrow, step.call.outputs)))
            added.append(draft.add(replace(step, call=call, operands=operands), number))
            replacements.update({(number, place): (added[-1], place) for place in range(len(call.outputs))})
        draft.redirect(replacements)
        draft.remove(region)
        computing = [draft.steps[number] for number in region if number in self.calls and draft.steps[number].computes]
        if not computing:
            return RuleMatch("cast", tuple(region), (), tuple(added), "cast to float64 and back")
        message = f"casts to float64 and back, around {_names(computing)}"
        return RuleMatch("cast", tuple(region), (), tuple(added), message, "computed in float32 instead of float64")


def _narrow(tensor: Tensor) -> Tensor:
    return replace(tensor, dtype=NARROW) if tensor.dtype == WIDE else tensor


def _narrow_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _narrow(value)
    if isinstance(value, tuple):
        return tuple(map(_narrow_value, value))
    return NARROW if value == WIDE else value


# --- norms ------------------------------------------------------------------------------------------------

NORMS = ("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")


def norms(draft: Draft) -> Iterator[RuleMatch]:
    """Fold batch norms in evaluation into the preceding convolution or linear layer."""
    web = draft.web()
    for number in list(draft.order):
        norm = draft.steps[number]
        if norm.op not in NORMS or norm.option("training") or not norm.is_pure or norm.phase is not Phase.FORWARD:
            continue
        preceding = draft.producer(norm.operands[0])
        if preceding is None or not _can_fold(preceding, norm) or web.only_reader(norm.operands[0]) != number:
            continue
        if any(web.readers.get((number, place)) for place in range(1, len(norm.call.outputs))):
            continue
        names = ("weight", "bias", "running_mean", "running_var")
        scale, shift, mean, variance = (norm.input_named(name) for name in names)
        weight, bias = preceding.input_named("weight"), preceding.input_named("bias")
        if (
            weight is None
            or None in (mean, variance)
            or not draft.are_parameters(weight, bias, scale, shift, mean, variance)
        ):
            continue
        storages = [
            draft.storage(origin) for origin in (weight, bias, scale, shift, mean, variance) if origin is not None
        ]
        if any(web.is_written(storage) for storage in storages):
            continue
        place = norm.operands[0][0]
        added = _fold(draft, place, number, (weight, bias, scale, shift, mean, variance))
        message = f"batch norm in evaluation mode, which can be folded into the weights of the {preceding.op} before it"
        yield RuleMatch("norm", (place, number), (), (added,), message)


def _can_fold(preceding: DraftCall, norm: DraftCall) -> bool:
    output = preceding.call.outputs[0]
    if not preceding.is_pure or norm.call.outputs[0] != output or norm.call.inputs[0] != output:
        return False
    if preceding.op == "linear":
        return len(output.shape or ()) == 2
    return preceding.op in CONVOLUTIONS and not preceding.option("transposed")


def _fold(draft: Draft, place: int, number: int, parameters: tuple[Origin | None, ...]) -> int:
    """Replace a convolution and the norm after it by one call with other weights; return its number."""
    preceding, norm = draft.steps[place], draft.steps[number]
    tensor = preceding.call.inputs[preceding.operands.index(parameters[0])]
    channels = Tensor(tensor.dtype, (int((tensor.shape or (0,))[0]),))
    eps = (norm.option("eps"),)
    folded = [
        draft.prepare(PreparedTensor(tensor, "fold weight", parameters, eps)),
        draft.prepare(PreparedTensor(channels, "fold bias", parameters, eps)),
    ]
    new_arguments = {"weight": tensor, "bias": channels}
    arguments = tuple((name, new_arguments.get(name, value)) for name, value in preceding.call.arguments)
    call = replace(preceding.call, arguments=arguments)
    added = draft.add(replace(preceding, call=call, operands=(preceding.operands[0], *folded)), number)
    draft.redirect({(number, 0): (added, 0)})
    draft.remove([place, number])
    return added
