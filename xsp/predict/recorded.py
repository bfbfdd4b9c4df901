"""The step of a run: forward and backward time of each layer, its gradients, the update, and the input.

Times are those of the trace without the cost of profiling. The time of a step is from the loop if the run has one, its
parts are from the recorded steps. Facts that the run lacks are listed as unknown and not estimated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xsp.account import pagefaults
from xsp.advise import steptime
from xsp.analyses.answers import Answers
from xsp.errors import AnalysisError, UsageError
from xsp.ingest import load
from xsp.predict import devicestep, gradients, hoststep
from xsp.predict.hoststep import Lane
from xsp.predict.training import Buckets, Input, Layer, Work
from xsp.schema import Level
from xsp.store.iterations import Iteration, iterations
from xsp.store.trace import Trace

LOADER_UNKNOWN = "a loader's workers: waiting for data stays as recorded; --loader states its parts"

NOTED_FAULTS = 0.05
"""Minimum share of the step that page faults take for an entry in `unknown`."""

LARGEST_EXCESS = 0.02
"""Maximum share by which the parts of a step may exceed it without an entry in `unknown`."""


@dataclass(frozen=True)
class RecordedStep:
    """The step of a run; durations are seconds."""

    name: str
    work: Work
    step: float
    """Measured time of the step."""

    interval: tuple[float, float] | None
    """Ends of the interval of `step`; None if unknown."""

    ranks: int
    samples: float | None
    """Samples of one rank in a step."""

    plan: Buckets | None
    """Buckets of the run; None if the plan follows from the parameters."""

    sources: tuple[str, ...]
    """Texts on the sources of the figures."""

    unknown: tuple[str, ...]
    """Texts on facts that the run lacks."""

    lanes: Mapping[str, Lane] = field(default_factory=dict)
    """The recorded step, for a chart."""

    accumulated_batches: int = 1
    """Batches per update; `work` and `samples` are of one batch, `step` is of all."""

    collective_seconds: tuple[float, ...] = ()
    """Duration of the collective of each bucket of the plan in the run; empty if the run has no plan."""

    exposed_reductions: float = 0.0
    """Reductions of gradients in the run with no work beside them."""

    frozen_bytes: int = 0
    """Bytes of parameters without a gradient, if known; else 0."""

    page_faults: float = 0.0
    """Seconds of the step that page faults take; 0 if they were not counted."""

    origin: str = "recorded"
    """Where the step is from, in words."""

    def of_batch(self, batch: int) -> RecordedStep:
        """Return the step with another number of samples, as if a sample took the same time in any batch.

        Raises:
            UsageError: the number of samples of the run is unknown.
        """
        if not self.samples:
            raise UsageError(f"{self.name} does not record the samples of its step, so --batch cannot be applied")
        factor = batch / self.samples
        note = f"times of {self.samples:g} samples are scaled to {batch}, as if the time per sample were constant"
        return replace(
            self, work=self.work.scaled(factor, 1.0, factor), samples=float(batch), unknown=(*self.unknown, note)
        )

    def computing(self, factor: float) -> RecordedStep:
        """Return the step with the time of passes, update and other work multiplied by a factor."""
        note = f"the device of --compute: all work of a rank is assumed to take {factor:g} times as long"
        work = self.work.scaled(factor, factor)
        return replace(self, work=work, unknown=(*self.unknown, note)) if factor != 1.0 else self

    def with_loader(self, read: float, decode: float, workers: int, source: str | None = None) -> RecordedStep:
        """Return the step with a loader in place of the recorded wait for data; times are seconds per batch."""
        loader = replace(self.work.input, read=read, decode=decode, workers=workers)
        return replace(
            self, work=replace(self.work, input=loader), sources=(*self.sources, *([source] if source else [])),
            unknown=tuple(text for text in self.unknown if text != LOADER_UNKNOWN),
        )  # fmt: skip


class StepParts(NamedTuple):
    """The parts of a step in seconds, before they are fitted to the time of the step."""

    layers: tuple[Layer, ...]
    update: float
    other: float
    data: float
    copy: float


def load_trace(source: str | Sequence[str], kind: str | None = None) -> Trace:
    """Return the trace of a run or of a file, for a kind of step that trains if it has one.

    Args:
        source: run directory or file, as in `xsp.load`.
        kind: number or name of a kind of step; default: the kind with the most time, preferring kinds that train.

    Raises:
        XspError: as in `xsp.load`.
    """
    trace = load.load(source, kind=kind)
    training_kinds = {step_kind.kind for step_kind in trace.run.kinds if step_kind.training}
    if kind is not None or not training_kinds or trace.kind is None or trace.kind in training_kinds:
        return trace
    for iteration in iterations(trace):
        if iteration.kind in training_kinds:
            with contextlib.suppress(UsageError):  # this kind has no recorded step
                return load.load(source, kind=iteration.kind)
    return trace


def loop_of(trace: Trace) -> Iteration | None:
    """Return the loop of the trace's rank and kind of step; None if the run has none."""
    loops = (loop for loop in iterations(trace) if (loop.rank, loop.kind) == (trace.rank, trace.kind))
    return next(loops, None)


def of(trace: Trace, stated_bytes: int | None = None) -> RecordedStep:
    """Return the step of a trace.

    Args:
        trace: trace of a training program; the figures are those of its lowest rank.
        stated_bytes: bytes of all gradients, for a trace without the sizes of parameters.

    Raises:
        AnalysisError: the trace has no backward pass, or the bytes of the gradients are unknown.
        UsageError: they are stated, although the trace has the sizes.
    """
    answers = Answers(trace)
    notes: list[str] = []
    unknown: list[str] = []
    plan = None
    durations: tuple[float, ...] = ()
    batches = 1
    if len(trace.run.kinds) > 1:
        name = next(
            (step_kind.name for step_kind in trace.run.kinds if step_kind.kind == trace.kind),
            "the one with the most time",
        )
        notes.append(f"kind of step: {name}, one of {len(trace.run.kinds)} of the run; --kind selects another")
    on_device = trace.has(Level.KERNEL)
    loop = loop_of(trace)
    if on_device:
        device = devicestep.of(trace)
        step, interval = measured_step(answers, loop, notes, device.step)
        notes += device.sources
        unknown += device.unknown
        plan, durations, lanes, exposed = (
            device.plan,
            device.collective_seconds,
            device.lanes,
            device.exposed_reductions,
        )
        data = loop.data_ns if loop is not None and loop.data_ns else 0.0
        parts = StepParts(device.layers, device.update, device.exposed_other, data / 1e9, device.copy)
    else:
        step, interval = measured_step(answers, loop, notes)
        host = hoststep.of(trace)
        notes += host.sources
        unknown += host.unknown
        lanes, exposed, batches = host.lanes, host.exposed_reductions, host.batches
        parts = StepParts(host.layers, host.update, host.other, host.data, 0.0)
    gradient_layers, frozen_bytes = parts.layers, 0
    if plan is None:
        gradient_layers, frozen_bytes = _with_gradients(trace, parts.layers, stated_bytes, notes, unknown)
    elif stated_bytes is not None:
        raise _known_gradients(trace)
    else:
        notes.append("gradients: the all-reduces of the trace, with their sizes")
    work = _fit_to_step(parts._replace(layers=gradient_layers), step - exposed, unknown)
    work, batches = _mean_batch(work, batches, notes, unknown)
    if parts.data:
        unknown.append(LOADER_UNKNOWN)
    samples = loop.samples if loop is not None and loop.samples else trace.run.batch_size
    if not samples:
        unknown.append("number of samples of a step")
    fault_seconds = _page_faults(trace, loop)
    if fault_seconds > NOTED_FAULTS * step:
        unknown.append(
            f"how many page faults ranks have: {1e3 * fault_seconds:.2g} ms of the step are those of the run; a "
            "process has fewer if other memory of it lies behind what it frees"
        )
    if interval is None:
        unknown.append("confidence interval of the step: its steps do not give one")
    return RecordedStep(
        trace.name, work, step, interval, _ranks(trace),
        samples / batches if samples else None, plan, tuple(notes), tuple(unknown), lanes, batches,
        durations, exposed, frozen_bytes, fault_seconds,
    )  # fmt: skip


def _with_gradients(
    trace: Trace, layers: tuple[Layer, ...], stated_bytes: int | None, notes: list[str], unknown: list[str]
) -> tuple[tuple[Layer, ...], int]:
    """Return the layers with the gradients of their modules, or as stated, and the bytes of frozen parameters.

    Raises:
        AnalysisError: the bytes of the gradients are unknown.
        UsageError: they are stated, although the trace has them.
    """
    by_module = gradients.module_gradients(trace, layers, unknown)
    if by_module is not None:
        if stated_bytes is not None:
            raise _known_gradients(trace)
        notes.append(by_module.source)
        return by_module.layers, by_module.frozen_bytes
    if stated_bytes is None:
        raise AnalysisError(
            f"{trace.name!r} has neither the parameters of its modules nor the sizes of its collectives: give the "
            "bytes of all gradients, --gradients 100MB"
        )
    notes.append("gradients: as stated, spread over the backward pass in proportion to time")
    return gradients.spread_over_layers(layers, stated_bytes), 0


def _known_gradients(trace: Trace) -> UsageError:
    return UsageError(f"{trace.name} has the sizes of its gradients: omit --gradients")


MAX_BACKLOG = 1.1
"""Device work by steps, as a multiple of an iteration, above which it contains work of before the recording."""


def measured_step(
    answers: Answers, loop: Iteration | None, sources: list[str], device: float | None = None
) -> tuple[float, tuple[float, float] | None]:
    """Return the seconds of a step, and the ends of their interval if it is known.

    The source is the loop, else the recorded steps, else the time of a device; a text on it is added to `sources`.

    Raises:
        AnalysisError: the trace has none of them.
    """
    if loop is not None and loop.mean_ns:
        sources.append("step: iterations of the loop that were not recorded")
        return loop.mean_ns / 1e9, (
            loop.interval.low / 1e9,
            loop.interval.high / 1e9,
        ) if loop.interval is not None else None
    estimate = steptime.of(answers)
    if estimate is not None and device is not None and device > MAX_BACKLOG * estimate.ms.value / 1e3:
        # the parts of the step are those of the device's window: without its backlog they would not add up to the step
        sources.append("step: device work of the recording by steps, with work that was launched before it")
        return device, None
    if estimate is not None and estimate.unit != "window":
        sources.append("step: recorded steps, without the cost of profiling")
        low, value, high = (figure / 1e3 for figure in (estimate.ms.low, estimate.ms.value, estimate.ms.high))
        return value, (low, high) if high > low else None
    if device is None:
        raise AnalysisError(f"{answers.trace.name!r} does not have the time of a step")
    sources.append("step: from the first device work to the end of the last, divided by the number of steps")
    return device, None


def _page_faults(trace: Trace, loop: Iteration | None) -> float:
    """Return the seconds of an iteration that page faults take; 0 if they were not counted."""
    if loop is None or loop.faults is None or loop.system_ns is None:
        return 0.0
    return pagefaults.cost(loop.faults, loop.system_ns / 1e6, pagefaults.threads(trace.run.machine)).value / 1e3


def _ranks(trace: Trace) -> int:
    """Return the number of ranks: the larger of the world size (or ranks of the run) and the largest group."""
    rank_run = next((run for run in trace.run.rank_runs if (run.rank or 0) == trace.rank), trace.run)
    stated_ranks = rank_run.world_size or trace.run.world_size
    return max(stated_ranks or len(trace.run.rank_runs), devicestep.largest_group(trace) or 1, 1)


def _mean_batch(work: Work, batches: int, notes: list[str], unknown: list[str]) -> tuple[Work, int]:
    """Return the mean batch of a step and the number of batches; the step and 1 if the batches differ in layers."""
    if batches == 1:
        return work, 1
    count, remainder = divmod(len(work.layers), batches)
    parts = [work.layers[index * count : (index + 1) * count] for index in range(batches)]
    if remainder or any([layer.name for layer in part] != [layer.name for layer in parts[0]] for part in parts):
        unknown.append(f"how the {batches} batches of an update differ: the step is treated as one batch of their size")
        return work, 1
    notes.append(
        f"the run accumulates the gradients of {batches} batches: they are sent in the last one's backward pass, "
        "as with DistributedDataParallel.no_sync(); without it they are sent in each"
    )
    layers = tuple(
        Layer(
            calls[0].name, sum(layer.forward for layer in calls) / batches,
            sum(layer.backward for layer in calls) / batches, calls[0].gradients,
        )
        for calls in zip(*parts, strict=True)
    )  # fmt: skip
    loader = replace(work.input, read=work.input.read / batches, copy=work.input.copy / batches)
    return Work(layers, work.update, work.other / batches, loader), batches


def _fit_to_step(parts: StepParts, step: float, unknown: list[str]) -> Work:
    """Return the step with a total time: unexplained time becomes other work, and parts that exceed it are scaled."""
    compute_seconds = sum(layer.forward + layer.backward for layer in parts.layers) + parts.update
    fixed_seconds = parts.data + parts.copy
    available_seconds = step - fixed_seconds - parts.other
    factor, other = 1.0, parts.other
    if compute_seconds + fixed_seconds + parts.other > step and compute_seconds:
        factor = max(0.0, available_seconds) / compute_seconds
        if factor < 1 - LARGEST_EXCESS:
            unknown.append(
                f"why recorded passes and update take {100 * (1 / factor - 1) if factor else 100:.0f} % more time than "
                "the step has: they are scaled down in proportion"
            )
    else:
        other = max(0.0, step - fixed_seconds - compute_seconds)
    layers = tuple(
        replace(layer, forward=layer.forward * factor, backward=layer.backward * factor) for layer in parts.layers
    )
    return Work(layers, parts.update * factor, other, Input(read=parts.data, copy=parts.copy))
