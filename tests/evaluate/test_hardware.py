"""The device of a manifest: none, any, or part of a product's name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import standin

from xsp.errors import ManifestError
from xsp.evaluate import agents
from xsp.evaluate.manifest import Hardware
from xsp.launch import models


def test_a_manifest_chooses_a_device_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch, count=2)
    assert agents.accelerators() == (standin.PRODUCT, standin.PRODUCT)
    for gpu in ("", "none", "None"):
        assert not agents.asks_for_device(Hardware(gpu=gpu))
        assert agents.torch_name(Hardware(gpu=gpu)) == "cpu"
    assert agents.asks_for_device(Hardware(gpu="any"))
    assert agents.torch_name(Hardware(gpu="stand-in")) == standin.StandIn(0).torch_name
    with pytest.raises(ManifestError, match=r"hardware.gpu: 'H200' is required, here are Stand-in 1, Stand-in 1"):
        agents.torch_name(Hardware(gpu="H200"))
    note = "evaluated on the processor, not on Stand-in 1: hardware: {gpu: any} chooses the device"
    assert agents.processor_note(Hardware()) == [note]
    assert agents.processor_note(Hardware(gpu="none")) == agents.processor_note(Hardware(gpu="any")) == []
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    assert agents.processor_note(Hardware()) == []
    with pytest.raises(ManifestError, match="'any' is required, here are none"):
        agents.torch_name(Hardware(gpu="any"))


def test_agents_and_models_ask_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch)
    monkeypatch.setattr(standin.StandIn, "torch_name", "standin:0")
    assert models.default_device() == "standin"
    assert standin.PRODUCT in agents.local_facts().gpus
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    assert models.default_device() in ("cpu", "cuda")
