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
from xsp.bench.inputs import NotTimeable, Rule
from xsp.bench.spec import CacheState, Spec, without_inputs
from xsp.graph.blocks import Block
from xsp.graph.node import OBJECT, Call, Tensor
from xsp.graph.recorder import flat

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
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context manager that applies the settings under which the block runs."""

    flush: torch.Tensor | None = None
    """Buffer that is overwritten before each call in state `cold`."""

    timed: Callable[[int], int] | None = None
    """Function that runs a number of calls and returns their nanoseconds, for work that times itself."""

    most_calls: int | None = None
    """Most calls per batch of work that times itself."""

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
        for storage, held in self.written:
            storage.copy_(held)

    def chill(self) -> None:
        """Fill the caches with other data, in state `cold`."""
        if self.flush is not None:
            self.flush.add_(1)


def timed_by_itself(timed: Callable[[int], int], most_calls: int | None = None) -> Prepared:
    """Return work that times itself, ready to be timed: `timed` returns the nanoseconds of a number of calls."""
    return Prepared(lambda: None, [()], timed=timed, most_calls=most_calls)


class Torch:
    """The runtime that prepares blocks of torch's operators."""

    name = "torch"

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int) -> Prepared:
        """Return a block with its inputs.

        Args:
            spec: spec to prepare.
            rotated_bytes: total bytes of the copies of weights in state `chain`, and of the buffer that is overwritten
                in state `cold`: more than the caches hold.
            limit_bytes: most bytes that inputs and outputs may take.

        Raises:
            NotTimeable: the block cannot be run on its own.
            MemoryError: the tensors exceed the limit.
        """
        written = Written(spec.block)
        copies = 1
        weight_bytes = sum(inputs.size(written.parameters[each]) for each in written.rotated)
        if spec.state is CacheState.CHAIN and weight_bytes:
            copies = max(1, min(MOST_COPIES, rotated_bytes // weight_bytes + 1))
        others = [each for each in written.parameters if each not in written.rotated]
        held = sum(inputs.size(written.parameters[each]) for each in others) + weight_bytes
        made = sum(tensor.bytes or 0 for call in spec.block.calls for tensor in call.outputs)
        if held * (2 if written.changed else 1) + made > limit_bytes:
            raise MemoryError(f"its tensors take {(held + made) / 2**30:.1f} GiB")
        if copies > 1:
            copies = max(1, min(copies, (limit_bytes - held - made) // weight_bytes))
        return self._made(spec, written, copies, rotated_bytes)

    def _made(self, spec: Spec, written: Written, copies: int, rotated_bytes: int) -> Prepared:
        values = inputs.Values()
        shared: dict[int, list[torch.Tensor]] = {}
        sets, kept = [], []
        for turn in range(copies):
            given: list[torch.Tensor] = []
            for number, tensors in written.parameters.items():
                if turn and number in written.rotated:
                    made = _copied(shared[number])
                elif turn:
                    made = shared[number]
                else:
                    made = shared[number] = values.storage(tensors, written.rules[number])
                if number in written.changed and (not turn or number in written.rotated):
                    whole = _whole(made[0])
                    kept.append((whole, whole.clone()))
                given += made
            sets.append(tuple(given))
        guessed = sorted({call.op for call in spec.block.calls if call.op in written.guessed})
        notes = f"inputs of {', '.join(guessed)} are zeros: no rule for their values is known" if guessed else ""
        return Prepared(written.function(), sets, kept, notes, flush=flushed(spec, rotated_bytes))


def flushed(spec: Spec, rotated_bytes: int) -> torch.Tensor | None:
    """Return the buffer that is overwritten before each call in state `cold`; None in other states."""
    return torch.zeros(rotated_bytes // 4) if spec.state is CacheState.COLD else None


def overhead(name: str) -> Prepared:
    """Return the call of a module or of an operator that does no work, ready to be timed.

    Raises:
        NotTimeable: there is no overhead of this name.
    """
    one = torch.zeros(1)
    if name == "overhead/module_call":
        return Prepared(torch.nn.Identity(), [(one,)])
    if name == "overhead/op_call":
        return Prepared(torch.ops.aten.alias.default, [(one,)])
    raise NotTimeable(f"there is no {name}")


class Written:
    """A block as the source of a Python function, and the tensors that are passed to it.

    The storages that calls use are known; the view of a storage is identified by shape and strides: if several views
    are equal, each is used once, in order (`q, k, v = qkv.unbind(0)`).
    """

    def __init__(self, block: Block) -> None:
        lacks = without_inputs(block)
        if lacks:
            raise NotTimeable(lacks)
        self.parameters: dict[int, list[Tensor]] = {}
        """Storage → the different tensors, in order, through which it is passed."""

        self.rules: dict[int, Rule] = {}
        self.guessed: set[str] = set()
        self.changed: set[int] = set()
        """Storages from outside that the block writes."""

        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"_flat": lambda value: tuple(flat(value)), "_as_strided": torch.as_strided}
        self._handles: dict[int, list[tuple[Tensor, str, bool]]] = {}
        self._extra: dict[int, int] = {}
        """Parts of a storage that are passed separately → the storage."""

        self._made: set[int] = set()
        for call, wires in zip(block.calls, block.wiring, strict=True):
            self._add(call, list(wires.reads), list(wires.returns), set(wires.writes))
        self.rotated = {each for each in self.parameters if self._extra.get(each, each) in block.weights}

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
        return [f"{label}_{place}" for place in range(len(self.parameters[number]))]

    def _add(self, call: Call, reads: list[int], returns: list[int], writes: set[int]) -> None:
        operator, declared = _operator(call)
        given = dict(call.arguments)
        missing = [each.name for each in declared if each.name not in given and not each.has_default_value()]
        if missing:
            raise NotTimeable(f"the argument {missing[0]} of {call.op} is not known")
        self._in_call: dict[tuple[int, Tensor], int] = {}
        turn = iter(reads)
        words = []
        resizes = torch.Tag.inplace_view in operator.tags
        for each in declared:
            if each.name not in given:
                continue
            word = self._word(call, each, given[each.name], turn, writes)
            if resizes and each.name == "self":
                word = f"{word}.detach()"
            words.append(f"{each.name}={word}" if each.kwarg_only else word)
        name = f"op{len(self._lines)}"
        self._constants[name] = operator
        self._lines.append(f"result = {name}({', '.join(words)})")
        self._made.update(number for number in {*returns, *writes} if number not in self.parameters)
        if not returns:
            return
        single = len(operator._schema.returns) == 1 and str(operator._schema.returns[0].type) == "Tensor"
        label = f"r{len(self._lines)}"
        self._lines[-1] += f"; {label} = {'result' if single else '_flat(result)'}"
        for place, (number, tensor) in enumerate(zip(returns, call.outputs, strict=True)):
            self._handles.setdefault(number, []).append((tensor, label if single else f"{label}[{place}]", False))

    def _word(self, call: Call, declared: Any, value: Any, turn: Iterator[int], writes: set[int]) -> str:
        """Return the source of an argument."""
        if isinstance(value, Tensor):
            return self._tensor(call, declared.name, 0, value, next(turn), writes)
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            words = [
                self._tensor(call, declared.name, place, each, next(turn), writes)
                if isinstance(each, Tensor)
                else self._constant(each)
                for place, each in enumerate(value)
            ]
            return f"[{', '.join(words)}]"
        return self._constant(_constant(declared, value))

    def _constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _tensor(self, call: Call, name: str, place: int, tensor: Tensor, number: int, writes: set[int]) -> str:
        if number in writes and number not in self._made:
            self.changed.add(number)
        handles = self._handles.get(number, [])
        equal = [(at, each) for at, each in enumerate(handles) if each[0] == tensor]
        if equal:
            at, (_, word, used) = next(((at, each) for at, each in equal if not each[2]), equal[-1])
            handles[at] = (tensor, word, True)
            again = self._in_call.get((number, tensor), 0)
            self._in_call[number, tensor] = again + 1
            if used and again and tensor.stride is not None and number in self.parameters:
                # equal tensors in one call are different parts of a storage, interleaved: no two of them are the same
                extra = -len(self._extra) - 1
                self._extra[extra] = number
                return self._outside(call, name, place, tensor, extra)
            return word
        if number in self._made:
            word = handles[-1][1] if handles else "None"
            lengths, strides = self._constant(tensor.shape), self._constant(tensor.stride or _contiguous(tensor))
            return f"_as_strided({word}, {lengths}, {strides})"
        self._in_call[number, tensor] = 1
        return self._outside(call, name, place, tensor, number)

    def _outside(self, call: Call, name: str, place: int, tensor: Tensor, number: int) -> str:
        """Return the name of a tensor from outside, and add the tensor to the parameters of the function."""
        known = self.parameters.setdefault(number, [])
        known.append(tensor)
        how = inputs.rule(call, name, place)
        first = self.rules.setdefault(number, how)
        if how.guessed and not inputs.dtype(tensor).is_floating_point:
            self.guessed.add(call.op)
        if first == Rule() and how != first:
            self.rules[number] = how
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
        what = "an ONNX node, not an operator of torch" if namespace == "onnx" else "not an operator of this torch"
        raise NotTimeable(f"{call.op} is {what}")
    declared = list(operator._schema.arguments)
    if any(word in each.name for each in declared for word in ("file", "path", "uri") if "str" in str(each.type)):
        raise NotTimeable(f"{call.op} opens files")
    return operator, declared


def _constant(declared: Any, value: Any) -> Any:
    """Return a non-tensor argument as the operator takes it: a graph stores types and layouts by name."""
    if isinstance(value, tuple):
        return [_constant(declared, each) for each in value]
    if isinstance(value, str) and "str" not in str(declared.type):
        if value.startswith(OBJECT):
            raise NotTimeable(f"its argument {declared.name} is an {value}")
        found = getattr(torch, value, None)
        if found is None:
            raise NotTimeable(f"the argument {declared.name} is {value!r}, which torch does not have")
        return found
    return value


def _contiguous(tensor: Tensor) -> tuple[int, ...]:
    lengths = tensor.shape or ()
    return tuple(prod(lengths[place + 1 :]) for place in range(len(lengths)))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor's whole storage."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors in a new storage, with the same layout as in their own."""
    whole = _whole(tensors[0]).clone()
    found = []
    for each in tensors:
        flat_ = whole if whole.dtype is each.dtype else whole.view(each.dtype)
        found.append(flat_.as_strided(each.shape, each.stride(), each.storage_offset()))
    return found
