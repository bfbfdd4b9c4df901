"""The device that a manifest asks for, by `hardware.gpu`: none, any, or part of a product's name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from xsp.device import devices
from xsp.device.contract import Device, Fault
from xsp.device.processor import Processor
from xsp.errors import ManifestError, XspError, causes, first_line
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


def usable(hardware: Hardware) -> Device:
    """Return the device of a manifest, for a model that is opened on it.

    Raises:
        ManifestError: there is none, or it is busy or cannot be used.
    """
    device = device_of(hardware)
    reason = None if device.is_host else devices.obstacle(device)
    if reason is not None:
        raise ManifestError(f"hardware.gpu: {reason}")
    return device


def remedy(device: Device | None, error: BaseException, smaller: str = "a smaller batch") -> str:
    """Return what to do about an error of a model on a device; empty if the device does not know it.

    Args:
        device: where the model is; None if that is unknown.
        error: what the model raised, or an error that this caused.
        smaller: what to give if its memory is too small.
    """
    if device is None:
        return ""
    for cause in causes(error):
        fault = device.fault(cause)
        if fault is Fault.OUT_OF_MEMORY:
            return f"; {device.id} has too little memory free: give {smaller}, or end what else uses it"
        if fault is Fault.LOST:
            return f"; {device.id} is lost for this process: run it again once the device answers (xsp doctor)"
    return ""


@contextlib.contextmanager
def opening(device: Device) -> Iterator[None]:
    """Turn an error of a device while a model is opened on it into one of the manifest, with what to do.

    Raises:
        ManifestError: the device has too little memory, or is lost.
    """
    try:
        yield
    except Exception as error:
        said = remedy(device, error, "a smaller model or precision")
        if not said:
            raise
        known = isinstance(error, XspError)
        reason = str(error) if known else f"model: cannot be opened on {device.id} ({first_line(error)})"
        raise ManifestError(f"{reason}{said}") from error


class EnergyCounter:
    """The energy counter of a device, whose failure is a hole in the result with a note, and ends no evaluation."""

    def __init__(self, device: Device | None) -> None:
        """Take the device whose counter is read; None for none."""
        self._device = device
        self.note = ""
        """Why it cannot be read, as a note for the result; empty if it can. It is not read again."""

    def joules(self) -> float | None:
        """Return what the device has used since some moment in the past; None if that is unknown."""
        if self._device is None or self.note:
            return None
        try:
            value = self._device.energy_joules()
            return None if value is None else float(value)
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            self.note = f"no energy: the counter of {self._device.id} cannot be read ({said})"
            self.note += remedy(self._device, error)
            return None

    def since(self, before: float | None) -> float | None:
        """Return what the device has used since a value of `joules`; None if that is unknown."""
        now = None if before is None else self.joules()
        if now is None or before is None or self._device is None:
            return None
        if not now >= before:  # a number that is none, too
            self.note = f"no energy: the counter of {self._device.id} went from {before:g} to {now:g} J"
            return None
        return now - before


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
