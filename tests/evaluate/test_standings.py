"""Results side by side: what is the same, what differs, who stands where, and what can be made again."""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from evaluations import FACTS, show_nothing

from xsp.cli import main
from xsp.evaluate import builtin, pipeline, pitfalls, reading, results, running, standings
from xsp.evaluate.agents import Facts, Options
from xsp.evaluate.quality import choices


def evaluated(folder: Path, facts: Facts = FACTS, **of: Any) -> results.Result:
    model = {"name": "board", "task": "sums", "command": [sys.executable, "board.py"]}
    asked = reading.of_plain({"model": model, "dataset": {"samples": 4}, "scenario": {"requests": 30}, **of}).manifest
    options = Options(store=folder / "store", trusted=True)
    return results.read(running.evaluate(asked, folder, options, facts, show_nothing))


def change(folder: Path, before: str, after: str) -> None:
    text = (folder / "board.py").read_text(encoding="utf-8")
    assert before in text
    (folder / "board.py").write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.slow
def test_an_evaluation_that_is_made_again_is_the_same(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluated(board)
    where = ["--store", str(board / "store"), "--folder", str(board), "-q"]
    code = main(["evaluate", "reproduce", before.name, *where, "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    verdicts = {each["subject"]: each["verdict"] for each in said["reasons"]}
    assert (verdicts["outputs"], verdicts["latency"]) == ("same", "same")
    assert code in (0, 1)  # 1 where the test's facts of the agent are not those of this machine
    assert len(said["after"]) >= 1


@pytest.mark.slow
def test_a_manifest_that_requires_a_label_is_made_again_where_the_machine_has_it(
    board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = evaluated(board, facts=replace(FACTS, labels={"rack": "7"}), hardware={"labels": {"rack": "7"}})
    again = ["evaluate", "reproduce", before.name, "--store", str(board / "store"), "--folder", str(board), "-q"]
    assert main(again) == 2
    assert "label rack=7 is required, it has none" in capsys.readouterr().err
    assert main([*again, "--label", "rack=7", "--turns", "1"]) != 2
    assert main([*again, "--label", "rack=7", "--ray", "auto"]) == 2
    assert "--label is for agents of this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "subject"), [("2 * sum", "3 * sum", "outputs"), ("1_000_000", "1_300_000", "latency")]
)
def test_a_planted_change_is_told(before: str, after: str, subject: str, board: Path) -> None:
    kept = evaluated(board)
    change(board, before, after)
    found = standings.reproduce(kept, lambda: evaluated(board), 3)
    assert found.verdict.value == "different"
    assert {each.subject for each in found.decisive_reasons} == {subject}


def test_what_differs_is_named_with_defaults_that_were_left_out(board: Path) -> None:
    one, other = evaluated(board), evaluated(board, scenario={"requests": 30, "batch": 2}, name="another name")
    (found,) = standings.compare([one, other])
    assert dict(found.differences) == {"manifest scenario.batch": ("1", "2")}
    assert found.has_equal_outputs


def test_results_of_other_software_have_rows_of_their_own(board: Path) -> None:
    store = board / "store"
    one, other = evaluated(board), evaluated(board)
    assert [row.count for row in standings.leaderboard([one, other])] == [2]
    path = other.path / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["agent"]["packages"]["torch"] = "99.0"
    path.write_text(json.dumps(content), encoding="utf-8")
    rows = standings.leaderboard(results.read_all(store)[0], "sums")
    assert [row.count for row in rows] == [1, 1]
    assert len({row.software for row in rows}) == 2
    assert len({row.machine for row in rows}) == 1
    assert standings.leaderboard(results.read_all(store)[0], "other") == []


def test_what_has_a_result_is_not_carried_out_again(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"name": "board", "command": [sys.executable, "board.py"]}
    for number in range(3):
        asked = {"name": f"m{number}", "model": model, "scenario": {"requests": 3}}
        (board / f"{number}.yaml").write_text(json.dumps(asked), encoding="utf-8")
    files = [str(board / f"{number}.yaml") for number in range(3)]
    where = ["--store", str(board / "store"), "-q", "--missing"]
    assert main(["evaluate", "run", *files[:1], *where]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run", *files, *where, "--seconds", "0"]) == 0
    assert "1 of 3 have a result already" in (said := capsys.readouterr().err)
    assert "1 manifests are left" in said
    assert main(["evaluate", "run", *files, *where]) == 0
    assert main(["evaluate", "run", *files, *where]) == 0
    assert "3 of 3 have a result already" in capsys.readouterr().err
    assert len(results.read_all(board / "store")[0]) == 3


def test_the_built_in_set_has_forty_models_under_three_loads() -> None:
    made = list(builtin.manifests())
    assert len({each.model.source for each in made}) >= 40
    assert len(made) == 3 * len({each.model.source for each in made})
    assert len({each.identity for each in made}) == len({each.title for each in made}) == len(made)
    assert [each for each in made if pipeline.problems(each)] == []


@pytest.mark.slow
def test_small_differences_before_the_model_are_seen() -> None:
    pytest.importorskip("torchvision")
    found = {each.name: each for each in pitfalls.rows(names=["BGR for RGB", "0 to 255"])}
    assert found["right"].agreement == 1
    assert found["right"].accuracy > 0.5  # of eight classes
    assert found["BGR for RGB"].accuracy < found["right"].accuracy
    assert found["0 to 255"].agreement < 0.5
    assert found["0 to 255"].apart > found["BGR for RGB"].apart > 0


@pytest.mark.slow
def test_small_differences_cost_accuracy_on_images_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    files, classes = pitfalls.images(3, range(18))
    for number, (file, kind) in enumerate(zip(files, classes.tolist(), strict=True)):
        place = tmp_path / "photographs" / f"kind{kind}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(file)
    asked = ["right", "0 to 255", "HWC read as CHW"]
    found = {each.name: each for each in pitfalls.rows(names=asked, data=tmp_path / "photographs")}
    assert found["right"].accuracy > 0.5  # of eight classes
    assert found["HWC read as CHW"].accuracy < found["right"].accuracy
    assert main(["evaluate", "pitfalls", "--data", str(tmp_path / "photographs" / "kind0")]) == 2
    assert "no images by class" in capsys.readouterr().err


def test_the_steps_of_every_pitfall_are_steps() -> None:
    file = pitfalls.images(0, [0])[0][0]
    shapes = {name: pitfalls._preprocessor(steps)(file).shape for name, (_, steps) in pitfalls.PITFALLS.items()
              if "torchvision" not in name}  # fmt: skip
    assert set(shapes.values()) == {(3, pitfalls.SIDE, pitfalls.SIDE)}


def test_the_best_stands_first(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ({"kind": "online"}, {"kind": "poisson", "rate": 900.0}):
        evaluated(board, scenario={**kind, "requests": 40})
    where = ["--store", str(board / "store")]
    assert main(["evaluate", "leaderboard", "--by", "p99_ms", *where]) == 0
    out = capsys.readouterr().out
    assert out.index("online") < out.index("poisson")
    assert max(map(len, out.splitlines())) <= 80
    assert main(["evaluate", "leaderboard", "--format", "json", *where]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kind"] == "online"


def test_a_leaderboard_concludes_from_its_rows(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluated(board)
    rates = {1: (100.0, 1.0, 0.5), 2: (190.0, 3.0, 0.7), 4: (195.0, 2.0, 0.6), 8: (180.0, 4.0, 0.4)}
    rows = [
        standings.Standing(
            replace(result, content={**result.content, "accuracy": {"top1": top1}}),
            {**result.parts[0], "batch": batch, "inputs_per_s": rate, "p99_ms": p99}, 1, "soft", "box",
        )
        for batch, (rate, p99, top1) in rates.items()
    ]  # fmt: skip
    price = choices.Price("box", 3.6, "EUR", datetime.date(2025, 1, 1))
    assert standings.conclusions(rows, [price]) == [
        "no other row is better in inputs/s, p99 and top-1 together than 1, 2, 3",
        "board: most inputs/s with batch 4; beyond 2 doubling gains at most 5 %",
        "rank correlation of top-1 and p99: -0.20",
        "rank correlation of top-1 and inputs/s: 0.60",
        "1: a million inputs cost 10 EUR (2025-01-01)",
        "2: a million inputs cost 5.26 EUR (2025-01-01)",
        "3: a million inputs cost 5.13 EUR (2025-01-01)",
        "4: a million inputs cost 5.56 EUR (2025-01-01)",
    ]
    assert standings.conclusions(rows[:1]) == []
    (board / "prices.csv").write_text("machine,per_hour,currency,date\nbox,much,EUR,2025-01-01\n", encoding="utf-8")
    prices = ["--prices", str(board / "prices.csv")]
    assert main(["evaluate", "leaderboard", "--store", str(board / "store"), *prices]) == 2
    assert "not a price with a date" in capsys.readouterr().err


def test_two_are_compared_on_the_command_line(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = evaluated(board)
    change(board, "2 * sum", "3 * sum")
    other = evaluated(board)
    where = ["--store", str(board / "store")]
    assert main(["evaluate", "compare", one.name, other.name, *where]) == 0
    out = capsys.readouterr().out
    assert "different" in out
    assert "outputs: not equal" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["evaluate", "compare", one.name, "feed", *where]) == 2
    assert main(["evaluate", "compare", one.name, *where]) == 2


def test_every_command_that_reads_results_names_those_that_are_damaged(tmp_path: Path, capsys) -> None:
    """`list`, `leaderboard` and `run --missing` read a store alike."""
    from xsp.cli import evaluate_run

    (tmp_path / "0123456789ab-0001").mkdir()
    (tmp_path / "0123456789ab-0001" / "result.json").write_text("{")
    assert evaluate_run.read_results(tmp_path) == []
    assert "0123456789ab-0001" in capsys.readouterr().err
