"""Trials of advice: the program, the selected pieces, the output and the saved history."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xsp.advise import Advice, Interval, experiment, records, rerun, text
from xsp.advise.experiment import FAILED, NOT_APPLICABLE, TRIED, TrialPlan, TrialResult
from xsp.cli import advise, main
from xsp.comparison import turns
from xsp.comparison.commands import ComparedProgram
from xsp.device import machine
from xsp.errors import ProgramError, UsageError
from xsp.run import Machine, Run

HERE = Machine.of({"cpu": "a processor", "cores": 2, "packages": {"torch": "2.0"}})


def piece(trial: str | None, gain: float = 2.0, **changes: Any) -> Advice:
    fields = {"question": "q", "what": "w", "where": (), "at_most": False, "of_step_percent": 10 * gain, "why": ()}
    return Advice(**{**fields, "gain": Interval(gain / 2, gain, 2 * gain), "do": "d", "trial": trial, **changes})


def tried_result(gain: float, trial: str = "threads=2", **changes: Any) -> TrialResult:
    real = Interval(gain - 1, gain, gain + 1)
    return TrialResult(piece(trial, **changes), TRIED, before_ms=10.0, after_ms=10.0 - gain, real_gain=real, turns=4)


# --- the program of a run -------------------------------------------------------------------------------------------


def test_the_program_of_a_run_is_found_in_a_subfolder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "own.py").touch()
    run = Run.of({"typed": ["run", "--step", "fit", "own.py", "--epochs", "2"]})
    assert rerun.program(run, "runs/r").args == ("--step", "fit", "deep/er/own.py", "--epochs", "2")
    model = Run.of({"typed": ["profile", "own.py:build", "--batch", "8"]})
    assert rerun.program(model, "runs/r").args == ("deep/er/own.py:build", "--batch", "8")
    named = Run.of({"typed": ["profile", "torchvision:resnet18", "--batch", "8"]})
    assert rerun.program(named, "runs/r").verb == "profile"
    module = Run.of({"typed": ["run", "-m", "pkg.train"]})
    assert rerun.program(module, "runs/r").args == ("-m", "pkg.train")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"typed": ["run", "train.py", "***"]}, "does not keep"),
        ({"typed": ["run", "gone.py"]}, "not found"),
        ({}, "does not record"),
        ({"kind": "ranks", "typed": ["run", "train.py"]}, "several ranks"),
    ],
)
def test_an_unknown_program_is_refused_with_a_hint(
    content: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=reason) as error_info:
        rerun.program(Run.of(content), "runs/r 1")
    assert "xsp advise 'runs/r 1' --try 3 --program 'python train.py'" in str(error_info.value)
    assert rerun.program(Run.of(content), "runs/r", "python other.py").args == ("other.py",)


def test_two_files_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").touch()
    with pytest.raises(UsageError, match=r"2 of them: a/own.py, b/own.py"):
        rerun.program(Run.of({"typed": ["run", "own.py"]}), "r")


def test_a_file_is_searched_in_a_limited_number_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rerun, "MOST_FOLDERS", 3)  # the working directory is the first
    for number in range(8):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / f"folder{number}" / "own.py").touch()
    with pytest.raises(UsageError, match="2 of them"):
        rerun.program(Run.of({"typed": ["run", "own.py"]}), "r")


@pytest.mark.parametrize("typed", [None, "xsp run --every 3 -q mytool"])
def test_a_program_with_an_option_that_trials_set_is_refused(typed: str | None) -> None:
    trace = SimpleNamespace(run=Run.of({"typed": ["profile", "torchvision:resnet18", "-q"]}))
    arguments = Namespace(source="r", program=typed, turns=None)
    with pytest.raises(UsageError, match="omit -q;") as error_info:
        advise._plan(arguments, SimpleNamespace(trace=trace))
    assert ("name the program" in str(error_info.value)) is (typed is None)


def test_a_program_under_a_trial_has_its_variables_and_a_process_that_applies_it(tmp_path: Path) -> None:
    program = rerun.with_trial(rerun.program(Run.of({}), "r", "python train.py"), "threads=2")
    words = program.command(tmp_path / "b-01", "M", 1)
    assert dict(program.settings)["OMP_NUM_THREADS"] == "2"
    options = json.loads(words[words.index("-c") + 2])
    assert options["trial"] == "threads=2"
    assert options["report"] == str(tmp_path / "output" / "b-01.json")
    assert words[words.index("-c") + 3] == "run"


# --- selection and outcomes of trials ------------------------------------------------------------------------------


def test_the_best_trials_are_selected_once_each() -> None:
    advice = [piece(None), piece("compile"), piece("compile", 1.0), piece("threads=2"), piece("sdpa")]
    assert [entry.trial for entry in experiment.select(advice, 2)] == ["compile", "threads=2"]
    assert experiment.select(advice, 2)[0].gain.value == 2.0
    with pytest.raises(UsageError, match="--try 0"):
        experiment.select(advice, 0)


@pytest.fixture
def plan(tmp_path: Path) -> TrialPlan:
    return TrialPlan(ComparedProgram("train.py", ("python",), "run", ("train.py",)), tmp_path, turns=3)


def fake(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], error: Exception | None = None) -> list[str]:
    """Replace `turns.take`: it runs nothing, leaves the reports of the first turn, and then begins the second."""
    trials: list[str] = []

    def take(sides: Any, series: turns.ComparedTurns, levels: str, progress: Any, **changes: Any) -> None:
        trials.append(sides[1].program.trial)
        if error is not None:
            raise error
        for side, runs in zip("ab", (series.a, series.b), strict=True):
            runs.append(series.out / f"{side}-01")
            rerun.report(runs[0]).parent.mkdir(parents=True, exist_ok=True)
            rerun.report(runs[0]).write_text(json.dumps(report if side == "b" else {"facts": {"threads": 2}}))
        progress("turn 2", 2, 6)
        raise AssertionError("the trial was not stopped")

    monkeypatch.setattr(turns, "run_turns", take)
    return trials


def run(plan: TrialPlan, *trials: str) -> list[TrialResult]:
    return list(experiment.run_trials(plan, [piece(trial) for trial in trials], lambda *_: None))


def test_a_trial_without_effect_ends_after_the_first_turn_without_a_gain(
    plan: TrialPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, {"applied": [], "reasons": ["Net: no convolutions"], "modules": ["Net"]})
    result, same = run(plan, "channels_last", "threads=2")
    assert (result.outcome, result.reason, result.real_gain) == (NOT_APPLICABLE, "Net: no convolutions", None)
    assert same.reason == "torch already computed with 2 threads"
    fake(monkeypatch, {"applied": [], "modules": []})
    assert run(plan, "channels_last")[0].reason == "no torch module was called"


def test_inference_trials_are_not_run_for_training_programs(plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = fake(monkeypatch, {})
    result = run(replace(plan, is_training=True), "inference_mode", "no-such-trial")
    assert [entry.outcome for entry in result] == [NOT_APPLICABLE] * 2
    assert trials == []


def test_a_failing_trial_is_one_line_and_the_next_trials_run(plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "'train.py (sdpa)' ended with exit code 1; the end of its output (x):\n  Traceback\n  ValueError: no"
    trials = fake(monkeypatch, {}, ProgramError(message))
    result = run(plan, "sdpa", "sdpa")
    assert (result[0].outcome, result[0].reason) == (FAILED, "the program ended with exit code 1: ValueError: no")
    assert trials == ["sdpa", "sdpa"]
    fake(monkeypatch, {}, ProgramError("'train.py' ended with exit code 1; it printed nothing"))
    with pytest.raises(ProgramError):
        run(plan, "sdpa")


def test_an_interrupt_keeps_the_trials_that_are_finished(plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_one(plan: TrialPlan, piece: Advice, progress: Any) -> TrialResult:
        if piece.trial == "sdpa":
            raise KeyboardInterrupt
        return tried_result(1.0)

    monkeypatch.setattr(experiment, "_try", try_one)
    with pytest.raises(KeyboardInterrupt):
        run(plan, "compile", "sdpa", "threads=2")
    assert len(plan.results) == 1


# --- output and history ---------------------------------------------------------------------------------------------


def test_gains_are_compared_with_predictions_as_shares_of_the_step() -> None:
    result = tried_result(1.5)
    assert result.real_percent == pytest.approx(15)
    assert result.off_percent == pytest.approx(25)
    assert tried_result(1.5, at_most=True).off_percent is None
    assert result.came_true is True
    assert tried_result(-1.5).came_true is False
    assert TrialResult(piece("sdpa"), FAILED, "why").came_true is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def test_history_counts_what_was_measured_on_this_machine(folder: Path) -> None:
    assert records.history(HERE, folder).line is None
    for result in (tried_result(1.5), tried_result(3.0), tried_result(-1.0), tried_result(2.0, at_most=True)):
        records.save(result, HERE, folder)
    records.save(TrialResult(piece("sdpa"), NOT_APPLICABLE, "no switch"), HERE, folder)
    records.save(TrialResult(piece("compile"), FAILED, "ended"), HERE, folder)
    records.save(tried_result(9.0), Machine.of({"cpu": "another", "cores": 2}), folder)
    (folder / "1-damaged.json").write_text("{")
    (folder / "2-other.json").write_text("[]")
    result = records.history(HERE, folder)
    assert (result.tried, result.came_true, result.expected, result.median_off_percent) == (4, 3, 3, pytest.approx(50))
    assert (result.not_applicable, result.failed, result.elsewhere, result.damaged) == (1, 1, 1, 2)
    assert result.line == (
        "4 pieces of advice were tried on this machine, 3 made the step faster; median error 50 % of the prediction "
        "over 3"
    )
    assert all(len(line) < 80 for line in text.history_text(result).splitlines())


def test_history_is_available_as_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(records.VARIABLE, str(folder))
    here = Machine.of(machine.describe())
    records.save(tried_result(1.5), here)
    assert main(["advise", "--history", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tried"], result["came_true"], result["rows"][0]["trial"]) == (1, 1, "threads=2")


def test_rows_of_trials_fit_a_terminal_and_name_the_effect_on_results() -> None:
    rows = [
        text.trial_head(),
        text.trial_lines(tried_result(2.5)),
        text.trial_lines(replace(tried_result(0.5, at_most=True), results="the same results", applied=("x" * 90,))),
        text.trial_lines(tried_result(-3.0)),
        text.trial_lines(TrialResult(piece("sdpa"), NOT_APPLICABLE, "its attention has no switch")),
    ]
    assert all(len(line) < 80 for row in rows for line in row.splitlines())
    assert "2.5 [1.5 … 3.5] ms 25 %" in rows[1]
    assert "not certain" in rows[2]
    assert "slower" in rows[3]
    assert "not applicable" in rows[4]


@pytest.mark.slow
def test_a_program_runs_without_and_with_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from xsp import cli
    from xsp.advise import advisor

    (tmp_path / "own.py").write_text(
        "import torch\n"
        "torch.backends.mkldnn.enabled = False\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)).eval()\n"
        "images = torch.rand(1, 3, 32, 32)\n"
        "for _ in range(30):\n    model(images)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "kept"))
    run = rerun.with_trial(rerun.program(Run.of({}), "r", "python own.py"), "").command(tmp_path / "r", "M/L", 0)
    (tmp_path / "output").mkdir()
    import subprocess

    subprocess.run(run, check=True, timeout=300)
    advice = [piece("fold_batch_norm"), piece("onednn=on"), piece("channels_last+threads=1"), piece("compile=no")]

    def of(subject: Any, **_: Any) -> Any:
        return advisor.AdviceReport("own", None, tuple(advice), (), {}, {})

    monkeypatch.setattr("xsp.advise.of", of)
    assert cli.main(["advise", "r", "--try", "4", "--turns", "3", "-q"]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "BatchNorm" not in message
    assert message.count("the same results") == 3
    assert "1 batch norms folded" in message
    assert "oneDNN is switched on" in message
    assert "not applicable" in message
    assert cli.main(["advise", "--history"]) == 0
    assert "3 pieces of advice were tried" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("option", [["--turns", "20"], ["--program", "python train.py"]])
def test_options_of_trials_are_refused_without_one(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "runs/none", *option]) == 2
    assert f"{option[0]} is for trials: add --try 3" in capsys.readouterr().err
