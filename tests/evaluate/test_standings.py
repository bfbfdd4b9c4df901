"""Results side by side: what is the same, what differs, who stands where, and what can be made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from evaluations import FACTS, PROGRAM, silent

from xsp.cli import main
from xsp.evaluate import reading, results, running, standings
from xsp.evaluate.agents import Options


@pytest.fixture
def board(tmp_path: Path) -> Path:
    (tmp_path / "board.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def evaluated(folder: Path, **of: Any) -> results.Result:
    model = {"name": "board", "task": "sums", "command": [sys.executable, "board.py"]}
    asked = reading.of_plain({"model": model, "dataset": {"samples": 4}, "scenario": {"requests": 30}, **of}).manifest
    options = Options(store=folder / "store", trusted=True)
    return results.read(running.evaluate(asked, folder, options, FACTS, silent))


def change(folder: Path, before: str, after: str) -> None:
    text = (folder / "board.py").read_text(encoding="utf-8")
    assert before in text
    (folder / "board.py").write_text(text.replace(before, after), encoding="utf-8")


def test_an_evaluation_that_is_made_again_is_the_same(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluated(board)
    where = ["--store", str(board / "store"), "--folder", str(board), "-q"]
    code = main(["evaluate", "reproduce", before.name, *where, "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    verdicts = {each["subject"]: each["verdict"] for each in said["reasons"]}
    assert (verdicts["outputs"], verdicts["latency"]) == ("same", "same")
    assert code in (0, 1)  # 1 where the test's facts of the agent are not those of this machine
    assert len(said["after"]) >= 1


@pytest.mark.parametrize(
    ("before", "after", "subject"), [("2 * sum", "3 * sum", "outputs"), ("1_000_000", "1_300_000", "latency")]
)
def test_a_planted_change_is_told(before: str, after: str, subject: str, board: Path) -> None:
    kept = evaluated(board)
    change(board, before, after)
    found = standings.reproduced(kept, lambda: evaluated(board), 3)
    assert found.verdict.value == "different"
    assert {each.subject for each in found.why} == {subject}


def test_what_differs_is_named_with_defaults_that_were_left_out(board: Path) -> None:
    one, other = evaluated(board), evaluated(board, scenario={"requests": 30, "batch": 2}, name="another name")
    (found,) = standings.compared([one, other])
    assert dict(found.differing) == {"manifest scenario.batch": ("1", "2")}
    assert found.equal_outputs


def test_results_of_other_software_have_rows_of_their_own(board: Path) -> None:
    store = board / "store"
    one, other = evaluated(board), evaluated(board)
    assert [row.count for row in standings.leaderboard([one, other])] == [2]
    path = other.path / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["agent"]["packages"]["torch"] = "99.0"
    path.write_text(json.dumps(content), encoding="utf-8")
    rows = standings.leaderboard(results.every(store)[0], "sums")
    assert [row.count for row in rows] == [1, 1]
    assert len({row.software for row in rows}) == 2
    assert len({row.machine for row in rows}) == 1
    assert standings.leaderboard(results.every(store)[0], "other") == []


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
