"""The connections of a server: how many, what each waits for, for how long, and which one ends if there are too many.

Every server of xsp keeps its connections here, whether threads, asyncio, a selector or gRPC serve them. A connection is
in one of five states. While the server waits for its client, the state has a deadline, and the connection ends if
another one needs its place; while the server works, it has neither. So a client that does nothing, or that sends or
reads slowly, makes no other client wait, however many there are of it.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


class State(enum.IntEnum):
    """What happens on a connection."""

    IDLE = 0
    """Nothing: the client may send a request."""

    HEADER = 1
    """The client opened the connection, or began a request, and sends its header."""

    BODY = 2
    """The client sends the body of a request."""

    ANSWER = 3
    """The client reads an answer."""

    WORK = 4
    """The server works for the client; or the connection is in use for as long as it lasts, as an attachment is."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a server."""

    connections: int = 64
    """Connections at a time. A further one takes the place of one that waits for its client, else it is refused."""

    header_bytes: int = 128 << 10
    """Bytes of a header, in all its lines."""

    header_s: float = 10.0
    """Seconds for a header to arrive completely, from its first byte, or from the opening of the connection."""

    body_s: float = 30.0
    """Seconds for the body of a request to arrive completely."""

    answer_s: float = 30.0
    """Seconds for an answer, or for each piece of a stream of answers, to be accepted."""

    idle_s: float = 30.0
    """Seconds between two requests."""

    def seconds(self, state: State) -> float:
        """Return the seconds that a connection may be in a state."""
        return {
            State.IDLE: self.idle_s,
            State.HEADER: self.header_s,
            State.BODY: self.body_s,
            State.ANSWER: self.answer_s,
            State.WORK: float("inf"),
        }[state]


class Connection:
    """A connection of a client."""

    def __init__(self, limits: ConnectionLimits, peer: str, close: Callable[[], object]) -> None:
        self.peer = peer
        self.close = close
        self._limits = limits
        self.enter(State.HEADER)

    def enter(self, state: State) -> None:
        """Change the state, from which on its time counts."""
        self.state = state
        self.since_s = time.monotonic()
        self.deadline_s = self.since_s + self._limits.seconds(state)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; infinite if the server works."""
        return self.deadline_s - time.monotonic()


class Connections:
    """The connections of a server; any thread may use it."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """Begin without connections."""
        self.limits = limits
        self._open: set[Connection] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, peer: str, close: Callable[[], object]) -> Connection | None:
        """Return a new connection, in the state HEADER; None if the server works for all that there are.

        If the server is full, a connection ends whose client the server waits for: of the client that has most, first
        one without a complete header, and the one that has been in its state for longest.

        Args:
            peer: address of the client, without its port; or its process.
            close: ends the connection, from any thread.
        """
        connection, evicted = Connection(self.limits, peer, close), None
        with self._lock:
            if len(self._open) >= self.limits.connections:
                counts = Counter([peer, *(other.peer for other in self._open)])
                waiting = [other for other in self._open if other.state is not State.WORK]
                if not waiting:
                    return None
                evicted = min(
                    waiting, key=lambda other: (-counts[other.peer], other.state > State.HEADER, other.since_s)
                )
                self._open.discard(evicted)
            self._open.add(connection)
        if evicted is not None:
            _end(evicted)
        return connection

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended; a second call has no effect."""
        with self._lock:
            self._open.discard(connection)

    def sweep(self) -> None:
        """End the connections whose deadline has passed; a server without a thread per connection calls it often."""
        now_s = time.monotonic()
        with self._lock:
            late = [connection for connection in self._open if connection.deadline_s < now_s]
            self._open.difference_update(late)
        for connection in late:
            _end(connection)


def _end(connection: Connection) -> None:
    with contextlib.suppress(OSError):  # it has just ended by itself
        connection.close()
