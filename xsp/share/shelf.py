"""What the store holds: objects with their sizes and clients, and which of them go where room is needed."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from xsp.errors import ShareError


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

    attached: set[Client] = field(default_factory=set)
    used: int = 0
    """When it was last asked for or let go, in a count of such moments."""

    hits: int = 0


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

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[str, Object] = {}
        self.reserved_bytes = 0
        """For what is being copied."""

        self.evictions = 0
        self.lock = threading.Lock()
        self._moment = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(each.nbytes for each in self.objects.values())

    def reserve(self, nbytes: int, named: str) -> int:
        """Make room, by evicting what was used longest ago and is attached to nobody; return how many were evicted.

        Raises:
            ShareError: there would not be enough, even so; then nothing was evicted.
        """
        with self.lock:
            free = self.capacity_bytes - self.held_bytes - self.reserved_bytes
            unused = sorted((each for each in self.objects.values() if not each.attached), key=lambda each: each.used)
            if nbytes > free + sum(each.nbytes for each in unused):
                held = self.capacity_bytes - free - sum(each.nbytes for each in unused)
                raise ShareError(
                    f"{named}: {size_text(nbytes)} do not fit: of {size_text(self.capacity_bytes)}, {size_text(held)} "
                    "are attached or being copied, which is never evicted; xsp share serve --capacity SIZE for more"
                )
            evicted = 0
            while nbytes > free:
                free += unused[evicted].nbytes
                self.evict(unused[evicted])
                evicted += 1
            self.reserved_bytes += nbytes
            return evicted

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
