"""Blocks that the program names, and which of them are open on which thread."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from xsp import clock
from xsp.schema import Kind, Level, Span


class Blocks:
    """The named blocks that ended while a profile was active, until they are stored."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        """With times of the monotonic clock; all threads append."""

        self._around: list[Span] = []

    def take(self, since_ns: int = 0) -> list[Span]:
        """Return those that ended since the last call and began after a reading of the clock, and forget them.

        Those that began before are around several steps: they belong to none of them, and stay for the end.
        """
        ended, self.ended = self.ended, []
        if not since_ns:
            return [*self._around, *ended]
        self._around += [span for span in ended if span.start_ns < since_ns]
        return [span for span in ended if span.start_ns >= since_ns]

    def drop(self, since_ns: int) -> None:
        """Forget those of a step that is not recorded, but not those that are around several steps."""
        if self.ended:
            self.take(since_ns)


class _Open(threading.local):
    """The ids of the blocks and of the step that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.ids: list[str] = []


_open = _Open()
_active: Blocks | None = None


def keep_in(blocks: Blocks | None) -> None:
    """Have blocks that begin from now on kept there; None for nowhere."""
    global _active
    _active = blocks


def enter(span_id: str) -> None:
    """Make a span the innermost one on this thread."""
    _open.ids.append(span_id)


def leave(span_id: str) -> str | None:
    """Close a span on this thread, with what was left open inside it; return the id of the one around it."""
    ids = _open.ids
    if span_id in ids:
        del ids[ids.index(span_id) :]
    return ids[-1] if ids else None


def took(name: str, start_ns: int, end_ns: int) -> None:
    """Keep a span of the application that has ended, with the block that is open on this thread as its parent.

    For what another process of this machine did on behalf of this one. Without an active profile it does nothing.

    Args:
        name: of the span.
        start_ns: when it began, on the monotonic clock of the machine (`xsp.clock.monotonic_ns`).
        end_ns: when it ended.
    """
    if _active is not None:
        ids = _open.ids
        _active.ended.append(
            Span(
                span_id=os.urandom(8).hex(),
                parent_id=ids[-1] if ids else None,
                level=Level.APPLICATION,
                kind=Kind.USER.value,
                name=name,
                start_ns=start_ns,
                dur_ns=end_ns - start_ns,
                thread=threading.get_native_id(),
                status="ok",
                collector="session",
            )
        )


class span:
    """Record a block of the program as a span of the application: `with xsp.span("preprocess"): ...`.

    Blocks can be nested and used in any thread. Without an active profile they do nothing. A block between two steps
    belongs to the step after it. An assignment to the attribute `name` inside the block renames the span.
    """

    __slots__ = ("_blocks", "_id", "_start", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._blocks: Blocks | None = None

    def __enter__(self) -> span:
        self._blocks = _active
        if self._blocks is not None:
            self._id = os.urandom(8).hex()
            _open.ids.append(self._id)
            self._start = clock.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._blocks is None:
            return
        end = clock.monotonic_ns()
        self._blocks.ended.append(
            Span(
                span_id=self._id,
                parent_id=leave(self._id),
                level=Level.APPLICATION,
                kind=Kind.USER.value,
                name=self.name,
                start_ns=self._start,
                dur_ns=end - self._start,
                thread=threading.get_native_id(),
                status="ok" if kind is None else f"error:{kind.__name__}",
                collector="session",
            )
        )
