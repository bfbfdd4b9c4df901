"""`xsp predict MODEL`: a training step on many ranks from timings of its calls, without a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import recordeddevice  # noqa: E402
import standin  # noqa: E402
from madetimings import make_timing  # noqa: E402

import xsp  # noqa: E402
from xsp import bench, cli  # noqa: E402
from xsp.bench.environment import Environment, current_environment  # noqa: E402
from xsp.bench.spec import Loss  # noqa: E402
from xsp.bench.timings import Timings  # noqa: E402
from xsp.errors import AnalysisError, DeviceError, UsageError  # noqa: E402
from xsp.predict import timedstep  # noqa: E402
from xsp.predict.training import Work  # noqa: E402

NET = "torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)), torch.ones(batch, 64)"
GRADIENT_BYTES = 2 * (64 * 64 + 64) * 4


@pytest.fixture
def model(tmp_path: Path) -> str:
    return standin.written_model(tmp_path, NET)


def test_a_model_is_predicted_on_a_device_without_a_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    words = ["predict", model, "--device", "standin:0", "--timings", str(tmp_path / "timings"), "--ranks", "1,8"]
    words += ["--link", "10us,20GB/s", "--batch", "4"]
    assert cli.main([*words, "--fill", "60s", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recorded"]["gradient_bytes"] == GRADIENT_BYTES
    assert found["recorded"]["samples"] == 4
    one, eight = found["ranks"]
    assert one["step_s"] == pytest.approx(found["recorded"]["step_s"], rel=1e-6)
    assert eight["step_s"] > one["step_s"]
    assert any(standin.PRODUCT in text for text in found["from"])
    bound = xsp.bound.of(model, device="standin:0", timings=tmp_path / "timings", train=True, batch=4)
    assert found["recorded"]["step_s"] == pytest.approx(bound.rungs["measured"].sequential / 1e9)
    assert "the host needs" in " ".join(found["unknown"]), "the stand-in's launches take longer than its work"
    assert cli.main(words) == 0
    assert "from timings of single calls on 1 rank" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_layers_and_update_add_up_to_the_step(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    step = timedstep.of(model, device="standin", timings=tmp_path / "timings", fill=60.0)
    work = step.work
    assert isinstance(work, Work)
    total = sum(layer.forward + layer.backward for layer in work.layers) + work.update
    assert total == pytest.approx(step.step, rel=0.01)
    assert [layer.name for layer in work.layers if layer.gradients] == ["0", "2"]
    assert all(layer.backward > 0 for layer in work.layers if layer.gradients)
    assert work.update > 0


def test_what_is_not_timed_or_not_here_is_one_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    folder = tmp_path / "timings"
    with pytest.raises(AnalysisError, match=r"xsp bench .*net --device standin --train, or --fill 60s"):
        timedstep.of(model, device="standin", timings=folder)
    for product, kind in (("H200", "cuda"), ("MI300X", "hip")):  # nothing of it can be timed here
        how = rf"net --train --device {kind}:0 where {product} is, and xsp bench --export there, --import here$"
        with pytest.raises(AnalysisError, match=how):
            timedstep.of(model, device=product, timings=folder)
    with pytest.raises(DeviceError, match="there is no device standin:7 here"):
        timedstep.of(model, device="standin:7", timings=folder)
    with pytest.raises(UsageError, match="is the name of a product, whose calls cannot be timed here"):
        timedstep.of(model, device="H100", timings=folder, fill=10.0)
    for words, message in (
        (["predict", str(tmp_path), "--device", "cuda:0", "--ranks", "1"], "--device: for a model"),
        (["predict", model, "--gradients", "1MB", "--ranks", "1"], "--gradients: for a run or a trace"),
    ):
        assert cli.main(words) != 0
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_device_that_is_lost_while_calls_are_timed_is_the_reason_that_is_said(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone")
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::relu": "gone"}, gone=gone)
    with pytest.raises(AnalysisError, match=r"calls are timed.*; standin:0 was lost: standin:0 does not answer"):
        timedstep.of(model, device="standin", timings=tmp_path / "timings", fill=30.0)


@pytest.mark.slow
def test_a_lost_device_is_said_however_much_else_is_wrong_with_the_timings(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone")
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::relu": "gone"}, gone=gone)
    timings = Timings.open(tmp_path / "timings", current_environment(standin.StandIn()))
    timings.problems += [f"part {number} is damaged" for number in range(9)]
    with pytest.raises(AnalysisError, match=r"; standin:0 was lost: standin:0 does not answer: xsp bench"):
        timedstep.of(model, device="standin", timings=timings, fill=30.0)
    assert timings.loss == Loss("standin:0", "standin:0 does not answer")
    bound = xsp.bound.of(model, device="standin", timings=timings, train=True)
    assert bound.loss is None, "it was lost in another call"
    assert any("was lost" in problem for problem in bound.problems)


@pytest.mark.slow
def test_why_calls_that_were_tried_have_no_timing_is_said_also_if_others_have_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::addmm": "memory"})
    with pytest.raises(AnalysisError, match=r"calls are timed \(too-large: stand-in out of memory.*, \d calls\): xsp"):
        timedstep.of(model, device="standin", timings=tmp_path / "timings", fill=60.0)


def test_a_model_without_a_device_says_that_the_processor_was_timed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = {**current_environment().properties, "devices": [{"name": "NVIDIA H200"}]}
    environment = Environment(properties)
    monkeypatch.setattr("xsp.bench.timings.current_environment", lambda device=None: environment)
    timings = Timings.open(tmp_path / "timings", environment)
    pairs = bench.specs(xsp.graph.of(model, train=True))
    timings.add([replace(make_timing(spec, 1e4), environment=environment.hash) for spec, _ in pairs])
    step = timedstep.of(model, timings=timings.folder)
    assert any("timed on the processor" in text and "--device cuda:0" in text for text in step.sources)


def test_a_recorded_training_step_of_an_h200_is_predicted_from_its_timings(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "gpu"
    if not (folder / "isolated.json.gz").exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    name = "torchvision-resnet18-b64-train"
    timings = recordeddevice.stored(folder, tmp_path / "timings", name)
    graph = folder / "graphs" / f"{name}.json.gz"
    words = ["predict", str(graph), "--device", "H200", "--timings", str(timings.folder), "--link", "nvlink4"]
    assert cli.main([*words, "--ranks", "1,8", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entry = next(each for each in recordeddevice.read(folder)["models"] if recordeddevice.step_name(each) == name)
    assert found["recorded"]["step_s"] == pytest.approx(entry["eager"]["synced_ms"] / 1e3, rel=1e-3)
    assert found["recorded"]["gradient_bytes"] == pytest.approx(11_689_512 * 4, rel=1e-6)
    assert found["ranks"][1]["step_s"] >= found["ranks"][0]["step_s"]
