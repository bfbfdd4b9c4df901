"""What latencies say, and the search of the highest rate, against queues whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from queues import SERVICE_MS, md1_rate, md1_waiting_within

from xsp.errors import UsageError
from xsp.evaluate.load import Requests, VirtualClock, latencies, schedules, search, simulate
from xsp.evaluate.load.search import LimitStatus, SearchResult

MS = 1_000_000
REQUESTS = 12_000


def one_server(rate: float, seed: int, exponential: bool, requests: int = REQUESTS) -> Requests:
    draw = np.random.default_rng([seed, 1])
    service = draw.exponential(SERVICE_MS * MS, requests) if exponential else np.full(requests, SERVICE_MS * MS)
    return simulate(schedules.poisson(rate, requests, seed), service.astype(np.int64))


def mm1_rate(limit_ms: float, share: float) -> float:
    """Of M/M/1 the time in the system is exponential, with the rate μ − λ."""
    return 1000 * (1 / SERVICE_MS + math.log(1 - share) / limit_ms)


def searched(exponential: bool, limit_ms: float, share: float, first: float, seed: int = 0) -> SearchResult:
    return search.highest_rate(
        lambda rate, each: one_server(rate, each, exponential), round(limit_ms * MS), share, first, seed=seed
    )


@pytest.mark.parametrize(
    ("limit_ms", "share", "first", "seed"),
    [(20, 0.99, 100, 0), (40, 0.99, 30, 100), (10, 0.9, 3000, 200), (5, 0.5, 500, 300), (30, 0.95, 1, 400)],
)
def test_the_rate_of_exponential_service_is_found_within_five_percent(limit_ms, share, first, seed) -> None:
    found, truth = searched(True, limit_ms, share, first, seed), mm1_rate(limit_ms, share)
    assert len(found.probes) <= 15
    assert found.estimate == pytest.approx(truth, rel=0.05)
    assert found.low is not None
    assert found.high is not None
    assert found.low * 0.98 <= truth <= found.high * 1.02


@pytest.mark.parametrize(
    ("limit_ms", "share", "first", "seed"), [(10, 0.99, 100, 0), (20, 0.99, 2000, 100), (4, 0.9, 50, 200)]
)
def test_the_rate_of_constant_service_is_found_within_five_percent(limit_ms, share, first, seed) -> None:
    found, truth = searched(False, limit_ms, share, first, seed), md1_rate(limit_ms, share)
    assert len(found.probes) <= 15
    assert found.estimate == pytest.approx(truth, rel=0.05)


def test_the_formula_of_constant_service_has_the_mean_of_pollaczek_and_khinchine() -> None:
    run = one_server(700, 3, exponential=False, requests=200_000)
    waits = run.waiting_ns / MS
    for whole in (1, 3, 6):
        assert (waits <= whole).mean() == pytest.approx(md1_waiting_within(700, whole), abs=0.01)
    assert waits.mean() == pytest.approx(0.7 / (2 * 0.3), rel=0.05)


def test_a_function_is_driven_to_its_limit() -> None:
    clock, rates = VirtualClock(), []
    found, at_the_limit = search.drive_to_limit(
        lambda number, batch: clock.advance(MS), 4 * MS, 0.9, requests=1200, clock=clock,
        on_run=lambda rate, runs: rates.append(rate),
    )  # fmt: skip
    assert rates[0] == 250
    assert found.estimate == pytest.approx(md1_rate(4, 0.9), rel=0.05)
    assert latencies.nearest_rank(at_the_limit.latency_ns, 0.9) <= 4 * MS
    assert search.least_requests(0.99) == 1112


def test_equal_seeds_make_equal_searches() -> None:
    assert searched(True, 20, 0.99, 100) == searched(True, 20, 0.99, 100)


def test_near_the_rate_a_probe_is_undecided_and_the_interval_says_so() -> None:
    truth = mm1_rate(20, 0.99)
    found = search.highest_rate(
        lambda rate, seed: one_server(rate, seed, True, 2000), 20 * MS, 0.99, truth, most_runs=2, most_probes=15
    )
    undecided = [each for each in found.probes if each.status is LimitStatus.UNDECIDED]
    assert undecided
    assert all(each.runs == 2 for each in undecided)
    assert found.low is not None
    assert found.high is not None
    assert found.low < truth < found.high


def test_a_limit_that_no_rate_holds_has_no_lower_end_and_one_that_all_hold_no_upper_one() -> None:
    never = searched(False, 0.5, 0.99, 10)
    assert (never.low, never.estimate, len(never.probes)) == (None, None, 15)
    always = search.highest_rate(lambda rate, seed: one_server(10, seed, False), 50 * MS, most_probes=6)
    assert (always.low, always.high, always.end_reason) == (32, None, "6 probes were made")
    with pytest.raises(UsageError):
        searched(False, 0.0, 0.99, 10)


def test_too_few_requests_for_a_percentile_decide_nothing_by_its_upper_end() -> None:
    found = search.highest_rate(lambda rate, seed: one_server(10, seed, False, 50), 5 * MS, most_probes=1, most_runs=3)
    assert found.probes[0].status is LimitStatus.UNDECIDED
    assert found.probes[0].high_ns is None


# --- latencies ---------------------------------------------------------------------------------------------------


def test_a_percentile_is_the_nearest_rank() -> None:
    values = np.arange(1, 101)[::-1].copy()
    assert [latencies.nearest_rank(values, share) for share in (0.01, 0.07, 0.5, 0.9, 0.99, 0.999, 1.0)] == [
        1, 7, 50, 90, 99, 100, 100,
    ]  # fmt: skip
    assert latencies.nearest_rank(np.array([5]), 0.01) == 5
    with pytest.raises(UsageError):
        latencies.nearest_rank(np.array([], np.int64), 0.5)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_intervals_cover_the_truth_of_independent_values(share: float) -> None:
    draw, truth = np.random.default_rng(1), -math.log(1 - share) * MS
    found = [latencies.of_percentile(draw.exponential(MS, 1000).astype(np.int64), share) for _ in range(200)]
    covered = sum((each.low_ns or 0) <= truth <= (each.high_ns or math.inf) for each in found)
    assert covered >= 184


def test_intervals_hold_that_neighbours_in_a_queue_wait_alike() -> None:
    truth = math.log(2) / (1000 - 800) * 1000 * MS
    runs = [latencies.of_percentile(one_server(800, seed, True).latency_ns[1000:], 0.5) for seed in range(40)]
    assert sum((each.low_ns or 0) <= truth <= (each.high_ns or math.inf) for each in runs) >= 34


def test_few_requests_bound_no_high_percentile() -> None:
    found = latencies.of_percentile(np.arange(50), 0.99)
    assert found.value_ns == 49
    assert found.high_ns is None


def test_a_summary_holds_the_laws_of_queues() -> None:
    found = latencies.summarise(one_server(500, 2, True, 50_000), poisson=True)
    assert found.little is not None
    assert found.little.ratio == pytest.approx(1, abs=0.01)
    assert found.utilisation == pytest.approx(0.5, rel=0.05)
    assert found.expected_waiting_ns == pytest.approx(found.waiting_ns, rel=0.1)
    assert found.waiting_ns == pytest.approx(MS, rel=0.1)
    assert found.inputs_per_second == pytest.approx(500, rel=0.03)
    assert found.percentile(0.99).value_ns == pytest.approx(-math.log(0.01) * 2 * MS, rel=0.1)
    assert not found.is_late
    with pytest.raises(UsageError, match="was not requested"):
        found.percentile(0.42)


def test_littles_law_shows_a_queue_that_grows() -> None:
    found = latencies.summarise(one_server(1300, 2, True, 20_000), poisson=True)
    assert found.little is not None
    assert found.little.ratio < 0.9
    assert found.expected_waiting_ns is None


def test_a_generator_that_is_late_marks_the_run() -> None:
    due = np.arange(100) * 10 * MS
    ends = due + 5 * MS
    for late_ns, marked in ((int(0.04 * MS), False), (int(0.2 * MS), True)):
        issued = due + late_ns
        run = Requests(due, issued, issued, ends, np.ones(100, np.int64))
        found = latencies.summarise(run)
        assert found.is_late is marked
        assert found.lateness_ns[1].value_ns == late_ns


def test_nothing_to_summarise_is_said() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(UsageError, match="no request ended: the time limit was reached"):
        latencies.summarise(Requests(none, none, none, none, none, stop_reason="the time limit was reached"))
    assert latencies.summarise(simulate(schedules.offline(6, 2), np.full(3, MS))).little is None


def test_a_search_does_not_wait_for_rates_at_which_nothing_waits() -> None:
    clock = VirtualClock()
    found, kept = search.drive_to_limit(
        lambda number, inputs: clock.advance((9 if number % 20 == 19 else 1) * MS), 5 * MS, 0.99, clock=clock
    )
    assert found.low is None
    assert "hardly any request waits" in found.end_reason
    assert len(found.probes) <= 4
    assert len(kept)
