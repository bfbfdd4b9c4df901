"""Blocks that the program names, and the stack of open blocks of each thread."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from xsp import clock
from xsp.schema import Kind, Level, Span


class Blocks:
    """The named blocks that ended while a profile was active, until they are stored."""

    def __init__(self) -> None:
        self.ended_spans: list[Span] = []
        """Spans with times of the monotonic clock; all threads append."""

        self._enclosing: list[Span] = []
        self._since_ns = 0
        self._was_dropped = False

    def take(self, since_ns: int = 0) -> list[Span]:
        """Return and forget the blocks that ended since the last call and began at `since_ns` or later.

        Blocks that began earlier enclose the previous step, or several steps: they belong to no single step, and are
        kept until the end of the run. Those that enclose a dropped step are forgotten.
        """
        ended_spans, self.ended_spans = self.ended_spans, []
        boundary_ns = self._since_ns if self._was_dropped else since_ns
        self._since_ns, self._was_dropped = since_ns, False
        if not since_ns:
            return [*self._enclosing, *ended_spans]
        self._enclosing += [span for span in ended_spans if span.start_ns < min(boundary_ns, since_ns)]
        return [span for span in ended_spans if span.start_ns >= since_ns]

    def drop(self, since_ns: int) -> None:
        """Forget the blocks of a step that is not recorded, but not those around several steps."""
        if self.ended_spans:
            self.take(since_ns)
        self._since_ns, self._was_dropped = since_ns, True


class _OpenSpans(threading.local):
    """The ids of the blocks and of the step that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.ids: list[str] = []


_open = _OpenSpans()
_active: Blocks | None = None


def activate(blocks: Blocks | None) -> None:
    """Record blocks that begin from now on in `blocks`; None to record none."""
    global _active
    _active = blocks


def enter(span_id: str) -> None:
    """Make a span the innermost one on this thread."""
    _open.ids.append(span_id)


def leave(span_id: str) -> str | None:
    """Close a span on this thread, and all spans left open inside it; return the id of its parent span."""
    ids = _open.ids
    if span_id in ids:
        del ids[ids.index(span_id) :]
    return ids[-1] if ids else None


def add_span(name: str, start_ns: int, end_ns: int) -> None:
    """Record an application span that has ended, with the block that is open on this thread as its parent.

    It is used for work that another process of the machine did for this one. Without an active profile it does nothing.

    Args:
        name: name of the span.
        start_ns: its start, on the monotonic clock of the machine (`xsp.clock.monotonic_ns`).
        end_ns: its end, on the same clock.
    """
    if _active is not None:
        parent_id = _open.ids[-1] if _open.ids else None
        _active.ended_spans.append(_span(os.urandom(8).hex(), parent_id, name, start_ns, end_ns, "ok"))


def _span(span_id: str, parent_id: str | None, name: object, start_ns: int, end_ns: int, status: str) -> Span:
    return Span(
        span_id=span_id,
        parent_id=parent_id,
        level=Level.APPLICATION,
        kind=Kind.USER.value,
        name=_text(name),
        start_ns=start_ns,
        dur_ns=end_ns - start_ns,
        thread=threading.get_native_id(),
        status=status,
        collector="session",
    )


def _text(name: object) -> str:
    """Return the name of a block as text: programs name blocks by numbers and paths, too."""
    try:
        return name if isinstance(name, str) else str(name)
    except Exception:  # the program's own classes may raise anything
        return type(name).__name__


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
            enter(self._id)
            self._start = clock.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._blocks is None:
            return
        end = clock.monotonic_ns()
        status = "ok" if kind is None else f"error:{kind.__name__}"
        self._blocks.ended_spans.append(_span(self._id, leave(self._id), self.name, self._start, end, status))
