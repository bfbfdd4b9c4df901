"""Synthetic timings of a graph, computed by a function of the spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from xsp.bench.environment import Environment
from xsp.bench.spec import Spec, Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.bound.recordedcalls import RecordedCall
from xsp.graph import Graph
from xsp.questions import budget
from xsp.questions.timedcalls import TimedGraph

HERE = Environment({"cpu": "a cpu", "cores": 2, "torch": "2"})

Nanoseconds = Callable[[Spec], float | None]


def timed(spec: Spec, ns: float, half: float = 0.001, error: float | None = None) -> Timing:
    """Return a timing of `ns`, with an interval of `half` times the figure on both sides."""
    return replace(
        untimed(spec),
        status=Status.OK,
        environment=HERE.hash,
        trimmed_ns=ns,
        low_ns=ns * (1 - half),
        high_ns=ns * (1 + half),
        least_ns=ns,
        error_max=error,
        samples=9,
        taken_ns=1,
    )


def timed_graph_of(
    graph: Graph,
    folder: Path,
    ns: Nanoseconds,
    *,
    threads: int = 2,
    cores: int = 2,
    half: float = 0.001,
    error: float | None = None,
    recorded: Sequence[RecordedCall | None] = (),
) -> TimedGraph:
    """Return a graph with all timings that questions need and for which `ns` returns a figure."""
    stored = Timings.open(folder, HERE)
    specs = {spec.key: spec for pairs in budget.rounds(graph, threads, cores) for spec, _ in pairs}
    times = ((spec, ns(spec)) for spec in specs.values() if spec.block.calls)
    stored.add(timed(spec, value, half, error) for spec, value in times if value is not None)
    return TimedGraph(graph, stored, threads, cores, tuple(recorded))
