"""The gain of rewriting a graph: the times of the removed calls minus those of the calls that replace them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xsp import bench
from xsp.advise import Advice, AdviceContext, Interval, Place, provides
from xsp.bench.spec import Spec
from xsp.bench.timings import Timings
from xsp.bound import ceiling as roof
from xsp.bound import recordedcalls, timed, totals
from xsp.bound.ladder import Bound, Rung
from xsp.bound.targets import Target
from xsp.bound.totals import Figure
from xsp.device.ceilings import Ceiling
from xsp.graph import rewrite, work
from xsp.graph.node import Graph
from xsp.graph.rewrite import RewrittenGraph, RuleChange
from xsp.questions.timedcalls import ALLOWANCE, WholeStep, places_of

LAYER_NUMBER = re.compile(r"(?<=[.#])\d+")
"""Numbers of layers in module paths: changes of equal layers differ only by them."""

MOST_FILL_S = 20.0
"""Maximum seconds of the budget for timings of replacement calls."""


@dataclass(frozen=True)
class Gain:
    """The gain of changes of one kind together, in nanoseconds of a step."""

    changes: tuple[RuleChange, ...]
    removed: tuple[int, ...]
    """Places of the removed calls in the original graph, if they do work."""

    added: tuple[int, ...]
    """Places of the replacement calls in the rewritten graph, if they do work."""

    ns: float
    half_ns: float
    at_most: bool
    """Whether the replacement calls are not timed, so that the gain assumes their least possible time."""

    before_ns: float
    unknown_count: int
    """Number of removed calls without a figure: their time is not in the gain."""


@dataclass(frozen=True)
class Prices:
    """A rewritten graph with the time of each call."""

    rewritten: RewrittenGraph
    before: tuple[Figure | None, ...]
    """Time of each node of the original graph: timed alone, else from the trace."""

    in_place: tuple[Figure | None, ...]
    after: Mapping[int, Figure]
    """Times of added nodes of the rewritten graph, if they are timed."""

    total_ns: float | None
    """Time of the step, measured or summed over the known calls."""

    spans: tuple[str, ...] = ()
    """Span of each node in the trace; empty if unknown."""

    side: str = "host"
    """The side of an iteration on which the calls are: `host` or `device`."""

    whole_step: WholeStep | None = None
    """The step of a model on an accelerator, if it was timed."""

    least_ns: Mapping[int, float] = field(default_factory=dict)
    """Least times of added nodes by the rates that a device reaches in this step, if they are known."""

    def gains(self, rules: Iterable[str]) -> list[Gain]:
        """Return the gains of the changes of some rules, equal changes together, largest first."""
        groups: dict[tuple[str, str, str | None], list[RuleChange]] = defaultdict(list)
        for change in self.rewritten.changes:
            if change.rule in rules:
                groups[change.rule, LAYER_NUMBER.sub("*", change.description), change.changes_numbers].append(change)
        gains = [self._gain(tuple(changes)) for changes in groups.values()]
        return sorted((gain for gain in gains if gain is not None), key=lambda gain: -gain.ns)

    def _gain(self, changes: tuple[RuleChange, ...]) -> Gain | None:
        if any(change.added for change in changes):  # leave out changes with unknown times of removed calls
            changes = tuple(
                change
                for change in changes
                if None not in [self.before[place] for place in self.rewritten.removed_calls(change)]
            )
        removed = tuple(place for change in changes for place in self.rewritten.removed_calls(change))
        added = tuple(place for change in changes for place in self.rewritten.added_calls(change))
        figures: Sequence[Figure | None] = [self.before[place] for place in removed]
        if not added:
            in_place = [self.in_place[place] for place in removed]
            figures = in_place if None not in in_place else figures
        known_figures = [figure for figure in figures if figure is not None]
        if not known_figures:
            return None
        before = math.fsum(figure.ns for figure in known_figures)
        half = math.hypot(totals.half(known_figures), ALLOWANCE * before if added else 0.0)
        after = [self.after.get(place) for place in added]
        if None not in after:
            additions = [figure for figure in after if figure is not None]
            ns, half = before - math.fsum(figure.ns for figure in additions), math.hypot(half, totals.half(additions))
            return Gain(changes, removed, added, ns, half, False, before, len(figures) - len(known_figures))
        least = math.fsum(self._least(change) for change in changes)
        return Gain(changes, removed, added, before - least, half, True, before, 0)

    def _least(self, change: RuleChange) -> float:
        """Return the least time of the replacement calls, derived from the times of the removed calls.

        One call on all samples takes at least as long as that on one sample; attention at least as long as its
        products; a call with other weights as long as before, and a call in a type of half the size half as long. On a
        device none takes less than by the largest share of the peak rates that a call of its operator reaches.
        """
        figures = {place: self.before[place] for place in self.rewritten.removed_calls(change)}
        nodes = self.rewritten.original.nodes
        if change.rule == "attention":
            return math.fsum(figure.ns for place, figure in figures.items() if figure and work.flops_of(nodes[place]))
        share = 0.5 if change.rule == "cast" else 1.0
        longest: dict[str, float] = defaultdict(float)
        for place, figure in figures.items():
            longest[nodes[place].call.op] = max(longest[nodes[place].call.op], figure.ns if figure else 0.0)
        ops = [self.rewritten.graph.nodes[place].call.op for place in self.rewritten.added_calls(change)]
        by_rates = math.fsum(self.least_ns.get(place, 0.0) for place in self.rewritten.added_calls(change))
        return max(by_rates, share * math.fsum(longest.get(op, 0.0) for op in ops))

    def advice(self, question: str, gain: Gain, text: str, remedy: str, trial: str | None = None) -> Advice:
        """Return the piece of advice for a gain."""
        return piece(
            self,
            question,
            text,
            gain.removed,
            Interval((gain.ns - gain.half_ns) / 1e6, gain.ns / 1e6, (gain.ns + gain.half_ns) / 1e6),
            gain.at_most,
            self._why(gain),
            remedy,
            gain.changes[0].changes_numbers,
            trial,
        )

    def _why(self, gain: Gain) -> tuple[str, ...]:
        lines = [f"{len(gain.removed)} calls that take {gain.before_ns / 1e6:.3g} ms are removed"]
        if gain.added and not gain.at_most:
            after = gain.before_ns - gain.ns
            lines.append(f"{len(gain.added)} calls that take {after / 1e6:.3g} ms replace them")
        elif gain.added:
            lines.append(f"{len(gain.added)} calls that replace them are not timed: --fill 60s")
        if gain.unknown_count:
            lines.append(f"{gain.unknown_count} of the removed calls have no time")
        return tuple(lines)


def piece(
    prices: Prices,
    question: str,
    text: str,
    nodes: Sequence[int],
    gain: Interval,
    at_most: bool,
    why: tuple[str, ...],
    remedy: str,
    changes_numbers: str | None = None,
    trial: str | None = None,
) -> Advice:
    """Return a piece of advice on calls of the original graph."""
    total_ns = prices.total_ns
    if total_ns is not None:
        gain = gain.limit(total_ns / 1e6)
    if prices.whole_step is not None:
        gain = gain.limit(prices.whole_step.left_by_host_ns(gain.value * 1e6) / 1e6)
    where = places(prices.rewritten.original, nodes, prices.before, prices.spans)
    percent = 100 * gain.value * 1e6 / total_ns if total_ns else 0.0
    return Advice(
        question, text, where, gain, at_most, percent, why, remedy, changes_numbers, trial, side=prices.side
    )  # fmt: skip


def places(
    graph: Graph, nodes: Iterable[int], figures: Sequence[Figure | None], spans: Sequence[str]
) -> tuple[Place, ...]:
    """Return `places_of` calls by their figures; `spans` are those of all calls, empty if they are not known."""
    ns = {node: figure.ns if (figure := figures[node]) is not None else 0.0 for node in nodes}
    return places_of(graph, ns, lambda group: tuple(spans[node] for node in group if spans and spans[node]))


@provides("prices")
def prices(context: AdviceContext) -> Prices:
    """Return the rewritten graph of the question's subject, with the time of each call.

    Raises:
        GraphError: the graph does not have the information needed to rewrite it.
    """
    bound: Bound = context.bound
    rewritten = rewrite.of(bound.graph)
    no_figures: tuple[Figure | None, ...] = (None,) * len(bound.graph.nodes)
    in_place = bound.figures.get(Rung.IN_PLACE.value, no_figures)
    as_run = bound.figures.get(Rung.AS_RUN.value, no_figures)
    before = tuple(isolated or traced for isolated, traced in zip(as_run, in_place, strict=True))
    join = bound.join
    spans: tuple[str, ...] = ()
    if join is not None:
        spans = tuple("" if index is None else join.calls[index].span or "" for index in join.call_of_node)
    on_device = bool(bound.settings.get("device")) or recordedcalls.is_of_device(context.trace)
    return Prices(
        rewritten, before, in_place, _added(context, bound, rewritten), step_ns(context, bound, before), spans,
        "device" if on_device else "host", _whole_step(bound) if context.trace is None else None,
        _by_rates(context, bound, rewritten, before),
    )  # fmt: skip


def _by_rates(
    context: AdviceContext, bound: Bound, rewritten: RewrittenGraph, before: Sequence[Figure | None]
) -> dict[int, float]:
    """Return the least times of calls on a device by the best rates of the step's calls of the same operator.

    A trace does not say which of its products may use TF32: all are taken to.
    """
    target: Target = context.part("target")
    ceiling = target.quoted if target.device is None else target.device.ceiling()
    if not isinstance(ceiling, Ceiling):
        return {}
    nodes = rewritten.graph.nodes
    may_use_tf32 = [context.trace is not None or "conv" in node.call.op for node in nodes]
    as_tf32 = [
        "tf32" if used and "tf32" in ceiling.tensor and roof.precision_of(node) == "fp32" else None
        for node, used in zip(nodes, may_use_tf32, strict=True)
    ]
    figures, _ = roof.figures(rewritten.graph, ceiling, as_tf32)
    shares: dict[str, float] = defaultdict(float)
    for node, least, figure in zip(bound.graph.nodes, bound.figures.get(Rung.CEILING.value, ()), before, strict=False):
        if least is not None and figure is not None and figure.ns:
            shares[node.call.op] = max(shares[node.call.op], min(1.0, least.ns / figure.ns))
    return {
        place: figure.ns / (shares.get(nodes[place].call.op) or 1.0)
        for place, figure in enumerate(figures)
        if figure is not None
    }


def _whole_step(bound: Bound) -> WholeStep | None:
    measured, replayed, as_run = (
        bound.rungs[rung.value].sequential for rung in (Rung.MEASURED, Rung.REPLAYED, Rung.AS_RUN)
    )
    issue_ns, device_ns = bound.settings.get("issue_ns"), replayed or as_run
    return None if not measured or not device_ns or issue_ns is None else WholeStep(measured, issue_ns, device_ns)


def _added(context: AdviceContext, bound: Bound, rewritten: RewrittenGraph) -> dict[int, Figure]:
    """Return the timings of added calls; missing ones are taken if there is a budget."""
    threads = bound.settings.get("threads")
    timings: Timings = context.part("timings")
    places = {place for change in rewritten.changes for place in rewritten.added_calls(change)}
    if threads is None or not places:
        return {}
    all_specs, _ = timed.specs_in(rewritten.graph, timings, threads)
    specs = {place: spec for place, spec in enumerate(all_specs) if place in places}
    seconds = context.settings.get("fill")
    missing = [spec for spec in specs.values() if spec is not None and timings.get(spec.key) is None]
    if seconds and missing:
        bench.fill(missing, timings, min(float(seconds), MOST_FILL_S), device=context.part("target").device)
    return {place: figure for place, spec in specs.items() if (figure := _figure(timings, spec)) is not None}


def _figure(timings: Timings, spec: Spec | None) -> Figure | None:
    timing: Any = None if spec is None else timings.get(spec.key)
    if timing is None or not timing.is_timed:
        return None
    return Figure(float(round(timing.trimmed_ns)), timing.half_ns or 0.0, timing.key)


def step_ns(context: AdviceContext, bound: Bound, before: Sequence[Figure | None]) -> float | None:
    """Return the time of a step: as measured, else from the bound, else the sum of the known calls; None if unknown."""
    if context.step is not None and context.step.unit == "step":
        return context.step.ms.value * 1e6
    for rung in (Rung.MEASURED, Rung.FRAMEWORK, Rung.AS_RUN):
        total = bound.rungs[rung.value].sequential
        if total:
            return total
    return math.fsum(figure.ns for figure in before if figure is not None) or None
