"""The loop: what an iteration of the program takes, by kind of step, as it ran where nothing was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xsp import summary
from xsp.analyses.contract import Table, analysis, values
from xsp.loop import BARE, UNDISTURBED
from xsp.trace import Trace

FROM = ("steady", "bare", "after recorded ones")
"""Which steps the figures of a row are from, by how much profiling may have disturbed them."""

_COLUMNS = {
    "scope": "VARCHAR",
    "kind": "INTEGER",
    "name": "VARCHAR",
    "steps": "BIGINT",
    "recorded": "BIGINT",
    **dict.fromkeys(("percent", "iteration_ms", "low_ms", "high_ms", "step_ms", "data_ms", "between_ms"), "DOUBLE"),
    "samples": "DOUBLE",
    "samples_per_s": "DOUBLE",
    "samples_from": "VARCHAR",
    "figures_from": "VARCHAR",
}


class Iteration(NamedTuple):
    """What one iteration of a kind takes on a rank; nanoseconds, means over the steps that were disturbed least."""

    rank: int
    kind: int
    steps: int
    """Steps of this kind that ran."""

    recorded: int
    share: float
    """Of the loop's time."""

    mean_ns: float | None
    """From the end of the step before to the end of this one; None where no step ran bare."""

    ends: summary.Interval | None
    step_ns: float | None
    data_ns: float | None
    """Waiting for data, before the step or in it."""

    between_ns: float | None
    """Between the step before and this one, without waiting for data."""

    samples: float | None
    """In a step."""

    disturbed: int
    """Place in `FROM`."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples in a second of the loop."""
        return self.samples / self.mean_ns * 1e9 if self.samples and self.mean_ns else None


def iterations(trace: Trace, samples: int | None = None) -> list[Iteration]:
    """Return what an iteration takes, by rank, the kind that takes most time first; empty without a loop.

    Args:
        trace: any.
        samples: ask only steps with so many samples.
    """
    of_size = "true" if samples is None else f"samples = {int(samples)}"
    found = trace.con.execute(
        f"""
        WITH {UNDISTURBED}, measured AS (
            SELECT rank, kind, list(iteration_ns ORDER BY step) AS each, sum(steps * iteration_ns) AS ns,
                   sum(steps) AS measured, sum(steps * dur_ns) AS step_ns, sum(steps * data_ns) AS data_ns,
                   sum(steps * least(data_ns, coalesce(before_ns, 0))) AS data_before_ns,
                   sum(steps * coalesce(before_ns, 0)) AS before_ns,
                   sum(steps * samples) / sum(steps) FILTER (samples IS NOT NULL) AS samples, max(most) AS disturbed
            FROM undisturbed WHERE {of_size} GROUP BY rank, kind
        ), counted AS (
            SELECT rank, kind, sum(steps) AS steps, count(*) FILTER (rung <> {BARE}) AS recorded,
                   sum(steps * (dur_ns + coalesce(before_ns, 0))) AS ns,
                   coalesce(sum(before_ns) FILTER (rung <> {BARE}), 0) AS drained_ns
            FROM loop WHERE {of_size} GROUP BY rank, kind
        )
        SELECT rank, kind, c.steps, recorded, c.ns / sum(c.ns) OVER (PARTITION BY rank) AS share, m.ns, each, measured,
               step_ns, data_ns, before_ns - data_before_ns AS between_ns, samples,
               coalesce(disturbed, 2) AS disturbed, drained_ns
        FROM counted c LEFT JOIN measured m USING (rank, kind) ORDER BY rank, c.ns DESC, kind
        """
    )
    names, on_device = [column[0] for column in found.description], _works_on_devices(trace)
    return [_iteration(dict(zip(names, row, strict=True)), on_device) for row in found.fetchall()]


def _works_on_devices(trace: Trace) -> bool:
    return bool(trace.con.execute("SELECT 1 FROM spans WHERE device IS NOT NULL LIMIT 1").fetchall())


def _iteration(row: Mapping[str, Any], on_device: bool) -> Iteration:
    told = (row["rank"], row["kind"], row["steps"], row["recorded"], row["share"])
    measured = row["measured"]
    if not measured:
        return Iteration(*told, None, None, None, None, None, row["samples"], row["disturbed"])
    # The host runs ahead of a device; what it is behind stands before the next recorded step, which waits for it.
    behind_ns = row["drained_ns"] / measured if on_device else 0.0
    ends = summary.mean_interval(row["each"])
    return Iteration(
        *told,
        row["ns"] / measured + behind_ns,
        summary.Interval(ends.lo + behind_ns, ends.hi + behind_ns) if ends is not None else None,
        row["step_ns"] / measured,
        row["data_ns"] / measured,
        row["between_ns"] / measured,
        row["samples"],
        row["disturbed"],
    )


@analysis("loop", "The program's loop")
def LOOP(trace: Trace) -> Table:
    """What an iteration takes as the program really ran, by kind of step: from steps that were not recorded.

    An iteration is a step and what stands between it and the one before: waiting for data, moving it, logging.
    `percent` is of the time of the whole loop, `steps` are all that ran. Of a distributed program there is a row for
    each rank, and one for the job, whose throughput is that of all ranks together. `samples_from` says how the samples
    of a step are known: stated, the first dimension of its one input, or a guess from several calls. `figures_from`
    says which steps tell: steady ones ran as if nothing were recorded.
    """
    found = iterations(trace)
    several = len({each.rank for each in found}) > 1
    rows = [_row(trace, each, f"rank {each.rank}" if several else "program") for each in found]
    return values(trace, "the_loop", _COLUMNS, [*_jobs(trace, found), *rows] if several else rows)


def _row(trace: Trace, each: Iteration, scope: str) -> tuple[Any, ...]:
    said = kinds_of(trace, each.rank).get(each.kind, {})
    ends = each.ends
    return (
        scope, each.kind, said.get("name"), each.steps, each.recorded, 100 * each.share, _ms(each.mean_ns),
        _ms(ends.lo if ends else None), _ms(ends.hi if ends else None), _ms(each.step_ns), _ms(each.data_ns),
        _ms(each.between_ns), each.samples, each.samples_per_s, said.get("batch_source"), FROM[each.disturbed],
    )  # fmt: skip


def _jobs(trace: Trace, found: list[Iteration]) -> Iterator[tuple[Any, ...]]:
    """Yield the job's row of each kind that all ranks have: ranks wait for each other, so the slowest one tells."""
    by_name: dict[str, list[Iteration]] = defaultdict(list)
    for each in found:
        by_name[str(kinds_of(trace, each.rank).get(each.kind, {}).get("name"))].append(each)
    ranks = len({each.rank for each in found})
    for name, those in by_name.items():
        if len(those) < ranks or any(each.mean_ns is None for each in those):
            continue
        slowest = max(those, key=lambda each: each.mean_ns or 0.0)
        samples = [each.samples for each in those]
        total = sum(each for each in samples if each is not None) if None not in samples else None
        whole = slowest._replace(samples=total)
        row = _row(trace, whole, f"job of {ranks} ranks")
        yield (*row[:2], name, *row[3:])


def kinds_of(trace: Trace, rank: int) -> Mapping[int, Mapping[str, Any]]:
    """Return what `run.json` says of the kinds of steps of a rank, by number."""
    runs = trace.run.get("ranks") or [trace.run]
    own = next((run for run in runs if run.get("rank", 0) == rank), trace.run)
    return {each["kind"]: each for each in own.get("kinds") or ()}


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6
