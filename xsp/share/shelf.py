"""The contents of a store: objects with their sizes and clients, and the order in which they are evicted."""

from __future__ import annotations

import enum
import os
import socket
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from xsp.errors import ShareError


class Eviction(str, enum.Enum):
    """Order in which unattached objects are evicted when room is needed."""

    LRU = "lru"
    """Least recently used first."""

    LFU = "lfu"
    """Least frequently requested first; among equals, least recently used first."""

    GDSF = "gdsf"
    """First what takes little time to copy again for its size and was requested rarely: Greedy-Dual-Size-Frequency,
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
    used: int = 0
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
    waits_for: Hashable | None = None
    """Key of the work that the client waits for, such as the version of a file that is being copied."""

    process: int = -1
    """Descriptor of its process, if memory may be freed only after the process has ended."""


class Span(NamedTuple):
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
        self.withdrawn: list[Kind] = []
        """Attached objects that are no longer handed out; they are freed after the last client has detached."""

        self.reserved_bytes = 0
        """Bytes reserved for objects that are being copied."""

        self.evictions = 0
        self.lock = threading.Lock()
        self._option = option
        self._moment = 0
        self._inflation = 0.0
        """L of `Eviction.GDSF`."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(stored.nbytes for stored in [*self.objects.values(), *self.withdrawn])

    def reserve(self, nbytes: int, named: str) -> int:
        """Make room by evicting unattached objects, in the order of `eviction`; return the number of evicted objects.

        An object whose turn came first is kept after all if the objects evicted after it make enough room.

        Raises:
            ShareError: there would not be enough room even so; then nothing was evicted.
        """
        with self.lock:
            free = self.capacity_bytes - self.held_bytes - self.reserved_bytes
            unused = sorted((stored for stored in self.objects.values() if not stored.attached), key=self._worth)
            if nbytes > free + sum(stored.nbytes for stored in unused):
                used = self.capacity_bytes - free - sum(stored.nbytes for stored in unused)
                raise ShareError(
                    f"{named}: {size_text(nbytes)} do not fit: of {size_text(self.capacity_bytes)}, {size_text(used)} "
                    f"are attached{self._by_whom()} or being copied, which is never evicted; increase it with "
                    f"{self._option} SIZE"
                )
            evicted: list[Kind] = []
            for stored in unused:
                if nbytes <= free:
                    break
                evicted.append(stored)
                free += stored.nbytes
            for stored in reversed(evicted[:-1]):
                if nbytes <= free - stored.nbytes:
                    evicted.remove(stored)
                    free -= stored.nbytes
            for stored in evicted:
                self.evict(stored)
                self._inflation = max(self._inflation, stored.priority)
            self.reserved_bytes += nbytes
            return len(evicted)

    def _by_whom(self) -> str:
        """Return the part of a message that names the attached processes; the caller holds the lock."""
        pids = sorted(
            {client.pid for stored in [*self.objects.values(), *self.withdrawn] for client in stored.attached}
        )
        shown = ", ".join(map(str, pids[:5])) + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
        return f" (by process {shown})" if pids else ""

    def spare(self) -> bool:
        """Evict the unattached object of the least worth; return whether there was one."""
        with self.lock:
            unused = [stored for stored in self.objects.values() if not stored.attached]
            if unused:
                self.evict(min(unused, key=self._worth))
            return bool(unused)

    def withdraw(self, given: Kind) -> None:
        """Stop handing out an object; it is freed after its last client has detached."""
        with self.lock:
            del self.objects[given.key]
            if given.attached:
                self.withdrawn.append(given)
            else:
                given.free()

    def attached_text(self) -> str:
        """Return the attached processes as part of a message: ` (by process 12)`; empty if there are none."""
        with self.lock:
            return self._by_whom()

    def _worth(self, stored: Kind) -> tuple[float, int]:
        """Return the sort key for eviction: the lowest goes first."""
        if self.eviction is Eviction.LFU:
            return stored.hits, stored.used
        return (stored.priority if self.eviction is Eviction.GDSF else 0.0), stored.used

    def release(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self.lock:
            self.reserved_bytes -= nbytes

    def put(self, made: Kind, clients: Iterable[Client] = ()) -> Kind:
        """Keep an object in its reserved room, and attach the clients that wait for it before it can be evicted.

        Returns:
            The object, or the one of the same key that was there already.
        """
        with self.lock:
            self.reserved_bytes -= made.nbytes
            stored = self.objects.setdefault(made.key, made)
            if stored is not made:
                made.free()
            self.touch(stored)
            for client in clients:
                self._attach(client, stored)
            return stored

    def touch(self, used: Object) -> None:
        """Record a use of an object."""
        self._moment += 1
        used.used = self._moment
        used.priority = self._inflation + (used.hits + 1) * used.copy_ns / max(used.nbytes, 1)

    def attach(self, client: Client, to: Kind) -> bool:
        """Attach a client; return False if the object has gone, because the other thread has just evicted it."""
        with self.lock:
            if self.objects.get(to.key) is not to:
                return False
            self._attach(client, to)
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
            unattached = [entry for entry in self.withdrawn if not entry.attached]
            self.withdrawn = [entry for entry in self.withdrawn if entry.attached]
            for entry in unattached:
                entry.free()

    def evict(self, unused: Kind) -> None:
        """Remove an unattached object; the caller holds the lock."""
        assert not unused.attached
        del self.objects[unused.key]
        unused.free()
        self.evictions += 1


def size_text(nbytes: int) -> str:
    """Return bytes as text: `97.8 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
