"""Timings of a graph that a function of the spec determines, for tests of conclusions from timings."""

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

ENVIRONMENT = Environment({"cpu": "a cpu", "cores": 2, "torch": "2"})

Nanoseconds = Callable[[Spec], float | None]


def make_timing(spec: Spec, ns: float, half: float = 0.001, error: float | None = None) -> Timing:
    """Return a timing; `half` is half of the width of its interval, as a share of the figure."""
    return replace(
        untimed(spec),
        status=Status.OK,
        environment=ENVIRONMENT.hash,
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
    recorded_calls: Sequence[RecordedCall | None] = (),
) -> TimedGraph:
    """Return a graph with all timings that questions need, as far as `ns` returns a figure."""
    timings = Timings.open(folder, ENVIRONMENT)
    specs = {spec.key: spec for pairs in budget.rounds(graph, threads, cores) for spec, _ in pairs}
    times = ((spec, ns(spec)) for spec in specs.values() if spec.block.calls)
    timings.add(make_timing(spec, spec_ns, half, error) for spec, spec_ns in times if spec_ns is not None)
    return TimedGraph(graph, timings, threads, cores, tuple(recorded_calls))
