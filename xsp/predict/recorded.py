"""The step of a run: what each layer takes forward and backward, its gradients, the update, and the input.

Times are the true ones of the trace. The loop, where the run has one, says how long a step is; the recorded steps say
what it is made of. What the run does not tell is said, and no figure is made up for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from xsp.advise import steptime
from xsp.analyses.answers import Answers
from xsp.analyses.phases import BACKWARD, BETWEEN, DATA, FORWARD, OPTIMIZER, REST
from xsp.errors import AnalysisError, UsageError
from xsp.predict import devicestep
from xsp.predict.buckets import Buckets
from xsp.predict.training import Call, Input, Layer, Work, in_order
from xsp.schema import Kind, Level, Rule
from xsp.store.iterations import Iteration, iterations
from xsp.store.trace import Trace
from xsp.store.views import LAYERS, NS

Lane = tuple[tuple[float, float], ...]
"""When something ran in the recorded step, in seconds from its beginning."""

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
        trace: of a training program; the figures are of its lowest rank.
        gradients: bytes of all gradients, for a trace that does not tell the size of parameters.

    Raises:
        AnalysisError: there is no backward pass in it, or nothing tells how many bytes of gradients there are.
        UsageError: their size is stated, and the trace tells it.
    """
    answers = Answers(trace)
    told: list[str] = []
    unknown: list[str] = []
    plan = None
    lasted: tuple[float, ...] = ()
    exposed = 0.0
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
        parts, lanes, exposed = _on_host(trace, answers, told, unknown)
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
    batches = 1 if on_device else _batches(trace)
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


# --- a step on the host ------------------------------------------------------------------------------------------


def _on_host(
    trace: Trace, answers: Answers, told: list[str], unknown: list[str]
) -> tuple[Parts, Mapping[str, Lane], float]:
    took = {row["phase"]: (row["ms"] or 0.0) / 1e3 for row in answers["phases"].dicts()}
    if not took.get(BACKWARD) or not took.get(FORWARD):
        raise AnalysisError(
            f"{trace.name!r} holds no training step with a forward and a backward pass: record one, "
            "`xsp run train.py` or `xsp profile MODEL --train`"
        )
    waited = _waited_for_ranks(trace)
    if waited:
        told.append(f"of the backward pass {waited * 1e3:.3g} ms are left out: collectives with nothing beside them")
    backward = max(0.0, took[BACKWARD] - waited)
    rows = _layers(trace)
    told.append(
        f"forward, backward, update: phases of the step; their share by layer from {len(rows)} calls of modules"
    )
    own = sum(row["own_ns"] for row in rows)
    known = sum(row["backward_ns"] or 0 for row in rows)
    if not rows or not own:
        layers: tuple[Layer, ...] = (Layer("model", took[FORWARD], backward),)
        unknown.append("modules: record with --levels M/L; all gradients arrive at the end of the backward pass")
    else:
        if not known:
            unknown.append("backward of each layer: no operators were recorded, so it is spread as the forward pass is")
        layers = _in_order(rows, took[FORWARD] / own, backward, _batches(trace))
    other = took.get(REST, 0.0) + took.get(BETWEEN, 0.0)
    return Parts(layers, took.get(OPTIMIZER, 0.0), other, took.get(DATA, 0.0), 0.0), _host_lanes(trace), waited


def _layers(trace: Trace) -> list[dict[str, Any]]:
    """Return the calls of modules in the order of execution: name, own time, and that of their backward operators.

    `stretches` are the uninterrupted stretches of a call in the backward pass: the place of each among those of all
    calls, in the order of time, and its nanoseconds. What a module does itself has one before, between and behind those
    of the modules within it.
    """
    relation = trace.sql(
        f"""
        WITH {LAYERS}, ordered AS (
            SELECT parent_id, {NS} AS ns, row_number() OVER (ORDER BY start_ns, span_id) AS place,
                   lag(parent_id) OVER (ORDER BY start_ns, span_id) IS DISTINCT FROM parent_id AS begins
            FROM merged WHERE parent_rule = '{Rule.SEQUENCE}'
                AND parent_id IN (SELECT span_id FROM merged WHERE level = {int(Level.LAYER)})
        ), numbered AS (
            SELECT *, sum(begins::INTEGER) OVER (ORDER BY place) AS stretch FROM ordered
        ), stretched AS (
            SELECT parent_id, stretch::INTEGER AS stretch, sum(ns)::DOUBLE AS ns FROM numbered GROUP BY ALL
        ), backward AS (
            SELECT parent_id, sum(ns) AS ns, list([stretch, ns] ORDER BY stretch) AS stretches
            FROM stretched GROUP BY parent_id
        )
        SELECT layers.name AS name, leaf, self_ns::DOUBLE AS own_ns, backward.ns AS backward_ns,
               coalesce(stretches, []) AS stretches
        FROM layers LEFT JOIN backward ON backward.parent_id = layers.span_id ORDER BY layer_index, start_ns
        """
    )
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def _in_order(rows: Sequence[Mapping[str, Any]], forward: float, backward: float, batches: int) -> tuple[Layer, ...]:
    """Return the layers, batch by batch, with the backward pass of each batch as recorded (`training.in_order`).

    Without recorded operators modules that call no others share the backward pass, since nothing tells when the others
    do their part of it.

    Args:
        rows: calls of `_layers`.
        forward: seconds of the forward pass for a nanosecond of a module itself.
        backward: seconds of all backward passes.
        batches: passes that the calls are of; in equal parts, else they are taken as one.
    """
    known = sum(row["backward_ns"] or 0 for row in rows)
    if not known:
        own = sum(row["own_ns"] for row in rows if row["leaf"])
        shares = [(row["own_ns"] / own if row["leaf"] else 0.0) if own else 1 / len(rows) for row in rows]
        return tuple(
            Layer(row["name"], forward * row["own_ns"], backward * share)
            for row, share in zip(rows, shares, strict=True)
        )
    count = len(rows) // batches if len(rows) % batches == 0 else len(rows)
    found: list[Layer] = []
    for begin in range(0, len(rows), count):
        found += in_order(
            [
                Call(
                    row["name"],
                    forward * row["own_ns"],
                    [(at, backward * took / known) for at, took in row["stretches"]],
                )
                for row in rows[begin : begin + count]
            ]
        )
    return tuple(found)


def _batches(trace: Trace) -> int:
    """Return how many batches an update has: each with a call of the model and a backward pass of its own."""
    rows = trace.sql(
        f"""
        SELECT count(*) FILTER (kind = '{Kind.BACKWARD}'), count(*) FILTER (kind = '{Kind.OPTIMIZER}'),
               (SELECT list(count) FROM (SELECT count(*) AS count FROM merged
                WHERE level = {int(Level.LAYER)} AND coalesce(depth, 0) = 0 GROUP BY name))
        FROM merged WHERE level = {int(Level.MODEL)}
        """
    ).fetchall()
    passes, updates, calls = rows[0]
    return int(passes) if updates == 1 and passes > 1 and calls and set(calls) == {passes} else 1


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


def _waited_for_ranks(trace: Trace) -> float:
    """Return the seconds of the backward pass in which a collective of the host ran and no operator did."""
    rows = trace.sql(
        f"""
        SELECT CASE WHEN kind = '{Kind.BACKWARD}' THEN 'pass' WHEN contains(attributes, 'xsp.collective.name')
                    THEN 'sent' ELSE 'ran' END AS what, start_ns, start_ns + dur_ns
        FROM merged WHERE kind = '{Kind.BACKWARD}' OR level = {int(Level.OP)} AND phase = 'backward'
            AND NOT starts_with(name, 'c10d::')
            OR level = {int(Level.LIBRARY)} AND kind = '{Kind.CALL}' AND contains(attributes, 'xsp.collective.name')
        """
    ).fetchall()
    those = {what: _union([(a, b) for each, a, b in rows if each == what]) for what in ("pass", "sent", "ran")}
    inside = _both(those["pass"], those["sent"])
    return (_length(inside) - _length(_both(inside, those["ran"]))) / 1e9


def _union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def _both(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where both of two unions are."""
    marks = sorted(
        [(at, step) for start, end in (*one, *other) for at, step in ((start, 1), (end, -1))],
        key=lambda mark: (mark[0], mark[1]),
    )
    found: list[tuple[int, int]] = []
    depth = before = 0
    for at, step in marks:
        if depth == 2 and at > before:
            found.append((before, at))
        depth, before = depth + step, at
    return found


def _length(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def _host_lanes(trace: Trace) -> dict[str, Lane]:
    """Return when the phases of the merged step ran as recorded, with the cost of profiling in them."""
    names = {str(Kind.FORWARD): "forward", str(Kind.BACKWARD): "backward", str(Kind.OPTIMIZER): "update",
             str(Kind.DATA): "input"}  # fmt: skip
    rows = trace.sql(
        f"""
        WITH those AS (
            SELECT kind, start_ns, start_ns + dur_ns AS end_ns FROM merged WHERE kind IN {tuple(names)}
            UNION ALL
            SELECT 'sent', start_ns, start_ns + dur_ns FROM merged
            WHERE level = {int(Level.LIBRARY)} AND contains(attributes, 'xsp.collective.name')
        )
        SELECT kind, (start_ns - min(start_ns) OVER ()) / 1e9, (end_ns - min(start_ns) OVER ()) / 1e9 FROM those
        ORDER BY start_ns
        """
    ).fetchall()
    lanes: dict[str, list[tuple[float, float]]] = {}
    for kind, start, end in rows:
        lanes.setdefault(names.get(kind, "communication"), []).append((float(start), float(end)))
    return {name: tuple(those) for name, those in lanes.items()}


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
