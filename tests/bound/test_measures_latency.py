"""Measures against latency: coefficients, intervals, who wins, and what a foreign table makes of it."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xsp import stats
from xsp.bound import correlate, correlatetext, latencies
from xsp.bound.latencies import Latency
from xsp.cli import main
from xsp.errors import UsageError
from xsp.graph import corpus

ASKED = {"batch": 1, "train": False}


def rows(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Measures of models that do not exist, each measure drawn by itself."""
    draw = random.Random(seed)
    return [
        {
            "spec": f"m:{number}",
            "asked": ASKED,
            "input_elements": 150_528,
            "parameters": draw.lognormvariate(16, 1),
            "flops": draw.lognormvariate(21, 1),
            "longest_path": draw.lognormvariate(5, 1),
            "diameter": draw.randrange(10, 60),
            "computing": draw.randrange(20, 900),
            "bytes": draw.lognormvariate(19, 1),
            "peak_activation_bytes": 0,
        }
        for number in range(count)
    ]


def taken(found: list[dict[str, Any]], by: str, noise: float = 0.1, **where: Any) -> list[Latency]:
    draw = random.Random(1)
    return [Latency(row["spec"], row[by] * 1e3 * draw.lognormvariate(0, noise), **where) for row in found]


def test_what_makes_the_latency_wins_with_its_interval() -> None:
    measures = rows()
    for by, winner in (("longest_path", "longest_path"), ("flops", "flops")):
        (group,) = correlate.groups(measures, taken(measures, by))
        of = {each.measure: each for each in group.correlations}
        assert of[by].pearson is not None
        assert of[by].pearson.value > 0.95
        assert of[by].pearson.low is not None
        assert of[by].pearson.low < of[by].pearson.value <= (of[by].pearson.high or 0)
        assert of[by].r2 is not None
        assert of[by].r2.value == pytest.approx(of[by].pearson.value ** 2)
        assert [each.winner for each in group.differences] == [winner, winner]
        assert group.regression is not None
        assert group.regression.exponents[by].value == pytest.approx(1, abs=0.1)
        assert group.regression.mean_error_percent.value < 20


def test_where_both_say_the_same_nobody_wins() -> None:
    measures = rows()
    made = [Latency(row["spec"], row["flops"] * row["longest_path"] * 1e-3) for row in measures]
    (group,) = correlate.groups(measures, made)
    assert [each.winner for each in group.differences] == [None, None]
    assert "not decided" in correlatetext.page([group])


def test_coefficients_are_those_of_their_definitions() -> None:
    draw = np.random.default_rng(5)
    x, y = draw.integers(0, 6, 50).astype(float), draw.normal(size=50)
    y[3] = y[4]
    assert stats.pearson_of(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])

    def ranks(values: np.ndarray) -> list[float]:
        return [
            sum(other < each for other in values) + (sum(other == each for other in values) + 1) / 2 for each in values
        ]

    assert stats.spearman_of(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])
    assert stats.spearman_of(x, np.exp(x)) == pytest.approx(1)
    assert math.isnan(stats.pearson_of(x, np.ones(50)))


def test_the_error_of_models_left_out_is_that_of_fitting_without_each() -> None:
    measures = rows(15)
    made = taken(measures, "flops", noise=0.5)
    points = correlate.groups(measures, made)[0].points
    found = correlate.regress(points)
    assert isinstance(found, correlate.Regression)
    names = list(found.exponents)
    x = np.array([[1.0, *(math.log(held[name]) for name in names)] for _, _, held in points])
    y = np.log([ns for _, ns, _ in points])
    errors = []
    for out in range(len(y)):
        kept = np.arange(len(y)) != out
        fitted = np.linalg.lstsq(x[kept], y[kept], rcond=None)[0]
        errors.append(100 * abs(math.exp(x[out] @ fitted - y[out]) - 1))
    assert found.mean_error_percent.value == pytest.approx(np.mean(errors))
    assert found.median_error_percent == pytest.approx(np.median(errors))


def test_what_is_the_same_missing_or_zero_is_said_and_drops_out() -> None:
    measures = rows()
    measures[0]["bytes"] = None
    for row in measures[:10]:
        row["parameters"] = 0
    (group,) = correlate.groups(measures, taken(measures, "flops"))
    of = {each.measure: each for each in group.correlations}
    assert of["input_elements"].reason == "it is the same in all models"
    assert of["peak_activation_bytes"].reason == "0 models have it with a value above 0"
    assert of["bytes"].models == 39
    assert of["parameters"].models == 30
    assert group.regression is not None
    assert group.regression.models == 39
    assert set(group.regression.dropped) == {"input_elements", "parameters"}
    assert set(group.regression.exponents) == {"flops", "longest_path", "bytes"}


def test_a_measure_that_others_make_up_takes_no_part() -> None:
    measures = [{**row, "bytes": row["flops"] ** 2 * row["longest_path"]} for row in rows()]
    (group,) = correlate.groups(measures, taken(measures, "flops"))
    assert group.regression is not None
    assert group.regression.dropped["bytes"] == "a combination of those before it"


@pytest.mark.parametrize(
    ("count", "latency", "says"),
    [
        (3, None, "at least 4 models are needed"),
        (9, 7.0, "all latencies are equal"),
        (5, None, "no regression on 4 measures: 5 models, at least 7 are needed"),
    ],
)
def test_too_few_models_and_constant_latencies_have_a_reason(count: int, latency: float | None, says: str) -> None:
    measures = rows(count)
    made = [Latency(each.model, latency or each.ns) for each in taken(measures, "flops")]
    (group,) = correlate.groups(measures, made)
    assert group.reason == says
    assert group.regression is None
    assert says.split(":")[0] in correlatetext.page([group])
    json.dumps(correlate.as_json([group]), allow_nan=False)


def test_latencies_that_are_equal_where_all_measures_are_known_make_no_regression() -> None:
    measures = rows(30)
    measures[0]["flops"] = measures[1]["flops"] = None
    made = [Latency(row["spec"], 2.0 if row["flops"] is None else 7.0) for row in measures]
    (group,) = correlate.groups(measures, made)
    assert group.reason == "no regression: all latencies are equal"
    json.dumps(correlate.as_json([group]), allow_nan=False)


def test_four_models_of_which_two_are_equal_make_no_interval_up() -> None:
    measures = rows(4)
    for row, path in zip(measures, (5, 5, 5, 6), strict=True):
        row["longest_path"] = path
    (group,) = correlate.groups(measures, taken(measures, "flops"))
    path = next(each for each in group.correlations if each.measure == "longest_path")
    assert path.pearson is not None
    assert path.pearson.low is None
    assert [each.winner for each in group.differences] == [None, None]
    json.dumps(correlate.as_json([group]), allow_nan=False)


def test_each_device_batch_and_thread_count_stands_alone_and_repeats_have_their_median() -> None:
    measures = rows(6)
    made = [*taken(measures, "flops", device="A", batch=1), *taken(measures, "flops", device="A", batch=8)]
    made += [Latency("m:0", 1.0, "B"), Latency("m:0", 5.0, "B"), Latency("m:0", 100.0, "B"), Latency("other", 3.0)]
    found = correlate.groups(measures, made)
    assert [each.title for each in found] == ["A, batch 1", "A, batch 8", "B"]
    assert found[2].points[0][1] == 5.0
    notes, holes = correlate.omissions([*measures, {"spec": "m:x"}], made, 1)
    assert holes == ["other: no model of the corpus has this name"]
    assert "1 models of the corpus have no latency" in notes[0]
    assert "batch 8" in notes[1]


def write(path: Path, lines: list[list[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(lines)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_is_read_with_its_unit_and_rows_without_a_latency_are_named(tmp_path: Path, delimiter: str) -> None:
    lines = [
        ["Model", "model", " latency_ms ", "batch", "device", "note"],
        ["x", "m:1", "2.5", "8", "V100, 16 GB", ""],
        ["x", "m:2", "", "1", "V100", ""],
        ["x", "m:3", "-1", "1", "V100", ""],
        ["x", "m:4", "nan", "1", "V100", ""],
        ["x", "m:5", "1", "many", "V100", ""],
        ["x", "", "1", "1", "V100", ""],
        ["x", "m:6", "1", "", "", ""],
        ["x", "m:7"],
    ]
    found, holes = latencies.read(write(tmp_path / "a.csv", lines, delimiter))
    assert found == [Latency("m:1", 2.5e6, "V100, 16 GB", 8), Latency("m:6", 1e6)]
    assert [hole.split(":")[0] for hole in holes] == [f"line {line}" for line in (3, 4, 5, 6, 7, 9)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "there are none"),
        (b"name,ms\na,1\n", "there are name, ms"),
        (b"model,latency_ms,latency_us\na,1,2\n", "columns are model, latency_ms"),
        (b"model,latency_ms\n", "no row has a latency"),
        (b"model,latency_ms\na,0\n", "no row has a latency"),
        (b"\xff\xfe\x00model", "cannot be read as text"),
        (b'{"model": "a", "latency_ms": 1}', "not a table of latencies"),
    ],
)
def test_a_foreign_file_is_one_clear_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as raised:
        latencies.read(path)
    assert "\n" not in str(raised.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "corpus"
    out.mkdir()
    lines = [*rows(12), {"spec": "m:bad", "asked": ASKED, "error": "does not build"}]
    (out / corpus.FILE).write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"spec": "cut')
    return out


def test_the_command_needs_no_graphs_and_fits_80_columns(folder: Path, tmp_path: Path, capsys) -> None:
    lines = [["model", "latency_us", "device", "batch", "threads"]]
    lines += [[each.model, each.ns / 1e3, "cpu", batch, 2] for each in taken(rows(12), "flops") for batch in (1, 8)]
    table = write(tmp_path / "l.csv", [*lines, ["m:bad", 3, "cpu", 1, 2], ["m:none", 3, "cpu", 1, 2]])
    assert main(["graph", str(folder), "--against", str(table)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "cpu, batch 1, 2 threads: 12 models" in shown
    assert "By r of logarithms, of 2 groups: longest path 0, FLOPs 2, not decided 0." in shown
    assert "m:bad: does not build" in shown
    assert "m:none: no model of the corpus has this name" in shown
    assert main(["graph", str(folder), "--against", str(table), "--only", "m:1*,m:2,m:3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["models"] for each in found["groups"]] == [5, 5]
    assert found["groups"][0]["longest_path_less_flops"]["pearson"]["models"] == 5


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([["model", "latency_ms"], ["resnet50", 1]], "the file has names like 'resnet50', the folder like 'm:0'"),
        ([], "not a table"),
    ],
)
def test_the_command_refuses_a_table_that_does_not_fit(folder: Path, tmp_path: Path, lines, says: str, capsys) -> None:
    assert main(["graph", str(folder), "--against", str(write(tmp_path / "l.csv", lines))]) != 0
    assert says in capsys.readouterr().err


def test_micro_models_have_slopes_and_no_part_in_the_coefficients() -> None:
    measures = rows(10)
    family = [{**rows(1)[0], "spec": f"micro:path-{place}", "longest_path": 2**place} for place in range(1, 7)]
    made = taken(measures, "flops") + [Latency(row["spec"], 1e6 * row["longest_path"] ** 0.5) for row in family]
    made.append(Latency("micro:depth-1", 5.0))
    (group,) = correlate.groups([*measures, *family], made)
    assert len(group.points) == 10
    (slope,) = group.slopes
    assert (slope.family, slope.measure, slope.models, slope.factor) == ("path", "longest_path", 6, 32)
    assert slope.exponent is not None
    assert slope.exponent.value == pytest.approx(0.5)
    (alone,) = correlate.groups(family, made)
    shown = correlatetext.page([alone])
    assert "longest path" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "needed" not in shown
    json.dumps(correlate.as_json([alone]), allow_nan=False)


def test_the_page_has_a_scatter_for_each_measure(folder: Path, tmp_path: Path, capsys) -> None:
    table = write(
        tmp_path / "l.csv", [["model", "latency_us"], *([each.model, each.ns] for each in taken(rows(12), "flops"))]
    )
    page = tmp_path / "page.html"
    assert main(["graph", str(folder), "--against", str(table), "--html", str(page)]) == 0
    content = page.read_text(encoding="utf-8")
    data = json.loads(re.findall(r'id="data">(.*?)</script>', content, re.DOTALL)[0])
    charts = [part["chart"] for part in data["sections"][0]["parts"] if "chart" in part]
    assert [each["title"].split(":")[0] for each in charts] == [
        "parameters", "FLOPs", "longest path", "diameter", "computing nodes", "bytes",
    ]  # fmt: skip
    assert all(each["log"] == ["at", "values"] and len(each["labels"]) == 12 for each in charts)
    assert "<title>corpus against l.csv</title>" in content
    assert "http://" not in content.replace("http://www.w3.org", "").replace("http://www.apache.org", "")
