"""Iterations of a kind that take very different times, and how much each recorded one of them stands for.

Iterations of one kind are not alike: one in twelve has a long document, each fifteenth is followed by a checkpoint. The
recorded iterations are few, so by chance too many or too few of them are slow. The time of every iteration is known,
recorded or not, so the recorded ones are weighted by the share of their stratum among all (post-stratification).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import duckdb

from xsp import stats
from xsp.store.loop import BARE

GAP = 1.3
"""Ratio of two consecutive times, in ascending order, at which a new stratum begins."""

FEWEST_BARE = 8
"""Fewest unrecorded iterations that are divided into strata."""

FEWEST_RECORDED = 4
"""Fewest recorded iterations of a rung from which its slowdown is estimated."""

MOST_STRATA = 6
"""Most strata of a kind; the nearest ones are joined."""

PERIODIC_SHARE = 0.8
"""Least share of equal distances of iterations that occur periodically."""


class StratifiedTime(enum.Enum):
    """The part of an iteration whose time divides the strata."""

    ITERATION = "step_ns + before_ns"  # from the end of the last step to the end of this one
    STEP = "step_ns"  # for what is recorded inside steps: a slow save before a step does not matter
    BEFORE = "before_ns"  # for what is recorded before steps


class Stratum(NamedTuple):
    """Iterations of a kind on a rank of which a part takes about the same time."""

    rank: int
    kind: int
    low_ns: float
    high_ns: float
    """The shortest and the longest time of the part in an unrecorded iteration."""

    mean_ns: float
    """Mean of these times."""

    iterations: int
    """Number of iterations, recorded or not."""

    recorded: tuple[int, ...]
    """Numbers of the recorded steps."""

    period: int | None
    """Every how many steps of the rank one of them runs; None if that varies."""


class _IterationRow(NamedTuple):
    step: int
    steps: int
    rung: int
    step_ns: float
    before_ns: float
    """0 if the part is the step; and `step_ns` is 0 if it is the time before."""

    @property
    def ns(self) -> float:
        """The time of the part."""
        return self.step_ns + self.before_ns


def strata(
    con: duckdb.DuckDBPyConnection, part: StratifiedTime = StratifiedTime.ITERATION, first: int = 0
) -> list[Stratum]:
    """Return the strata of each rank and kind, the shortest times first; all together contain every iteration.

    Recording slows a step, so the time of a recorded one is divided by the usual slowdown of its rung before it is
    compared with the others. A kind with fewer than `FEWEST_BARE` unrecorded iterations has one stratum; one without
    any has none.

    Args:
        con: holds `loop`.
        part: what is recorded in this part is to be weighted.
        first: number of the first unrecorded step that counts; before it the program warms up.
    """
    step = "0::DOUBLE" if part is StratifiedTime.BEFORE else "dur_ns"
    before = "0::DOUBLE" if part is StratifiedTime.STEP else "coalesce(before_ns, 0) + coalesce(beside_ns, 0)"
    rows = con.execute(
        f"""
        SELECT rank, kind, step, steps, rung, {step}, {before}
        FROM loop WHERE status = 'ok' AND (step >= {int(first)} OR rung <> {BARE}) ORDER BY rank, kind, step
        """
    ).fetchall()
    by_kind: dict[tuple[int, int], list[_IterationRow]] = defaultdict(list)
    for rank, kind, *row in rows:
        by_kind[rank, kind].append(_IterationRow(*row))
    return [stratum for (rank, kind), group in by_kind.items() for stratum in _strata_of(rank, kind, group)]


def _strata_of(rank: int, kind: int, rows: Sequence[_IterationRow]) -> list[Stratum]:
    bare = sorted((row for row in rows if row.rung == BARE), key=lambda row: row.ns)
    if not bare:
        return []
    groups = _divided(bare) if sum(row.steps for row in bare) >= FEWEST_BARE else [bare]
    slowdowns = _slowdowns(bare, [row for row in rows if row.rung != BARE])
    recorded: list[list[_IterationRow]] = [[] for _ in groups]
    for row in rows:
        if row.rung != BARE:
            recorded[_nearest(groups, row.step_ns / slowdowns.get(row.rung, 1.0) + row.before_ns)].append(row)
    return [_stratum(rank, kind, group, own) for group, own in zip(groups, recorded, strict=True)]


def _divided(bare: Sequence[_IterationRow]) -> list[Sequence[_IterationRow]]:
    """Divide iterations, in ascending order of their times, where the times have the largest gaps."""
    ratios = [
        (later.ns / max(1.0, earlier.ns), index)
        for index, (earlier, later) in enumerate(itertools.pairwise(bare), start=1)
    ]
    cuts = sorted(index for ratio, index in sorted(ratios, reverse=True)[: MOST_STRATA - 1] if ratio >= GAP)
    return [bare[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(bare)], strict=True)]


def _slowdowns(bare: Sequence[_IterationRow], recorded: Sequence[_IterationRow]) -> dict[int, float]:
    """Return by how much recording at each rung slows a step, from the faster ones of both: most are alike."""
    usual_ns = stats.percentile([row.step_ns for row in bare], 0.25, [row.steps for row in bare])
    times: dict[int, list[float]] = defaultdict(list)
    for row in recorded:
        times[row.rung].append(row.step_ns)
    return {
        rung: max(1.0, stats.percentile(own, 0.25) / usual_ns)
        for rung, own in times.items()
        if len(own) >= FEWEST_RECORDED and usual_ns
    }


def _nearest(groups: Sequence[Sequence[_IterationRow]], ns: float) -> int:
    """Return the index of the stratum whose range of times is nearest to a time, by its ratio."""

    def distance(index: int) -> float:
        low_ns, high_ns = max(1.0, groups[index][0].ns), max(1.0, groups[index][-1].ns)
        return max(0.0, math.log(low_ns / max(1.0, ns)), math.log(max(1.0, ns) / high_ns))

    return min(range(len(groups)), key=distance)


def _stratum(rank: int, kind: int, bare: Sequence[_IterationRow], recorded: Sequence[_IterationRow]) -> Stratum:
    count = sum(row.steps for row in bare)
    return Stratum(
        rank,
        kind,
        bare[0].ns,
        bare[-1].ns,
        sum(row.steps * row.ns for row in bare) / count,
        count + len(recorded),
        tuple(row.step for row in recorded),
        period_of(row.step for row in (*bare, *recorded) if row.steps == 1),
    )


def period_of(steps: Iterable[int]) -> int | None:
    """Return the usual distance of rare iterations, in steps; None for frequent ones, and if it varies."""
    single = sorted(steps)
    distances = Counter(later - earlier for earlier, later in itertools.pairwise(single))
    if not distances:
        return None
    distance, count = distances.most_common(1)[0]
    is_periodic = distance > 1 and count >= 2 and count >= PERIODIC_SHARE * sum(distances.values())
    return distance if is_periodic else None


Steps = Collection[tuple[int, int]]
"""Ranks and numbers of steps."""


def weights(found: Iterable[Stratum], chosen: Steps | None = None) -> dict[tuple[int, int], float]:
    """Return the weight of each recorded step, by rank and number; within a rank and kind their mean is 1.

    A mean over recorded steps with these weights is an estimate of the mean over all iterations, as far as every
    stratum was recorded.

    Args:
        found: from `strata`.
        chosen: ranks and numbers of the steps to weigh, for instance those of one rung; default: all.
    """
    by_kind: dict[tuple[int, int], list[tuple[int, list[tuple[int, int]]]]] = defaultdict(list)
    for stratum in found:
        keys = [(stratum.rank, step) for step in stratum.recorded]
        own = [key for key in keys if chosen is None or key in chosen]
        if own:
            by_kind[stratum.rank, stratum.kind].append((stratum.iterations, own))
    result: dict[tuple[int, int], float] = {}
    for groups in by_kind.values():
        iterations, steps = sum(count for count, _ in groups), sum(len(own) for _, own in groups)
        for count, own in groups:
            result |= dict.fromkeys(own, count / iterations / (len(own) / steps))
    return result


def mean_interval(found: Sequence[Stratum], values: Mapping[int, float]) -> stats.Interval | None:
    """Return the 95 % interval of the mean over all iterations of what was recorded in some of them.

    Args:
        found: the strata of one rank and kind; those of which no step has a value are left out.
        values: the value of each recorded step, by its number.

    Returns:
        None for fewer than three values.
    """
    groups = [
        (float(stratum.iterations), [values[step] for step in stratum.recorded if step in values]) for stratum in found
    ]
    return stats.stratified_interval(groups)
