"""The run over time, for the page: what each step took, recorded or not, and what lay between the steps.

It is read from the table `loop`, of one rank. Of more steps than can be told apart on a screen those are kept that are
extreme among their neighbours of the same kind; means are always of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import duckdb

from xsp.span import Level
from xsp.trace import Trace

MOST_POINTS = 4_000
"""Steps that are drawn at most."""

MOST_PARTS = 120
"""Stretches of the run for which the means of a step's parts are drawn at most."""

MOST_KINDS = 7
"""Kinds of steps with a colour of their own; further ones share one."""

ENOUGH = 10
"""From so many steady steps on, means are of steady steps alone."""

WORTH = 0.1
"""A change over the run is told from this share on."""

_OTHERS = "other kinds"
_NO_KIND = -1


class Basis(NamedTuple):
    """Which steps means are of."""

    words: str
    condition: str


STEADY = Basis("steps that ran as if nothing were recorded", "steady")
BARE = Basis("steps that were not recorded", "NOT recorded")
ALL = Basis("all steps, recorded ones as well, for no others were seen", "true")


class Pace(NamedTuple):
    """How fast the program itself went, as means over steps of one kind."""

    iteration_ms: float
    """A step and what lay between it and the one before."""

    data_percent: float
    between_percent: float
    """Of that: waiting for data, and other time between steps."""

    steps: int
    basis: str


def loop(trace: Trace) -> dict[str, Any] | None:
    """Return what the page draws of the steps of a run; None where nothing is known of them.

    `kinds`, the heaviest first, are names; `points` are single steps, in the order of time; `parts` are means over
    stretches of the run, each from its `step` on. Times are milliseconds, `at_s` seconds since the first step.
    """
    if not _prepare(trace):
        return None
    con = trace.con
    kinds = _kinds(con, trace.run)
    basis = _basis(con, "true")
    total = _first(con, "SELECT count(*) AS rows, sum(steps) AS steps, "
                        "sum(steps) FILTER (recorded) AS recorded FROM loop_rows")  # fmt: skip
    points = _points(con, kinds, total["rows"])
    ranks = con.execute("SELECT count(DISTINCT rank), min(rank) FROM loop").fetchall()[0]
    return {
        "kinds": [name for name, _ in kinds],
        "points": points,
        "parts": _parts(con, basis),
        "basis": basis.words,
        "left_out": total["rows"] - len(points["step"]),
        "told": [
            f"{total['steps']:,} step{'s' * (total['steps'] != 1)}, {_count(total['recorded'])} of them recorded"
            + (f"; these are of rank {ranks[1]} of {ranks[0]}" if ranks[0] > 1 else "") + ".",
            *_drift(con, basis, kinds),
        ],
    }  # fmt: skip


def pace(trace: Trace, kind: int | None) -> Pace | None:
    """Return how fast steps of a kind follow each other; None where the trace holds nothing of the loop.

    Args:
        trace: any.
        kind: of the steps; None for all.
    """
    if not _prepare(trace):
        return None
    wanted = "true" if kind is None else f"kind = {int(kind)}"
    basis = _basis(trace.con, wanted)
    found = _first(
        trace.con,
        f"SELECT sum(steps) AS steps, {_mean('self_ms + data_ms + between_ms')} AS whole, {_mean('data_ms')} AS data, "
        f"{_mean('between_ms')} AS between FROM loop_rows WHERE status = 'ok' AND {wanted} AND {basis.condition}",
    )
    if not found["steps"] or not found["whole"]:
        return None
    whole = found["whole"]
    data, between = (100 * found[part] / whole for part in ("data", "between"))
    return Pace(whole, data, between, int(found["steps"]), basis.words)


def kind_of(trace: Trace) -> int | None:
    """Return the kind of step that a trace's figures are of; None where nothing tells kinds."""
    return getattr(trace, "kind", None)


def weights(trace: Trace) -> dict[int, float]:
    """Return the share of the loop's time that each kind of step takes, the heaviest first; empty without a loop."""
    if not _prepare(trace):
        return {}
    sums = dict(trace.con.execute(
        f"SELECT kind, sum(steps * (self_ms + data_ms + between_ms)) AS ms FROM loop_rows WHERE kind <> {_NO_KIND} "
        "GROUP BY kind ORDER BY ms DESC, kind").fetchall())  # fmt: skip
    whole = sum(sums.values())
    return {kind: ms / whole if whole else 0.0 for kind, ms in sums.items()}


def _prepare(trace: Trace) -> bool:
    """Make the table `loop_rows` of the first rank, and say whether it holds anything.

    What a step waited for data counts as that, whether the wait stood before the step or in it.
    """
    if not trace.con.execute("SELECT 1 FROM duckdb_columns() WHERE table_name = 'loop' LIMIT 1").fetchall():
        return False
    trace.once(
        "loop_rows",
        f"""
        SELECT row_number() OVER (ORDER BY start_ns, step) - 1 AS number, step, steps,
               coalesce(kind, {_NO_KIND}) AS kind,
               rung > {int(Level.APPLICATION)} AS recorded, coalesce(steady, false) AS steady, status,
               (start_ns - min(start_ns) OVER ()) / 1e9 AS at_s, dur_ns / 1e6 AS ms,
               (dur_ns - greatest(0, coalesce(data_ns, 0) - coalesce(before_ns, 0))) / 1e6 AS self_ms,
               coalesce(data_ns, 0) / 1e6 AS data_ms,
               greatest(0, coalesce(before_ns, 0) - coalesce(data_ns, 0)) / 1e6 AS between_ms
        FROM loop WHERE rank = (SELECT min(rank) FROM loop) AND dur_ns IS NOT NULL
        """,
    )
    return bool(trace.con.execute("SELECT 1 FROM loop_rows LIMIT 1").fetchall())


def _basis(con: duckdb.DuckDBPyConnection, wanted: str) -> Basis:
    """Choose the steps that say most of the program itself, of those that are wanted."""
    found = _first(con, "SELECT sum(steps) FILTER (steady) AS steady, sum(steps) FILTER (NOT recorded) AS bare "
                        f"FROM loop_rows WHERE status = 'ok' AND {wanted}")  # fmt: skip
    if (found["steady"] or 0) >= ENOUGH:
        return STEADY
    return BARE if found["bare"] else ALL


def _mean(column: str) -> str:
    return f"sum(steps * ({column})) / sum(steps)"


def _kinds(con: duckdb.DuckDBPyConnection, run: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Return the kinds with a colour of their own, the heaviest first, and where there are more, one for the others."""
    names = {each.get("kind"): str(each.get("name")) for each in run.get("kinds") or ()}
    found = con.execute("SELECT kind FROM loop_rows GROUP BY kind ORDER BY sum(steps * ms) DESC, kind").fetchall()
    shown = [(names.get(kind, "steps" if kind == _NO_KIND else f"kind {kind}"), kind) for (kind,) in found]
    return shown if len(shown) <= MOST_KINDS + 1 else [*shown[:MOST_KINDS], (_OTHERS, None)]


def _points(con: duckdb.DuckDBPyConnection, kinds: Sequence[tuple[str, int | None]], rows: int) -> dict[str, list[Any]]:
    """Return single steps: all, or of each stretch the shortest, the longest, and the one with the longest wait."""
    coloured = " ".join(f"WHEN {number} THEN {place}" for place, (_, number) in enumerate(kinds) if number is not None)
    group = f"CASE kind {coloured} ELSE {len(kinds) - 1} END" if coloured else "0"
    stretches = rows if rows <= MOST_POINTS else max(1, MOST_POINTS // (6 * len(kinds)))
    return _columns(
        con,
        f"""
        WITH grouped AS (
            SELECT *, {group} AS colour, number * {stretches} // {max(1, rows)} AS stretch FROM loop_rows
        ), kept AS (
            SELECT unnest([arg_min(number, ms), arg_max(number, ms), arg_max(number, data_ms + between_ms)]) AS number
            FROM grouped GROUP BY stretch, colour, recorded
        )
        SELECT step, steps, at_s, ms, data_ms, between_ms, colour, recorded,
               CASE WHEN status <> 'ok' THEN status END AS failed
        FROM grouped SEMI JOIN kept USING (number) ORDER BY number
        """,
    )


def _parts(con: duckdb.DuckDBPyConnection, basis: Basis) -> dict[str, list[Any]]:
    """Return means over stretches of the run, of the steps of the basis."""
    means = ", ".join(f"{_mean(column)} AS {column}" for column in ("self_ms", "data_ms", "between_ms"))
    return _columns(
        con,
        f"""
        WITH wanted AS (
            SELECT *, row_number() OVER (ORDER BY number) - 1 AS place, count(*) OVER () AS rows FROM loop_rows
            WHERE status = 'ok' AND {basis.condition}
        )
        SELECT min(step) AS step, min(at_s) AS at_s, {means} FROM wanted
        GROUP BY place * least(rows, {MOST_PARTS}) // rows ORDER BY step
        """,
    )


def _drift(con: duckdb.DuckDBPyConnection, basis: Basis, kinds: Sequence[tuple[str, int | None]]) -> list[str]:
    """Say how much slower or faster the last steps of the heaviest kind were than the first, where that is much.

    Much is a change of the median by `WORTH`, and by more than the scatter of the steps lets a median vary: three times
    the interquartile range over the root of their number, on both sides.
    """
    name, kind = kinds[0]
    first, last = con.execute(
        f"""
        WITH wanted AS (
            SELECT self_ms, ntile(5) OVER (ORDER BY number) AS fifth FROM loop_rows
            WHERE status = 'ok' AND kind = {kind} AND {basis.condition}
        ), fifths AS (FROM range(1, 6) five(fifth) LEFT JOIN wanted USING (fifth))
        SELECT count(self_ms), quantile_cont(self_ms, 0.25), median(self_ms), quantile_cont(self_ms, 0.75)
        FROM fifths WHERE fifth IN (1, 5) GROUP BY fifth ORDER BY fifth
        """
    ).fetchall()
    if min(first[0], last[0]) < ENOUGH or not first[2]:
        return []
    times = last[2] / first[2]
    scatter = sum(3 * (high - low) / count**0.5 for count, low, _, high in (first, last))
    if abs(times - 1) < WORTH or abs(last[2] - first[2]) < scatter:
        return []
    of = f"the steps called {name!r}" if len(kinds) > 1 else "the steps"
    return [f"The run drifts: the last fifth of {of} took {times:.2f} times as long as the first fifth, by the median."]


def _count(found: int | None) -> str:
    return f"{found:,}" if found else "none"


def _columns(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, list[Any]]:
    found = con.execute(query)
    names, rows = [name for name, *_ in found.description or ()], found.fetchall()
    return {name: [_short(row[place]) for row in rows] for place, name in enumerate(names)}


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _first(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    found = con.execute(query)
    return dict(zip((name for name, *_ in found.description or ()), found.fetchall()[0], strict=True))
