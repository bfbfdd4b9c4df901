"""The generic model: what was planted is found, what the data do not tell is said, and a better baseline is offered."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xsp.errors import UsageError
from xsp.predict import baselines, configurations, crossvalidation, fitfile, fromruns, generic, identifiability, nextrun
from xsp.predict.configurations import Configurations
from xsp.predict.generic import Penalty

pytest.importorskip("scipy", reason="the generic model needs SciPy")

PLANTED = {"exponent of filters": 1.2, "exponent of kernel": 1.7, "exponent of batch": 0.9, "exponent of ranks": -0.4}
NOISE = 0.03


def rows(seed: int, count: int = 60, noise: float = NOISE) -> list[dict[str, Any]]:
    """Return configurations of a planted law with a multiplicative noise."""
    chance = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        batch, ranks, filters, kernel = (2 ** chance.uniform(*each) for each in ((2, 9), (0, 5), (2, 9), (0, 6)))
        work = 3e-3 * (filters / 32) ** 1.2 + 3e-3 * (kernel / 5) ** 1.7
        step = work * (batch / 64) ** 0.9 * ranks**-0.4 + 1e-3
        found.append({"filters": filters, "kernel": kernel, "batch": batch, "ranks": ranks,
                      "step_s": step * np.exp(chance.normal(0, noise))})  # fmt: skip
    return found


def planted(seed: int, count: int = 60, noise: float = NOISE) -> Configurations:
    return configurations.of_rows(rows(seed, count, noise))


def form(table: Configurations) -> generic.Form:
    return generic.form(table, ["filters", "kernel"], ["batch", "ranks"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_planted_exponents_are_found_within_five_hundredths(seed: int) -> None:
    table = planted(seed)
    found = generic.fit(table, form(table), seed)
    fitted = identifiability.parameters(found, 60)
    apart = {each.name: each.value - PLANTED[each.name] for each in fitted if each.name in PLANTED}
    assert apart.keys() == PLANTED.keys()
    assert max(map(abs, apart.values())) < 0.05, (seed, apart)


@pytest.mark.slow
def test_without_noise_everything_is_found() -> None:
    table = planted(5, 40, 0.0)
    found = generic.fit(table, form(table), 0, [Penalty("none")])
    assert found.shapes == pytest.approx(list(PLANTED.values()), abs=1e-4)
    assert found.coefficients[-1] == pytest.approx(1e-3, rel=1e-3)
    assert found.predict(table.values) == pytest.approx(table.seconds, rel=1e-4)


@pytest.mark.slow
def test_intervals_hold_the_truth_in_nine_trials_of_ten() -> None:
    held = dict.fromkeys(PLANTED, 0)
    for seed in range(200):
        table = planted(seed)
        found = generic.with_bootstrap(generic.fit(table, form(table), seed), table, 60, seed)
        for each in identifiability.parameters(found, len(table)):
            if each.name in PLANTED and each.low is not None and each.high is not None:
                held[each.name] += each.low <= PLANTED[each.name] <= each.high
    assert min(held.values()) >= 180, held


def test_a_seed_gives_the_same_fit_again() -> None:
    table = planted(4, 30)
    one, other = (generic.with_bootstrap(generic.fit(table, form(table), 7), table, 3, 7) for _ in range(2))
    assert (one.shapes == other.shapes).all()
    assert all((a[0] == b[0]).all() for a, b in zip(one.bootstrap, other.bootstrap, strict=True))


def test_categories_have_a_coefficient_or_a_multiplier_for_each_value() -> None:
    chance = np.random.default_rng(0)
    takes, times = {"adam": 4e-3, "sgd": 1e-3}, {"a100": 1.0, "t4": 2.5}
    made = [
        {"optimizer": kind, "device": device, "batch": batch,
         "step_s": (takes[kind] + 1e-3) * times[device] * batch**0.8}
        for kind in takes for device in times for batch in (1, 2, 8, 16, 64) for _ in range(2)
    ]  # fmt: skip
    chance.shuffle(made)
    table = configurations.of_rows(made)
    found = generic.fit(table, generic.form(table, ["optimizer"], ["batch", "device"]), 0, [Penalty("none")])
    named = {each.name: each.value for each in identifiability.parameters(found, len(table))}
    assert named["exponent of batch"] == pytest.approx(0.8, abs=1e-3)
    assert named["a of optimizer=adam"] / named["a of optimizer=sgd"] == pytest.approx(2.5, rel=1e-2)
    other = next(name for name in named if name.startswith("device="))
    assert abs(named[other]) == pytest.approx(np.log(2.5), abs=1e-3)


def test_what_the_data_cannot_tell_is_said() -> None:
    made = [{**each, "width": 8.0, "images": 3 * each["batch"]} for each in rows(0, 40)]
    factors = ["filters", "batch", "images", "width"]
    found = generic.form(configurations.of_rows(made, factors=factors), ["filters"], ["batch", "images", "width"])
    assert [each.name for each in found.extrinsic] == ["batch"]
    assert [each.partition(" ")[0] for each in found.drop_reasons] == ["images", "width"]


def test_a_term_that_hardly_matters_and_terms_that_trade_off_are_named() -> None:
    chance = np.random.default_rng(1)
    made = [
        {"batch": b, "layers": b * np.exp(chance.normal(0, 0.01)),
         "step_s": 1e-3 * b**0.7 * np.exp(chance.normal(0, 0.05))}
        for b in 2 ** chance.uniform(1, 8, 40)
    ]  # fmt: skip
    table = configurations.of_rows(made)
    found = generic.fit(table, generic.form(table, [], ["batch", "layers"]), 0, [Penalty("none")])
    found = generic.with_bootstrap(found, table, 40, 0)
    assert any(each.why_not for each in identifiability.parameters(found, 40))
    assert ("exponent of batch", "exponent of layers") in [each[:2] for each in identifiability.ties(found)]
    assert identifiability.condition(found, table) > 30


def test_a_coefficient_of_zero_is_none_that_data_do_not_determine() -> None:
    made = [{"batch": float(batch), "step_s": 1e-3 * batch} for batch in (1, 2, 4, 8, 16, 32) for _ in range(3)]
    table = configurations.of_rows(made)
    found = generic.fit(table, generic.form(table, [], ["batch"]), 0, [Penalty("none")])
    some = dataclasses.replace(
        found, coefficients=np.where(np.arange(len(found.coefficients)) == 0, found.coefficients, 0)
    )
    assert identifiability.condition(some, table) < 1e6


def test_a_penalty_draws_exponents_to_zero_and_l1_lets_some_be_zero() -> None:
    made = [{**each, "noise": float(place % 7 + 1)} for place, each in enumerate(rows(3))]
    table = configurations.of_rows(made)
    those = generic.form(table, ["filters", "kernel"], ["batch", "ranks", "noise"])
    free, ridge, lasso = (
        generic.fit(table, those, 0, [penalty]).shapes
        for penalty in (Penalty("none"), Penalty("l2", 0.05), Penalty("l1", 0.01))
    )
    assert np.square(ridge).sum() < np.square(free).sum()
    assert abs(lasso[-1]) < 1e-3 < abs(lasso[0])


# --- held out ----------------------------------------------------------------------------------------------------


def judge(made: list[dict[str, Any]], intrinsic: Sequence[str] = (), **told: Any) -> crossvalidation.Evaluation:
    table = configurations.of_rows(made, **told)
    split = crossvalidation.split_of(table, intrinsic, (), None)
    return crossvalidation.judge(table, split, resamples=20, with_extrapolations=False)


@pytest.fixture(scope="module")
def of_sums() -> crossvalidation.Evaluation:
    return judge(rows(0), ["filters", "kernel"])


@pytest.mark.slow
def test_the_model_is_offered_where_it_is_better_and_a_baseline_where_that_is(
    of_sums: crossvalidation.Evaluation,
) -> None:
    sums = of_sums
    assert sums.offered_model == crossvalidation.GENERIC
    assert [each.model for each in sums.errors] == sorted(
        [each.model for each in sums.errors], key=lambda name: next(e.mean for e in sums.errors if e.model == name)
    )
    assert {each.model for each in sums.errors} | set(sums.missing_baselines) == {
        crossvalidation.GENERIC,
        *baselines.BASELINES,
    }
    chance = np.random.default_rng(0)
    lines = [
        {"batch": float(b), "width": float(w), "step_s": (1e-3 * b + 2e-3 * w) * np.exp(chance.normal(0, 0.01))}
        for b in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    assert judge(lines).offered_model == "linear"


def test_rows_of_a_group_are_held_out_together() -> None:
    groups = np.array([3, 1, 1, 2, 3, 3, 7, 8, 2])
    parts = generic.folds(groups, 3, 0)
    assert sorted(np.concatenate([out for _, out in parts])) == list(range(9))
    for inside, out in parts:
        assert not set(groups[inside]) & set(groups[out])


def test_repetitions_are_one_group_and_so_are_rows_of_the_same_machine() -> None:
    made = [{"batch": float(place // 3 + 1), "machine": f"m{place % 3}", "step_s": 1.0 + place} for place in range(12)]
    repeated = configurations.of_rows(made, factors=["batch"])
    assert len(set(repeated.groups.tolist())) == 4
    assert len(set(configurations.of_rows(made, factors=["batch"], group=["machine"]).groups.tolist())) == 3


@pytest.mark.slow
def test_each_value_of_a_category_may_have_a_model_of_its_own() -> None:
    made = [
        {"model": kind, "batch": float(b), "step_s": 1e-3 * b**power}
        for kind, power in (("cnn", 1.0), ("mlp", 0.5)) for b in (1, 2, 4, 8, 16, 32)
    ]  # fmt: skip
    table = configurations.of_rows(made)
    found = crossvalidation.judge(
        table, crossvalidation.split_of(table, (), (), "model"), resamples=20, with_extrapolations=False
    )
    powers = {value: float(fit.shapes[0]) for value, fit in found.fits.items()}
    assert powers == pytest.approx({"cnn": 1.0, "mlp": 0.5}, abs=0.02)
    both = crossvalidation.predict(found, [{"model": kind, "batch": 64.0} for kind in ("cnn", "mlp")])
    assert [each.seconds for each in both] == pytest.approx([0.064, 0.008], rel=0.05)


def test_baselines_are_what_they_are_called() -> None:
    made = [
        {"kind": kind, "batch": b, "step_s": scale * b**2}
        for kind, scale in (("a", 1.0), ("b", 3.0))
        for b in (1, 2, 4)
    ]
    table = configurations.of_rows(made)
    asked: dict[str, Any] = {"kind": np.array(["b", "a"], dtype=object), "batch": np.array([8.0, 1.9])}
    plain = ("mean", "nearest", "power law", "ridge")
    found = {name: baselines.BASELINES[name](table, table.factors)(asked) for name in plain}
    assert found["mean"] == pytest.approx([12.0, 4.0])
    assert found["nearest"] == pytest.approx([48.0, 4.0])
    assert found["power law"] == pytest.approx([192.0, 1.9**2])
    assert found["ridge"] == pytest.approx([192.0, 1.9**2], rel=0.05)
    straight = configurations.of_rows([{"batch": b, "step_s": 2.0 + 3 * b} for b in (1, 2, 5)])
    assert baselines.linear(straight, straight.factors)({"batch": np.array([10.0])}) == pytest.approx([32.0])


def test_the_features_of_ernest_find_what_is_divided_and_what_grows_with_the_machines() -> None:
    def took(ranks: int, batch: int) -> float:
        return 0.01 + 0.02 * batch / ranks + 0.003 * np.log(ranks) + 0.0005 * ranks

    made = [{"ranks": n, "batch": b, "step_s": took(n, b)} for n in (1, 2, 4, 8) for b in (8, 16, 32)]
    table = configurations.of_rows(made)
    asked = {"ranks": np.array([64.0, 16.0]), "batch": np.array([128.0, 8.0])}
    found = baselines.ernest(table, table.factors)(asked)
    assert found == pytest.approx([took(64, 128), took(16, 8)], rel=1e-6)


@pytest.mark.slow
def test_a_simulated_step_is_a_baseline_with_one_factor_and_a_forest_is_always_the_same() -> None:
    steps = [(b, n, 0.1 * b + n) for b in (1, 2, 4) for n in (1, 2)]
    made = [{"batch": b, "ranks": n, "dag": dag, "step_s": 1.3 * dag} for b, n, dag in steps]
    table = configurations.of_rows(made)
    asked = {"batch": np.array([64.0]), "ranks": np.array([16.0]), "dag": np.array([9.0])}
    assert baselines.scaled_simulation(table, table.factors)(asked) == pytest.approx([11.7])
    pytest.importorskip("sklearn", reason="the forest needs scikit-learn")
    one, other = (baselines.forest(table, table.factors)(asked) for _ in range(2))
    assert one == other
    assert one[0] < 11  # leaves do not extrapolate


def test_a_baseline_that_a_table_does_not_have_is_left_out_with_its_reason(of_sums: crossvalidation.Evaluation) -> None:
    assert set(of_sums.missing_baselines) >= {"dag"}
    assert "xsp predict RUN" in of_sums.missing_baselines["dag"]
    assert not {each.model for each in of_sums.errors} & set(of_sums.missing_baselines)


def test_an_interval_holds_what_was_measured_and_what_lies_outside_is_said(of_sums: crossvalidation.Evaluation) -> None:
    found = of_sums
    new = rows(99, 40)
    points = crossvalidation.predict(found, [{name: each[name] for name in each if name != "step_s"} for each in new])
    inside = sum(point.low <= each["step_s"] <= point.high for point, each in zip(points, new, strict=True))
    assert inside >= 34
    far = {"filters": 32.0, "kernel": 3.0, "batch": 4096.0, "ranks": 2.0}
    assert crossvalidation.predict(found, [far])[0].extrapolation_notes[0].startswith("batch is 8.")
    corner = {name: max(each[name] for each in rows(0)) for name in far}
    assert crossvalidation.predict(found, [corner])[0].extrapolation_notes == (
        "it is outside the recorded combinations",
    )


# --- what to record next -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_recorded_next_lies_where_the_fits_disagree_and_costs_count() -> None:
    made = [each for each in rows(0, 120) if each["batch"] < 32 or each["ranks"] < 4]
    found = judge(made, ["filters", "kernel"])
    chosen = nextrun.choose(found, 3)
    doubts = crossvalidation.spread(found, crossvalidation.point_columns(found, nextrun.candidates(found)))
    assert chosen[0].uncertainty >= np.median(np.log(doubts).std(axis=0))
    assert [each.remaining_uncertainty for each in chosen] == sorted(
        (each.remaining_uncertainty for each in chosen), reverse=True
    )
    assert len({tuple(each.configuration.values()) for each in chosen}) == 3
    dear = nextrun.choose(found, 3, steps=1_000_000, start=0.0)
    assert max(each.predicted for each in dear) <= max(each.predicted for each in chosen)


def test_doubt_after_a_measurement_is_that_of_normal_distributions() -> None:
    chance = np.random.default_rng(0)
    apart = chance.normal(size=(4, 400))
    apart -= apart.mean(axis=1, keepdims=True)
    row, noise, size = apart[1].copy(), 0.3, 400
    before = apart @ apart.T / size
    after = nextrun._update(apart, row, noise)
    truth = before - np.outer(before[1], before[1]) / (before[1, 1] + noise)
    assert after @ after.T / size == pytest.approx(truth)


# --- what is no table --------------------------------------------------------------------------------------------

GOOD = [{"batch": float(b), "step_ms": 1.0 + b} for b in range(1, 9)]


@pytest.mark.parametrize(
    ("made", "told", "said"),
    [
        ([], {}, "no rows"),
        ([{"batch": 1, "ms": 2.0}], {}, "no column has more than one value"),
        ([{**each, "step_ms": None} for each in GOOD], {}, "no time above 0"),
        ([{**each, "step_ms": float("nan")} for each in GOOD], {}, "no time above 0"),
        ([{**each, "step_ms": -1} for each in GOOD], {}, "no time above 0"),
        ([{**each, "step_ms": "3 parsecs"} for each in GOOD], {},
         "row 1, column step_ms: '3 parsecs' is not a time: write 12.3, or 12.3 with a unit, such as ns, us, ms, s, "),
        *(([*GOOD, {"batch": 9.0, "step_ms": cell}], {}, "row 9, column step_ms: ")
          for cell in ("12 parsecs", "12,5", "1,234.5 ms", "7m30s", '"12.5"', "1e400", "12 GiB", "\u22123", [1], True)),
        ([{**each, "step_ms": "failed"} for each in GOOD], {}, "no time above 0, such as 'failed'; write 12.3"),
        ([{"batch": each["batch"], "took": 1.0} for each in GOOD], {}, "name it, --time COLUMN; there are batch, took"),
        ([{"batch": each["batch"], "took": 1.0} for each in GOOD], {"time": "took"}, "--unit s, ms, us or ns"),
        (GOOD, {"time": "step"}, "did you mean step_ms"),
        (GOOD, {"factors": ["bach"]}, "did you mean batch"),
        (GOOD, {"factors": ["step_ms"]}, "the time itself"),
        ([*GOOD, {"batch": 0, "step_ms": 1.0}], {}, "row 9, column batch: '0' cannot be raised"),
        ([*GOOD, {"batch": -4, "step_ms": 1.0}], {}, "row 9, column batch: '-4' cannot be raised"),
        ([*GOOD, {"batch": "8 images", "step_ms": 1.0}], {}, "row 9, column batch: '8 images' is no number, and"),
        ([*GOOD, {"batch": [1], "step_ms": 1.0}], {}, "row 9, column batch: '[1]' is neither a number nor a text"),
        ([{"name": f"run {n}", "step_ms": 1.0} for n in range(60)], {"factors": ["name"]}, "60 different texts"),
        ([{f"c{n}": n + place for n in range(40)} | {"ms": 1.0} for place in range(3)], {}, "more than 16"),
        ([{f"c{n}": n for n in range(400)}], {}, "400 columns, more than 256"),
        ([{"a": 1, "b": None, "ms": 1}, {"a": None, "b": 2, "ms": 1}], {"factors": ["a", "b"]}, "no configuration has"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_in_one_line(made: list[dict[str, Any]], told: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        configurations.of_rows(made, **told)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("unit", ["us", "\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s"])
def test_a_column_of_microseconds_has_their_unit(unit: str) -> None:
    made = [{"batch": each["batch"], f"step_{unit}": 7.0} for each in GOOD]
    assert configurations.of_rows(made, f"step_{unit}").seconds[0] == pytest.approx(7e-6)


def test_a_letter_that_is_only_like_a_unit_is_none() -> None:
    made = [{"batch": each["batch"], "step_\N{LATIN SMALL LETTER LONG S}": 7.0} for each in GOOD]
    with pytest.raises(UsageError, match="--unit s, ms, us or ns"):
        configurations.of_rows(made, list(made[0])[1])


def test_words_in_place_of_a_time_are_named_and_numbers_read_as_texts_too() -> None:
    odd = [{"batch": 3.0, "step_ms": "OOM"}, {"batch": 3.0, "step_ms": " timeout"}]
    (note,) = configurations.of_rows([*GOOD, *odd]).notes
    assert note == "2 of 10 rows are left out: without a time above 0 in step_ms ('OOM', 'timeout')"
    commas = [{**each, "rate": f"0,{int(each['batch'])}"} for each in GOOD]
    (note,) = configurations.of_rows(commas).notes
    assert note.startswith("row 1, column rate: '0,1' is no number, so the column is read as texts")
    mixed = [{**each, "memory": "large" if each["batch"] == 4 else f"{each['batch']:g} GiB"} for each in GOOD]
    (note,) = configurations.of_rows(mixed).notes
    assert note.startswith("row 4, column memory: 'large' is no number, so the column is read as texts")


def test_rows_of_files_are_named_by_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("batch,step_ms\n1,2\n2,3\n")
    (tmp_path / "two.jsonl").write_text('{"batch": 4, "step_ms": 4}\n{"batch": 8, "step_ms": "5 fortnights"}\n')
    rows, _ = fromruns.rows([str(tmp_path / "one.csv"), str(tmp_path / "two.jsonl")])
    with pytest.raises(UsageError) as raised:
        configurations.of_rows(rows)
    assert str(raised.value).startswith(
        f"{tmp_path / 'two.jsonl'}, row 2, column step_ms: '5 fortnights' is not a time"
    )


def test_rows_that_are_left_out_are_counted() -> None:
    odd = [{"batch": 3, "step_ms": None}, {"batch": 3, "step_ms": "nan"}, {"batch": None, "step_ms": 4.0}]
    table = configurations.of_rows([*GOOD, *odd])
    assert len(table) == len(GOOD)
    assert table.seconds[0] == pytest.approx(2e-3)
    assert table.notes == (
        "2 of 11 rows are left out: without a time above 0 in step_ms", "1 of 11 rows are left out: without batch"
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "intrinsic", "said"),
    [
        (GOOD[:1] * 9 + [{"batch": 2.0, "step_ms": 1.0}], (), "2 groups of configurations"),
        (GOOD[:3], (), "3 different configurations cannot determine 3 parameters: record 1 more"),
        (GOOD, ("batch",), None),
    ],
)
def test_too_little_is_refused_and_a_single_factor_is_enough(
    made: list[dict[str, Any]], intrinsic: Sequence[str], said: str | None
) -> None:
    if said is None:
        assert judge(made, intrinsic).errors
        return
    with pytest.raises(UsageError, match=said):
        judge(made, intrinsic)


@pytest.mark.slow
def test_constant_times_and_huge_ratios_are_no_obstacle() -> None:
    flat = judge([{"batch": float(b), "step_s": 0.5} for b in range(1, 13)])
    assert flat.errors[0].mean < 1e-6
    wide = judge([{"batch": 10.0**b, "step_s": 10.0**b} for b in range(-12, 13, 2)])
    assert wide.errors[0].mean < 0.01


def test_equal_values_of_different_sources_are_one_group() -> None:
    pairs = ("64", "a"), ("64 ", "a "), (64, "a"), (64.0, "a"), ("128", "a"), ("128", "b")
    made = [{"batch": batch, "kind": kind, "step_s": 1.0} for batch, kind in pairs]
    assert configurations.of_rows(made).groups.tolist() == [0, 0, 0, 0, 1, 2]
    grouped = configurations.of_rows(made, factors=["kind"], group=["batch"])
    assert grouped.groups.tolist() == [0, 0, 0, 0, 1, 1]


def test_columns_that_differ_and_are_no_factors_are_said() -> None:
    made = [
        {"": n, "batch": n % 7 + 1, "name": f"run {n}", "rare": n if n < 20 else None, "same": 1, "step_ms": 1.0}
        for n in range(50)
    ]
    table = configurations.of_rows(made)
    assert [each.name for each in table.factors] == ["batch"]
    assert table.notes == (
        "a column without a name is not used",
        "column name is not used: it has 50 texts, more than 40",
        "column rare is not used: only 20 of 50 rows have a value",
    )


@pytest.mark.parametrize("lacks", ["a100", "h100", "l4"])
def test_a_category_keeps_its_effect_in_rows_that_lack_one_of_its_values(lacks: str) -> None:
    slower = {"a100": 2.0, "h100": 1.0, "l4": 8.0}
    made = [
        {"device": name, "batch": float(batch), "step_s": times * batch * (1 + 0.001 * batch)}
        for name, times in slower.items()
        for batch in {"a100": (1, 2, 4, 8, 16), "h100": (1, 2, 4, 8), "l4": (1, 2, 4)}[name]
    ]
    table = configurations.of_rows(made)
    part = table.take(np.flatnonzero(table.values["device"] != lacks))
    shape = generic.form(part, (), ("batch", "device"))
    assert shape.drop_reasons == ()
    found = generic.fit(part, shape, penalties=[Penalty("none")])
    first, second = (name for name in ("a100", "h100", "l4") if name != lacks)
    assert shape.shapes[1:] == (f"device={second}",)
    assert np.exp(found.shapes[1]) == pytest.approx(slower[second] / slower[first], rel=0.02)


@pytest.mark.slow
def test_values_of_a_category_are_in_the_order_of_their_own_rows_when_a_fit_is_read_again(tmp_path: Path) -> None:
    made = [
        {"model": kind, "device": name, "batch": float(batch), "step_s": 1e-3 * batch**0.9 * times}
        for kind, name, times, batches in (
            ("cnn", "a100", 2.0, 9), ("cnn", "h100", 1.0, 8), ("mlp", "h100", 3.0, 5), ("mlp", "l4", 9.0, 6),
        )
        for batch in range(1, batches + 1)
    ]  # fmt: skip
    table = configurations.of_rows(made)
    found = crossvalidation.judge(
        table, crossvalidation.split_of(table, (), (), "model"), resamples=20, with_extrapolations=False
    )
    assert [each.levels for each in found.fits["mlp"].form.extrinsic if each.levels] == [("l4", "h100")]
    fitfile.write(found, tmp_path / "fit.json")
    again = fitfile.read(tmp_path / "fit.json")
    asked = [{"model": "mlp", "device": name, "batch": 3.0} for name in ("h100", "l4")]
    assert [each.seconds for each in crossvalidation.predict(again, asked)] == pytest.approx(
        [each.seconds for each in crossvalidation.predict(found, asked)]
    )


def test_a_value_with_a_model_of_its_own_that_is_held_out_whole_is_refused() -> None:
    made = [
        {"model": kind, "machine": f"{kind} 1", "batch": float(batch), "step_s": 1e-3 * batch}
        for kind in ("cnn", "mlp", "rnn") for batch in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    table = configurations.of_rows(made, factors=["model", "batch"], group=["machine"])
    with pytest.raises(UsageError, match=r"--each model: all rows of \w+ are held out at once"):
        crossvalidation.judge(
            table, crossvalidation.split_of(table, (), (), "model"), resamples=20, with_extrapolations=False
        )


@pytest.mark.slow
def test_a_value_that_no_resampled_table_has_keeps_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        {"model": kind, "batch": float(batch), "step_s": 1e-3 * batch * times}
        for kind, times in (("cnn", 1.0), ("mlp", 3.0)) for batch in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    table = configurations.of_rows(made)
    found = crossvalidation.judge(
        table, crossvalidation.split_of(table, (), (), "model"), resamples=20, with_extrapolations=False
    )
    errors = sorted(found.errors, key=lambda each: each.model != "power law")
    found = dataclasses.replace(found, errors=tuple(errors))
    monkeypatch.setattr(
        generic, "sample_rows", lambda table, seed: table.take(np.flatnonzero(table.values["model"] == "cnn"))
    )
    spread = crossvalidation.spread(found, crossvalidation.point_columns(found, [{"model": "mlp", "batch": 4.0}]))
    assert spread == pytest.approx(np.full(spread.shape, 12e-3))


@pytest.mark.slow
def test_means_of_many_categories_take_no_time_that_grows_with_their_square() -> None:
    count = 40_000
    made = [
        {"a": f"a{n % 35}", "b": f"b{n // 35 % 35}", "c": f"c{n // 1225 % 35}", "step_s": 1.0 + n % 2}
        for n in range(count)
    ]
    table = configurations.of_rows(made)
    began = time.monotonic()
    found = baselines.mean(table, table.factors)(table.values)
    assert time.monotonic() - began < 20
    assert found == pytest.approx(table.seconds)
