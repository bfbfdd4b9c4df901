"""The contract of memory on a device that several processes share: what `xsp share` asks of it.

A kind of device whose memory can be shared says so with `xsp.device.contract.Device.shares`, and returns an object of
this contract from `sharing`, without torch.
"""

from __future__ import annotations

from typing import Protocol

from xsp.errors import ShareError


class DeviceMemoryError(ShareError):
    """A device that has too little memory left; the message is the reason and what to do."""


class DeviceLostError(ShareError):
    """A device that this process can no longer use; the message is the reason and what to do."""


class SharingDevice(Protocol):
    """A device of this process, and operations on its memory. It is thread-safe; all addresses and sizes are in bytes.

    Each method raises `ShareError` if the device or its driver fails; the message is the reason and what to do.
    """

    ordinal: int
    """Its number among the devices of its kind, as torch has it."""

    name: str
    """Its product's name."""

    uuid: str
    """Identifier that is the same in all processes."""

    granule: int
    """Bytes of the smallest allocation with a handle of its own."""

    monitor: str
    """What shows which processes use the device: a program's name."""

    @property
    def label(self) -> str:
        """Its identifier in messages."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of memory that can be shared.

        Raises:
            DeviceMemoryError: the device has no memory left.
        """

    def free(self, address: int) -> None:
        """Free memory, which no other process may have open."""

    def fill(self, address: int, source: int, nbytes: int) -> None:
        """Copy host memory to the device; the copy is complete after `synchronise`."""

    def read(self, address: int, target: int, nbytes: int) -> None:
        """Copy device memory to the host, and wait for the copy."""

    def synchronise(self) -> None:
        """Wait for all work that this process has submitted to the device."""

    def handle(self, address: int) -> bytes:
        """Return the handle with which other processes open the memory."""

    def open(self, handle: bytes) -> int:
        """Map memory shared by another process, and return the address."""

    def close(self, address: int) -> None:
        """Unmap memory from `open`, after all work that this process has submitted to the device."""
