"""The iterations of a program over its time: its first ones, slow ones among them, and their growth.

The time of every step is known, recorded or not, and of steps that were not recorded that of their phases (`loop`). The
module that takes longer in slow iterations than in the others is known if some of them were recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp import frameworks, stats
from xsp.account import entries as names
from xsp.account.between import of_slow_gaps, place_of
from xsp.account.entries import Course, Entry, FirstIterations, Growth, SlowIterations
from xsp.schema import Kind, Level
from xsp.store.iterations import WARM_UP_STEPS
from xsp.store.loop import BARE
from xsp.store.strata import StratifiedTime, period_of, strata
from xsp.store.trace import Trace

SLOW_FACTOR = 1.5
"""Least time of a slow iteration, as a multiple of the usual one."""

SEPARATION = 1.5
"""Least distance of slow iterations from the usual one, as a multiple of the distance of all others: else the slow ones
are the tail of one distribution."""

MIN_SPREADS = 5.0
"""Least distance of slow iterations from the usual one, in standard deviations of the others."""

MIN_SLOW_SHARE = 0.03
"""Least share of the time of all iterations that slow ones add, to be named."""

MAX_SLOW_ITERATIONS = 0.34
"""Largest share of all iterations that slow ones may be: those that occur more often are not exceptions."""

FEWEST_SLOW = 2
"""Fewest slow iterations: a single one may be the machine's doing."""

MAX_FIRST_STEPS = 20
"""Number of steps at the beginning of a program that may be warm-up."""

FIRST_FACTOR = 2.0
"""Least time of a step of the warm-up, as a multiple of the usual one."""

MIN_PLACE_SHARE = 0.5
"""Least share of what slow iterations take longer that a module, a phase or a line must explain to be named."""


def course(trace: Trace, rank: int, kind: int | None, time: Entry, is_device_bound: bool) -> Course | None:
    """Return the course of the iterations of a kind on a rank; None without a loop.

    Args:
        trace: the trace.
        rank: the rank.
        kind: the kind of step.
        time: the time of an iteration in the account.
        is_device_bound: whether a device limits: then the host's times say when it waits for the device, and not how
            long an iteration takes.
    """
    columns = trace.con.execute(
        f"""
        SELECT step, steps, rung, dur_ns, coalesce(before_ns, 0) AS before_ns,
               least(coalesce(data_ns, 0), coalesce(before_ns, 0)) AS data_ns, is_disturbed,
               forward_ns AS forward, backward_ns AS backward, optimizer_ns AS optimizer
        FROM (
            SELECT *, coalesce(steady IS NULL OR lag(rung) OVER (ORDER BY step) <> {BARE}, false) AS is_disturbed
            FROM loop WHERE rank = ?
        ) WHERE kind IS NOT DISTINCT FROM ? AND status = 'ok' ORDER BY step
        """,
        [rank, kind],
    ).fetchnumpy()
    rows: dict[str, Any] = {
        name: np.ma.filled(np.ma.asarray(column, float), np.nan) for name, column in columns.items()
    }
    if not len(rows["step"]):
        return None
    slow = () if is_device_bound else tuple(_slow(trace, rank, kind, rows, time))
    growth = None if is_device_bound else growth_of(*_unrecorded_ns(trace, rank, kind))
    if growth is not None and _is_of_machine(trace, rank, growth):
        growth = None
    return Course(_first(trace, rows, slow), slow, growth)


# --- slow iterations -----------------------------------------------------------------------------------------------


def _slow(trace: Trace, rank: int, kind: int | None, rows: Mapping[str, Any], time: Entry) -> Sequence[SlowIterations]:
    """Return the slow iterations of each part of an iteration, those that cost most first."""
    found: list[SlowIterations] = []
    for part in (StratifiedTime.STEP, StratifiedTime.BEFORE):
        own = [each for each in strata(trace.con, part) if (each.rank, each.kind) == (rank, kind)]
        if len(own) > 1:
            found += _slow_of_part(trace, rank, kind, rows, part, own, time)
    return sorted(found, key=lambda each: -(each.cost.ms or 0.0))


def _slow_of_part(
    trace: Trace,
    rank: int,
    kind: int | None,
    rows: Mapping[str, Any],
    part: StratifiedTime,
    own: Sequence[Any],
    time: Entry,
) -> list[SlowIterations]:
    single = (rows["steps"] == 1) & (rows["step"] >= WARM_UP_STEPS)
    # what a step takes longer while xsp stores another one, or right after it, is not the program's
    bare = single & (rows["rung"] == BARE) & (rows["is_disturbed"] == 0)
    ns = rows["dur_ns"] if part is StratifiedTime.STEP else rows["before_ns"]
    if not bare.any() or rows["steps"][single].sum() < 0.8 * rows["steps"].sum() - WARM_UP_STEPS:
        return []  # most rows are means of several steps
    iteration_ns = rows["dur_ns"] + rows["before_ns"]
    usual_ns, usual_iteration_ns = float(np.median(ns[bare])), float(np.median(iteration_ns[bare]))
    groups: dict[int | None, list[Any]] = {}
    for each in own:
        if each.low_ns - usual_ns >= (SLOW_FACTOR - 1) * usual_iteration_ns:
            groups.setdefault(each.period, []).append(each)
    found = []
    for group in [group for _, group in sorted(groups.items(), key=lambda item: item[0] or 0)]:
        low_ns, high_ns = min(each.low_ns for each in group), max(each.high_ns for each in group)
        recorded = np.array([step for each in group for step in each.recorded], float)
        is_slow = single & ((bare & (ns >= low_ns) & (ns <= high_ns)) | np.isin(rows["step"], recorded))
        others = bare & (ns < low_ns)
        count = int(is_slow.sum())
        # strata of the tail of one distribution are no exceptions
        widest_ns = float(ns[others].max()) - usual_ns if others.any() else 0.0
        spread_ns = 1.4826 * float(np.median(np.abs(ns[others] - usual_ns))) if others.any() else 0.0
        is_apart = low_ns - usual_ns >= max(SEPARATION * widest_ns, MIN_SPREADS * spread_ns)
        if count < FEWEST_SLOW or not is_apart or count > MAX_SLOW_ITERATIONS * single.sum():
            continue
        slow_bare = is_slow & bare
        excess_ns = float(np.mean(ns[slow_bare])) - usual_ns if slow_bare.any() else 0.0
        cost_ms = excess_ns * count / float(single.sum()) / 1e6
        if not time.ms or cost_ms < MIN_SLOW_SHARE * time.ms:
            continue
        steps = sorted(int(step) for step in rows["step"][is_slow])
        usual_steps = {int(step) for step in rows["step"][single & ~is_slow]}
        name, place = _what_is_slow(trace, rank, part, rows, is_slow, steps, usual_steps, excess_ns)
        line = None if place is not None or name == names.DATA else _line(trace, rank, kind, part, excess_ns)
        place = place or line
        entry = Entry(f"{names.SLOW}: {name}", min(cost_ms, time.ms), "all iterations", place=place, place_ms=cost_ms)
        found.append(
            SlowIterations(
                name, count, int(single.sum()), period_of(steps), (usual_iteration_ns + excess_ns) / 1e6,
                usual_iteration_ns / 1e6, entry, tuple(steps[:MOST_STEPS]), line is not None,
            )
        )  # fmt: skip
    return found


MOST_STEPS = 20
"""Most steps that are listed."""


def _what_is_slow(
    trace: Trace,
    rank: int,
    part: StratifiedTime,
    rows: Mapping[str, Any],
    is_slow: Any,
    steps: Sequence[int],
    usual_steps: set[int],
    excess_ns: float,
) -> tuple[str, str | None]:
    """Return the part of an iteration that is slow, and the place in it if it was recorded."""
    if part is StratifiedTime.BEFORE:
        data = rows["data_ns"]
        if float(data[is_slow].mean() - np.median(data[~is_slow])) >= MIN_PLACE_SHARE * excess_ns:
            return names.DATA, None
        return names.BETWEEN, None
    phase, place = _slowest_difference(trace, rank, steps, usual_steps, excess_ns)
    return _slow_phase(rows, is_slow, excess_ns) or phase, place


def _slow_phase(rows: Mapping[str, Any], is_slow: Any, excess_ns: float) -> str | None:
    """Return the phase that takes longer in slow steps that were not recorded than in the others; None if none does."""
    for name in names.PHASES:
        slow_ns, usual_ns = (rows[name][where & ~np.isnan(rows[name])] for where in (is_slow, ~is_slow))
        if len(slow_ns) and len(usual_ns) and slow_ns.mean() - np.median(usual_ns) >= MIN_PLACE_SHARE * excess_ns:
            return name
    return None


def _line(trace: Trace, rank: int, kind: int | None, part: StratifiedTime, excess_ns: float) -> str | None:
    """Return the line between steps, or inside steps, that takes that long when it runs.

    A line that runs in each traced step is not what slow ones do besides: its mean is that of all steps.
    """
    run = trace.run.of_rank(rank)
    if part is StratifiedTime.BEFORE:
        lines = [line for each in (run.between, of_slow_gaps(run)) if each is not None for line in each.lines]
    else:
        phases = [each for each in run.lines if each.kind == (kind or 0) and each.phase != names.SLOW_GAPS]
        lines = [line for each in phases for line in each.lines if line.gaps < each.gaps]
    fitting = [line for line in lines if line.gaps and line.ns / line.gaps >= MIN_PLACE_SHARE * excess_ns]
    line = max(fitting, key=lambda each: each.ns / each.gaps, default=None)
    return None if line is None else ", ".join(filter(None, place_of(line)))


def _slowest_difference(
    trace: Trace, rank: int, slow: Sequence[int], usual: set[int], excess_ns: float
) -> tuple[str, str | None]:
    """Return the phase, and the module, that takes longer in slow recorded steps than in the others.

    Times of modules are without the modules inside them.
    """
    rows = trace.con.execute(
        f"""
        WITH calls AS (
            SELECT step, trace_id, rung, span_id, parent_id, level, kind, name, type, dur_ns
            FROM spans WHERE rank = ? AND timed IS NOT false AND device IS NULL AND step IS NOT NULL
              AND (kind IN ('{Kind.FORWARD}', '{Kind.BACKWARD}', '{Kind.OPTIMIZER}')
                   OR level = {int(Level.LAYER)} AND kind = '{Kind.MODULE}')
        ), inner_ns AS (
            SELECT trace_id, parent_id AS span_id, sum(dur_ns) AS ns FROM calls
            WHERE level = {int(Level.LAYER)} GROUP BY ALL
        )
        SELECT CASE WHEN level = {int(Level.LAYER)} THEN '' ELSE kind END AS phase,
               CASE WHEN level = {int(Level.LAYER)} THEN
                    CASE WHEN type IS NULL OR type = name THEN name ELSE name || ' (' || type || ')' END END AS place,
               step, sum(dur_ns - CASE WHEN level = {int(Level.LAYER)} THEN coalesce(inner_ns.ns, 0) ELSE 0 END)::DOUBLE
        FROM calls LEFT JOIN inner_ns USING (trace_id, span_id) GROUP BY ALL
        """,
        [rank],
    ).fetchall()
    slow_steps = set(slow)
    times: dict[tuple[str, str | None], tuple[dict[int, float], dict[int, float]]] = {}
    for phase, place, step, ns in rows:
        if step in slow_steps or step in usual:
            times.setdefault((phase, place), ({}, {}))[step in slow_steps][int(step)] = ns
    recorded = [len({step for both in times.values() for step in both[index]}) for index in (0, 1)]
    if not all(recorded):
        return names.STEP, None

    def longer_ns(key: tuple[str, str | None]) -> float:
        one, other = times[key]
        return sum(other.values()) / recorded[1] - float(np.median([*one.values()] or [0.0]))

    def best(of_phase: bool) -> str | None:
        keys = [key for key in times if bool(key[0]) is of_phase and longer_ns(key) >= MIN_PLACE_SHARE * excess_ns]
        key = max(keys, key=longer_ns, default=None)
        return None if key is None else key[0] if of_phase else key[1]

    return best(True) or names.STEP, best(False)


# --- the first iterations -------------------------------------------------------------------------------------------


def _first(trace: Trace, rows: Mapping[str, Any], slow: Sequence[SlowIterations]) -> FirstIterations | None:
    """Return the first iterations, if they take longer than the others; None if they do not."""
    bare = rows["rung"] == BARE
    later = bare & (rows["step"] >= rows["step"][0] + WARM_UP_STEPS)
    if not later.any():
        return None
    usual_ns = stats.percentile(rows["dur_ns"][later].tolist(), 0.5, rows["steps"][later].astype(int).tolist())
    first = [index for index in range(min(MAX_FIRST_STEPS, len(bare))) if bare[index] and rows["steps"][index] == 1]
    is_slow = [rows["dur_ns"][index] >= FIRST_FACTOR * usual_ns for index in first]
    count = max((place + 1 for place in range(len(first)) if sum(is_slow[: place + 1]) * 2 > place + 1), default=0)
    while count and not is_slow[count - 1]:
        count -= 1
    first_step = int(rows["step"][first[0]]) if first else 0
    is_periodic = count == 1 and any(
        each.period and each.steps and (each.steps[0] - first_step) % each.period == 0 for each in slow
    )
    if not count or is_periodic:  # the first one of those that recur is no warm-up
        return None
    ms = sum(max(0.0, float(rows["dur_ns"][index]) - usual_ns) for index in first[:count]) / 1e6
    longest_ms = max(float(rows["dur_ns"][index]) for index in first[:count]) / 1e6
    return FirstIterations(count, ms, longest_ms, usual_ns / 1e6, is_compiled(trace))


def is_compiled(trace: Trace) -> bool:
    """Return whether code that a compiler made ran in the program."""
    return trace.run.framework in frameworks.COMPILED or bool(
        trace.con.execute(
            f"""
            SELECT 1 FROM spans WHERE level = {int(Level.KERNEL)} AND starts_with(name, 'triton_')
                OR level <= {int(Level.OP)} AND (contains(name, 'CompiledFxGraph')
                                                 OR contains(name, 'Torch-Compiled Region'))
            LIMIT 1
            """
        ).fetchall()
    )


# --- growth -------------------------------------------------------------------------------------------------------


def _unrecorded_ns(trace: Trace, rank: int, kind: int | None) -> tuple[Sequence[float], dict[str, Sequence[float]]]:
    """Return the times of the iterations that profiling disturbed least, in order, without the first ones.

    Returns:
        Times of whole iterations, and those of each of their parts.
    """
    columns = trace.con.execute(
        f"""
        SELECT dur_ns, coalesce(data_ns, 0) AS data_ns, coalesce(before_ns, 0) AS before_ns,
               coalesce(forward_ns, 0) AS forward, coalesce(backward_ns, 0) AS backward,
               coalesce(optimizer_ns, 0) AS optimizer
        FROM undisturbed WHERE rank = ? AND kind IS NOT DISTINCT FROM ? AND step >= {WARM_UP_STEPS} ORDER BY step
        """,
        [rank, kind],
    ).fetchnumpy()
    step, data, before = (np.asarray(columns[name], float) for name in ("dur_ns", "data_ns", "before_ns"))
    data = np.minimum(data, before)
    phases = {
        f"in {'the ' * (name == names.OPTIMIZER)}{name}": np.asarray(columns[name], float) for name in names.PHASES
    }
    # arrays, which are sequences of numbers
    parts = {**phases, "in the step": step, "in the wait for data": data, names.BETWEEN: before - data}
    return step + before, parts


STRETCHES = 9
"""Parts into which a run is cut to find a growth: the first third is compared with the last."""

FEWEST_GROWING = 27
"""Fewest iterations: three in each part."""

MIN_GROWTH = 0.25
"""Least change, as a share of the time at the beginning, to be named."""

MIN_CERTAINTY = 4.0
"""Least change as a multiple of its standard error."""

MIN_CONCORDANCE = 0.5
"""Least rank correlation (Kendall) of the parts' medians with their order: a single disturbed part is no growth."""


MIN_RANK_CERTAINTY = 3.0
"""Least Mann-Whitney statistic of the last third and the first, in standard deviations without a growth: medians of
times that take two values, as on a core that another program shares, jump from one to the other without any."""


def _rank_certainty(first: NDArray[Any], last: NDArray[Any]) -> float:
    """Return how far the ranks of `last` lie above those of `first`, in standard deviations of ranks by chance.

    Source: Mann and Whitney, On a test of whether one of two random variables is stochastically larger than the other
    (1947), by the normal approximation.
    """
    ordered = np.sort(first)
    below = (np.searchsorted(ordered, last, "left") + np.searchsorted(ordered, last, "right")).sum() / 2
    pairs = len(first) * len(last)
    return float((below - pairs / 2) / (pairs * (len(first) + len(last) + 1) / 12) ** 0.5)


def growth_of(times_ns: Sequence[float], parts_ns: Mapping[str, Sequence[float]] | None = None) -> Growth | None:
    """Return by how much iterations take longer at the end than at the beginning; None if that is not certain.

    Args:
        times_ns: times of iterations in their order.
        parts_ns: times of parts of the iterations, by name: one that makes up most of the growth is named.
    """
    count = len(times_ns)
    if count < FEWEST_GROWING:
        return None
    bounds = [round(count * place / STRETCHES) for place in range(STRETCHES + 1)]
    parts = [np.asarray(times_ns[start:end]) for start, end in itertools.pairwise(bounds)]
    medians = np.array([np.median(part) for part in parts])
    third = STRETCHES // 3
    first_ns, last_ns = float(np.median(medians[:third])), float(np.median(medians[-third:]))
    # the standard error of a median is 1.25 times that of a mean, where times are nearly normal
    spread_ns = 1.4826 * float(np.median([np.median(np.abs(part - np.median(part))) for part in parts]))
    error_ns = 1.25 * spread_ns * (2 / (count / 3)) ** 0.5
    signs = [np.sign(later - earlier) for earlier, later in itertools.combinations(medians, 2)]
    change_ns = last_ns - first_ns
    thirds = np.concatenate(parts[:third]), np.concatenate(parts[-third:])
    is_certain = (
        change_ns >= MIN_CERTAINTY * error_ns
        and float(np.mean(signs)) >= MIN_CONCORDANCE
        and _rank_certainty(*thirds) >= MIN_RANK_CERTAINTY
    )
    if not is_certain or change_ns < MIN_GROWTH * first_ns:
        return None
    first, last = slice(bounds[0], bounds[third]), slice(bounds[-1 - third], bounds[-1])
    changes = {
        name: float(np.median(times[last]) - np.median(times[first])) for name, times in (parts_ns or {}).items()
    }
    where = next((name for name, part_ns in changes.items() if part_ns >= MIN_PLACE_SHARE * change_ns), None)
    return Growth(first_ns / 1e6, last_ns / 1e6, where)


FULL_SHARE = 0.9
"""Least share of the machine's cores in use at which a program waits for a core."""

MIN_OWN_SHARE = 0.5
"""Least part of a growth that must be processor time of the program, if the machine had no core left."""


def _is_of_machine(trace: Trace, rank: int, growth: Growth) -> bool:
    """Return whether other programs explain a growth: the machine had no core left at the end, and the processor time
    of an iteration grew less than half as much as its time. False where the use of cores was not sampled."""
    ((begin_ns, end_ns),) = trace.con.execute(
        "SELECT min(start_ns), max(start_ns + steps * dur_ns) FROM loop WHERE rank = ?", [rank]
    ).fetchall()
    cores = trace.run.machine.cores
    if begin_ns is None or not cores:
        return False
    third_ns = (end_ns - begin_ns) / 3
    uses = {
        name: (first, last)
        for name, first, last in trace.con.execute(
            """
            SELECT name, avg(value) FILTER (time_ns < ?), avg(value) FILTER (time_ns >= ?) FROM samples
            WHERE coalesce(rank, ?) = ? AND time_ns BETWEEN ? AND ? GROUP BY name
            """,
            [begin_ns + third_ns, end_ns - third_ns, rank, rank, begin_ns, end_ns],
        ).fetchall()
    }
    of_host, own = uses.get("host.cpu.use"), uses.get("process.cpu.use")
    if of_host is None or own is None or None in (*of_host, *own) or not own[0] or of_host[1] < FULL_SHARE * cores:
        return False
    own_growth = growth.last_ms * own[1] / (growth.first_ms * own[0]) - 1
    return bool(own_growth < MIN_OWN_SHARE * (growth.last_ms / growth.first_ms - 1))
