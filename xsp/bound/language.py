"""Time of reading (prefill) and adding (decode) tokens in a language model by length: curves from a few timed lengths.

Each curve is a sum of three parts: calls that are equal at all lengths and are timed once; calls whose work grows
linearly with the number of tokens; calls whose work grows quadratically. FLOPs and bytes at each length distinguish
them. Growing calls of decoding are attention and writing to the cache; quadratic calls of reading are attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.bench.plan import default_threads
from xsp.bound import ceiling as roof
from xsp.bound import experts, polynomials, targets, timed, totals
from xsp.bound.experts import Active
from xsp.bound.polynomials import Crossing, Polynomial
from xsp.bound.totals import MIN_COVERAGE, Coverage, Figure
from xsp.device import devices
from xsp.device.ceilings import Ceiling
from xsp.device.contract import Device
from xsp.errors import UsageError
from xsp.graph import sources as graphs
from xsp.graph import work
from xsp.graph.node import Graph

if TYPE_CHECKING:
    from xsp.bench.timings import Timings
    from xsp.bound.steps import MeasuredStep

Progress = Callable[[str, int, int], None]

DECODE, PREFILL = "decode", "prefill"

LENGTHS = 4
"""Number of timed lengths, including the first and the last."""

MAX_CALL_GROWTH = 1.5
"""Maximum growth of the number of calls if tokens double: graphs with calls for each token are not timed by call."""


@dataclass(frozen=True)
class LengthPoint:
    """A step of decoding or reading at one length. Times are nanoseconds; None is unknown."""

    tokens: int
    graph: Graph
    coverage: Coverage
    ns: float | None
    """Time of its calls, and of the framework if that is timed; None if too few calls are timed."""

    half_ns: float | None
    ceiling_ns: float | None
    """The longer of the bytes at the bandwidth and the FLOPs at the peak rate, for the whole step."""

    active: Active
    flops: work.Total
    """FLOPs of the step."""

    measured: MeasuredStep | None = None


@dataclass(frozen=True)
class LengthCurve:
    """The time of decoding or of reading over the number of tokens."""

    phase: str
    points: tuple[LengthPoint, ...]
    non_attention: Polynomial | None
    """Calls without attention, and the framework; None if there is no fit (`reason`)."""

    attention: Polynomial | None
    """In decoding, attention and writing to the cache; in reading, the quadratic calls."""

    calls: int
    """Computing calls of a step at the longest length."""

    shared_calls: int
    """Computing calls at the longest length that are equal at all lengths."""

    distinct_calls: int
    """Distinct calls to time for all lengths."""

    omitted_calls: int = 0
    """Calls of a step that are in no fit, because a length has no timing of them."""

    reason: str = ""

    @property
    def total(self) -> Polynomial | None:
        """The sum of both parts; None if there is no fit."""
        return None if self.non_attention is None or self.attention is None else self.non_attention + self.attention

    @property
    def steps(self) -> Polynomial | None:
        """A curve through measured steps; None if too few lengths were measured."""
        measured = [(point.tokens, point.measured) for point in self.points if point.measured is not None]
        degree = 1 if self.phase == DECODE else 2
        if len(measured) <= degree:
            return None
        halves = [((step.high or step.ns) - (step.low or step.ns)) / 2 for _, step in measured]
        return polynomials.fit([n for n, _ in measured], [step.ns for _, step in measured], halves, degree)

    @property
    def attention_crossing(self) -> Crossing | None:
        """The number of tokens from which on attention takes longer than the rest; None if never, or unknown."""
        if self.non_attention is None or self.attention is None:
            return None
        return polynomials.crossing(self.attention, self.non_attention)


@dataclass(frozen=True)
class Language:
    """Curves of a language model."""

    name: str
    batch: int
    decode: LengthCurve
    prefill: LengthCurve | str
    """The curve of reading, or the reason why there is none."""

    ceilings: Ceiling | str
    compute_bound: Mapping[int, int | None]
    """Tokens → sequences with which a decoding step computes for as long as it reads; None: none, or unknown."""

    cache_crossing: float | None
    """Tokens at which the cache has as many bytes as the weights in use; None if the cache does not grow linearly."""

    threads: int
    framework: str = ""
    """Why no figure includes the framework; empty if all figures do."""

    skew: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def curves(self) -> list[LengthCurve]:
        """The curve of decoding, and that of reading if there is one."""
        return [self.decode, *([self.prefill] if isinstance(self.prefill, LengthCurve) else [])]


def of(
    source: Any,
    lengths: Sequence[int] = (64, 1024),
    *,
    batch: int = 1,
    fill: float | None = None,
    measure: float | None = None,
    device: str | None = None,
    timings: Timings | Path | str | None = None,
    like: str | None = None,
    threads: int | None = None,
    partial: bool = False,
    skew: float = 0.0,
    seed: int = 0,
    progress: Progress = lambda name, done, total: None,
) -> Language:
    """Return the curves of a language model.

    Args:
        source: name of the model as in `xsp.graph.of`, or a module of transformers.
        lengths: the smallest and the largest number of tokens, or at least three lengths at which calls are timed.
        batch: sequences in a step.
        fill: seconds to spend on missing timings; default: none are taken.
        measure: seconds to spend on measuring whole steps at these lengths, in turns; default: none are measured.
        device: a device of this machine (`cuda:0`), with its timings and peak rates; or a product, with its published
            peak rates and the timings of it in the folder; default: the processor.
        timings: open timings, or their folder; default: the folder of this user.
        like: hash of an environment whose timings are used where this one has none.
        threads: threads of a step; default: all cores.
        partial: return figures below a coverage of 95 % as lower limits.
        skew: 0 if all experts are equally likely; otherwise the exponent of Zipf's law.
        seed: seed of the weights.
        progress: called while something is timed.

    Raises:
        ModelError: the model does not generate text.
        GraphError: the model cannot be captured.
        UsageError: there are too few lengths for a curve.
        BenchError: timings cannot be read or taken.
    """
    timed_lengths = spaced_lengths(lengths)
    is_product = device is not None and not devices.is_id(device)
    if is_product and (fill is not None or measure is not None or like is not None):
        raise UsageError(
            f"--device {device} is the name of a product, whose steps cannot be timed here: omit --fill, --measure and "
            "--like"
        )
    if not (math.isfinite(skew) and skew >= 0):
        raise UsageError(f"a skew of {skew:g}: give 0 for equally likely experts, or an exponent above 0")
    if measure is not None and not isinstance(source, str):
        raise UsageError("whole steps are measured only for a model by name: omit `measure`")
    # both are refused before graphs are captured
    target = targets.of(device, timings, like, is_filled=fill is not None)
    stored = timed.open_timings(timings, like) if target.is_processor else target.stored
    if not target.is_processor and (measure is not None or threads is not None):
        raise UsageError(f"--measure and --threads are of the processor: omit them, or --device {device}")
    decode_graphs = _capture_lengths(source, DECODE, timed_lengths, batch, seed)
    prefill_graphs = _capture_prefill(source, timed_lengths, batch, seed)
    thread_count = threads or default_threads(None if stored is None else stored.environment)
    ceiling = target.quoted or target.unquoted or roof.of_machine(fill is not None, device=target.device)
    all_graphs = [*decode_graphs.values(), *(prefill_graphs.values() if not isinstance(prefill_graphs, str) else ())]
    if stored is not None and fill is not None:
        _fill(all_graphs, stored, thread_count, fill, progress, target.device)
    measured: Mapping[tuple[str, int], MeasuredStep] = {}
    if measure is not None:
        from xsp.bound import steps

        phases = (DECODE, *(() if isinstance(prefill_graphs, str) else (PREFILL,)))
        measured = steps.measure(source, phases, timed_lengths, batch, thread_count, measure, seed, progress)
    builder = _CurveBuilder(batch, thread_count, stored, ceiling, partial, skew, measured)
    curve = builder.curve(DECODE, decode_graphs)
    longest = decode_graphs[timed_lengths[-1]]
    environment = None if stored is None else stored.environment.hash
    return Language(
        name=decode_graphs[timed_lengths[0]].name,
        batch=batch,
        decode=curve,
        prefill=prefill_graphs if isinstance(prefill_graphs, str) else builder.curve(PREFILL, prefill_graphs),
        ceilings=ceiling,
        compute_bound=builder.compute_bound(curve.points),
        cache_crossing=_cache_overtakes(curve.points, batch, skew),
        threads=thread_count,
        framework=builder.framework(longest)[1],
        skew=skew,
        settings={
            "dtype": longest.settings.get("dtype"),
            "environment": environment,
            "like": like,
            **({} if target.is_processor or stored is None else {"device": stored.environment.device_name}),
        },
        problems=(
            *(f"{problem.where}: {problem.reason}" for problem in longest.problems),
            *(stored.remarks[:3] if stored is not None else ()),
            *_processor_note(stored if device is None else None),
        ),
    )


def _processor_note(stored: Timings | None) -> tuple[str, ...]:
    note = "" if stored is None else stored.environment.processor_note
    return (note,) if note else ()


def spaced_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths to time: the given ones, or `LENGTHS` lengths from the first to the second of two.

    Raises:
        UsageError: the lengths are too few or too small for a curve.
    """
    result = sorted(set(lengths))
    if len(result) == 2 and result[0] >= 2:
        low, high = result
        steps = range(LENGTHS)
        result = sorted({round(low * (high / low) ** (step / (LENGTHS - 1))) for step in steps})
    if len(result) < 3 or result[0] < 2:
        raise UsageError("a curve needs different lengths of at least 2 tokens: --decode 64:1024")
    return tuple(result)


def _capture_lengths(source: Any, phase: str, lengths: Sequence[int], batch: int, seed: int) -> dict[int, Graph]:
    phase_options: dict[int, dict[str, Any]] = {length: {phase: length} for length in lengths}
    return {length: graphs.of(source, batch=batch, seed=seed, **options) for length, options in phase_options.items()}


def _capture_prefill(source: Any, lengths: Sequence[int], batch: int, seed: int) -> dict[int, Graph] | str:
    """Return the graphs of reading; the reason why not if a model calls operators for each token that it reads."""
    short_length = max(1, lengths[0] // 2)
    shorter, longer = (graphs.of(source, batch=batch, seed=seed, prefill=n) for n in (short_length, lengths[0]))
    if len(longer.nodes) > MAX_CALL_GROWTH * len(shorter.nodes):
        return (
            f"it calls operators for each token that it reads, {len(longer.nodes):,} for {lengths[0]} tokens: without "
            "its own kernels it reads token by token"
        )
    return {lengths[0]: longer, **_capture_lengths(source, PREFILL, lengths[1:], batch, seed)}


def _fill(
    captured: Sequence[Graph], stored: Timings, threads: int, seconds: float, progress: Progress, device: Device | None
) -> None:
    """Time the missing calls of all lengths; calls that several lengths share are the most useful and come first."""
    from xsp import bench
    from xsp.bench.plan import missing, overheads

    counts: dict[str, tuple[Any, int]] = {}
    for graph in captured:
        for spec, count in bench.specs(graph, threads=threads, environment=stored.environment):
            counts[spec.key] = (spec, count + counts.get(spec.key, (spec, 0))[1])
    pairs = [*counts.values(), *((spec, 1) for spec in (overheads(threads) if device is None else ()))]
    if missing(pairs, stored):
        bench.fill(pairs, stored, seconds, progress, device=device)


@dataclass(frozen=True)
class _CurveBuilder:
    """Settings and data from which a curve is made, except its graphs."""

    batch: int
    threads: int
    timings: Timings | None
    ceiling: Ceiling | str
    partial: bool
    skew: float
    measured: Mapping[tuple[str, int], MeasuredStep]

    def framework(self, graph: Graph) -> tuple[Figure | None, str]:
        """Return the time of calls of modules and views, and the reason if it is unknown."""
        if self.timings is None:
            return None, "timings are of this processor"
        return timed.framework(graph, self.timings, self.threads)

    def curve(self, phase: str, graphs: Mapping[int, Graph]) -> LengthCurve:
        """Return the curve of a phase from its graphs by the number of tokens."""
        keys = {
            n: [spec.block.work_key for spec in timed.specs_of(graph, self.threads) if spec is not None]
            for n, graph in graphs.items()
        }
        figures = {n: self.figures(graph) for n, graph in graphs.items()}
        points = tuple(self.point(phase, n, graph, figures[n]) for n, graph in graphs.items())
        has_same_operators = len({tuple(node.call.op for node in graph.computing) for graph in graphs.values()}) == 1
        same = _shared_calls(list(keys.values()), has_same_operators)
        different = len({key for step_keys in keys.values() for key in step_keys})
        computing = len(points[-1].graph.computing)
        curve = LengthCurve(phase, points, None, None, computing, sum(same[-1]), different)
        reason = _no_fit(phase, points, has_same_operators)
        if reason:
            return replace(curve, reason=reason)
        return self.fit(curve, graphs, figures, same)

    def figures(self, graph: Graph) -> list[Figure | None]:
        """Return the timing of each computing node."""
        if self.timings is None:
            return [None] * len(graph.computing)
        as_run = timed.of(graph, self.timings, self.threads, self.threads).as_run
        return [figure for figure, node in zip(as_run, graph.nodes, strict=True) if node.computes]

    def point(self, phase: str, tokens: int, graph: Graph, figures: Sequence[Figure | None]) -> LengthPoint:
        """Return the point of one length."""
        computed = self.batch * (1 if phase == DECODE else tokens)
        active = experts.active(graph, computed)
        flops = work.total(map(work.flops_of, graph.computing))
        coverage = self.coverage(graph, figures)
        ns = half = None
        if coverage.nodes and (coverage.share >= MIN_COVERAGE or self.partial):
            glue, _ = self.framework(graph)
            ns = math.fsum(figure.ns for figure in figures if figure is not None) + (glue.ns if glue else 0.0)
            half = math.hypot(totals.half(figures), glue.half_ns if glue else 0.0)
        ceiling_ns = experts.least_ns(active, flops, computed, graph, self.ceiling, self.skew)
        return LengthPoint(
            tokens, graph, coverage, ns, half, ceiling_ns, active, flops, self.measured.get((phase, tokens))
        )

    def compute_bound(self, points: Sequence[LengthPoint]) -> dict[int, int | None]:
        """Return the number of sequences that balances computing and reading, by tokens; empty without ceilings."""
        if isinstance(self.ceiling, str):
            return {}
        return {
            point.tokens: experts.compute_bound(
                point.active, point.flops, self.batch, point.graph, self.ceiling, self.skew
            )
            for point in points
        }  # fmt: skip

    def coverage(self, graph: Graph, figures: Sequence[Figure | None]) -> Coverage:
        """Return the coverage of a graph by timings."""
        remaining = iter(figures)
        padded = [next(remaining) if node.computes else None for node in graph.nodes]
        floor: Sequence[Figure | None] = [None] * len(graph.nodes)
        if not isinstance(self.ceiling, str):
            floor, _ = roof.figures(graph, self.ceiling)
        expected = totals.expectations(graph, padded, floor)
        return totals.coverage(padded, [node.computes for node in graph.nodes], expected)

    def fit(
        self,
        curve: LengthCurve,
        graphs: Mapping[int, Graph],
        figures: Mapping[int, Sequence[Figure | None]],
        same: Sequence[Sequence[bool]],
    ) -> LengthCurve:
        """Return a curve with its fit, in which each part has its own powers."""
        lengths = list(graphs)
        nodes = [graph.computing for graph in graphs.values()]
        figures_by_length = list(figures.values())
        degrees = [
            0 if constant else _degree(lengths, [row[index] for row in nodes]) for index, constant in enumerate(same[0])
        ]
        complete = [all(row[index] is not None for row in figures_by_length) for index in range(len(degrees))]
        parts: dict[int, list[list[Figure]]] = {
            degree: [
                [
                    figure
                    for index, figure in enumerate(row)
                    if figure is not None and complete[index] and degrees[index] == degree
                ]
                for row in figures_by_length
            ]
            for degree in (0, 1, 2)
        }
        fits: dict[int, Polynomial] = {}
        for degree, groups in parts.items():
            values, halves = [math.fsum(figure.ns for figure in group) for group in groups], [*map(totals.half, groups)]
            if degree:
                fits[degree] = polynomials.fit(lengths, values, halves, degree)
            else:
                fits[degree] = polynomials.constant(values[-1], halves[-1])
        glue, _ = self.framework(curve.points[-1].graph)
        non_attention = fits[0] + (
            polynomials.constant(glue.ns, glue.half_ns) if glue is not None else polynomials.ZERO
        )
        if curve.phase == DECODE:
            return replace(
                curve, non_attention=non_attention, attention=fits[1] + fits[2], omitted_calls=complete.count(False)
            )
        return replace(
            curve, non_attention=non_attention + fits[1], attention=fits[2], omitted_calls=complete.count(False)
        )


def _shared_calls(keys: Sequence[Sequence[str]], has_same_operators: bool) -> list[list[bool]]:
    """Return, for each length and call, whether the call is equal at all lengths."""
    if has_same_operators:
        equal = [len(set(column)) == 1 for column in zip(*keys, strict=True)]
        return [equal for _ in keys]
    common = set.intersection(*map(set, keys))
    return [[key in common for key in row] for row in keys]


def _no_fit(phase: str, points: Sequence[LengthPoint], has_same_operators: bool) -> str:
    """Return why there is no curve through the points; empty if there is one."""
    if not all(point.ns is not None for point in points):
        if not any(point.coverage.nodes for point in points):
            return "no call is timed"
        sparsest = min(points, key=lambda point: point.coverage.share)
        return f"timings are known for {100 * sparsest.coverage.share:.1f} % at {sparsest.tokens} tokens"
    if not has_same_operators:
        return "some lengths call different operators: give a narrower range"
    lengths = [point.tokens for point in points]
    if phase == DECODE and not polynomials.is_straight(lengths, [float(point.active.state) for point in points]):
        bend = next(
            (after.tokens for before, after in pairwise(points)
             if after.active.state == before.active.state),
            None,
        )  # fmt: skip
        where = f" before {bend:,} tokens" if bend else ""
        return f"the cache stops growing{where} (sliding window): give a range below or above it"
    return ""


def _degree(lengths: Sequence[int], nodes: Sequence[Any]) -> int:
    """Return the power of the length with which the work of a call grows: 1 or 2."""
    for amount_of in (work.flops_of, work.bytes_of):
        amounts = [amount_of(node) for node in nodes]
        if None in amounts or not polynomials.is_straight(lengths, [float(amount or 0) for amount in amounts]):
            return 2
    return 1


def _cache_overtakes(points: Sequence[LengthPoint], batch: int, skew: float) -> float | None:
    """Return the number of tokens at which the cache has as many bytes as the weights in use; None if it is unknown."""
    first, last = points[0], points[-1]
    slope = (last.active.state - first.active.state) / (last.tokens - first.tokens)
    lengths, states = [point.tokens for point in points], [float(point.active.state) for point in points]
    if slope <= 0 or not polynomials.is_straight(lengths, states):
        return None
    return max(0.0, last.tokens + (last.active.weights(batch, skew) - last.active.state) / slope)
