"""Spans as columns: what `xsp.correlate` takes, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from xsp.schema import Level, Rule

Array = npt.NDArray[Any]

NONE = np.iinfo(np.int64).min
"""Stands for an id or a number that is not known."""

RULES: tuple[Rule | None, ...] = (
    None, Rule.CONTAINMENT, Rule.SEQUENCE, Rule.CORRELATION, Rule.GRAPH, Rule.EXTERNAL, Rule.EXPLICIT, Rule.SERIALISED,
    Rule.CAPTURE, Rule.PROVENANCE,
)  # fmt: skip
"""The evidence for a parent by its number in `Parents.rule`."""

CONTAINED, FOLLOWED, LAUNCHED, REPLAYED, EXTERNAL, EXPLICIT = range(1, 7)

PHASES = (None, "forward", "backward", "optimizer")
"""Phases by their number in `Spans.phase`: 0 where it is that of the span above."""

BACKWARD = 2


@dataclass(slots=True)
class Sequences:
    """Which operator made which autograd node."""

    number: Array
    """`NONE` where an operator has none."""

    backward: Array
    """True of an operator that follows its number, and does not make it."""

    forward: Array
    """Of such an operator: the `line` of its forward operator; -1 where the source does not tell."""


@dataclass(slots=True)
class Launches:
    """Which call launched which device work."""

    seeks: Array
    """True where the parent is that of the launch: device work."""

    may_launch: Array
    correlation: Array
    """Joins the two; `NONE` where it has none."""

    graph: Array
    """True of the launch of a graph, and of device work of a graph that is replayed."""

    operator: Array | None = None
    """The source's own id of an operator; of device work, that of the operator it is of. `NONE` elsewhere."""


@dataclass(slots=True)
class Allocations:
    """Memory that was taken."""

    is_one: Array
    """Nothing is inside of an allocation, whatever the times say."""

    size: Array
    """Bytes of one that counts; 0 elsewhere."""


@dataclass(slots=True)
class Calls:
    """Calls of a library in which operators run that the same collector saw: gloo's do, on threads of their own."""

    runs: Array
    """Of such a call the number of its collector, from 1; 0 elsewhere."""

    collector: Array
    """Of an operator the number of its collector; 0 elsewhere."""


@dataclass(slots=True)
class Named:
    """Parents that the caller or the collector named."""

    parent: Array
    """Its `number`; -1 where none is named, -2 where it is not among the spans."""

    rule: Array
    is_user: Array
    """True of a block that a user named."""


@dataclass(slots=True)
class Parts:
    """What the parts of a step belong to, on whatever thread they are."""

    is_step: Array
    is_pass: Array
    """True of a backward pass."""


@dataclass(slots=True)
class Spans:
    """Spans that are correlated together, a value of each column for each span; times in nanoseconds on one clock.

    Evidence that no span has is None.
    """

    number: Array
    """No two have the same. Decides between spans that are alike otherwise."""

    start: Array
    end: Array
    level: Array
    deepest: Array
    """Of the levels that may be around it."""

    process: Array
    """`NONE` where the source does not tell."""

    line: Array
    """Number of its thread, from 0; -1 for device work, and where the source does not tell the thread."""

    inside: Array
    """Of spans with the same level and interval, which is further in: the one with the larger value."""

    what: Array
    """What it is (level, kind, name): its place in the codes that keys are made of."""

    phase: Array
    """Its place in `PHASES`."""

    counted: Array
    """A bit for each sort of figure that is known of the span itself."""

    launches: Launches | None = None
    sequences: Sequences | None = None
    allocations: Allocations | None = None
    anywhere: Array | None = None
    """True where it ran on a thread that its source does not tell, to be looked for on all."""

    calls: Calls | None = None
    named: Named | None = None
    parts: Parts | None = None

    def __len__(self) -> int:
        return len(self.number)

    def take(self, order: Array) -> Spans:
        """Return the spans in another order."""
        taken: Spans = _taken(self, order)
        return taken


def _taken(part: Any, order: Array) -> Any:
    if part is None:
        return None
    return (
        part[order]
        if isinstance(part, np.ndarray)
        else type(part)(*(_taken(getattr(part, each.name), order) for each in fields(part)))
    )


@dataclass(slots=True)
class Parents:
    """Who is whose parent. All are places in the same order of spans."""

    parent: Array
    """-1 where there is none."""

    rule: Array
    """Place in `RULES`."""

    enclosing: Array | None = None
    """The innermost span around it on its thread, however deep in the stack; where there are allocations."""

    named_in: Array | None = None
    """Of a user's block: the one that was open around it, which may be further out than the parent."""

    candidates: dict[int, list[int]] | None = None
    """Of spans on an unknown thread that may be in several others: these."""


def outer_first(spans: Spans, tolerance: int) -> Array:
    """Return the order in which an outer span stands before those inside of it.

    An operator's clock may put it just before the layer that it runs in, so it counts as that much later.
    """
    begin = begins(spans, tolerance)
    order = np.argsort(begin, kind="stable")
    ordered = begin[order]
    alike = ordered[1:] == ordered[:-1]
    if alike.any():
        tied = np.zeros(len(order), bool)
        tied[1:] |= alike
        tied[:-1] |= alike
        rows = order[tied]
        keys = (spans.number[rows], spans.inside[rows], -spans.end[rows], spans.level[rows], begin[rows])
        order[tied] = rows[np.lexsort(keys)]
    return order


def begins(spans: Spans, tolerance: int) -> Array:
    """Return the times that spans are sorted by."""
    return spans.start + np.where(spans.level >= Level.OP, tolerance, 0)
