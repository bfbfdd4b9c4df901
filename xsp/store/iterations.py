"""Figures from the steps that were not recorded: the time of a step, and the time of an iteration of the loop.

These are the figures that users rely on. A bare step was not slowed by collectors; a **steady** step was not slowed by
the storing of earlier steps either.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb

from xsp import stats, table
from xsp.run import Run
from xsp.store import devicetime, overlap
from xsp.store.loop import BARE

if TYPE_CHECKING:
    from xsp.store.trace import Trace

MIN_ROWS = 5
"""Minimum number of rows of steady steps for a figure."""

SETTLING_STEPS = 4
"""Number of steady steps at the start of a series that may still be settling."""

NEARBY_ROWS = 5
"""Number of rows of steady steps whose median a recorded step is compared with."""

MAX_SUBTRACTED_SHARE = 0.25
"""Maximum share of a step that is subtracted."""

SHORT_NS = 3_000_000
"""Nanoseconds. A step shorter than this may take twice as long as usual soon after a recorded step."""

DISTURBANCE_FACTOR = 2.0
"""Maximum factor by which such short steps are slowed."""

MAX_DOUBTFUL_SHARE = 0.25
"""If short, disturbed steps take at least this share of an iteration, the time of the iteration counts as unknown."""


WARM_UP_STEPS = 3
"""First steps of a program, which load code and allocate memory."""

MAX_UNCERTAINTY = 0.1
"""Half width of the interval of undisturbed iterations, as a share of their mean, above which all iterations count."""


FEWEST_LATER_STEPS = 10
"""Training steps of another kind after which those of the first `WARM_UP_STEPS` steps are no kind of their own."""

IN_BURST = "coalesce(steady AND (steps > 1 OR own_ns = 0), false)"
"""Whether a row of the loop is of a burst, as SQL: xsp does nothing between the steps of a burst."""


class BareStep(NamedTuple):
    """A step in which no collector was on, or the mean of several such steps: a row of the loop."""

    step: int
    dur_ns: float
    samples: int | None
    idle_hook_ns: float = 0.0
    """Nanoseconds that were subtracted, because collectors slow a step even while they record nothing."""

    position: int = 0
    """Position of the first step of the row in the series of consecutive steady steps, from 1; 0 if unknown."""

    overhead_ns: float = 0.0
    """Nanoseconds that xsp worked just before the step; 0 in a stretch, where it does nothing between steps."""

    steps: int = 1
    """Number of steps that the row is the mean of. Figures weigh the row by it."""


def mean_ns(steps: Sequence[BareStep]) -> float:
    """Return the trimmed mean of the times of bare steps, in nanoseconds; each row weighs as much as its steps."""
    return stats.trimmed_mean(_equally_weighted(steps))


def percentile_ns(steps: Sequence[BareStep], share: float) -> float:
    """Return a percentile of the times of bare steps, in nanoseconds; each row counts as often as it has steps."""
    return stats.percentile([step.dur_ns for step in steps], share, [step.steps for step in steps])


def step_count(steps: Sequence[BareStep]) -> int:
    """Return the number of steps that the rows represent."""
    return sum(step.steps for step in steps)


def _equally_weighted(steps: Sequence[BareStep]) -> list[float]:
    return stats.of_equal_weight([step.dur_ns for step in steps], [step.steps for step in steps])


def steady_steps(con: duckdb.DuckDBPyConnection, run: Run) -> list[BareStep]:
    """Return the steps that ran as if nothing were recorded, of the kind and rank of `alike`, in their order.

    For steps that ran in a burst, the time is subtracted that idle collectors add to calls, backward passes and
    optimizer steps, and that the end of a step takes.

    Args:
        con: holds `loop`, `alike` and `spans`.
        run: content of `run.json`.

    Returns:
        The steps; none for fewer than `MIN_ROWS` rows, or if a device continues after the end of the host's step.
    """
    if table.is_empty(con, "loop"):
        return []
    rows = con.execute(
        f"""
        WITH numbered AS (
            SELECT *, sum(CASE WHEN steady THEN 0 ELSE 1 END) OVER (PARTITION BY rank ORDER BY step) AS series FROM loop
        ), positions AS (
            -- the row that begins a series is not steady, and counts as one step
            SELECT *, sum(CASE WHEN steady THEN steps ELSE 1 END) OVER (PARTITION BY rank, series ORDER BY step)
                      - CASE WHEN steady THEN steps ELSE 1 END AS position
            FROM numbered
        )
        SELECT step, dur_ns, samples, position::BIGINT, coalesce(own_ns, 0), steps, {IN_BURST} FROM positions
        WHERE steady AND rung = {BARE} AND status = 'ok' AND {IS_ALIKE}
          AND NOT EXISTS (SELECT 1 FROM spans WHERE device IS NOT NULL)
        ORDER BY step
        """
    ).fetchall()
    if len(rows) < MIN_ROWS:
        return []
    (key,) = con.execute("SELECT any_value(rank), any_value(step_kind) FROM alike").fetchall()
    hook_cost = idle_hook_costs(con, run).get(key, IdleHookCost())
    found = []
    for step, dur_ns, samples, place, own_ns, steps, is_in_burst in rows:
        subtracted_ns, overhead_ns = (hook_cost.of(dur_ns), 0.0) if is_in_burst else (0.0, own_ns)
        found.append(BareStep(step, dur_ns - subtracted_ns, samples, subtracted_ns, place, overhead_ns, steps))
    return found


def disturbed_steps(con: duckdb.DuckDBPyConnection) -> list[BareStep]:
    """Return short steps that ran bare soon after recorded ones, of the kind and rank of `alike`, in their order.

    They represent a short step better than recorded steps do, which may take several times as long. They are still
    slower than an undisturbed step, see `SHORT_NS`; `disturbed_interval` extends their interval downwards accordingly.

    Args:
        con: as in `steady_steps`.

    Returns:
        The steps; none if steps are not short, for fewer than `MIN_ROWS` rows, or if a device continues after the
        end of the host's step.
    """
    if table.is_empty(con, "loop"):
        return []
    rows = con.execute(
        f"""
        SELECT step, dur_ns, samples, steps FROM undisturbed
        WHERE {IS_ALIKE} AND NOT EXISTS (SELECT 1 FROM spans WHERE device IS NOT NULL) ORDER BY step
        """
    ).fetchall()
    steps = [BareStep(step, dur_ns, samples, steps=count) for step, dur_ns, samples, count in rows]
    is_short = steps and percentile_ns(steps, 0.5) < SHORT_NS
    return steps if is_short and len(steps) >= MIN_ROWS else []


def disturbed_interval(steps: Sequence[BareStep]) -> stats.Interval | None:
    """Return the 95 % interval of the mean of `disturbed_steps`, its lower end divided by `DISTURBANCE_FACTOR`."""
    interval = spread_interval(steps)
    return None if interval is None else replace(interval, low=interval.low / DISTURBANCE_FACTOR)


def bare_interval(steps: Sequence[BareStep]) -> stats.Interval | None:
    """Return the 95 % interval of the trimmed mean of bare steps, in the order in which they ran.

    The subtracted time is an estimate, so the interval allows for zero to twice this time. Its lower end also
    allows for steps that had not settled (`settling_ns`) and for evictions by xsp's work between steps (`eviction_ns`).

    Returns:
        None for fewer than three steps.
    """
    interval = spread_interval(steps)
    if interval is None:
        return None
    subtracted_ns = max(step.idle_hook_ns for step in steps)
    low_ns = max(0.0, interval.low - subtracted_ns - settling_ns(steps) - eviction_ns(steps))
    return replace(interval, low=low_ns, high=interval.high + subtracted_ns)


def spread_interval(steps: Sequence[BareStep]) -> stats.Interval | None:
    """Return the interval of `mean_ns`; None for fewer than three rows."""
    interval = stats.drifting_interval(_equally_weighted(steps))
    if interval is not None or len(steps) < 3:
        return interval
    # one or two rows have nearly all the steps
    interval = stats.mean_interval([step.dur_ns for step in steps], [step.steps for step in steps])
    return None if interval is None else interval.at(mean_ns(steps))


def settling_ns(steps: Sequence[BareStep]) -> float:
    """Return how much slower steady steps are because some are near a recorded one; 0 if there are too few steps.

    Rows that contain one of the first `SETTLING_STEPS` steps of a series of steady steps are compared with the later
    ones. In nanoseconds.
    """
    near = [step for step in steps if 0 < step.position <= SETTLING_STEPS]
    far = [step for step in steps if step.position > SETTLING_STEPS]
    if min(len(near), len(far)) < MIN_ROWS:
        return 0.0
    return max(0.0, mean_ns(near) - mean_ns(far)) * step_count(near) / step_count(steps)


def eviction_ns(steps: Sequence[BareStep]) -> float:
    """Return by how much steps may be slower because xsp's work before each evicts some of their code and data.

    This work starts on cold caches in each iteration too: loading its own cache lines takes as long as reloading the
    lines that it evicts. So it slows a step by at most about its own duration. The result is the median of these
    durations, at most `MAX_SUBTRACTED_SHARE` of the step, in nanoseconds.
    """
    overhead_ns = stats.percentile([step.overhead_ns for step in steps], 0.5, [step.steps for step in steps])
    return min(overhead_ns, MAX_SUBTRACTED_SHARE * percentile_ns(steps, 0.5))


EVICTING_NS = 100_000
"""Duration of a program's step that evicts the code of xsp's hooks: to copy 2 MB, more than a core's own caches, takes
as long."""


class IdleHookCost(NamedTuple):
    """Nanoseconds that a step takes longer because its calls pass through hooks of collectors that record nothing."""

    hooks_ns: float = 0.0
    """What the hooks took in such steps."""

    def of(self, dur_ns: float) -> float:
        """Return the nanoseconds to subtract from a step: what hooks take, and again where they run on cold caches.

        What they load evicts as much of the program's code and data, which takes as long to load again. A step of at
        least `EVICTING_NS` counts as cold, a shorter one in proportion. The maximum is `MAX_SUBTRACTED_SHARE` of the
        step.
        """
        coldness = min(1.0, dur_ns / EVICTING_NS)
        return min((1 + coldness) * self.hooks_ns, dur_ns * MAX_SUBTRACTED_SHARE)


def idle_hook_costs(con: duckdb.DuckDBPyConnection, run: Run) -> dict[tuple[int | None, int | None], IdleHookCost]:
    """Return the cost of idle collectors in a step of each kind on a rank, as it was measured in some of these steps.

    Args:
        con: holds `loop`.
        run: contains what hooks took in steps of each kind.

    Returns:
        By rank and kind; without those in which it was not measured.
    """
    costs = {kind.kind: IdleHookCost(kind.hooks_ns) for kind in run.kinds if kind.hooks_ns}
    if not costs:
        return {}
    rows = con.execute("SELECT DISTINCT rank, kind FROM loop").fetchall()
    return {(rank, kind): costs[kind] for rank, kind in rows if kind in costs}


IS_ALIKE = """
    kind IS NOT DISTINCT FROM (SELECT any_value(step_kind) FROM alike) AND rank = (SELECT any_value(rank) FROM alike)
"""
"""Whether a row of `loop` has the kind and rank that the figures of the trace describe."""


def nearby_medians(bare: Sequence[BareStep], recorded: Sequence[tuple[int, float]]) -> list[float]:
    """Return, for each recorded step (number, nanoseconds), the median of the rows of steady steps next to it.

    The rows count once each: of a row of many steps only the nearest ones are next to the recorded step.
    """
    numbers = [step.step for step in bare]
    medians = []
    for number, _ in recorded:
        index = bisect_left(numbers, number)
        first = max(0, min(index - NEARBY_ROWS // 2, len(bare) - NEARBY_ROWS))
        medians.append(stats.percentile([step.dur_ns for step in bare[first : first + NEARBY_ROWS]], 0.5))
    return medians


def create_tables(con: duckdb.DuckDBPyConnection) -> None:
    """Make the tables of the steps of `loop` that ran bare, for the figures that come from them.

    `bare_steps` has all of them, with the rung of the step before each (`last_rung`) and the degree to which profiling
    may have disturbed it (`nearness`): 0 if it was steady, 1 if the step before it ran bare too and nothing was stored
    meanwhile, else 2. `undisturbed` has those of each rank and kind that profiling disturbed least: the steady ones if
    there are `MIN_ROWS`, else those that follow a bare step, else all; `most` is 0, 1 or 2 accordingly. Both have the
    nanoseconds from the end of the step before to the end of this one (`iteration_ns`).

    Args:
        con: holds `loop`.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE bare_steps AS
        WITH followed AS (
            SELECT *, lag(rung) OVER (PARTITION BY rank ORDER BY step) AS last_rung FROM loop
        )
        SELECT *, CASE WHEN steady THEN 0 WHEN steady IS NOT NULL AND last_rung = {BARE} THEN 1 ELSE 2 END AS nearness,
               dur_ns + coalesce(before_ns, 0) AS iteration_ns
        FROM followed WHERE rung = {BARE} AND status = 'ok';
        CREATE OR REPLACE TABLE undisturbed AS
        WITH counted AS (
            SELECT rank, kind, CASE WHEN count(*) FILTER (nearness = 0) >= {MIN_ROWS} THEN 0
                                    WHEN count(*) FILTER (nearness <= 1) >= {MIN_ROWS} THEN 1 ELSE 2 END AS most
            FROM bare_steps GROUP BY rank, kind
        )
        SELECT bare_steps.*, most FROM bare_steps JOIN counted USING (rank, kind) WHERE nearness <= most
        """
    )


class PhaseShare(NamedTuple):
    """The share of a phase in the time of steps that were not recorded."""

    share: float
    interval: stats.Interval | None
    """Its 95 % interval; None for too few steps."""


class Iteration(NamedTuple):
    """The time of one iteration of a kind on a rank; nanoseconds, means over the steps that were disturbed least."""

    rank: int
    kind: int
    steps: int
    """Number of steps of this kind that ran."""

    recorded: int
    share: float
    """Share of the loop's time without kinds that only begin it; of such a kind, of the whole loop's time."""

    mean_ns: float | None
    """Time from the end of the previous step to the end of this one; None if no step ran bare."""

    interval: stats.Interval | None
    step_ns: float | None
    data_ns: float | None
    """Time of waiting for data, before the step or in it."""

    between_ns: float | None
    """Time between the previous step and this one, without waiting for data; None if no such time was measured."""

    samples: float | None
    """Samples in a step."""

    disturbed: int
    """Degree to which profiling may have disturbed the steps: 0, 1 or 2, see `create_tables`."""

    faults: float | None = None
    """Page faults in an iteration; None if they were not counted."""

    system_ns: float | None = None
    """Time that the process's threads spent in the operating system, in an iteration; None if it was not measured."""

    beside_ns: float = 0.0
    """Time between two steps of a thread in which other threads ran steps; it is not part of `mean_ns`."""

    data_interval: stats.Interval | None = None
    """95 % interval of `data_ns`."""

    between_interval: stats.Interval | None = None
    """95 % interval of `between_ns`."""

    at_once: float | None = None
    """Mean number of iterations on several threads at the same time; None if no steps of the rank overlapped."""

    fading_ns: float | None = None
    """By how much iterations right after recorded ones take longer than later ones: a disturbance fades, so at most as
    much is left of it in the later ones. None if too few of either ran."""

    is_beginning: bool = False
    """Whether its steps only begin a program, see `beginning_kinds`."""

    phases: Mapping[str, PhaseShare] = MappingProxyType({})
    """Shares of forward, backward and optimizer in `step_ns`, and as "" of the rest; empty if they were not timed."""

    @property
    def excess_ns(self) -> float:
        """Nanoseconds by which the time may be too long, because short steps ran soon after recorded ones."""
        if not self.disturbed or self.mean_ns is None or self.step_ns is None:
            return 0.0
        own_ns = max(0.0, min(self.step_ns, self.mean_ns - (self.data_ns or 0.0)))
        if own_ns >= SHORT_NS or own_ns < MAX_DOUBTFUL_SHARE * self.mean_ns:
            return 0.0
        most_ns = own_ns * (1 - 1 / DISTURBANCE_FACTOR)
        return most_ns if self.fading_ns is None else min(most_ns, self.fading_ns)

    @property
    def is_known(self) -> bool:
        """False if no step ran bare, or if the iteration may be much shorter, see `excess_ns`."""
        return self.mean_ns is not None and self.excess_ns <= MAX_UNCERTAINTY * self.mean_ns

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of the loop, over all threads."""
        if not self.samples or not self.mean_ns:
            return None
        return self.samples / (self.pace_ns or self.mean_ns) * 1e9

    @property
    def pace_ns(self) -> float | None:
        """Time in which one iteration ends, on any thread: what one takes over how many run at once (Little's law)."""
        if self.mean_ns is None or self.at_once is None:
            return self.mean_ns
        return (self.mean_ns + self.beside_ns) / self.at_once


def beginning_kinds(con: duckdb.DuckDBPyConnection, run: Run) -> set[tuple[int, int]]:
    """Return kinds of training steps that are no work of the program's own, but how its training begins.

    The first step of a program may contain more than the others, such as a call that gives a model its shapes: it is
    of another kind, and takes seconds in which code is loaded.

    Args:
        con: holds `loop`.
        run: contains the kinds.

    Returns:
        Rank and number of kinds that only ran within the first `WARM_UP_STEPS` steps, before `FEWEST_LATER_STEPS`
        training steps of others.
    """
    training = [kind.kind for kind in run.kinds if kind.training]
    if len(training) < 2:
        return set()
    rows = con.execute(
        f"""
        WITH kinds AS (
            SELECT rank, kind, sum(steps) AS steps, max(step + steps) AS ended FROM loop
            WHERE kind IN (SELECT unnest(?::BIGINT[])) GROUP BY rank, kind
        ), ranks AS (
            SELECT rank, min(step) + {WARM_UP_STEPS} AS begun FROM loop GROUP BY rank
        )
        SELECT rank, kind FROM kinds JOIN ranks USING (rank)
        WHERE ended <= begun AND {FEWEST_LATER_STEPS} <= (
            SELECT sum(steps) FROM kinds later WHERE later.rank = kinds.rank AND later.ended > begun
        )
        """,
        [training],
    ).fetchall()
    return set(rows)


def iterations(trace: Trace, samples: int | None = None) -> list[Iteration]:
    """Return the iterations by rank, the kind that takes most time first; an empty list without a loop.

    The time that idle collectors add in a burst is subtracted, as in `steady_steps`.

    Args:
        trace: the trace; its iterations are computed once.
        samples: use only steps with this number of samples.
    """
    if not trace.has_loop:
        return []
    return trace.cached(f"iterations {samples}", lambda: _iterations(trace.con, trace.run, samples))


def _iterations(con: duckdb.DuckDBPyConnection, run: Run, samples: int | None) -> list[Iteration]:
    of_size = "true" if samples is None else f"samples = {int(samples)}"
    cursor = con.execute(
        f"""
        WITH candidates AS (
            SELECT *, false AS are_all FROM undisturbed
            UNION ALL
            SELECT *, 2 AS most, true FROM bare_steps
            WHERE step >= {WARM_UP_STEPS}
            -- the step after a recorded one is traced by line, unless steps are short: see `xsp.record.between`
            QUALIFY last_rung = {BARE} OR median(dur_ns) OVER (PARTITION BY rank, kind) < {SHORT_NS}
        ), measured AS (
            SELECT rank, kind, are_all, list(iteration_ns ORDER BY step) AS times, list(steps ORDER BY step) AS weights,
                   list(CASE WHEN {IN_BURST} THEN dur_ns END ORDER BY step) AS in_bursts,
                   list(step ORDER BY step) AS numbers, list(nearness ORDER BY step) AS distances,
                   list(coalesce(data_ns, 0)::DOUBLE ORDER BY step) AS waits,
                   list(greatest(0, before_ns - coalesce(data_ns, 0))::DOUBLE ORDER BY step) AS gaps,
                   sum(steps * iteration_ns) AS ns, sum(steps) AS measured,
                   sum(steps * dur_ns) AS step_ns, sum(steps * data_ns) AS data_ns,
                   sum(steps * least(data_ns, coalesce(before_ns, 0))) AS data_before_ns,
                   sum(steps * before_ns) AS before_ns,
                   sum(steps * coalesce(beside_ns, 0)) AS beside_ns,
                   list((steps, dur_ns, forward_ns, backward_ns, optimizer_ns,
                             dur_ns - forward_ns - backward_ns - optimizer_ns) ORDER BY step)
                       FILTER (forward_ns IS NOT NULL AND dur_ns > 0) AS phases,
                   sum(steps * samples) / sum(steps) FILTER (samples IS NOT NULL) AS samples, max(most) AS disturbed,
                   sum(steps * faults) / sum(steps) FILTER (faults IS NOT NULL) AS faults,
                   sum(steps * system_ns) / sum(steps) FILTER (system_ns IS NOT NULL) AS system_ns
            FROM candidates WHERE {of_size} GROUP BY rank, kind, are_all
        ), totals AS (
            SELECT rank, kind, sum(steps) AS steps, count(*) FILTER (rung <> {BARE}) AS recorded,
                   sum(steps * (dur_ns + coalesce(before_ns, 0))) AS ns
            FROM loop WHERE {of_size} GROUP BY rank, kind
        )
        SELECT rank, kind, c.steps, recorded, c.ns AS total_ns, m.ns, times, weights, in_bursts, are_all, numbers,
               distances, waits, gaps, measured, step_ns, data_ns, before_ns, before_ns - data_before_ns AS between_ns,
               samples, coalesce(disturbed, 2) AS disturbed, faults, system_ns, beside_ns, phases
        FROM totals c LEFT JOIN measured m USING (rank, kind) ORDER BY rank, c.ns DESC, kind, are_all
        """
    )
    names, rows = [column[0] for column in cursor.description], cursor.fetchall()
    on_device = bool(con.execute("SELECT 1 FROM spans WHERE device IS NOT NULL LIMIT 1").fetchall())
    paces = devicetime.paces(con) if on_device and samples is None else {}
    busy = devicetime.busy_ns(con) if on_device else {}
    # where a device limits, the host's additional time passes while the device works
    hook_costs = {} if on_device else idle_hook_costs(con, run)
    at_once = overlap.at_once(con)
    beginning = beginning_kinds(con, run)
    found = []
    for entry in _with_shares(_representative([dict(zip(names, row, strict=True)) for row in rows]), beginning):
        key = entry["rank"], entry["kind"]
        iteration = _iteration(entry, paces.get(key), busy.get(key, 0.0), hook_costs.get(key, IdleHookCost()))
        found.append(iteration._replace(at_once=at_once.get(key), is_beginning=key in beginning))
    return found


def _with_shares(entries: Sequence[dict[str, Any]], beginning: Set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield entries with the share of each kind in its rank's time, see `Iteration.share`."""
    whole: Counter[int] = Counter()
    own: Counter[int] = Counter()
    for entry in entries:
        total_ns = entry["total_ns"] or 0
        whole[entry["rank"]] += total_ns
        own[entry["rank"]] += total_ns if (entry["rank"], entry["kind"]) not in beginning else 0
    for entry in entries:
        total = (whole if (entry["rank"], entry["kind"]) in beginning else own)[entry["rank"]]
        yield {**entry, "share": (entry["total_ns"] or 0) / total if total else 0.0}


def _representative(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each rank and kind: of its undisturbed iterations, or of all that were not recorded.

    Iterations of one kind may differ many times over: a forward pass that is slow one time in twelve, a checkpoint each
    hundred steps. Then a few undisturbed ones do not represent them, and profiling disturbs the others by less than
    they differ: so all count, if the undisturbed ones are that uncertain, and not so short that recording slows them.
    """
    chosen: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in entries:
        key = entry["rank"], entry["kind"]
        if entry["are_all"] and key in chosen:
            undisturbed = chosen[key] = {**chosen[key], "fading_ns": _fading_ns(entry)}
            mean_ns = undisturbed["ns"] / undisturbed["measured"]
            bounds = stats.mean_interval(undisturbed["times"], undisturbed["weights"])
            is_uncertain = bounds is None or bounds.half > MAX_UNCERTAINTY * mean_ns
            if mean_ns >= SHORT_NS and is_uncertain and entry["measured"] > undisturbed["measured"]:
                chosen[key] = {**undisturbed, **entry, "disturbed": undisturbed["disturbed"]}
        else:
            chosen[key] = entry
    return list(chosen.values())


def _fading_ns(entry: Mapping[str, Any]) -> float | None:
    """Return by how much iterations right after recorded ones take longer than later ones, see `Iteration`."""
    rows = list(zip(entry["times"], entry["weights"], entry["distances"], strict=True))
    near, far = ([row[:2] for row in rows if (row[2] == 2) == is_near] for is_near in (True, False))
    if min(len(near), len(far)) < MIN_ROWS:
        return None
    near_ns, far_ns = (
        stats.percentile([time for time, _ in group], 0.5, [count for _, count in group]) for group in (near, far)
    )
    return max(0.0, near_ns - far_ns)


def _iteration(
    row: Mapping[str, Any], pace: devicetime.DevicePace | None, busy_ns: float, hook_cost: IdleHookCost
) -> Iteration:
    identity = (row["rank"], row["kind"], row["steps"], row["recorded"], row["share"])
    measured_steps = row["measured"]
    if not measured_steps:
        return Iteration(*identity, None, None, None, None, None, row["samples"], row["disturbed"])
    subtracted = [0.0 if dur_ns is None else hook_cost.of(dur_ns) for dur_ns in row["in_bursts"]]
    subtracted_ns = math.fsum(map(operator.mul, subtracted, row["weights"])) / measured_steps
    values = list(zip(map(operator.sub, row["times"], subtracted), row["weights"], strict=True))
    if pace is not None:  # the other rows are of bursts whose pace is not known
        at_host = zip(values, row["numbers"], strict=True)
        values = [*(value for value, number in at_host if number in pace.host_rows), *pace.values]
    times, weights = zip(*values, strict=True)
    mean_ns = math.fsum(time * weight for time, weight in values) / sum(weights)
    interval = stats.mean_interval(times, weights)
    if interval is not None:  # the subtracted time is an estimate: from nothing to twice as much
        interval = replace(interval, low=interval.low - subtracted_ns, high=interval.high + subtracted_ns)
    if mean_ns < busy_ns:  # the device's work of an iteration cannot take longer than the iteration
        mean_ns, interval = busy_ns, interval and interval.at(busy_ns)
    return Iteration(
        *identity,
        mean_ns,
        interval,
        row["step_ns"] / measured_steps - subtracted_ns,
        row["data_ns"] / measured_steps,
        None if row["between_ns"] is None else row["between_ns"] / measured_steps,
        row["samples"],
        row["disturbed"],
        row["faults"],
        row["system_ns"],
        row["beside_ns"] / measured_steps,
        stats.mean_interval(row["waits"], row["weights"]),
        stats.mean_interval([gap or 0.0 for gap in row["gaps"]], row["weights"]),
        fading_ns=row.get("fading_ns"),
        phases=_phase_shares(row["phases"] or (), measured_steps),
    )


def _phase_shares(rows: Sequence[tuple[Any, ...]], measured_steps: int) -> dict[str, PhaseShare]:
    """Return the share of each phase in the time of steps; empty if the phases of most of them were not timed.

    Args:
        rows: number, mean duration and mean times of the phases of the steps of each row of the loop.
        measured_steps: number of steps, with those without times of phases.
    """
    weights = [row[0] for row in rows]
    if not rows or 2 * sum(weights) < measured_steps:
        return {}
    step_ns = math.fsum(row[0] * row[1] for row in rows) / sum(weights)
    shares = {}
    for name, place in (("forward", 2), ("backward", 3), ("optimizer", 4), ("", 5)):
        times = [row[place] for row in rows]
        share = math.fsum(map(operator.mul, times, weights)) / sum(weights) / step_ns
        interval = stats.mean_interval(times, weights)
        shares[name] = PhaseShare(share, None if interval is None else interval.scale(1 / step_ns))
    return shares


def idle_hooks_ns(con: duckdb.DuckDBPyConnection, run: Run) -> float:
    """Return the nanoseconds that idle collectors took of all steps that were not recorded; 0 where it is unknown.

    Args:
        con: holds `loop`.
        run: contains what hooks took.
    """
    costs = idle_hook_costs(con, run)
    rows = con.execute(
        f"SELECT rank, kind, sum(steps), sum(steps * dur_ns) / sum(steps) FROM loop "
        f"WHERE rung = {BARE} AND dur_ns IS NOT NULL GROUP BY rank, kind"
    ).fetchall()
    return sum(
        float(steps) * costs[rank, kind].of(dur_ns) for rank, kind, steps, dur_ns in rows if (rank, kind) in costs
    )
