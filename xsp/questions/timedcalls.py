"""The input of questions on timings: a graph, its bound, the timings of its calls, and the calls in the trace.

Timings of other variants of a call are compared with the original, key by key: calls with the same key share their
error. The interval of a difference contains the results of trimmed means and of fastest batches, since a disturbance
shifts the former but hardly the latter, and `ALLOWANCE`, since two sessions on one machine differ by that much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from xsp import bound as bounds
from xsp.advise import AdviceContext, Interval, Place, provides
from xsp.advise.advice import MOST_SPANS
from xsp.bench import steps
from xsp.bench.plan import default_threads
from xsp.bench.spec import AS_RUN, CacheState, Spec, Timing
from xsp.bench.timings import Timings
from xsp.bound import join, planned, recordedcalls, timed
from xsp.bound.recordedcalls import RecordedCall
from xsp.errors import AnalysisError
from xsp.graph import sources
from xsp.graph.node import Graph, Source
from xsp.processes import cores
from xsp.questions.target import FILL_HINT, reason_without_timings, remedy
from xsp.schema import Level

ALLOWANCE = 0.03
"""Difference between timings of equal work from one session to another, as a share of the larger of two sums."""

MOST_SLOWDOWN = 4.0
"""Multiple of the time in the trace above which calls timed alone were timed on a busy machine. A factor of two was
seen on a quiet machine, for convolutions whose inputs have another layout in place; 6 and 8 on a busy one."""

MOST_PLACES = 5

MODEL_SETTINGS = ("batch", "train", "shape", "sequence")
BOUND_SETTINGS = ("device", "like", "threads")
"""Settings for the graph and for the bound."""


@dataclass(frozen=True)
class VariantDifference:
    """The difference between the times of two variants, in nanoseconds of a step."""

    ns: float
    low: float
    high: float

    @property
    def is_gain(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.low > 0


def places_of(
    graph: Graph, ns: Mapping[int, float], spans: Callable[[Sequence[int]], tuple[str, ...]]
) -> tuple[Place, ...]:
    """Return the modules and operators of nodes, those with the most time first, at most `MOST_PLACES`.

    Args:
        graph: the graph of the nodes.
        ns: the time, or the gain, of each node.
        spans: returns the span ids of nodes, as far as they are in a trace.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for node in ns:
        groups[graph.nodes[node].module, graph.nodes[node].call.op].append(node)
    order = sorted(groups.items(), key=lambda entry: -math.fsum(ns[node] for node in entry[1]))
    return tuple(
        Place(module or None, op, spans(nodes)[:MOST_SPANS], len(nodes)) for (module, op), nodes in order[:MOST_PLACES]
    )


def difference(before: Iterable[Timing], after: Iterable[Timing]) -> VariantDifference:
    """Return by how much calls take longer in one variant than in another; timings in both cancel out."""
    counts: Counter[str] = Counter()
    by_key: dict[str, Timing] = {}
    for sign, timings in ((1, before), (-1, after)):
        for timing in timings:
            counts[timing.key] += sign
            by_key[timing.key] = timing
    remaining = [(count, by_key[key]) for key, count in counts.items() if count]
    trimmed = math.fsum(count * (timing.trimmed_ns or 0.0) for count, timing in remaining)
    least = math.fsum(count * (timing.least_ns or timing.trimmed_ns or 0.0) for count, timing in remaining)
    half = math.sqrt(math.fsum((count * (timing.half_ns or 0.0)) ** 2 for count, timing in remaining))
    sides = [
        math.fsum(abs(count) * (timing.trimmed_ns or 0.0) for count, timing in remaining if count * s > 0)
        for s in (1, -1)
    ]
    half = math.hypot(half, ALLOWANCE * max(sides))
    return VariantDifference(trimmed, min(trimmed, least) - half, max(trimmed, least) + half)


def milliseconds(gains: Mapping[int, float]) -> dict[int, float]:
    """Return gains of nodes in milliseconds, for a piece of advice."""
    return {node: ns / 1e6 for node, ns in gains.items()}


@dataclass(frozen=True)
class WholeStep:
    """A step of a model on an accelerator, timed as a whole, in nanoseconds."""

    ns: float
    issue_ns: float
    """Time that the host takes to issue it."""

    device_ns: float
    """Time of its work: of the replayed step, else the sum of its calls."""

    is_replayed: bool = False

    def left_by_host_ns(self, gain_ns: float) -> float:
        """Return the most that the step becomes shorter if its work takes so much less: the host issues meanwhile."""
        return max(0.0, min(gain_ns, self.ns - max(self.issue_ns, self.device_ns - gain_ns)))


@dataclass(frozen=True)
class TimedGraph:
    """A graph with the timings of its calls, and with the corresponding calls in a trace."""

    graph: Graph
    timings: Timings
    threads: int
    """Number of threads of the step."""

    cores: int
    traced_calls: tuple[RecordedCall | None, ...] = ()
    """The call of each node in the trace; empty without a trace."""

    step_ms: Interval | None = None
    has_overlap: bool = False
    """Whether calls of different threads ran at the same time in the trace."""

    remedy: str = FILL_HINT
    """What to do where timings are missing."""

    @property
    def specs(self) -> Sequence[Spec | None]:
        """The timing spec of each node; None for nodes that do not compute."""
        return self._specs_and_state[0]

    @property
    def state(self) -> CacheState:
        """State of the caches of the timings."""
        return self._specs_and_state[1]

    @cached_property
    def _specs_and_state(self) -> tuple[Sequence[Spec | None], CacheState]:
        return timed.specs_in(self.graph, self.timings, self.threads)

    @property
    def on_device(self) -> bool:
        """Whether the timings are of an accelerator."""
        return self.timings.environment.device is not None

    @property
    def side(self) -> str:
        """The side of an iteration on which the calls are: `host` or `device`."""
        return "device" if self.on_device else "host"

    @property
    def conditions(self) -> str:
        """Where the calls were timed, in words."""
        return self.timings.environment.device_name if self.on_device else f"{self.reference} threads"

    @property
    def reference(self) -> int:
        """Number of threads with which variants are compared: that of the step, but at most the number of cores."""
        return min(self.threads, self.cores)

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Nodes that compute, by number."""
        return tuple(number for number, spec in enumerate(self.specs) if spec is not None)

    def timing(self, node: int, variant: str = AS_RUN, threads: int | None = None) -> Timing | None:
        """Return the timing of a node in one variant; None if there is none, or it failed."""
        spec = self.specs[node]
        if spec is None:
            return None
        threads = threads or self.reference
        timing = self._timing_cache.get((node, variant, threads))
        if timing is None:
            timing = self.timings.get(replace(spec, variant=variant, threads=threads).key)
            self._timing_cache[node, variant, threads] = timing
        return timing if timing is not None and timing.is_timed else None

    def supports(self, node: int, variant: str) -> bool:
        """Return whether a variant applies to the call of a node."""
        from xsp.bench.variants import variant_by_name

        spec, definition = self.specs[node], variant_by_name(variant)
        if spec is None or definition is None:
            return False
        return definition.is_for(self.timings.environment) and definition.may_change(spec)

    @cached_property
    def _timing_cache(self) -> dict[tuple[int, str, int], Timing | None]:
        return {}

    @cached_property
    def whole_step(self) -> WholeStep | None:
        """The step of a model on an accelerator, if it was timed; None on the processor and for a trace."""
        timed_steps = steps.of(self.graph, self.timings) if self.on_device and not self.traced_calls else {}
        waited, replayed = (timed_steps.get(op) for op in (steps.WAITED, steps.REPLAYED))
        if waited is None or not waited.is_timed:
            return None
        calls = [self.timing(node) for node in self.computing]
        alone_ns = math.fsum(timing.trimmed_ns or 0.0 for timing in calls if timing is not None)
        replayed_ns = None if replayed is None or not replayed.is_timed else replayed.trimmed_ns
        return WholeStep(waited.trimmed_ns or 0.0, waited.host_ns or 0.0, replayed_ns or alone_ns, bool(replayed_ns))

    @cached_property
    def total_ns(self) -> float:
        """Time of the step: as measured, else of its calls in the trace, else the sum of timings."""
        if self.step_ms is not None:
            return self.step_ms.value * 1e6
        if self.whole_step is not None:
            return self.whole_step.ns
        if self.traced_calls:
            return math.fsum(call.ns for call in self.traced_calls if call is not None)
        timings = [self.timing(node, threads=self.threads) for node in self.computing]
        return math.fsum(timing.trimmed_ns or 0.0 for timing in timings if timing is not None)

    def gain(self, change: VariantDifference, nodes: Iterable[int]) -> tuple[Interval, float]:
        """Return a difference in milliseconds and in percent of the step, at most the calls' time in the trace."""
        limit = self.total_ns
        if self.traced_calls:
            calls = [self.traced_calls[node] for node in nodes]
            if all(call is not None for call in calls):
                limit = min(limit, math.fsum(call.ns for call in calls if call is not None))
        elif self.whole_step is not None:
            limit = self.whole_step.left_by_host_ns(change.ns)
        interval = Interval(change.low / 1e6, change.ns / 1e6, change.high / 1e6).limit(limit / 1e6)
        return interval, 100 * interval.value * 1e6 / self.total_ns if self.total_ns else 0.0

    def in_place_ns(self, nodes: Iterable[int]) -> float | None:
        """Return the total time of calls in the trace; None if the trace lacks one of them."""
        calls = [self.traced_calls[node] if self.traced_calls else None for node in nodes]
        return None if None in calls else math.fsum(call.ns for call in calls if call is not None)

    @property
    def isolation_ratio(self) -> float | None:
        """Ratio of the time of calls timed alone to that in the trace, over calls known both ways; None without any."""
        pairs = [
            (timing.trimmed_ns or 0.0, call.ns)
            for node, call in enumerate(self.traced_calls)
            if call is not None and (timing := self.timing(node, threads=self.threads)) is not None
        ]
        in_place = math.fsum(ns for _, ns in pairs)
        return math.fsum(ns for ns, _ in pairs) / in_place if in_place else None

    def require_undisturbed(self) -> TimedGraph:
        """Return this object.

        Raises:
            AnalysisError: its calls took far longer alone than in the trace.
        """
        if (ratio := self.isolation_ratio or 0.0) > MOST_SLOWDOWN:
            raise AnalysisError(
                f"calls in isolation took {ratio:.1f} times as long as in the trace: the machine was busy while they "
                "were timed; time them again when it is not: --fill 60s --timings NEW_FOLDER"
            )
        return self

    def places(self, gains: Mapping[int, float]) -> tuple[Place, ...]:
        """Return the modules and operators of nodes, those with the largest gain first, at most `MOST_PLACES`."""
        return places_of(self.graph, gains, self.spans)

    def spans(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the span ids of nodes that are in the trace."""
        calls = [self.traced_calls[node] for node in nodes] if self.traced_calls else []
        return tuple(call.span for call in calls if call is not None and call.span)


@provides("timed-graph")
def timed_graph(context: AdviceContext) -> TimedGraph:
    """Return the graph of the subject with its timings.

    Raises:
        AnalysisError: the calls cannot be timed here, or there are no timings.
    """
    trace = context.trace
    if (reason := reason_without_timings(context)) is not None:
        raise AnalysisError(reason)
    graph = context.graph
    if not timed.can_time_here(graph):
        raise AnalysisError(f"the calls of {graph.name} cannot be run in isolation here, so they have no timings")
    if trace is not None and recordedcalls.is_compiled(trace):
        raise AnalysisError("the step ran compiled: its calls are not those that are timed in isolation")
    if not any(node.call.inputs for node in graph.computing):
        raise AnalysisError(recordedcalls.no_shapes(trace))
    step, calls = context.step, () if trace is None else _traced_calls(context, graph)
    basis = TimedGraph(
        graph,
        context.part("timings"),
        threads_of(context),
        cores_of(context),
        calls,
        step.ms if step is not None and step.unit == "step" else None,
        trace is not None and _overlap(context, calls),
        remedy(context),
    )
    if not any(basis.timing(node, threads=basis.threads) for node in basis.computing):
        raise AnalysisError(f"no call is timed here; {basis.remedy}")
    return basis.require_undisturbed()


def threads_of(context: AdviceContext) -> int:
    """Return the number of threads of the step: from the settings, else from the run, else all cores; 1 on a device."""
    stored = context.part("target").stored
    if stored is not None:
        return default_threads(stored.environment)
    run_threads = context.trace.run.machine.torch_threads if context.trace is not None else None
    return int(context.settings.get("threads") or run_threads or cores())


def cores_of(context: AdviceContext) -> int:
    """Return the number of cores that calls may be divided among; 1 on a device."""
    return cores() if context.part("target").stored is None else 1


def _traced_calls(context: AdviceContext, graph: Graph) -> tuple[RecordedCall | None, ...]:
    if graph.source is Source.SPANS:
        return tuple(recordedcalls.calls_of_nodes(context.required_trace))
    calls = recordedcalls.of(context.required_trace, {node.call.op for node in graph.nodes})
    return tuple(None if index is None else calls[index] for index in join.of(graph, calls).call_of_node)


def _overlap(context: AdviceContext, calls: Sequence[RecordedCall | None]) -> bool:
    """Return whether calls of different threads ran at the same time, for more than `ALLOWANCE` of their time."""
    span_ids = {call.span for call in calls if call is not None}
    rows = context.required_trace.con.execute(
        f"SELECT span_id, start_ns, dur_ns, process, thread FROM merged WHERE level = {int(Level.OP)} ORDER BY start_ns"
    ).fetchall()
    end_times: dict[tuple[object, object], int] = {}
    total = overlap = 0
    for span, start, duration, process, thread in rows:
        if span not in span_ids or not duration:
            continue
        other_ends = [end for key, end in end_times.items() if key != (process, thread)]
        overlap += max(0, min(start + duration, max(other_ends, default=0)) - start)
        total += duration
        end_times[process, thread] = max(start + duration, end_times.get((process, thread), 0))
    return overlap > ALLOWANCE * total


@provides("graph")
def graph(context: AdviceContext) -> Any:
    """Return the graph of the model that was run or given, else that of the trace's calls.

    A model has the operators of the device of its timings.
    """
    model_options = _options(context, MODEL_SETTINGS)
    stored = context.part("target").stored
    if stored is not None and context.trace is None and "device" in sources.supported_options(context.source):
        model_options["device"] = str((stored.environment.device or {}).get("kind"))
    result, _ = planned.of(context.trace if context.trace is not None else context.source, (), None, model_options)
    return result


@provides("bound")
def bound(context: AdviceContext) -> Any:
    """Return the bound of the graph, joined with the trace if there is one."""
    settings = _options(context, BOUND_SETTINGS)
    target = context.part("target")
    if target.stored is not None:
        settings = {"device": target.device.id if target.device is not None else target.stored.environment.device_name}
    return bounds.of(context.graph, trace=context.trace, timings=context.part("timings"), **settings)


def _options(context: AdviceContext, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: context.settings[name] for name in names if context.settings.get(name) is not None}
