"""The step of a run on the host: its phases, divided among the calls of modules in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xsp import account
from xsp.account.entries import BACKWARD, DATA, FORWARD, OPTIMIZER
from xsp.errors import AnalysisError
from xsp.predict.training import Layer
from xsp.schema import Kind, Level, Rule
from xsp.store.trace import Trace
from xsp.store.views import FULL_NAME, LAYERS, NS

_COLLECTIVE = f"""(level = {int(Level.LIBRARY)} AND kind = '{Kind.CALL}'
            AND (contains(attributes, 'xsp.collective.name')
                 OR regexp_matches(name, '^(gloo|nccl|mpi|ucc):') AND NOT regexp_matches(name, ':(send|recv)')))"""
"""SQL of collectives of the host; those without a number have only a name."""

Lane = tuple[tuple[float, float], ...]
"""Intervals of activity in a step, in seconds from its start."""


class RecordedModule(NamedTuple):
    """A call of a module in a recorded step."""

    name: str
    forward: float
    """Seconds of the module itself, without modules inside it."""

    stretches: Sequence[tuple[float, float]]
    """Stretches of its backward pass that no other call interrupts, by time: the position and the seconds of each."""


def layers_in_order(calls: Sequence[RecordedModule]) -> list[Layer]:
    """Return layers whose backward pass, from the last layer to the first, has the recorded order.

    A call that other calls interrupt in the backward pass (work of a module around the modules inside it) becomes
    several layers. Of these, the one whose backward pass ends last comes first and has the forward pass.

    Args:
        calls: calls of one batch in the order of execution.
    """
    positioned_layers: list[tuple[float, int, Layer]] = []
    place = min((position for call in calls for position, _ in call.stretches), default=0.0)
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        *earlier, last = call.stretches or [(place, 0.0)]  # without backward work: next to the call after it
        place = last[0]
        positioned_layers.append((-place, number, Layer(call.name, call.forward, last[1])))
        positioned_layers += [(-position, number, Layer(call.name, 0.0, duration)) for position, duration in earlier]
    return [layer for _, _, layer in sorted(positioned_layers, key=lambda entry: entry[:2])]


class HostStep(NamedTuple):
    """The work of the host in a step; durations are seconds."""

    layers: tuple[Layer, ...]
    update: float
    other: float
    data: float
    exposed_reductions: float
    """Collectives of the backward pass with no operator beside them, which no other field includes."""

    batches: int
    """Number of batches per update."""

    lanes: Mapping[str, Lane]
    sources: list[str]
    unknown: list[str]


def of(trace: Trace) -> HostStep:
    """Return the work of the host in a step, from its phases.

    Raises:
        AnalysisError: the step has no forward pass or no backward pass.
    """
    notes: list[str] = []
    unknown: list[str] = []
    main = account.of(trace).main
    phase_seconds = {entry.name: (entry.ms or 0.0) / 1e3 for entry in main.host.entries} if main is not None else {}
    if not phase_seconds.get(BACKWARD) or not phase_seconds.get(FORWARD):
        raise AnalysisError(
            f"{trace.name!r} has no training step with a forward and a backward pass: record one, "
            "`xsp run train.py` or `xsp profile MODEL --train`"
        )
    wait_seconds = _collective_wait(trace)
    if wait_seconds:
        notes.append(f"removed: {wait_seconds * 1e3:.3g} ms of the backward pass, collectives that nothing overlaps")
    backward = max(0.0, phase_seconds[BACKWARD] - wait_seconds)
    repeats, count = closure_count(trace), batch_count(trace)
    if repeats > 1:
        unknown.append(
            f"how often gradients are sent: the optimizer computes them {repeats} times in a step, and "
            "DistributedDataParallel sends them each time; here they are sent once"
        )
    rows = _layers(trace)
    notes.append(
        f"forward, backward, update: phases of the step; their share by layer from {len(rows)} calls of modules"
    )
    own_ns = sum(row["own_ns"] for row in rows)
    backward_ns = sum(row["backward_ns"] or 0 for row in rows)
    if not rows or not own_ns:
        layers: tuple[Layer, ...] = (Layer("model", phase_seconds[FORWARD], backward),)
        unknown.append("modules: record with --levels M/L; all gradients arrive at the end of the backward pass")
    else:
        if not backward_ns:
            unknown.append("backward of each layer: no operators were recorded, so it is divided like the forward pass")
        layers = _batch_layers(rows, phase_seconds[FORWARD] / own_ns, backward, count)
    other = sum(seconds for name, seconds in phase_seconds.items() if name not in (FORWARD, BACKWARD, OPTIMIZER, DATA))
    return HostStep(
        layers,
        phase_seconds.get(OPTIMIZER, 0.0),
        other,
        phase_seconds.get(DATA, 0.0),
        wait_seconds,
        count,
        _lanes(trace),
        notes,
        unknown,
    )


def _layers(trace: Trace) -> list[dict[str, Any]]:
    """Return the calls of modules in the order of execution: name, own time, and time of their backward operators.

    `stretches` are the uninterrupted stretches of a call in the backward pass: the position of each among the stretches
    of all calls, by time, and its nanoseconds. The own work of a module has stretches before, between and after those
    of the modules inside it.
    """
    relation = trace.sql(
        f"""
        WITH {LAYERS}, operators AS (
            SELECT parent_id, {NS} AS ns, row_number() OVER (ORDER BY start_ns, span_id) AS row_position,
                   lag(parent_id) OVER (ORDER BY start_ns, span_id) IS DISTINCT FROM parent_id AS is_stretch_start
            FROM merged WHERE parent_rule = '{Rule.SEQUENCE}'
                AND parent_id IN (SELECT span_id FROM merged WHERE level = {int(Level.LAYER)})
        ), numbered_operators AS (
            SELECT *, sum(is_stretch_start::INTEGER) OVER (ORDER BY row_position) AS stretch FROM operators
        ), call_stretches AS (
            SELECT parent_id, stretch::INTEGER AS stretch, sum(ns)::DOUBLE AS ns FROM numbered_operators GROUP BY ALL
        ), backward AS (
            SELECT parent_id, sum(ns) AS ns, list([stretch, ns] ORDER BY stretch) AS stretches
            FROM call_stretches GROUP BY parent_id
        )
        SELECT {FULL_NAME.format("layers")} AS name, leaf, self_ns::DOUBLE AS own_ns, backward.ns AS backward_ns,
               coalesce(stretches, []) AS stretches
        FROM layers LEFT JOIN backward ON backward.parent_id = layers.span_id ORDER BY layer_index, start_ns
        """
    )
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def _batch_layers(
    rows: Sequence[Mapping[str, Any]], forward: float, backward: float, batches: int
) -> tuple[Layer, ...]:
    """Return the layers, batch by batch, with the backward pass of each batch as recorded (`layers_in_order`).

    Without recorded operators the backward pass is divided among modules that call no others, because the time of
    the others is unknown.

    Args:
        rows: calls from `_layers`.
        forward: seconds of the forward pass per nanosecond of a module's own time.
        backward: seconds of all backward passes.
        batches: number of batches, with equally many calls each; if the calls do not divide equally, one is assumed.
    """
    backward_ns = sum(row["backward_ns"] or 0 for row in rows)
    if not backward_ns:
        own_ns = sum(row["own_ns"] for row in rows if row["leaf"])
        shares = [(row["own_ns"] / own_ns if row["leaf"] else 0.0) if own_ns else 1 / len(rows) for row in rows]
        return tuple(
            Layer(row["name"], forward * row["own_ns"], backward * share)
            for row, share in zip(rows, shares, strict=True)
        )
    count = len(rows) // batches if len(rows) % batches == 0 else len(rows)
    layers: list[Layer] = []
    for begin in range(0, len(rows), count):
        layers += layers_in_order(
            [
                RecordedModule(
                    row["name"],
                    forward * row["own_ns"],
                    [(position, backward * ns / backward_ns) for position, ns in row["stretches"]],
                )
                for row in rows[begin : begin + count]
            ]
        )
    return tuple(layers)


def batch_count(trace: Trace) -> int:
    """Return the number of batches per update, each of which has a call of the model and a backward pass.

    An optimizer that has the gradients computed several times (L-BFGS) takes the same batch each time.
    """
    rows = trace.sql(
        f"""
        SELECT count(*) FILTER (kind = '{Kind.BACKWARD}'), count(*) FILTER (kind = '{Kind.OPTIMIZER}'),
               (SELECT list(count) FROM (SELECT count(*) AS count FROM merged
                WHERE level = {int(Level.LAYER)} AND coalesce(depth, 0) = 0 GROUP BY name))
        FROM merged WHERE level = {int(Level.MODEL)}
        """
    ).fetchall()
    passes, updates, calls = rows[0]
    accumulates = updates == 1 and passes > 1 and calls and set(calls) == {passes}
    return int(passes) if accumulates and closure_count(trace) < 2 else 1


def closure_count(trace: Trace) -> int:
    """Return the number of backward passes that begin within a call of an optimizer."""
    ((count,),) = trace.sql(
        f"""
        SELECT count(DISTINCT backward.span_id) FROM merged backward JOIN merged optimizer
            ON optimizer.start_ns <= backward.start_ns AND backward.start_ns < optimizer.start_ns + optimizer.dur_ns
        WHERE backward.kind = '{Kind.BACKWARD}' AND optimizer.kind = '{Kind.OPTIMIZER}'
            AND backward.level = {int(Level.MODEL)} AND optimizer.level = {int(Level.MODEL)}
        """
    ).fetchall()
    return int(count)


def _collective_wait(trace: Trace) -> float:
    """Return the seconds of the backward pass that waited for collectives of the host.

    After the last operator of a layer, DistributedDataParallel waits for all collectives: all time with a collective
    and without an operator is a wait. Before it, a gap between operators is a wait only for collectives that ended in
    it. Nothing waited for a collective that still ran when the next operator began: such a gap belongs to the program,
    and occurs on any number of ranks.
    """
    rows = trace.sql(
        f"""
        SELECT CASE WHEN kind = '{Kind.BACKWARD}' THEN 'pass' WHEN {_COLLECTIVE} THEN 'collective' ELSE 'operator' END,
               start_ns, start_ns + dur_ns, parent_rule IS NOT DISTINCT FROM '{Rule.SEQUENCE}'
        FROM merged WHERE kind = '{Kind.BACKWARD}' OR level = {int(Level.OP)} AND phase = 'backward'
            AND NOT starts_with(name, 'c10d::') OR {_COLLECTIVE}
        """
    ).fetchall()
    passes, collectives, operators = (
        [(start, end) for row_kind, start, end, _ in rows if row_kind == kind]
        for kind in ("pass", "collective", "operator")
    )
    layer_operators = [(start, end) for kind, start, end, in_layer in rows if kind == "operator" and in_layer]
    wait_ns, operator_union = 0, _union(operators)
    for begin, stop in _union(passes):
        last_end = max((end for start, end in layer_operators if begin <= start < stop), default=begin)
        for gap in _gaps(operator_union, begin, stop):
            causes = [
                (start, end) for start, end in collectives if end > gap[0] and (gap[0] >= last_end or end <= gap[1])
            ]
            wait_ns += sum(end - start for start, end in _intersection([gap], _union(causes)))
    return wait_ns / 1e9


def _gaps(covered: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals between `start` and `stop` that a union does not cover."""
    for begin, end in covered:
        if begin >= stop:
            break
        if begin > start:
            yield start, begin
        start = max(start, end)
    if start < stop:
        yield start, stop


def _union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _intersection(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intersection of two unions of intervals."""
    boundaries = sorted(
        [(position, step) for start, end in (*left, *right) for position, step in ((start, 1), (end, -1))],
        key=lambda mark: (mark[0], mark[1]),
    )
    overlaps: list[tuple[int, int]] = []
    depth = previous = 0
    for position, step in boundaries:
        if depth == 2 and position > previous:
            overlaps.append((previous, position))
        depth, previous = depth + step, position
    return overlaps


def _lanes(trace: Trace) -> dict[str, Lane]:
    """Return the intervals of the phases of the merged step as recorded, including the cost of profiling."""
    names = {str(Kind.FORWARD): "forward", str(Kind.BACKWARD): "backward", str(Kind.OPTIMIZER): "update",
             str(Kind.DATA): "input"}  # fmt: skip
    rows = trace.sql(
        f"""
        WITH activity AS (
            SELECT kind, start_ns, start_ns + dur_ns AS end_ns FROM merged WHERE kind IN {tuple(names)}
            UNION ALL
            SELECT 'collective', start_ns, start_ns + dur_ns FROM merged WHERE {_COLLECTIVE}
        )
        SELECT kind, (start_ns - min(start_ns) OVER ()) / 1e9, (end_ns - min(start_ns) OVER ()) / 1e9 FROM activity
        ORDER BY start_ns
        """
    ).fetchall()
    lanes: dict[str, list[tuple[float, float]]] = {}
    for kind, start, end in rows:
        lanes.setdefault(names.get(kind, "communication"), []).append((float(start), float(end)))
    return {name: tuple(intervals) for name, intervals in lanes.items()}
