"""What a benchmark prints if a model, a rank or a case fails, if it is interrupted, and if there is only one of all."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import graph_sources
import parents
import predict_scaling
import pytest
import share_models
from parts import ddp_cases, page, turns

from xsp.errors import GraphError, UsageError


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return options with `--save`, which saves into an empty folder."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "update", lambda: None)
    return turns.parse(turns.parser("One line."), ["--save"])


def test_what_was_measured_before_an_interrupt_is_printed_and_not_saved(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    report = turns.Report("one", "One", ("model", "ms"))
    with report.until_interrupted():
        for name in ("first", "second", "third"):
            with report.trying(name):
                if name == "first":
                    raise UsageError("no such model\nand more")
                if name == "third":
                    raise KeyboardInterrupt
                report.add([name, "1"])
    report.finish(options)
    output = capsys.readouterr()
    assert "| second |" in output.out
    assert "first: failed (no such model)." in output.out
    assert "Interrupted" in output.out
    assert "nothing is saved" in output.err
    assert list(page.RESULTS.iterdir()) == []
    whole = turns.Report("two", "Two", ("model", "ms"))
    whole.add(["first", "1"])
    whole.finish(options)
    assert [entry.name for entry in page.RESULTS.iterdir()] == ["two.json"]


def test_what_was_measured_before_an_interrupt_is_saved_apart_where_it_is_asked_for(
    options: argparse.Namespace, tmp_path: Path
) -> None:
    options.partial = tmp_path / "parts"
    report = turns.Report("one", "One", ("model", "ms"))
    with report.until_interrupted():
        report.add(["first", "1"])
        raise KeyboardInterrupt
    report.finish(options)
    assert list(page.RESULTS.iterdir()) == []
    saved = turns.stored(tmp_path / "parts" / "one.json")
    assert saved["table"] == [{"model": "first", "ms": "1"}]
    assert "partial" not in saved["options"]


def test_what_an_interrupted_run_has_left_half_written_is_measured_again(tmp_path: Path) -> None:
    assert turns.stored(tmp_path / "none.json") is None
    (tmp_path / "half.json").write_text('{"a": ')
    assert turns.stored(tmp_path / "half.json") is None
    (tmp_path / "whole.json").write_text('{"a": 1}')
    assert turns.stored(tmp_path / "whole.json") == {"a": 1}


def test_a_model_that_cannot_be_captured_is_told_for_each_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(spec: str) -> Any:
        raise GraphError(f"{spec} cannot be had")

    monkeypatch.setattr("xsp.graph.of", refused)
    graph_sources.main(["--models", "torchvision:nothing", "--seconds", "60"])
    output = capsys.readouterr().out
    for source in ("execution trace", "program"):
        assert f"{source}, torchvision:nothing: it cannot be captured: torchvision:nothing cannot be had" in output


def test_no_model_has_no_mean() -> None:
    report = turns.Report("share_models", "Loading", ("model",))
    share_models._conclude(report, [], 3)
    assert report.notes == ["None of 3 models was measured."]
    assert share_models._decision_notes([]) == []


def test_a_fit_that_only_one_side_has_is_shown_without_the_other() -> None:
    report = predict_scaling.report([{"without": {"ridge": 0.1}, "with": {"dag": 0.2}}])
    assert [list(row) for row in report.rows] == [["dag", "–", "20.0%", "–"], ["ridge", "10.0%", "–", "–"]]
    assert (report.data["dag"]["without"], report.data["ridge"]["given"]) == (None, None)


def test_jobs_that_are_left_are_counted_under_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        predict_scaling, "job_errors", lambda chance: {"without": {"ridge": 0.1}, "with": {"ridge": 0.2}}
    )
    predict_scaling.main(["--quick", "--seconds", "0", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert "| ridge |" in output
    assert f"1 of {predict_scaling.JOBS_QUICK} jobs are left" in output


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("print('{}') if sys.argv[4] == '0' else sys.exit(3)", "rank 1 ended with exit code 3"),
        ("sys.exit(4) if sys.argv[4] == '0' else time.sleep(60)", "rank 0 ended with exit code 4"),
        ("pass", "rank 0 printed no figures"),
    ],
)
def test_ranks_that_fail_are_named_and_none_is_waited_for(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(f"import sys, time\n{script}\n")
    monkeypatch.setattr(ddp_cases, "WORKER", worker)
    (tmp_path / "run").mkdir()
    with pytest.raises(ddp_cases.CaseError, match=says):
        ddp_cases.measure_case("mlp", 1, 1, 1, tmp_path / "run")


def test_a_recording_that_fails_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nsys.exit(5)\n")
    monkeypatch.setattr(ddp_cases, "WORKER", worker)
    with pytest.raises(ddp_cases.CaseError, match="the recorded process ended with exit code 5"):
        ddp_cases.measure_case("mlp", 1, 1, 1, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ranks_of_which_no_case_was_measured_are_reported(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    import predict_buckets
    import predict_ddp

    options.ranks = 2
    for script in (predict_ddp, predict_buckets):
        script.report(options, [], 2, ["cnn, 8: rank 1 ended with exit code 3."])
        output = capsys.readouterr().out
        assert "cnn, 8: rank 1 ended with exit code 3." in output
        assert "No case was measured" in output
    assert list(page.RESULTS.iterdir()) == []


def test_fabricated_spans_are_placed_without_orphans() -> None:
    seconds, peak_bytes, orphans = parents.place_spans(200)
    assert seconds > 0
    assert peak_bytes > 0
    assert orphans == 0


def test_one_size_tells_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "_place_in_process", lambda size: (1.0, 1_000_000, 0))
    monkeypatch.setattr(parents, "correlation_s", lambda size: 2.0)
    report = parents.measure(argparse.Namespace(rounds=3), [1_000])
    assert len(report.rows) == 1
    assert report.notes == ["One size: there is no exponent."]
