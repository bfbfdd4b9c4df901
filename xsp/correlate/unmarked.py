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

from xsp.importers.contract import Losses
from xsp.schema import Kind, Level
from xsp.texts import counted

FEWEST_UPDATES, FEWEST_CALLS = 2, 3
"""Fewest iterations by optimizer steps or backward passes, and by calls or annotations."""

MIN_FILLED = 0.5
"""Least share of a trace's time on the host in the calls or annotations whose repetition makes iterations."""

_NODE = "autograd::engine::evaluate_function"
_NODES, _UPDATES, _OTHERS = range(3)
"""Nodes of a backward pass, optimizers' steps, and other operators."""

_ON_HOST = "device IS NULL AND thread IS NOT NULL"
_PROCESS = (
    f"(SELECT process FROM raw_spans WHERE {_ON_HOST} GROUP BY process ORDER BY sum(dur_ns) DESC, process LIMIT 1)"
)
"""The process with most time on the host, as SQL."""

Times = NDArray[np.int64]


def insert_steps(con: duckdb.DuckDBPyConnection, losses: Losses) -> bool:
    """Insert a step into `raw_spans` for each iteration that was found, with a note on what they are.

    The steps follow each other without a gap, on the thread of the iterations, in the process with most time.

    Args:
        con: holds `raw_spans`, without steps.
        losses: gets the note.

    Returns:
        Whether any was found.
    """
    found = _training(con) or _calls(con)
    if found is None:
        return False
    thread, bounds, what = found
    con.execute(
        f"""
        INSERT INTO raw_spans BY NAME
        SELECT (SELECT max(number) FROM raw_spans) + row_number() OVER (ORDER BY start_ns) AS number,
               {int(Level.MODEL)} AS level, '{Kind.STEP}' AS kind, 'iteration' AS name, start_ns, dur_ns,
               {_PROCESS} AS process, ? AS thread, 'ok' AS status,
               (SELECT any_value(collector) FROM raw_spans) AS collector
        FROM (SELECT unnest(?::BIGINT[]) AS start_ns, unnest(?::BIGINT[]) AS dur_ns)
        """,
        [thread, [*bounds[:-1]], [end_ns - start_ns for start_ns, end_ns in pairwise(bounds)]],
    )
    losses.note(f"it names no steps: its {counted(len(bounds) - 1, 'step')} end with {what}")
    return True


_Found = tuple[int, Sequence[int], str]
"""Thread of the iterations, the time at which each begins and the end of the last one, and what ends them."""


def _training(con: duckdb.DuckDBPyConnection) -> _Found | None:
    """Return the iterations of training: they end with the optimizers' last step, or with a backward pass."""
    columns = con.execute(
        f"""
        SELECT start_ns, start_ns + dur_ns AS end_ns, thread,
               CASE WHEN starts_with(name, '{_NODE}') THEN {_NODES} WHEN kind = '{Kind.OP}' THEN {_OTHERS}
                    WHEN NOT contains(name, 'zero_grad') THEN {_UPDATES} END AS role
        FROM raw_spans
        WHERE {_ON_HOST} AND kind IN ('{Kind.OP}', '{Kind.OPTIMIZER}') AND process IS NOT DISTINCT FROM {_PROCESS}
          AND EXISTS (SELECT 1 FROM raw_spans WHERE starts_with(name, '{_NODE}') OR kind = '{Kind.OPTIMIZER}')
        ORDER BY start_ns
        """
    ).fetchnumpy()
    role = np.ma.filled(columns.pop("role"), -1)
    nodes, updates, others = (
        {name: np.asarray(column, np.int64)[role == each] for name, column in columns.items()}
        for each in (_NODES, _UPDATES, _OTHERS)
    )
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


def _calls(con: duckdb.DuckDBPyConnection) -> _Found | None:
    """Return the iterations of calls of models or of annotations, none inside another, that fill most of the trace."""
    rows = con.execute(
        f"""
        WITH host AS (
            SELECT *, start_ns + dur_ns AS end_ns FROM raw_spans
            WHERE {_ON_HOST} AND process IS NOT DISTINCT FROM {_PROCESS}
        ), outermost AS (
            SELECT * FROM host WHERE kind IN ('{Kind.USER}', '{Kind.MODULE}')
            QUALIFY end_ns > coalesce(max(end_ns) OVER (
                PARTITION BY thread ORDER BY start_ns, end_ns DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0)
        )
        SELECT thread, name, list(start_ns ORDER BY start_ns), max(end_ns), sum(dur_ns),
               (SELECT max(end_ns) - min(start_ns) FROM host)
        FROM outermost GROUP BY thread, name ORDER BY sum(dur_ns) DESC, name
        """
    ).fetchall()
    if not rows:
        return None
    thread, _, starts, _, _, whole_ns = rows[0]
    group = [row for row in rows if row[0] == thread and len(row[2]) == len(starts)]
    if len(starts) < FEWEST_CALLS or sum(row[4] for row in group) < MIN_FILLED * whole_ns:
        return None
    first = min(group, key=lambda row: int(row[2][0]))
    return int(thread), [*first[2], max(row[3] for row in group)], f"the call before the next {first[1]}"
