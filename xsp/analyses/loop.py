"""The loop: the time of an iteration of the program, by kind of step, from steps that were not recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from xsp.analyses.contract import Table, analysis, values
from xsp.run import StepKind
from xsp.store.iterations import Iteration, iterations
from xsp.store.trace import Trace

FROM = ("steady", "bare", "after recorded ones")
"""The steps that the figures of a row come from, in order of how much profiling may have disturbed them."""

_COLUMNS = {
    "scope": "VARCHAR",
    "kind": "INTEGER",
    "name": "VARCHAR",
    "steps": "BIGINT",
    "recorded": "BIGINT",
    **dict.fromkeys(("iteration_ms", "step_ms", "data_ms", "between_ms", "samples_per_s", "percent_of_loop"), "DOUBLE"),
    **dict.fromkeys(("low_ms", "high_ms", "samples"), "DOUBLE"),
    "samples_from": "VARCHAR",
    "figures_from": "VARCHAR",
    **dict.fromkeys(("page_faults", "system_ms"), "DOUBLE"),
}


def unseen(trace: Trace) -> str | None:
    """Return why a trace has no loop, or None if it has one."""
    if trace.con.execute("SELECT 1 FROM loop LIMIT 1").fetchall():
        return None
    return "only runs of `xsp run` and xsp.profile record which steps ran and the time between them"


@analysis("loop", "The program's loop", unless=unseen)
def program_loop(trace: Trace) -> Table:
    """The time of an iteration as the program really ran, by kind of step, from steps that were not recorded.

    An iteration is a step and the time since the previous step: waiting for data, moving it, logging. `percent_of_loop`
    is a percentage of the wall time of the whole loop, `steps` the number of all steps that ran, `low_ms` and `high_ms`
    the confidence interval of the iteration. A distributed program has a row per rank, and one for the job, whose
    throughput is that of all ranks together. `samples_from` is the source of the number of samples: stated, the first
    dimension of the step's one input, or a guess from several calls. `figures_from` names the steps used: steady steps
    ran as if nothing were recorded. Times are null if no step ran without recording, or only short steps right after
    recorded ones, which may take twice as long. `page_faults` is the number of page faults per iteration without disk
    access, mostly for memory that the allocator returned and allocates again; `system_ms` is the time of all threads in
    the operating system. Both are null if the run did not count them.
    """
    found = iterations(trace.con)
    several = len({each.rank for each in found}) > 1
    rows = [_row(trace, each, own_scopes(each.rank)[several]) for each in found]
    return values(trace, "the_loop", _COLUMNS, [*_jobs(trace, found), *rows] if several else rows)


def own_scopes(rank: int) -> tuple[str, str]:
    """Return the `scope` of the rows of one rank: if it is alone, and if there are several."""
    return "program", f"rank {rank}"


_LINE = {
    "scope": "VARCHAR",
    "line": "VARCHAR",
    "calls": "VARCHAR",
    **dict.fromkeys(("ms", "percent"), "DOUBLE"),
    "seen": "INTEGER",
    "gaps": "INTEGER",
    "function": "VARCHAR",
}
NOT_NAMED, NOT_FOLLOWED = "other lines", "not followed: too many calls"


def _unfollowed(trace: Trace) -> str | None:
    """Return why a trace has no lines that ran between steps, or None if it has some."""
    if any(run.between is not None and run.between.gaps for run in trace.run.each_rank):
        return None
    if trace.run.imported is not None:
        return "only runs of `xsp run` and xsp.profile record the lines between steps"
    return "the program did not continue after a recorded step, or a debugger or coverage traced its lines"


@analysis("between", "Lines of the program between steps", unless=_unfollowed)
def lines_between_steps(trace: Trace) -> Table:
    """The lines of the program that ran between a recorded step and the next one, and their time.

    The time of a line includes its calls, but not waiting for data. `gaps` is the number of gaps between steps in which
    lines were traced, `seen` the number of those in which the line ran. `ms` is the mean over all of these gaps,
    `percent` its share of all lines. A line that begins or ends a step is listed with its time outside the step. `line`
    is the file, relative to the working directory or its package, and the line number.
    """
    every = trace.run.each_rank
    rows: list[tuple[Any, ...]] = []
    for run in every:
        found = run.between
        if found is None or not found.gaps:
            continue
        scope = f"rank {run.rank or 0}" if len(every) > 1 else "program"
        whole = found.ns + found.unknown_ns
        told: list[tuple[str, str | None, int, int | None, str | None]]
        told = [(f"{each.file}:{each.line}", each.calls, each.ns, each.gaps, each.function) for each in found.lines]
        told += [
            (what, None, ns, None, None)
            for what, ns in ((NOT_NAMED, found.rest_ns), (NOT_FOLLOWED, found.unknown_ns))
            if ns
        ]
        rows += [
            (scope, at, calls, ns / found.gaps / 1e6, 100 * ns / whole if whole else None, seen, found.gaps, function)
            for at, calls, ns, seen, function in sorted(told, key=lambda each: -each[2])
        ]
    return values(trace, "between_steps", _LINE, rows)


def _kind(trace: Trace, each: Iteration) -> StepKind | None:
    return kinds_of(trace, each.rank).get(each.kind) if each.kind is not None else None


def _row(trace: Trace, each: Iteration, scope: str) -> tuple[Any, ...]:
    said = _kind(trace, each)
    name, batch_source = (said.name, said.batch_source) if said is not None else (None, None)
    if not each.is_known:
        each = each._replace(mean_ns=None, ends=None, step_ns=None, data_ns=None, between_ns=None)
    ends = each.ends
    return (
        scope, each.kind, name, each.steps, each.recorded, _ms(each.mean_ns), _ms(each.step_ns),
        _ms(each.data_ns), _ms(each.between_ns), each.samples_per_s, 100 * each.share, _ms(ends.lo if ends else None),
        _ms(ends.hi if ends else None), each.samples, batch_source, FROM[each.disturbed], each.faults,
        _ms(each.system_ns),
    )  # fmt: skip


def _jobs(trace: Trace, found: list[Iteration]) -> Iterator[tuple[Any, ...]]:
    """Yield the job's row of each kind on all ranks, with the slowest rank's times: ranks wait for each other."""
    by_name: dict[str, list[Iteration]] = defaultdict(list)
    for each in found:
        said = _kind(trace, each)
        by_name[said.name if said is not None else ""].append(each)
    ranks = len({each.rank for each in found})
    for name, those in by_name.items():
        if (
            len(those) != ranks
            or len({each.rank for each in those}) != ranks
            or not all(each.is_known for each in those)
        ):
            continue
        slowest = max(those, key=lambda each: each.mean_ns or 0.0)
        samples = [each.samples for each in those]
        total = sum(each for each in samples if each is not None) if None not in samples else None
        whole = slowest._replace(samples=total)
        row = _row(trace, whole, f"job of {ranks} ranks")
        yield (row[0], those[0].kind, name, *row[3:])  # ranks number kinds on their own: the lowest rank's number


def kinds_of(trace: Trace, rank: int) -> Mapping[int, StepKind]:
    """Return the kinds of steps of a rank from `run.json`, by number."""
    own = next((run for run in trace.run.each_rank if (run.rank or 0) == rank), trace.run)
    return {each.kind: each for each in own.kinds}


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6
