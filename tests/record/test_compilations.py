"""What torch compiled during a run: its time is stated, and no figure of the loop is taken from the steps with it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp import account  # noqa: E402
from xsp.account import entries as names  # noqa: E402
from xsp.account.sentences import remarks  # noqa: E402
from xsp.record.compilations import compilations  # noqa: E402


def note(**values: Any) -> SimpleNamespace:
    """Return a note as torch keeps one."""
    usual = {
        "start_time": 10.0, "entire_frame_compile_time_s": 0.5, "co_name": "forward", "co_filename": "/home/me/net.py",
        "co_firstlineno": 7, "recompile_reason": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **values})


def found(monkeypatch: pytest.MonkeyPatch, *notes: SimpleNamespace, since_ns: int = 0) -> list[dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_compilation_metrics=lambda: notes))
    return compilations(since_ns)


def test_notes_of_torch_become_intervals_of_the_epoch_without_the_users_directory(monkeypatch: Any) -> None:
    (one,) = found(monkeypatch, note(), note(start_time=1.0), since_ns=5 * 10**9)
    assert (one["start_ns"], one["dur_ns"]) == (10 * 10**9, 5 * 10**8)
    assert (one["function"], one["file"], one["line"], one["reason"]) == ("forward", "net.py", 7, None)


def test_a_reason_has_no_values_of_the_program(monkeypatch: Any) -> None:
    reason = "0/3: L['self'].token == 'hunter2'  # net.py:3 in forward\n0/1: another"
    (one,) = found(monkeypatch, note(recompile_reason=reason))
    assert "hunter2" not in one["reason"]
    assert one["reason"].startswith("L['self'].token == …")


@pytest.mark.parametrize("notes", [None, 3, [SimpleNamespace()], [note(start_time=None)], [note(co_filename=3)]])
def test_notes_of_another_form_are_none(monkeypatch: Any, notes: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_compilation_metrics=lambda: notes))
    assert compilations(0) == []


def test_a_program_that_never_compiled_does_not_load_the_compiler(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compilations(0) == []
    assert "torch._dynamo.utils" not in sys.modules


@pytest.mark.slow
def test_compiling_anew_for_other_sizes_is_stated_with_its_reason_and_is_in_no_iteration(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    compiled = torch.compile(model, dynamic=False, backend="eager")
    with xsp.profile("sizes", out=tmp_path / "run", levels="M", samples=False) as prof, torch.inference_mode():
        for index in range(60):
            with prof.step():
                compiled(torch.ones(8 + index // 20, 64))
    trace = xsp.load(tmp_path / "run")
    assert len(trace.run.compilations) == 3
    assert trace.sql("SELECT count(*) FROM loop WHERE status = 'compiling'").fetchall() == [(3,)]
    accounted = account.of(trace)
    (compiling,) = (entry for entry in accounted.program if entry.name == names.COMPILING)
    assert compiling.calls == 3
    assert compiling.ms == pytest.approx(sum(each.dur_ns for each in trace.run.compilations) / 1e6)
    assert sum(entry.ms or 0 for entry in accounted.program) == pytest.approx(accounted.wall_ms)
    assert accounted.job is not None
    assert (accounted.job.time.ms or 0) < compiling.ms / 20, "no iteration contains a compilation"
    assert accounted.violations == ()
    (text,) = (remark.text for remark in remarks(accounted) if remark.text.startswith("Compiling"))
    assert "2 of 3 times anew, since tensor 'args[0]' size mismatch at index 0. expected 8, actual 9" in text
    assert "dynamic=True" in text
