"""Statistics of measurements: intervals, trimmed means, Student's t, rank tests."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple

import pytest

from xsp import stats
from xsp.stats import (
    MIN_NORMAL_VALUES,
    Interval,
    drifting_interval,
    interval,
    mean_interval,
    of_equal_weight,
    p_value,
    percentile,
    product_interval,
    rank_test,
    student,
    trimmed_mean,
    yuen_error,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),  # the mean of one
        ([1.0, 4.0], 2.5),  # and of two
        ([1.0, 2.0, 90.0], 2.0),  # the median of three
        ([1.0, 2.0, 3.0, 90.0], 24.0),  # ⌊0.2·4⌋ = 0: all four count
        ([0.0, 2.0, 3.0, 4.0, 90.0], 3.0),  # one dropped at each end
        ([0.0, 2.0, 3.0, 4.0, 5.0, 90.0], 3.5),
    ],
)
def test_trimmed_mean_by_its_definition_and_its_edge_cases(values: list[float], expected: float) -> None:
    assert trimmed_mean(values) == expected
    assert trimmed_mean(values[::-1]) == expected


def test_two_outliers_of_ten_at_each_end_do_not_count() -> None:
    assert trimmed_mean([-1e9, -1e9, 1, 2, 3, 4, 5, 6, 1e9, 1e9]) == 3.5


def test_percentiles_interpolate_between_order_statistics() -> None:
    values = [40.0, 10.0, 30.0, 20.0, 50.0]
    assert [percentile(values, share) for share in (0, 0.5, 0.9, 1)] == [10, 30, 46, 50]
    assert percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize("seed", range(20))
def test_a_weighted_percentile_is_that_of_values_repeated_as_often(seed: int) -> None:
    draw = random.Random(seed)
    values, weights = [draw.gauss(100, 5) for _ in range(9)], [draw.randint(1, 40) for _ in range(9)]
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share, weights) == pytest.approx(percentile(repeated, share))
    assert percentile(values, 0.5, [7] * 9) == percentile(values, 0.5)


def test_a_series_of_unequal_weight_becomes_means_of_parts_of_equal_weight() -> None:
    assert of_equal_weight([3.0, 1.0, 2.0], [5, 5, 5]) == [3.0, 1.0, 2.0]
    assert of_equal_weight([], []) == []
    assert of_equal_weight([1.0, 9.0], [1, 1000]) == pytest.approx([9001 / 1001])
    assert of_equal_weight([1.0, 3.0, 5.0], [2, 2, 4]) == pytest.approx([2.0, 5.0]), "64 // 24 parts of 4"
    draw = random.Random(1)
    values, weights = [draw.gauss(100, 5) for _ in range(300)], [draw.choice((1, 50)) for _ in range(300)]
    parts = of_equal_weight(values, weights)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    assert statistics.fmean(parts) == pytest.approx(mean)
    assert len(parts) == sum(weights) ** 2 // sum(weight**2 for weight in weights)


@pytest.mark.parametrize("question", [trimmed_mean, lambda values: percentile(values, 0.5)])
def test_of_no_values_there_is_no_figure(question: object) -> None:
    with pytest.raises(ValueError, match="no values"):
        question([])  # type: ignore[operator]


def values_of(bounds: Interval | None) -> tuple[float, ...]:
    assert bounds is not None
    return astuple(bounds)


def test_fewer_than_three_values_have_no_interval_and_equal_ones_a_narrow_one() -> None:
    assert interval([1.0, 2.0]) is None
    assert values_of(interval([5.0, 5.0, 5.0])) == pytest.approx((5.0, 5.0, 5.0))


@pytest.mark.parametrize("n", [7, 30, MIN_NORMAL_VALUES + 1])
def test_an_interval_depends_on_the_values_alone(n: int) -> None:
    values = [random.Random(n).gauss(100, 5) for _ in range(n)]
    shuffled = random.Random(1).sample(values, k=n)
    state = random.getstate()
    assert interval(values) == interval(shuffled)
    assert random.getstate() == state, "the program's own random numbers are left alone"
    ends = interval([3 * value + 7 for value in values])
    assert values_of(ends) == pytest.approx([3 * end + 7 for end in values_of(interval(values))])


@pytest.mark.parametrize(("n", "at_least"), [(10, 0.83), (25, 0.89), (MIN_NORMAL_VALUES, 0.91)])
def test_the_interval_holds_the_true_mean_about_as_often_as_it_says(n: int, at_least: float) -> None:
    draw = random.Random(42)
    covered = 0
    for _ in range(300):
        ends = interval([draw.gauss(1000, 50) for _ in range(n)])
        assert ends is not None
        covered += ends.low <= 1000 <= ends.high
    assert at_least <= covered / 300 <= 0.99


def test_many_values_continue_the_bootstrap_without_a_jump() -> None:
    widths = []
    for n in (MIN_NORMAL_VALUES - 1, MIN_NORMAL_VALUES):
        result = []
        for seed in range(40):
            draw = random.Random(seed)
            ends: Interval | None = interval([draw.expovariate(1) for _ in range(n)])
            assert ends is not None
            result.append((ends.high - ends.low, (ends.low + ends.high) / 2))
        widths.append([statistics.fmean(column) for column in zip(*result, strict=True)])
    (before, middle_before), (after, middle_after) = widths
    assert after == pytest.approx(before, rel=0.1)
    assert middle_after == pytest.approx(middle_before, abs=0.1 * before)


# --- clocks that wander, of which the true level is 100 -------------------------------------------------------


def _independent(count: int, draw: random.Random) -> list[float]:
    return [draw.gauss(100, 1) for _ in range(count)]


def _autocorrelated(count: int, draw: random.Random) -> list[float]:
    """Return a series in which neighbours are alike (0.9)."""
    result, now = [], draw.gauss(0, 1)
    for _ in range(count):
        now = 0.9 * now + draw.gauss(0, math.sqrt(1 - 0.9**2))
        result.append(100 + now)
    return result


def _regimes(count: int, draw: random.Random) -> list[float]:
    """Return a series whose level changes every ten values or so."""
    level, result = draw.gauss(100, 2), []
    for _ in range(count):
        level = draw.gauss(100, 2) if draw.random() < 0.1 else level
        result.append(level + draw.gauss(0, 1))
    return result


def _bimodal(count: int, draw: random.Random) -> list[float]:
    """Return a series that stays at one of two levels for ten values or so."""
    level, result = draw.choice((98, 102)), []
    for _ in range(count):
        level = 200 - level if draw.random() < 0.1 else level
        result.append(draw.gauss(level, 0.5))
    return result


def _drifting(count: int, draw: random.Random) -> list[float]:
    """Return a series whose level walks, by a tenth of what single values differ by; it starts at 100."""
    level, result = 100.0, []
    for _ in range(count):
        level += draw.gauss(0, 0.1)
        result.append(draw.gauss(level, 1))
    return result


def _flicker(count: int, draw: random.Random) -> list[float]:
    """Return a series with noise of all time scales alike: a sum of levels that change every 1, 4, 16, … values."""
    levels, result = [draw.gauss(0, 1) for _ in range(6)], []
    for _ in range(count):
        levels = [draw.gauss(0, 1) if draw.random() < 4.0**-scale else entry for scale, entry in enumerate(levels)]
        result.append(100 + sum(levels))
    return result


WANDERING = (_independent, _autocorrelated, _regimes, _bimodal, _flicker, _drifting)
SEEDS = 150


@pytest.mark.parametrize("clock", WANDERING)
@pytest.mark.parametrize("count", [60, 150])
def test_the_interval_of_a_series_holds_what_the_next_stretch_shows_in_nine_of_ten(
    clock: Callable[[int, random.Random], list[float]], count: int
) -> None:
    covered, widths, apart = 0, [], []
    for seed in range(SEEDS):
        whole = clock(3 * count, random.Random(seed))
        before, here, after = (whole[part * count : (part + 1) * count] for part in range(3))
        ends, around = drifting_interval(here), (trimmed_mean(before), trimmed_mean(after))
        assert ends is not None
        covered += ends.low <= max(around) and min(around) <= ends.high
        widths.append((ends.high - ends.low) / 2)
        apart.append(trimmed_mean(here) - statistics.fmean(around))
    assert covered >= 0.9 * SEEDS
    ideal = 1.96 * statistics.pstdev(apart, 0)
    assert statistics.fmean(widths) <= 2 * ideal, "of an interval that knows how the clock wanders"


@pytest.mark.parametrize("clock", [_independent, _autocorrelated, _regimes, _bimodal])
def test_the_interval_of_a_series_holds_the_level_that_it_returns_to_in_nine_of_ten(
    clock: Callable[[int, random.Random], list[float]],
) -> None:
    ends = [drifting_interval(clock(150, random.Random(seed))) for seed in range(SEEDS)]
    assert sum(entry is not None and entry.low <= 100 <= entry.high for entry in ends) >= 0.9 * SEEDS


@pytest.mark.parametrize("count", [7, 12, 22, 60])
def test_an_interval_never_leaves_the_range_of_the_values(count: int) -> None:
    for seed in range(20):
        values = [random.Random(seed).choice((12.0, 57.0, 100.0)) * (1 + place / 1000) for place in range(count)]
        values = values[: count // 2] + [3 * value for value in values[count // 2 :]]
        for ends in (drifting_interval(values), mean_interval(values)):
            assert ends is not None
            assert min(values) <= ends.low <= ends.high <= max(values)


def test_the_interval_of_a_mean_lies_around_the_mean_of_values_of_different_weight() -> None:
    values, weights = [1.0, 1.1] * 30 + [3.0, 3.1] * 10, [1] * 60 + [500] * 20
    middle = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    ends = mean_interval(values, weights)
    assert ends is not None
    assert 2.9 < ends.low < middle < ends.high <= 3.1
    assert values_of(mean_interval(values, [7] * 80)) == pytest.approx(values_of(mean_interval(values)))
    few = mean_interval(values[-20:-10] + values[:3], [500] * 10 + [1] * 3)
    assert few is not None
    assert 2.9 < few.low < 3.05 < few.high <= 3.1


@pytest.mark.parametrize("heavy", [0, 22, 44])
def test_where_a_single_value_has_nearly_all_the_weight_there_is_an_interval_around_it(heavy: int) -> None:
    ends = mean_interval([float(place) for place in range(45)], [10**6 if place == heavy else 1 for place in range(45)])
    assert ends is not None
    assert 0 <= ends.low <= heavy + 0.001
    assert heavy - 0.001 <= ends.high <= 44


def test_one_long_step_of_many_does_not_widen_the_interval_as_a_drift_would() -> None:
    values = _independent(60, random.Random(1))
    ends, held_up = drifting_interval(values), drifting_interval([*values[:30], 900.0, *values[31:]])
    assert ends is not None
    assert held_up is not None
    assert held_up.high - held_up.low < 2 * (ends.high - ends.low)


def test_relative_widths_of_the_factors_of_a_product_add_in_quadrature() -> None:
    ends = product_interval(Interval(7.0, 10.0, 14.0), Interval(1.2, 2.0, 2.6))
    assert values_of(ends) == pytest.approx((20 * (1 - 0.5), 20, 20 * (1 + 0.5)))
    assert product_interval(Interval(7.0, 10.0, 14.0), Interval(2.0, 2.0, 2.0)).ends == pytest.approx((14, 28))
    assert product_interval(Interval(-3.0, 1.0, 5.0)).low == 0, "a positive quantity"


@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(0, 5, 1), (2.571, 5, 0.05), (12.706, 1, 0.05), (1.96, 1e5, 0.05), (12.0, 10, 2.91e-7)]
)
def test_student_s_p_value_is_that_of_the_tables(t: float, freedom: float, p: float) -> None:
    assert p_value(t, freedom) == pytest.approx(p, rel=0.02)


@pytest.mark.parametrize(("n", "m", "u", "p"), [(4, 4, 0, 2 / 70), (3, 5, 1, 4 / 56), (5, 5, 2, 8 / 252)])
def test_the_rank_test_is_that_of_the_tables(n: int, m: int, u: int, p: float) -> None:
    b = [10.0 + entry for entry in range(m)]
    a = [float(entry) for entry in range(n - 1)] + [b[u - 1] + 0.5 if u else 1.5]
    result = rank_test(a, b, 0.05)
    assert result is not None
    assert result.p == pytest.approx(p)


def test_the_rank_test_counts_all_ways_to_deal_the_values_out() -> None:
    draw = random.Random(0)
    for n, m in ((4, 5), (6, 3), (5, 6)):
        a, b = [draw.random() for _ in range(n)], [draw.random() + 0.3 for _ in range(m)]
        pooled = [*a, *b]
        middle = n * m / 2

        def apart(first: Sequence[float], second: Sequence[float], middle: float = middle) -> float:
            return abs(sum(y > x for x in first for y in second) - middle)

        dealt = [
            apart([pooled[k] for k in chosen], [pooled[k] for k in range(n + m) if k not in chosen])
            for chosen in itertools.combinations(range(n + m), n)
        ]
        result = rank_test(a, b, 0.05)
        assert result is not None
        assert result.p == pytest.approx(sum(entry >= apart(a, b) for entry in dealt) / len(dealt))
        assert (result.low <= 0 <= result.high) == (result.p > 0.05)


def test_many_values_are_ranked_by_the_normal_approximation_and_ties_are_no_evidence() -> None:
    result = rank_test([float(k) for k in range(50)], [k + 10.5 for k in range(3000)], 0.05)
    assert result is not None
    assert result.p < 1e-20
    same = rank_test([5.0] * 8, [5.0] * 9, 0.05)
    assert same == (1, 0, 0)
    assert rank_test([1.0, 2, 3], [4.0, 5, 6], 0.05) is None


@pytest.mark.parametrize(
    ("share", "freedom", "quantile"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 30, 2.042), (0.995, 4, 4.604), (0.8, 5, 0.920)],
)
def test_student_s_quantile_is_that_of_the_tables(share: float, freedom: float, quantile: float) -> None:
    assert student(share, freedom) == pytest.approx(quantile, rel=1e-3)
    assert p_value(student(share, freedom), freedom) == pytest.approx(2 * (1 - share), rel=1e-9)


def test_the_mean_of_three_values_has_the_interval_of_student_s_t() -> None:
    bounds = mean_interval([9.0, 10.0, 14.0])
    assert bounds is not None
    assert bounds.value == 11
    assert bounds.ends == (9, 14) or bounds.half == pytest.approx(4.303 * math.sqrt(7 / 3), rel=1e-3)


def test_yuen_s_error_of_untrimmed_values_is_that_of_welch() -> None:
    a, b = [1.0, 2.0, 6.0], [4.0, 5.0, 6.0, 9.0]
    error, freedom = yuen_error(a, b)
    parts = statistics.variance(a) / 3, statistics.variance(b) / 4
    assert error == pytest.approx(math.sqrt(sum(parts)))
    assert freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3))


def test_an_interval_can_be_scaled_limited_and_moved_to_another_value() -> None:
    bounds = Interval(-2.0, 1.0, 3.0)
    assert bounds.scale(-2) == Interval(-6.0, -2.0, 4.0)
    assert bounds.limit(0.5) == Interval(-2.0, 0.5, 0.5)
    assert bounds.at(4.0) == Interval(-2.0, 4.0, 4.0)
    assert bounds.half == 2.5
    assert bounds.may_be_zero


def test_a_sum_of_which_a_part_is_unknown_is_unknown() -> None:
    assert stats.known_sum([1, 2]) == 3
    assert isinstance(stats.known_sum([1, 2]), int)
    assert stats.known_sum([0.1] * 10) == 1.0
    assert stats.known_sum([1, None]) is None
    assert stats.known_sum([]) == 0


def test_intervals_of_many_samples_are_those_of_each_by_itself() -> None:
    draw = random.Random(5)
    samples = [[draw.lognormvariate(10, 1) for _ in range(size)] for size in (1, 2, 3, 3, 4, 10, 10, 99, 100, 150, 10)]
    expected = []
    for values in samples:
        if 3 <= len(values) < stats.MIN_NORMAL_VALUES:  # one resample after another, in plain Python
            weights, ordered = stats._resampling(len(values)), sorted(values)
            draws = [sum(w * value for w, value in zip(column, ordered, strict=True)) for column in weights.T.tolist()]
            ends = (stats.percentile(draws, 1 - stats.UPPER), stats.percentile(draws, stats.UPPER))
            expected.append(stats.Interval(ends[0], stats.trimmed_mean(values), ends[1]))
        else:
            expected.append(stats.interval(values))
    assert stats.intervals(samples) == expected
    assert stats.intervals([]) == []


def test_samples_of_one_size_are_resampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    ends_of = stats._bootstrap_ends
    monkeypatch.setattr(stats, "_bootstrap_ends", lambda samples: parts.append(len(samples)) or ends_of(samples))
    assert len(stats.intervals([[1.0, 2.0, 4.0, 8.0]] * 600)) == 600
    assert parts == [256, 256, 88]
