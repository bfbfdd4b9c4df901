"""The store of a device: a process that keeps copies of a store's weights on the device, and hands out their handles.

It attaches to the store of the host as a client, copies an object onto the device once, waits until the copy is
complete, and hands out the handle with which other processes map it (CUDA IPC). A device has no read-only mappings.
Therefore each attachment compares a sample of blocks with the host's sealed memory, and `check` compares all of them.
An object that differs is no longer handed out.

Memory that its owner frees while others have it mapped is undefined. It is freed only after each client has reported
that it closed the memory, or has ended; and this process ends after its last client, even if the host's store ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import random
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xsp import clock, processes
from xsp.device import devices as known_devices
from xsp.device.sharing import DeviceLostError, DeviceMemoryError, SharingDevice
from xsp.errors import ShareError, UsageError, XspError
from xsp.scrub import plain
from xsp.share import client as host
from xsp.share import wire
from xsp.share.devices import START_AGAIN
from xsp.share.serving import CopyResult, Serving, error_text
from xsp.share.shelf import Client, Eviction, Object, Shelf, StoreSpan
from xsp.share.weights import StoredTensor
from xsp.share.wire import device_socket, in_memory
from xsp.texts import size_text

BLOCK = 4096
SAMPLE_BLOCKS = 16
"""Number of blocks compared at each attachment: the first, the last, and randomly drawn ones."""

PIECE = 16 << 20
"""Bytes per copy operation: between two pieces, comparisons of other objects get their turn."""

READY = "ready"
"""The text that the process writes once it accepts clients; any other text is the reason why it does not."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(eq=False)
class DeviceObject(Object):
    """Weights on a device."""

    device: SharingDevice = field(kw_only=True)
    host_weights: host.AttachedWeights | None = field(kw_only=True)
    """The same weights in the host's store, which cannot evict them while this copy exists."""

    handle: bytes = field(kw_only=True)
    size: int = field(kw_only=True)
    """Bytes of the weights; `nbytes` is the allocated size."""

    difference: str = ""
    """Where the object differs from the host's copy, from the last comparison; empty if no difference is known."""

    def free(self) -> None:
        """Free the device memory, and detach from the host's copy."""
        self.host_weights = None
        with contextlib.suppress(ShareError):  # a lost device takes its memory with it
            self.device.free(self.memory)


class DeviceStore(Serving[DeviceObject]):
    """Serves a device until the host's store ends or `end` is called, and then until the last client has gone."""

    LABEL = "store of the device"

    def __init__(
        self, folder: Path, ordinal: int, capacity_bytes: int | None = None, eviction: Eviction = Eviction.LRU
    ) -> None:
        """Open the device and listen.

        Args:
            folder: directory of the host's store, which has to be running.
            ordinal: number of the device.
            capacity_bytes: limit for all objects together; None for half of the free memory.
            eviction: which objects are evicted first when there is no room.

        Raises:
            ShareError: no such device, it cannot share memory, no host store runs, or the device is served already.
            UsageError: the capacity is smaller than the smallest allocation.
        """
        self.device = known_devices.sharing_device(ordinal).sharing()
        if capacity_bytes is None:
            capacity_bytes = self.device.memory()[0] // 2
        if capacity_bytes < self.device.granule:
            raise UsageError(
                f"--device-capacity: memory comes in pieces of {size_text(self.device.granule)}; give more"
            )
        self._check_sharing()
        self._draws, self._is_lost = 0, False
        self._store = host.connect(folder)
        try:
            with contextlib.suppress(OSError):  # it has ended, which `_on_store_end` handles
                wire.send(self._store, {"ask": "stay"})  # answered once it serves
            self._store.setblocking(False)
            shelf: Shelf[DeviceObject] = Shelf(capacity_bytes, eviction, "xsp share serve --device-capacity")
            super().__init__(folder, shelf, device_socket(self.device.uuid))
        except BaseException:
            self._store.close()
            raise
        self._handlers["check"] = self._handle_check
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(self.device.ordinal).encode(), 0)  # remains if this process is killed

    def _check_sharing(self) -> None:
        """Check that the device shares memory, by requesting the handle of a granule.

        Raises:
            ShareError: the device does not share memory.
        """
        address = self.device.allocate(self.device.granule)
        try:
            self.device.handle(address)
        finally:
            self.device.free(address)

    # --- end ------------------------------------------------------------------------------------------

    def _prepare_loop(self) -> None:
        self._selector.register(self._store, selectors.EVENT_READ, self._on_store_end)

    def _on_store_end(self) -> None:
        """End if the host's store has closed the connection; what it answers, that it stays, needs no reaction."""
        with contextlib.suppress(OSError):
            if self._store.recv(4096):
                return
        self._selector.unregister(self._store)
        self.end()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """End if the device is lost, and raise its error."""
        try:
            yield
        except DeviceLostError as error:
            self._lose(error)
            raise

    def _lose(self, error: DeviceLostError) -> None:
        """Say once which weights were lost with the device, and end; the store of the host goes on."""
        if self._is_lost:
            return
        self._is_lost = True
        with self.shelf.lock:
            lost = sorted({stored.source for stored in self.shelf.objects.values()})
            pids = sorted(
                {client.pid for stored in self.shelf.objects.values() for client in stored.attached} - {os.getpid()}
            )
        with_it = f"; lost with it: {', '.join(lost)}" if lost else ""
        attached = f"end the attached processes ({', '.join(map(str, pids))}), then " if pids else ""
        print(
            f"xsp share: {error}{with_it}. The host's weights are served as before. For the device, {attached}end the "
            f"store and start it again with --device {self.device.ordinal}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        self.end()

    def _ending_remedy(self) -> str:
        """Return what to do: if the device is lost, the store of the host goes on."""
        if not self._is_lost:
            return super()._ending_remedy()
        return f"{self.device.label} is lost to it, and {START_AGAIN.format(self.device.ordinal)}"

    def _is_needed(self) -> bool:
        while self.shelf.evict_one():
            pass
        return bool(self.shelf.objects or self.shelf.withdrawn_objects)

    def _close(self) -> None:
        self._store.close()
        super()._close()

    def _on_disconnect(self, client: Client) -> None:
        """Detach a client whose connection has ended; if its process is watched, wait for the process to end."""
        if client.process < 0:
            self.shelf.detach(client)

    def _on_client_end(self, client: Client) -> None:
        """Detach a client that has closed the memory, or whose process has ended."""
        if client.process >= 0:
            self._selector.unregister(client.process)
            os.close(client.process)
            client.process = -1
        self.shelf.detach(client)

    def _answer(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        if request.get("ask") == "detach":  # also accepted while the store is ending
            self._on_client_end(client)
        else:
            super()._answer(client, request, descriptors)

    # --- attachments ----------------------------------------------------------------------------------

    def _handle_attach(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        del descriptors
        if request.get("device") != self.device.uuid:
            raise ShareError("the client requests another device than that of this store")
        key = str(request.get("key", ""))
        stored = self.shelf.objects.get(key)
        if stored is not None and self.shelf.attach(client, stored) and self._is_intact(client, stored):
            self._hand_over(client, stored, True, [])
        elif not self._join_waiting(client, key):
            self._queue_job(
                key, functools.partial(self._copy, key, plain(str(request.get("source", "")))), self._keep_copy
            )

    def _is_intact(self, client: Client, stored: DeviceObject) -> bool:
        """Compare a sample of blocks with the host's copy; if they differ, detach the client and withdraw the object.

        Raises:
            ShareError: the device cannot be read; the client is then detached.
        """
        self._draws += 1
        difference = "?"
        try:
            with self._watched():
                difference = find_difference(stored, sample_offsets(stored.size, self._draws))
        finally:
            if difference:
                self.shelf.detach(client)
        if difference:
            self._withdraw(stored, difference)
        return not difference

    def _withdraw(self, stored: DeviceObject, difference: str) -> None:
        if self.shelf.objects.get(stored.key) is stored:
            stored.difference = difference
            self.shelf.withdraw(stored)

    def _hand_over(self, client: Client, stored: DeviceObject, hit: bool, spans: Iterable[StoreSpan]) -> None:
        with contextlib.suppress(OSError):  # the process is not visible from here: its connection counts
            client.process = os.pidfd_open(client.pid)
            self._selector.register(
                client.process, selectors.EVENT_READ, functools.partial(self._on_process_end, client)
            )
        super()._hand_over(client, stored, hit, spans)

    def _on_process_end(self, client: Client) -> None:
        if client.process >= 0:
            self._on_client_end(client)
            self._disconnect(client)

    def _handover(self, stored: DeviceObject) -> tuple[dict[str, Any], int | None]:
        return {"nbytes": stored.size, "handle": stored.handle.hex()}, None

    def _status_entry(self, stored: DeviceObject) -> dict[str, Any]:
        return {**super()._status_entry(stored), "corrupted": stored.difference or None}

    def status(self) -> dict[str, Any]:
        """Return the contents of the device's store, and the attached processes."""
        device = {"ordinal": self.device.ordinal, "name": self.device.name, "uuid": self.device.uuid}
        return {"device": device, **super().status()}

    def _copy(self, key: str, source: str) -> CopyResult[DeviceObject]:
        """Copy an object of the host's store onto the device; an error becomes a message in the result."""
        spans: list[StoreSpan] = []
        reserved, address = 0, 0
        try:
            host_weights = host.attach(f"sha256:{key}", self.folder)
            size = host_weights.mapping.nbytes
            allocated = -(-size // self.device.granule) * self.device.granule
            evict_start = clock.monotonic_ns()
            evicted = self.shelf.reserve(allocated, f"{self.device.label}: {source}")
            reserved = allocated
            address, evicted_more = self._allocate(allocated, source)
            if evicted + evicted_more:
                spans.append(
                    StoreSpan(f"share.device.evict {evicted + evicted_more}", evict_start, clock.monotonic_ns())
                )
            copy_start = clock.monotonic_ns()
            for offset in range(0, size, PIECE):
                if not self._is_running:
                    raise ShareError(f"the {self.LABEL} is ending")
                self.device.fill(address + offset, host_weights.mapping.address + offset, min(PIECE, size - offset))
            self.device.synchronise()  # before any client opens it, so that no other process has to wait for an event
            handle = self.device.handle(address)
            copy_end = clock.monotonic_ns()
            spans.append(StoreSpan("share.device.copy", copy_start, copy_end))
            stored = DeviceObject(
                key, address, allocated, len(host_weights.tensors), source,
                copy_ns=copy_end - copy_start, device=self.device, host_weights=host_weights, handle=handle, size=size,
            )  # fmt: skip
            return CopyResult(stored, reserved, spans, None)
        except Exception as error:
            if isinstance(error, DeviceLostError):
                self._lose(error)
            if address:
                with contextlib.suppress(ShareError):
                    self.device.free(address)
            return CopyResult(None, reserved, spans, error_text(error, source))

    def _allocate(self, nbytes: int, source: str) -> tuple[int, int]:
        """Return the address of memory, and the number of objects evicted for it beyond what the capacity requires.

        Raises:
            ShareError: other processes use the memory, and this store has nothing left to evict.
        """
        evicted = 0
        while True:
            try:
                return self.device.allocate(nbytes), evicted
            except DeviceMemoryError:
                if not self.shelf.evict_one():
                    free, total = self.device.memory()
                    raise ShareError(
                        f"{self.device.label}: {source}: no room for {size_text(nbytes)}: {size_text(free)} of "
                        f"{size_text(total)} are free, and {size_text(self.shelf.stored_bytes)} of this store are "
                        f"attached{self.shelf.attached_text()}; {self.device.monitor} shows who uses the rest"
                    ) from None
            evicted += 1

    # --- checks ---------------------------------------------------------------------------------------

    def _handle_check(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        """Compare all objects with the host's copies."""
        del request, descriptors
        if self._join_waiting(client, _CHECK):
            return
        hold_clients = []
        for stored in list(self.shelf.objects.values()):  # attached, so that no object is freed during the comparison
            hold_client = Client(self._store, os.getpid())
            if self.shelf.attach(hold_client, stored):
                hold_clients.append(hold_client)
        objects = [hold_client.object for hold_client in hold_clients if isinstance(hold_client.object, DeviceObject)]
        self._queue_job(_CHECK, lambda: self._compare(objects), functools.partial(self._send_comparison, hold_clients))

    def _compare(self, objects: list[DeviceObject]) -> list[ContentComparison]:
        results = []
        for stored in objects:
            if self._is_running:
                try:
                    with self._watched():
                        results.append(ContentComparison(stored, find_difference(stored), None))
                except ShareError as error:
                    results.append(ContentComparison(stored, "", str(error)))
        return results

    def _send_comparison(
        self, hold_clients: list[Client], results: list[ContentComparison], waiting: list[Client]
    ) -> None:
        for hold_client in hold_clients:
            self.shelf.detach(hold_client)
        rows = []
        for stored, difference, error in results:
            pids = sorted(client.pid for client in stored.attached)
            rows.append({"key": stored.key, "source": stored.source, "nbytes": stored.size, "attached": pids,
                         "corrupted": difference or None, "error": error})  # fmt: skip
            if difference:
                self._withdraw(stored, difference)
        for client in waiting:
            self._send(client, {}, in_memory(json.dumps(rows).encode()))


_CHECK = "check"
"""The `awaited_key` of clients that have requested a comparison; shorter than any object's key."""


class ContentComparison(NamedTuple):
    """The result of comparing an object with the host's copy."""

    object: DeviceObject
    difference: str
    """Where it differs; empty if it does not."""

    error: str | None
    """Why it could not be compared."""


def sample_offsets(nbytes: int, draw: int) -> list[int]:
    """Return the offsets of the blocks to compare: the first, the last, and others drawn with `draw` as the seed."""
    blocks = -(-nbytes // BLOCK)
    inner = range(1, blocks - 1)
    inner_blocks = random.Random(draw).sample(inner, min(SAMPLE_BLOCKS - 2, len(inner)))
    return [block * BLOCK for block in sorted({0, *inner_blocks, blocks - 1})]


def find_difference(stored: DeviceObject, offsets: list[int] | None = None) -> str:
    """Return where an object on a device differs from the host's copy; empty if it does not.

    Args:
        stored: the object.
        offsets: offsets of the blocks to compare; None for the whole object.

    Raises:
        ShareError: the device cannot be read.
    """
    assert stored.host_weights is not None
    piece = PIECE if offsets is None else BLOCK
    buffer = ctypes.create_string_buffer(min(piece, stored.size))
    for offset in range(0, stored.size, piece) if offsets is None else offsets:
        length = min(piece, stored.size - offset)
        stored.device.read(stored.memory + offset, ctypes.addressof(buffer), length)
        host_address = stored.host_weights.mapping.address + offset
        if _memcmp(buffer, host_address, length):
            pairs = zip(buffer.raw[:length], ctypes.string_at(host_address, length), strict=True)
            return _byte_text(
                stored.host_weights.tensors,
                offset
                + next(index for index, (device_byte, host_byte) in enumerate(pairs) if device_byte != host_byte),
            )
    return ""


def _byte_text(tensors: list[StoredTensor], offset: int) -> str:
    for tensor in tensors:
        if tensor.offset <= offset < tensor.offset + tensor.nbytes:
            return f"byte {offset}, in {plain(tensor.name)}"
    return f"byte {offset}, outside tensors"


# --- process ----------------------------------------------------------------------------------------------------------

_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from xsp.share.devicestore import main; main(*sys.argv[2:])"
START_S, END_S = 120.0, 2.0


def start_process(
    folder: Path, ordinal: int, capacity_bytes: int | None, eviction: Eviction
) -> subprocess.Popen[bytes]:
    """Start a process that serves a device, and return it once it accepts clients.

    It runs in its own session: an interrupt in the terminal ends the store, and this process follows its clients.

    Raises:
        ShareError: it cannot serve the device; the message gives the reason.
    """
    reader, writer = os.pipe()
    arguments = [os.path.abspath(folder), str(ordinal), str(capacity_bytes or ""), eviction.value, str(writer)]
    try:
        process = processes.start_python(_CODE, *arguments, stdin=subprocess.DEVNULL, pass_fds=(writer,))
    finally:
        os.close(writer)
    with open(reader, "rb") as answers:
        ready, _, _ = select.select([answers], [], [], START_S)
        message = answers.read().decode(errors="replace") if ready else f"did not answer within {START_S:.0f} s"
    if message == READY:
        return process
    process.kill()
    reason = processes.exit_description(process.wait())
    raise ShareError(
        message or f"{known_devices.sharing_device(ordinal).id}: the process that serves it ended with {reason}"
    )


def start_device_stores(
    serving: Serving[Object], ordinals: Sequence[int], capacity_bytes: int | None, eviction: Eviction
) -> dict[int, subprocess.Popen[bytes]]:
    """Start a process for each device, for a store that does not serve yet, and return the processes by ordinal.

    Raises:
        ShareError: a device cannot be served; the store is then ended as well.
    """
    by_ordinal: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for ordinal in dict.fromkeys(ordinals):
            by_ordinal[ordinal] = start_process(serving.folder, ordinal, capacity_bytes, eviction)
    except BaseException:
        for process in by_ordinal.values():
            process.terminate()
        serving.end()
        serving.serve()
        raise
    return by_ordinal


def wait_for_exit(device_stores: Mapping[int, subprocess.Popen[bytes]]) -> list[tuple[int, int]]:
    """Wait up to `END_S` for the processes to end; return (ordinal, process ID) of those that still have clients."""
    deadline = time.monotonic() + END_S
    remaining = []
    for ordinal, process in device_stores.items():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            remaining.append((ordinal, process.pid))
    return remaining


def main(folder: str, ordinal: str, capacity_bytes: str, eviction: str, answers: str) -> None:
    """Serve a device; the entry point of the process that `start_process` starts."""
    with open(int(answers), "w", encoding="utf-8") as answer:
        try:
            capacity = int(capacity_bytes) if capacity_bytes else None
            serving = DeviceStore(Path(folder), int(ordinal), capacity, Eviction(eviction))
        except XspError as error:
            answer.write(str(error))
            return
        answer.write(READY)
    serving.serve_until_signal()
