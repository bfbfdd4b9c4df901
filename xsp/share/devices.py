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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xsp import processes
from xsp.device.sharing import SharingDevice
from xsp.errors import ShareError
from xsp.record.blocks import span
from xsp.share import client, wire

_NO_DEVICE_STORE = (
    "the store there does not serve {} ({{}}); end it, and start it with the device: xsp share serve --device {}. If "
    "the process that served the device was killed, also end the attached processes: their memory is undefined"
)

START_AGAIN = "the host's store goes on: end it, and start it with the device: xsp share serve --device {}"
"""What to do if the store of a device ended alone, with the number of the device."""

_UNKNOWN_NUMBER = "0, or the device's other number (xsp doctor lists devices)"


class _OpenHandle(NamedTuple):
    """The data that `_close_pending` needs to end one attachment."""

    device: SharingDevice
    key: tuple[str, bytes]
    """Generation of the store, and the handle."""

    connection: socket.socket


_addresses: dict[tuple[str, bytes], tuple[int, int]] = {}
"""Address and number of attachments of each handle that this process has open."""

_lock = threading.Lock()
_pending: deque[_OpenHandle] = deque()
"""Attachments that the next thread with the lock closes; garbage collection may run `__del__` at any point."""


class DeviceMapping:
    """Weights on a device, opened in this process, with the connection that represents their attachment.

    They are writable: nothing below Python prevents it, because a device has no read-only mappings. The mapping ends
    with its last view.
    """

    def __init__(
        self, device: SharingDevice, generation: str, handle: bytes, nbytes: int, connection: socket.socket
    ) -> None:
        """Open a handle.

        Raises:
            ShareError: it cannot be opened.
        """
        self.device = device
        self.nbytes = nbytes
        open_handle = _OpenHandle(device, (generation, handle), connection)
        with _lock:
            address, count = _addresses.get(open_handle.key) or (device.open(handle), 0)
            _addresses[open_handle.key] = address, count + 1
        self.address = address
        self._opened = open_handle
        self._pid = os.getpid()
        _close_pending()

    def __del__(self) -> None:
        if not hasattr(self, "_pid"):
            return
        if os.getpid() != self._pid:
            self._opened.connection.close()  # a forked child only closes its copy of the connection
            return
        _pending.append(self._opened)
        _close_pending()


def _close_pending() -> None:
    """Close the attachments that have ended, unless another thread is already doing so."""
    while _pending and _lock.acquire(blocking=False):
        try:
            while _pending:
                device, key, connection = _pending.popleft()
                address, count = _addresses.pop(key)
                if count > 1:
                    _addresses[key] = address, count - 1
                    _detach(connection)
                    continue
                try:
                    device.close(address)
                except ShareError:  # the attachment lasts until the process ends
                    _unclosed_connections.append(connection)
                else:
                    _detach(connection)
        finally:
            _lock.release()


_unclosed_connections: list[socket.socket] = []
"""Connections of attachments whose memory could not be closed."""


def _reset_in_child() -> None:
    """Forget, in a forked child, the memory that its parent has open."""
    global _lock
    _lock = threading.Lock()
    _addresses.clear()
    _pending.clear()


processes.call_in_children(_reset_in_child)


def _detach(connection: socket.socket) -> None:
    """Notify the device's store that this process has closed or never opened its memory; close the connection."""
    with contextlib.suppress(OSError):
        wire.send(connection, {"ask": "detach"})
    connection.close()


class DeviceWeights:
    """Weights on a device that this process is attached to."""

    def __init__(self, host_weights: client.AttachedWeights, answer: dict[str, Any], mapping: DeviceMapping) -> None:
        self.key = host_weights.key
        self.hit: bool = answer["hit"]
        self.tensors = host_weights.tensors
        self.mapping = mapping
        self.bytes_tensor: Any = None
        """A tensor of all bytes, which `xsp.share.modules` makes."""


def attach(
    host_weights: client.AttachedWeights,
    device: SharingDevice,
    source: str,
    folder: Path | None = None,
    patience_s: float = client.PATIENCE_S,
) -> DeviceWeights:
    """Attach to weights on a device; the device's store copies them there if it does not hold them.

    Args:
        host_weights: the same weights on the host; the caller may release them afterwards.
        device: a device of this process.
        source: name of the weights in messages.
        folder: directory of the store's socket, see `xsp.share.wire.directory`.
        patience_s: seconds to wait for the store.

    Raises:
        ShareError: the device has no store, the store has no room, or the memory cannot be opened; see the message.
    """
    request = {"ask": "attach", "key": host_weights.key, "device": device.uuid, "source": source}
    missing_message = _NO_DEVICE_STORE.format(device.label, device.ordinal)

    def ask(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        try:
            return client.ask(connection, request)
        except BaseException:
            _detach(connection)
            raise

    with _ended_alone(folder, device.ordinal):
        connection, answer, _ = client.request_attachment(
            "share.device",
            lambda: client.connect(folder, patience_s, wire.device_socket(device.uuid), missing_message),
            ask,
        )
    with span("share.device.open"):
        handle = bytes.fromhex(answer["handle"])
        try:
            mapping = DeviceMapping(device, answer["generation"], handle, answer["nbytes"], connection)
        except BaseException:
            _detach(connection)
            raise
        return DeviceWeights(host_weights, answer, mapping)


@contextlib.contextmanager
def _ended_alone(folder: Path | None, ordinal: int | str) -> Iterator[None]:
    """Name the store of a device, if it ends before it answers and the host's store goes on.

    Args:
        folder: directory of the stores' sockets.
        ordinal: number of the device.

    Raises:
        ShareError: the store of the device ended; the message says which stores did.
    """
    try:
        yield
    except client.StoreEndedError as error:
        try:
            client.status(folder)
        except ShareError:  # it has ended as well, and with it the store of the device
            raise error from None
        raise ShareError(f"the store of the device ended before it answered; {START_AGAIN.format(ordinal)}") from error


def status(folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the contents and the attached processes of each device's store.

    A store that was killed, has another version or does not answer has an entry with an `error` instead.
    """
    states: list[dict[str, Any]] = []
    there = wire.directory(folder)
    for name in wire.device_sockets(there):
        try:
            with _ended_alone(folder, wire.device_number(there, name) or _UNKNOWN_NUMBER):
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
            device = state["device"]
            with _ended_alone(folder, device["ordinal"]):
                evicted += client.evict(key, folder, wire.device_socket(device["uuid"]))["evicted"]
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
        device = state["device"]
        with (
            _ended_alone(folder, device["ordinal"]),
            client.connect(folder, name=wire.device_socket(device["uuid"])) as connection,
        ):
            results = client.ask_large(connection, {"ask": "check"})
        tables += [{"device": device, **result} for result in results]
    return tables
