"""The contents of a store: objects with their sizes and clients, and the order in which they are evicted."""

from __future__ import annotations

import enum
import os
import socket
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from xsp.connections import Connection
from xsp.errors import ShareError
from xsp.texts import size_text


class Eviction(str, enum.Enum):
    """Order in which unattached objects are evicted when room is needed."""

    LRU = "lru"
    """Least recently used first."""

    LFU = "lfu"
    """Least frequently requested first; among equals, least recently used first."""

    GDSF = "gdsf"
    """Objects that are quick to copy again for their size and rarely requested first: Greedy-Dual-Size-Frequency,
    L. Cherkasova, HP Laboratories, 1998. The priority of an object is L + uses · cost / size, and L is the priority of
    the last evicted object, so that formerly popular objects age."""


@dataclass(eq=False)
class Object:
    """Weights in memory."""

    key: str
    memory: int
    """Descriptor, or address on a device."""

    nbytes: int
    tensors: int
    source: str
    """Name given by the client that first requested it."""

    copy_ns: int = 0
    """Nanoseconds that the copy took."""

    large_bytes: int = 0
    """Number of its bytes that have large pages."""

    attached: set[Client] = field(default_factory=set)
    last_use: int = 0
    """Logical time of its last request or release, on a counter of such events."""

    hits: int = 0
    priority: float = 0.0
    """Priority for `Eviction.GDSF`, computed at its last use."""

    def free(self) -> None:
        """Free the memory."""
        os.close(self.memory)


Kind = TypeVar("Kind", bound=Object)


@dataclass(eq=False)
class Client:
    """A connection."""

    connection: socket.socket
    pid: int
    object: Object | None = None
    awaited_key: Hashable | None = None
    """Key of the work that the client waits for, such as the version of a file that is being copied."""

    place: Connection | None = None
    """Its place among the connections of the store."""

    stays: bool = False
    """Whether it keeps its place while it holds nothing, as the store of a device does, which ends with this one."""

    process: int = -1
    """Descriptor of its process, if memory may be freed only after the process has ended."""


class StoreSpan(NamedTuple):
    """Work of the store for a client, on the machine's monotonic clock."""

    name: str
    start_ns: int
    end_ns: int


class Shelf(Generic[Kind]):
    """The objects with their sizes, and the eviction of some to make room for others. Two threads use it."""

    def __init__(
        self, capacity_bytes: int, eviction: Eviction = Eviction.LRU, option: str = "xsp share serve --capacity"
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.eviction = eviction
        self.objects: dict[str, Kind] = {}
        self.withdrawn_objects: list[Kind] = []
        """Attached objects that are no longer handed out; they are freed after the last client has detached."""

        self.most_objects = 1 << 16
        """Maximum number of objects, each of which takes a descriptor."""

        self.reserved_bytes = 0
        """Bytes reserved for objects that are being copied."""

        self.evictions = 0
        self.lock = threading.Lock()
        self._option = option
        self._moment = 0
        self._inflation = 0.0
        """L of `Eviction.GDSF`."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(stored.nbytes for stored in [*self.objects.values(), *self.withdrawn_objects])

    def reserve(self, nbytes: int, label: str) -> int:
        """Make room by evicting unattached objects, in the order of `eviction`; return the number of evicted objects.

        An object whose turn came first is kept after all if the objects evicted after it make enough room.

        Raises:
            ShareError: there would not be enough room even so; then nothing was evicted.
        """
        with self.lock:
            free_bytes = self.capacity_bytes - self.stored_bytes - self.reserved_bytes
            unattached = sorted(
                (stored for stored in self.objects.values() if not stored.attached), key=self._eviction_key
            )
            if nbytes > free_bytes + sum(stored.nbytes for stored in unattached):
                used_bytes = self.capacity_bytes - free_bytes - sum(stored.nbytes for stored in unattached)
                raise ShareError(
                    f"{label}: {size_text(nbytes)} do not fit: of {size_text(self.capacity_bytes)}, "
                    f"{size_text(used_bytes)} are attached{self._attached_text()} or being copied, which is never "
                    f"evicted; increase it with {self._option} SIZE"
                )
            surplus = len(self.objects) + len(self.withdrawn_objects) + 1 - self.most_objects
            if surplus > len(unattached):
                raise ShareError(f"{label}: the store has {self.most_objects} attached objects, and no place for more")
            evicted: list[Kind] = []
            for stored in unattached:
                if nbytes <= free_bytes and len(evicted) >= surplus:
                    break
                evicted.append(stored)
                free_bytes += stored.nbytes
            for stored in reversed(evicted[:-1]):
                if nbytes <= free_bytes - stored.nbytes and len(evicted) > surplus:
                    evicted.remove(stored)
                    free_bytes -= stored.nbytes
            for stored in evicted:
                self.evict(stored)
                self._inflation = max(self._inflation, stored.priority)
            self.reserved_bytes += nbytes
            return len(evicted)

    def _attached_text(self) -> str:
        """Return the part of a message that names the attached processes; the caller holds the lock."""
        pids = sorted(
            {client.pid for stored in [*self.objects.values(), *self.withdrawn_objects] for client in stored.attached}
        )
        text = ", ".join(map(str, pids[:5])) + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
        return f" (by process {text})" if pids else ""

    def evict_one(self) -> bool:
        """Evict the unattached object that comes first; return whether there was one."""
        with self.lock:
            unattached = [stored for stored in self.objects.values() if not stored.attached]
            if unattached:
                self.evict(min(unattached, key=self._eviction_key))
            return bool(unattached)

    def withdraw(self, stored: Kind) -> None:
        """Stop handing out an object; it is freed after its last client has detached."""
        with self.lock:
            del self.objects[stored.key]
            if stored.attached:
                self.withdrawn_objects.append(stored)
            else:
                stored.free()

    def attached_text(self) -> str:
        """Return the attached processes as part of a message: ` (by process 12)`; empty if there are none."""
        with self.lock:
            return self._attached_text()

    def _eviction_key(self, stored: Kind) -> tuple[float, int]:
        """Return the sort key for eviction: the lowest goes first."""
        if self.eviction is Eviction.LFU:
            return stored.hits, stored.last_use
        return (stored.priority if self.eviction is Eviction.GDSF else 0.0), stored.last_use

    def release(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self.lock:
            self.reserved_bytes -= nbytes

    def put(self, new_object: Kind, clients: Iterable[Client] = ()) -> Kind:
        """Keep an object in its reserved room, and attach the clients that wait for it before it can be evicted.

        Returns:
            The object, or the one of the same key that was there already.
        """
        with self.lock:
            self.reserved_bytes -= new_object.nbytes
            stored = self.objects.setdefault(new_object.key, new_object)
            if stored is not new_object:
                new_object.free()
            self.touch(stored)
            for client in clients:
                self._attach(client, stored)
            return stored

    def touch(self, stored: Object) -> None:
        """Record a use of an object."""
        self._moment += 1
        stored.last_use = self._moment
        stored.priority = self._inflation + (stored.hits + 1) * stored.copy_ns / max(stored.nbytes, 1)

    def attach(self, client: Client, stored: Kind) -> bool:
        """Attach a client; return False if the object has gone, because the other thread has just evicted it."""
        with self.lock:
            if self.objects.get(stored.key) is not stored:
                return False
            self._attach(client, stored)
            return True

    def _attach(self, client: Client, stored: Kind) -> None:
        stored.attached.add(client)
        client.object = stored
        self.touch(stored)

    def detach(self, client: Client) -> None:
        """Detach a client; a second call has no effect."""
        with self.lock:
            stored, client.object = client.object, None
            if stored is None:
                return
            stored.attached.discard(client)
            self.touch(stored)
            unattached = [entry for entry in self.withdrawn_objects if not entry.attached]
            self.withdrawn_objects = [entry for entry in self.withdrawn_objects if entry.attached]
            for entry in unattached:
                entry.free()

    def evict(self, stored: Kind) -> None:
        """Remove an unattached object; the caller holds the lock."""
        assert not stored.attached
        del self.objects[stored.key]
        stored.free()
        self.evictions += 1
