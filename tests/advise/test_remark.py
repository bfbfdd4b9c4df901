"""The remark at the end of a run: one piece of advice if there is a flaw."""

from __future__ import annotations

from pathlib import Path

import pytest

from xsp import plugins
from xsp.advise import remark
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

SLEEPS = """
    step s 0-10000
    forward Net 10-9900
    module net 20-9890 type=Net input_shapes=[[64,256]]
    op aten::linear 4000-9870 dtype=float
"""
SOUND = SLEEPS.replace("4000-9870", "30-9870")


def trace(text: str, **run: object) -> Trace:
    return trace_of([row for number in range(3) for row in spans(text, step=number)], run=run)


def test_the_best_piece_without_a_trial_is_shown_with_its_remedy_and_command() -> None:
    line = remark.remark(trace(SLEEPS))
    assert line is not None
    assert line.startswith("advice: a call of Net spends 3.9")
    words = " ".join(line.split())
    assert "To save " in words  # the gain is beside the remedy
    assert "39 % of a step: look for sleeping" in words
    assert line.splitlines()[-1].split(": ")[1].startswith("xsp advise ")
    assert max(map(len, line.splitlines())) <= 80


def test_the_command_quotes_a_path_with_blanks() -> None:
    run_trace = trace(SLEEPS)
    run_trace.path = Path("runs/my run")
    assert str(remark.remark(run_trace)).endswith("xsp advise 'runs/my run'")


def test_there_is_no_remark_on_a_sound_step_or_an_unknown_gain() -> None:
    assert remark.remark(trace(SOUND)) is None
    assert remark.remark(trace(SOUND, machine={"torch_threads": 4, "cores": 2})) is None


def test_a_large_run_is_not_searched_and_the_remark_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remark, "MOST_SPANS", 3)
    assert "xsp advise" in str(remark.remark(trace(SLEEPS)))


def test_a_plugin_that_fails_or_returns_no_text_adds_no_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> str:
        raise ValueError

    remarks = {"a": fails, "b": lambda _: 7, "c": lambda _: "", "d": lambda _: "this"}
    monkeypatch.setattr(plugins, "names", lambda _: list(remarks))
    monkeypatch.setattr(plugins, "load", lambda _, name: remarks[name])
    assert plugins.remarks(None) == ["this"]
