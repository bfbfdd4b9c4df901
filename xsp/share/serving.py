"""The common part of the host's store and a device's store: a socket, clients, and a thread that copies.

An event loop answers clients. One thread does the work that takes longer, once for all clients that wait for the same
object. A client's connection is its attachment: however the client ends, the system closes it, so the count is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import queue
import resource
import selectors
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from xsp.connections import ConnectionLimits, Connections, State
from xsp.errors import ShareError
from xsp.scrub import plain
from xsp.share.shelf import Client, Object, Shelf, StoreSpan
from xsp.share.wire import MOST_MESSAGE, PROTOCOL, SOCKET, in_memory, lock_of, receive, send, socket_of

Kind = TypeVar("Kind", bound=Object)
Result = TypeVar("Result")

SWEEP_S = 1.0
"""Seconds after which connections are looked at even if nothing happens on any."""

MOST_DESCRIPTORS = 1 << 16
RESERVED_DESCRIPTORS = 24
"""Descriptors of the process itself, and of answers that are on their way."""

Callback = Callable[[list[Client]], object]
"""Callback in the event loop when the thread has finished, with the clients that wait for the result."""


class CopyResult(NamedTuple, Generic[Kind]):
    """The result of the thread's work."""

    object: Kind | None
    reserved: int
    spans: list[StoreSpan]
    error: str | None


class Serving(Generic[Kind]):
    """Serves a directory until `end` is called."""

    LABEL = "store"
    """Name of the store in messages."""

    def __init__(self, folder: Path, shelf: Shelf[Kind], name: str = SOCKET) -> None:
        """Lock the directory and listen.

        Args:
            folder: directory for the socket; it is created, accessible to this user only.
            shelf: the store's objects.
            name: file name of the socket in it.

        Raises:
            ShareError: another process serves it, it is open to others, or something else is at the socket's path.
        """
        self.folder = folder
        self.shelf = shelf
        self.generation = os.urandom(8).hex()
        self._clients: dict[socket.socket, Client] = {}
        most = most_clients()
        # A client that has asked once may hold nothing for hours; if the store is full, the oldest gives way.
        self._connections = Connections(ConnectionLimits(most, header_bytes=MOST_MESSAGE, idle_s=float("inf")))
        shelf.most_objects = most
        self._waiting: dict[Hashable, list[Client]] = {}
        self._jobs: queue.SimpleQueue[tuple[Hashable, Callable[[], Any], Callable[..., object]] | None]
        self._jobs = queue.SimpleQueue()
        self._pending_jobs = 0
        self._results: queue.SimpleQueue[tuple[Hashable, Callback]] = queue.SimpleQueue()
        self._handlers: dict[str, Callable[[Client, dict[str, Any], list[int]], None]]
        self._handlers = {
            "status": self._handle_status,
            "evict": self._handle_evict,
            "attach": self._handle_attach,
            "stay": self._handle_stay,
        }
        self._is_running = True
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = socket_of(folder, name)
            self._lock = os.open(folder / lock_of(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ShareError(f"{folder}: cannot be the directory of a store ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ShareError(f"{folder}: is served by another {self.LABEL} already") from error
        try:
            self._listener = _listen(path)
        except ShareError:
            os.close(self._lock)
            raise
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._path = path

    def end(self) -> None:
        """Make `serve` return; may be called from a signal handler or another thread."""
        self._is_running = False
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def serve_until_signal(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer clients until SIGINT or SIGTERM; for the main thread.

        Args:
            ready: called once the signal handlers are installed.
        """
        previous_fd = signal.set_wakeup_fd(
            self._wake_writer, warn_on_full_buffer=False
        )  # any thread may get the signal
        handlers = {signum: signal.signal(signum, lambda *_: self.end()) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            ready()
            self.serve()
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(previous_fd)

    def serve(self) -> None:
        """Answer clients until `end`; then release everything."""
        thread = threading.Thread(target=self._run_jobs, name="xsp-share-copy", daemon=True)
        thread.start()
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
            self._prepare_loop()
            try:
                while self._is_running:
                    self._handle_events()
            finally:
                self._is_running = False
                self._jobs.put(None)
                thread.join()
                self._handle_results()
                # Accept no new clients; another process may serve the directory from now on.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                self._selector.unregister(self._listener)
                self._listener.close()
                os.close(self._lock)
                while self._is_needed():
                    self._handle_events()
                self._close()

    def _handle_events(self) -> None:
        # clients that have left make place before another one is accepted, whatever order the system names them in
        for ready, _ in sorted(self._selector.select(SWEEP_S), key=lambda event: event[0].fileobj is self._listener):
            ready.data()
        self._connections.sweep()

    def _prepare_loop(self) -> None:
        """Prepare before the loop begins; for subclasses."""

    def _is_needed(self) -> bool:
        """Return whether clients need the loop after `end`; by default not, as mapped memory outlives the store."""
        return False

    def _close(self) -> None:
        for client in list(self._clients.values()):
            self._disconnect(client)
        with self.shelf.lock:
            for stored in list(self.shelf.objects.values()):
                self.shelf.evict(stored)
        for descriptor in (self._wake_reader, self._wake_writer):
            os.close(descriptor)

    # --- clients --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or descriptors ran out: attached clients continue
            time.sleep(0.001)
            return
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        client = Client(connection, pid)
        client.place = self._connections.admit(str(pid), functools.partial(self._disconnect, client))
        if client.place is None:
            with contextlib.suppress(OSError):
                send(connection, {"error": f"the {self.LABEL} has {len(self._clients)} clients, and no place for more"})
            connection.close()
            return
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._receive, client))

    def _follow(self, client: Client) -> None:
        """Enter the state of a client: one that is attached, waits for a copy, or asked to stay keeps its place."""
        if client.place is not None:
            in_use = client.stays or client.object is not None or client.awaited_key is not None
            client.place.enter(State.WORK if in_use else State.IDLE)

    def _disconnect(self, client: Client) -> None:
        """Close a connection, which ends its attachment."""
        if self._clients.pop(client.connection, None) is None:
            return
        if client.awaited_key is not None:
            self._waiting.get(client.awaited_key, []).remove(client)
            client.awaited_key = None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()
        if client.place is not None:
            self._connections.leave(client.place)
        self._on_disconnect(client)

    def _on_disconnect(self, client: Client) -> None:
        """Detach a client whose connection has ended; stores of devices wait for its process too."""
        self.shelf.detach(client)

    def _receive(self, client: Client) -> None:
        if client.connection not in self._clients:  # dropped in the same turn
            return
        try:
            text, descriptors = receive(client.connection)
        except BlockingIOError:
            return
        except (OSError, ShareError):
            self._disconnect(client)
            return
        try:
            if not text:
                self._disconnect(client)
                return
            try:
                request = json.loads(text)
                if not isinstance(request, dict):
                    raise ValueError("no table")
                self._answer(client, request, descriptors)
            except (ValueError, RecursionError):
                self._send(client, {"error": f"the {self.LABEL} does not understand the message"})
            except ShareError as error:
                self._send(client, {"error": str(error)})
            except OSError as error:  # no descriptor or no memory is left: that is no reason to end
                self._send(client, {"error": f"the {self.LABEL} cannot answer now ({error.strerror}); try again"})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self._follow(client)

    def _answer(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        """Answer a message; a handler that keeps a descriptor removes it from `descriptors`."""
        if request.get("protocol") != PROTOCOL:
            raise ShareError("the client is of another version of xsp than the store; use the store's version for both")
        if not self._is_running:
            raise ShareError(f"the {self.LABEL} is ending; {self._ending_remedy()}")
        handler = self._handlers.get(str(request.get("ask")))
        if handler is None or (
            handler == self._handle_attach and (client.object is not None or client.awaited_key is not None)
        ):
            raise ShareError(f"the {self.LABEL} does not know the request, or the connection is attached already")
        handler(client, request, descriptors)

    def _ending_remedy(self) -> str:
        """Return what a client can do while this store is ending."""
        return "start one (xsp share serve) and attach again"

    def _send(self, client: Client, answer: dict[str, Any], memory: int | None = None, keep_open: bool = False) -> None:
        try:
            send(client.connection, answer, memory)
        except OSError:  # the client has gone, or does not read
            self._disconnect(client)
        finally:
            if memory is not None and not keep_open:
                os.close(memory)

    def _handle_attach(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        """Attach a client, or start to make the object that it requests.

        Raises:
            ShareError: the request cannot be met.
        """
        raise NotImplementedError

    def _handover(self, stored: Kind) -> tuple[dict[str, Any], int | None]:
        """Return fields of the answer that hands over an object, besides its key, and a descriptor to send."""
        raise NotImplementedError

    def _hand_over(self, client: Client, stored: Kind, hit: bool, spans: Iterable[StoreSpan]) -> None:
        """Hand an object to a client that is attached to it."""
        stored.hits += hit
        answer, memory = self._handover(stored)
        answer |= {"key": stored.key, "hit": hit, "generation": self.generation, "spans": [*spans]}
        self._send(client, answer, memory, keep_open=True)

    def _find(self, key: str) -> Kind:
        matches = [stored for stored in self.shelf.objects.values() if len(key) >= 8 and stored.key.startswith(key)]
        if len(matches) != 1:
            raise ShareError(
                f"{plain(key)[:80]}: {'several objects begin with it' if matches else 'the store has no such object'}; "
                "xsp share status lists them"
            )
        return matches[0]

    def _handle_evict(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        del descriptors
        key = str(request.get("key", ""))
        candidates = list(self.shelf.objects.values()) if key == "*" else [self._find(key)]
        with self.shelf.lock:
            attached = [stored for stored in candidates if stored.attached]
            if key != "*" and attached:
                pids = ", ".join(str(client.pid) for client in attached[0].attached)
                raise ShareError(f"{attached[0].key[:16]}: is attached (to process {pids}), and is kept")
            for stored in candidates:
                if not stored.attached:
                    self.shelf.evict(stored)
        self._send(client, {"evicted": len(candidates) - len(attached), "attached": len(attached)})

    def _handle_status(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        del request, descriptors
        self._send(client, {}, in_memory(json.dumps(self.status()).encode()))

    def _handle_stay(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        del request, descriptors
        client.stays = True
        self._send(client, {})

    def _status_entry(self, stored: Kind) -> dict[str, Any]:
        """Return the status entry of an object."""
        return {
            "key": stored.key,
            "source": stored.source,
            "nbytes": stored.nbytes,
            "tensors": stored.tensors,
            "hits": stored.hits,
            "copy_ns": stored.copy_ns,
            "attached": sorted(client.pid for client in stored.attached),
        }

    def status(self) -> dict[str, Any]:
        """Return the contents of the store, and the attached processes.

        `pending_jobs` counts the copies and comparisons that are queued or under way, also those of clients that have
        ended since. `copying_bytes` does not show all of them: a copy reserves its bytes when it has read the source.
        """
        with self.shelf.lock:
            entries = [*self.shelf.objects.values(), *self.shelf.withdrawn_objects]
            return {
                "pid": os.getpid(),
                "generation": self.generation,
                "capacity_bytes": self.shelf.capacity_bytes,
                "held_bytes": self.shelf.stored_bytes,
                "copying_bytes": self.shelf.reserved_bytes,
                "pending_jobs": self._pending_jobs,
                "eviction": self.shelf.eviction.value,
                "evictions": self.shelf.evictions,
                "connections": len(self._clients),
                "objects": [
                    self._status_entry(stored) for stored in sorted(entries, key=lambda stored: -stored.last_use)
                ],
            }

    # --- work of the thread ---------------------------------------------------------------------------

    def _join_waiting(self, client: Client, key: Hashable) -> bool:
        """Add a client to those that wait; return whether the object is being made already, for other clients."""
        client.awaited_key = key
        self._waiting.setdefault(key, []).append(client)
        return len(self._waiting[key]) > 1

    def _queue_job(
        self, key: Hashable, work: Callable[[], Result], callback: Callable[[Result, list[Client]], object]
    ) -> None:
        """Queue work for the thread; the loop then handles the result and the clients that wait for it.

        Args:
            key: the key passed to `_join_waiting`.
            work: must not raise; returns soon after `end` was called.
            callback: called in the loop.
        """
        self._pending_jobs += 1
        self._jobs.put((key, work, callback))

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, work, callback = job
            self._results.put((key, functools.partial(callback, work())))
            self._wake()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        self._handle_results()

    def _handle_results(self) -> None:
        """Handle the thread's results."""
        while not self._results.empty():
            key, callback = self._results.get()
            waiting = self._waiting.pop(key, [])
            for client in waiting:
                client.awaited_key = None
            callback(waiting)
            self._pending_jobs -= 1

    def _keep_copy(self, result: CopyResult[Kind], waiting: list[Client]) -> Kind | None:
        """Keep a new object and give it to the clients that wait; return the kept object, None after an error."""
        if result.object is None:
            self.shelf.release(result.reserved)
            for client in waiting:
                self._send(client, {"error": result.error})
                self._follow(client)
            return None
        stored = self.shelf.put(result.object, waiting)
        for client in waiting:
            self._hand_over(client, stored, False, result.spans)
            self._follow(client)
        return stored


def _listen(path: str) -> socket.socket:
    """Return a socket that listens at a path; a socket that a killed store left there is replaced.

    Raises:
        ShareError: the path is not a socket, or the socket cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ShareError(f"{path}: is not a socket; move it away, or give another directory with --dir")
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(256)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ShareError(f"{path}: no socket can be created there ({error.strerror})") from error
    except ShareError:
        listener.close()
        raise
    return listener


def error_text(error: Exception, source: str) -> str:
    """Return the message for clients: that of a ShareError, else the source with the error."""
    return str(error) if isinstance(error, ShareError) else f"{source}: {type(error).__name__}: {error}"


def most_clients() -> int:
    """Raise the descriptor limit of this process to the maximum, and return how many clients and objects it allows.

    A client takes a descriptor, its process or the file that it sends another one, and an object a third one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    available = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
    return max(1, (available - RESERVED_DESCRIPTORS) // 3)
