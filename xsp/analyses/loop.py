"""The loop: the time of an iteration by kind of step, from steps that were not recorded; and the kinds of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from xsp import account
from xsp.account import entries as names
from xsp.account.kinds import kinds
from xsp.analyses.contract import Table, analysis, values
from xsp.run import StepKind
from xsp.store.iterations import Iteration, iterations
from xsp.store.trace import Trace
from xsp.texts import milliseconds

STEP_SOURCES = ("steady", "bare", "after recorded ones")
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
    **dict.fromkeys(("page_faults", "system_ms", "beside_ms", "at_once"), "DOUBLE"),
}


def reason_without_loop(trace: Trace) -> str | None:
    """Return why a trace has no loop, or None if it has one."""
    if trace.has_loop:
        return None
    return "only runs of `xsp run` and xsp.profile record which steps ran and the time between them"


@analysis("loop", "The program's loop", unless=reason_without_loop)
def program_loop(trace: Trace) -> Table:
    """The time of an iteration as the program really ran, by kind of step, from steps that were not recorded.

    An iteration is a step and the time since the previous step: waiting for data, moving it, logging. `percent_of_loop`
    is a percentage of the wall time of the whole loop, `steps` the number of all steps that ran, `low_ms` and `high_ms`
    the confidence interval of the iteration. A distributed program has a row per rank, and one for the job, whose
    throughput is that of all ranks together. `samples_from` is the source of the number of samples: stated, the first
    dimension of the step's one input, or a guess from several calls. `figures_from` names the steps used: `steady`
    ran as if nothing were recorded. Times are null if no step ran without recording, or only short steps right after
    recorded ones, which may take twice as long. Times and waits are entries of the account; `between_ms` is null where
    no such time was measured. `page_faults` is the number of page faults per iteration without disk
    access, mostly for memory that the allocator returned and allocates again; `system_ms` is the time of all threads in
    the operating system. Both are null if the run did not count them. If steps of several threads overlap, an iteration
    is that of one thread, without the time between its steps in which other threads ran steps (`beside_ms`); `at_once`
    is the number of iterations at the same time, and the throughput is that of all threads together.
    """
    measurements = iterations(trace)
    has_several = len({iteration.rank for iteration in measurements}) > 1
    rows = [_row(trace, iteration, scope_names(iteration.rank)[has_several]) for iteration in measurements]
    return values(trace, "the_loop", _COLUMNS, [*_job_rows(trace, measurements), *rows] if has_several else rows)


def scope_names(rank: int) -> tuple[str, str]:
    """Return the `scope` of the rows of one rank: if it is alone, and if there are several."""
    return "program", f"rank {rank}"


_LINE_COLUMNS = {
    "scope": "VARCHAR",
    "line": "VARCHAR",
    "calls": "VARCHAR",
    **dict.fromkeys(("ms", "percent"), "DOUBLE"),
    "seen": "INTEGER",
    "gaps": "INTEGER",
    "function": "VARCHAR",
}
OTHER_LINES, NOT_FOLLOWED = "other lines", "not followed: too many calls"


def _reason_without_lines(trace: Trace) -> str | None:
    """Return why a trace has no lines that ran between steps, or None if it has some."""
    if any(run.between is not None and run.between.gaps for run in trace.run.rank_runs):
        return None
    if trace.run.imported is not None:
        return "only runs of `xsp run` and xsp.profile record the lines between steps"
    return "the program did not continue after a recorded step, or a debugger or coverage traced its lines"


@analysis("between", "Lines of the program between steps", unless=_reason_without_lines)
def lines_between_steps(trace: Trace) -> Table:
    """The lines of the program that ran between a recorded step and the next one, and their time.

    The time of a line includes its calls, but not waiting for data. `gaps` is the number of gaps between steps in which
    lines were traced, `seen` the number of those in which the line ran. `ms` is the mean over all of these gaps,
    `percent` its share of all lines. A line that begins or ends a step is listed with its time outside the step. `line`
    is the file, relative to the working directory or its package, and the line number.
    """
    runs = trace.run.rank_runs
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        between = run.between
        if between is None or not between.gaps:
            continue
        scope = scope_names(run.rank or 0)[len(runs) > 1]
        total_ns = between.ns + between.unknown_ns
        lines: list[tuple[str, str | None, int, int | None, str | None]]
        lines = [(f"{line.file}:{line.line}", line.calls, line.ns, line.gaps, line.function) for line in between.lines]
        lines += [
            (label, None, ns, None, None)
            for label, ns in ((OTHER_LINES, between.rest_ns), (NOT_FOLLOWED, between.unknown_ns))
            if ns
        ]
        rows += [
            (
                scope,
                location,
                calls,
                ns / between.gaps / 1e6,
                100 * ns / total_ns if total_ns else None,
                seen_gaps,
                between.gaps,
                function,
            )
            for location, calls, ns, seen_gaps, function in sorted(lines, key=lambda row: -row[2])
        ]
    return values(trace, "between_steps", _LINE_COLUMNS, rows)


def _step_kind(trace: Trace, iteration: Iteration) -> StepKind | None:
    return kinds_of(trace, iteration.rank).get(iteration.kind) if iteration.kind is not None else None


def _row(trace: Trace, iteration: Iteration, scope: str) -> tuple[Any, ...]:
    kind = _step_kind(trace, iteration)
    name, batch_source = (kind.name, kind.batch_source) if kind is not None else (None, None)
    accounted = account.of(trace).of(iteration.rank, iteration.kind)
    time = accounted.time if accounted is not None and iteration.is_known else None
    data_ms, between_ms = (
        accounted.host.ms(part) if accounted is not None and time is not None and ns is not None else None
        for part, ns in ((names.DATA, iteration.data_ns), (names.BETWEEN, iteration.between_ns))
    )
    return (
        scope, iteration.kind, name, iteration.steps, iteration.recorded, time.ms if time is not None else None,
        milliseconds(iteration.step_ns) if time is not None else None, data_ms, between_ms,
        iteration.samples_per_s if time is not None else None, 100 * iteration.share,
        *((time.low_ms, time.high_ms) if time is not None else (None, None)), iteration.samples, batch_source,
        STEP_SOURCES[iteration.disturbed], iteration.faults, milliseconds(iteration.system_ns),
        milliseconds(iteration.beside_ns), iteration.at_once or 1.0,
    )  # fmt: skip


def _job_rows(trace: Trace, measurements: list[Iteration]) -> Iterator[tuple[Any, ...]]:
    """Yield the job's row of each kind on all ranks, with the slowest rank's times: ranks wait for each other."""
    by_name: dict[str, list[Iteration]] = defaultdict(list)
    for iteration in measurements:
        kind = _step_kind(trace, iteration)
        by_name[kind.name if kind is not None else ""].append(iteration)
    ranks = len({iteration.rank for iteration in measurements})
    for name, group in by_name.items():
        if (
            len(group) != ranks
            or len({iteration.rank for iteration in group}) != ranks
            or not all(iteration.is_known for iteration in group)
        ):
            continue
        slowest = max(group, key=lambda iteration: iteration.mean_ns or 0.0)
        samples = [iteration.samples for iteration in group]
        total = sum(count for count in samples if count is not None) if None not in samples else None
        job = slowest._replace(samples=total)
        row = _row(trace, job, f"job of {ranks} ranks")
        yield (row[0], group[0].kind, name, *row[3:])  # ranks number kinds on their own: the lowest rank's number


def kinds_of(trace: Trace, rank: int) -> Mapping[int, StepKind]:
    """Return the kinds of steps of a rank from `run.json`, by number."""
    rank_run = next((run for run in trace.run.rank_runs if (run.rank or 0) == rank), trace.run)
    return {kind.kind: kind for kind in rank_run.kinds}


# --- kinds of steps ----------------------------------------------------------------------------------------------
# Of a program that xsp profiled; or prefill and decode of an engine that serves language models.


_KIND_COLUMNS = {
    "name": "VARCHAR", "iterations": "BIGINT",
    **dict.fromkeys(
        ("iteration_ms", "median_ms", "percent_of_time", "device_percent", "tokens_per_s", "requests",
         "prefill_tokens", "decode_tokens", "low_ms", "high_ms", "device_ms"), "DOUBLE",
    ),
    "rank": "INTEGER", "kind": "INTEGER", "source": "VARCHAR",
}  # fmt: skip


def _reason_without_kinds(trace: Trace) -> str | None:
    """Return why a trace has no kinds of steps, or None if it has some."""
    if any(run.kinds for run in trace.run.rank_runs):
        return None
    return "no kinds of steps are known: xsp finds them in programs that it runs, or an engine annotates them"


@analysis("kinds", "Kinds of steps", unless=_reason_without_kinds)
def kinds_of_steps(trace: Trace) -> Table:
    """Time, device and tokens of each kind of step: training and evaluation, or prefill, decode and mixed steps.

    The kinds of a program that xsp ran are those that it found; those of a trace of vLLM, SGLang, ATOM or TensorRT-LLM
    are from the annotations of its steps. `iteration_ms` is the mean time of an iteration with its 95 % interval, from
    the account; in a trace of several annotated kinds it ends when host and device are done. `percent_of_time` is the
    share of all iterations, `device_ms` the time in which the busiest device works on one. `requests`, `prefill_tokens`
    (of prompts) and `decode_tokens` (that are added) are means of a step; `tokens_per_s` is of both together. They are
    null if an annotation does not state them. `--kind` gives other tables for a kind.
    """
    accounted = account.of(trace)
    rows = [
        (
            each.name, each.iterations, each.time.ms, each.median_ms, 100 * each.share,
            100 * each.busy_ms / each.time.ms if each.busy_ms is not None and each.time.ms else None,
            each.tokens_per_s, each.requests, each.prefill_tokens, each.decode_tokens, each.time.low_ms,
            each.time.high_ms, each.busy_ms, each.rank, each.kind, each.time.source,
        )
        for each in kinds(trace, accounted)
    ]  # fmt: skip
    return values(trace, "kinds_of_steps", _KIND_COLUMNS, rows)
