"""Construction of a bound from a graph or its source, timings, ceilings, and the trace of a run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp import processes, stats
from xsp.bench import steps
from xsp.bench.plan import MIN_SECONDS, default_threads, effective_state, runtime_of
from xsp.bench.spec import CacheState, Loss, slowdown_text
from xsp.bench.timings import Timings
from xsp.bound import ceiling as roof
from xsp.bound import fused, ladder, planned, recordedcalls, targets, timed, totals
from xsp.bound import join as joining
from xsp.bound.ladder import NAMES, Bound, Hole, Rung
from xsp.bound.targets import Target
from xsp.bound.totals import Coverage, Figure, Total
from xsp.device import ceilings, devices, machine
from xsp.device.ceilings import Ceiling
from xsp.device.contract import Device
from xsp.errors import AnalysisError, GraphError, UsageError
from xsp.graph import sources as graphs
from xsp.graph.node import Graph

if TYPE_CHECKING:
    from xsp.store.trace import Trace

FOREIGN = "timings are of this processor"
"""Reason why there are no timings for another device."""

MOST_REMEASUREMENTS = 2
"""How often ceilings that are not valid are measured again: other work lowers them, and the highest rates count."""

Progress = Callable[[str, int, int], None]


@dataclass
class _Parts:
    """The parts from which a bound is made."""

    graph: Graph
    trace: Trace | None
    partial: bool
    cores: int
    is_computing: tuple[bool, ...]
    figures: dict[str, tuple[Figure | None, ...]] = field(default_factory=dict)
    rungs: dict[str, Total] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    join: joining.Join | None = None
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    beyond_ns: float = 0.0
    """Time of device work in the trace that belongs to no call."""

    has_measured_ceilings: bool = False
    page_faults: Figure | None = None
    """Time that page faults take from the step; None if it is short or unknown."""


def of(
    source: Any,
    *args: Any,
    fill: float | None = None,
    trace: Any = None,
    device: str | None = None,
    granularity: int | None = None,
    timings: Timings | Path | str | None = None,
    like: str | None = None,
    threads: int | None = None,
    partial: bool = False,
    progress: Progress = lambda name, done, total: None,
    check: Callable[[Graph], None] | None = None,
    **model_options: Any,
) -> Bound:
    """Return the bound of a step: the ladder from the peak rates of the machine to the measured time, in nanoseconds.

    Args:
        source: as in `xsp.graph.of`: the name of a model, a path, a module followed by its arguments, a graph, a trace.
        args: positional arguments of a module.
        fill: seconds to spend on missing timings; default: none are taken.
        trace: a trace of a run of the same step, or its path, to compare with.
        device: the device that the bound is of: one of this machine (`cuda:0`), with its timings and peak rates, or a
            product (`H200`), with published peak rates and the timings of it in the folder; default: the processor.
        granularity: number of calls per block, for the rung `blocks`.
        timings: open timings, or their folder; default: the folder of this user.
        like: hash of an environment whose timings are used where this one has none.
        threads: threads of the step; default: those of the run, otherwise all cores.
        partial: return totals below a coverage of 95 % as lower limits.
        progress: called while timings are taken.
        check: called with the graph before anything is measured or timed; it raises an error if the bound is of no use.
        model_options: `batch`, `train`, `seed`, `shape`, `sequence`, `kwargs` of `xsp.graph.of`.

    Raises:
        GraphError: there is no graph, or the trace is of another step.
        BenchError: timings cannot be read or taken.
        AnalysisError: the product is unknown.
        DeviceError: there is no such device here, or it cannot be used.
        UsageError: `fill` is not above 0, or asks for timings of another device.
    """
    if fill is not None and not fill > 0:
        raise UsageError(f"{fill:g} seconds are too short: give a number above 0")
    # an unknown device or hash is refused before a graph is captured
    target = targets.of(device, timings, like, is_filled=fill is not None, has_blocks=granularity is not None)
    if not target.is_processor and threads is not None:
        raise UsageError(f"--threads is of the processor: omit it, or --device {device}")
    like_timings = None if like is None or not target.is_processor else timed.open_timings(timings, like)
    if target.kind and "device" in graphs.supported_options(source):
        model_options["device"] = target.kind
    graph, loaded = planned.of(source, args, trace, model_options)
    if not graph.computing:
        raise GraphError(f"{graph.name}: none of its calls computes anything, so there is no bound")
    notes: list[str] = []
    calls: Sequence[recordedcalls.RecordedCall] = ()
    pairs = None
    if loaded is not None:
        graph, calls, pairs = planned.match_calls(graph, loaded, planned.is_trace(source), notes)
    if check is not None:
        check(graph)
    on_device = loaded is not None and recordedcalls.has_device_work(loaded)
    target.check(loaded, on_device)
    cores = 1 if target.stored is not None else processes.cores()
    parts = _Parts(graph, loaded, partial, cores, tuple(node.computes for node in graph.nodes), join=pairs)
    parts.problems += [*notes, *target.notes, *targets.foreign_notes(device, target, loaded)]
    parts.problems += [f"{problem.where}: {problem.reason}" for problem in graph.problems]
    _mark_absent(parts, Rung.MEASURED, "there is no trace: record one with xsp profile, and give --run DIR")
    if loaded is not None:
        _add_trace(parts, loaded, calls)
    if loaded is None and (precision := devices.convolution_precision(target.kind)) is not None:
        # torch's default; a matrix product uses tensor cores only if the program asks for it
        parts.settings["convolutions"] = precision
    ceiling = _ceiling(parts, target, fill is not None)
    foreign = target.stored is None and (not target.is_processor or recordedcalls.is_foreign(loaded))
    if foreign and device is None and any(option is not None for option in (fill, granularity, like)):
        parts.problems.append(
            "timings: --fill, --construct and --like have no effect for a run of a device or another processor"
        )
    stored = next((found for found in (target.stored, like_timings) if found is not None), None)
    if stored is None and not foreign:
        stored = timed.open_timings(timings, like)
    thread_count = _threads(threads, loaded, target)
    if stored is not None:
        step = planned.model_of(source, model_options) if target.device is not None else None
        _add_timings(parts, stored, thread_count, granularity, fill, progress, target.device, step)
    _ceilings(parts, ceiling)
    if stored is None:
        reason = FOREIGN if device is None else f"there are no timings of {device}: take some on it, xsp bench MODEL"
        for rung in (Rung.BEST, Rung.AS_RUN, Rung.BLOCKS, Rung.FRAMEWORK):
            _mark_absent(parts, rung, reason)
    else:
        _timed_totals(parts, stored, granularity, thread_count)
    _whole_steps(parts, stored)
    if fill is not None and stored is not None and (loaded is None or not loaded.run.machine.ceilings):
        _measure_invalid_again(parts, target.device)
    return _finish(parts, None if stored is None or fill is None else stored.loss)


def _measure_invalid_again(parts: _Parts, device: Device | None) -> None:
    """Measure the ceilings of a device again while the step is below them: other work had lowered them."""
    for _ in range(MOST_REMEASUREMENTS):
        omitted = _omitted_ceiling(parts)
        if omitted is None or omitted.is_valid:
            return
        _ceilings(parts, roof.of_machine(may_measure=True, again=True, device=device))


# --- the trace ------------------------------------------------------------------------------------------


def _add_trace(parts: _Parts, trace: Trace, calls: Sequence[recordedcalls.RecordedCall]) -> None:
    """Add the figures of the trace: each call in place, and the whole step."""
    graph = parts.graph
    if parts.join is None:
        parts.is_computing = tuple(call.computes for call in calls)
        if not any(parts.is_computing):
            raise GraphError(f"{trace.name}: none of its operators computes anything, so there is no bound")
        if not any(
            node.call.inputs for node, computes in zip(graph.nodes, parts.is_computing, strict=True) if computes
        ):
            raise GraphError(f"{trace.name}: {recordedcalls.no_shapes(trace)}")
        indices: Sequence[int | None] = range(len(calls))
    else:
        indices = parts.join.call_of_node
    parts.figures[Rung.IN_PLACE.value] = tuple(
        None if index is None else ladder.quantized(Figure(calls[index].ns, calls[index].half_ns, f"seen {index}"))
        for index in indices
    )
    parts.settings["tensor_cores"] = [None if index is None else calls[index].tensor_cores for index in indices]
    if parts.join is None and any(call.kernels for call in calls):
        parts.beyond_ns = max(0.0, recordedcalls.device_ns(trace) - sum(call.ns for call in calls))
        if parts.beyond_ns:
            share = 100 * parts.beyond_ns / recordedcalls.device_ns(trace)
            parts.problems.append(f"device work: {share:.1f} % of its time belongs to no call of the trace")
    step = ladder.quantized(recordedcalls.step_time(trace))
    if step is None:
        parts.absent[Rung.MEASURED.value] = "the trace has no timed step"
        step_total = Total(Coverage(0, 1, None), None, None)
    else:
        step_total = Total(Coverage(1, 1, 1.0), step.ns, step.half_ns)
    parts.rungs[Rung.MEASURED.value] = step_total
    parts.problems += planned.kind_notes(trace)
    faults = recordedcalls.page_faults(trace)
    if faults is not None:
        text, parts.page_faults = faults
        parts.problems.append(text)
    if recordedcalls.is_compiled(trace):
        parts.problems.append("compiled: calls inside compiled code are not recorded; compare totals and layers")


# --- ceilings ---------------------------------------------------------------------------------------------


def _ceiling(parts: _Parts, target: Target, may_measure: bool) -> Ceiling | str:
    """Return the ceilings of the given device, the run or this machine; a reason if there are none."""
    if target.quoted is not None:
        return target.quoted
    if target.device is not None:
        return roof.of_machine(may_measure, device=target.device)
    trace = parts.trace
    if trace is not None:
        on_device = bool(trace.run.machine.devices) and recordedcalls.has_device_work(trace)
        try:
            return ceilings.of_run(trace.run, on_device)
        except AnalysisError as error:
            if recordedcalls.has_device_work(trace) or trace.run.machine.cpu != machine.cpu_model():
                return f"{error}; or name the device: --device NAME"
    elif target.unquoted:
        return target.unquoted
    return roof.of_machine(may_measure)


def _ceilings(parts: _Parts, ceiling: Ceiling | str) -> None:
    graph, rung = parts.graph, Rung.CEILING
    if isinstance(ceiling, str):
        _mark_absent(parts, rung, ceiling)
        _mark_absent(parts, Rung.FUSED, ceiling)
        return
    tensor_cores = parts.settings.pop("tensor_cores", [None] * len(graph.nodes))
    if parts.settings.get("convolutions") == "tf32":
        tensor_cores = [used or "conv" in node.call.op for node, used in zip(graph.nodes, tensor_cores, strict=True)]
    as_tf32 = [
        "tf32" if used and "tf32" in ceiling.tensor and roof.precision_of(node) == "fp32" else None
        for node, used in zip(graph.nodes, tensor_cores, strict=True)
    ]
    figures, reasons = roof.figures(graph, ceiling, as_tf32)
    parts.figures[rung.value] = tuple(ladder.quantized(figure) for figure in figures)
    parts.settings["ceilings"] = {"name": ceiling.name, "source": ceiling.source}
    parts.has_measured_ceilings = ceiling.is_measured
    parts.reasons = {**parts.reasons, rung.value: reasons}
    in_place = parts.figures.get(Rung.IN_PLACE.value)
    expected: list[float | None] = (
        [None if figure is None else figure.ns for figure in in_place]
        if in_place is not None
        else totals.expectations(graph, parts.figures[rung.value], parts.figures[rung.value])
    )
    _add(parts, rung, expected)
    total = parts.rungs[rung.value]
    if total.sequential is None:
        parts.absent[rung.value] = _coverage_reason(total.coverage)
        _mark_absent(parts, Rung.FUSED, parts.absent[rung.value])
        return
    fused_ns = fused.least_ns(graph, parts.figures[rung.value], ceiling, as_tf32)
    if isinstance(fused_ns, str):
        _mark_absent(parts, Rung.FUSED, fused_ns)
        return
    quantized_ns = ladder.quantized(Figure(fused_ns))
    assert quantized_ns is not None
    parts.rungs[Rung.FUSED.value] = Total(total.coverage, min(quantized_ns.ns, total.sequential), 0.0)


# --- timings ----------------------------------------------------------------------------------------------


def _threads(requested: int | None, trace: Trace | None, target: Target) -> int:
    if target.stored is not None:
        return default_threads(target.stored.environment)
    recorded = trace.run.machine.torch_threads if trace is not None else None
    return requested or recorded or processes.cores()


def _add_timings(
    parts: _Parts,
    stored: Timings,
    threads: int,
    granularity: int | None,
    fill: float | None,
    progress: Progress,
    device: Device | None = None,
    step: tuple[str, dict[str, Any]] | None = None,
) -> None:
    graph = parts.graph
    if fill is not None:
        parts.problems += _fill(graph, stored, threads, granularity, fill, progress, device, step)
    lookup = timed.of(graph, stored, threads, parts.cores)
    parts.figures[Rung.AS_RUN.value], parts.figures[Rung.BEST.value] = lookup.as_run, lookup.best
    parts.reasons = {Rung.AS_RUN.value: lookup.reasons}
    specs = [spec for spec in lookup.specs if spec is not None]
    parts.settings |= {
        "environment": stored.environment.hash,
        "machine": stored.environment.name,
        "like": stored.like,
        "borrowed": lookup.borrowed,
        "threads": threads,
        "state": specs[0].state.value if specs else None,
        "runtime": runtime_of(graph),
        "drift": lookup.drift,
        "at_the_floor": lookup.at_the_floor,
    }
    if stored.environment.device is not None:
        kind = stored.environment.device.get("kind")
        parts.settings |= {
            "device": stored.environment.device_name, "device_kind": kind, "as_run_cold_ns": lookup.cold_ns,
        }  # fmt: skip
        if (precision := devices.convolution_precision(str(kind))) is not None:
            # torch's default; a matrix product uses tensor cores only if the program asks for it
            parts.settings["convolutions"] = precision
        states = {spec.state for spec in specs}
        if states == {CacheState.WARM} and effective_state(graph, CacheState.CHAIN, stored.environment) not in states:
            parts.problems.append("timings: with warm caches, because none was taken with the caches of a step")
    if parts.trace is None and stored.environment.processor_note:
        parts.settings["processor_note"] = stored.environment.processor_note
    if lookup.borrowed:
        parts.problems.append(f"timings: {lookup.borrowed} are from environment {stored.like}, in place of this one")
    if lookup.drift is not None and lookup.drift > timed.MAX_DRIFT:
        parts.problems.append(
            f"timings: fixed work took {slowdown_text(lookup.drift)} while they were taken: the machine was busy; "
            f"{lookup.disturbed_timings} of {lookup.used_timings} timings were disturbed"
        )
    parts.problems += [f"timings: {text}" for text in lookup.slowed]
    parts.problems += stored.remarks[:3]


def _fill(
    graph: Graph,
    stored: Timings,
    threads: int,
    granularity: int | None,
    seconds: float,
    progress: Progress,
    device: Device | None = None,
    step: tuple[str, dict[str, Any]] | None = None,
) -> list[str]:
    """Time missing calls as they run, then requested blocks, then variants; return notes if the time was too short.

    On an accelerator, the whole step comes first, if its model is known.
    """
    from xsp import bench
    from xsp.bench.plan import missing, overheads

    runtime = runtime_of(graph)
    sizes = (1, *((granularity,) if granularity is not None and granularity > 1 else ()))
    conditions: dict[str, Any] = {"threads": threads, "runtime": runtime, "environment": stored.environment}
    rounds = [bench.specs(graph, granularity=size, **conditions) for size in sizes]
    if device is not None and step is not None:
        rounds.insert(0, [(spec, 1) for spec in steps.specs(graph, *step)])
    if runtime == "torch":
        rounds[0] += [(spec, 1) for spec in overheads(threads) if device is None]
        rounds.append(bench.specs(graph, variants=_variants(), **conditions))
    pending = {spec.key: spec for pairs in rounds for spec in missing(pairs, stored)}
    if not pending:
        return []
    startup: list[float] = []
    bench.fill(pending.values(), stored, seconds, progress, in_order=True, on_start=startup.append, device=device)
    return [started_late(elapsed, seconds) for elapsed in startup if elapsed > seconds - MIN_SECONDS]


def started_late(elapsed_s: float, seconds: float) -> str:
    """Return a note for a budget that was mostly spent before the first timing."""
    return f"timings: the timing process took {elapsed_s:.1f} s of the {seconds:g} s to start; give more time"


def _variants() -> tuple[str, ...]:
    try:
        from xsp.bench.variants import VARIANTS
    except ImportError:
        return ()
    return tuple(VARIANTS)


def _timed_totals(parts: _Parts, stored: Timings, granularity: int | None, threads: int) -> None:
    graph = parts.graph
    no_figures: tuple[Figure | None, ...] = (None,) * len(graph.nodes)
    floor = parts.figures.get(Rung.CEILING.value, no_figures)
    for rung in (Rung.BEST, Rung.AS_RUN):
        expected = _expected(parts, parts.figures[rung.value], floor)
        _add(parts, rung, expected)
        total = parts.rungs[rung.value]
        if total.sequential is None:
            parts.absent[rung.value] = (
                "no call is timed" + (f" ({reason})" if (reason := _untimed_reason(parts)) else "")
                if not total.coverage.nodes
                else _coverage_reason(total.coverage)
            )
    as_run = parts.rungs[Rung.AS_RUN.value]
    if granularity is None:
        _mark_absent(parts, Rung.BLOCKS, "--construct G uses blocks of G calls")
    else:
        total, reason = timed.blocks(graph, stored, threads, granularity, parts.partial)
        parts.rungs[Rung.BLOCKS.value] = total
        parts.settings["granularity"] = granularity
        if reason:
            parts.absent[Rung.BLOCKS.value] = reason
    glue, reason = timed.framework(graph, stored, threads)
    blocks = parts.rungs[Rung.BLOCKS.value]
    lower = blocks if blocks.sequential is not None else as_run
    if glue is None or lower.sequential is None or lower.half_ns is None:
        _mark_absent(parts, Rung.FRAMEWORK, reason or parts.absent.get(Rung.AS_RUN.value, ""))
    else:
        half = (lower.half_ns**2 + glue.half_ns**2) ** 0.5
        parts.rungs[Rung.FRAMEWORK.value] = Total(lower.coverage, lower.sequential + glue.ns, half)


def _whole_steps(parts: _Parts, stored: Timings | None) -> None:
    """Add the step as a whole on an accelerator: replayed, issued by the host and, without a run, measured."""
    timed_steps = {} if stored is None or stored.environment.device is None else steps.of(parts.graph, stored)
    command = targets.bench_command(parts.graph, parts.settings.get("device_kind"))
    untimed_reason = f"the whole step was not timed: {command}" if "device" in parts.settings else ""
    for rung in (Rung.REPLAYED, Rung.ISSUED):
        _mark_absent(parts, rung, untimed_reason or "only steps on an accelerator are captured and issued")
    replayed, waited = timed_steps.get(steps.REPLAYED), timed_steps.get(steps.WAITED)
    if replayed is not None and not replayed.is_timed:
        parts.absent[Rung.REPLAYED.value] = replayed.reason or replayed.status.value
    elif replayed is not None:
        parts.rungs[Rung.REPLAYED.value] = _whole(replayed.trimmed_ns, replayed.half_ns)
    if waited is None or not waited.is_timed or waited.host_ns is None:
        if waited is not None:
            parts.absent[Rung.ISSUED.value] = waited.reason or waited.status.value
        return
    parts.settings["issue_ns"] = waited.host_ns
    if replayed is None:
        parts.absent[Rung.REPLAYED.value] = f"the captured step was not timed: {command}"
    if waited.joules is not None and waited.trimmed_ns:
        parts.settings |= {"joules": waited.joules, "watts": 1e9 * waited.joules / waited.trimmed_ns}
    if replayed is not None and replayed.joules is not None:
        parts.settings["replayed_joules"] = replayed.joules
    below = next(
        (total for rung in (Rung.REPLAYED, Rung.AS_RUN) if (total := parts.rungs[rung.value]).sequential is not None),
        None,
    )
    if below is not None and below.sequential is not None:
        is_host = waited.host_ns > below.sequential
        parts.rungs[Rung.ISSUED.value] = _whole(waited.host_ns, 0.0) if is_host else replace(below, path=())
    else:
        parts.absent[Rung.ISSUED.value] = f"neither the captured step nor enough of its calls are timed: {command}"
    if parts.trace is None or parts.trace.run.imported is not None:  # a profiler of others made its own step longer
        parts.rungs[Rung.MEASURED.value] = _whole(waited.trimmed_ns, waited.half_ns)
        if parts.trace is not None:
            parts.problems.append("measured: the step alone, not under the profiler of the trace")


def _whole(ns: float | None, half_ns: float | None) -> Total:
    assert ns is not None
    return Total(Coverage(1, 1, 1.0), float(round(ns)), half_ns or 0.0)


def _expected(parts: _Parts, figures: ladder.Figures, floor: ladder.Figures) -> list[float | None]:
    """Return the expected time of each node, from the trace if it has the node, as that is the best estimate."""
    in_place = parts.figures.get(Rung.IN_PLACE.value)
    expected = totals.expectations(parts.graph, figures, floor)
    if in_place is None:
        return expected
    return [estimate if figure is None else figure.ns for estimate, figure in zip(expected, in_place, strict=True)]


# --- the bound --------------------------------------------------------------------------------------------


def _add(parts: _Parts, rung: Rung, expected: Sequence[float | None]) -> None:
    parts.rungs[rung.value] = totals.total(
        parts.graph,
        parts.figures[rung.value],
        parts.is_computing,
        expected,
        parts.cores,
        parts.partial,
        parts.beyond_ns,
    )


def _mark_absent(parts: _Parts, rung: Rung, reason: str) -> None:
    parts.rungs[rung.value] = Total(Coverage(0, sum(parts.is_computing), None), None, None)
    parts.absent[rung.value] = reason


def _coverage_reason(coverage: Coverage) -> str:
    unit = "of the expected time" if coverage.time is not None else "of the calls"
    return f"known for only {100 * coverage.share:.1f} % {unit}; --partial gives a lower limit"


def _finish(parts: _Parts, loss: Loss | None) -> Bound:
    graph = parts.graph
    in_place = parts.figures.get(Rung.IN_PLACE.value)
    if in_place is None:
        _mark_absent(parts, Rung.IN_PLACE, "there is no trace")
    else:
        total = totals.total(
            graph, in_place, parts.is_computing, [None] * len(graph.nodes), parts.cores, True, parts.beyond_ns
        )
        parts.rungs[Rung.IN_PLACE.value] = total
        if total.sequential is None:
            parts.absent[Rung.IN_PLACE.value] = "no call is in the trace"
    parts.settings.pop("tensor_cores", None)
    draft = Bound(
        graph, {rung.value: parts.rungs[rung.value] for rung in Rung}, parts.figures, parts.is_computing, (), (), ()
    )
    below_ceiling = _count_below_ceiling(parts)
    omitted = _omitted_ceiling(parts)
    if omitted is not None:
        parts.problems.append(f"ceiling: {omitted.reason}")
        _mark_absent(parts, Rung.CEILING, omitted.reason)
        if not omitted.is_valid:
            _mark_absent(parts, Rung.FUSED, omitted.reason)
        parts.figures[Rung.CEILING.value] = (None,) * len(graph.nodes)
        draft = replace(draft, rungs={rung.value: parts.rungs[rung.value] for rung in Rung})
    deltas = ladder.differences(
        draft.ladder, parts.rungs, parts.figures, parts.is_computing, parts.beyond_ns, parts.page_faults
    )
    return Bound(
        graph,
        draft.rungs,
        parts.figures,
        parts.is_computing,
        tuple(deltas),
        tuple(ladder.layers(graph, parts.figures, parts.is_computing)),
        tuple(_holes(parts)),
        {rung: reason for rung, reason in parts.absent.items() if draft.rungs[rung].sequential is None},
        parts.join,
        below_ceiling,
        tuple(parts.problems),
        parts.settings,
        _untimed_reason(parts),
        loss,
    )


class _OmittedCeiling(NamedTuple):
    """Why the ceiling of single calls is omitted."""

    reason: str
    is_valid: bool
    """Whether its rates are right, and only single calls are not what this run consists of."""


def _omitted_ceiling(parts: _Parts) -> _OmittedCeiling | None:
    """Return why the ceiling of single calls is omitted; None if it is not.

    It is not valid if the same calls took less time; nor is any ceiling if the whole step did, unless its calls are
    fused in a compiled run: then that of single calls does not apply to it.
    """
    floor = parts.figures.get(Rung.CEILING.value)
    if floor is None:
        return None
    cause = (
        "the machine was busy while it was measured, or the data is in a cache; xsp doctor --measure measures it again"
        if parts.has_measured_ceilings
        else "the data is in a cache, or the device has other peak rates"
    )
    compared: list[tuple[str, float, float]] = []
    for rung in (Rung.BEST, Rung.IN_PLACE):
        pairs = [
            (ceiling.ns, figure.ns)
            for ceiling, figure, computes in zip(
                floor, parts.figures.get(rung.value) or (), parts.is_computing, strict=False
            )
            if computes and ceiling is not None and figure is not None
        ]
        ceilings_ns, times_ns = (math.fsum(pair[index] for pair in pairs) for index in (0, 1))
        compared.append((f"the time of the same calls ({NAMES[rung]})", ceilings_ns, times_ns))
    fused_ns, ceiling_ns, step_ns = (
        parts.rungs[rung.value].sequential for rung in (Rung.FUSED, Rung.CEILING, Rung.MEASURED)
    )
    is_compiled = parts.trace is not None and recordedcalls.is_compiled(parts.trace)
    least_ns = fused_ns if is_compiled and fused_ns is not None else ceiling_ns
    if least_ns is not None and step_ns is not None:
        compared.append(("the measured step", least_ns, step_ns))
    for name, high, low in compared:
        if high > low:
            reason = f"{high / 1e6:.3g} ms is above {name}, {low / 1e6:.3g} ms, so it is not valid: {cause}"
            return _OmittedCeiling(reason, is_valid=False)
    if ceiling_ns is not None and step_ns is not None and ceiling_ns > step_ns:
        reason = f"that of single calls is {ceiling_ns / 1e6:.3g} ms, and the calls of this run are fused"
        return _OmittedCeiling(reason, is_valid=True)
    return None


def _untimed_reason(parts: _Parts) -> str:
    """Return the most frequent reason why calls that were tried have no timing, and how many; empty if none was."""
    reasons = parts.reasons.get(Rung.AS_RUN.value, ())
    counts = Counter(reason for reason in reasons if reason not in ("", timed.NOT_TIMED))
    return "".join(f"{reason}, {count} {'call' if count == 1 else 'calls'}" for reason, count in counts.most_common(1))


def _holes(parts: _Parts) -> list[Hole]:
    """Return the calls without a timing or, if no call is timed, without a ceiling."""
    rung = next(
        (rung for rung in (Rung.AS_RUN, Rung.CEILING) if any(parts.figures.get(rung.value) or ())), Rung.CEILING
    )
    figures, reasons = parts.figures.get(rung.value), parts.reasons.get(rung.value)
    if figures is None or reasons is None:
        return []
    no_figures: tuple[Figure | None, ...] = (None,) * len(figures)
    expected = _expected(parts, figures, parts.figures.get(Rung.CEILING.value, no_figures))
    groups: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for index, node in enumerate(parts.graph.nodes):
        if parts.is_computing[index] and figures[index] is None:
            groups[node.call.op, reasons[index]].append(expected[index])
    holes = [Hole(op, reason, len(times), stats.known_sum(times)) for (op, reason), times in groups.items()]
    return sorted(holes, key=lambda hole: -(hole.expected_ns or 0.0))


def _count_below_ceiling(parts: _Parts) -> int:
    """Return the number of calls that are faster than their ceiling: at their best, or in place if none is timed."""
    rung = next((rung for rung in (Rung.BEST, Rung.IN_PLACE) if any(parts.figures.get(rung.value) or ())), None)
    floor = parts.figures.get(Rung.CEILING.value)
    if rung is None or floor is None:
        return 0
    return sum(
        computes and figure is not None and ceiling is not None and figure.ns < ceiling.ns
        for figure, ceiling, computes in zip(parts.figures[rung.value], floor, parts.is_computing, strict=True)
    )
