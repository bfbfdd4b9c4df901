"""How often a comparison is wrong, and what it finds: figures drawn with a known change, between runs and within."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from depth import deep

from xsp.comparison import evidence
from xsp.comparison.evidence import ALPHA, BY_PAIRS, BY_RANKS, BY_YUEN, NO_EVIDENCE, RUNS, SLOWER, STEPS, Repeats
from xsp.comparison.series import RowTimes, figure

STEPS_OF_A_RUN = 12
WITHIN = 0.03
"""Standard deviation of the steps of a run."""

Noise = Callable[[random.Random], float]


def quiet(draw: random.Random) -> float:
    """Return by how much a start differs from others."""
    return draw.gauss(0, 0.02)


def disturbed(draw: random.Random) -> float:
    """Likewise, where a neighbour slows one run in ten by a sixth."""
    return draw.gauss(0, 0.015) + (0.15 if draw.random() < 0.1 else 0)


def start(draw: random.Random, noise: Noise, mean: float = 1.0, drift: float = 0.0) -> list[float]:
    """Return the steps of a run."""
    own = mean * (1 + drift + noise(draw))
    return [own * (1 + draw.gauss(0, WITHIN)) for _ in range(STEPS_OF_A_RUN)]


def told(draw: random.Random, noise: Noise, change: float = 0.0) -> float:
    return figure(RowTimes(None, "step", None, start(draw, noise, 1 + change)))


def courses(many: int, most: int, change: float, noise: Noise, drift: float = 0.0) -> tuple[float, float]:
    """Return the share of courses of turns in which a change was found, and the mean of their turns."""
    how, found, turns = evidence.turn_repeats(most), 0, 0
    for seed in range(many):
        draw = random.Random(seed)
        a: list[float] = []
        b: list[float] = []
        for turn in range(1, most + 1):
            slow = 1 + drift * turn
            a.append(slow * told(draw, noise))
            b.append(slow * told(draw, noise, change))
            if turn >= evidence.MIN_TURNS and (evidence.compare_turn(how, a, b).is_enough or turn == most):
                found += verdict(how, a, b) != NO_EVIDENCE
                turns += turn
                break
    return found / many, turns / many


def verdict(how: Repeats, a: list[float], b: list[float]) -> str:
    evidence = how.evidence(a, b)
    return how.verdict(evidence, how.adjusted([evidence.p])[0], len(a))


@pytest.mark.slow
@pytest.mark.parametrize("runs", [deep(2), deep(3), 5, deep(10)])
def test_of_one_program_in_several_runs_at_most_one_comparison_in_twenty_finds_a_change(runs: int) -> None:
    draw = random.Random(runs)
    false = sum(
        verdict(RUNS, [told(draw, quiet) for _ in range(runs)], [told(draw, quiet) for _ in range(runs)]) != NO_EVIDENCE
        for _ in range(1000)
    )
    assert 5 <= false <= 65


def loaded(draw: random.Random) -> float:
    """Return by how much a start differs from others on a machine where one run in five is half as long again."""
    return draw.gauss(0, 0.02) + (0.5 if draw.random() < 0.2 else 0)


@pytest.mark.parametrize("noise", [quiet, disturbed, loaded], ids=["quiet", "disturbed", "loaded"])
@pytest.mark.parametrize(("n", "m"), [(4, 4), deep(3, 8), deep(5, 5), deep(6, 6), deep(10, 10)])
def test_of_runs_that_are_alike_at_most_one_comparison_in_twenty_finds_a_change(n: int, m: int, noise: Noise) -> None:
    """Two tests are made of few runs, and together they raise no more false alarms than one."""
    draw = random.Random(100 * n + m)
    false = sum(
        verdict(RUNS, [1 + noise(draw) for _ in range(n)], [1 + noise(draw) for _ in range(m)]) != NO_EVIDENCE
        for _ in range(800)
    )
    assert false / 800 <= 0.065


def test_ranks_find_a_change_of_ten_percent_between_runs_of_a_loaded_machine() -> None:
    draw = random.Random(0)
    found = by_yuen = 0
    for _ in range(300):
        a, b = ([1 + loaded(draw) for _ in range(10)] for _ in range(2))
        b = [1.1 * each for each in b]
        found += verdict(RUNS, a, b) == SLOWER
        by_yuen += verdict(evidence.in_turns(1, ALPHA), a, b) == SLOWER
    assert found / 300 > 0.65 > 0.6 > by_yuen / 300


def test_four_clear_runs_a_side_of_which_one_was_disturbed_are_told_by_ranks() -> None:
    a, b = [1.00, 1.01, 0.99, 1.02], [1.10, 1.11, 1.09, 2.40]
    found = RUNS.evidence(a, b)
    assert (verdict(RUNS, a, b), found.test) == (SLOWER, BY_RANKS)
    assert 0 < (found.low or 0) < 0.12
    assert verdict(evidence.in_turns(1, ALPHA), a, b) == NO_EVIDENCE


def test_three_runs_a_side_are_too_few_for_ranks() -> None:
    assert RUNS.evidence([1.0, 1.01, 0.99], [1.1, 1.11, 1.09]).test == BY_YUEN


def test_what_one_run_a_side_would_say_of_them() -> None:
    """Why several runs are needed: the steps of two starts of one program differ for certain, in many pairs."""
    draw = random.Random(0)
    said = [verdict(STEPS, start(draw, quiet), start(draw, quiet)) for _ in range(200)]
    assert sum(word != NO_EVIDENCE for word in said) > 50
    assert SLOWER not in said


def skewed(draw: random.Random) -> float:
    return draw.lognormvariate(0, 0.3)


def stolen(draw: random.Random) -> float:
    """Return a step of a loaded machine, where one in five waits for its core."""
    return draw.gauss(1, WITHIN) + (1 if draw.random() < 0.2 else 0)


@pytest.mark.parametrize(
    "noise", [lambda draw: draw.gauss(1, WITHIN), skewed, stolen], ids=["even", "skewed", "stolen"]
)
@pytest.mark.parametrize(("n", "m"), [(3, 3), deep(3, 5), deep(4, 4), (5, 12), deep(6, 6), deep(12, 12)])
def test_of_steps_that_are_alike_at_most_one_row_in_twenty_differs(n: int, m: int, noise: Noise) -> None:
    """Two tests are made of few steps, and together they raise no more false alarms than one."""
    draw = random.Random(n * m)
    false = sum(
        verdict(STEPS, [noise(draw) for _ in range(n)], [noise(draw) for _ in range(m)]) != NO_EVIDENCE
        for _ in range(800)
    )
    assert false / 800 <= 0.065


def test_a_step_that_became_a_fifth_longer_is_found_on_a_loaded_machine() -> None:
    draw = random.Random(0)
    found = sum(
        verdict(STEPS, [stolen(draw) for _ in range(12)], [0.2 + stolen(draw) for _ in range(12)]) != NO_EVIDENCE
        for _ in range(300)
    )
    assert found / 300 > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("most", [deep(3), 5, deep(10), deep(20)])
def test_of_one_program_in_turns_at_most_one_course_in_twenty_finds_a_change_in_any_look(most: int) -> None:
    found, turns = courses(600, most, 0.0, quiet)
    assert 0.005 <= found <= 0.065
    assert turns > 0.9 * most


def test_in_turns_a_change_is_found_on_a_machine_that_drifts() -> None:
    """What slows both runs of a turn is in no difference within turns; for the test of all runs it is noise."""
    how, found, by_all = evidence.turn_repeats(10), 0, 0
    for seed in range(200):
        draw = random.Random(seed)
        slow = [1 + draw.gauss(0, 0.08) for _ in range(10)]
        a = [each * told(draw, quiet) for each in slow]
        b = [each * told(draw, quiet, 0.05) for each in slow]
        found += verdict(how, a, b) == SLOWER
        by_all += verdict(RUNS, a, b) == SLOWER
    assert found / 200 > 0.5 > 0.3 > by_all / 200
    assert how.evidence(a, b).test == BY_PAIRS


def test_turns_of_which_one_lacks_a_run_are_tested_without_pairs() -> None:
    a, b = [1.0, 1.01, 0.99, 1.02], [1.2, 1.21, 1.19]
    assert evidence.turn_repeats(5).evidence(a, b).test == BY_YUEN


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "drift"), [(disturbed, 0.0), deep(quiet, 0.02)])
def test_neither_neighbours_nor_a_drift_make_more_false_alarms(noise: Noise, drift: float) -> None:
    assert courses(400, 10, 0.0, noise, drift)[0] <= 0.065


@pytest.mark.slow
def test_a_step_that_is_five_percent_slower_is_found_in_turns_nine_times_out_of_ten() -> None:
    found, turns = courses(300, 10, 0.05, quiet)
    assert found >= 0.9
    assert turns < 8  # it stops when it knows


@pytest.mark.slow
def test_a_step_that_is_five_percent_slower_is_found_beside_neighbours_too() -> None:
    assert courses(200, 20, 0.05, disturbed)[0] >= 0.9


@pytest.mark.slow
def test_the_turns_that_are_recommended_find_five_percent_where_starts_differ_by_more_and_raise_no_more_alarms() -> (
    None
):
    def shared(many: int, change: float) -> tuple[int, int]:
        """Return in how many courses a change was found, on a machine that slows both runs of a turn alike too."""
        how, said, found = evidence.turn_repeats(evidence.USUAL_TURNS), 0, 0
        for seed in range(many):
            draw, a, b = random.Random(seed), [], []
            for turn in range(1, evidence.USUAL_TURNS + 1):
                slow = 1 + draw.gauss(0, 0.025)
                a.append(slow * (1 + quiet(draw)))
                b.append(slow * (1 + quiet(draw)) * (1 + change))
                if turn >= evidence.MIN_TURNS and (
                    evidence.compare_turn(how, a, b).is_enough or turn == evidence.USUAL_TURNS
                ):
                    said += verdict(how, a, b) != NO_EVIDENCE
                    found += verdict(how, a, b) == SLOWER
                    break
        return said, found

    assert shared(200, 0.0)[0] <= 0.05 * 200
    assert shared(150, 0.05)[1] >= 0.9 * 150


def test_a_large_change_is_known_after_the_first_look() -> None:
    assert courses(50, 10, 0.5, quiet) == (1.0, evidence.MIN_TURNS)


def test_the_change_that_would_have_been_found_is_found_four_times_out_of_five() -> None:
    draw = random.Random(4)
    for runs in (4, 10):
        smallest, found = [], 0
        for _ in range(200):
            a, b = ([told(draw, quiet) for _ in range(runs)] for _ in range(2))
            smallest.append(RUNS.evidence(a, b).detectable or 0)
        change = sorted(smallest)[100]
        for _ in range(300):
            a, b = ([told(draw, quiet, of) for _ in range(runs)] for of in (0, change))
            found += verdict(RUNS, a, b) == SLOWER
        assert 0.65 <= found / 300 <= 0.92


def test_with_a_threshold_it_stops_when_it_knows_the_side() -> None:
    how = evidence.turn_repeats(20)
    a = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99]
    clear = [each * 1.06 for each in a]
    assert evidence.compare_turn(how, a, clear).is_enough
    assert not evidence.compare_turn(how, a, clear, threshold=0.06).is_enough
    assert evidence.compare_turn(how, a, clear, threshold=0.12).is_enough
    assert evidence.compare_turn(how, a, clear, threshold=0.02).is_enough


def test_a_number_of_turns_that_can_tell_nothing_is_refused() -> None:
    with pytest.raises(evidence.UsageError, match="at least 3"):
        evidence.turn_repeats(2)
    assert evidence.turn_repeats(9).level == evidence.LOOK_LEVELS[10]
