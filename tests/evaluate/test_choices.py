"""What many evaluations say together, on figures made by hand and on those that MLModelScope published."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path

import pytest

from xsp.errors import AnalysisError, UsageError
from xsp.evaluate.quality import choices

FIGURES = ("top1_percent", "graph_mb", "online_trimmed_mean_ms", "online_p90_ms", "max_inputs_per_s", "optimal_batch")


@pytest.fixture(scope="module")
def published(shared: Path) -> list[dict[str, float | str]]:
    with open(shared / "golden" / "mlmodelscope_table2.csv", encoding="utf-8") as file:
        return [{**row, **{name: float(row[name]) for name in FIGURES}} for row in csv.DictReader(file)]


def test_accuracy_and_latency_of_the_published_table_are_not_loosely_related(published) -> None:
    """The paper says loosely. Between both kinds of latency lies 0.86; SciPy gives the same figures."""
    found = choices.rank_correlations(published, FIGURES)
    assert found["top1_percent", "online_trimmed_mean_ms"] == pytest.approx(0.8698, abs=1e-4)
    assert found["top1_percent", "online_p90_ms"] == pytest.approx(0.8543, abs=1e-4)
    assert found["top1_percent", "max_inputs_per_s"] == pytest.approx(-0.9033, abs=1e-4)


def test_the_published_table_has_the_front_that_each_pair_of_rows_says(published) -> None:
    def beaten(own) -> bool:
        return any(
            other["top1_percent"] >= own["top1_percent"]
            and other["online_trimmed_mean_ms"] <= own["online_trimmed_mean_ms"]
            and (other["top1_percent"], other["online_trimmed_mean_ms"])
            != (own["top1_percent"], own["online_trimmed_mean_ms"])
            for other in published
        )

    front = [
        published[place]["model"] for place in choices.pareto(published, ["top1_percent"], ["online_trimmed_mean_ms"])
    ]
    assert front == [row["model"] for row in published if not beaten(row)]
    assert front[:3] == ["Inception_ResNet_v2", "Inception_v4", "Inception_v3"]
    assert "VGG19" not in front


def test_a_front_keeps_equal_rows_and_leaves_out_what_is_not_known() -> None:
    rows = [
        {"right": 0.7, "ms": 5.0}, {"right": 0.7, "ms": 5.0}, {"right": 0.7, "ms": 6.0},
        {"right": 0.9, "ms": None}, {"right": 0.8, "ms": float("nan")}, {"right": 0.6, "ms": 4.0}, {"right": 0.6},
    ]  # fmt: skip
    assert choices.pareto(rows, ["right"], ["ms"]) == [0, 1, 5]
    assert choices.pareto(rows, ["right"], []) == [3]
    assert choices.pareto([], ["right"], []) == []
    with pytest.raises(UsageError):
        choices.pareto(rows, [], [])


def test_the_optimal_batch_has_two_definitions() -> None:
    found = choices.scalability({1: 100, 2: 190, 4: 195, 8: 200, 16: 180})
    assert (found.best_size, found.plateau_size, found.last_gain_size) == (8, 2, 2)
    assert found.shares == {1: 0.5, 2: 0.95, 4: 0.975, 8: 1.0, 16: 0.9}
    dip = choices.scalability({1: 100, 2: 100, 4: 150, 8: 151})
    assert (dip.best_size, dip.plateau_size, dip.last_gain_size) == (8, 1, 4)
    assert choices.scalability({32: 10}).last_gain_size == 32
    for wrong in ({}, {1: 0.0}, {1: float("nan")}):
        with pytest.raises(AnalysisError):
            choices.scalability(wrong)


def test_a_million_inputs_cost_what_their_hours_do() -> None:
    found = choices.cost_per_million(1000, "P3.2xlarge")
    assert found is not None
    assert found.amount == pytest.approx(3.06 * 1000 / 3600)
    assert (found.currency, found.date) == ("USD", datetime.date(2019, 11, 19))
    assert choices.cost_per_million(1000, "laptop") is None
    with pytest.raises(AnalysisError):
        choices.cost_per_million(0, "p3.2xlarge")


def test_prices_are_read_with_their_date_and_the_latest_counts(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("machine,per_hour,currency,date,source\nbox,2,EUR,2024-01-01,bill\nbox,1,EUR,2025-01-01,bill\n")
    found = choices.cost_per_million(1e6 / 3600, "box", choices.prices(file))
    assert found == choices.InputsCost(1.0, "EUR", datetime.date(2025, 1, 1))
    file.write_text("machine,per_hour,currency,date\nbox,2,EUR,2024-01-01\nbox,2,EUR,lately\n")
    with pytest.raises(UsageError, match=r"prices\.csv:3: not a price with a date"):
        choices.prices(file)
    with pytest.raises(UsageError, match="cannot be read"):
        choices.prices(tmp_path / "absent.csv")
    text = "machine,per_hour,date,currency\nbox,2,2024-01-01,EUR\n"
    file.write_text(text, encoding="utf-8-sig")  # with a byte order mark, as spreadsheets write it
    assert choices.prices(file) == [choices.Price("box", 2.0, "EUR", datetime.date(2024, 1, 1))]
    file.write_text(text + "box,2,2024-01-01\n")
    with pytest.raises(UsageError, match=r"prices\.csv:3: .*machine or currency is empty"):
        choices.prices(file)


def test_figures_that_few_rows_have_are_not_correlated() -> None:
    rows = [{"a": 1.0, "b": 2.0, "c": 1.0}, {"a": 2.0, "b": 1.0, "c": 1.0}, {"a": 3.0, "b": None, "c": 1.0}]
    assert choices.rank_correlations(rows, ["a", "b", "c"]) == {("a", "b"): None, ("a", "c"): None, ("b", "c"): None}
