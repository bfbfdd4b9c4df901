"""Steps of a trace that names none: the iterations of what repeats in it.

Who profiles a loop without marking its steps gets a trace of one long window. An optimizer's step ends an iteration of
training, else the end of a backward pass does. Without either, calls of a model or annotations that repeat one after
the other and fill most of the trace are iterations. Operators that repeat are no evidence: layers repeat, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from xsp import table
from xsp.importers.contract import Losses
from xsp.schema import Column, Kind, Level
from xsp.texts import counted

FEWEST_UPDATES, FEWEST_CALLS = 2, 3
"""Fewest iterations by optimizer steps or backward passes, and by calls or annotations."""

MIN_FILLED = 0.5
"""Least share of a trace's time on the host in the calls or annotations whose repetition makes iterations."""

_NODE = "autograd::engine::evaluate_function"
_ON_HOST = "device IS NULL AND thread IS NOT NULL"

Times = NDArray[np.int64]


def insert_steps(con: duckdb.DuckDBPyConnection, losses: Losses) -> bool:
    """Insert a step into `raw_spans` for each iteration that was found, with a note on what they are.

    The steps follow each other without a gap, on the thread of the iterations.

    Args:
        con: holds `raw_spans`, without steps.
        losses: gets the note.

    Returns:
        Whether any was found.
    """
    busiest = con.execute(
        f"SELECT process FROM raw_spans WHERE {_ON_HOST} GROUP BY process ORDER BY sum(dur_ns) DESC, 1 LIMIT 1"
    ).fetchall()
    if not busiest:
        return False
    process = busiest[0][0]
    found = _training(con, process) or _calls(con, process)
    if found is None:
        return False
    thread, bounds, what = found
    ((number,),) = con.execute("SELECT max(number) + 1 FROM raw_spans").fetchall()
    rows = [
        (number + place, int(start_ns), int(end_ns - start_ns))
        for place, (start_ns, end_ns) in enumerate(pairwise(bounds))
    ]
    table.create(con, "found_steps", _COLUMNS)
    table.insert(con, "found_steps", rows, _COLUMNS)
    con.execute(
        f"""
        INSERT INTO raw_spans BY NAME
        SELECT number, {int(Level.MODEL)} AS level, '{Kind.STEP}' AS kind, 'iteration' AS name, start_ns, dur_ns,
               ? AS process, ? AS thread, 'ok' AS status, (SELECT any_value(collector) FROM raw_spans) AS collector
        FROM found_steps
        """,
        [process, thread],
    )
    con.execute("DROP TABLE found_steps")
    losses.note(f"it names no steps: its {counted(len(rows), 'step')} end with {what}")
    return True


_COLUMNS = (Column("number", "BIGINT", ""), Column("start_ns", "BIGINT", ""), Column("dur_ns", "BIGINT", ""))

_Found = tuple[int, Sequence[int], str]
"""Thread of the iterations, the time at which each begins and the end of the last one, and what ends them."""


def _training(con: duckdb.DuckDBPyConnection, process: int | None) -> _Found | None:
    """Return the iterations of training: they end with the optimizers' last step, or with a backward pass."""
    nodes = _spans(con, process, f"starts_with(name, '{_NODE}')")
    updates = _spans(con, process, f"kind = '{Kind.OPTIMIZER}' AND NOT contains(name, 'zero_grad')")
    others = _spans(con, process, f"kind = '{Kind.OP}' AND NOT starts_with(name, '{_NODE}')")
    outside = ~_inside(others["start_ns"], nodes) & ~_inside(others["start_ns"], updates)
    if not outside.any():  # all of them in the optimizers' steps, as of closures
        outside = np.ones(len(others["start_ns"]), bool)
    threads, numbers = np.unique(others["thread"][outside], return_counts=True)
    if not len(threads):
        return None
    thread = threads[np.argmax(numbers)]
    between = others["start_ns"][outside & (others["thread"] == thread)]
    passes = _passes(nodes, between)
    own = ~_inside(updates["start_ns"], {"start_ns": passes[:, 0], "end_ns": passes[:, 1]})  # else hooks of a pass
    ends = updates["end_ns"][own]
    if len(ends):  # of those before the same pass, the last one counts; earlier versions of torch record no passes
        following = np.searchsorted(passes[:, 0] if len(passes) else between, ends)
        ends = ends[np.append(np.diff(following) > 0, True)]
    bounds = ends if len(ends) else passes[:, 1]
    cycle = _cycle(np.diff(np.searchsorted(others["start_ns"], bounds), prepend=0))
    bounds = bounds[cycle - 1 :: cycle]
    if len(bounds) < FEWEST_UPDATES:
        return None
    begin = min(int(between[0]), int(bounds[0]))
    return int(thread), [begin, *map(int, bounds)], "an optimizer's step" if len(ends) else "a backward pass"


LONGEST_CYCLE, MIN_ALIKE = 4, 0.8
"""Most updates that take turns in an iteration, as of a GAN, and least share of them that repeat in their turn."""


def _cycle(operators: Times) -> int:
    """Return how many updates take turns in an iteration, from the number of operators of each."""
    for cycle in range(1, LONGEST_CYCLE + 1):
        if len(operators) >= 2 * cycle and np.mean(operators[cycle:] == operators[:-cycle]) >= MIN_ALIKE:
            return cycle
    return 1


def _spans(con: duckdb.DuckDBPyConnection, process: int | None, condition: str) -> dict[str, Any]:
    """Return the starts, ends and threads of spans on the host, by start."""
    columns = con.execute(
        f"SELECT start_ns, start_ns + dur_ns AS end_ns, thread FROM raw_spans WHERE {_ON_HOST} "
        f"AND process IS NOT DISTINCT FROM ? AND {condition} ORDER BY start_ns",
        [process],
    ).fetchnumpy()
    return {name: np.asarray(column, np.int64) for name, column in columns.items()}


def _inside(times: Times, spans: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which times lie in any of the spans, which are ordered by start."""
    if not len(spans["start_ns"]):
        return np.zeros(len(times), bool)
    reached = np.maximum.accumulate(spans["end_ns"])
    last = np.searchsorted(spans["start_ns"], times, "right") - 1
    return (last >= 0) & (times < reached[np.maximum(last, 0)])


def _passes(nodes: dict[str, Any], between: Times) -> NDArray[np.int64]:
    """Return start and end of each backward pass: nodes of the graph without an operator of the loop in between."""
    if not len(nodes["start_ns"]):
        return np.zeros((0, 2), np.int64)
    reached = np.maximum.accumulate(nodes["end_ns"])
    before, after = np.searchsorted(between, reached[:-1]), np.searchsorted(between, nodes["start_ns"][1:])
    first = np.append(True, after > before)
    last = np.append(first[1:], True)
    return np.stack([nodes["start_ns"][first], reached[last]], axis=1)


def _calls(con: duckdb.DuckDBPyConnection, process: int | None) -> _Found | None:
    """Return the iterations of calls of models or of annotations, none inside another, that fill most of the trace."""
    rows = con.execute(
        f"""
        WITH host AS (
            SELECT *, start_ns + dur_ns AS end_ns FROM raw_spans
            WHERE {_ON_HOST} AND process IS NOT DISTINCT FROM ? AND kind IN ('{Kind.USER}', '{Kind.MODULE}')
        ), outermost AS (
            SELECT * FROM host QUALIFY end_ns > coalesce(max(end_ns) OVER (
                PARTITION BY thread ORDER BY start_ns, end_ns DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0)
        )
        SELECT thread, name, list(start_ns ORDER BY start_ns) AS starts, max(end_ns), sum(dur_ns)
        FROM outermost GROUP BY thread, name ORDER BY sum(dur_ns) DESC, name
        """,
        [process],
    ).fetchall()
    if not rows:
        return None
    thread, _, starts, *_ = rows[0]
    group = [row for row in rows if row[0] == thread and len(row[2]) == len(starts)]
    ((begin, end),) = con.execute(
        f"SELECT min(start_ns), max(start_ns + dur_ns) FROM raw_spans WHERE {_ON_HOST}"
    ).fetchall()
    filled_ns = sum(row[4] for row in group)
    if len(starts) < FEWEST_CALLS or filled_ns < MIN_FILLED * (end - begin):
        return None
    first = min(group, key=lambda row: int(row[2][0]))
    return int(thread), [*first[2], max(row[3] for row in group)], f"the call before the next {first[1]}"
