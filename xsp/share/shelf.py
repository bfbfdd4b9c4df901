"""What the store holds: objects with their sizes and clients, and which of them go where room is needed."""

from __future__ import annotations

import enum
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from xsp.errors import ShareError


class Eviction(str, enum.Enum):
    """Which of the weights that nobody is attached to go first, where room is needed."""

    LRU = "lru"
    """What was used longest ago."""

    LFU = "lfu"
    """What was asked for least often; of those, what was used longest ago."""

    GDSF = "gdsf"
    """What takes little time to copy again for its size and was asked for seldom: Greedy-Dual-Size-Frequency,
    L. Cherkasova, HP Laboratories, 1998. The priority of an object is L + uses · cost / size, and L is the priority of
    what was evicted last, so that what was popular once grows old."""


@dataclass(eq=False)
class Object:
    """Weights in memory."""

    key: str
    memory: int
    """Descriptor."""

    nbytes: int
    tensors: int
    source: str
    """What the client called it that brought it."""

    copy_ns: int = 0
    """How long it took to copy."""

    large_bytes: int = 0
    """How many of its bytes have large pages."""

    attached: set[Client] = field(default_factory=set)
    used: int = 0
    """When it was last asked for or let go, in a count of such moments."""

    hits: int = 0
    priority: float = 0.0
    """By `Eviction.GDSF`, when it was used last."""


@dataclass(eq=False)
class Client:
    """A connection."""

    connection: socket.socket
    pid: int
    object: Object | None = None
    waits_for: tuple[int, ...] | None = None
    """The state of a file that is being copied for it."""


class Span(NamedTuple):
    """What the store did for a client, on the machine's monotonic clock."""

    name: str
    start_ns: int
    end_ns: int


class Shelf:
    """The objects with their sizes: what is evicted so that another one fits. Two threads use it."""

    def __init__(self, capacity_bytes: int, eviction: Eviction = Eviction.LRU) -> None:
        self.capacity_bytes = capacity_bytes
        self.eviction = eviction
        self.objects: dict[str, Object] = {}
        self.reserved_bytes = 0
        """For what is being copied."""

        self.evictions = 0
        self.lock = threading.Lock()
        self._moment = 0
        self._inflation = 0.0
        """L of `Eviction.GDSF`."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(each.nbytes for each in self.objects.values())

    def reserve(self, nbytes: int, named: str) -> int:
        """Make room, by evicting what is attached to nobody, in the order of `eviction`; return how many were evicted.

        What would have gone is spared where what goes after it makes room enough by itself.

        Raises:
            ShareError: there would not be enough, even so; then nothing was evicted.
        """
        with self.lock:
            free = self.capacity_bytes - self.held_bytes - self.reserved_bytes
            unused = sorted((each for each in self.objects.values() if not each.attached), key=self._worth)
            if nbytes > free + sum(each.nbytes for each in unused):
                held = self.capacity_bytes - free - sum(each.nbytes for each in unused)
                raise ShareError(
                    f"{named}: {size_text(nbytes)} do not fit: of {size_text(self.capacity_bytes)}, {size_text(held)} "
                    "are attached or being copied, which is never evicted; xsp share serve --capacity SIZE for more"
                )
            going: list[Object] = []
            for each in unused:
                if nbytes <= free:
                    break
                going.append(each)
                free += each.nbytes
            for each in reversed(going[:-1]):
                if nbytes <= free - each.nbytes:
                    going.remove(each)
                    free -= each.nbytes
            for each in going:
                self.evict(each)
                self._inflation = max(self._inflation, each.priority)
            self.reserved_bytes += nbytes
            return len(going)

    def _worth(self, each: Object) -> tuple[float, int]:
        """Return what an object is kept for: the lowest goes first."""
        if self.eviction is Eviction.LFU:
            return each.hits, each.used
        return (each.priority if self.eviction is Eviction.GDSF else 0.0), each.used

    def release(self, nbytes: int) -> None:
        """Give back what was reserved."""
        with self.lock:
            self.reserved_bytes -= nbytes

    def put(self, made: Object) -> Object:
        """Keep an object, in the room that was reserved for it; return it, or the same one that was there."""
        with self.lock:
            self.reserved_bytes -= made.nbytes
            there = self.objects.setdefault(made.key, made)
            if there is not made:
                os.close(made.memory)
            return there

    def touch(self, used: Object) -> None:
        """Note that an object was used."""
        self._moment += 1
        used.used = self._moment
        used.priority = self._inflation + (used.hits + 1) * used.copy_ns / max(used.nbytes, 1)

    def attach(self, client: Client, to: Object) -> None:
        """Count a client."""
        with self.lock:
            to.attached.add(client)
            client.object = to
            self.touch(to)

    def detach(self, client: Client) -> None:
        """Count it no more; said twice, it changes nothing."""
        with self.lock:
            if client.object is not None:
                client.object.attached.discard(client)
                self.touch(client.object)
                client.object = None

    def evict(self, unused: Object) -> None:
        """Forget an object that is attached to nobody; the lock is held."""
        assert not unused.attached
        del self.objects[unused.key]
        os.close(unused.memory)
        self.evictions += 1


def size_text(nbytes: int) -> str:
    """Return bytes as people read them: `97.8 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
