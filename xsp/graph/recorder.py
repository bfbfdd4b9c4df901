"""Recording of the calls of a step, by a mode of PyTorch's dispatcher. Imports torch: import it where it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from xsp.cost.held import elements_of
from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.modules import Modules
from xsp.graph.node import (
    OBJECT,
    OUTSIDE,
    Call,
    Edge,
    Graph,
    KnownBy,
    Node,
    NodeKind,
    Origin,
    Phase,
    Problem,
    Role,
    Source,
    Submodule,
    Tensor,
    Value,
)
from xsp.graph.regions import Region, is_exact, of_tensor, union
from xsp.graph.values import Flow
from xsp.graph.work import Write, write_of
from xsp.version import __version__

IGNORED_NAMESPACES = frozenset(["profiler", "prim", "rngprims"])
"""Vocabularies of the framework's internal annotations, which are not calls of the step."""

STATISTICS = frozenset(
    f"aten::{name}" for name in ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
"""Operators that change their running statistics in training, although their schemas do not declare it."""

INPLACE_DROPOUTS = frozenset(f"aten::{kind}dropout_" for kind in ("", "alpha_", "feature_", "feature_alpha_"))
"""Operators that do not write their input outside training, although their schemas declare it."""

_LOOK_AT_ALL, _LOOK_AT_RECENT = 64, 8
"""Number of nodes after which all storages are looked at, and of nodes whose storages are looked at each time."""

UNKNOWN_RESULT = object()
"""Default for the result of a step: it is unknown."""

COMMUNICATION_NAMESPACES = frozenset(["c10d", "_c10d_functional", "c10d_functional", "symm_mem"])


class Argument(NamedTuple):
    """The declaration of an argument in an operator's schema."""

    name: str
    default: Any
    is_written: bool
    is_output: bool


@dataclass
class Access:
    """A tensor among the arguments of a call, and what the call does with it."""

    storage: Hashable
    region: Region
    through: int | None
    """Node that made this tensor."""

    is_exact: bool
    """Whether the tensor covers all of `region`."""

    write: Write | None = None
    """How the call changes it; None if it does not."""


@dataclass(frozen=True)
class Recording:
    """The recorded calls of a step."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    parameters: int
    """Elements of all parameters of the modules that ran; parameters that share memory count once."""

    outputs: tuple[Origin, ...] = ()
    outliving: tuple[int, ...] | None = None
    modules: tuple[Submodule, ...] = ()
    released: tuple[tuple[int, int], ...] | None = None

    def graph(
        self,
        name: str,
        source: Source,
        settings: Mapping[str, Any],
        *,
        parameters: int | None = None,
        problems: Iterable[Problem] = (),
    ) -> Graph:
        """Return the graph of the calls.

        Args:
            name: name of the model or program.
            source: origin of the graph.
            settings: known settings of the step; versions are added.
            parameters: number of parameters, if it is not that of the modules that ran.
            problems: problems of earlier attempts.

        Raises:
            GraphError: there is no call.
        """
        if not self.nodes:
            raise GraphError(f"{name} calls no operator")
        return Graph(
            name=name,
            source=source,
            nodes=self.nodes,
            edges=self.edges,
            values=self.values,
            known_by=KnownBy.STORAGE,
            counts="operators of ATen",
            parameters=self.parameters if parameters is None else parameters,
            settings={**settings, "torch": torch.__version__, "xsp": __version__},
            problems=tuple(problems),
            outputs=self.outputs,
            outliving=self.outliving,
            modules=self.modules,
            released=self.released,
        )


class Recorder(TorchDispatchMode):
    """A mode that records each operator that reaches the dispatcher.

    In the autograd mode of the workload, these are the outermost operators in the sense of a profiler: in inference
    mode composite operators stay whole, with gradients they decompose.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.flow = Flow()
        self.modules = Modules(self._register_module, lambda output: tuple(map(tensor_of, flat_tensors(output))))
        self.parameters = 0
        self._schemas: dict[Any, list[Argument]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._pinned: list[Any] = []
        self._producers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._origins: dict[tuple[Hashable, ...], Origin] = {}
        self._new_storages: set[Hashable] = set()
        self._outside_count = 0
        self._counted: set[tuple[Any, ...]] = set()
        self._regions: dict[tuple[Hashable, ...], Region] = {}
        self._last_access: dict[int, int] = {}
        """Address of a storage that existed at the last look → the last node that had it among its tensors."""

        self._released: dict[int, int] = {}
        self._by_sequence: list[tuple[int, str]] = []
        self._optimizer_depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in the body on this thread; all hooks are removed afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self.modules.tracking())
            for handle in (
                optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: self._optimizer(1)),
                optimizer_hooks.register_optimizer_step_post_hook(lambda *_: self._optimizer(-1)),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def set_role(self, values: Any, role: Role) -> None:
        """Set the role of the tensors in a value, before the step runs."""
        for tensor in flat_tensors(values):
            self._outside(tensor, role)

    def finish(self, result: Any = UNKNOWN_RESULT) -> Recording:
        """Return the recorded calls.

        Args:
            result: result of the step, which must still be held: storages alive now count as outliving the step.
        """
        for module in self.modules.roots:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    self.flow.mark(self._storage(parameter.grad), Role.GRADIENT)
        outputs: tuple[Origin, ...] = ()
        outliving: tuple[int, ...] | None = None
        if result is not UNKNOWN_RESULT:
            outputs = tuple(origin for origin in map(self._origin, flat_tensors(result)) if origin is not None)
            alive: list[Hashable] = [place for place, storage in self._storages.items() if not storage.expired()]
            alive += [("tensor", id(tensor)) for tensor in self._pinned]
            outliving = tuple(sorted(self.flow.current(storage) for storage in alive if self.flow.has_value(storage)))
        values = self.flow.final_values()
        edges, modules = self.flow.edges(), self._submodules()
        released = tuple(sorted(self._released.items()))
        return Recording(tuple(self.nodes), edges, values, self.parameters, outputs, outliving, modules, released)

    def _submodules(self) -> tuple[Submodule, ...]:
        return tuple(
            Submodule(
                path,
                type(module).__name__,
                sum(
                    {self._location(one): elements_of(one) for one in module.parameters() if not is_lazy(one)}.values()
                ),
                self.modules.outputs.get(path, ()),
            )
            for path, module in self.modules.all()
        )

    def _note_releases(self, node: int) -> None:
        """Note the storages that have ceased to exist after a node, or the ones before it that had them last.

        Most cease to exist soon after their last use, so only those that were used lately are looked at each time.
        """
        everything = node % _LOOK_AT_ALL == 0
        for address, last in list(self._last_access.items()) if everything else self._recent(node):
            if self._storages[address].expired():
                del self._last_access[address]
                self._released[self.flow.values[self.flow.current(address)].storage] = (
                    node if not everything else max(last, node - _LOOK_AT_ALL + 1)
                )

    def _recent(self, node: int) -> list[tuple[int, int]]:
        """Return the storages that the last nodes used; the newest are at the end of the dictionary."""
        found = []
        for address in reversed(self._last_access):
            if self._last_access[address] < node - _LOOK_AT_RECENT:
                break
            found.append((address, self._last_access[address]))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        namespace = getattr(func, "namespace", "")
        if schema is None or namespace in IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        declarations = self._declarations(func, schema)
        values = [
            args[place] if place < len(args) else kwargs.get(parameter.name, parameter.default)
            for place, parameter in enumerate(declarations)
        ]
        arguments = tuple(
            (name, keys.FLAGS.get(name, plain_argument(None if name in keys.EXTERNAL_ARGUMENTS else value)))
            for name, value in zip((parameter.name for parameter in declarations), values, strict=True)
        )
        phase = self._phase()
        number = len(self.nodes)
        self._note_releases(number - 1)
        role = Role.STATE if phase is Phase.OPTIMIZER else Role.CONSTANT
        accesses = [self._access(tensor, role) for tensor in flat_tensors(values)]
        if torch.Tag.inplace_view not in func.tags:  # such an operator changes the tensor, not its content
            self._mark_writes(accesses, schema.name, schema.overload_name, declarations, values)
        origins = tuple(map(self._origin, flat_tensors(values)))
        offsets = [_offset(tensor) for tensor in flat_tensors(values)]
        result = func(*args, **kwargs)
        module = self._module(phase)
        role = Role.GRADIENT if phase is Phase.BACKWARD else Role.ACTIVATION
        tensors = list(flat_tensors(result))
        offsets += [_offset(tensor) for tensor in tensors]
        reads = self._record_reads(number, accesses, tensors)
        writes = self._record_writes(number, accesses, role)
        returns, created = self._record_results(number, tensors, role)
        call = Call(
            schema.name,
            arguments,
            tuple(map(tensor_of, tensors)),
            schema.overload_name,
            keys.UNIFORM if schema.name in keys.VALUE_DEPENDENT else "",
        )
        kind = kind_of(func, namespace, tensors, writes=bool(writes), created=len(created))
        if kind in (NodeKind.RANDOM, NodeKind.COMMUNICATION):
            self.flow.add_order(number, kind)
        written = (*writes, *created)
        self.nodes.append(
            Node(
                call,
                keys.key(call),
                kind,
                module,
                phase,
                reads,
                returns,
                written,
                origins=origins,
                offsets=tuple(offsets),
            )
        )
        return result

    def _declarations(self, func: Any, schema: Any) -> list[Argument]:
        declarations = self._schemas.get(func)
        if declarations is None:
            declarations = self._schemas[func] = []
            for parameter in schema.arguments:
                is_written = parameter.alias_info is not None and parameter.alias_info.is_write
                is_output = is_written and parameter.kwarg_only
                declarations.append(Argument(parameter.name, parameter.default_value, is_written, is_output))
        return declarations

    def _access(self, tensor: Any, role: Role) -> Access:
        storage, region = self._outside(tensor, role), self._region(tensor)
        exact = _is_plain(tensor) and (region is None or is_exact(region, tensor.numel(), tensor.element_size()))
        # The node that made this tensor, which may be a view of a storage that another node wrote.
        reference, number = self._producers.get(id(tensor), (None, 0))
        return Access(storage, region, number if reference is not None and reference() is tensor else None, exact)

    def _mark_writes(
        self, accesses: list[Access], op: str, overload: str, declarations: list[Argument], values: list[Any]
    ) -> None:
        """Enter how a call changes the tensors among its arguments."""
        flags = dict(zip((parameter.name for parameter in declarations), values, strict=True))
        is_training = bool(flags.get("training") or flags.get("train"))
        updates_statistics, is_idle = op in STATISTICS and is_training, op in INPLACE_DROPOUTS and not is_training
        write = write_of(op, overload, flags)
        remaining = iter(accesses)
        for parameter, value in zip(declarations, values, strict=True):
            changes = parameter.is_written or (updates_statistics and parameter.name in ("running_mean", "running_var"))
            for _ in flat_tensors(value):
                access = next(remaining)
                if changes and not is_idle:
                    access.write = Write(reads=False, replaces=True) if parameter.is_output else write

    def _record_reads(self, number: int, accesses: list[Access], results: list[Any]) -> tuple[int, ...]:
        """Return the values behind the tensors among the arguments, with edges from those who wrote what is read."""
        covered: dict[Hashable, list[Region]] = {}
        writes = any(access.write is not None for access in accesses)
        for tensor in results:
            covered.setdefault(self._storage(tensor), []).append(self._region(tensor))
        is_view = bool(results) and not writes and all(self.flow.has_value(storage) for storage in covered)
        reads = []
        for access in accesses:
            if access.write is not None and not access.write.reads:
                reads.append(self.flow.current(access.storage))
                continue
            region = union(covered[access.storage]) if is_view and access.storage in covered else access.region
            reads.append(self.flow.read(number, access.storage, access.through, region))
        return tuple(reads)

    def _record_writes(self, number: int, accesses: list[Access], role: Role) -> list[int]:
        """Return the values that a call makes in existing storages."""
        return [
            self.flow.write(
                number,
                access.storage,
                role,
                None,
                access.region,
                through=access.through,
                replaces=access.write.replaces and access.is_exact,
            )
            for access in accesses
            if access.write is not None
        ]

    def _region(self, tensor: Any) -> Region:
        """Return what a tensor covers of its storage; all of it for layouts without addresses."""
        identity = self._identity(tensor)
        if len(identity) == 1 or not _is_plain(tensor):
            return None
        if identity not in self._regions:
            size = self._bytes(tensor)
            is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size
            self._regions[identity] = (
                None
                if is_whole
                else of_tensor(
                    tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size(), size
                )
            )
        return self._regions[identity]

    def _record_results(self, number: int, tensors: list[Any], role: Role) -> tuple[tuple[int, ...], list[int]]:
        """Return the values behind an operator's results, and the values that it made in new storages."""
        returns, created = [], []
        for place, tensor in enumerate(tensors):
            storage = self._storage(tensor)
            if self.flow.has_value(storage):
                returns.append(self.flow.current(storage))
            else:
                created.append(self.flow.write(number, storage, role, self._bytes(tensor)))
                returns.append(created[-1])
                self._new_storages.add(storage)
            self._origins[self._identity(tensor)] = (number, place)
            self._producers[id(tensor)] = (weakref.ref(tensor), number)
        return tuple(returns), created

    def _identity(self, tensor: Any) -> tuple[Hashable, ...]:
        """Return an identification of a tensor: two tensors with the same one are the same part of a storage."""
        storage = self._storage(tensor)
        if isinstance(storage, tuple):  # a layout without storage
            return (storage,)
        return (storage, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _origin(self, tensor: Any) -> Origin | None:
        """Return the name of a tensor; None if it is part of a storage made in the step, but no node returned it."""
        identity = self._identity(tensor)
        if identity not in self._origins:
            if identity[0] in self._new_storages:
                return None
            self._origins[identity] = self._outside_origin(tensor, self._outside_count)
            self._outside_count += 1
        return self._origins[identity]

    def _outside_origin(self, tensor: Any, number: int) -> Origin:
        return (OUTSIDE, number)

    def _outside(self, tensor: Any, role: Role) -> Hashable:
        storage = self._storage(tensor)
        if not self.flow.has_value(storage):
            self.flow.add_outside(storage, role, self._bytes(tensor))
        return storage

    def _storage(self, tensor: Any) -> Hashable:
        """Return a name for a tensor's storage: its address, which is not reused while this recorder lives."""
        try:
            storage = None if tensor.is_nested else tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and other layouts without storage
            storage = None
        if storage is None:
            self._pinned.append(tensor)
            return ("tensor", id(tensor))
        address = int(storage._cdata)
        if address not in self._storages:
            self._storages[address] = StorageWeakRef(storage)
        self._last_access.pop(address, None)
        self._last_access[address] = len(self.nodes)
        return address

    def _bytes(self, tensor: Any) -> int | None:
        try:
            if tensor.is_nested:
                return None
            return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes())  # a shard's, of a DTensor
        except (NotImplementedError, RuntimeError):
            return None

    # --- phase and module ---------------------------------------------------------------------------------

    def _optimizer(self, change: int) -> None:
        self._optimizer_depth += change

    def _phase(self) -> Phase:
        if self._optimizer_depth:
            return Phase.OPTIMIZER
        return Phase.FORWARD if torch._C._current_autograd_node() is None else Phase.BACKWARD

    def _module(self, phase: Phase) -> str:
        """Return the module that an operator belongs to; in a backward pass that of its forward operator."""
        path = self.modules.current
        if phase is Phase.FORWARD:
            self._by_sequence.append((torch._C._autograd._get_sequence_nr(), path))
            return path
        if path or phase is Phase.OPTIMIZER:
            return path
        return self._forward_module(torch._C._current_autograd_node())

    def _forward_module(self, node: Any) -> str:
        """Return the module of the forward operator of an autograd node; empty if unknown."""
        variable = getattr(node, "variable", None)  # only nodes that accumulate a parameter's gradient have it
        if variable is not None:
            return self.modules.owner(variable)
        sequence = node._sequence_nr()
        low, high = 0, len(self._by_sequence)
        while low < high:  # the first operator after which the number was higher made the node
            middle = (low + high) // 2
            if self._by_sequence[middle][0] > sequence:
                high = middle
            else:
                low = middle + 1
        return self._by_sequence[low][1] if low < len(self._by_sequence) else ""

    def _location(self, parameter: Any) -> tuple[Any, ...]:
        """Return what identifies a parameter: those that share memory have the same."""
        offset = 0 if parameter.layout is not torch.strided else parameter.storage_offset()
        return (self._storage(parameter), offset, *parameter.shape)

    def _register_module(self, module: Any) -> None:
        """Register the parameters and buffers of a module as weights and buffers."""
        for parameter in module.parameters():
            if is_lazy(parameter):
                continue
            self._outside(parameter, Role.WEIGHT)
            location = self._location(parameter)
            if location not in self._counted:
                self._counted.add(location)
                self.parameters += elements_of(parameter)
        for submodule in module.modules():
            for value in vars(submodule).values():
                if isinstance(value, torch.ScriptObject) and ("object", id(value)) not in self._counted:
                    self._counted.add(("object", id(value)))
                    tensors = tensors_in(value)
                    self._pinned.append(tensors)
                    for number, tensor in enumerate(tensors):
                        size = tensor.numel() * tensor.element_size()
                        self.flow.add_outside(("object", id(value), number), Role.WEIGHT, size)
                        self.parameters += tensor.numel()
        for buffer in module.buffers():
            self._outside(buffer, Role.BUFFER)


def kind_of(func: Any, namespace: str, tensors: list[Any], *, writes: bool, created: int) -> NodeKind:
    """Return the kind of an operator call, from its effects on storages."""
    if namespace in COMMUNICATION_NAMESPACES:
        return NodeKind.COMMUNICATION
    if not writes and not created:
        return NodeKind.VIEW if tensors else NodeKind.SYNC
    if namespace not in ("aten", "prims", "quantized"):
        return NodeKind.OPAQUE
    name = func._schema.name.partition("::")[2].lstrip("_")
    if not writes and name.startswith(("empty", "new_empty")):
        return NodeKind.CREATE
    if torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("scaled_dot_product"):
        return NodeKind.RANDOM
    return NodeKind.COMPUTE


def flat_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from flat_tensors(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from flat_tensors(element)


def tensor_of(tensor: Any) -> Tensor:
    """Return the description of a tensor that an operator sees; sequences of different lengths in one have no shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return Tensor(f"{dtype}:nested", None)
    shape = tuple(map(int, tensor.shape))
    if tensor.layout is not torch.strided:
        return Tensor(f"{dtype}:{str(tensor.layout).removeprefix('torch.')}", shape)
    return Tensor(dtype, shape, None if tensor.is_contiguous() else tuple(map(int, tensor.stride())))


def _offset(tensor: Any) -> int | None:
    """Return the offset of a tensor in its storage, in elements; None for a layout without addresses."""
    return int(tensor.storage_offset()) if _is_plain(tensor) else None


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor has addresses in a storage: it is dense, and of no other class."""
    dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return dense and not tensor.is_nested


def memory_of(tensor: Any) -> Hashable | None:
    """Return what identifies the memory of a dense tensor that is not empty; None for anything else."""
    if not _is_plain(tensor) or not tensor.numel():
        return None
    location = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*location, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in an object of the framework, such as the packed weights of a quantised layer, each once."""
    try:
        content = value.unpack() if hasattr(value, "unpack") else value.__getstate__()
        tensors = {(tensor.data_ptr(), tuple(tensor.shape)): tensor for tensor in _tensors_in(content)}
    except Exception:  # not every object reveals its content
        return []
    return list(tensors.values())


def _tensors_in(content: Any) -> Iterator[Any]:
    """Yield the tensors in the content of an object, also those of objects in it, as a recurrent cell has them."""
    if isinstance(content, torch.ScriptObject):
        yield from tensors_in(content)
    elif isinstance(content, (tuple, list)):
        for element in content:
            yield from _tensors_in(element)
    else:
        yield from flat_tensors(content)


def _summary(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'number'}"


def plain_argument(value: Any) -> Any:
    """Return an argument of an operator as plain values: tensors as descriptions, no objects of torch."""
    if isinstance(value, torch.Tensor):
        return tensor_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(plain_argument, value))
    if isinstance(value, (torch.device, torch.Generator)):
        return None
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.ScriptObject):
        kind: Any = value._type()
        return f"{OBJECT}{kind.name()} of {', '.join(map(_summary, tensors_in(value)))}".removesuffix(" of ")
    return str(value).removeprefix("torch.")
