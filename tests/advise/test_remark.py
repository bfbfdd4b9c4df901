"""What is said at the end of a run: one piece of advice, and only where something is wrong."""

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


def test_the_best_piece_that_needs_no_trial_is_said_with_what_helps_and_what_to_type() -> None:
    said = remark.remark(trace(SLEEPS))
    assert said is not None
    assert said.startswith("advice: a call of Net spends 3.9")
    words = " ".join(said.split())
    assert "To save " in words  # the gain stands with the remedy, not with the time that it is of
    assert "39 % of a step: look for sleeping" in words
    assert said.splitlines()[-1].split(": ")[1].startswith("xsp advise ")
    assert max(map(len, said.splitlines())) <= 80


def test_the_command_that_is_said_can_be_typed_where_a_name_has_blanks() -> None:
    of = trace(SLEEPS)
    of.path = Path("runs/my run")
    assert str(remark.remark(of)).endswith("xsp advise 'runs/my run'")


def test_nothing_is_said_of_a_sound_step_nor_of_what_only_a_trial_tells() -> None:
    assert remark.remark(trace(SOUND)) is None
    assert remark.remark(trace(SOUND, machine={"torch_threads": 4, "cores": 2})) is None


def test_a_large_run_is_not_looked_through_and_the_line_says_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remark, "MOST_SPANS", 3)
    assert "xsp advise" in str(remark.remark(trace(SLEEPS)))


def test_a_plugin_that_fails_or_returns_no_text_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> str:
        raise ValueError

    known = {"a": fails, "b": lambda _: 7, "c": lambda _: "", "d": lambda _: "this"}
    monkeypatch.setattr(plugins, "names", lambda _: list(known))
    monkeypatch.setattr(plugins, "load", lambda _, name: known[name])
    assert plugins.remarks(None) == ["this"]
