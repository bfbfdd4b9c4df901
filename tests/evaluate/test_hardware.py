"""The device of a manifest: none, any, or part of a product's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

pytest.importorskip("torch")

import standin
from evaluations import show_nothing

from xsp import cli
from xsp.device import devices
from xsp.device.processor import Processor
from xsp.errors import ManifestError
from xsp.evaluate import agents, extras, hardware, predictors, reading
from xsp.evaluate.manifest import Hardware
from xsp.launch import models


def test_a_manifest_chooses_a_device_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch, count=2)
    assert hardware.accelerators() == (standin.PRODUCT, standin.PRODUCT)
    for gpu in ("", "none", "None"):
        assert not hardware.asks_for_device(Hardware(gpu=gpu))
        assert hardware.usable(Hardware(gpu=gpu)).torch_name == "cpu"
    assert hardware.asks_for_device(Hardware(gpu="any"))
    assert hardware.usable(Hardware(gpu="stand-in")).torch_name == standin.StandIn(0).torch_name
    with pytest.raises(ManifestError, match=r"hardware.gpu: 'H200' is required, here are Stand-in 1, Stand-in 1"):
        hardware.usable(Hardware(gpu="H200"))
    note = "evaluated on the processor, not on Stand-in 1: hardware: {gpu: any} chooses the device"
    assert hardware.processor_note(Hardware()) == [note]
    assert hardware.processor_note(Hardware(gpu="none")) == hardware.processor_note(Hardware(gpu="any")) == []
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    assert hardware.processor_note(Hardware()) == []
    with pytest.raises(ManifestError, match="'any' is required, here are none"):
        hardware.usable(Hardware(gpu="any"))


def test_a_misspelled_choice_of_a_device_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text("model: {name: x, source: 'micro:path-3'}\nhardware: {gpuu: any, gpu: no such device}\n")
    assert cli.main(["evaluate", "run", str(manifest), "--store", str(tmp_path / "store")]) != 0
    assert "hardware.gpuu is kept but not used; did you mean gpu" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_device_that_is_busy_is_refused_and_one_that_was_usable_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_usable", set())
    busy = "standin:0 is busy, 97 % by other processes: end them"
    standin.install(tmp_path, monkeypatch, obstacle=busy)
    with pytest.raises(ManifestError, match=f"hardware.gpu: {busy}"):
        hardware.usable(Hardware(gpu="any"))
    assert not hardware.usable(Hardware()).obstacle()
    monkeypatch.setenv(standin.VARIABLE, "{}")
    assert hardware.usable(Hardware(gpu="any")).id == "standin:0"
    standin.install(tmp_path, monkeypatch, obstacle=busy)  # by the model that was opened before
    assert hardware.usable(Hardware(gpu="any")).id == "standin:0"


def test_an_error_of_the_device_says_what_to_do() -> None:
    for text, said in (
        ("stand-in out of memory", "; standin:0 has too little memory free: give a smaller batch, or end"),
        ("stand-in error: an illegal address", "; standin:0 is lost for this process: run it again once"),
        ("sizes differ", ""),
    ):
        found = hardware.remedy(standin.StandIn(0), RuntimeError(text))
        assert found.startswith(said)
        assert bool(found) == bool(said)
    assert hardware.remedy(Processor(), RuntimeError("sizes differ")) == ""


def test_a_device_that_is_lost_while_a_trace_is_recorded_leaves_a_note(tmp_path: Path) -> None:
    class Fails:
        def predict(self, handle: object, batches: object) -> Iterator[object]:
            raise RuntimeError("stand-in error: an illegal address")
            yield

    asked = reading.of_plain({"model": {"name": "path", "source": "micro:path-3"}}).manifest
    batch, options = {"0": np.zeros((1, 3))}, agents.Options(store=tmp_path, levels="M")
    fails, handle = cast(predictors.Predictor, Fails()), SimpleNamespace(device=standin.StandIn(0))
    (note,) = extras.write(tmp_path, asked, tmp_path, fails, handle, batch, options, show_nothing)
    assert note.startswith("no trace: model: raises RuntimeError on [1, 3] (stand-in error: an illegal address)")
    assert "standin:0 is lost for this process" in note


def test_agents_and_models_ask_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch)
    monkeypatch.setattr(standin.StandIn, "torch_name", "standin:0")
    assert models.default_device() == "standin"
    assert standin.PRODUCT in agents.local_facts().gpus
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    assert models.default_device() in ("cpu", "cuda")
