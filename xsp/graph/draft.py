"""A graph that is being rewritten: its calls with the tensors between them, and the conversion back to a graph.

Values name storages, which several tensors may share, so rewriting relies on `Node.origins`: which node made each
tensor. The content of a storage, and its readers and writers, follow from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.node import (
    OUTSIDE,
    SIZES,
    Call,
    Graph,
    Node,
    NodeKind,
    Origin,
    Phase,
    Role,
    Tensor,
    Value,
    strides,
)
from xsp.graph.regions import Region, of_tensor, union
from xsp.graph.values import Flow
from xsp.graph.work import KEEPS_ELEMENTS, ON_LISTS, OVERWRITE, write_of

PREPARED = -2
"""Number in place of a node's: the tensor is made once from others, before all steps."""

Storage = tuple[int, int]
"""Name of a storage: its first tensor, or `OUTSIDE` with the number in the original graph."""


@dataclass(frozen=True)
class PreparedTensor:
    """A tensor that is made once from others: folded or joined weights."""

    tensor: Tensor
    recipe: str
    """`fold weight`, `fold bias`, `join`, or the name of a type."""

    sources: tuple[Origin | None, ...]
    options: tuple[Any, ...] = ()


@dataclass(frozen=True)
class DraftCall:
    """A call with the tensors that it takes."""

    call: Call
    kind: NodeKind
    module: str
    phase: Phase
    operands: tuple[Origin, ...]
    """Tensor of each of `call.inputs`."""

    aliases: tuple[int | None, ...]
    """For each output the input whose storage it shares; None for its own storage."""

    written_inputs: tuple[int, ...] = ()
    """Inputs whose storage the call writes."""

    place: int | None = None
    """Place in the original graph; None for an added call."""

    @property
    def op(self) -> str:
        """The operator without its vocabulary: `conv2d`."""
        return self.call.op.partition("::")[2]

    @property
    def computes(self) -> bool:
        """Whether the call does work."""
        return self.kind not in (NodeKind.VIEW, NodeKind.CREATE)

    def option(self, name: str) -> Any:
        """Return an argument by name; None if there is none."""
        return dict(self.call.arguments).get(name)

    def input_named(self, name: str) -> Origin | None:
        """Return the tensor passed for an argument; None if it is not a tensor."""
        number = 0
        for argument, value in self.call.arguments:
            count = tensors_in(value)
            if argument == name:
                return self.operands[number] if isinstance(value, Tensor) else None
            number += count
        return None

    @property
    def is_random(self) -> bool:
        """Whether the call draws random numbers, even if its operator does not always do so."""
        chance = self.option("dropout_p")
        return self.kind is NodeKind.RANDOM or (isinstance(chance, float) and chance > 0)

    @property
    def is_pure(self) -> bool:
        """Whether the call only returns tensors made from its inputs, and the same ones for the same inputs."""
        return self.kind in (NodeKind.COMPUTE, NodeKind.VIEW) and not self.written_inputs and not self.is_random


def tensors_in(value: Any) -> int:
    """Return the number of tensors in an argument."""
    if isinstance(value, Tensor):
        return 1
    return sum(map(tensors_in, value)) if isinstance(value, tuple) else 0


def with_inputs(call: Call, tensors: Sequence[Tensor]) -> Call:
    """Return a call with its inputs replaced by other tensors, in order."""
    remaining = iter(tensors)

    def substituted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(remaining)
        return tuple(map(substituted, value)) if isinstance(value, tuple) else value

    return replace(call, arguments=tuple((name, substituted(value)) for name, value in call.arguments))


class Draft:
    """The calls of a graph, which rules remove, add and rewire."""

    def __init__(self, graph: Graph) -> None:
        """Copy the calls of a graph.

        Raises:
            GraphError: the graph does not record which node made each tensor, or what outlives the step.
        """
        complete = all(len(node.origins) == len(node.call.inputs) and None not in node.origins for node in graph.nodes)
        if not complete or graph.outliving is None:
            raise GraphError(
                f"{graph.name}: this graph does not record which call made each tensor; a graph of a model does: "
                "xsp graph torchvision:NAME, timm:NAME, transformers:NAME, file.py:function"
            )
        self.graph = graph
        self.prepared: list[PreparedTensor] = []
        self.outputs: list[Origin] = list(graph.outputs)
        self.steps: dict[int, DraftCall] = {}
        self.order: list[int] = []
        self._outside: dict[Origin, Value] = {}
        self._outside_offsets: dict[Origin, int | None] = {}
        self._next_number = len(graph.nodes)
        storages: dict[int, Storage] = {}
        """Number of a storage in the graph → storage."""
        for place, node in enumerate(graph.nodes):
            read_storages = [graph.values[number].storage for number in node.reads]
            offsets = node.offsets or (None,) * len(node.reads)
            for origin, number, offset in zip(node.origins, node.reads, offsets, strict=False):
                assert origin is not None
                if origin[0] == OUTSIDE:
                    value = graph.values[number]
                    self._outside.setdefault(origin, value)
                    self._outside_offsets.setdefault(origin, offset)
                    storages.setdefault(value.storage, (OUTSIDE, value.storage))
            aliases: list[int | None] = []
            for output, number in enumerate(node.returns):
                storage = graph.values[number].storage
                aliases.append(read_storages.index(storage) if storage in read_storages else None)
                storages.setdefault(storage, (place, output))
            written_storages = {graph.values[number].storage for number in node.writes}
            changes = tuple(number for number, storage in enumerate(read_storages) if storage in written_storages)
            if node.call.op in (*OVERWRITE, *KEEPS_ELEMENTS) and not node.call.op.startswith(ON_LISTS):
                changes = changes[:1]  # others may be parts of the same storage, and are only read
            operands = tuple(origin for origin in node.origins if origin is not None)
            self.steps[place] = DraftCall(
                node.call, node.kind, node.module, node.phase, operands, tuple(aliases), changes, place
            )
            self.order.append(place)
        outliving = {
            storages[graph.values[number].storage]
            for number in graph.outliving
            if graph.values[number].storage in storages
        }
        self._outliving = outliving - {self.storage(origin) for origin in self.outputs}
        """Storages that outlive the step although the step does not return them."""

    # --- queries -------------------------------------------------------------------------------------------

    def tensor(self, origin: Origin) -> Tensor:
        """Return type, shape and strides of a tensor.

        Raises:
            LookupError: the tensor comes from outside, and no call reads it.
        """
        if origin[0] == PREPARED:
            return self.prepared[origin[1]].tensor
        if origin[0] >= 0:
            return self.steps[origin[0]].call.outputs[origin[1]]
        for step in self.in_order():
            for operand, tensor in zip(step.operands, step.call.inputs, strict=True):
                if operand == origin:
                    return tensor
        raise LookupError(origin)

    def storage(self, origin: Origin) -> Storage:
        """Return the storage of a tensor."""
        while origin[0] >= 0:
            step = self.steps[origin[0]]
            alias = step.aliases[origin[1]] if origin[1] < len(step.aliases) else None
            if alias is None:
                return origin
            origin = step.operands[alias]
        if origin[0] == PREPARED:
            return origin
        value = self._outside.get(origin)
        return (OUTSIDE, -1 - origin[1] if value is None else value.storage)  # a returned tensor may be read by no call

    def offset(self, origin: Origin) -> int | None:
        """Return the offset of a tensor in its storage, in elements; None if unknown."""
        if origin[0] < 0:
            return self._outside_offsets.get(origin)
        step = self.steps[origin[0]]
        if step.place is not None:
            offsets = self.graph.nodes[step.place].offsets
            return offsets[len(step.call.inputs) + origin[1]] if offsets else None
        alias = step.aliases[origin[1]] if origin[1] < len(step.aliases) else None
        return 0 if alias is None else None

    def _region(self, origin: Origin, tensor: Tensor, storage_bytes: int | None) -> Region:
        """Return what a tensor covers of its storage; all of it if that is unknown."""
        offset, item_bytes = self.offset(origin), SIZES.get(tensor.dtype or "")
        if offset is None or item_bytes is None or tensor.shape is None:
            return None
        return of_tensor(offset, tensor.shape, strides(tensor), item_bytes, storage_bytes)

    def role(self, origin: Origin) -> Role:
        """Return the role of a tensor in the step."""
        storage = self.storage(origin)
        if storage[0] == PREPARED:
            return Role.WEIGHT
        if storage[0] >= 0:
            return Role.ACTIVATION
        return next(value.role for value in self._outside.values() if value.storage == storage[1])

    def are_parameters(self, *origins: Origin | None) -> bool:
        """Return whether tensors are weights or buffers, which are known before all steps."""
        return all(origin is None or self.role(origin) in (Role.WEIGHT, Role.BUFFER) for origin in origins)

    def in_order(self) -> Iterator[DraftCall]:
        """Yield the calls in the order of execution."""
        return (self.steps[number] for number in self.order)

    def producer(self, origin: Origin | None) -> DraftCall | None:
        """Return the call that made a tensor; None if the tensor comes from outside."""
        return None if origin is None or origin[0] < 0 else self.steps[origin[0]]

    def web(self) -> Web:
        """Return the current readers and writers of all tensors and storages."""
        return Web(self)

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, step: DraftCall, before: int) -> int:
        """Insert a call before another one, and return its number."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.steps[number] = replace(step, place=None)
        self.order.insert(self.order.index(before), number)
        return number

    def prepare(self, prepared: PreparedTensor) -> Origin:
        """Add a tensor that is made once, and return its name."""
        if prepared not in self.prepared:
            self.prepared.append(prepared)
        return (PREPARED, self.prepared.index(prepared))

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove calls; nothing may read their results."""
        removed = set(numbers)
        self.order = [number for number in self.order if number not in removed]

    def redirect(self, replacements: dict[Origin, Origin]) -> None:
        """Make all readers of tensors read others, which have the same shape, type and strides."""

        def current(origin: Origin) -> Origin:
            while origin in replacements:
                origin = replacements[origin]
            return origin

        for number in self.order:
            step = self.steps[number]
            if any(origin in replacements for origin in step.operands):
                self.steps[number] = replace(step, operands=tuple(map(current, step.operands)))
        self.outputs = [current(origin) for origin in self.outputs]

    def sweep(self, *, keep: Callable[[DraftCall], bool] = lambda step: False) -> list[int]:
        """Remove the calls whose results are not read, and return their numbers."""
        web = self.web()
        unread = [number for number in self.order if number not in web.live and not keep(self.steps[number])]
        self.remove(unread)
        return unread

    # --- result -------------------------------------------------------------------------------------------

    def finish(self) -> tuple[Graph, dict[int, int]]:
        """Return the graph, and the place of each remaining call in it."""
        flow = Flow()
        places = {number: place for place, number in enumerate(self.order)}
        outside = {origin: number for number, origin in enumerate(dict.fromkeys(self._outside_operands()))}
        outside_values = {value.storage: value for value in self._outside.values()}
        outside_storages = {value.storage for value in outside_values.values()}
        sizes = {
            value.storage: value
            for value in self.graph.values
            if value.version == 0 and value.storage not in outside_storages
        }
        original = self._original_storages()
        nodes = []

        def region(origin: Origin, tensor: Tensor) -> Region:
            storage = self.storage(origin)
            value = outside_values.get(storage[1]) if storage[0] == OUTSIDE else sizes.get(original.get(storage, -1))
            whole = self.tensor(storage).bytes if value is None and storage[0] != OUTSIDE else None
            return self._region(origin, tensor, whole if value is None else value.bytes)

        def add_if_outside(storage: Storage, tensor: Tensor) -> None:
            if flow.has_value(storage):
                return
            if storage[0] == OUTSIDE:
                flow.add_outside(storage, outside_values[storage[1]].role, outside_values[storage[1]].bytes)
            elif storage[0] == PREPARED:
                flow.add_outside(storage, Role.WEIGHT, tensor.bytes)

        for place, number in enumerate(self.order):
            step = self.steps[number]
            reads = []
            write = write_of(step.call.op, step.call.overload, dict(step.call.arguments))
            through = [places[origin[0]] if origin[0] >= 0 else None for origin in step.operands]
            regions = [region(origin, tensor) for origin, tensor in zip(step.operands, step.call.inputs, strict=True)]
            covered: dict[Storage, list[Region]] = defaultdict(list)
            for output, tensor in enumerate(step.call.outputs):
                covered[self.storage((number, output))].append(region((number, output), tensor))
            for index, (origin, tensor) in enumerate(zip(step.operands, step.call.inputs, strict=True)):
                storage = self.storage(origin)
                add_if_outside(storage, tensor)
                if index in step.written_inputs and not write.reads:
                    reads.append(flow.current(storage))
                    continue
                is_view = step.kind is NodeKind.VIEW and storage in covered
                read_region = union(covered[storage]) if is_view else regions[index]
                reads.append(flow.read(place, storage, through[index], read_region))
            writes = [
                flow.write(
                    place,
                    self.storage(step.operands[index]),
                    Role.ACTIVATION,
                    None,
                    regions[index],
                    through=through[index],
                    replaces=write.replaces and self.offset(step.operands[index]) is not None,
                )
                for index in step.written_inputs
            ]
            returns = []
            for output, tensor in enumerate(step.call.outputs):
                storage = self.storage((number, output))
                if not flow.has_value(storage):
                    initial = sizes.get(original.get(storage, -1))
                    role = Role.ACTIVATION if initial is None else initial.role
                    writes.append(flow.write(place, storage, role, tensor.bytes if initial is None else initial.bytes))
                returns.append(flow.current(storage))
            if step.kind in (NodeKind.RANDOM, NodeKind.COMMUNICATION):
                flow.add_order(place, step.kind)
            origins = tuple(self._final_origin(origin, places, outside) for origin in step.operands)
            nodes.append(
                Node(
                    step.call,
                    keys.key(step.call),
                    step.kind,
                    step.module,
                    step.phase,
                    tuple(reads),
                    tuple(returns),
                    tuple(writes),
                    origins=origins,
                    offsets=tuple(
                        self.offset(origin)
                        for origin in (*step.operands, *((number, place) for place in range(len(step.call.outputs))))
                    ),
                )
            )
        kept = (*self.outputs, *(origin for origin in outside if self.storage(origin)[0] < 0))
        outliving = {*self._outliving, *map(self.storage, kept)}
        graph = replace(
            self.graph,
            nodes=tuple(nodes),
            edges=flow.edges(),
            released=None,
            values=flow.final_values(),
            outputs=tuple(self._final_origin(origin, places, outside) for origin in self.outputs),
            outliving=tuple(sorted(flow.current(storage) for storage in outliving if flow.has_value(storage))),
        )
        return graph, places

    def outside_names(self) -> list[Origin]:
        """Return the outside tensors of the finished graph by their names here, in the order of their numbers there."""
        return list(dict.fromkeys(self._outside_operands()))

    def _outside_operands(self) -> Iterator[Origin]:
        for step in self.in_order():
            yield from (origin for origin in step.operands if origin[0] < 0)
        yield from (origin for origin in self.outputs if origin[0] < 0)

    def _final_origin(self, origin: Origin, places: dict[int, int], outside: dict[Origin, int]) -> Origin:
        return (places[origin[0]], origin[1]) if origin[0] >= 0 else (OUTSIDE, outside[origin])

    def _original_storages(self) -> dict[Storage, int]:
        storages: dict[Storage, int] = {}
        for place, node in enumerate(self.graph.nodes):
            for output, number in enumerate(node.returns):
                storages.setdefault((place, output), self.graph.values[number].storage)
        return storages


class Web:
    """The readers and writers of tensors and storages in a draft; places are positions in its order."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.positions = {number: place for place, number in enumerate(draft.order)}
        self.readers: dict[Origin, list[int]] = defaultdict(list)
        """Tensor → calls that read it."""

        self.users: dict[Hashable, list[int]] = defaultdict(list)
        """Storage → calls that read a tensor in it."""

        self.writers: dict[Hashable, list[int]] = defaultdict(list)
        """Storage → calls that write to it after it was made."""

        for number in draft.order:
            step = draft.steps[number]
            for place, origin in enumerate(step.operands):
                storage = draft.storage(origin)
                if not self.readers[origin] or self.readers[origin][-1] != number:
                    self.readers[origin].append(number)
                if not self.users[storage] or self.users[storage][-1] != number:
                    self.users[storage].append(number)
                if place in step.written_inputs and number not in self.writers[storage][-1:]:
                    self.writers[storage].append(number)
        self.outliving = {*draft._outliving, *map(draft.storage, draft.outputs)}
        self.live = self._live()

    def is_written_after(self, storage: Storage, number: int) -> bool:
        """Return whether a storage is written after a call."""
        return any(self.positions[writer] > self.positions[number] for writer in self.writers.get(storage, ()))

    def is_written(self, storage: Storage) -> bool:
        """Return whether a storage is written after it was made."""
        return bool(self.writers.get(storage))

    def is_written_between(self, storage: Storage, first: int, last: int) -> bool:
        """Return whether a storage is written by a call between two others."""
        return any(
            self.positions[first] < self.positions[writer] < self.positions[last]
            for writer in self.writers.get(storage, ())
        )

    def outlives_step(self, storage: Storage) -> bool:
        """Return whether a storage still exists after the step, and may be read then."""
        return storage in self.outliving or storage[0] < 0

    def only_reader(self, origin: Origin) -> int | None:
        """Return the only call that uses a tensor's storage; None if there is no single one, or more may read it."""
        storage = self.draft.storage(origin)
        users = self.users.get(storage, [])
        if self.outlives_step(storage) or self.is_written(storage) or len(users) != 1:
            return None
        return users[0]

    def _live(self) -> set[int]:
        """Return the calls that have side effects, or on which later calls or outputs depend."""
        draft = self.draft
        makers: dict[Hashable, list[int]] = defaultdict(list)
        for storage, writers in self.writers.items():
            makers[storage] += writers
        pending = [number for number in draft.order if self._has_effects(draft.steps[number])]
        pending += [origin[0] for origin in draft.outputs if origin[0] >= 0]
        for number in draft.order:
            if any((number, place) in self.outliving for place in range(len(draft.steps[number].call.outputs))):
                pending.append(number)
        pending += [writer for storage in self.outliving for writer in makers.get(storage, ())]
        live: set[int] = set()
        while pending:
            number = pending.pop()
            if number in live:
                continue
            live.add(number)
            for origin in draft.steps[number].operands:
                if origin[0] >= 0:
                    pending.append(origin[0])
                position = self.positions[number]
                pending += [
                    writer for writer in makers.get(draft.storage(origin), ()) if self.positions[writer] < position
                ]
        return live

    def _has_effects(self, step: DraftCall) -> bool:
        """Return whether a call has an effect besides returning tensors."""
        if step.kind in (NodeKind.SYNC, NodeKind.COMMUNICATION, NodeKind.OPAQUE) or step.is_random:
            return True
        return any(self.draft.storage(step.operands[index])[0] < 0 for index in step.written_inputs)
