"""Shared weights in a torch module: parameters become views of memory that no process can write.

Only parameters are shared. Buffers are written in training (running statistics) and are small, so each process has its
own copy of them. A parameter whose type differs from the file's is also copied, with `cast=True`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xsp.device import devices as known_devices
from xsp.device.contract import SHARED_ON
from xsp.errors import ShareError, first_line
from xsp.record.blocks import span
from xsp.scrub import plain
from xsp.share import client, devices, wire
from xsp.share.devices import DeviceMapping, DeviceWeights
from xsp.share.weights import StoredTensor, shards

TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

_live_mappings: weakref.WeakSet[client.Mapping | DeviceMapping] = weakref.WeakSet()

_READ_ONLY = "these weights are shared by several processes and cannot be written"
_REMEDY = "xsp.share.detach(module) makes them private to this process, so that they can be trained or changed"


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in shared memory of this process, which is read-only."""
    if tensor.is_meta:
        return False
    address = tensor.data_ptr()  # unified addressing: host and device addresses do not overlap
    return any(mapping.address <= address < mapping.address + mapping.nbytes for mapping in tuple(_live_mappings))


class SharedParameter(torch.nn.Parameter):
    """A parameter in shared memory: it takes no gradient, and its writing methods raise an error.

    Writes below Python (an optimizer's fused step, NumPy's view) are stopped by the system: SIGSEGV in the process that
    writes. On a device nothing stops them.
    """

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse gradients.

        Raises:
            RuntimeError: gradients are requested, and the memory is shared.
        """
        if requires_grad and is_shared(self):
            raise RuntimeError(f"{_READ_ONLY}, so they cannot be trained; {_REMEDY}")
        return super().requires_grad_(requires_grad)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad" and value:
            self.requires_grad_()
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.detach().clone(), requires_grad=False)
        return memo[id(self)]


def _refusing_method(name: str) -> Callable[..., Any]:
    inner = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_shared(self):
            raise RuntimeError(f"{name}: {_READ_ONLY}; {_REMEDY}")
        return inner(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Call `torch.Tensor.{name}`, unless that would write shared weights."
    return method


_ALLOWED_METHODS = {"requires_grad_", "retain_grad_", "share_memory_", "rename_", "detach_", "as_strided_"}

for _name in dir(torch.Tensor):
    _writes = _name.endswith("_") and not _name.startswith("_") and _name not in _ALLOWED_METHODS
    if _writes or _name == "__setitem__" or (_name.startswith("__i") and f"__{_name[3:]}" in dir(torch.Tensor)):
        setattr(SharedParameter, _name, _refusing_method(_name))


@dataclass(frozen=True)
class Attachment:
    """The result of `attach`. A process is attached as long as one of the attached parameters exists."""

    key: str
    """Key of the weights, `sha256:` and digits; several keys with commas if the weights are in shards."""

    hit: bool
    """Whether all of the weights were in the store already."""

    shared: int
    """Number of parameters that are views of the shared memory."""

    shared_bytes: int
    private: dict[str, str]
    """Names of parameters and buffers that are copies of this process, with the reason."""

    private_bytes: int
    unused: tuple[str, ...]
    """Names in the file that the module does not have (with `strict=False`)."""


def attach(
    module: torch.nn.Module,
    source: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    strict: bool = True,
    cast: bool = False,
    folder: Path | None = None,
    patience_s: float = client.PATIENCE_S,
) -> Attachment:
    """Make the parameters of a module read-only views of weights in the store of this machine, and call `eval()` on it.

    The module may be on the meta device, or from `empty()`; otherwise the memory of its parameters is freed. If
    anything does not match, the module is not changed. Tied parameters stay tied.

    Args:
        module: on the CPU, or without values; or on the device.
        source: a safetensors file; the index of its shards (`model.safetensors.index.json`); a folder that contains one
            of these; or the key `sha256:…` of weights in the store.
        device: such as `cuda:0`, which the store serves (`xsp share serve --device 0`): the parameters become views of
            memory there, and buffers are moved there. None for memory of the host.
        strict: refuse names in the file that the module does not have.
        cast: copy parameters that have another type in the file, instead of refusing them.
        folder: directory of the store's socket, see `xsp.share.wire.directory`.
        patience_s: how long to wait for the store, in seconds.

    Raises:
        ShareError: there is no store, the file is invalid, or it does not match the module; the message says why.
    """
    name = os.fsdecode(source)
    with span("share.attach"):
        weights = attached(name, device, folder, patience_s)
        with span("share.assign"):
            return _assign(module, weights, name, strict, cast)


def attached(
    name: str,
    device: str | torch.device | None,
    folder: Path | None = None,
    patience_s: float = client.PATIENCE_S,
) -> Sequence[SharedWeights]:
    """Attach this process to weights, one entry for each shard; arguments and errors as in `attach`."""
    ordinal = None if device is None else _ordinal(device)
    target = None if ordinal is None else known_devices.sharing_device(ordinal).sharing()
    on_host = [client.attach(path, folder, patience_s) for path in shards(name)]
    if target is None:
        return on_host
    return [devices.attach(weights, target, name, folder, patience_s) for weights in on_host]


def _ordinal(device: str | torch.device) -> int | None:
    """Return the ordinal of a device; None for the host.

    Raises:
        ShareError: memory of this device cannot be shared.
    """
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ShareError(f"device={device!r}: {first_line(error)}") from None
    if resolved.type == "cpu":
        return None
    known = known_devices.named_by_torch(resolved.type, resolved.index or 0)
    obstacles = [known_device.sharing_obstacle() for known_device in known]
    if all(obstacles):
        raise ShareError(f"device={str(device)!r}: {obstacles[0] if obstacles else SHARED_ON}")
    if resolved.index is not None:
        return resolved.index
    try:
        return torch.empty(0, device=resolved).device.index
    except (RuntimeError, AssertionError) as error:
        raise ShareError(f"device={str(device)!r}: {first_line(error)}") from None


SharedWeights = client.AttachedWeights | DeviceWeights
"""Weights that this process is attached to, on the host or on a device."""

Slot = tuple[torch.nn.Module, str]
"""A module, and the name of a tensor in it."""


def _assign(
    module: torch.nn.Module, attached_weights: Sequence[SharedWeights], source: str, strict: bool, cast: bool
) -> Attachment:
    """Put the attached weights into a module.

    Raises:
        ShareError: they do not match the module.
    """
    device = _device_of(attached_weights[0])
    parameters, buffers, valueless_buffers, moved_buffers = _slots(module, device)
    available = _available(attached_weights, source)
    groups: dict[int, list[str]] = {}
    for name, (owner, attribute) in parameters.items():
        groups.setdefault(id(owner._parameters[attribute]), []).append(name)
    unused = tuple(name for name in available if name not in parameters and name not in buffers)
    label = f"{source} and {type(module).__name__}"
    missing = [", ".join(names) for names in groups.values() if not any(name in available for name in names)]
    missing += [name for name in buffers if name not in available]
    _check_names(label, missing, unused if strict else (), valueless_buffers)
    assignments: list[tuple[list[Slot], Any]] = []
    private: dict[str, str] = {}
    shared_bytes = private_bytes = shared_count = 0
    _live_mappings.update(weights.mapping for weights in attached_weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        for names in groups.values():
            owner, attribute = parameters[names[0]]
            (weights, first), *rest = [available[name] for name in names if name in available]
            target: Any = owner._parameters[attribute]
            view = _checked_view(weights, first, target, label)
            for tied_weights, tied in rest:
                if tied.dtype != first.dtype or not torch.equal(view, _checked_view(tied_weights, tied, target, label)):
                    raise ShareError(f"{label}: {first.name} and {tied.name} are tied, but differ in the file")
            if view.dtype != target.dtype:
                if not cast:
                    raise ShareError(
                        f"{label}: {plain(first.name)} is {_type(view)} in the file and {_type(target)} in the module; "
                        f"convert the module (module.to({view.dtype})), or pass cast=True for a private copy"
                    )
                private_copy = torch.nn.Parameter(view.to(target.dtype), requires_grad=False)
                private[first.name] = f"{_type(view)} in the file, {_type(private_copy)} here"
                private_bytes += private_copy.nbytes
                assignments.append(([parameters[name] for name in names], private_copy))
                continue
            shared_count += 1
            shared_bytes += first.nbytes
            assignments.append(([parameters[name] for name in names], SharedParameter(view, requires_grad=False)))
        for name, (owner, attribute) in buffers.items():
            buffer: Any = owner._buffers[attribute]
            buffer_copy = _checked_view(*available[name], buffer, label).to(buffer.dtype, copy=True)
            private[name] = "a buffer"
            private_bytes += buffer_copy.nbytes
            assignments.append(([(owner, attribute)], buffer_copy))
    assignments += [([(owner, attribute)], owner._buffers[attribute].to(device)) for owner, attribute in moved_buffers]  # type: ignore[union-attr]
    for slots, tensor in assignments:
        for owner, attribute in slots:
            (owner._parameters if attribute in owner._parameters else owner._buffers)[attribute] = tensor
    if any(submodule.training for submodule in module.modules()):
        module.eval()
    _refuse_training(module)
    keys = ",".join(f"sha256:{weights.key}" for weights in attached_weights)
    hit = all(weights.hit for weights in attached_weights)
    return Attachment(keys, hit, shared_count, shared_bytes, private, private_bytes, unused)


def _available(attached_weights: Sequence[SharedWeights], source: str) -> dict[str, tuple[SharedWeights, StoredTensor]]:
    """Return the tensors of attached weights by name.

    Raises:
        ShareError: two shards have a tensor of the same name.
    """
    counts = Counter(tensor.name for weights in attached_weights for tensor in weights.tensors)
    duplicates = [name for name, count in counts.items() if count > 1]
    if duplicates:
        raise ShareError(f"{source}: more than one shard has {_first_names(duplicates)}")
    return {tensor.name: (weights, tensor) for weights in attached_weights for tensor in weights.tensors}


def _check_names(label: str, missing: Sequence[str], unused: Sequence[str], valueless_buffers: Sequence[str]) -> None:
    """Raise a ShareError if the file or the module lacks tensors, or a buffer has no values."""
    if missing:
        raise ShareError(f"{label}: the file lacks {_first_names(missing)}; nothing was changed")
    if unused:
        raise ShareError(f"{label}: the module has no place for {_first_names(unused)}; pass strict=False to ignore it")
    if valueless_buffers:
        raise ShareError(
            f"{label}: no file has the buffers {_first_names(valueless_buffers)}, and the module has no values for "
            "them; build it in `with xsp.share.empty():`, which creates buffers, instead of on the meta device, or "
            "with its values if it computes these buffers from them (Swin of timm)"
        )


def _slots(
    module: torch.nn.Module, device: torch.device
) -> tuple[dict[str, Slot], dict[str, Slot], list[str], list[Slot]]:
    """Return the places of a module's parameters and of its persistent buffers, by name, and of non-persistent buffers.

    Of the latter: names of those without values (on the meta device), and places of those to be moved to the device.

    Raises:
        ShareError: a parameter cannot be replaced: it is on another device, not a plain tensor, or not initialised yet.
    """
    parameters: dict[str, Slot] = {}
    buffers: dict[str, Slot] = {}
    valueless_buffers: list[str] = []
    moved_buffers: list[Slot] = []
    for path, submodule in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            is_plain = type(parameter) is torch.nn.Parameter and parameter.layout == torch.strided
            if not is_plain and isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ShareError(f"{prefix}{name}: has no shape before the first call (a lazy module); call it once")
            if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
                raise ShareError(
                    f"{prefix}{name}: is on {parameter.device}, and the shared weights are on {device}; pass "
                    f"device={str(parameter.device)!r}, which the store has to serve, or move the module to the CPU"
                )
            if not is_plain and (type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided):
                raise ShareError(f"{prefix}{name}: is {type(parameter.data).__name__}, not a plain tensor")
            parameters[prefix + name] = submodule, name
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            if name not in submodule._non_persistent_buffers_set:
                buffers[prefix + name] = submodule, name
            elif buffer.device.type == "meta":
                valueless_buffers.append(prefix + name)
            elif device.type != "cpu" and buffer.device != device:
                moved_buffers.append((submodule, name))
    return parameters, buffers, valueless_buffers, moved_buffers


def _checked_view(weights: SharedWeights, tensor: StoredTensor, target: Any, label: str) -> torch.Tensor:
    """Return the view of a tensor.

    Raises:
        ShareError: its shape differs from that of the parameter or buffer.
    """
    if tensor.shape != target.shape:
        raise ShareError(
            f"{label}: {plain(tensor.name)} is {list(tensor.shape)} in the file and {list(target.shape)} in the module"
        )
    return view_of(weights, tensor)


def view_of(weights: SharedWeights, tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor of attached weights, as a view, which keeps the attachment alive."""
    dtype = TYPES[tensor.dtype]
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype, device=_device_of(weights))
    if isinstance(weights, DeviceWeights):
        part = _bytes_tensor(weights)[tensor.offset : tensor.offset + tensor.nbytes]
        return part.view(dtype).view(tensor.shape)
    count = tensor.nbytes // dtype.itemsize
    return torch.frombuffer(weights.array, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)


def _device_of(weights: SharedWeights) -> torch.device:
    return _bytes_tensor(weights).device if isinstance(weights, DeviceWeights) else torch.device("cpu")


def _bytes_tensor(weights: DeviceWeights) -> torch.Tensor:
    """Return all bytes of weights on a device as one tensor, which is created once."""
    if weights.bytes_tensor is None:
        weights.bytes_tensor = bytes_on_device(weights.mapping)
    bytes_tensor: torch.Tensor = weights.bytes_tensor
    return bytes_tensor


def bytes_on_device(mapping: DeviceMapping) -> torch.Tensor:
    """Return the bytes of a mapping as a tensor, which keeps the mapping alive."""
    tensor: torch.Tensor = known_devices.of(mapping.device.label).shared(mapping)
    return tensor


def _first_names(names: Any) -> str:
    text = ", ".join(plain(name)[:100] for name in list(names)[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Refuses:
    """`module.train` of a module with shared weights. It is an object, so that the module can be copied and pickled."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        module = self._module()
        assert module is not None
        if mode and any(
            isinstance(parameter, SharedParameter) and is_shared(parameter) for parameter in module.parameters()
        ):
            raise RuntimeError(f"{type(module).__name__}: {_READ_ONLY}, so it cannot be trained; {_REMEDY}")
        return type(module).train(module, mode)

    def __reduce__(self) -> Any:
        return _Refuses, (self._module(),)  # the copy of a module gets the copy of its weakly referenced module


def _refuse_training(module: torch.nn.Module) -> None:
    """Replace `train` of a module by a refusal, and guard the state dicts of its modules."""
    module.__dict__["train"] = _Refuses(module)
    for submodule in module.modules():
        if _guarded not in submodule._state_dict_hooks.values():
            submodule._register_state_dict_hook(_guarded)


def _guarded(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put shared parameters into a state dict instead of views, which any module with them could write.

    So `load_state_dict(…, assign=True)` of a module that is to be trained raises, instead of a crash at its first step.
    """
    del metadata
    for name, parameter in module._parameters.items():
        if prefix + name in state and isinstance(parameter, SharedParameter) and is_shared(parameter):
            state[prefix + name] = parameter


def detach(module: torch.nn.Module) -> int:
    """Copy the shared weights of a module, so that they can be trained; return the number of copied bytes."""
    copies: dict[int, torch.nn.Parameter] = {}
    copied_bytes = 0
    for submodule in module.modules():
        submodule.__dict__.pop("train", None)
        for name, parameter in submodule._parameters.items():
            if isinstance(parameter, SharedParameter):
                if id(parameter) not in copies:
                    trainable = parameter.is_floating_point() or parameter.is_complex()
                    copies[id(parameter)] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=trainable)
                    copied_bytes += parameter.nbytes
                submodule._parameters[name] = copies[id(parameter)]
    return copied_bytes


def put(weights: Mapping[str, torch.Tensor], *, folder: Path | None = None) -> str:
    """Copy a state dict into the store and return its key, `sha256:…`, which `attach` accepts as a source.

    Nothing is written to a disk: weights that the store evicts have to be put there again.

    Raises:
        ShareError: there is no store, it is full, or a value of the state dict is not a tensor.
    """
    file = _in_safetensors(weights)
    try:
        return f"sha256:{client.attach(file, folder).key}"
    finally:
        os.close(file)


def _in_safetensors(weights: Mapping[str, torch.Tensor]) -> int:
    """Return the descriptor of memory that holds a state dict in safetensors format.

    Raises:
        ShareError: the state dict has a value that the format does not support.
    """
    from safetensors.torch import save

    supported = set(TYPES.values())
    for name, tensor in weights.items():
        label = f"the state dict cannot be shared: {plain(str(name))[:100]}"
        if not isinstance(tensor, torch.Tensor):
            raise ShareError(f"{label} is {type(tensor).__name__}, not a tensor (as in packed and quantised layers)")
        if tensor.is_meta:
            raise ShareError(f"{label} has no values: it is on the meta device")
        if tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in supported:
            kind = "nested" if tensor.is_nested else f"{_type(tensor)}, {tensor.layout}"
            raise ShareError(f"{label} is {kind}; only dense tensors of plain types can be")
    try:
        return wire.in_memory(
            save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()})
        )
    except (AttributeError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ShareError(f"the state dict cannot be shared: {first_line(error)}") from error


class _EmptyBlocks(threading.local):
    """Number of `empty` blocks that this thread is in."""

    blocks = 0


_thread_blocks = _EmptyBlocks()
_original_method: list[Callable[..., None]] = []
"""The original `register_parameter`, saved when the first thread enters a block."""

_replacement_lock = threading.Lock()
_blocks = 0


def _register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    """Call `torch.nn.Module.register_parameter`, and drop the values if this thread is in an `empty` block."""
    _original_method[0](self, name, param)
    parameter = self._parameters[name]
    if (
        _thread_blocks.blocks
        and parameter is not None
        and parameter.device.type != "meta"
        and type(parameter) is torch.nn.Parameter
    ):
        self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build modules without memory for their parameters, but with their buffers, for `attach` to fill.

    Weights are neither allocated nor initialised at random, which takes longer than loading for most models. Inside the
    block, `torch.nn.Module.register_parameter` is replaced; in other threads the replacement behaves like the original.
    """
    global _blocks
    with _replacement_lock:
        if not _blocks:
            _original_method[:] = [torch.nn.Module.register_parameter]
            torch.nn.Module.register_parameter = _register  # type: ignore[method-assign]
        _blocks += 1
    _thread_blocks.blocks += 1
    try:
        yield
    finally:
        _thread_blocks.blocks -= 1
        with _replacement_lock:
            _blocks -= 1
            if not _blocks:
                torch.nn.Module.register_parameter = _original_method[0]  # type: ignore[method-assign]
