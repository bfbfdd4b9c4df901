"""Calls of layers that were not observed, reconstructed from the work that is known to be theirs.

Code that does not call its modules (compiled code, a replayed graph) still does work of known layers. Consecutive work
of one layer is one call of it. The call lasts from the first piece of work to the last, and is nested in the calls of
the enclosing layers.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from xsp.schema import Kind, Level, Span


class LayerCall(NamedTuple):
    """A call of a module."""

    call: str
    """Identifies the call, to distinguish calls of one module as far as they are known."""

    name: str
    type: str


Path = tuple[LayerCall, ...]
"""Calls of modules, outermost first; empty for work that belongs to the caller of the code."""


def common_prefix(paths: Iterable[Path]) -> Path:
    """Return the longest common prefix: the innermost layer that contains all paths, with the layers around it."""
    first_path, *other_paths = paths
    length = 0
    while length < len(first_path) and all(path[: length + 1] == first_path[: length + 1] for path in other_paths):
        length += 1
    return first_path[:length]


class LayerCalls:
    """Calls of layers, built from pieces of work in the order of their starts."""

    def __init__(self, evidence: str) -> None:
        """Start without calls; `evidence` is put into the spans' attributes."""
        self.calls: list[Span] = []
        self.by_path: dict[Path, list[Span]] = defaultdict(list)
        """Calls of each layer as they were when they began; `calls` has their final durations."""

        self._evidence = json.dumps({"evidence": evidence})
        self._open: list[int] = []  # indexes into self.calls, outermost first
        self._path: Path = ()

    def add(self, work: Span, path: Path) -> Span | None:
        """Assign a piece of work to a layer, and return the call that it belongs to; None if it has no layer."""
        shared_depth = len(common_prefix([self._path, path]))
        del self._open[shared_depth:]
        for depth in range(shared_depth, len(path)):
            parent_id = self.calls[self._open[-1]].span_id if self._open else None
            self._open.append(len(self.calls))
            self.calls.append(self._begin(path[depth], work)._replace(parent_id=parent_id))
            self.by_path[path[: depth + 1]].append(self.calls[-1])
        self._path = path
        for index in self._open:
            call = self.calls[index]
            self.calls[index] = call._replace(dur_ns=max(call.end_ns, work.end_ns) - call.start_ns)
        return self.calls[self._open[-1]] if self._open else None

    def _begin(self, layer: LayerCall, first_work: Span) -> Span:
        return Span(
            span_id=new_span_id(),
            level=Level.LAYER,
            kind=Kind.MODULE.value,
            name=layer.name or layer.type,
            type=layer.type,
            phase="forward",
            start_ns=first_work.start_ns,
            process=first_work.process,
            thread=first_work.thread,
            collector=first_work.collector,
            attributes=self._evidence,
        )


def new_span_id() -> str:
    """Return a new span's id."""
    return os.urandom(8).hex()
