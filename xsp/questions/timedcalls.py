"""What questions ask of beside a trace: a graph, its bound, timings of its calls, and what each call was in the trace.

Timings of other ways to compute a call are compared with the one that ran, key by key: calls with one key share their
error. The interval of a difference holds what trimmed means and what least batches say, as a disturbance shifts the
former and hardly the latter, and `ALLOWANCE` of what is compared, as two sittings of one machine differ by so much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from xsp import bound as bounds
from xsp.advise import Asked, Interval, Place, provides
from xsp.advise.advice import MOST_SPANS
from xsp.bench.spec import AS_RUN, Spec, Timing
from xsp.bench.timings import Timings
from xsp.bound import join, planned, seen, timed
from xsp.bound.seen import Seen
from xsp.errors import AnalysisError
from xsp.graph.node import Graph, Source
from xsp.processes import cores
from xsp.schema import Level

ALLOWANCE = 0.03
"""Of the larger of two sums: what timings of equal work differ by from one sitting to another."""

DISTURBED = 4.0
"""From this multiple of their time in the trace on, calls that were timed by themselves were timed on a busy machine.
Twice as long was seen on a quiet one, of convolutions whose inputs lie otherwise in place; 6 and 8 times on another."""

MOST_PLACES = 5

FILL = "take them first: --fill 60s"

OF_MODEL = ("batch", "train", "shape", "sequence")
OF_BOUND = ("device", "like", "threads")
"""Settings that the graph and the bound are made with."""


@dataclass(frozen=True)
class Difference:
    """What one way takes more than another one, in nanoseconds of a step."""

    ns: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether it is a gain, by its whole interval."""
        return self.low > 0


def difference(before: Iterable[Timing], after: Iterable[Timing]) -> Difference:
    """Return what calls take more in one way than in another; a timing that both have cancels."""
    counts: Counter[str] = Counter()
    known: dict[str, Timing] = {}
    for sign, those in ((1, before), (-1, after)):
        for each in those:
            counts[each.key] += sign
            known[each.key] = each
    left = [(count, known[key]) for key, count in counts.items() if count]
    trimmed = math.fsum(count * (each.trimmed_ns or 0.0) for count, each in left)
    least = math.fsum(count * (each.least_ns or each.trimmed_ns or 0.0) for count, each in left)
    half = math.sqrt(math.fsum((count * (each.half_ns or 0.0)) ** 2 for count, each in left))
    sides = [math.fsum(abs(count) * (each.trimmed_ns or 0.0) for count, each in left if count * s > 0) for s in (1, -1)]
    half = math.hypot(half, ALLOWANCE * max(sides))
    return Difference(trimmed, min(trimmed, least) - half, max(trimmed, least) + half)


def milliseconds(gains: Mapping[int, float]) -> dict[int, float]:
    """Return gains of nodes in milliseconds, as a piece of advice has them."""
    return {node: ns / 1e6 for node, ns in gains.items()}


@dataclass(frozen=True)
class Ground:
    """A graph with the timings of its calls, and with what a trace of it says of each of them."""

    graph: Graph
    timings: Timings
    threads: int
    """With which the step runs."""

    cores: int
    seen: tuple[Seen | None, ...] = ()
    """Of each node what it was in the trace; empty without one."""

    step_ms: Interval | None = None
    overlapping: bool = False
    """Whether calls of different threads ran at the same time in the trace."""

    @cached_property
    def specs(self) -> Sequence[Spec | None]:
        """What each node is timed as; None of those that do not compute."""
        return timed.specs_of(self.graph, self.threads)

    @property
    def reference(self) -> int:
        """Threads with which variants are compared: those of the step, and not more than there are cores."""
        return min(self.threads, self.cores)

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Nodes that compute, by number."""
        return tuple(number for number, spec in enumerate(self.specs) if spec is not None)

    def timing(self, node: int, variant: str = AS_RUN, threads: int | None = None) -> Timing | None:
        """Return what a node takes in one way; None if that was not timed, or could not be."""
        spec = self.specs[node]
        if spec is None:
            return None
        threads = threads or self.reference
        known = self._known.get((node, variant, threads))
        if known is None:
            known = self.timings.get(replace(spec, variant=variant, threads=threads).key)
            self._known[node, variant, threads] = known
        return known if known is not None and known.is_timed else None

    def may_be(self, node: int, variant: str) -> bool:
        """Return whether a call could be computed in another way, by what it is."""
        from xsp.bench.variants import named

        spec, known = self.specs[node], named(variant)
        return spec is not None and known is not None and known.applies(spec)

    @cached_property
    def _known(self) -> dict[tuple[int, str, int], Timing | None]:
        return {}

    @cached_property
    def total_ns(self) -> float:
        """What the step takes: as measured, else its calls in the trace, else the sum of what is timed."""
        if self.step_ms is not None:
            return self.step_ms.value * 1e6
        if self.seen:
            return math.fsum(each.ns for each in self.seen if each is not None)
        known = [self.timing(node, threads=self.threads) for node in self.computing]
        return math.fsum(each.trimmed_ns or 0.0 for each in known if each is not None)

    def gain(self, found: Difference, nodes: Iterable[int]) -> tuple[Interval, float]:
        """Return a difference in milliseconds and in percent of the step; not more than its calls took in the trace."""
        most = self.total_ns
        if self.seen:
            took = [self.seen[node] for node in nodes]
            if all(each is not None for each in took):
                most = min(most, math.fsum(each.ns for each in took if each is not None))
        ends = Interval(found.low / 1e6, found.ns / 1e6, found.high / 1e6).within(most / 1e6)
        return ends, 100 * ends.value * 1e6 / self.total_ns if self.total_ns else 0.0

    def in_place_ns(self, nodes: Iterable[int]) -> float | None:
        """Return what calls took together in the trace; None where it does not tell of each."""
        took = [self.seen[node] if self.seen else None for node in nodes]
        return None if None in took else math.fsum(each.ns for each in took if each is not None)

    @property
    def slower_alone(self) -> float | None:
        """How many times as long calls take by themselves as in the trace, of those known both ways; None without."""
        both = [
            (timing.trimmed_ns or 0.0, there.ns)
            for node, there in enumerate(self.seen)
            if there is not None and (timing := self.timing(node, threads=self.threads)) is not None
        ]
        in_place = math.fsum(ns for _, ns in both)
        return math.fsum(ns for ns, _ in both) / in_place if in_place else None

    def undisturbed(self) -> Ground:
        """Return it.

        Raises:
            AnalysisError: its calls took far longer by themselves than in the trace.
        """
        if (ratio := self.slower_alone or 0.0) > DISTURBED:
            raise AnalysisError(
                f"calls by themselves took {ratio:.1f} times as long as in the trace: the machine was busy while they "
                "were timed; time them again when it is not: --fill 60s --timings NEW_FOLDER"
            )
        return self

    def places(self, gains: Mapping[int, float]) -> tuple[Place, ...]:
        """Return where nodes are, those modules and operators first that gain most, at most `MOST_PLACES`."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for node in gains:
            groups[self.graph.nodes[node].module, self.graph.nodes[node].call.op].append(node)
        order = sorted(groups.items(), key=lambda each: -math.fsum(gains[node] for node in each[1]))
        return tuple(
            Place(module or None, op, self.spans(nodes)[:MOST_SPANS], len(nodes))
            for (module, op), nodes in order[:MOST_PLACES]
        )

    def spans(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the ids of the spans of nodes, as far as the trace has them."""
        found = [self.seen[node] for node in nodes] if self.seen else []
        return tuple(each.span for each in found if each is not None and each.span)


@provides("ground")
def ground(asked: Asked) -> Ground:
    """Return what questions about timings stand on.

    Raises:
        AnalysisError: timings of what is asked about cannot be had here, or there are none.
    """
    trace = asked.trace
    if asked.settings.get("device") is not None or seen.is_elsewhere(trace):
        raise AnalysisError("single calls are timed on this processor, and the step ran on another device")
    graph = asked.graph
    if not timed.timed_here(graph):
        raise AnalysisError(f"nothing here runs the calls of {graph.name} by themselves, so they have no timings")
    if trace is not None and seen.is_compiled(trace):
        raise AnalysisError("the step ran compiled: its calls are not those that are timed by themselves")
    if not any(node.call.inputs for node in graph.computing):
        raise AnalysisError(seen.no_shapes(trace))
    step, known = asked.step, () if trace is None else _seen(asked, graph)
    made = Ground(
        graph,
        asked.part("timings"),
        threads_of(asked),
        cores(),
        known,
        step.ms if step is not None and step.what == "step" else None,
        trace is not None and _overlap(asked, known),
    )
    if not any(made.timing(node, threads=made.threads) for node in made.computing):
        raise AnalysisError(f"no call is timed here; {FILL}")
    return made.undisturbed()


def threads_of(asked: Asked) -> int:
    """Return with how many threads the step runs: as told, else as the run did, else all cores."""
    ran = asked.trace.run.machine.torch_threads if asked.trace is not None else None
    return int(asked.settings.get("threads") or ran or cores())


def _seen(asked: Asked, graph: Graph) -> tuple[Seen | None, ...]:
    if graph.source is Source.SPANS:
        return tuple(seen.of_nodes(asked.traced))
    calls = seen.of(asked.traced, {node.call.op for node in graph.nodes})
    return tuple(None if place is None else calls[place] for place in join.of(graph, calls).of_node)


def _overlap(asked: Asked, known: Sequence[Seen | None]) -> bool:
    """Return whether calls of different threads ran at the same time, for more than `ALLOWANCE` of their time."""
    wanted = {each.span for each in known if each is not None}
    rows = asked.traced.con.execute(
        f"SELECT span_id, start_ns, dur_ns, process, thread FROM merged WHERE level = {int(Level.OP)} ORDER BY start_ns"
    ).fetchall()
    ends: dict[tuple[object, object], int] = {}
    whole = both = 0
    for span, start, duration, process, thread in rows:
        if span not in wanted or not duration:
            continue
        others = [end for place, end in ends.items() if place != (process, thread)]
        both += max(0, min(start + duration, max(others, default=0)) - start)
        whole += duration
        ends[process, thread] = max(start + duration, ends.get((process, thread), 0))
    return both > ALLOWANCE * whole


@provides("graph")
def graph(asked: Asked) -> Any:
    """Return the graph of the model that was run or named, else that of the trace's calls."""
    found, _ = planned.of(_what(asked), (), None, _given(asked, OF_MODEL))
    return found


@provides("bound")
def bound(asked: Asked) -> Any:
    """Return the bound of the graph, joined with the trace where there is one."""
    what = asked.graph
    return bounds.of(what, trace=asked.trace, timings=asked.part("timings"), **_given(asked, OF_BOUND))


def _what(asked: Asked) -> Any:
    return asked.trace if asked.trace is not None else asked.source


def _given(asked: Asked, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: asked.settings[name] for name in names if asked.settings.get(name) is not None}
