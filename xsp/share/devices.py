"""What a client does for weights on a device: ask the store of the device, and open what it hands out, without torch.

What is attached several times in a process is opened once and counted. A child that was forked cannot use it, and
closes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from xsp import processes
from xsp.errors import ShareError
from xsp.record.blocks import span
from xsp.share import client, driver, wire

_MISSING = (
    "the store there does not serve {} ({{}}); end it, and start it with the device: xsp share serve --device {}. If "
    "what served the device was killed, end those who are attached to it, too: their memory there is undefined"
)


class _Opened(NamedTuple):
    """What an attachment has open."""

    device: driver.Device
    key: tuple[str, bytes]
    """The store and the handle."""

    connection: socket.socket


_addresses: dict[tuple[str, bytes], tuple[int, int]] = {}
"""Address, and number of attachments, of what this process has open."""

_lock = threading.Lock()
_closing: deque[_Opened] = deque()
"""What is to be closed by whoever has the lock: garbage is collected in the middle of anything."""


class DeviceMapping:
    """Weights on a device that are open in this process, with the connection that is their attachment.

    They can be written: nothing below Python stops that, as no mapping of a device is read only. It ends with the last
    view.
    """

    def __init__(
        self, device: driver.Device, generation: str, handle: bytes, nbytes: int, connection: socket.socket
    ) -> None:
        """Open a handle.

        Raises:
            ShareError: it cannot be opened.
        """
        self.device = device
        self.nbytes = nbytes
        opened = _Opened(device, (generation, handle), connection)
        with _lock:
            address, count = _addresses.get(opened.key) or (device.open(handle), 0)
            _addresses[opened.key] = address, count + 1
        self.address = address
        self._opened = opened
        self._pid = os.getpid()
        _close()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As a tensor takes it, which keeps this alive. It is said to be writable, since torch takes nothing else."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def __del__(self) -> None:
        if not hasattr(self, "_pid"):
            return
        if os.getpid() != self._pid:
            self._opened.connection.close()  # a forked child's copy of it
            return
        _closing.append(self._opened)
        _close()


def _close() -> None:
    """Close what has ended, unless another caller is about it."""
    while _closing and _lock.acquire(blocking=False):
        try:
            while _closing:
                device, key, connection = _closing.popleft()
                address, count = _addresses.pop(key)
                if count > 1:
                    _addresses[key] = address, count - 1
                    _let_go(connection)
                    continue
                try:
                    device.close(address)
                except ShareError:  # it stays attached until the process ends
                    _unclosed.append(connection)
                else:
                    _let_go(connection)
        finally:
            _lock.release()


_unclosed: list[socket.socket] = []
"""Connections of what could not be closed."""


def _forget() -> None:
    """Forget, in a forked child, what its parent has open."""
    global _lock
    _lock = threading.Lock()
    _addresses.clear()
    _closing.clear()


processes.in_children(_forget)


def _let_go(connection: socket.socket) -> None:
    """Tell the store of a device that this process has closed its memory, or never opened it, and hang up."""
    with contextlib.suppress(OSError):
        wire.send(connection, {"ask": "detach"})
    connection.close()


class DeviceHeld:
    """Weights on a device that this process is attached to."""

    def __init__(self, on_host: client.Held, answer: dict[str, Any], mapping: DeviceMapping) -> None:
        self.key = on_host.key
        self.hit: bool = answer["hit"]
        self.tensors = on_host.tensors
        self.mapping = mapping
        self.whole: Any = None
        """A tensor of all bytes, as `xsp.share.modules` makes it."""


def attach(
    held: client.Held,
    device: driver.Device,
    source: str,
    folder: Path | None = None,
    patience_s: float = client.PATIENCE_S,
) -> DeviceHeld:
    """Attach to weights on a device; the store of the device copies them there if it does not hold them.

    Args:
        held: the same weights on the host, which may be let go of afterwards.
        device: as this process counts them.
        source: what messages call them.
        folder: of the store's socket, see `xsp.share.wire.directory`.
        patience_s: how long to wait for the store, in seconds.

    Raises:
        ShareError: no store of the device runs, it has no room, or the memory cannot be opened; the message says why.
    """
    asked = {"ask": "attach", "key": held.key, "device": device.uuid, "source": source}
    missing = _MISSING.format(device.where, device.ordinal)

    def ask(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        try:
            return client.ask(connection, asked)
        except BaseException:
            _let_go(connection)
            raise

    connection, answer, _ = client.obtained(
        "share.device",
        lambda: client.connect(folder, patience_s, wire.device_socket(device.uuid), missing),
        ask,
    )
    with span("share.device.open"):
        handle = bytes.fromhex(answer["handle"])
        try:
            mapping = DeviceMapping(device, answer["generation"], handle, answer["nbytes"], connection)
        except BaseException:
            _let_go(connection)
            raise
        return DeviceHeld(held, answer, mapping)


def status(folder: Path | None = None) -> list[dict[str, Any]]:
    """Return what stores of devices hold and who is attached, one after the other.

    One that was killed has an `error` instead.

    Raises:
        ShareError: one of them is of another version, or does not answer.
    """
    found: list[dict[str, Any]] = []
    for name in wire.device_sockets(wire.directory(folder)):
        try:
            found.append(client.status(folder, name))
        except ShareError as error:
            found.append({"socket": name, "error": str(error)})
    return found


def evict(key: str, folder: Path | None = None) -> int:
    """Free what is on devices and attached to nobody, by the first digits of its key; `*` for all; return how many.

    Raises:
        ShareError: it is attached, or several begin so.
    """
    found = 0
    for each in status(folder):
        keys = [held["key"] for held in each.get("objects", ()) if key == "*" or held["key"].startswith(key)]
        if keys:
            found += client.evict(key, folder, wire.device_socket(each["device"]["uuid"]))["evicted"]
    return found


def check(folder: Path | None = None) -> list[dict[str, Any]]:
    """Have all of what is on devices compared with the store's memory; return a table for each object.

    What differs (`corrupted` says where) is given to nobody any more: who attaches from then on gets another copy.

    Raises:
        ShareError: a store of a device does not answer.
    """
    found: list[dict[str, Any]] = []
    for each in status(folder):
        if "error" in each:
            raise ShareError(each["error"])
        with client.connect(folder, name=wire.device_socket(each["device"]["uuid"])) as connection:
            told = client.told(connection, {"ask": "check"})
        found += [{"device": each["device"], **one} for one in told]
    return found
