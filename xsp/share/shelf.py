"""What the store holds: objects with their sizes and clients, and which of them go where room is needed."""

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
    """Descriptor, or address on a device."""

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

    def free(self) -> None:
        """Give the memory back."""
        os.close(self.memory)


Kind = TypeVar("Kind", bound=Object)


@dataclass(eq=False)
class Client:
    """A connection."""

    connection: socket.socket
    pid: int
    object: Object | None = None
    waits_for: Hashable | None = None
    """What is being made for it: such as the state of a file that is copied."""

    process: int = -1
    """Descriptor of its process, where memory may be freed only once that has ended."""


class Span(NamedTuple):
    """What the store did for a client, on the machine's monotonic clock."""

    name: str
    start_ns: int
    end_ns: int


class Shelf(Generic[Kind]):
    """The objects with their sizes: what is evicted so that another one fits. Two threads use it."""

    def __init__(
        self, capacity_bytes: int, eviction: Eviction = Eviction.LRU, option: str = "xsp share serve --capacity"
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.eviction = eviction
        self.objects: dict[str, Kind] = {}
        self.withdrawn: list[Kind] = []
        """Attached, and given to nobody else: freed when they are let go."""

        self.reserved_bytes = 0
        """For what is being copied."""

        self.evictions = 0
        self.lock = threading.Lock()
        self._option = option
        self._moment = 0
        self._inflation = 0.0
        """L of `Eviction.GDSF`."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(each.nbytes for each in [*self.objects.values(), *self.withdrawn])

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
                    f"are attached{self._by_whom()} or being copied, which is never evicted; {self._option} SIZE for "
                    "more"
                )
            going: list[Kind] = []
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

    def _by_whom(self) -> str:
        """Return how a message goes on that says that something is attached; the lock is held."""
        pids = sorted({client.pid for each in [*self.objects.values(), *self.withdrawn] for client in each.attached})
        shown = ", ".join(map(str, pids[:5])) + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
        return f" (by process {shown})" if pids else ""

    def spare(self) -> bool:
        """Evict what is worth least of what is attached to nobody; return whether there was any."""
        with self.lock:
            unused = [each for each in self.objects.values() if not each.attached]
            if unused:
                self.evict(min(unused, key=self._worth))
            return bool(unused)

    def withdraw(self, given: Kind) -> None:
        """Give an object to nobody any more; it is freed when those who are attached have let it go."""
        with self.lock:
            del self.objects[given.key]
            if given.attached:
                self.withdrawn.append(given)
            else:
                given.free()

    def attached_text(self) -> str:
        """Return who is attached, as a message says it: ` (by process 12)`; nothing where nobody is."""
        with self.lock:
            return self._by_whom()

    def _worth(self, each: Kind) -> tuple[float, int]:
        """Return what an object is kept for: the lowest goes first."""
        if self.eviction is Eviction.LFU:
            return each.hits, each.used
        return (each.priority if self.eviction is Eviction.GDSF else 0.0), each.used

    def release(self, nbytes: int) -> None:
        """Give back what was reserved."""
        with self.lock:
            self.reserved_bytes -= nbytes

    def put(self, made: Kind, clients: Iterable[Client] = ()) -> Kind:
        """Keep an object, in the room that was reserved for it, and count those who wait for it before it can go again.

        Returns:
            It, or the same one that was there.
        """
        with self.lock:
            self.reserved_bytes -= made.nbytes
            there = self.objects.setdefault(made.key, made)
            if there is not made:
                made.free()
            self.touch(there)
            for client in clients:
                self._attach(client, there)
            return there

    def touch(self, used: Object) -> None:
        """Note that an object was used."""
        self._moment += 1
        used.used = self._moment
        used.priority = self._inflation + (used.hits + 1) * used.copy_ns / max(used.nbytes, 1)

    def attach(self, client: Client, to: Kind) -> bool:
        """Count a client; return whether the object is there still: the other thread may have evicted it just now."""
        with self.lock:
            if self.objects.get(to.key) is not to:
                return False
            self._attach(client, to)
            return True

    def _attach(self, client: Client, to: Kind) -> None:
        to.attached.add(client)
        client.object = to
        self.touch(to)

    def detach(self, client: Client) -> None:
        """Count it no more; said twice, it changes nothing."""
        with self.lock:
            used, client.object = client.object, None
            if used is None:
                return
            used.attached.discard(client)
            self.touch(used)
            gone = [each for each in self.withdrawn if not each.attached]
            self.withdrawn = [each for each in self.withdrawn if each.attached]
            for each in gone:
                each.free()

    def evict(self, unused: Kind) -> None:
        """Forget an object that is attached to nobody; the lock is held."""
        assert not unused.attached
        del self.objects[unused.key]
        unused.free()
        self.evictions += 1


def size_text(nbytes: int) -> str:
    """Return bytes as people read them: `97.8 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
