"""The devices that are here, by identifier (`cpu`, `cuda:0`), from the entry points of `xsp.devices`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from xsp import plugins
from xsp.device import ceilings
from xsp.device.contract import SHARED_ON, Device, Substitutes
from xsp.device.processor import Processor
from xsp.errors import AnalysisError, DeviceError, PluginError, ShareError, nearest

GROUP = "xsp.devices"


def kinds() -> list[str]:
    """Return the kinds of devices that are known, present or not: `cpu`, `cuda`, `hip`."""
    return sorted({Processor.kind, *plugins.names(GROUP)})


def is_id(name: str) -> bool:
    """Return whether a name has the form of an identifier, `cuda` or `cuda:0`; else it may be that of a product."""
    return name.split(":")[0] in kinds()


def of(name: str) -> Device:
    """Return a device of this machine.

    Args:
        name: its identifier; without a number the first of its kind.

    Raises:
        DeviceError: there is no such device here; the message names those that are.
        PluginError: the entry point of its kind cannot be loaded.
    """
    kind, *numbers = name.split(":", 1)
    if name == Processor.kind:
        return Processor()
    if not is_id(name):
        raise DeviceError(f"there is no device {name!r}{nearest(name, kinds())}; here are {', '.join(ids())}")
    if (numbers and not numbers[0].isdecimal()) or kind == Processor.kind:
        raise DeviceError(f"{name!r} is not a device: write {kind}{':0' * (kind != Processor.kind)}")
    index, made = int(numbers[0] if numbers else 0), _class(kind)
    if index >= made.count():
        reason = made.absence() if not made.count() else ""
        raise DeviceError(f"there is no device {name} here{reason and f' ({reason})'}; here are {', '.join(ids())}")
    return made(index)


def present() -> list[Device]:
    """Return the devices of this machine, the processor first; kinds that cannot be loaded are left out."""
    return [Processor(), *(made(index) for made in _classes() for index in range(made.count()))]


def accelerators() -> list[Device]:
    """Return the devices of this machine beside the processor."""
    return [device for device in present() if not device.is_host]


_usable: set[Device] = set()
"""Devices that this process could use when it asked first."""


def obstacle(device: Device) -> str | None:
    """Return why a device cannot be used by this process, and what to do.

    It is asked until it is usable: later the work of this process would look like that of others.
    """
    if device in _usable:
        return None
    reason = device.obstacle()
    if reason is None:
        _usable.add(device)
    return reason


def used() -> list[Device]:
    """Return the accelerators that this process has initialised; it loads torch for none."""
    if "torch" not in sys.modules:
        return []
    return [made(index) for made in _classes() if made.is_used() for index in range(made.count())]


def libraries() -> dict[str, Any]:
    """Return versions of the libraries of all kinds of devices, see `xsp.device.contract.Device.libraries`."""
    return {name: version for made in _classes() for name, version in made.libraries().items()}


def may_be_here() -> bool:
    """Return whether this machine could have an accelerator, without loading torch."""
    return any(made.may_be_here() for made in _classes())


def operators(kind: str) -> Substitutes:
    """Return the operators of a kind, see `xsp.device.contract.Device.operators`; none if it is not known."""
    try:
        return _class(kind).operators() if is_id(kind) else {}
    except PluginError:
        return {}


def blocking_variables() -> dict[str, str]:
    """Return the environment variables by which launches wait for their kernels, on all kinds of devices."""
    return {name: value for made in _classes() for name, value in made.blocking_variables.items()}


def example() -> str:
    """Return an identifier for messages: that of an accelerator which is here, else of one that many have."""
    return next((device.id for device in accelerators()), "cuda:0")


def timed_elsewhere(command: str, product: str) -> str:
    """Return what to type so that a product which is not here has timings, given the command that takes them."""
    kind = ""
    with contextlib.suppress(AnalysisError):
        kind = ceilings.ceiling_by_user_name(product).kind
    where = f"{kind}:0" if kind else example()
    return f"{command} --device {where} where {product} is, and xsp bench --export there, --import here"


def sharing_device(ordinal: int) -> Device:
    """Return a device, present or not, of the kind whose memory processes share.

    Raises:
        ShareError: no kind shares its memory.
    """
    for made in _classes():
        if made.shares:
            return made(ordinal)
    raise ShareError(f"device {ordinal}: {SHARED_ON}")


def of_tensor(device: Any) -> Device | None:
    """Return the device of this machine on which torch has a tensor; None if xsp does not know it.

    Args:
        device: a `torch.device`, or its name; without a number the current one's first.
    """
    name = str(device)
    here = accelerators()
    found = next((each for each in here if name in (each.torch_name, each.torch_type)), None)
    return found or (Processor() if name == Processor.kind else None)


def named_by_torch(torch_type: str, index: int = 0) -> list[Device]:
    """Return the devices that torch calls so, present or not; kinds that cannot be loaded are left out."""
    devices = [Processor(), *(made(index) for made in _classes())]
    return [device for device in devices if device.torch_type == torch_type]


def captured_by(kind: str) -> str:
    """Return how a program captures its steps on a kind of device, in brackets; empty if that is not known."""
    try:
        how = _class(kind).captured_by if is_id(kind) else ""
    except PluginError:
        return ""
    return f" ({how})" if how else ""


def convolution_precision(kind: str) -> str | None:
    """Return in which precision torch computes convolutions of float32 on a device by default; None for float32."""
    try:
        return _class(kind).convolution_precision if is_id(kind) else None
    except PluginError:
        return None


def _classes() -> Iterator[type[Device]]:
    """Yield the kinds beside the processor; those that cannot be loaded are left out, and `xsp doctor` says why."""
    for kind in kinds():
        if kind != Processor.kind:
            with contextlib.suppress(PluginError):
                yield _class(kind)


def _class(kind: str) -> type[Device]:
    made: type[Device] = plugins.load(GROUP, kind)
    missing = getattr(made, "__abstractmethods__", None)
    if not (isinstance(made, type) and issubclass(made, Device)) or missing:
        reason = f"has no {', '.join(sorted(missing))}" if missing else "is no subclass of xsp.device.contract.Device"
        raise PluginError(f"{GROUP} plugin {kind!r} cannot be used: it {reason}")
    return made


def ids() -> list[str]:
    """Return the identifiers of the devices of this machine, the processor first."""
    return [device.id for device in present()]
