"""Programs with planted flaws, and what tells that advice names the flaw."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import advice
import pytest
from parts import turns


def piece(**more: Any) -> dict[str, Any]:
    given = {"question": "choice", "what": "w", "do": "d", "trial": None, "at_most": False, "of_step_percent": 20.0}
    return {**given, **more}


def test_every_flaw_has_its_program_and_every_program_a_flaw() -> None:
    programs = {path.stem for path in advice.FLAWS.glob("*.py")} - {"running"}
    assert programs == advice.PLANTED.keys()
    assert len(advice.PLANTED) >= 14
    assert len(advice.SOUND) >= 10
    assert set(advice.SOUND) <= programs
    assert all("FLAWED" in (advice.FLAWS / f"{name}.py").read_text(encoding="utf-8") for name in programs)


def test_the_right_advice_is_told_by_its_trial_or_by_question_and_words() -> None:
    flaw = advice.PLANTED["onednn_off"]
    assert flaw.is_named_by(piece(trial="channels_last+onednn=on"))
    assert flaw.is_named_by(piece(do="switch oneDNN on"))
    assert not flaw.is_named_by(piece(do="switch cuDNN on"))
    assert not flaw.is_named_by(piece(question="stall", do="oneDNN"))
    assert advice.PLANTED["slow_data"].is_named_by(piece(question="data"))


def test_the_report_counts_against_the_goals_and_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    tried = {"came_true": True, "real_percent": 15.0, "off_percent": 25.0, "outcome": "tried", "at_most": False}
    tried |= {"trial": "onednn=on", "promised_percent": 20.0}
    bound = {"came_true": True, "real_percent": 50.0, "off_percent": None, "at_most": True, "promised_percent": 20.0}
    answers = {
        "masks_made_again": {"advice": [piece(question="masks", at_most=True)], "rank": 1, "mended": bound},
        "onednn_off": {"advice": [piece(question="stall"), piece(trial="onednn=on")], "rank": 2, "tried": tried},
        "one_thread": {"advice": [], "unanswered": {}},
        "slow_data": {"error": "it ended with exit code 1"},
    }
    for name, answer in answers.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "answer.json").write_text(json.dumps(answer))
    options = argparse.Namespace(quick=True)
    result = {name: advice._answer(name, tmp_path, options) for name in answers}
    assert result == answers
    report = advice._report(
        result,
        {"one_thread": {"advice": [piece(option=True)]}, "onednn_off": {"advice": [piece()]}},
        options,
    )
    assert report.rows[0] == ["masks_made_again", "1", "masks, 20 %", "at most 20 %", "50 %", "–", "by hand"]
    assert report.rows[1] == ["onednn_off", "2", "stall, 20 %", "20 %", "15 %", "25 %", "onednn=on"]
    assert report.notes == [
        "right advice among the first 3 pieces: 2 of 4 (goal 83%)",
        "no advice for programs without a flaw: 1 of 2 (goal: all)",
        "step faster with the change: 2 of 2 (goal 90%)",
        "gains within 1.1 times their upper bound: 0 of 1",
        "error of the predicted gain: 25 % (median, goal 30 %)",
        "no answer for: slow_data",
    ]
    assert len(turns.table(report.columns, report.rows)) == 8


def test_a_session_of_no_time_reports_what_is_there_and_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onednn_off").mkdir()
    (tmp_path / "onednn_off" / "answer.json").write_text(json.dumps({"advice": [piece(trial="onednn=on")], "rank": 1}))
    monkeypatch.setattr(advice, "_asked", lambda *_: pytest.fail("a program was begun"))
    advice.main(["--quick", "--seconds", "0", "--out", str(tmp_path)])
    message = capsys.readouterr().out
    assert "right advice among the first 3 pieces: 1 of 1" in message
    assert " of 6 programs are left: run it again with the same --out" in message


@pytest.mark.slow
def test_a_program_with_a_flaw_is_recorded_and_asked_about(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = argparse.Namespace(quick=True, fill=0.0, turns=3, no_try=True, seed=0)
    answer = advice._answer("sleep_in_a_module", tmp_path, options)
    assert "error" not in answer
    assert (tmp_path / "sleep_in_a_module" / "run" / "run.json").is_file()
