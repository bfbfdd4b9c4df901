"""The step of a run: what each layer takes forward and backward, its gradients, the update, and the input.

Times are the true ones of the trace. The loop, where the run has one, says how long a step is; the recorded steps say
what it is made of. What the run does not tell is said, and no figure is made up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xsp.advise import steptime
from xsp.analyses.answers import Answers
from xsp.errors import AnalysisError, UsageError
from xsp.predict import devicestep, hoststep
from xsp.predict.buckets import Buckets
from xsp.predict.hoststep import Lane
from xsp.predict.training import Input, Layer, Work
from xsp.schema import Level
from xsp.store.iterations import Iteration, iterations
from xsp.store.trace import Trace

UNEQUAL = 0.02
"""By so much, as a share, the parts of a step may exceed it without a word."""


@dataclass(frozen=True)
class Recorded:
    """The step of a run; durations are seconds."""

    name: str
    work: Work
    step: float
    """As measured."""

    ends: tuple[float, float] | None
    """Of its interval; None if nothing tells one."""

    ranks: int
    samples: float | None
    """Of one rank in a step."""

    plan: Buckets | None
    """Buckets as the run had them; None if the plan follows from the parameters."""

    told: tuple[str, ...]
    """Where figures are from."""

    unknown: tuple[str, ...]
    """What the run does not tell."""

    lanes: Mapping[str, Lane] = field(default_factory=dict)
    """The recorded step, for a picture."""

    accumulated: int = 1
    """Batches of one update; `work` and `samples` are of one of them, `step` is of all."""

    lasted: tuple[float, ...] = ()
    """The collective of each bucket of the plan, as the run had it; empty where the run has no plan."""

    exposed: float = 0.0
    """Sums of gradients of the run with nothing beside them."""

    def of_batch(self, batch: int) -> Recorded:
        """Return the step with another number of samples, as if each took the same time in any batch.

        Raises:
            UsageError: the run does not tell its own.
        """
        if not self.samples:
            raise UsageError(f"{self.name} does not tell how many samples its step has, so --batch cannot be applied")
        factor = batch / self.samples
        told = f"times of {self.samples:g} samples are scaled to {batch}, as if a sample took the same in any batch"
        return replace(
            self, work=self.work.scaled(factor, 1.0, factor), samples=float(batch), unknown=(*self.unknown, told)
        )


class Parts(NamedTuple):
    """A step in seconds, before layers are known by name."""

    layers: tuple[Layer, ...]
    update: float
    other: float
    data: float
    copy: float


def of(trace: Trace, gradients: int | None = None) -> Recorded:
    """Return the step of a trace.

    Args:
        trace: trace of a training program; the figures are those of its lowest rank.
        gradients: bytes of all gradients, for a trace without the sizes of parameters.

    Raises:
        AnalysisError: the trace has no backward pass, or the bytes of the gradients are unknown.
        UsageError: `gradients` is given, although the trace has the sizes.
    """
    answers = Answers(trace)
    told: list[str] = []
    unknown: list[str] = []
    plan = None
    lasted: tuple[float, ...] = ()
    batches = 1
    on_device = trace.has(Level.KERNEL)
    loop = next((each for each in iterations(trace.con) if (each.rank, each.kind) == (trace.rank, trace.kind)), None)
    if on_device:
        found = devicestep.of(trace)
        step, ends = measured(answers, loop, told, found.step)
        told += found.told
        unknown += found.unknown
        plan, lasted, lanes, exposed = found.plan, found.lasted, found.lanes, found.exposed
        data = loop.data_ns if loop is not None and loop.data_ns else 0.0
        parts = Parts(found.layers, found.update, found.others, data / 1e9, found.copy)
    else:
        step, ends = measured(answers, loop, told)
        host = hoststep.of(trace, answers)
        told += host.told
        unknown += host.unknown
        lanes, exposed, batches = host.lanes, host.exposed, host.batches
        parts = Parts(host.layers, host.update, host.other, host.data, 0.0)
    layers, of_modules = _with_gradients(trace, parts.layers, unknown)
    if gradients is not None and (of_modules or plan is not None):
        raise UsageError(f"{trace.name} tells the sizes of its gradients: omit --gradients")
    if of_modules:
        plan, lasted = None, ()
        told.append("gradients: the parameters of each module, as recorded")
    elif plan is not None:
        told.append("gradients: the all-reduces that the trace has, with their sizes")
    elif gradients is not None:
        layers = _spread(layers, gradients)
        told.append("gradients: as stated, spread over the backward pass in proportion to time")
    else:
        raise AnalysisError(
            f"{trace.name!r} tells neither the parameters of its modules nor the sizes of its collectives: give the "
            "bytes of all gradients, --gradients 100MB"
        )
    work = _fitting(parts._replace(layers=layers), step - exposed, unknown)
    work, batches = _of_one_batch(work, batches)
    if batches > 1:
        told.append(
            f"the run accumulates the gradients of {batches} batches: they travel in the last one's backward pass, as "
            "within DistributedDataParallel.no_sync(); without that they travel in each"
        )
    if parts.data:
        unknown.append("a loader's workers: waiting for data is taken as it was, --loader says what it is made of")
    samples = loop.samples if loop is not None and loop.samples else trace.run.batch_size
    if not samples:
        unknown.append("samples of a step")
    if ends is None:
        unknown.append("interval of the step: its steps tell none")
    return Recorded(
        trace.name, work, step, ends, _ranks(trace),
        samples / batches if samples else None, plan, tuple(told), tuple(unknown), lanes, batches,
        lasted, exposed,
    )  # fmt: skip


def measured(
    answers: Answers, loop: Iteration | None, told: list[str], device: float | None = None
) -> tuple[float, tuple[float, float] | None]:
    """Return how long a step is in seconds, with the ends of its interval where there is one.

    Of the loop, else of recorded steps, else what a device took for one.

    Raises:
        AnalysisError: nothing tells it.
    """
    if loop is not None and loop.mean_ns:
        told.append("step: the loop's iteration, of steps that were not recorded")
        return loop.mean_ns / 1e9, (loop.ends.lo / 1e9, loop.ends.hi / 1e9) if loop.ends is not None else None
    found = steptime.of(answers)
    if found is not None and found.what != "window":
        told.append("step: recorded steps, without the cost of profiling")
        low, value, high = (each / 1e3 for each in (found.ms.low, found.ms.value, found.ms.high))
        return value, (low, high) if high > low else None
    if device is None:
        raise AnalysisError(f"{answers.trace.name!r} does not tell how long a step is")
    told.append("step: from the first work of the device to the end of its last, over the number of steps")
    return device, None


def _ranks(trace: Trace) -> int:
    """Return how many ranks the program had: as it said, else those that are there, else the largest group."""
    own = next((run for run in trace.run.each_rank if (run.rank or 0) == trace.rank), trace.run)
    stated = own.world_size or trace.run.world_size
    return max(stated or len(trace.run.each_rank), devicestep.group(trace) or 1, 1)


def _of_one_batch(work: Work, batches: int) -> tuple[Work, int]:
    """Return the mean batch of a step of several, and their number; the step and 1 if they are not alike."""
    count, rest = divmod(len(work.layers), batches)
    each = [work.layers[at * count : (at + 1) * count] for at in range(batches)]
    if batches == 1 or rest or any([one.name for one in those] != [one.name for one in each[0]] for those in each):
        return work, 1
    layers = tuple(
        Layer(
            those[0].name, sum(one.forward for one in those) / batches, sum(one.backward for one in those) / batches,
            those[0].gradients,
        )
        for those in zip(*each, strict=True)
    )  # fmt: skip
    given = replace(work.input, read=work.input.read / batches, copy=work.input.copy / batches)
    return Work(layers, work.update, work.other / batches, given), batches


# --- gradients ---------------------------------------------------------------------------------------------------


def _with_gradients(trace: Trace, layers: tuple[Layer, ...], unknown: list[str]) -> tuple[tuple[Layer, ...], bool]:
    """Return the layers with the bytes of their own parameters, and whether the trace tells any.

    A module that is called several times has its gradient when the backward pass of its first call has ended.
    """
    rows = trace.sql(
        f"""
        WITH called AS (
            SELECT span_id, name, param_bytes, layer_index, depth, parent_id FROM merged
            WHERE level = {int(Level.LAYER)} AND param_bytes IS NOT NULL
        ), inside AS (
            SELECT outer_name, sum(param_bytes) AS bytes FROM (
                SELECT DISTINCT up.name AS outer_name, called.name, called.param_bytes
                FROM called JOIN merged direct ON direct.span_id = called.parent_id
                JOIN called up ON up.span_id = direct.layer_id WHERE up.name <> called.name
            ) GROUP BY outer_name
        )
        SELECT name, greatest(max(param_bytes) - coalesce(any_value(inside.bytes), 0), 0)::BIGINT,
               max(param_bytes) FILTER (coalesce(depth, 0) = 0)::BIGINT, min(layer_index)
        FROM called LEFT JOIN inside ON inside.outer_name = called.name GROUP BY name ORDER BY min(layer_index)
        """
    ).fetchall()
    own = {name: int(size) for name, size, _, _ in rows}
    whole = sum(int(size or 0) for _, _, size, _ in rows)
    excess = sum(own.values()) - whole
    if excess > 0:
        tied = next((name for name, size, _, _ in reversed(rows) if int(size) == excess), None)
        if tied is not None:
            own[tied] = 0  # it shares them with a module before it, in whose backward pass they arrive
        else:
            unknown.append(f"{excess:,} bytes of parameters that modules share count twice")
    if not any(own.values()):
        return layers, False
    absent = sum(1 for each in layers if each.name not in own)
    if absent:
        unknown.append(f"parameters of {absent} of {len(layers)} calls of modules")
    unknown.append("parameters that are frozen: each is taken to have a gradient of its own size, one for each module")
    left = dict(own)
    if len(layers) == 1 and layers[0].name not in own:
        return (replace(layers[0], gradients=(sum(own.values()),)),), True
    found = []
    for layer in layers:
        size = left.pop(layer.name, 0)
        found.append(replace(layer, gradients=(size,) if size else ()))
    return tuple(found), True


def _spread(layers: tuple[Layer, ...], gradients: int) -> tuple[Layer, ...]:
    whole = sum(each.backward for each in layers)
    return tuple(
        replace(each, gradients=(round(gradients * (each.backward / whole if whole else 1 / len(layers))),))
        for each in layers
    )


def _fitting(parts: Parts, step: float, unknown: list[str]) -> Work:
    """Return the step of a length: what no part explains is other work, and parts that exceed it are shortened."""
    computing = sum(each.forward + each.backward for each in parts.layers) + parts.update
    fixed = parts.data + parts.copy
    room = step - fixed - parts.other
    factor, other = 1.0, parts.other
    if computing + fixed + parts.other > step and computing:
        factor = max(0.0, room) / computing
        if factor < 1 - UNEQUAL:
            unknown.append(
                f"why recorded passes and update are {100 * (1 / factor - 1) if factor else 100:.0f} % longer than the "
                "step has room for: they are shortened in proportion"
            )
    else:
        other = max(0.0, step - fixed - computing)
    layers = tuple(
        replace(each, forward=each.forward * factor, backward=each.backward * factor) for each in parts.layers
    )
    return Work(layers, parts.update * factor, other, Input(read=parts.data, copy=parts.copy))
