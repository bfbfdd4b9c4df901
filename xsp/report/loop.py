"""The run over time, for the page: the duration of each step, recorded or not, and the time between steps.

The source is the table `loop` of the rank of the trace. Means cover the steps that profiling disturbed least. If there
are more steps than a screen can show, the extremes among neighbours of the same kind are kept; means cover all steps.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from typing import Any

import duckdb

from xsp import account
from xsp.analyses.loop import kinds_of
from xsp.errors import UsageError
from xsp.ingest import load as runs
from xsp.ingest.ranks import Subject
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.texts import counted

MOST_POINTS = 4_000
"""Maximum number of steps that are drawn."""

MOST_PARTS = 120
"""Maximum number of stretches of the run for which the means of a step's parts are drawn."""

MOST_COLOURS = 7
"""Kinds of steps with a colour of their own; further ones share one."""

_OTHER_KINDS = "other kinds"
_NO_KIND = -1


BASES = (
    "steps that ran as if nothing were recorded",
    "steps that were not recorded",
    "unrecorded steps, disturbed ones too",
)
"""The steps that means cover, in the order of `xsp.analyses.loop.STEP_SOURCES`."""

ALL_STEPS = "all steps, including recorded ones, because no others ran"


def loop(trace: Trace) -> dict[str, Any] | None:
    """Return the data that the page draws of the steps of a run; None if nothing is known of them.

    `kinds` are names, the kind with the most time first; `points` are single steps, in the order of time; `parts` are
    means over stretches of the run, each from its `step` on. Times are in ms, `at_s` in s since the first step.
    """
    if not _prepare(trace):
        return None
    con = trace.con
    # The kinds with a colour of their own, the longest first, and if there are more, one for the others.
    known_kinds = kinds_of(trace, trace.rank)
    names = {kind: step_kind.name for kind, step_kind in known_kinds.items()}
    rows = con.execute("SELECT kind FROM loop_rows GROUP BY kind ORDER BY sum(steps * ms) DESC, kind").fetchall()
    coloured = [(names.get(kind, "steps" if kind == _NO_KIND else f"kind {kind}"), kind) for (kind,) in rows]
    kinds = coloured if len(coloured) <= MOST_COLOURS + 1 else [*coloured[:MOST_COLOURS], (_OTHER_KINDS, None)]
    # the steps that represent the program best: in words, and as an SQL condition
    best = _first_row(con, "SELECT max(most) AS most FROM loop_rows")["most"]
    basis, condition = (BASES[best], "most IS NOT NULL") if best is not None else (ALL_STEPS, "status = 'ok'")
    total = _first_row(con, "SELECT count(*) AS rows, sum(steps) AS steps, "
                        "sum(steps) FILTER (recorded) AS recorded FROM loop_rows")  # fmt: skip
    points = _points(con, kinds, total["rows"])
    ranks = _first_row(con, "SELECT count(DISTINCT rank) AS ranks FROM loop")["ranks"]
    return {
        "kinds": [name for name, _ in kinds],
        "points": points,
        "parts": _parts(con, condition),
        "basis": basis,
        "left_out": total["rows"] - len(points["step"]),
        "notes": [
            f"{counted(total['steps'], 'step')}, {_count(total['recorded'])} of them recorded"
            + (f"; these are of rank {trace.rank} of {ranks}" if ranks > 1 else "") + ".",
        ],
    }  # fmt: skip


def time_shares(trace: Trace) -> dict[int, float]:
    """Return the share of the time that each kind of step takes, the largest first; empty if no kinds are known."""
    own = [each for each in account.of(trace).iterations if each.rank == trace.rank]
    shares = {each.kind: each.share for each in own if each.kind is not None}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _prepare(trace: Trace) -> bool:
    """Create the table `loop_rows` of the trace's rank, and return whether it has rows.

    Waiting for data counts as such, whether it was before the step or in it. `most` is null in a step that is left out
    of the means.
    """
    trace.create_temp_table(
        "loop_rows",
        f"""
        SELECT row_number() OVER (ORDER BY start_ns, step) - 1 AS number, step, steps,
               coalesce(kind, {_NO_KIND}) AS kind, rung > {BARE} AS recorded, most, status,
               (start_ns - min(start_ns) OVER ()) / 1e9 AS at_s, dur_ns / 1e6 AS ms,
               (dur_ns - greatest(0, coalesce(data_ns, 0) - coalesce(before_ns, 0))) / 1e6 AS self_ms,
               coalesce(data_ns, 0) / 1e6 AS data_ms,
               greatest(0, coalesce(before_ns, 0) - coalesce(data_ns, 0)) / 1e6 AS between_ms
        FROM loop LEFT JOIN (SELECT rank, step, rung, most FROM undisturbed) USING (rank, step, rung)
        WHERE rank = {trace.rank} AND dur_ns IS NOT NULL
        """,
    )
    return bool(trace.con.execute("SELECT 1 FROM loop_rows LIMIT 1").fetchall())


def _points(con: duckdb.DuckDBPyConnection, kinds: Sequence[tuple[str, int | None]], rows: int) -> dict[str, list[Any]]:
    """Return single steps: all, or from each stretch the shortest, the longest, and the one with the longest wait."""
    cases = " ".join(f"WHEN {number} THEN {index}" for index, (_, number) in enumerate(kinds) if number is not None)
    group = f"CASE kind {cases} ELSE {len(kinds) - 1} END" if cases else "0"
    stretches = rows if rows <= MOST_POINTS else max(1, MOST_POINTS // (6 * len(kinds)))
    return _columns(
        con,
        f"""
        WITH grouped AS (
            SELECT *, {group} AS colour, number * {stretches} // {max(1, rows)} AS stretch FROM loop_rows
        ), extremes AS (
            SELECT unnest([arg_min(number, ms), arg_max(number, ms), arg_max(number, data_ms + between_ms)]) AS number
            FROM grouped GROUP BY stretch, colour, recorded
        )
        SELECT step, steps, at_s, ms, data_ms, between_ms, colour, recorded,
               CASE WHEN status <> 'ok' THEN status END AS failed
        FROM grouped SEMI JOIN extremes USING (number) ORDER BY number
        """,
    )


def _parts(con: duckdb.DuckDBPyConnection, condition: str) -> dict[str, list[Any]]:
    """Return means over stretches of the run, from the steps that meet an SQL condition."""
    means = ", ".join(
        f"sum(steps * ({column})) / sum(steps) AS {column}" for column in ("self_ms", "data_ms", "between_ms")
    )
    return _columns(
        con,
        f"""
        WITH selected AS (
            SELECT *, row_number() OVER (ORDER BY number) - 1 AS position, count(*) OVER () AS rows FROM loop_rows
            WHERE {condition}
        )
        SELECT min(step) AS step, min(at_s) AS at_s, {means} FROM selected
        GROUP BY position * least(rows, {MOST_PARTS}) // rows ORDER BY step
        """,
    )


def _count(count: int | None) -> str:
    return f"{count:,}" if count else "none"


def _columns(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, list[Any]]:
    cursor = con.execute(query)
    names, rows = [name for name, *_ in cursor.description or ()], cursor.fetchall()
    return {name: [_rounded(row[index]) for row in rows] for index, name in enumerate(names)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _first_row(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    cursor = con.execute(query)
    return dict(zip((name for name, *_ in cursor.description or ()), cursor.fetchall()[0], strict=True))


# --- kinds -------------------------------------------------------------------------------------------------------
# The kinds of steps of a run: the page shows those with the most time, and lists the rest with a command for each.


MOST_KINDS = 4
"""Maximum number of kinds whose figures are on one page."""


def kinds_data(trace: Trace, page_traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the kinds of a run for the page.

    Args:
        trace: a trace of the run.
        page_traces: traces of the kinds on the page, in the order of their data.

    Returns:
        `shown`: name, steps and share of the loop's time of each; `others`: the same, with the command that writes a
        page of it. Both are empty if the run has only one kind.
    """
    all_kinds = kinds_of(trace, trace.rank)
    if len(all_kinds) < 2:
        return {"shown": [], "others": []}
    shares = time_shares(trace)
    page_kinds = [page_trace.kind for page_trace in page_traces]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"

    def entry_of(kind: int | None) -> dict[str, Any]:
        step_kind = all_kinds.get(kind) if kind is not None else None
        share = shares.get(kind) if kind is not None else None
        return {
            "name": step_kind.name if step_kind is not None else f"kind {kind}",
            "steps": step_kind.steps if step_kind is not None else None,
            "percent": None if share is None else 100 * share,
        }

    other_kinds = sorted(
        (kind for kind in all_kinds if kind not in page_kinds), key=lambda kind: (-shares.get(kind, 0), kind)
    )
    return {
        "shown": [entry_of(kind) for kind in page_kinds],
        "others": [{**entry_of(kind), "command": f"xsp report {run} --kind {kind}"} for kind in other_kinds],
    }


def load(path: Subject, kind: int | str | None = None, *, skip_damaged: bool = False) -> list[Trace]:
    """Load a run as traces of its kinds of steps: the requested kind, then the others that take most time.

    Args:
        path, kind, skip_damaged: as in `xsp.load`.

    Returns:
        At most `MOST_KINDS` traces; one if the run has one kind or states none. Kinds without a recorded step are
        left out.

    Raises:
        As `xsp.load`.
    """
    first_trace = runs.load(path, skip_damaged=skip_damaged, kind=kind)
    traces = [first_trace]
    all_kinds = kinds_of(first_trace, first_trace.rank)
    for number in time_shares(first_trace):
        if len(traces) == MOST_KINDS:
            break
        if number in all_kinds and number != first_trace.kind:
            with contextlib.suppress(UsageError):
                traces.append(runs.load(path, skip_damaged=skip_damaged, kind=number))
    return traces
