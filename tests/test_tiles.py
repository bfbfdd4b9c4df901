"""Reductions and scans as products of tiles: equal to sums where sums are exact, and documented where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from tiles import reference
from tiles.reference import LONGEST, REDUCTIONS, SCANS, Unit

ALL = (*REDUCTIONS, *SCANS)


def drawn(chance: np.random.Generator, name: str, most: int, *, whole: bool) -> tuple[np.ndarray, list[int]]:
    """Return half-precision values and lengths of segments: of whole numbers small enough for exact sums, or any."""
    total = int(2 ** chance.uniform(0, np.log2(most)))
    lengths: list[int] = []
    while sum(lengths) < total:
        long = int(2 ** chance.uniform(0, np.log2(min(total, LONGEST.get(name, total)) + 1)))
        lengths.append(min(long, total - sum(lengths)))
        if chance.random() < 0.05:
            lengths.append(0)
    values = chance.integers(-1, 2, total) if whole else chance.normal(size=total)
    return values.astype(np.float16), lengths


def told(values: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sums and prefix sums of segments in double precision, and the sum of the magnitudes of each."""
    parts = np.split(values.astype(np.float64), np.cumsum(lengths)[:-1])
    return (np.array([part.sum() for part in parts]), np.concatenate([part.cumsum() for part in parts]),
            np.array([np.abs(part).sum() for part in parts]))  # fmt: skip


def of_tiles(name: str, values: np.ndarray, lengths: list[int], unit: Unit | None = None) -> np.ndarray:
    return (reference.reduce if name in REDUCTIONS else reference.scan)(name, values, lengths, unit)


def holds(count: int, most: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    print(f"seed {seed}, {count} inputs")
    for number in range(count):
        name = ALL[number % len(ALL)]
        values, lengths = drawn(chance, name, most, whole=True)
        sums, prefixes, _ = told(values, lengths)
        accumulate = ("single", "half")[number // len(ALL) % 2]
        result = of_tiles(name, values, lengths, Unit(accumulate))
        expected = sums if name in REDUCTIONS else prefixes
        assert np.array_equal(result, expected), f"{name}, {accumulate}, input {number}: {lengths[:20]}"


@pytest.mark.slow
def test_exact_sums_are_exact_in_all_algorithms() -> None:
    holds(260, 1 << 12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_five_thousand_inputs_up_to_65536_elements(seed: int) -> None:
    holds(1000, 1 << 16, seed)


@pytest.mark.parametrize("accumulate", ["single", "half"])
@pytest.mark.parametrize("name", ALL)
def test_errors_of_any_numbers_stay_within_their_bound(name: str, accumulate: str) -> None:
    """Each addition and each rounding of a factor adds at most the unit roundoff of what is rounded.

    The number of them on the way to a result is at most that of elements of a segment's tiles, and six factors.
    """
    chance = np.random.default_rng(7)
    for _ in range(6):
        values, lengths = drawn(chance, name, 1 << 11, whole=False)
        sums, prefixes, magnitudes = told(values, lengths)
        result = of_tiles(name, values, lengths, Unit(accumulate))
        half, own = 2.0**-11, 2.0 ** (-24 if accumulate == "single" else -11)
        factor = (np.array(lengths) + 1024) * own + 6 * half
        bound = factor * magnitudes if name in REDUCTIONS else np.repeat(factor * magnitudes, lengths)
        assert (np.abs(result - (sums if name in REDUCTIONS else prefixes)) <= bound).all()


PRODUCTS = {  # for 16 segments of 16, or one segment of four tiles
    "reduction_16": ([16] * 16, 1), "reduction_16n": ([64] * 16, 4), "reduction_256": ([256], 2),
    "reduction_256n": ([1024], 4 + 1), "reduction_256n_two": ([1024], 4 * 2), "scan_16": ([16] * 16, 1),
    "scan_16n": ([64] * 16, 4), "scan_256": ([256], 3), "scan_256n": ([1024], 4 * 3),
    "reduction_block": ([4096], 16 + 4 + 2), "scan_block": ([4096], 16 * 3 + 3),
    "reduction_grid": ([8192], 2 * 22 + 4 + 4 + 2), "scan_grid": ([8192], 2 * 51 + 4 * 3 + 3),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_as_many_products_as_the_paper_counts(name: str) -> None:
    lengths, expected = PRODUCTS[name]
    unit = Unit()
    of_tiles(name, np.ones(sum(lengths)), lengths, unit)
    assert unit.products == expected


def scanned(as_printed: bool) -> bool:
    values = np.arange(256) % 5
    unit = Unit(tiles=reference.constants(as_printed))
    return np.array_equal(reference.scan("scan_256", values, [256], unit), np.cumsum(values))


def test_triangular_tiles_by_the_formulas_scan() -> None:
    assert scanned(as_printed=False)


@pytest.mark.xfail(strict=True, reason="the paper's closing definition exchanges the conditions of U and L")
def test_triangular_tiles_as_the_paper_prints_them_scan() -> None:
    assert scanned(as_printed=True)


def test_what_the_constant_tiles_do() -> None:
    tile = np.arange(256.0).reshape(16, 16) % 7
    unit, held = Unit(), reference.constants()
    assert np.array_equal(unit.multiply(tile, held.U), tile.cumsum(1))
    assert np.array_equal(unit.multiply(held.L, tile), tile.cumsum(0) - tile)
    assert np.array_equal(unit.multiply(held.P, tile)[0], tile.sum(0))


# --- special values ---------------------------------------------------------------------------------------------

LENGTH = {name: LONGEST.get(name, 600) for name in ALL}


def with_one(name: str, at: int, special: float) -> np.ndarray:
    values = np.ones(LENGTH[name])
    values[at] = special
    return of_tiles(name, values, [len(values)])


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_keep_infinities_and_nan(name: str, special: float) -> None:
    for at in (0, 5, LENGTH[name] - 1):
        assert np.array_equal(with_one(name, at, special), [special], equal_nan=True)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_infinities_of_both_signs_are_nan_and_others_are_not_touched(name: str) -> None:
    result = of_tiles(name, [1.0, 2.0, np.inf, -np.inf, 3.0, np.nan, 4.0], [2, 2, 1, 1, 1])
    assert np.array_equal(result, [3.0, np.nan, 3.0, np.nan, 4.0], equal_nan=True)


@pytest.mark.parametrize("name", SCANS)
def test_scans_keep_other_segments_from_special_values(name: str) -> None:
    result = of_tiles(name, [1.0, 2.0, np.inf, 5.0, np.nan, 4.0, 4.0], [2, 2, 1, 2])
    assert result[:2].tolist() == [1.0, 3.0]
    assert result[5:].tolist() == [4.0, 8.0]


def places(found: np.ndarray) -> tuple[int, int, int]:
    """Return how many elements are finite, NaN, and infinite, in a result that has them in this order."""
    kinds = np.where(np.isnan(found), 1, np.where(np.isinf(found), 2, 0))
    assert (np.diff(kinds) >= 0).all()
    return tuple(int((kinds == entry).sum()) for entry in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "at", "expected"),
    [
        ("scan_16", 5, (0, 5, 11)), ("scan_16", 0, (0, 0, 16)), ("scan_16n", 5, (0, 5, 595)),
        ("scan_16n", 37, (32, 5, 563)), ("scan_256", 0, (0, 16, 240)), ("scan_256", 37, (0, 48, 208)),
        ("scan_256", 250, (0, 256, 0)), ("scan_256n", 256 + 37, (256, 48, 296)), ("scan_256n", 250, (0, 600, 0)),
        ("scan_grid", 37, (0, 48, 552)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_makes_what_stands_before_it_nan(
    name: str, at: int, expected: tuple[int, int, int], sign: int
) -> None:
    assert places(with_one(name, at, sign * np.inf)) == expected


@pytest.mark.parametrize(
    ("name", "at", "expected"),
    [("scan_16", 5, (0, 16, 0)), ("scan_16n", 37, (32, 568, 0)), ("scan_256", 37, (0, 256, 0)),
     ("scan_256n", 256 + 37, (256, 344, 0)), ("scan_block", 300, (256, 344, 0)),
     ("scan_grid", 300, (256, 344, 0))],
)  # fmt: skip
def test_a_nan_takes_its_row_or_tile_and_all_that_follows(name: str, at: int, expected: tuple[int, int, int]) -> None:
    assert places(with_one(name, at, np.nan)) == expected


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize(("name", "part"), [("scan_block", 256), ("scan_grid", 4096)])
def test_a_special_value_makes_all_parts_but_the_first_nan(name: str, part: int, special: float) -> None:
    values = np.zeros(3 * part)
    values[part + 37] = special
    assert places(of_tiles(name, values, [len(values)])) == (part, 2 * part, 0)


@pytest.mark.parametrize("name", ALL)
def test_sums_of_negative_zeros_are_positive(name: str) -> None:
    result = of_tiles(name, np.full(LENGTH[name], -0.0), [LENGTH[name]])
    assert (result == 0).all()
    assert not np.signbit(result).any()


def test_half_accumulators_count_to_2048_and_single_ones_go_on() -> None:
    ones = np.ones(16 * 4096)
    single = reference.reduce("reduction_16n", ones, [4096] * 16)
    half = reference.reduce("reduction_16n", ones, [4096] * 16, Unit("half"))
    assert set(single.tolist()) == {4096.0}
    assert set(half.tolist()) == {2048.0}


@pytest.mark.parametrize("accumulate", ["single", "half"])
def test_overflow_stands_where_a_sum_is_rounded_to_half(accumulate: str) -> None:
    large = np.full(512, 30000.0)
    columns = of_tiles("reduction_16n", large, [512], Unit(accumulate))[0]
    assert columns == (512 * np.float32(30000) if accumulate == "single" else np.inf)
    assert of_tiles("reduction_256n", large, [512], Unit(accumulate))[0] == np.inf  # the sums of columns are factors
    assert of_tiles("reduction_16n", [70000.0], [1], Unit(accumulate))[0] == np.inf  # the value itself is rounded


@pytest.mark.parametrize("name", ALL)
def test_no_segments_and_empty_ones(name: str) -> None:
    assert of_tiles(name, [], []).shape == (0,)
    assert of_tiles(name, [], [0, 0]).tolist() == ([0.0, 0.0] if name in REDUCTIONS else [])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="add up to 3, but there are 2 values"):
        reference.reduce("reduction_16", [1, 2], [3])
    with pytest.raises(ValueError, match="at most 16 elements"):
        reference.scan("scan_16", np.ones(17), [17])
    with pytest.raises(ValueError, match="single or half"):
        Unit("double")
