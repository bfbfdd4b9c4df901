"""Fabricated jobs with a slow rank and wrong clocks: from one trace the step of 64 ranks, and who is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import rank_traces

import xsp
from xsp.predict import prediction, recorded, scaling
from xsp.predict.collectives import Algorithm, Link
from xsp.predict.training import Job, Straggler

SLOW, FACTOR = 3, 1.5
TAKES_S = rank_traces.Job.kernel_ns / 1e9
"""What each collective of the generator takes once all ranks are there, whatever their number."""


def link(ranks: int) -> Link:
    """Return the link over which a ring takes that long."""
    return Link("fabricated", 0.0, TAKES_S / (2 * (ranks - 1) / ranks * 4 * rank_traces.ELEMENTS))


def made(place: Path, ranks: int, slow: dict[int, float], steps: int = 3) -> xsp.Trace:
    rank_traces.write(place, rank_traces.Job(ranks, steps, 4, 4, group=0, stragglers=slow, seed=5))
    return xsp.load(place / "traces")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> recorded.RecordedStep:
    """Return the step of a job of 8 ranks of which none is slow."""
    return recorded.of(made(tmp_path_factory.mktemp("healthy"), 8, {}))


def step_of(trace: xsp.Trace) -> float:
    """Return the mean step of a job, as its ranks' clocks show it."""
    ((mean,),) = trace.sql("SELECT avg(dur_ns) / 1e9 FROM spans WHERE kind = 'step'").fetchall()
    return float(mean)


def check(healthy: recorded.RecordedStep, place: Path, ranks: int, steps: int) -> None:
    """Hold the prediction from 8 healthy ranks against a job with a slow one, and who that job says is slow."""
    alike = made(place / "alike", ranks, {}, steps)
    job = Job(ranks, link(ranks), Algorithm.RING, plan=healthy.plan)
    fast = scaling.of(healthy, job, [ranks]).points[0].predicted
    assert fast.step == pytest.approx(step_of(alike), rel=0.02)
    assert fast.parts[prediction.EXPOSED] == pytest.approx(TAKES_S, rel=0.02)  # the last one, with nothing beside it
    trace = made(place / "slow", ranks, {SLOW: FACTOR}, steps)
    found = recorded.of(trace)
    named = [each for each in found.sources if each.startswith("slow rank: ")]
    assert [each.split()[3] for each in named] == [str(SLOW)]
    factor = float(named[0].partition("--straggler ")[2].split()[0])
    assert factor == pytest.approx(FACTOR, rel=0.02)
    point = scaling.of(healthy, Job(ranks, link(ranks), Algorithm.RING, plan=healthy.plan,
                                    straggler=Straggler(factor)), [ranks]).points[0].predicted  # fmt: skip
    assert point.step == pytest.approx(step_of(trace), rel=0.02)
    truth = (step_of(trace) - step_of(alike)) * (ranks - 1) / ranks  # the slow rank itself waits for nobody
    assert point.parts[prediction.WAITING] == pytest.approx(truth, abs=0.02 * point.step)
    without = scaling.of(found, job, [ranks]).points[0].predicted
    assert without.step == pytest.approx(fast.step, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(8, 3), (64, 2)])
def test_many_ranks_with_a_slow_one_take_what_is_predicted_from_eight_healthy_ones(
    healthy: recorded.RecordedStep, tmp_path: Path, ranks: int, steps: int
) -> None:
    assert not [each for each in healthy.sources if each.startswith("slow rank")]
    check(healthy, tmp_path, ranks, steps)


@pytest.mark.slow
def test_what_a_rank_waits_for_a_slow_one_is_none_of_its_own_work_to_the_last_step(tmp_path: Path) -> None:
    found = recorded.of(made(tmp_path, 2, {1: FACTOR}, 2))
    assert [each.partition(" came")[0] for each in found.sources if "slow" in each] == ["slow rank: rank 1"]
    own = sum(each.forward + each.backward for each in found.work.layers)
    assert own == pytest.approx(3 * 4 * 4 * rank_traces.Job.kernel_ns / 1e9, rel=0.05)
    assert found.work.other < 0.02 * found.step
