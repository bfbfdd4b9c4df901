"""Spans as columns: the input and the output of `xsp.correlate`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from xsp.schema import Level, Rule

Array = npt.NDArray[Any]

NONE = np.iinfo(np.int64).min
"""Placeholder for an unknown id or number."""

RULES: tuple[Rule | None, ...] = (
    None, Rule.CONTAINMENT, Rule.SEQUENCE, Rule.CORRELATION, Rule.GRAPH, Rule.EXTERNAL, Rule.EXPLICIT, Rule.SERIALISED,
    Rule.CAPTURE, Rule.PROVENANCE, Rule.ORDER,
)  # fmt: skip
"""The evidence for a parent, indexed by the number in `Parents.rule`."""

CONTAINMENT, SEQUENCE, CORRELATION, GRAPH, EXTERNAL, EXPLICIT = range(1, 7)

PHASES = (None, "forward", "backward", "optimizer")
"""Phases, indexed by the number in `Spans.phase`; 0 means the phase of the parent span."""

BACKWARD = 2


@dataclass(slots=True)
class Sequences:
    """Sequence numbers, which link a backward operator to the forward operator that created its autograd node."""

    number: Array
    """Sequence number; `NONE` for operators without one."""

    backward: Array
    """True for an operator that carries the number of its forward operator: a backward operator."""

    forward: Array
    """For backward operators: the `thread_index` of the forward operator; -1 if the source does not report it."""


@dataclass(slots=True)
class Launches:
    """Links between device work and the calls that launched it."""

    seeks_launch: Array
    """True for spans that take the parent of their launch: device work."""

    may_launch: Array
    correlation: Array
    """Correlation id, shared by a launch and its device work; `NONE` if there is none."""

    graph: Array
    """True for the launch of a graph, and for device work of a replayed graph."""

    operator: Array | None = None
    """The source's own id of an operator; for device work, the id of the operator that issued it. `NONE` elsewhere."""


@dataclass(slots=True)
class Allocations:
    """Memory allocations."""

    is_allocation: Array
    """True for an allocation, which never has children, even if the times suggest them."""

    size: Array
    """Bytes of each allocation that counts; 0 elsewhere."""


@dataclass(slots=True)
class Calls:
    """Library calls that may contain operators of the same collector, as gloo's calls do on their own threads."""

    call_collector: Array
    """For such a call the number of its collector, from 1; 0 elsewhere."""

    op_collector: Array
    """For an operator the number of its collector; 0 elsewhere."""


@dataclass(slots=True)
class NamedParents:
    """Parents that the caller or the collector named."""

    parent: Array
    """`number` of the parent; -1 if none is named, -2 if the named parent is not among the spans."""

    rule: Array
    is_user: Array
    """True for a user block (kind USER)."""


@dataclass(slots=True)
class StepParts:
    """Step spans and backward passes, which may be parents of spans on other threads."""

    is_step: Array
    is_pass: Array
    """True for a backward pass."""


@dataclass(slots=True)
class Spans:
    """Spans that are correlated together, one value per span in each column; times in nanoseconds on one clock.

    A group of evidence is None if no span has it.
    """

    number: Array
    """Unique number of the span; it breaks ties between spans that are otherwise equal."""

    start: Array
    end: Array
    level: Array
    max_outer_level: Array
    """Deepest level that a span containing this one may have."""

    process: Array
    """`NONE` if the source does not report it."""

    thread_index: Array
    """Number of the thread, from 0; -1 for device work, and if the source does not report the thread."""

    nesting: Array
    """Nesting order of spans with the same level and interval: the larger value is the inner span."""

    identity: Array
    """Index of the span's identity (level, kind, name) in the codes that keys are made of."""

    phase: Array
    """Index in `PHASES`."""

    figure_bits: Array
    """Bit mask of the sorts of figures that are known for the span itself."""

    launches: Launches | None = None
    sequences: Sequences | None = None
    allocations: Allocations | None = None
    is_threadless: Array | None = None
    """True if the source does not report the thread of the span, so that all threads are searched for its parent."""

    calls: Calls | None = None
    named_parents: NamedParents | None = None
    step_parts: StepParts | None = None

    def __len__(self) -> int:
        return len(self.number)

    def take(self, order: Array) -> Spans:
        """Return the spans in another order."""
        reordered: Spans = _reordered(self, order)
        return reordered


def _reordered(part: Any, order: Array) -> Any:
    if part is None:
        return None
    return (
        part[order]
        if isinstance(part, np.ndarray)
        else type(part)(*(_reordered(getattr(part, column.name), order) for column in fields(part)))
    )


@dataclass(slots=True)
class Parents:
    """The parent of each span. All values are indices into the same order of spans."""

    parent: Array
    """Index of the parent; -1 if there is none."""

    rule: Array
    """Index in `RULES`."""

    enclosing: Array | None = None
    """The innermost span around each span on its thread, at any level; only if there are allocations."""

    outer_block: Array | None = None
    """For a user block: the user block that was open around it, which may be further out than the parent."""

    candidates: dict[int, list[int]] | None = None
    """The candidate parents of each span on an unknown thread that has several."""


def outer_first(spans: Spans, tolerance: int) -> Array:
    """Return the order in which an outer span comes before the spans inside it.

    An operator's clock may date it just before the layer that it runs in, so operators are sorted `tolerance` later.
    """
    begin = sort_times(spans, tolerance)
    order = np.argsort(begin, kind="stable")
    ordered = begin[order]
    equal = ordered[1:] == ordered[:-1]
    if equal.any():
        tied = np.zeros(len(order), bool)
        tied[1:] |= equal
        tied[:-1] |= equal
        rows = order[tied]
        keys = (spans.number[rows], spans.nesting[rows], -spans.end[rows], spans.level[rows], begin[rows])
        order[tied] = rows[np.lexsort(keys)]
    return order


def sort_times(spans: Spans, tolerance: int) -> Array:
    """Return the start times that spans are sorted by."""
    return spans.start + np.where(spans.level >= Level.OP, tolerance, 0)
