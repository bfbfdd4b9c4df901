"""Error and cost of constructing a model from blocks of G calls, for each G."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.bound.construct import Conditions, Construction, Cover, TimingSource, construct, cover
from xsp.errors import AnalysisError, GraphError, UsageError
from xsp.graph.node import Graph

if TYPE_CHECKING:
    from xsp.bench.timings import Timings

Progress = Callable[[str, int, int], None]

MAX_GRANULARITY = 16
"""Maximum number of calls of a block in a curve."""


@dataclass(frozen=True)
class CurvePoint:
    """One granularity of a curve."""

    construction: Construction
    error: float | None
    """Constructed over measured time, minus 1; None if one of them is unknown, or only a lower limit."""


def curve(
    graph: Graph,
    timings: TimingSource,
    measured_ns: float | None = None,
    granularities: Sequence[int] = range(1, MAX_GRANULARITY + 1),
    *,
    conditions: Conditions | None = None,
    only: Mapping[int, Collection[str]] | None = None,
    glue_ns: float | None = None,
) -> list[CurvePoint]:
    """Return the construction of each granularity, with its error against the measured step.

    The error includes the time of the framework if it is known.

    Args:
        graph: graph of the model.
        timings: timings of the blocks.
        measured_ns: measured time of the step, without the cost of profiling.
        granularities: numbers of computing calls per block.
        conditions: conditions of the timings.
        only: granularity → keys of specs that may be used; default: all.
        glue_ns: time that the framework adds to a step.
    """
    points = []
    for size in granularities:
        usable = None if only is None else only.get(size, ())
        construction = construct(graph, timings, size, conditions=conditions, only=usable, glue_ns=glue_ns)
        ns = construction.ns if construction.glue_ns is None else construction.with_glue_ns
        comparable = ns is not None and measured_ns and not construction.is_lower_limit
        points.append(
            CurvePoint(construction, ns / measured_ns - 1 if comparable and ns is not None and measured_ns else None)
        )
    return points


@dataclass(frozen=True)
class Curve:
    """A model constructed from blocks of each granularity, and from the best cover."""

    graph: Graph
    threads: int
    measured_ns: float | None
    """Measured time of the step in a trace; None without a trace."""

    points: tuple[CurvePoint, ...]
    cover: Cover | str
    """The best cover by blocks of up to the largest granularity, or the reason why there is none."""

    problems: tuple[str, ...] = ()

    @property
    def best(self) -> CurvePoint | None:
        """The point with the smallest error; None if no point has one."""
        scored = [point for point in self.points if point.error is not None]
        return min(scored, key=lambda point: abs(point.error or 0.0)) if scored else None


def of(
    source: Any,
    *args: Any,
    fill: float | None = None,
    trace: Any = None,
    device: str | None = None,
    timings: Timings | Path | str | None = None,
    like: str | None = None,
    threads: int | None = None,
    most: int = MAX_GRANULARITY,
    progress: Progress = lambda name, done, total: None,
    **model_options: Any,
) -> Curve:
    """Return the estimates of a step from blocks of 1 to `most` calls, and their errors against a run of it.

    Args:
        source: as in `xsp.graph.of`, or a run.
        args: positional arguments of a module.
        fill: seconds to spend on missing timings of blocks, small blocks first; default: none are taken.
        trace: a trace of a run of the same step, or its path.
        device: a device of this machine (`cuda:0`), or a product with timings in the folder; default: the processor. On
            a device the errors are against the replayed step, if it is timed.
        timings: open timings, or their folder; default: the folder of this user.
        like: hash of an environment whose timings are used where this one has none.
        threads: threads of the step; default: those of the run, otherwise all cores.
        most: number of calls of the largest blocks.
        progress: called while timings are taken.
        model_options: `batch`, `train`, `seed`, `shape`, `sequence`, `kwargs` of `xsp.graph.of`.

    Raises:
        GraphError: there is no graph, no call in it computes anything, or the run is of another step or machine.
        BenchError: timings cannot be read or taken.
    """
    from xsp import bench
    from xsp.bench import steps
    from xsp.bench.plan import default_threads, missing, overheads, runtime_of
    from xsp.bound import planned, recordedcalls, targets, timed
    from xsp.bound.totals import Figure
    from xsp.graph import sources as graphs

    target = targets.of(device, timings, like, is_filled=fill is not None)  # may raise
    stored = timed.open_timings(timings, like) if target.is_processor else target.stored
    if stored is None:
        raise AnalysisError(f"there are no timings of {device}: take some on it, xsp bench MODEL")
    if not target.is_processor and (trace is not None or threads is not None or planned.is_trace(source)):
        raise UsageError(f"--run and --threads are of the processor: omit them, or --device {device}")
    if not target.is_processor and "device" in graphs.supported_options(source):
        model_options["device"] = str((stored.environment.device or {}).get("kind"))
    graph, run = planned.of(source, args, trace, model_options)
    problems: list[str] = []
    if recordedcalls.is_foreign(run) and target.is_processor:
        raise GraphError(
            f"{graph.name}: the run is from a device or another processor, for which there are no timings here"
        )
    if run is not None:
        graph, *_ = planned.match_calls(graph, run, planned.is_trace(source), problems)
        problems += planned.kind_notes(run)
    run_threads = run.run.machine.torch_threads if run is not None else None
    environment = None if target.is_processor else stored.environment
    thread_count = threads or run_threads or default_threads(environment)
    conditions = Conditions(threads=thread_count, runtime=runtime_of(graph), environment=environment)
    sizes = range(1, most + 1)
    if fill is not None:
        pending = []
        whole = overheads(thread_count) if target.is_processor else []
        if target.device is not None and (model := planned.model_of(source, model_options)) is not None:
            whole = steps.specs(graph, *model)
        for size in sizes:
            blocks = bench.specs(
                graph, granularity=size, threads=thread_count, runtime=conditions.runtime, environment=environment
            )
            pending += missing([*blocks, *((spec, 1) for spec in whole if size == 1)], stored)
        if pending:
            bench.fill(pending, stored, fill, progress, in_order=True, device=target.device)
    step = recordedcalls.step_time(run) if run is not None else None
    replayed = None if target.is_processor else steps.of(graph, stored).get(steps.REPLAYED)
    if replayed is not None and replayed.is_timed and replayed.trimmed_ns:
        step = Figure(replayed.trimmed_ns, replayed.half_ns or 0.0, replayed.key)
    glue, _ = timed.framework(graph, stored, conditions.threads)
    points = curve(
        graph,
        stored,
        None if step is None else step.ns,
        sizes,
        conditions=conditions,
        glue_ns=None if glue is None else glue.ns,
    )
    try:
        best: Cover | str = cover(graph, stored, most, conditions=conditions)
    except GraphError as error:
        best = str(error)
    problems += stored.remarks[:3]
    if run is None and stored.environment.processor_note:
        problems.append(stored.environment.processor_note)
    return Curve(graph, conditions.threads, None if step is None else step.ns, tuple(points), best, tuple(problems))


@dataclass(frozen=True)
class TimingCost:
    """Cost of timing blocks compared with running the models, for one granularity."""

    granularity: int
    models: int
    """Number of included models: all their blocks are timed, and their step is known."""

    excluded: Mapping[str, str] = field(default_factory=dict)
    """Model → why it is not included."""

    blocks: int = 0
    unique: int = 0
    steps_ns: float = 0.0
    """Time of one step of each model."""

    blocks_ns: float = 0.0
    """Time of one run of each distinct block of all models."""

    @property
    def saved(self) -> float | None:
        """Time of running the models over that of running their distinct blocks equally often; None if unknown."""
        return self.steps_ns / self.blocks_ns if self.blocks_ns else None


def cost(
    graphs: Iterable[Graph],
    timings: TimingSource,
    steps_ns: Mapping[str, float],
    granularity: int = 1,
    *,
    conditions: Conditions | None = None,
) -> TimingCost:
    """Return the cost of timing the distinct blocks of models once, compared with running one step of each model.

    Args:
        graphs: graphs of the models.
        timings: timings of the blocks.
        steps_ns: measured steps by the names of the graphs.
        granularity: computing calls per block.
        conditions: conditions of the timings.
    """
    reasons: dict[str, str] = {}
    block_ns: dict[str, float] = {}
    models, blocks, steps = 0, 0, 0.0
    for graph in graphs:
        construction = construct(graph, timings, granularity, conditions=conditions, partial=True)
        if graph.name not in steps_ns:
            reasons[graph.name] = "its step was not measured"
        elif construction.is_lower_limit:
            reasons[graph.name] = (
                f"{sum(hole.count for hole in construction.holes)} of {len(construction.windows)} blocks are not timed"
            )
        else:
            models, blocks, steps = models + 1, blocks + len(construction.windows), steps + steps_ns[graph.name]
            block_ns |= {window.spec.key: window.ns for window in construction.windows if window.ns is not None}
    return TimingCost(granularity, models, reasons, blocks, len(block_ns), steps, math.fsum(block_ns.values()))
