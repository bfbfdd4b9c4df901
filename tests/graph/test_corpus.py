"""Many models: each in a process beside, and none of them stops the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from xsp.cli import main
from xsp.errors import GraphError
from xsp.graph import corpus

MODELS = """
import os, time, torch
def good(batch):
    return torch.nn.Linear(4, 2), torch.zeros(batch, 4)
def ends(batch):
    os._exit(7)
def sleeps(batch):
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_fails_is_named_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    specs = [f"{tmp_path}/m.py:{name}" for name in ("good", "ends", "sleeps", "nothing", "good")]
    asked: list[str] = []
    found = corpus.collect(specs, tmp_path / "out", limit_s=20, progress=lambda what, *_: asked.append(what))
    assert found[0]["nodes"] == 1
    assert found[1]["error"] == "ended the process that captured it (exit code 7)"
    assert found[2]["error"].startswith("took more than")
    assert "nothing" in found[3]["error"]
    assert found[4] == found[0]
    assert asked == [*specs, "done"]


def test_what_is_there_is_not_made_again_and_a_line_that_was_cut_off_is(tmp_path: Path, monkeypatch) -> None:
    kept = {"spec": "timm:a", "asked": {"batch": 1, "train": False}, "nodes": 3}
    (tmp_path / corpus.FILE).write_text(json.dumps(kept) + '\n{"spec": "timm:b", "as')
    tried: list[str] = []

    def ask(self, spec: str, *_) -> dict:
        tried.append(spec)
        return {"error": "mine"}

    monkeypatch.setattr(corpus._Worker, "ask", ask)
    found = corpus.collect(["timm:a", "timm:b"], tmp_path)
    assert tried == ["timm:b"]
    assert found == [kept, {"spec": "timm:b", "asked": kept["asked"], "error": "mine"}]
    assert [row["spec"] for row in corpus.rows(tmp_path)] == ["timm:a", "timm:b"]
    with pytest.raises(GraphError, match="other settings"):
        corpus.collect(["timm:a"], tmp_path, batch=2)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--all", "torchvision"], "give --out"),
        (["--all", "torchvisio", "--out", "x"], "did you mean torchvision"),
        (["torchvision:resnet18", "--out", "x"], "--out is for --all"),
        (["--all", "timm", "--out", "x", "--rewrite"], "--rewrite: not with --all"),
        (["--all", "timm", "--out", "x", "--sequence", "64"], "--sequence: not with --all"),
        ([], "give one SOURCE"),
        (["a", "--all", "timm", "--out", "x"], "give one SOURCE"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(typed, says, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["graph", *typed]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
