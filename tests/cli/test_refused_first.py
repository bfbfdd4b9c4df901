"""Options that make no sense are refused before a run is loaded, a graph is captured, or anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xsp.cli import main, options
from xsp.errors import UnwritableError

pytest.importorskip("torch")

MODEL = "micro:path-3"
LANGUAGE = ["bound", "transformers:gpt2", "--decode", "8:64"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, in which a graph, a model and a sweep fail the test."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("time was spent before the option was refused")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XSP_TIMINGS", str(tmp_path / "timings"))
    monkeypatch.delenv("XSP_SHARE_DIR", raising=False)
    monkeypatch.setattr("xsp.graph.captured.of_name", never)
    monkeypatch.setattr("xsp.launch.models.sweep", never)
    monkeypatch.setattr("xsp.bound.ceiling.of_machine", never)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank.9.et").write_bytes(b"")
    (tmp_path / "mine.json").write_text("[]")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["bound", MODEL, "--html", "no/x.html"], "no/x.html: cannot be written"),
        (["bound", MODEL, "--curve", "--html", "traces"], "traces: cannot be written"),
        (["bound", MODEL, "--device", "nosuch"], "no device 'nosuch'"),
        (["bound", MODEL, "--like", "ffff"], "'ffff' is not one environment"),
        (["bound", MODEL, "--curve", "--like", "ffff"], "'ffff' is not one environment"),
        ([*LANGUAGE, "--like", "ffff"], "'ffff' is not one environment"),
        ([*LANGUAGE, "--device", "nosuch"], "no device 'nosuch'"),
        ([*LANGUAGE, "--html", "no/x.html"], "no/x.html: cannot be written"),
        (["graph", MODEL, "--rewrite", "--html", "x.html"], "not with --rewrite"),
        (["graph", MODEL, "--save", "no/g.json"], "no/g.json: cannot be written"),
        (["bench", MODEL, "--granularity", "x"], "numbers above 0"),
        (["bench", MODEL, "--threads", "x"], "numbers above 0"),
        (["bench", MODEL, "--variants", "nosuch"], "there is no variant 'nosuch'"),
        (["bench", MODEL, "--runtime", "nosuch"], "there is no runtime 'nosuch'"),
        (["bench", MODEL, "--families", "memory"], "--families belongs to xsp bench transfers or collectives"),
        (["bench", "--list", "--section", "runs"], "--section belongs to xsp bench transfers or collectives"),
        (["bench", "transfers", "--train"], "--train belongs to xsp bench MODEL"),
        (["bench", "collectives", "--granularity", "2", "--list"], "--granularity belongs to xsp bench MODEL"),
        (["advise", MODEL, "--only", "nosuch"], "there is no question 'nosuch'"),
        (["advise", MODEL, "--try", "0"], "--try 0"),
        (["advise", MODEL, "--try", "3", "--turns", "2"], "2 turns"),
        (["advise", MODEL, "--try", "3"], "--try needs a run"),
        (["predict", "none", "--ranks", "8", "--link", "nosuch"], "there is no link 'nosuch'"),
        (["predict", "none", "--ranks", "8", "--link", "nvlink4", "--what-if", "link=nosuch"], "no link 'nosuch'"),
        (["predict", "none", "--ranks", "2", "--link", "nvlink4", "--chakra", "traces"], "rank.9.et of a step on more"),
        (["predict", "fit", "none.csv", "-o", "no/fit.json"], "no/fit.json: cannot be written"),
        (["predict", "fit", "none.csv", "-o", "mine.json"], "is not a fit of xsp"),
        (["sweep", MODEL, "--latency-target", "nan"], "--latency-target nan"),
        (["sweep", MODEL, "--repeats", "0"], "--repeats 0"),
    ],
)
def test_an_option_is_refused_before_any_time_is_spent(
    typed: list[str], says: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    err = capsys.readouterr().err
    assert err.startswith("xsp: error: ")
    assert says in err
    assert not (place / "runs").exists()


def test_phases_without_a_backward_pass_are_refused_before_anything_is_measured_or_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent: list[str] = []
    monkeypatch.setattr("xsp.bench.fill", lambda *_, **__: spent.append("fill"))
    monkeypatch.setattr("xsp.bound.ceiling.of_machine", lambda may_measure: spent.append("ceilings"))
    asked = ["bound", MODEL, "--phases", "--fill", "60s", "--timings", str(tmp_path / "t")]
    assert main(asked) == 2
    assert "no backward pass; give --train" in capsys.readouterr().err
    assert spent == []


def test_images_of_pitfalls_are_looked_for_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("yaml")
    built: list[Any] = []
    monkeypatch.setattr("xsp.evaluate.predictors.Torch.open", lambda *given: built.append(given))
    assert main(["evaluate", "pitfalls", "--data", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert built == []


def test_files_that_can_be_written_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("")
    options.check_writable(None, tmp_path / "there.html", tmp_path / "new.html")
    for file in (tmp_path, tmp_path / "none" / "x", tmp_path / "there.html" / "x"):
        with pytest.raises(UnwritableError, match="cannot be written"):
            options.check_writable(file)
