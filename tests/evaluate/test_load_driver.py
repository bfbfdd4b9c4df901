"""Schedules are drawn beforehand, and latencies count from the time due."""

from __future__ import annotations

import numpy as np
import pytest
from depth import deep

from xsp.errors import UsageError
from xsp.evaluate.load import Requests, VirtualClock, drive, latencies, schedules, simulate

MS = 1_000_000


def simulated(schedule: schedules.Schedule, took_ms: dict[int, float], usual_ms: float = 1.0) -> Requests:
    clock = VirtualClock(5 * MS)
    return drive(schedule, lambda number, batch: clock.advance(round(took_ms.get(number, usual_ms) * MS)), clock=clock)


def test_equal_seeds_draw_equal_times_and_others_do_not() -> None:
    for draw in (schedules.poisson, schedules.server, lambda rate, n, seed: schedules.burst(rate, n, 4, seed)):
        one, other, third = draw(100, 500, 1), draw(100, 500, 1), draw(100, 500, 2)
        assert np.array_equal(one.due_ns, other.due_ns)
        assert not np.array_equal(one.due_ns, third.due_ns)
        assert (np.diff(one.due_ns) >= 0).all()


def test_a_poisson_schedule_has_its_rate_and_exponential_distances() -> None:
    due = schedules.poisson(200, 20_000, seed=3).due_ns
    between = np.diff(due) / 1e9
    assert between.mean() == pytest.approx(1 / 200, rel=0.03)
    assert between.std() == pytest.approx(between.mean(), rel=0.03)


def test_a_constant_schedule_does_not_drift() -> None:
    due = schedules.constant(3, 1_000_001).due_ns
    assert due[-1] == round(1_000_000 / 3 * 1e9)


def test_offline_has_all_inputs_at_once_and_the_rest_in_the_last_batch() -> None:
    schedule = schedules.offline(10, 4)
    assert schedule.batch.tolist() == [4, 4, 2]
    assert schedule.due_ns.tolist() == [0, 0, 0]


def test_bursts_come_together_at_the_rate_asked() -> None:
    schedule = schedules.burst(1000, 5000, burst_size=5, seed=0)
    assert len(schedule) == 5000
    assert (schedule.due_ns.reshape(-1, 5) == schedule.due_ns[::5, None]).all()
    assert schedule.due_ns[-1] / 1e9 == pytest.approx(5, rel=0.1)


def test_a_replay_sorts_its_times_and_keeps_each_batch_with_its_time() -> None:
    schedule = schedules.replay([7.0, 5.0, 6.5], [1, 2, 3], speed=2)
    assert schedule.due_ns.tolist() == [0, 750 * MS, 1000 * MS]
    assert schedule.batch.tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: schedules.poisson(0, 5),
        lambda: schedules.constant(float("inf"), 5),
        lambda: schedules.online(0),
        lambda: schedules.batched(5, 0),
        lambda: schedules.replay([]),
        lambda: schedules.replay([1.0, float("nan")]),
        lambda: schedules.replay([1.0], [1, 2]),
        lambda: schedules.replay([1.0], speed=0),
        lambda: schedules.replay([0.0, 1e12]),
        lambda: schedules.replay([-1e308, 1e308]),
        lambda: schedules.constant(1e-9, 50),
        lambda: schedules.constant(1e-310, 50),
        lambda: schedules.poisson(1e-11, 50),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_an_open_loop_counts_the_queue_from_the_time_due() -> None:
    found = simulated(schedules.constant(500, 6), {1: 5.0})
    assert (found.latency_ns / MS).tolist() == [1, 5, 4, 3, 2, 1]
    assert (found.service_ns / MS).tolist() == [1, 5, 1, 1, 1, 1]
    assert found.lateness_ns.tolist() == [0] * 6


def test_a_closed_loop_hides_a_stall_that_an_open_loop_shows() -> None:
    """A thousand requests a second, and one second in which nothing is served: one request of the closed loop sees
    it; of the open loop all that came in that second, whose latencies fall from 1 s to 1 ms."""
    open_loop = simulated(schedules.constant(1000, 10_000), {5000: 1000.0}, 0.1)
    closed = simulated(schedules.online(10_000), {5000: 1000.0}, 0.1)
    assert np.count_nonzero(closed.latency_ns > MS) == 1
    assert latencies.nearest_rank(closed.latency_ns, 0.999) == 0.1 * MS
    # the queue of 1,000 shrinks by 0.9 ms a request: 1,111 wait, the k-th of them 1000 - 0.9·k ms
    waited = open_loop.latency_ns[5000 : 5000 + 1111] / MS
    assert waited == pytest.approx(1000 - 0.9 * np.arange(1111), abs=1e-6)
    assert latencies.nearest_rank(open_loop.latency_ns, 0.99) / MS == pytest.approx(1000 - 0.9 * 100, abs=1)
    assert open_loop.stop_reason is None


def test_driving_and_simulating_agree() -> None:
    schedule = schedules.poisson(300, 400, seed=5)
    took = np.random.default_rng(1).exponential(2.5 * MS, 400).astype(np.int64)
    driven = simulated(schedule, dict(enumerate(took / MS)))
    counted = simulate(schedule, took)
    assert np.array_equal(driven.latency_ns, counted.latency_ns)
    assert np.array_equal(simulate(schedule, took, servers=2).service_ns, took)
    assert simulate(schedule, took, servers=2).waiting_ns.sum() < counted.waiting_ns.sum()


def test_a_queue_that_grows_without_bound_stops_the_run_and_says_why() -> None:
    found = simulated(schedules.poisson(1000, 100_000, seed=1), {}, usual_ms=1.2)
    assert found.stop_reason is not None
    assert "grows without bound" in found.stop_reason
    assert found.is_growing
    assert len(found) < 2000
    assert found.schedule_length == 100_000


@pytest.mark.parametrize("seed", [0, 1, *map(deep, range(2, 8))])
def test_a_queue_that_is_only_long_goes_on(seed: int) -> None:
    took = np.random.default_rng(seed).exponential(0.95, 20_000)
    found = simulated(schedules.poisson(1000, 20_000, seed=seed), dict(enumerate(took.tolist())))
    assert found.stop_reason is None
    assert not found.is_growing
    assert len(found) == 20_000


def test_real_time_serves_each_request_once_on_several_threads() -> None:
    served: list[int] = []
    found = drive(schedules.poisson(2000, 60, seed=1), lambda number, batch: served.append(number), servers=3)
    assert sorted(served) == list(range(60))
    assert (found.start_ns >= found.due_ns).all()
    assert (found.issued_ns >= found.due_ns).all()
    assert (found.end_ns >= found.start_ns).all()


def test_an_error_of_the_model_ends_the_run_and_is_raised() -> None:
    def serve(number: int, batch: int) -> None:
        if number == 3:
            raise RuntimeError("no memory")

    for servers in (1, 2):
        with pytest.raises(RuntimeError, match="no memory"):
            drive(schedules.constant(5000, 20), serve, servers=servers)
    with pytest.raises(UsageError, match="2 servers"):
        drive(schedules.online(3), serve, servers=2)


def test_a_run_ends_when_its_time_is_over() -> None:
    clock = VirtualClock()
    for schedule in (schedules.online(100), schedules.constant(100, 100)):
        found = drive(schedule, lambda number, batch: clock.advance(10 * MS), clock=clock, most_seconds=0.205)
        assert found.stop_reason == "the time limit was reached"
        assert 20 <= len(found) <= 22
