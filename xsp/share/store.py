"""The store: a process that keeps weights in sealed memory, once a machine, and hands them out over a Unix socket.

A client sends the descriptor of a file and gets the descriptor of memory that nobody can write any more (memfd with
`F_SEAL_WRITE`, which the store cannot take back either). Its connection is its attachment: however a client ends, the
system closes the connection, and the count is right. A store that ends takes nothing from those who are attached: the
memory is freed with its last mapping, and a new store begins empty.

Objects are told by the SHA-256 of what they hold. A file is told by device, inode, size and times, so that a second
client of the same file waits for no digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import resource
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from xsp import clock
from xsp.errors import ShareError, UsageError
from xsp.scrub import plain
from xsp.share import pages, weights
from xsp.share.shelf import Client, Eviction, Object, Shelf, Span
from xsp.share.wire import PROTOCOL, in_memory, received, send, socket_of

LOCK = "store.lock"
SETTLED_NS = 50_000_000
"""A file that was changed so recently may be changed again without its times showing it (they count in ticks)."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Version = tuple[int, ...]
"""Device, inode, size, and times of modification and change of a file."""


class _Made(NamedTuple):
    """What the thread that copies hands back."""

    version: Version
    object: Object | None
    reserved: int
    spans: list[Span]
    error: str | None
    is_settled: bool


class Store:
    """Serves a directory until it is told to end."""

    def __init__(self, folder: Path, capacity_bytes: int, eviction: Eviction = Eviction.LRU) -> None:
        """Take the directory and listen.

        Args:
            folder: for the socket; it is made, for this user alone.
            capacity_bytes: of all objects together.
            eviction: what goes first where there is no room.

        Raises:
            ShareError: another store serves it, or it is open to others.
            UsageError: the capacity is not above zero.
        """
        if capacity_bytes <= 0:
            raise UsageError("--capacity: a store of 0 bytes keeps nothing; give a size such as 4GiB")
        self.folder = folder
        self.shelf = Shelf(capacity_bytes, eviction)
        self.generation = os.urandom(8).hex()
        self._known: dict[Version, str] = {}
        self._clients: dict[socket.socket, Client] = {}
        self._waiting: dict[Version, list[Client]] = {}
        self._asked: queue.SimpleQueue[tuple[Version, int, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        self._goes_on = True
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = socket_of(folder)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ShareError(f"{folder}: cannot be the directory of a store ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ShareError(f"{folder}: another store serves it already") from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a store that was killed
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        os.chmod(path, 0o600)
        self._listening.listen(256)
        self._listening.setblocking(False)
        self._woken, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._path = path
        _many_descriptors()

    def end(self) -> None:
        """Have `serve` return; also from a signal's handler or another thread."""
        self._goes_on = False
        self._wake()

    @property
    def wakes(self) -> int:
        """Descriptor that wakes `serve` when a byte is written to it: for `signal.set_wakeup_fd`."""
        return self._wakes

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b"x")

    def serve(self) -> None:
        """Answer clients until `end`; then let go of everything."""
        copying = threading.Thread(target=self._copy_what_is_asked, name="xsp-share-copy", daemon=True)
        copying.start()
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            try:
                while self._goes_on:
                    for ready, _ in self._selector.select():
                        if ready.fileobj is self._listening:
                            self._accept()
                        elif ready.fileobj == self._woken:
                            self._hand_out()
                        elif (client := self._clients.get(ready.fileobj)) is not None:  # type: ignore[call-overload]
                            self._hear(client)
            finally:
                self._goes_on = False
                self._asked.put(None)
                copying.join()
                self._close()

    def _close(self) -> None:
        os.unlink(self._path)
        self._listening.close()
        for client in list(self._clients.values()):
            self._drop(client)
        with self.shelf.lock:
            for each in list(self.shelf.objects.values()):
                self.shelf.evict(each)
        while not self._done.empty():
            made = self._done.get().object
            if made is not None:
                os.close(made.memory)
        while not self._asked.empty():
            asked = self._asked.get()
            if asked is not None:
                os.close(asked[1])
        for descriptor in (self._woken, self._wakes, self._lock):
            os.close(descriptor)

    # --- clients --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has gone already, or there are no descriptors left: those who are attached go on
            time.sleep(0.001)
            return
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._clients[connection] = Client(connection, pid)
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, client: Client) -> None:
        """Forget a connection, and with it the attachment."""
        if self._clients.pop(client.connection, None) is None:
            return
        if client.waits_for is not None:
            self._waiting.get(client.waits_for, []).remove(client)
        self.shelf.detach(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()

    def _hear(self, client: Client) -> None:
        try:
            text, sent = received(client.connection)
        except BlockingIOError:
            return
        except (OSError, ShareError):
            self._drop(client)
            return
        try:
            if not text:
                self._drop(client)
                return
            try:
                asked = json.loads(text)
                if not isinstance(asked, dict):
                    raise ValueError("no table")
                self._answer(client, asked, sent)
            except (ValueError, RecursionError):
                self._send(client, {"error": "the store does not understand the message"})
            except ShareError as error:
                self._send(client, {"error": str(error)})
        finally:
            for descriptor in sent:
                os.close(descriptor)

    def _answer(self, client: Client, asked: dict[str, Any], sent: list[int]) -> None:
        """Answer a message; the first descriptor is taken out of those sent if it is kept."""
        wanted = asked.get("ask")
        if asked.get("protocol") != PROTOCOL:
            raise ShareError("the client is of another version of xsp than the store; use the store's version for both")
        if wanted == "status":
            self._send(client, {}, in_memory(json.dumps(self.status()).encode()))
        elif wanted == "evict":
            self._send(client, self._evict(str(asked.get("key", ""))))
        elif wanted == "attach" and client.object is None and client.waits_for is None:
            if "key" in asked:
                self._give(client, self._of_key(str(asked["key"])), True, [])
            elif sent:
                self._attach(client, sent, plain(str(asked.get("source", "")))[:4096])
            else:
                raise ShareError("an attachment needs a file or a key")
        else:
            raise ShareError("the store does not know what is asked, or the connection is attached already")

    def _attach(self, client: Client, sent: list[int], source: str) -> None:
        found = os.fstat(sent[0])
        if not stat.S_ISREG(found.st_mode):
            raise ShareError(f"{source}: is no regular file")
        version = version_of(found)
        there = self.shelf.objects.get(self._known.get(version, ""))
        if there is not None:
            self._give(client, there, True, [])
            return
        client.waits_for = version
        if version in self._waiting:
            self._waiting[version].append(client)
            return
        self._waiting[version] = [client]
        self._asked.put((version, sent.pop(0), source))

    def _of_key(self, key: str) -> Object:
        found = [each for each in self.shelf.objects.values() if len(key) >= 8 and each.key.startswith(key)]
        if len(found) != 1:
            raise ShareError(
                f"{plain(key)[:80]}: {'several objects begin so' if found else 'the store has no such object'}; "
                "xsp share status lists them"
            )
        return found[0]

    def _give(self, client: Client, given: Object, hit: bool, spans: Iterable[Span]) -> None:
        given.hits += hit
        self.shelf.attach(client, given)
        told = {"key": given.key, "nbytes": given.nbytes, "hit": hit, "generation": self.generation, "spans": [*spans]}
        self._send(client, told, given.memory, keep=True)

    def _send(self, client: Client, told: dict[str, Any], memory: int | None = None, keep: bool = False) -> None:
        try:
            send(client.connection, told, memory)
        except OSError:  # it has gone, or does not read
            self._drop(client)
        finally:
            if memory is not None and not keep:
                os.close(memory)

    def _evict(self, key: str) -> dict[str, Any]:
        wanted = list(self.shelf.objects.values()) if key == "*" else [self._of_key(key)]
        with self.shelf.lock:
            attached = [each for each in wanted if each.attached]
            if key != "*" and attached:
                pids = ", ".join(str(each.pid) for each in attached[0].attached)
                raise ShareError(f"{attached[0].key[:16]}: is attached (to process {pids}), and stays")
            for each in wanted:
                if not each.attached:
                    self.shelf.evict(each)
        return {"evicted": len(wanted) - len(attached), "attached": len(attached)}

    def status(self) -> dict[str, Any]:
        """Return what the store holds, and who is attached to it."""
        with self.shelf.lock:
            objects = [
                {
                    "key": each.key,
                    "source": each.source,
                    "nbytes": each.nbytes,
                    "tensors": each.tensors,
                    "hits": each.hits,
                    "copy_ns": each.copy_ns,
                    "large_bytes": each.large_bytes,
                    "attached": sorted(client.pid for client in each.attached),
                }
                for each in sorted(self.shelf.objects.values(), key=lambda each: -each.used)
            ]
            return {
                "pid": os.getpid(),
                "generation": self.generation,
                "capacity_bytes": self.shelf.capacity_bytes,
                "held_bytes": self.shelf.held_bytes,
                "copying_bytes": self.shelf.reserved_bytes,
                "eviction": self.shelf.eviction.value,
                "evictions": self.shelf.evictions,
                "connections": len(self._clients),
                "objects": objects,
            }

    # --- copying --------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give what was copied to those who wait for it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while not self._done.empty():
            made = self._done.get()
            waiting = self._waiting.pop(made.version)
            for client in waiting:
                client.waits_for = None
            if made.object is None:
                self.shelf.release(made.reserved)
                for client in waiting:
                    self._send(client, {"error": made.error})
                continue
            kept = self.shelf.put(made.object)
            self.shelf.touch(kept)
            if made.is_settled:
                self._known = {version: key for version, key in self._known.items() if key in self.shelf.objects}
                self._known[made.version] = kept.key
            for client in waiting:
                self._give(client, kept, False, made.spans)

    def _copy_what_is_asked(self) -> None:
        while (asked := self._asked.get()) is not None:
            version, file, source = asked
            try:
                self._done.put(self._copy(version, file, source))
            finally:
                os.close(file)
            self._wake()

    def _copy(self, version: Version, file: int, source: str) -> _Made:
        """Copy a file into sealed memory; what goes wrong becomes a message."""
        spans: list[Span] = []
        reserved, memory = 0, -1
        began = clock.monotonic_ns()
        try:
            tensors = weights.read_header(file, source)
            layout = weights.laid_out(tensors)
            at = clock.monotonic_ns()
            evicted = self.shelf.reserve(layout.size, source)
            reserved = layout.size
            if evicted:
                spans.append(Span(f"share.evict {evicted}", at, clock.monotonic_ns()))
            memory = os.memfd_create("xsp-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            large = pages.enlarge(memory, layout.size, lambda: self._goes_on)
            key = weights.copy(file, tensors, layout, memory, source, lambda: self._goes_on)
            if version_of(os.fstat(file)) != version:
                raise ShareError(f"{source}: it was changed while it was read; attach again")
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            spans.append(Span("share.copy", began, clock.monotonic_ns()))
            took = clock.monotonic_ns() - began
            made = Object(key, memory, layout.size, len(tensors), source, copy_ns=took, large_bytes=large)
            is_settled = abs(time.time_ns() - max(version[-2:])) > SETTLED_NS
            return _Made(version, made, reserved, spans, None, is_settled)
        except Exception as error:
            if memory >= 0:
                os.close(memory)
            message = str(error) if isinstance(error, ShareError) else f"{source}: {type(error).__name__}: {error}"
            return _Made(version, None, reserved, spans, message, False)


def version_of(found: os.stat_result) -> Version:
    """Return what tells a state of a file from others."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _many_descriptors() -> None:
    """Let this process have as many descriptors as it may: each attachment takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
