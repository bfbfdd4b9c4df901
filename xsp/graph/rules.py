"""Rewriting rules that look at few calls: dead and equal calls, casts, copies, norms that can be folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xsp.graph import keys
from xsp.graph.draft import Draft, Prepared, Step, Web, with_inputs
from xsp.graph.node import NodeKind, Origin, Phase, Tensor, permuted


@dataclass(frozen=True)
class Finding:
    """A change by a rule at one place of a draft, with the numbers of calls in the draft."""

    rule: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    added: tuple[int, ...]
    description: str
    changes_numbers: str | None = None


# --- dead -------------------------------------------------------------------------------------------------


def dead(draft: Draft) -> Iterator[Finding]:
    """Remove calls whose results are not read, module by module."""
    unread = draft.sweep()
    by_module: dict[str, list[int]] = defaultdict(list)
    for number in unread:
        by_module[draft.steps[number].module].append(number)
    for numbers in by_module.values():
        ops = _names([draft.steps[number] for number in numbers if draft.steps[number].computes])
        if ops:
            yield Finding("dead", tuple(numbers), (), (), f"the result of {ops} is never read")


def _names(steps: Sequence[Step]) -> str:
    """Return the three most frequent operators of calls as text."""
    counts: dict[str, int] = defaultdict(int)
    for step in steps:
        counts[step.op] += 1
    ordered = sorted(counts, key=lambda op: -counts[op])
    rest = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(f"{op} ({counts[op]} times)" if counts[op] > 1 else op for op in ordered[:3]) + rest


# --- equal ------------------------------------------------------------------------------------------------


def equal(draft: Draft) -> Iterator[Finding]:
    """Remove calls that repeat an earlier call on the same values."""
    web = draft.web()
    seen: dict[Any, int] = {}
    replacements: dict[Origin, Origin] = {}
    pairs: list[tuple[int, int]] = []
    for number in draft.order:
        step = draft.steps[number]
        if not step.plain or step.op.endswith("_") or not step.takes:
            continue
        takes = tuple(replacements.get(origin, origin) for origin in step.takes)
        identity = (keys.key(step.call), takes, step.call.outputs, step.kind)
        first = seen.setdefault(identity, number)
        if first == number:
            continue
        if step.computes and not _same(draft, web, first, number):
            seen[identity] = number
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
        yield Finding(
            "equal", (*views, *(number for _, number in group)), tuple(first for first, _ in group), (), message
        )
        views = ()


def _same(draft: Draft, web: Web, first: int, second: int) -> bool:
    """Return whether two equal calls on the same tensors give the same values, as long as these are read."""
    original, repeated = draft.steps[first], draft.steps[second]
    if original.phase is not repeated.phase:  # the backward phase recomputes to save memory
        return False
    # a cast to the same type is possibly a copy to another device
    if original.op in CASTS and original.call.inputs[0].dtype == original.call.outputs[0].dtype:
        return False
    if any(web.written_between(draft.storage(origin), first, second) for origin in repeated.takes):
        return False
    for place in range(len(original.call.outputs)):
        original_storage, repeated_storage = draft.storage((first, place)), draft.storage((second, place))
        if web.written(original_storage) or web.written(repeated_storage) or web.outlives(repeated_storage):
            return False
    return True


# --- copies -----------------------------------------------------------------------------------------------


def copies(draft: Draft) -> Iterator[Finding]:
    """Remove copies that are not written to, if the readers of a copy can read the original."""
    while True:
        change = _copy(draft) or _copy_of_copy(draft)
        if change is None:
            return
        yield change


def _copy(draft: Draft) -> Finding | None:
    web = draft.web()
    for number in draft.order:
        step = draft.steps[number]
        if not (_copies(step) and step.call.outputs[0] == step.call.inputs[0]):
            continue
        if not _stands_for(draft, web, step.takes[0], (number, 0)):
            continue
        draft.redirect({(number, 0): step.takes[0]})
        draft.remove([number])
        unread = draft.sweep()
        return Finding(
            "copy", (number, *unread), (), (), f"neither the copy that {step.op} makes nor its original is written to"
        )
    return None


def _copies(step: Step) -> bool:
    """Return whether a call only copies its first tensor."""
    if step.kind is not NodeKind.COMPUTE or not step.plain or len(step.call.outputs) != 1 or not step.takes:
        return False
    if step.op in ("pad", "constant_pad_nd"):
        return not any(step.option("pad") or ())
    if step.op == "repeat":
        return all(count == 1 for count in step.option("repeats") or ())
    if step.op == "cat":
        return len(step.takes) == 1
    return step.op in ("clone", "contiguous") or (step.op == "to" and step.option("copy") is True)


def _stands_for(draft: Draft, web: Web, source: Origin, target: Origin) -> bool:
    """Return whether the readers of a tensor can read the tensor that it was made from, which has the same values."""
    source_storage, target_storage = draft.storage(source), draft.storage(target)
    return not (
        web.outlives(target_storage) or web.written(target_storage) or web.written_after(source_storage, target[0])
    )


PERMUTES = ("transpose", "permute", "t", "swapaxes", "swapdims", "numpy_T", "adjoint")


def _copy_of_copy(draft: Draft) -> Finding | None:
    """Make a copy read the source of the preceding copy; only permutations may be in between."""
    web = draft.web()
    for number in draft.order:
        last = draft.steps[number]
        if not (_copies(last) or (last.op == "reshape" and last.computes)) or last.call.outputs[0].stride is not None:
            continue
        chain: list[int] = []
        origin = last.takes[0]
        while (
            origin[0] >= 0
            and draft.steps[origin[0]].op in PERMUTES
            and web.readers[origin] == [chain[-1] if chain else number]
        ):
            chain.append(origin[0])
            origin = draft.steps[origin[0]].takes[0]
        first = draft.maker(origin)
        if first is None or not _copies(first):
            continue
        storage = draft.storage(origin)
        source = first.takes[0]
        if (
            web.outlives(storage)
            or web.written(storage)
            or set(web.users[storage]) != {*chain, number}
            or web.written_after(draft.storage(source), origin[0])
        ):
            continue
        added = []
        tensor, current = first.call.inputs[0], source
        for place in reversed(chain):
            step = draft.steps[place]
            tensor_after = _permuted(step, tensor)
            if tensor_after is None:
                break
            call = replace(with_inputs(step.call, [tensor]), outputs=(tensor_after,))
            added.append(draft.add(replace(step, call=call, takes=(current,)), number))
            tensor, current = tensor_after, (added[-1], 0)
        else:
            call = with_inputs(last.call, [tensor])
            added.append(draft.add(replace(last, call=call, takes=(current,)), number))
            draft.redirect({(number, 0): (added[-1], 0)})
            removed = (origin[0], *chain, number)
            draft.remove(removed)
            return Finding("copy", removed, (), tuple(added), f"{last.op} copies what {first.op} has just copied")
        draft.remove(added)
    return None


def _permuted(step: Step, tensor: Tensor) -> Tensor | None:
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
    return permuted(tensor, order)


# --- casts ------------------------------------------------------------------------------------------------

CASTS = ("to", "_to_copy", "type_as")

_FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""Type → bits of exponent and of fraction."""

_INTEGERS = {"bool": (0, 1), "uint8": (0, 8), "int8": (1, 7), "int16": (1, 15), "int32": (1, 31), "int64": (1, 63)}
"""Type → number of sign bits, and other bits."""

WIDE, NARROW = "float64", "float32"


def holds(wide: str | None, narrow: str | None) -> bool:
    """Return whether a type can represent all values of another one."""
    if narrow in _FLOATS and wide in _FLOATS:
        return all(a >= b for a, b in zip(_FLOATS[wide], _FLOATS[narrow], strict=True))
    if narrow in _INTEGERS and wide in _INTEGERS:
        return all(a >= b for a, b in zip(_INTEGERS[wide], _INTEGERS[narrow], strict=True))
    return narrow in _INTEGERS and wide in _FLOATS and _FLOATS[wide][1] + 1 >= _INTEGERS[narrow][1]


def casts(draft: Draft) -> Iterator[Finding]:
    """Remove casts there and back; then narrow computation in float64 between two casts to float32."""
    while (found := _there_and_back(draft)) is not None:
        yield found
    tried: set[int] = set()
    while (narrowed := _in_float64(draft, tried)) is not None:
        yield narrowed


def _casts(step: Step | None) -> bool:
    if step is None or step.op not in CASTS or not step.plain or not step.computes:
        return False
    return step.call.inputs[0].dtype != step.call.outputs[0].dtype


def _there_and_back(draft: Draft) -> Finding | None:
    web = draft.web()
    for number in draft.order:
        second = draft.steps[number]
        first = draft.maker(second.takes[0]) if _casts(second) else None
        if first is None or not _casts(first) or first.call.inputs[0] != second.call.outputs[0]:
            continue
        if not _stands_for(draft, web, first.takes[0], (number, 0)):
            continue
        if web.written_after(draft.storage(first.takes[0]), second.takes[0][0]) or web.written(
            draft.storage(second.takes[0])
        ):
            continue
        narrow, wide = second.call.outputs[0].dtype, second.call.inputs[0].dtype
        draft.redirect({(number, 0): first.takes[0]})
        draft.remove([number])
        changes = None if holds(wide, narrow) else f"values are no longer rounded to {wide}"
        message = f"cast from {narrow} to {wide} and back"
        return Finding("cast", (number, *draft.sweep()), (), (), message, changes)
    return None


def _in_float64(draft: Draft, tried: set[int]) -> Finding | None:
    for number in draft.order:
        step = draft.steps[number]
        if number in tried or not _casts(step) or step.call.outputs[0].dtype != WIDE:
            continue
        tried.add(number)
        region = _Region(draft)
        if region.grow(number):
            found = region.narrowed()
            if found is not None:
                return found
    return None


class _Region:
    """A region of calls that compute in float64, between casts to it and casts from it."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.web = draft, draft.web()
        self.ins: set[int] = set()
        self.inside: set[int] = set()
        self.outs: set[int] = set()

    def grow(self, start: int) -> bool:
        """Collect all calls connected to a cast; return whether that succeeds, and the region can be narrowed."""
        pending = [start]
        while pending:
            number = pending.pop()
            if number in self.ins | self.inside | self.outs:
                continue
            step = self.draft.steps[number]
            if not (step.plain and not step.op.endswith("_")):
                return False
            if _casts(step) and step.call.inputs[0].dtype == WIDE:
                self.outs.add(number)
                if step.call.outputs[0].dtype not in _FLOATS:
                    return False
                pending.append(step.takes[0][0])
                continue
            (self.ins if _casts(step) else self.inside).add(number)
            if not _casts(step):
                for taken, tensor in zip(step.takes, step.call.inputs, strict=True):
                    if tensor.dtype == WIDE and taken[0] < 0 and not self.draft.lasting(taken):
                        return False
                    if tensor.dtype == WIDE and taken[0] >= 0:
                        pending.append(taken[0])
            for place, tensor in enumerate(step.call.outputs):
                if tensor.dtype != WIDE:
                    continue
                storage = self.draft.storage((number, place))
                if self.web.outlives(storage) or self.web.written(storage):
                    return False
                pending += self.web.readers.get((number, place), [])
        return bool(self.outs) and any(self.draft.steps[number].call.inputs[0].dtype in _FLOATS for number in self.ins)

    def narrowed(self) -> Finding | None:
        """Replace the calls by the same calls in float32; return None if the layout of a tensor would change."""
        draft = self.draft
        region = [number for number in draft.order if number in self.ins | self.inside | self.outs]
        replacements: dict[Origin, Origin] = {}
        added: list[int] = []
        for number in region:
            step = draft.steps[number]
            origins = [replacements.get(origin, origin) for origin in step.takes]
            if number not in self.inside:
                tensor, output = _narrow(step.call.inputs[0]), _narrow(step.call.outputs[0])
                if tensor.dtype == output.dtype:
                    if tensor != output or self.web.written_after(draft.storage(step.takes[0]), number):
                        draft.remove(added)
                        return None
                    replacements[number, 0] = origins[0]
                    continue
            takes = tuple(
                draft.prepare(Prepared(_narrow(tensor), NARROW, (origin,)))
                if origin[0] < 0 and tensor.dtype == WIDE
                else origin
                for origin, tensor in zip(origins, step.call.inputs, strict=True)
            )
            arguments = tuple((name, _narrow_value(value)) for name, value in step.call.arguments)
            call = replace(step.call, arguments=arguments, outputs=tuple(map(_narrow, step.call.outputs)))
            added.append(draft.add(replace(step, call=call, takes=takes), number))
            replacements.update({(number, place): (added[-1], place) for place in range(len(call.outputs))})
        draft.redirect(replacements)
        draft.remove(region)
        computing = [draft.steps[number] for number in region if number in self.inside and draft.steps[number].computes]
        if not computing:
            return Finding("cast", tuple(region), (), tuple(added), "cast to float64 and back")
        message = f"casts to float64 and back, around {_names(computing)}"
        return Finding("cast", tuple(region), (), tuple(added), message, "computed in float32 instead of float64")


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


def norms(draft: Draft) -> Iterator[Finding]:
    """Fold batch norms in evaluation into the preceding convolution or linear layer."""
    web = draft.web()
    for number in list(draft.order):
        norm = draft.steps[number]
        if norm.op not in NORMS or norm.option("training") or not norm.plain or norm.phase is not Phase.FORWARD:
            continue
        preceding = draft.maker(norm.takes[0])
        if preceding is None or not _folds(preceding, norm) or web.only_reader(norm.takes[0]) != number:
            continue
        if any(web.readers.get((number, place)) for place in range(1, len(norm.call.outputs))):
            continue
        names = ("weight", "bias", "running_mean", "running_var")
        scale, shift, mean, variance = (norm.input_named(name) for name in names)
        weight, bias = preceding.input_named("weight"), preceding.input_named("bias")
        if weight is None or None in (mean, variance) or not draft.lasting(weight, bias, scale, shift, mean, variance):
            continue
        storages = [
            draft.storage(origin) for origin in (weight, bias, scale, shift, mean, variance) if origin is not None
        ]
        if any(web.written(storage) for storage in storages):
            continue
        place = norm.takes[0][0]
        added = _folded(draft, place, number, (weight, bias, scale, shift, mean, variance))
        message = f"batch norm in evaluation mode, which can be folded into the weights of the {preceding.op} before it"
        yield Finding("norm", (place, number), (), (added,), message)


def _folds(preceding: Step, norm: Step) -> bool:
    output = preceding.call.outputs[0]
    if not preceding.plain or norm.call.outputs[0] != output or norm.call.inputs[0] != output:
        return False
    if preceding.op == "linear":
        return len(output.shape or ()) == 2
    return preceding.op in CONVOLUTIONS and not preceding.option("transposed")


def _folded(draft: Draft, place: int, number: int, of: tuple[Origin | None, ...]) -> int:
    """Replace a convolution and the norm after it by one call with other weights; return its number."""
    preceding, norm = draft.steps[place], draft.steps[number]
    tensor = preceding.call.inputs[preceding.takes.index(of[0])]
    channels = Tensor(tensor.dtype, (int((tensor.shape or (0,))[0]),))
    eps = (norm.option("eps"),)
    folded = [
        draft.prepare(Prepared(tensor, "fold weight", of, eps)),
        draft.prepare(Prepared(channels, "fold bias", of, eps)),
    ]
    new = {"weight": tensor, "bias": channels}
    arguments = tuple((name, new.get(name, value)) for name, value in preceding.call.arguments)
    call = replace(preceding.call, arguments=arguments)
    added = draft.add(replace(preceding, call=call, takes=(preceding.takes[0], *folded)), number)
    draft.redirect({(number, 0): (added, 0)})
    draft.remove([place, number])
    return added
