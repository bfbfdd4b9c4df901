"""The host side of iterations: the phases of the program, and in each of them what the host did.

Each moment counts once, for the innermost phase: forward and backward calls, the optimizer, waits for data, named
blocks. Phases of a trace without them are its outermost modules or operators. In each phase the host waits for the
device (calls that synchronise, copies that block), issues device work (other calls of the runtime), or runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp.account import entries as names
from xsp.account import passes
from xsp.account.ranks import Collectives
from xsp.account.sweep import Times, Union, covered, innermost, intersection, length, union, without
from xsp.account.windows import IterationWindow, tables
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

BRIDGED_NS = 1_000_000
"""Nanoseconds between two operators of one phase up to which the time between them counts as of the phase, where only
operators show phases."""

_PHASE_OF_KIND = {
    Kind.FORWARD.value: names.FORWARD,
    Kind.BACKWARD.value: names.BACKWARD,
    Kind.OPTIMIZER.value: names.OPTIMIZER,
    Kind.DATA.value: names.DATA,
}


class PhaseTimes:
    """When each phase ran, and when no phase did: in the steps (`OUTSIDE`), and between them (`BETWEEN`)."""

    def __init__(self, unions: dict[str, Union]) -> None:
        """Take unions by name of the phase."""
        self.unions = unions

    def ms(self, phase: str, count: int) -> float:
        """Return the milliseconds of a phase per iteration of `count`; 0 if it did not run."""
        return length(self.unions[phase]) / count / 1e6 if phase in self.unions else 0.0


@dataclass
class HostTimes:
    """Nanoseconds of each recorded iteration by phase, and of each phase in each state."""

    phase_ns: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Phase → nanoseconds of each iteration; with the time in no phase, in the step and before it."""

    state_ns: dict[tuple[str, str], NDArray[np.int64]] = field(default_factory=dict)
    """Phase and state → nanoseconds of each iteration."""

    beside_ns: NDArray[np.int64] | None = None
    """Time between the steps of each iteration in which other threads ran steps, in none of the phases; None for a
    program of one thread."""

    phases: PhaseTimes = field(default_factory=lambda: PhaseTimes({}))
    states: dict[str, Union] = field(default_factory=dict)
    """When the host was in each state, in any phase."""

    drained_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Time of each iteration that a recorded step waited at its end for the device, as other steps do not."""

    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Phase → the models that it consists of, each with times of its own; for phases of several models."""

    @property
    def of_models(self) -> frozenset[str]:
        """Names of times of single models, which are parts of those of their phase."""
        return frozenset(name for own in self.models.values() for name in own)


def host_times(
    trace: Trace,
    rank: int,
    iterations: Sequence[IterationWindow],
    ends: Sequence[int],
    collectives: Collectives | None = None,
) -> HostTimes:
    """Return what the host did in iterations of a rank.

    Args:
        trace: the trace.
        rank: the rank.
        iterations: its recorded iterations.
        ends: end of the device work of each iteration that runs after everything else in it on the host; a step of
            xsp lasts until then, and the host waits. 0 where there is none.
        collectives: collectives that the host runs itself; None if there are none.
    """
    threads = _threads(trace, rank, iterations)
    phases = _phases(trace, rank, threads)
    starts = np.array([window.start_ns for window in iterations], np.int64)
    steps = np.array([window.step_ns for window in iterations], np.int64)
    stops = np.array([window.end_ns for window in iterations], np.int64)
    draining = _draining(trace, rank, iterations, ends)
    states = _states(trace, rank, threads, draining)
    if collectives is not None and not collectives.on_device:
        states |= _in_collectives(trace, rank, threads, collectives, [*states.values()])
    times = HostTimes(states=states, drained_ns=covered(draining, starts, stops))
    taken: Union = union(*_joined(list(phases.values())))
    models = _models(trace, rank, threads, phases)
    times.models = {phase: tuple(own) for phase, own in models.items()}
    parts = dict(phases)
    for name, part in {**phases, **{name: part for own in models.values() for name, part in own.items()}}.items():
        ns = covered(part, starts, stops)
        if not ns.any():
            continue
        times.phase_ns[name] = ns
        if name == names.DATA:
            continue
        parts.setdefault(name, part)
        for state, in_state in states.items():
            times.state_ns[name, state] = covered(intersection(part, in_state), starts, stops)
    beside = without(_steps_of_others(trace, rank, threads), taken)
    if length(beside):
        parts[names.OTHER_THREADS] = intersection(beside, union(starts, stops))
        times.phase_ns[names.OTHER_THREADS] = covered(beside, steps, stops)
        times.beside_ns = covered(beside, starts, steps)
        taken = union(*_joined([taken, beside]))
    befores = np.array([window.before_end_ns or window.step_ns for window in iterations], np.int64)
    for name, begins, finishes in ((names.BETWEEN, starts, befores), (names.OUTSIDE, steps, stops)):
        times.phase_ns[name] = np.maximum(0, finishes - begins) - covered(taken, begins, finishes)
        parts[name] = without(union(begins, finishes), taken)
        for state, in_state in states.items():
            both = covered(in_state, begins, finishes) - covered(intersection(in_state, taken), begins, finishes)
            times.state_ns[name, state] = np.minimum(both, times.phase_ns[name])
    inside = union(starts, stops)
    times.phases = PhaseTimes({name: intersection(part, inside) for name, part in parts.items()})
    return times


def _joined(unions: Sequence[Union]) -> tuple[Times, Times]:
    empty = np.zeros(0, np.int64)
    return (
        np.concatenate([empty, *(starts for starts, _ in unions)]),
        np.concatenate([empty, *(ends for _, ends in unions)]),
    )


def _threads(trace: Trace, rank: int, iterations: Sequence[IterationWindow]) -> list[tuple[int, int]]:
    """Return process and thread of the steps and of the backward pass, which works while the step's thread waits."""
    main = {(window.process or -1, window.thread or -1) for window in iterations if window.thread is not None}
    rows = trace.con.execute(
        f"SELECT DISTINCT coalesce(process, -1), coalesce(thread, -1) FROM spans "
        f"WHERE rank = ? AND phase = '{names.BACKWARD}' AND level = {int(Level.OP)}",
        [rank],
    ).fetchall()
    processes = {process for process, _ in main}
    return sorted(main | {(process, thread) for process, thread in rows if process in processes or not processes})


def _steps_of_others(trace: Trace, rank: int, threads: Sequence[tuple[int, int]]) -> Union:
    """Return when other threads of the processes ran steps: a gap of these threads meanwhile is none of the program."""
    empty = np.zeros(0, np.int64)
    if not threads:
        return empty, empty
    processes = ", ".join(str(process) for process in {process for process, _ in threads})
    columns = trace.con.execute(
        f"SELECT start_ns, start_ns + dur_ns AS end_ns FROM spans WHERE rank = ? AND kind = '{Kind.STEP}' "
        f"AND thread IS NOT NULL AND coalesce(process, -1) IN ({processes}) "
        f"AND NOT {_on(threads, 'process', 'thread')}",
        [rank],
    ).fetchnumpy()
    return union(np.asarray(columns["start_ns"], np.int64), np.asarray(columns["end_ns"], np.int64))


def _on(threads: Sequence[tuple[int, int]], process: str, thread: str) -> str:
    """Return the SQL condition that a span is on one of the threads."""
    if not threads:
        return "true"
    pairs = ", ".join(f"({first}, {second})" for first, second in threads)
    return f"(coalesce({process}, -1), coalesce({thread}, -1)) IN ({pairs})"


def _phases(trace: Trace, rank: int, threads: Sequence[tuple[int, int]]) -> dict[str, Union]:
    """Return the disjoint times of each phase."""
    kinds = ", ".join(f"'{kind}'" for kind in _PHASE_OF_KIND)
    on_threads = _on(threads, "process", "thread")
    where = f"rank = {rank} AND device IS NULL AND timed IS NOT false AND {on_threads}"
    again = (  # a call in a backward pass, as of activation checkpointing, is part of it
        f"EXISTS (FROM spans pass WHERE pass.rank = {rank} AND pass.kind = '{Kind.BACKWARD}' AND pass.device IS NULL "
        "AND (pass.process, pass.thread) IS NOT DISTINCT FROM (spans.process, spans.thread) "
        "AND pass.start_ns <= spans.start_ns AND pass.start_ns + pass.dur_ns >= spans.start_ns + spans.dur_ns)"
    )
    rows = trace.con.execute(
        f"""
        SELECT CASE WHEN kind = '{Kind.FORWARD}' AND {again} THEN '{Kind.BACKWARD}' ELSE kind END,
               start_ns, start_ns + dur_ns
        FROM spans WHERE {where} AND kind IN ({kinds})
        """
    ).fetchall()
    spans = _without_closures([(_PHASE_OF_KIND[kind], start, end) for kind, start, end in rows])
    seen = {phase for phase, *_ in spans}
    loading = union(*(np.array([span[place] for span in spans if span[0] == names.DATA], np.int64) for place in (1, 2)))
    if names.FORWARD not in seen:
        spans += _outermost_blocks(trace, where, names.BACKWARD not in seen)
        # phases with those that only operators show
        has_forward = any(label not in seen for label, *_ in spans)
        operators = [
            span
            for span in _operators(trace, where, loading)
            if (span[0] == names.FORWARD and not has_forward)
            or (span[0] == names.BACKWARD and names.BACKWARD not in seen)
        ]
        spans = spans + operators
    elif names.BACKWARD not in seen:
        spans += [span for span in _operators(trace, where, loading) if span[0] == names.BACKWARD]
    if not spans:
        return {}
    # operators and blocks inside a call of the data loader make a batch
    in_loader = covered(loading, [span[1] for span in spans], [span[2] for span in spans])
    spans = [
        span
        for span, ns in zip(spans, in_loader.tolist(), strict=True)
        if span[0] in seen or 2 * ns <= span[2] - span[1]
    ]
    labels = sorted({phase for phase, *_ in spans})
    begins, stops = (np.array([span[place] for span in spans], np.int64) for place in (1, 2))
    owner = np.array([labels.index(span[0]) for span in spans], np.int64)
    starts, ends, index = innermost(begins, stops)
    return {
        label: union(starts[owner[index] == place], ends[owner[index] == place]) for place, label in enumerate(labels)
    }


def _without_closures(spans: Spans) -> Spans:
    """Return phases in which an optimizer's step begins after its closure: with the end of its only backward pass.

    What else a closure does, such as metrics in the training step of a framework, is in none of the phases.
    """
    ends = sorted({(end, start) for phase, start, end in spans if phase == names.BACKWARD})
    found: Spans = []
    for phase, start, end in spans:
        first = bisect_left(ends, (start,)) if phase == names.OPTIMIZER else len(ends)
        inside = [pair for pair in ends[first : first + 2] if pair[0] <= end and pair[1] >= start]
        found.append((phase, inside[0][0] if len(inside) == 1 else start, end))
    return found


MIN_MODEL_SHARE = 0.05
"""Least share of a phase that a model must take to have a time of its own."""


def _models(
    trace: Trace, rank: int, threads: Sequence[tuple[int, int]], phases: dict[str, Union]
) -> dict[str, dict[str, Union]]:
    """Return the times of each model in forward, if several take much of it: a teacher and a student, or a pass without
    gradients beside the one that trains."""
    forward = phases.get(names.FORWARD)
    if forward is None:
        return {}
    rows = trace.con.execute(
        f"SELECT coalesce(name, type, ''), start_ns, start_ns + dur_ns, step FROM spans "
        f"WHERE rank = ? AND device IS NULL AND timed IS NOT false AND kind = '{Kind.FORWARD}' "
        f"AND {_on(threads, 'process', 'thread')} ORDER BY start_ns",
        [rank],
    ).fetchall()
    calls: dict[str, tuple[list[int], list[int]]] = {}
    for name, (_, start, end, _) in zip(
        passes.names(trace, rank, [(row[0], row[3]) for row in rows]), rows, strict=True
    ):
        own = calls.setdefault(name, ([], []))
        own[0].append(start)
        own[1].append(end)
    if len(calls) < 2:
        return {}
    times = {
        name: intersection(forward, union(np.array(starts, np.int64), np.array(ends, np.int64)))
        for name, (starts, ends) in calls.items()
    }
    whole = max(1, length(forward))
    large = {name: own for name, own in times.items() if length(own) >= MIN_MODEL_SHARE * whole}
    if len(large) < 2:
        return {}
    result, rest = {}, forward
    for name, model in sorted(large.items(), key=lambda item: -length(item[1])):
        result[names.of_model(names.FORWARD, name)] = intersection(model, rest)
        rest = without(rest, model)
    if length(rest):
        result[names.of_model(names.FORWARD, "other models")] = rest
    return {names.FORWARD: result}


Spans = list[tuple[str, int, int]]


def _outermost_blocks(trace: Trace, where: str, with_backward: bool) -> Spans:
    """Return the outermost modules as the phases that they belong to, and the outermost named blocks by their names."""
    rows = trace.con.execute(
        f"""
        SELECT kind, name, coalesce(phase, '{names.FORWARD}'), start_ns, start_ns + dur_ns FROM spans
        WHERE {where} AND (level = {int(Level.LAYER)} AND coalesce(depth, 0) = 0
                           OR kind = '{Kind.USER}' AND level <= {int(Level.LAYER)})
        """
    ).fetchall()
    spans = []
    for kind, name, phase, start, end in rows:
        label = _block_name(name) if kind == Kind.USER else phase
        if label == names.BACKWARD and not with_backward:
            continue
        spans.append((label, start, end))
    blocks = {label for label, *_ in spans}
    # hundreds of names are no phases
    return spans if len(blocks) <= MOST_BLOCKS else [(names.FORWARD, start, end) for _, start, end in spans]


MOST_BLOCKS = 40


def _block_name(name: str) -> str:
    """Return the name of a named block without decoration, one of the phases' own where it is one."""
    text = name.strip("# ").strip()
    return {
        "forward": names.FORWARD, "backward": names.BACKWARD, "optimizer": names.OPTIMIZER, "data": names.DATA,
    }.get(text.lower(), text) or name  # fmt: skip


def _operators(trace: Trace, where: str, loading: Union) -> Spans:
    """Return the times of outermost operators by phase; short times between them count as theirs.

    Operators in a wait for data (`loading`) make a batch, and are left out.
    """
    rows = trace.con.execute(
        f"""
        SELECT coalesce(phase, '{names.FORWARD}') AS label, start_ns, start_ns + dur_ns AS end_ns, thread
        FROM spans WHERE {where} AND level = {int(Level.OP)} AND kind = '{Kind.OP}'
        QUALIFY end_ns > coalesce(max(end_ns) OVER (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC
                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
        ORDER BY start_ns
        """
    ).fetchall()
    waits_ns = covered(loading, [start for _, start, _, _ in rows], [end for _, _, end, _ in rows])
    rows = [row for row, ns in zip(rows, waits_ns.tolist(), strict=True) if 2 * ns <= row[2] - row[1]]
    gaps_ns = covered(loading, [end for _, _, end, _ in rows[:-1]], [start for _, start, _, _ in rows[1:]])
    joined: Spans = []
    for (label, start, end, _), waited_ns in zip(rows, [0, *gaps_ns.tolist()], strict=False):
        last = joined[-1] if joined else None
        if last is not None and last[0] == label and start - last[2] <= BRIDGED_NS and not waited_ns:
            joined[-1] = (label, last[1], max(last[2], end))
        else:
            joined.append((label, start, end))
    return joined


def _states(trace: Trace, rank: int, threads: Sequence[tuple[int, int]], draining: Union) -> dict[str, Union]:
    """Return when the threads waited for a device, and when they issued work to one."""
    calls = trace.con.execute(
        f"SELECT start_ns, end_ns, coalesce(waits, false) AS waits FROM {tables(trace).runtime_calls} "
        f"WHERE rank = ? AND timed IS NOT false AND {_on(threads, 'on_process', 'on_thread')}",
        [rank],
    ).fetchnumpy()
    starts, stops = (np.asarray(calls[name], np.int64) for name in ("start_ns", "end_ns"))
    waits: Any = np.asarray(calls["waits"]).astype(bool)
    waiting = union(np.r_[starts[waits], draining[0]], np.r_[stops[waits], draining[1]])
    issuing = union(starts[~waits], stops[~waits])
    issuing = without(issuing, waiting)  # a call that waits inside one that does not, or beside it
    return {names.WAITING: waiting, names.ISSUING: issuing}


_COLLECTIVE_OPERATORS = "c10d::|gloo:|nccl:|mpi:|record_param_comms"
"""Pattern for operators that begin or contain a collective: a thread that is in one of them computes nothing."""


def _in_collectives(
    trace: Trace, rank: int, threads: Sequence[tuple[int, int]], own: Collectives, taken: Sequence[Union]
) -> dict[str, Union]:
    """Return when collectives of the host run, or wait for other ranks, while the threads run no operator."""
    columns = trace.con.execute(
        f"SELECT start_ns, start_ns + dur_ns AS end_ns FROM spans WHERE rank = ? AND level = {int(Level.OP)} "
        f"AND kind = '{Kind.OP}' AND timed IS NOT false AND {_on(threads, 'process', 'thread')} "
        f"AND NOT regexp_matches(name, '{_COLLECTIVE_OPERATORS}')",
        [rank],
    ).fetchnumpy()
    computing = union(np.asarray(columns["start_ns"], np.int64), np.asarray(columns["end_ns"], np.int64))
    busy = union(*_joined([computing, *taken]))
    waiting = without(own.waiting, busy)
    return {names.OTHER_RANKS: waiting, names.TRANSFER: without(without(own.transfer, busy), waiting)}


def _draining(trace: Trace, rank: int, iterations: Sequence[IterationWindow], ends: Sequence[int]) -> Union:
    """Return the time from the last span of the program in a recorded step of xsp until its device work ended.

    The last call that synchronises the device in such a step is the one with which xsp waits for this work.
    """
    empty = np.zeros(0, np.int64)
    if not any(ends):
        return empty, empty
    rows = trace.con.execute(
        f"""
        WITH host AS (
            SELECT step, start_ns, start_ns + dur_ns AS end_ns,
                   kind = '{Kind.SYNC}' AND contains(name, 'DeviceSynchronize') AS is_sync
            FROM spans WHERE rank = ? AND device IS NULL AND step IS NOT NULL AND timed IS NOT false
              AND kind NOT IN ('{Kind.STEP}', '{Kind.RUN}', '{Kind.ALLOC}', '{Kind.OVERHEAD}')
        ), last AS (
            SELECT *, is_sync AND row_number() OVER (PARTITION BY step ORDER BY end_ns DESC) = 1 AS is_own FROM host
        )
        SELECT step, max(end_ns) FROM last WHERE NOT is_own GROUP BY step
        """,
        [rank],
    ).fetchall()
    last_spans = dict(rows)
    pairs = [
        (last_spans[window.step], min(end, window.end_ns))
        for window, end in zip(iterations, ends, strict=True)
        if window.step in last_spans and last_spans[window.step] < min(end, window.end_ns)
    ]
    if not pairs:
        return empty, empty
    return union(*(np.array([pair[place] for pair in pairs], np.int64) for place in (0, 1)))
