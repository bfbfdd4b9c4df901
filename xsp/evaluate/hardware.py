"""The device that a manifest asks for, by `hardware.gpu`: none, any, or part of a product's name."""

from __future__ import annotations

from xsp.device import devices
from xsp.device.contract import Device
from xsp.device.processor import Processor
from xsp.errors import ManifestError
from xsp.evaluate.manifest import Hardware

WITHOUT = ("", "none")


def accelerators() -> tuple[str, ...]:
    """Return the names of the accelerators of this machine."""
    return tuple(device.name for device in devices.accelerators())


def matches(pattern: str, text: str) -> bool:
    """Return whether a text contains all words of a pattern, in any case of letters."""
    return all(word in text.lower() for word in pattern.lower().split())


def asks_for_device(hardware: Hardware) -> bool:
    """Return whether a manifest asks for an accelerator; otherwise it is evaluated on the processor."""
    return hardware.gpu.lower() not in WITHOUT


def processor_note(hardware: Hardware) -> list[str]:
    """Return a note for a manifest that names no device on a machine that has one; `none` asks for the processor."""
    here = accelerators()
    if hardware.gpu or not here:
        return []
    names = ", ".join(dict.fromkeys(here))
    return [f"evaluated on the processor, not on {names}: hardware: {{gpu: any}} chooses the device"]


def torch_name(hardware: Hardware) -> str:
    """Return what torch calls the device of a manifest; errors as in `device_of`."""
    return device_of(hardware).torch_name


def device_of(hardware: Hardware) -> Device:
    """Return the device of a manifest: the first that it allows.

    Raises:
        ManifestError: there is none.
    """
    if not asks_for_device(hardware):
        return Processor()
    is_any = hardware.gpu.lower() == "any"
    for device in devices.accelerators():
        if is_any or matches(hardware.gpu, device.name):
            return device
    raise ManifestError(f"hardware.gpu: {hardware.gpu!r} is required, here are {', '.join(accelerators()) or 'none'}")
