"""The client side of weights on a device: request them from the device's store and open its memory, without torch.

A handle that a process attaches to several times is opened once and counted. A forked child cannot use the memory and
closes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xsp import processes
from xsp.errors import ShareError
from xsp.record.blocks import span
from xsp.share import client, driver, wire

_MISSING = (
    "the store there does not serve {} ({{}}); end it, and start it with the device: xsp share serve --device {}. If "
    "the process that served the device was killed, also end the attached processes: their memory is undefined"
)


class _Opened(NamedTuple):
    """What `_close` needs to end one attachment."""

    device: driver.Device
    key: tuple[str, bytes]
    """Generation of the store, and the handle."""

    connection: socket.socket


_addresses: dict[tuple[str, bytes], tuple[int, int]] = {}
"""Address and number of attachments of each handle that this process has open."""

_lock = threading.Lock()
_closing: deque[_Opened] = deque()
"""Attachments to close by the next thread that gets the lock; garbage collection may run `__del__` at any point."""


class DeviceMapping:
    """Weights on a device, opened in this process, with the connection that represents their attachment.

    They are writable: nothing below Python prevents it, because a device has no read-only mappings. The mapping ends
    with its last view.
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
        """The interface that torch reads; its tensor keeps this alive. Reported as writable, as torch requires."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def __del__(self) -> None:
        if not hasattr(self, "_pid"):
            return
        if os.getpid() != self._pid:
            self._opened.connection.close()  # a forked child only closes its copy of the connection
            return
        _closing.append(self._opened)
        _close()


def _close() -> None:
    """Close the attachments that have ended, unless another thread is already doing so."""
    while _closing and _lock.acquire(blocking=False):
        try:
            while _closing:
                device, key, connection = _closing.popleft()
                address, count = _addresses.pop(key)
                if count > 1:
                    _addresses[key] = address, count - 1
                    _detach(connection)
                    continue
                try:
                    device.close(address)
                except ShareError:  # the attachment lasts until the process ends
                    _unclosed.append(connection)
                else:
                    _detach(connection)
        finally:
            _lock.release()


_unclosed: list[socket.socket] = []
"""Connections of attachments whose memory could not be closed."""


def _forget() -> None:
    """Forget, in a forked child, the memory that its parent has open."""
    global _lock
    _lock = threading.Lock()
    _addresses.clear()
    _closing.clear()


processes.call_in_children(_forget)


def _detach(connection: socket.socket) -> None:
    """Tell the device's store that this process has closed its memory, or never opened it, and close the connection."""
    with contextlib.suppress(OSError):
        wire.send(connection, {"ask": "detach"})
    connection.close()


class DeviceWeights:
    """Weights on a device that this process is attached to."""

    def __init__(self, on_host: client.AttachedWeights, answer: dict[str, Any], mapping: DeviceMapping) -> None:
        self.key = on_host.key
        self.hit: bool = answer["hit"]
        self.tensors = on_host.tensors
        self.mapping = mapping
        self.whole: Any = None
        """A tensor of all bytes, which `xsp.share.modules` makes."""


def attach(
    held: client.AttachedWeights,
    device: driver.Device,
    source: str,
    folder: Path | None = None,
    patience_s: float = client.PATIENCE_S,
) -> DeviceWeights:
    """Attach to weights on a device; the device's store copies them there if it does not hold them.

    Args:
        held: the same weights on the host; the caller may release them afterwards.
        device: a device of this process.
        source: name of the weights in messages.
        folder: directory of the store's socket, see `xsp.share.wire.directory`.
        patience_s: seconds to wait for the store.

    Raises:
        ShareError: the device has no store, the store has no room, or the memory cannot be opened; see the message.
    """
    request = {"ask": "attach", "key": held.key, "device": device.uuid, "source": source}
    missing = _MISSING.format(device.where, device.ordinal)

    def ask(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        try:
            return client.ask(connection, request)
        except BaseException:
            _detach(connection)
            raise

    connection, answer, _ = client.request_attachment(
        "share.device",
        lambda: client.connect(folder, patience_s, wire.device_socket(device.uuid), missing),
        ask,
    )
    with span("share.device.open"):
        handle = bytes.fromhex(answer["handle"])
        try:
            mapping = DeviceMapping(device, answer["generation"], handle, answer["nbytes"], connection)
        except BaseException:
            _detach(connection)
            raise
        return DeviceWeights(held, answer, mapping)


def status(folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the contents and the attached processes of each device's store.

    A store that was killed, has another version or does not answer has an entry with an `error` instead.
    """
    states: list[dict[str, Any]] = []
    for name in wire.device_sockets(wire.directory(folder)):
        try:
            states.append(client.status(folder, name))
        except ShareError as error:
            states.append({"socket": name, "error": str(error)})
    return states


def evict(key: str, folder: Path | None = None, warn: Callable[[str], object] = lambda text: None) -> int:
    """Free unattached objects on devices, by the first digits of their key or `*` for all; return how many were freed.

    Args:
        key: the first digits, or `*`.
        folder: directory of the store's socket.
        warn: called with a message for each device's store that does not answer: nothing is freed there.

    Raises:
        ShareError: a process is attached to the object, or several keys begin with these digits.
    """
    evicted = 0
    for state in status(folder):
        if "error" in state:
            warn(f"{state['socket']}: {state['error']}")
        keys = [entry["key"] for entry in state.get("objects", ()) if key == "*" or entry["key"].startswith(key)]
        if keys:
            evicted += client.evict(key, folder, wire.device_socket(state["device"]["uuid"]))["evicted"]
    return evicted


def check(folder: Path | None = None) -> list[dict[str, Any]]:
    """Compare everything on the devices with the store's memory on the host; return a table for each object.

    An object that differs (`corrupted` says where) is no longer handed out: later clients get a new copy.

    Raises:
        ShareError: a device's store does not answer.
    """
    tables: list[dict[str, Any]] = []
    for state in status(folder):
        if "error" in state:
            raise ShareError(state["error"])
        with client.connect(folder, name=wire.device_socket(state["device"]["uuid"])) as connection:
            results = client.ask_large(connection, {"ask": "check"})
        tables += [{"device": state["device"], **result} for result in results]
    return tables
