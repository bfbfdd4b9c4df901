"""Strata of iterations, and the weights of recorded ones, on loops whose truth is known."""

from __future__ import annotations

import random
from typing import Any

import duckdb
import pytest

from xsp.store.iterations import iterations
from xsp.store.loop import BARE
from xsp.store.strata import StratifiedTime, Stratum, strata, weights
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000


def loop(rows: list[dict[str, Any]]) -> duckdb.DuckDBPyConnection:
    return traced(rows).con


def traced(rows: list[dict[str, Any]]) -> Trace:
    return with_loop(trace_of(spans("step s 0-2000", step=0)), rows)


def program(recorded: set[int], slowdown: float = 1.0, times: int = 144, seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a loop: 5 ms, in each twelfth step 105 ms, after each fifteenth a save of 150 ms."""
    draw, rows = random.Random(seed), []
    for step in range(times):
        is_recorded = step in recorded
        dur_ns = (105 if step % 12 == 5 else 5) * MS * draw.uniform(0.97, 1.03) * (slowdown if is_recorded else 1.0)
        before_ns = 150.0 * MS if step and step % 15 == 0 else 0.1 * MS
        rows.append({"step": step, "dur_ns": dur_ns, "before_ns": before_ns, "rung": 40 if is_recorded else BARE})
    return rows


def weighted_share(found: list[Stratum], rows: list[dict[str, Any]]) -> float:
    """Return the share of the steps in the iterations, from the recorded rows with their weights."""
    weight = weights(found)
    own = [(weight[0, row["step"]], row) for row in rows if row["rung"] != BARE]
    steps_ns = sum(factor * row["dur_ns"] for factor, row in own)
    return steps_ns / sum(factor * (row["dur_ns"] + row["before_ns"]) for factor, row in own)


@pytest.mark.parametrize("slowdown", [1.0, 1.8])
def test_recordings_with_too_many_slow_iterations_give_the_shares_of_the_loop(slowdown: float) -> None:
    recorded = {5, 17, 29, 41, 53, *range(60, 72)}  # of 17: six long ones for 1.4, one save for 1.1
    rows = program(recorded, slowdown)
    found = strata(loop(rows))
    truth = program(set())
    truth_share = sum(row["dur_ns"] for row in truth) / sum(row["dur_ns"] + row["before_ns"] for row in truth)
    plain = [row for row in rows if row["rung"] != BARE]
    plain_share = sum(row["dur_ns"] for row in plain) / sum(row["dur_ns"] + row["before_ns"] for row in plain)
    assert len(found) == 3
    assert sum(stratum.iterations for stratum in found) == 144
    assert [len(stratum.recorded) for stratum in found] == [10, 6, 1]
    if slowdown == 1.0:
        assert weighted_share(found, rows) == pytest.approx(truth_share, abs=0.03)
        assert abs(plain_share - truth_share) > 0.1
    weight = weights(found)
    assert sum(weight.values()) == pytest.approx(len(recorded))
    assert weight[0, 61] > 1 > weight[0, 5]


def test_steps_and_the_time_before_them_have_strata_of_their_own() -> None:
    con = loop(program({5, 15, 17, 61}))
    usual, long = strata(con, StratifiedTime.STEP)
    assert (usual.iterations, long.iterations, long.recorded, long.period) == (132, 12, (5, 17), 12)
    assert weights([usual, long])[0, 5] == pytest.approx(12 / 144 / (2 / 4))
    short, saved = strata(con, StratifiedTime.BEFORE)
    assert (short.recorded, saved.recorded, saved.iterations, saved.period) == ((5, 17, 61), (15,), 9, 15)


def test_the_period_of_rare_iterations_is_known() -> None:
    usual, long, saved = strata(loop(program({5, 15})))
    assert (usual.period, long.period, saved.period) == (None, 12, 15)
    assert long.mean_ns == pytest.approx(105 * MS, rel=0.02)


def test_iterations_that_are_alike_are_one_stratum() -> None:
    draw = random.Random(1)
    rows = [{"step": step, "dur_ns": draw.lognormvariate(0, 0.25) * MS, "rung": BARE} for step in range(300)]
    rows += [{"step": 300 + step, "dur_ns": 1.2 * MS, "rung": 40} for step in range(5)]
    found = strata(loop(rows))
    assert max(stratum.iterations for stratum in found) >= 303
    assert weights(found)[0, 300] == pytest.approx(1, abs=0.02)


def test_a_few_iterations_are_not_divided_and_without_an_unrecorded_one_there_is_no_stratum() -> None:
    [found] = strata(loop([{"step": step, "dur_ns": 10**step * MS, "rung": BARE} for step in range(4)]))
    assert found.iterations == 4
    assert strata(loop([{"step": 0, "dur_ns": MS, "rung": 40}])) == []


def test_the_means_of_strata_close_with_the_iteration() -> None:
    trace = traced(program({7, 19, 33}))
    found = strata(trace.con)
    count = sum(stratum.iterations for stratum in found)
    mean_ns = sum(stratum.iterations * stratum.mean_ns for stratum in found) / count
    [own] = iterations(trace)
    assert own.mean_ns == pytest.approx(mean_ns, rel=0.05)
