"""The GPU script's parts for the second line: a dry run on the stand-in, and programs with a flaw on the processor."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from depth import first

torch = pytest.importorskip("torch")

import device_line  # noqa: E402
import gpu_advice  # noqa: E402
import standin  # noqa: E402
from parts import gpu_programs, turns  # noqa: E402

from xsp import advise  # noqa: E402
from xsp.advise import Needs  # noqa: E402

MODEL = """
import torch

def net(batch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.ones(batch, 64)
"""


@pytest.mark.slow
def test_the_second_line_on_a_device_saves_each_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    (tmp_path / "nets.py").write_text(MODEL)
    model = f"{tmp_path / 'nets.py'}:net"
    words = [str(tmp_path / "out"), f"{model},batch=4,train", f"{model}x,batch=2", "--device", "standin:0"]
    assert device_line.main([*words, "--seconds", "120"]) == 1, "the second model does not exist"
    found = json.loads((tmp_path / "out" / "nets.py-net,batch=4,train.json").read_text())
    assert found["bound"]["limit"]
    assert found["operators"]
    assert [point["ranks"] for point in found["prediction"]["ranks"]] == [1, 8]
    assert "launches" in found["advice"]["asked"]
    failed = json.loads((tmp_path / "out" / "nets.py-netx,batch=2.json").read_text())
    assert failed["bound"].startswith("no answer: ")
    assert (tmp_path / "out" / "timings.parquet").exists()
    assert "no bound" in capsys.readouterr().out
    assert device_line.main([str(tmp_path / "none"), model, "--device", "standin:9"]) == 1
    assert "there is no device standin:9 here" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_second_line_answers_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    (tmp_path / "nets.py").write_text(MODEL)
    model = f"{tmp_path / 'nets.py'}:net"
    assert device_line.main([str(tmp_path / "out"), f"{model},batch=4,train", "--seconds", "60"]) == 0
    found = json.loads((tmp_path / "out" / "nets.py-net,batch=4,train.json").read_text())
    assert found["bound"]["rungs"]["replayed"]["sequential_ns"] > 0
    assert found["prediction"]["recorded"]["step_s"] > 0
    assert {"launches", "choice", "precision"} <= {*found["advice"]["asked"]}


def test_every_program_has_its_advice_and_runs_with_and_without_its_flaw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*gpu_programs.FLAWS} == {*gpu_advice.PLANTED}
    assert (len(gpu_programs.FLAWS), len(gpu_programs.SOUND)) == (20, 5)
    monkeypatch.setattr(gpu_programs, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_programs, "SMALL", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    before = torch.get_float32_matmul_precision()
    try:
        for name, build in {**gpu_programs.FLAWS, **gpu_programs.SOUND}.items():
            for flawed in (True, False) if name in gpu_programs.FLAWS else (True,):
                monkeypatch.setattr(gpu_programs, "FLAWED", flawed)
                build()()
    finally:
        torch.set_float32_matmul_precision(before)


def test_answers_are_judged_and_summed_up() -> None:
    pieces = [
        {"question": "device-idle", "what": "waited: single values are read", "do": "", "of_step_percent": 40},
        {"question": "device-fusion", "what": "chains", "do": "", "of_step_percent": 10},
    ]
    assert gpu_advice.judged("sync_item", pieces, 50.0) == gpu_advice.Answer(1, pieces[0]["what"][:60], 40.0, 50.0)
    assert gpu_advice.judged("double", pieces, None).rank is None
    assert gpu_advice.judged("sound_graph", [], None) == gpu_advice.Answer(None, "none", 0.0, None)
    report = turns.Report("gpu_advice", "", gpu_advice.COLUMNS)
    for name in ("sync_item", "sound_graph"):
        answer = gpu_advice.judged(name, pieces if name == "sync_item" else [], 50.0 if name == "sync_item" else None)
        gpu_advice._add(report, name, answer, {"answer": answer._asdict()})
    gpu_advice._summarise(report)
    assert report.rows[0] == ["sync_item", "1", pieces[0]["what"][:60], "40 %", "50 %", "20 %"]
    assert report.notes == [
        "Right advice first in 1 of 1 (goal 90%).", "Most promised to a sound program: 0 % (goal 10).",
        "Median error of a gain: 20 % (goal 30).",
    ]  # fmt: skip


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_advice.main(["--quick"])


RECORDED = {
    "f01_sync_item": "sync_item", "f02_pageable": "pageable", "f03_fp32_matmul": "fp32_matmul", "f04_layout": "layout",
    "f05_attention": "attention", "f06_optimizer": "optimizer_one_by_one", "f08_pointwise": "pointwise",
    "u03_nccl": "fp32_matmul",
}  # fmt: skip


@pytest.mark.parametrize("name", first(1, RECORDED))
def test_recorded_programs_get_the_right_advice_first(name: str, shared: Path, tmp_path: Path) -> None:
    file = shared / "gpu" / "runs" / f"{name}.tar.gz"
    if not file.exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    report = advise.of(str(tmp_path / name), max_needs=Needs.TRACE)
    answer = gpu_advice.judged(RECORDED[name], gpu_advice.plain(report), None)
    assert answer.rank == 1, answer.first
    assert all(piece.gain.high <= report.step.ms.high for piece in report.advice)
