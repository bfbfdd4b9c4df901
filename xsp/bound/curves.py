"""The size of blocks against error and cost: what constructing a model from blocks of G calls is worth, for each G."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xsp.bound.construct import Construction, How, Known, construct
from xsp.graph.node import Graph

MOST = 16
"""Calls of a block, of a curve."""


@dataclass(frozen=True)
class Point:
    """One granularity of a curve."""

    construction: Construction
    error: float | None
    """Constructed over measured, less 1; None if one of them is unknown, or only an "at least"."""


def curve(
    graph: Graph,
    timings: Known,
    measured_ns: float | None = None,
    granularities: Sequence[int] = range(1, MOST + 1),
    *,
    how: How | None = None,
    only: Mapping[int, Collection[str]] | None = None,
    glue_ns: float | None = None,
) -> list[Point]:
    """Return the construction of each granularity, with its error against the measured step.

    The error is of blocks with glue where the glue is known.

    Args:
        graph: of the model.
        timings: where the blocks are looked up.
        measured_ns: the step as it was measured, without the cost of measuring it.
        granularities: numbers of computing calls of a block.
        how: of the timings.
        only: granularity → keys of specs that may be used; all of them unless told otherwise.
        glue_ns: of a call of a module.
    """
    found = []
    for size in granularities:
        usable = None if only is None else only.get(size, ())
        made = construct(graph, timings, size, how=how, only=usable, glue_ns=glue_ns)
        ns = made.ns if made.glue_ns is None else made.with_glue_ns
        known = ns is not None and measured_ns and not made.at_least
        found.append(Point(made, ns / measured_ns - 1 if known and ns is not None and measured_ns else None))
    return found


@dataclass(frozen=True)
class Cost:
    """Timing blocks against running the models, for one granularity."""

    granularity: int
    models: int
    """That take part: all their blocks are timed, and their step is known."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Model → why it takes no part."""

    blocks: int = 0
    unique: int = 0
    steps_ns: float = 0.0
    """One step of each model."""

    blocks_ns: float = 0.0
    """One run of each different block of all of them."""

    @property
    def saved(self) -> float | None:
        """How many times longer running the models takes than running their different blocks, as often each."""
        return self.steps_ns / self.blocks_ns if self.blocks_ns else None


def cost(
    graphs: Iterable[Graph],
    timings: Known,
    steps_ns: Mapping[str, float],
    granularity: int = 1,
    *,
    how: How | None = None,
) -> Cost:
    """Return what timing the different blocks of models costs against running the models, for the same repetitions.

    Args:
        graphs: of the models.
        timings: where the blocks are looked up.
        steps_ns: measured steps by the names of the graphs.
        granularity: computing calls of a block.
        how: of the timings.
    """
    left: dict[str, str] = {}
    taken: dict[str, float] = {}
    models, blocks, steps = 0, 0, 0.0
    for graph in graphs:
        made = construct(graph, timings, granularity, how=how, partial=True)
        if graph.name not in steps_ns:
            left[graph.name] = "its step was not measured"
        elif made.at_least:
            left[graph.name] = f"{sum(each.count for each in made.holes)} of {len(made.windows)} blocks are not timed"
        else:
            models, blocks, steps = models + 1, blocks + len(made.windows), steps + steps_ns[graph.name]
            taken |= {each.spec.key: each.ns for each in made.windows if each.ns is not None}
    return Cost(granularity, models, left, blocks, len(taken), steps, math.fsum(taken.values()))
