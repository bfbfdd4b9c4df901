"""The runtime `torch`: a block as a Python function that calls its operators. Imports torch: import it where needed.

A benchmark includes the work of eager execution for an operator: the call from Python through the dispatcher, the
allocation of its outputs, and the kernel. The module call around it is timed separately (`overhead/module_call`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from xsp.bench import inputs
from xsp.bench.inputs import NotTimeable, ValueRule
from xsp.bench.spec import CacheState, Spec, missing_input_reason
from xsp.device.contract import Device, Elapsed
from xsp.device.processor import Processor
from xsp.graph.blocks import Block
from xsp.graph.node import OBJECT, Call, Tensor
from xsp.graph.recorder import flat_tensors
from xsp.texts import size_text

MOST_COPIES = 256
"""Most copies of the weights that are rotated."""

MOST_WRITING = 50
"""Calls of a block that changes its inputs, after which these are restored: values that are scaled repeatedly end as
denormals, which are slow."""


@dataclass
class Prepared:
    """A block with its inputs, ready to be called repeatedly."""

    function: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    """Sets of arguments of the function; in state `chain` there are several, which take turns."""

    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Storages that the block changes, each with a copy of its original content."""

    notes: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context manager that applies the settings under which the block runs."""

    flush: torch.Tensor | None = None
    """Buffer that is overwritten before each call in state `cold`."""

    timed: Callable[[int], int | Elapsed] | None = None
    """Function that runs a number of calls and returns their nanoseconds, for work that times itself."""

    most_calls: int | None = None
    """Most calls per batch of work that times itself."""

    joules: Callable[[], float | None] | None = None
    """Function that returns the energy of a call, of work that times itself."""

    _turn: Iterator[tuple[Any, ...]] = field(init=False)
    _calls: int = 0

    def __post_init__(self) -> None:
        self._turn = itertools.cycle(self.sets)

    @property
    def most(self) -> int | None:
        """Most calls per batch; None for no limit."""
        return 1 if self.flush is not None else MOST_WRITING if self.written else self.most_calls

    def arguments(self, calls: int) -> list[tuple[Any, ...]]:
        """Return the arguments of the next calls; restores inputs that the block has changed too often."""
        self._calls += calls
        if self.written and self._calls > MOST_WRITING * len(self.sets):
            self.restore()
            self._calls = calls
        return list(itertools.islice(self._turn, calls))

    def restore(self) -> None:
        """Restore the inputs that the block changed."""
        for storage, original in self.written:
            storage.copy_(original)

    def chill(self) -> None:
        """Fill the caches with other data, in state `cold`."""
        if self.flush is not None:
            self.flush.add_(1)

    @property
    def before(self) -> Callable[[], None] | None:
        """What precedes each timed call, see `xsp.device.contract.Device.timed`."""
        return None if self.flush is None else self.chill


def self_timed(
    timed: Callable[[int], int | Elapsed],
    most_calls: int | None = None,
    joules: Callable[[], float | None] | None = None,
) -> Prepared:
    """Return work that times itself, ready to be timed: `timed` returns the nanoseconds of a number of calls."""
    return Prepared(lambda: None, [()], timed=timed, most_calls=most_calls, joules=joules)


class Torch:
    """The runtime that prepares blocks of torch's operators."""

    name = "torch"

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int, device: Device | None = None) -> Prepared:
        """Return a block with its inputs.

        Args:
            spec: spec to prepare.
            rotated_bytes: total bytes of the copies of weights in state `chain`, and of the buffer that is overwritten
                in state `cold`: more than the caches hold.
            limit_bytes: most bytes that inputs and outputs may take.
            device: where they are; default: the processor.

        Raises:
            NotTimeable: the block cannot be run on its own.
            MemoryError: the tensors exceed the limit.
        """
        source = BlockSource(spec.block)
        copies = 1
        weight_bytes = sum(inputs.size(source.parameters[number]) for number in source.rotated)
        if spec.state is CacheState.CHAIN and weight_bytes:
            copies = max(1, min(MOST_COPIES, rotated_bytes // weight_bytes + 1))
        unrotated = [number for number in source.parameters if number not in source.rotated]
        input_bytes = sum(inputs.size(source.parameters[number]) for number in unrotated) + weight_bytes
        output_bytes = sum(tensor.bytes or 0 for call in spec.block.calls for tensor in call.outputs)
        if input_bytes * (2 if source.changed else 1) + output_bytes > limit_bytes:
            raise MemoryError(
                f"its tensors take {size_text(input_bytes + output_bytes)} of {size_text(limit_bytes)} allowed"
            )
        if copies > 1:
            copies = max(1, min(copies, (limit_bytes - input_bytes - output_bytes) // weight_bytes))
        return self._made(spec, source, copies, rotated_bytes, device or Processor())

    def _made(self, spec: Spec, source: BlockSource, copies: int, rotated_bytes: int, device: Device) -> Prepared:
        values = inputs.Values(device=device)
        shared: dict[int, list[torch.Tensor]] = {}
        sets, originals = [], []
        for index in range(copies):
            arguments: list[torch.Tensor] = []
            for number, tensors in source.parameters.items():
                if index and number in source.rotated:
                    views = _copies(shared[number])
                elif index:
                    views = shared[number]
                else:
                    views = shared[number] = values.storage(tensors, source.rules[number])
                if number in source.changed and (not index or number in source.rotated):
                    storage = _flat_storage(views[0])
                    originals.append((storage, storage.clone()))
                arguments += views
            sets.append(tuple(arguments))
        guessed = sorted({call.op for call in spec.block.calls if call.op in source.guessed})
        notes = f"inputs of {', '.join(guessed)} are zeros: no rule for their values is known" if guessed else ""
        return Prepared(source.function(), sets, originals, notes, flush=flush_buffer(spec, rotated_bytes, device))


def flush_buffer(spec: Spec, rotated_bytes: int, device: Device | None = None) -> torch.Tensor | None:
    """Return the buffer that is overwritten before each call in state `cold`; None in other states."""
    if spec.state is not CacheState.COLD:
        return None
    buffer: torch.Tensor = (device or Processor()).eviction_buffer(rotated_bytes)
    return buffer


def overhead(name: str, device: Device | None = None) -> Prepared:
    """Return the call of a module or of an operator that does no work, ready to be timed.

    Raises:
        NotTimeable: there is no overhead of this name.
    """
    tensor = torch.zeros(1, device=(device or Processor()).torch_name)
    if name == "overhead/module_call":
        return Prepared(torch.nn.Identity(), [(tensor,)])
    if name == "overhead/op_call":
        return Prepared(torch.ops.aten.alias.default, [(tensor,)])
    raise NotTimeable(f"there is no {name}")


class BlockSource:
    """A block as the source of a Python function, and the tensors that are passed to it.

    The storages that calls use are known; the view of a storage is identified by shape and strides: if several views
    are equal, each is used once, in order (`q, k, v = qkv.unbind(0)`).
    """

    def __init__(self, block: Block) -> None:
        reason = missing_input_reason(block)
        if reason:
            raise NotTimeable(reason)
        self.parameters: dict[int, list[Tensor]] = {}
        """Storage → the different tensors, in order, through which it is passed."""

        self.rules: dict[int, ValueRule] = {}
        self.guessed: set[str] = set()
        self.changed: set[int] = set()
        """Storages from outside that the block writes."""

        self._lines: list[str] = []
        self._constants: dict[str, Any] = {
            "_flat": lambda value: tuple(flat_tensors(value)),
            "_as_strided": torch.as_strided,
        }
        self._handles: dict[int, list[tuple[Tensor, str, bool]]] = {}
        self._extra: dict[int, int] = {}
        """Parts of a storage that are passed separately → the storage."""

        self._made_storages: set[int] = set()
        for call, wires in zip(block.calls, block.wiring, strict=True):
            self._add(call, list(wires.reads), list(wires.returns), set(wires.writes))
        self.rotated = {number for number in self.parameters if self._extra.get(number, number) in block.weights}

    def function(self) -> Callable[..., Any]:
        """Return the function, which returns the result of the last call.

        Its source consists of names made here and of argument names in torch's schemas. Values from a graph or a file
        of timings are constants that the source refers to by name, so no foreign text is executed.
        """
        names = [name for number in self.parameters for name in self._names(number)]
        body = "\n    ".join(self._lines)
        source = f"def block({', '.join(names)}):\n    {body}\n    return result\n"
        exec(compile(source, "<block>", "exec"), self._constants)
        return self._constants["block"]  # type: ignore[no-any-return]

    def _names(self, number: int) -> list[str]:
        label = f"x{number}" if number >= 0 else f"y{-number}"
        return [f"{label}_{index}" for index in range(len(self.parameters[number]))]

    def _add(self, call: Call, reads: list[int], returns: list[int], writes: set[int]) -> None:
        operator, declared = _operator(call)
        arguments = dict(call.arguments)
        missing = [
            argument.name
            for argument in declared
            if argument.name not in arguments and not argument.has_default_value()
        ]
        if missing:
            raise NotTimeable(f"the argument {missing[0]} of {call.op} is not known")
        self._in_call: dict[tuple[int, Tensor], int] = {}
        remaining = iter(reads)
        words = []
        is_resizing = torch.Tag.inplace_view in operator.tags
        for argument in declared:
            if argument.name not in arguments:
                continue
            word = self._word(call, argument, arguments[argument.name], remaining, writes)
            if is_resizing and argument.name == "self":
                word = f"{word}.detach()"
            words.append(f"{argument.name}={word}" if argument.kwarg_only else word)
        name = f"op{len(self._lines)}"
        self._constants[name] = operator
        self._lines.append(f"result = {name}({', '.join(words)})")
        self._made_storages.update(number for number in {*returns, *writes} if number not in self.parameters)
        if not returns:
            return
        single = len(operator._schema.returns) == 1 and str(operator._schema.returns[0].type) == "Tensor"
        label = f"r{len(self._lines)}"
        self._lines[-1] += f"; {label} = {'result' if single else '_flat(result)'}"
        for index, (number, tensor) in enumerate(zip(returns, call.outputs, strict=True)):
            self._handles.setdefault(number, []).append((tensor, label if single else f"{label}[{index}]", False))

    def _word(self, call: Call, declared: Any, value: Any, remaining: Iterator[int], writes: set[int]) -> str:
        """Return the source of an argument."""
        if isinstance(value, Tensor):
            return self._tensor(call, declared.name, 0, value, next(remaining), writes)
        if isinstance(value, tuple) and any(isinstance(element, Tensor) for element in value):
            words = [
                self._tensor(call, declared.name, index, element, next(remaining), writes)
                if isinstance(element, Tensor)
                else self._constant(element)
                for index, element in enumerate(value)
            ]
            return f"[{', '.join(words)}]"
        return self._constant(_constant(declared, value))

    def _constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _tensor(self, call: Call, name: str, place: int, tensor: Tensor, number: int, writes: set[int]) -> str:
        if number in writes and number not in self._made_storages:
            self.changed.add(number)
        handles = self._handles.get(number, [])
        equal = [(index, handle) for index, handle in enumerate(handles) if handle[0] == tensor]
        if equal:
            index, (_, word, used) = next(((index, handle) for index, handle in equal if not handle[2]), equal[-1])
            handles[index] = (tensor, word, True)
            uses = self._in_call.get((number, tensor), 0)
            self._in_call[number, tensor] = uses + 1
            if used and uses and tensor.stride is not None and number in self.parameters:
                # equal tensors in one call are different parts of a storage, interleaved: no two of them are the same
                extra = -len(self._extra) - 1
                self._extra[extra] = number
                return self._outside(call, name, place, tensor, extra)
            return word
        if number in self._made_storages:
            word = handles[-1][1] if handles else "None"
            lengths, strides = self._constant(tensor.shape), self._constant(tensor.stride or _contiguous(tensor))
            return f"_as_strided({word}, {lengths}, {strides})"
        self._in_call[number, tensor] = 1
        return self._outside(call, name, place, tensor, number)

    def _outside(self, call: Call, name: str, index: int, tensor: Tensor, number: int) -> str:
        """Return the name of a tensor from outside, and add the tensor to the parameters of the function."""
        views = self.parameters.setdefault(number, [])
        views.append(tensor)
        rule = inputs.rule(call, name, index)
        known_rule = self.rules.setdefault(number, rule)
        if rule.is_guess and not inputs.dtype(tensor).is_floating_point:
            self.guessed.add(call.op)
        if known_rule == ValueRule() and rule != known_rule:
            self.rules[number] = rule
        word = self._names(number)[-1]
        self._handles.setdefault(number, []).append((tensor, word, True))
        return word


def _operator(call: Call) -> tuple[Any, list[Any]]:
    """Return an operator of torch, and the arguments that its schema declares.

    Raises:
        NotTimeable: this torch has no operator of this name, or the operator would read or write a file.
    """
    namespace, _, name = call.op.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if namespace else None
    operator = getattr(packet, call.overload or "default", None)
    if operator is None:
        description = (
            "an ONNX node, not an operator of torch" if namespace == "onnx" else "not an operator of this torch"
        )
        raise NotTimeable(f"{call.op} is {description}")
    declared = list(operator._schema.arguments)
    if any(
        word in argument.name
        for argument in declared
        for word in ("file", "path", "uri")
        if "str" in str(argument.type)
    ):
        raise NotTimeable(f"{call.op} opens files")
    return operator, declared


def _constant(declared: Any, value: Any) -> Any:
    """Return a non-tensor argument as the operator takes it: a graph stores types and layouts by name."""
    if isinstance(value, tuple):
        return [_constant(declared, element) for element in value]
    if isinstance(value, str) and "str" not in str(declared.type):
        if value.startswith(OBJECT):
            raise NotTimeable(f"its argument {declared.name} is an {value}")
        constant = getattr(torch, value, None)
        if constant is None:
            raise NotTimeable(f"the argument {declared.name} is {value!r}, which torch does not have")
        return constant
    return value


def _contiguous(tensor: Tensor) -> tuple[int, ...]:
    lengths = tensor.shape or ()
    return tuple(prod(lengths[dim + 1 :]) for dim in range(len(lengths)))


def _flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor's whole storage."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors in a new storage, with the same layout as in their own."""
    storage = _flat_storage(tensors[0]).clone()
    copies = []
    for tensor in tensors:
        flat_ = storage if storage.dtype is tensor.dtype else storage.view(tensor.dtype)
        copies.append(flat_.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return copies
