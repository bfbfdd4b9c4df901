"""Fits of tables with altered rows, units in cells, categories of any ratio, and exponents at a bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import first

from xsp.cli import main
from xsp.errors import UsageError
from xsp.predict import configurations, crossvalidation, fittext, generic, identifiability, quantities, robust

pytest.importorskip("scipy", reason="the generic model needs SciPy")

Alteration = Callable[[np.random.Generator], float]


def law(row: dict[str, float]) -> float:
    return float(2e-3 * (row["width"] / 64) ** 1.4 * (row["batch"] / 16) ** 0.8 + 5e-4)


def altered_rows(seed: int, alteration: Alteration, share: float = 0.2) -> tuple[list[dict[str, Any]], set[int]]:
    """Return rows of a law with 1 % noise, a share of them altered, and the numbers of the altered rows from 1."""
    chance = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = [{"width": 2 ** chance.uniform(4, 9), "batch": 2 ** chance.uniform(1, 8)}
                                  for _ in range(80)]  # fmt: skip
    chosen = {int(number) for number in chance.choice(len(rows), round(share * len(rows)), replace=False)}
    for number, row in enumerate(rows):
        row["step_s"] = law(row) * np.exp(chance.normal(0, 0.01)) * (alteration(chance) if number in chosen else 1.0)
    return rows, {number + 1 for number in chosen}


@pytest.mark.parametrize(
    "alteration",
    first(
        1,
        [lambda chance: 5.0, lambda chance: 0.2, lambda chance: 1.5, lambda chance: float(chance.choice([0.1, 30.0]))],
    ),
)
def test_a_fifth_of_altered_rows_neither_moves_the_fit_nor_its_error(alteration: Alteration) -> None:
    rows, altered = altered_rows(3, alteration)
    table = configurations.of_rows(rows)
    split = crossvalidation.split_of(table, [], [], None)
    evaluation = crossvalidation.judge(table, split, 0, 20, with_extrapolations=False)
    grid = [{"width": 2.0**width, "batch": 2.0**batch} for width in range(4, 10) for batch in range(1, 9)]
    truth = [law(row) for row in grid]
    points = crossvalidation.predict(evaluation, grid)
    assert evaluation.offered_model == crossvalidation.GENERIC
    assert np.mean([abs(point.seconds / true - 1) for point, true in zip(points, truth, strict=True)]) < 0.01
    assert evaluation.errors[0].mean < 0.02
    listed = {outlier.row for outlier in evaluation.outliers}
    assert listed <= altered
    assert len(listed) >= 0.9 * len(altered)
    text = fittext.page(evaluation)
    assert f"outliers, left out: {len(listed)} of 80 rows" in text.replace("\n", " ")
    assert f"row {evaluation.outliers[0].row} (width=" in text


def test_rows_of_an_effect_that_the_models_lack_are_no_outliers() -> None:
    rows, _ = altered_rows(0, lambda chance: 1.0)
    table = configurations.of_rows([{**row, "kind": "abc"[number % 3]} for number, row in enumerate(rows)])
    predictions = table.seconds.copy()
    predictions[table.values["kind"] == "c"] *= 3
    assert not robust.outliers(table, predictions, predictions).any()
    predictions = table.seconds.copy()
    predictions[[4, 9]] *= 3
    assert np.flatnonzero(robust.outliers(table, predictions, predictions)).tolist() == [4, 9]
    repeated = configurations.of_rows([*rows, rows[4]])
    again = np.append(predictions, predictions[4])
    assert np.flatnonzero(robust.outliers(repeated, again, again)).tolist() == [9]


@pytest.mark.parametrize("slow", ["aaa", "zzz"])
def test_values_of_a_category_may_differ_by_any_ratio_whatever_their_names(slow: str) -> None:
    chance = np.random.default_rng(0)
    ratio = {slow: 300.0, "mmm": 1.0, "nnn": 0.01}
    rows = [
        {"device": device, "batch": float(batch), "step_ms": ratio[device] * batch**0.8 * (1 + chance.normal(0, 0.02))}
        for device in ratio for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    ]  # fmt: skip
    table = configurations.of_rows(rows)
    form = generic.form(table, [], ["device", "batch"])
    fit = generic.with_bootstrap(generic.fit(table, form), table, 40, 0)
    named = {each.name: each for each in identifiability.parameters(fit, len(table))}
    reference = form.extrinsic[0].levels[0]
    for device in form.extrinsic[0].levels[1:]:
        true, parameter = np.log(ratio[device] / ratio[reference]), named[f"device={device}"]
        assert parameter.low is not None
        assert parameter.high is not None
        assert parameter.low - 0.02 < true < parameter.high + 0.02, (device, parameter, true)
        assert parameter.why_not is None


def test_an_exponent_at_the_bound_is_not_identified_and_its_model_not_offered() -> None:
    rows = [{"size": size, "ms": 1e-3 * (size / 10) ** 9.0} for size in np.linspace(8, 12, 20)]
    table = configurations.of_rows(rows)
    evaluation = crossvalidation.judge(
        table, crossvalidation.split_of(table, [], ["size"], None), 0, 20, with_extrapolations=False
    )
    (parameter, *_) = identifiability.parameters(evaluation.fits[None], len(table))
    assert (parameter.low, parameter.high) == (None, None)
    assert "not identified" in str(parameter.why_not)
    assert evaluation.offered_model != crossvalidation.GENERIC
    assert "not identified" in fittext.page(evaluation)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("12.3 ms", (12.3, "ms")), ("12.3ms", (12.3, "ms")), ("2 samples", (2, "samples")), ("5e-3 s", (5e-3, "s")),
        ("16GiB", (16, "GiB")), ("80 %", (80, "%")), ("64", (64, "")), (8, (8, "")), ("3 img/s", (3, "img/s")),
        ("3x3", None), ("v100", None), ("1,234 ms", None), ("64,64", None), ("", None), (True, None), ("ms", None),
    ],
)  # fmt: skip
def test_cells_are_numbers_with_units_or_texts(cell: Any, expected: tuple[float, str] | None) -> None:
    assert quantities.quantity(cell) == expected


def test_units_of_cells_are_read_and_converted() -> None:
    rows = [
        {"batch": f"{batch} sample{'s' * (batch > 1)}", "memory": memory, "took": took}
        for batch, memory, took in ((1, "1 GiB", "900 us"), (2, "512MiB", "1.8 ms"), (4, "2GiB", "0.0036 s"))
    ]
    table = configurations.of_rows(rows, "took")
    assert table.seconds == pytest.approx([9e-4, 1.8e-3, 3.6e-3])
    assert table.values["batch"].tolist() == [1, 2, 4]
    assert table.values["memory"].tolist() == [2**30, 2**29, 2**31]
    again = {"batch": "1 sample", "memory": "1024 MiB", "took": "1 ms"}
    alike = {"batch": "1 samples", "memory": "1GiB", "took": "1 ms"}
    assert configurations.of_rows([*rows, again, alike], "took").groups.tolist() == [0, 1, 2, 0, 0]
    assert any("column batch has numbers with units, read as numbers in sample" in note for note in table.notes)
    texts = configurations.of_rows(rows, "took", categories=["batch"])
    assert texts.factor("batch").levels


def test_units_that_do_not_fit_together_are_refused() -> None:
    rows = [{"batch": f"{batch} {'images' if batch > 2 else 'tokens'}", "ms": 1.0 * batch} for batch in (1, 2, 4, 8)]
    with pytest.raises(UsageError, match="row 1, column batch: '1 tokens' and row 3, column batch: '4 images' have un"):
        configurations.of_rows([*rows, rows[-1]])
    sizes = ["2GiB", "4 parsecs", "2 GB", "8 GiB"]
    with pytest.raises(
        UsageError, match="row 2, column memory: '4 parsecs' and row 1, column memory: '2GiB' have unit"
    ):
        configurations.of_rows([{**row, "memory": size} for row, size in zip(rows, sizes, strict=True)], "ms", None,
                               ["memory"])  # fmt: skip


@pytest.mark.slow
def test_outliers_are_in_the_json_and_a_fit_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = altered_rows(1, lambda chance: 8.0)
    (tmp_path / "t.json").write_text(json.dumps(rows))
    words = ["predict", "fit", str(tmp_path / "t.json"), "--resamples", "20", "-o", str(tmp_path / "fit.json")]
    assert main([*words, "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["outliers"]) == 16
    assert content["outliers"][0]["configuration"].keys() == {"width", "batch"}
    assert main(["predict", "at", "width=64", "batch=16", "--fit", str(tmp_path / "fit.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["step_s"] == pytest.approx(2.5e-3, rel=0.01)
