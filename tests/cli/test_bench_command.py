"""`xsp bench`: times a model's calls, shows and moves what is kept, and says in one line what it cannot do."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import refused, shown

pytest.importorskip("torch")

from xsp import terminal
from xsp.bench import repeatability, text
from xsp.bench.environment import current_environment
from xsp.bench.spec import Status
from xsp.bench.timings import Timings
from xsp.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "use" / "bench.md"
MODEL = """
import torch

def net(batch):
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.ReLU()
    return torch.nn.Sequential(*layers).eval(), torch.ones(batch, 3, 16, 16)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in a file, and its timings in `t`."""
    place = tmp_path_factory.mktemp("bench")
    (place / "net.py").write_text(MODEL)
    options = ["--threads", "1", "--budget", "2m", "--timings", str(place / "t")]
    assert main(["bench", f"{place}/net.py:net", *options]) == 0
    return place


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> Path:
    """Return a copy of it that a test may change."""
    shutil.copytree(filled, tmp_path / "copy")
    return tmp_path / "copy"


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *typed: str) -> str:
    return shown(capsys, "bench", *typed, "--timings", str(folder))


def as_json(capsys: pytest.CaptureFixture[str], folder: Path, *typed: str) -> Any:
    return json.loads(bench(capsys, folder, *typed, "--format", "json"))


def test_a_table_fits_80_columns_and_says_what_is_covered(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = bench(capsys, copy / "t", f"{copy}/net.py:net", "--threads", "1")
    assert "100.0% of the expected time" in shown
    assert "conv2d 1x3x16x16 8x3x3x3" in shown
    assert "per module call" in shown
    assert max(map(len, shown.splitlines()[3:])) <= 80
    assert "0 taken now" in shown


@pytest.mark.slow
def test_json_has_the_documented_keys(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, copy / "t", f"{copy}/net.py:net", "--threads", "1")
    assert (found["blocks"], found["unique"], found["timed"], found["timed_now"]) == (4, 3, 3, 0)
    assert {each["op"]: each["count"] for each in found["timings"]} == {
        "aten::conv2d": 1, "aten::batch_norm": 1, "aten::relu": 2
    }  # fmt: skip
    documented = PAGE.read_text(encoding="utf-8").partition("## Keys")[2].partition("## A runtime")[0]
    named = set(re.findall(r"`(\w+)`", documented))
    listed = as_json(capsys, copy / "t", "--list")
    checked = as_json(capsys, copy / "t", "--check")
    for keys in (found, found["timings"][0], listed[0], checked):
        assert set(keys) <= named
    assert listed[0]["here"] is True
    assert len(checked["timings"]) + len(checked["not_timed_now"]) == 3


@pytest.mark.slow
def test_what_is_missing_is_timed_and_nothing_twice(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"{copy}/net.py:net", "--threads", "1", "--budget", "2m"]
    assert as_json(capsys, copy / "t", *options, "--granularity", "1,2", "--variants", "all")["timed_now"] >= 2
    assert as_json(capsys, copy / "t", *options, "--granularity", "1,2")["timed_now"] == 0
    assert as_json(capsys, copy / "t", *options, "--state", "cold")["timed_now"] == 3


def test_timings_are_carried_by_a_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(copy / "all.parquet")
    assert as_json(capsys, copy / "t", "--export", file) == {"exported": 5, "problems": []}
    assert as_json(capsys, copy / "other", "--import", file)["imported"] == 5
    assert bench(capsys, copy / "other", "--list").count("(here)") == 1
    assert as_json(capsys, copy / "other", "--compact") == {"timings": 5, "parts": 1, "problems": []}
    assert "was" not in refused(capsys, "bench", "--import", f"{copy}/net.py", "--timings", str(copy / "other"))


def test_what_is_left_out_of_a_folder_is_named_where_its_timings_are_shown_or_exported(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(copy.glob("t/environment=*")).joinpath("part-damaged.parquet").write_bytes(b"PAR1")
    for typed in (["--export", str(copy / "all.parquet")], ["transfers", "--list"], ["--list"]):
        assert "part-damaged.parquet: cannot be read" in bench(capsys, copy / "t", *typed)
    assert len(as_json(capsys, copy / "t", "--export", str(copy / "all.parquet"))["problems"]) == 1


def relu_of_onnx(place: Path, length: int | str = 4) -> str:
    """Write an ONNX file of one node, and return its path."""
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, length]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), place / "m.onnx")
    return str(place / "m.onnx")


def test_a_node_of_onnx_is_no_operator_of_torch_which_takes_no_process_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xsp.bench.plan.Turns", None)
    shown = bench(capsys, tmp_path / "t", relu_of_onnx(tmp_path), "--threads", "1", "--runtime", "torch")
    assert "onnx::Relu: is an ONNX node" in shown
    assert "Coverage: 0.0%" in shown
    assert "missing" not in shown
    monkeypatch.setattr("xsp.bench.plan.has_onnx_runtime", lambda: False)
    assert "pip install 'xsp[onnxruntime]'" in refused(
        capsys, "bench", relu_of_onnx(tmp_path), "--timings", f"{tmp_path}/t"
    )


@pytest.mark.slow
def test_a_file_of_onnx_is_timed_by_its_own_runtime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'xsp[onnxruntime]'")
    found = as_json(capsys, tmp_path / "t", relu_of_onnx(tmp_path), "--threads", "1", "--budget", "1m")
    (timing,) = found["timings"]
    assert (timing["op"], timing["runtime"]) == ("onnx::Relu", "onnxruntime")
    assert timing["trimmed_ns"] > 0
    assert 0 < found["seconds_starting"] < found["seconds"]


def test_symbolic_dimensions_of_a_file_get_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = relu_of_onnx(tmp_path, "tokens")
    options = [path, "--threads", "1", "--runtime", "torch"]  # which times no node: only shapes matter here
    (hole,) = as_json(capsys, tmp_path / "t", *options)["timings"]
    (known,) = as_json(capsys, tmp_path / "t", *options, "--size", "tokens=4")["timings"]
    (fixed,) = as_json(capsys, tmp_path / "t", relu_of_onnx(tmp_path), *options[1:])["timings"]
    assert known["key"] == fixed["key"] != hole["key"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], "give one SOURCE"),
        (["--list", "--check"], "give one SOURCE"),
        (["a.onnx", "--budget", "0s"], "give a time above 0"),
        (["a.onnx", "--budget=-5s"], "give a time above 0"),
        (["a.onnx", "--budget", "soon"], "give a time above 0"),
        (["a.onnx"], "there is no such file"),
        (["net.py:net", "--threads", "0"], "numbers above 0"),
        (["net.py:net", "--granularity", "x"], "numbers above 0"),
        (["net.py:net", "--variants", "channels-lats"], "did you mean channels-last"),
        (["net.py:net", "--runtime", "torhc"], "did you mean torch"),
        (["net.py:net", "--size", "n=3"], "has no named dimensions"),
        (["net.py:net", "--decode", "8"], "for language models of transformers"),
        (["--check"], "no timings of this machine"),
        (["--export", "x.parquet"], "no timings to export"),
        (["--import", "x.parquet"], "not a file of timings"),
        (["--missing-of", "no-run"], "no such file"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    typed: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XSP_TIMINGS", str(tmp_path / "t"))
    assert said in refused(capsys, "bench", *typed)
    assert not (tmp_path / "t").exists()


def test_an_interrupt_is_said_in_one_line(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xsp.bench.fill", interrupted)
    assert main(["bench", f"{copy}/net.py:net", "--timings", str(copy / "t")]) == 130
    assert "run it again to continue" in capsys.readouterr().err


def test_holes_are_shown_with_their_reasons_and_as_null(copy: Path) -> None:
    timings = Timings.open(copy / "t", current_environment())
    from xsp import bench, graph
    from xsp.bench.spec import untimed

    pairs = bench.specs(graph.of(f"{copy}/net.py:net"), threads=1)
    spec = pairs[0][0]
    timings.add([dataclasses.replace(untimed(spec, Status.FAILED, "no \x1b[31mway"), taken_ns=2**62)])
    shown = terminal.page(text.fill_document("net", pairs, timings, [], 1.0))
    assert "failed 1×  conv2d: no " in shown
    assert "\x1b" not in shown
    assert text.fill_as_json("net", pairs, timings, [], 1.0)["timings"][0]["trimmed_ns"] is None


def test_a_check_says_how_far_timings_are_apart(copy: Path) -> None:
    kept = [each for each in Timings.open(copy / "t", current_environment()) if each.is_timed]
    pairs = [(each, dataclasses.replace(each, trimmed_ns=each.trimmed_ns * 1.5)) for each in kept if each.trimmed_ns]
    found = repeatability.Check(pairs, [])
    assert found.median == pytest.approx(0.5)
    assert found.ninetieth == pytest.approx(0.5)
    assert "+50.0%" in terminal.page(text.check_document(found))
    assert repeatability.Check([], kept).median is None
