"""Evaluations whose weights are in the store of the machine: the same outputs, and what cannot be shared."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from depth import deep

pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("torchvision")
pytest.importorskip("safetensors")

from evaluations import FACTS, show_nothing
from sharing import running_store as store_at

from xsp.errors import ManifestError
from xsp.evaluate import reading, results, running, sharing
from xsp.evaluate.agents import Options
from xsp.evaluate.manifest import Manifest


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XSP_SHARE_DIR", str(tmp_path / "s"))
    return tmp_path / "s"


def asked(share: bool = True, **model: Any) -> Manifest:
    given = {"name": "m", "source": "torchvision:squeezenet1_1", **model, "share": share}
    return reading.of_plain({"model": given, "dataset": {"samples": 2}, "scenario": {"requests": 2}}).manifest


def evaluated(manifest: Manifest, folder: Path) -> results.Result:
    return results.read(
        running.evaluate(manifest, folder, Options(folder / "store", trusted=True), FACTS, show_nothing)
    )


@pytest.mark.parametrize("model", [
    pytest.param({"precision": "bfloat16"}, id="another precision"),
    deep({"source": "torchvision:resnet18"}, id="running statistics"),
    deep({"source": "timm:mixer_s32_224"}, id="a head that is zero"),
    deep({"source": "timm:swin_tiny_patch4_window7_224"}, id="buffers of parameters"),
    deep({"source": "transformers:bert"}, id="tied weights"),
])  # fmt: skip
def test_outputs_are_the_same_and_the_second_process_finds_the_weights_there(
    model: dict[str, Any], tmp_path: Path, place: Path
) -> None:
    for name in ("timm", "transformers"):
        if name in model.get("source", ""):
            pytest.importorskip(name)
    with store_at(place):
        found = [evaluated(asked(share, **model), tmp_path) for share in (False, True, True)]
    assert len({each.content["outputs"]["digest"] for each in found}) == 1
    said = [" ".join(each.content["notes"]) for each in found]
    assert ["of weights are shared" in each for each in said] == [False, True, True]
    assert ["put there by this process" in each for each in said] == [False, True, False]
    assert len({"initialised with zeros" in each for each in said}) == 1


def test_the_key_of_weights_has_the_content_of_a_configuration_in_a_file(tmp_path: Path) -> None:
    keys = []
    for folder, content in (("a", "{}"), ("b", "{}"), ("b", '{"vocab_size": 9}')):
        path = tmp_path / folder / "tiny.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        keys.append(
            sharing._weights_hash(asked(source="transformers:tiny.json?n_layer=1"), f"transformers:{path}?n_layer=1")
        )
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.slow
def test_weights_of_a_configuration_in_a_file_are_those_of_its_content(tmp_path: Path, place: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 128}

    def digest(folder: str, spread: float, share: bool) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "tiny.json").write_text(json.dumps({**config, "initializer_range": spread}))
        manifest = asked(share, source="transformers:tiny.json")
        return str(evaluated(manifest, tmp_path / folder).content["outputs"]["digest"])

    with store_at(place):
        first, edited, other = (digest(*each, True) for each in (("a", 0.02), ("a", 0.5), ("b", 0.1)))
    assert [first, edited, other] == [digest(*each, False) for each in (("a", 0.02), ("a", 0.5), ("b", 0.1))]
    assert len({first, edited, other}) == 3


@pytest.mark.slow
def test_a_store_that_was_started_anew_gets_the_weights_again_and_none_is_an_error(tmp_path: Path, place: Path) -> None:
    manifest = asked()
    with pytest.raises(ManifestError, match=r"model\.share: .*xsp share serve"):
        evaluated(manifest, tmp_path)
    assert not results.read_all(tmp_path / "store")[0]
    for damaged in (False, True):
        with store_at(place) as store:
            if damaged:
                (note,) = (place / "models").iterdir()
                note.write_text(json.dumps({"key": 7}), encoding="utf-8")
            assert "put there" in " ".join(evaluated(manifest, tmp_path).content["notes"])
            store.end(signal.SIGTERM)
    with store_at(place, "1MiB"), pytest.raises(ManifestError, match=r"model\.share: .*1 MiB"):
        evaluated(manifest, tmp_path)


@pytest.mark.parametrize(("model", "reason"), [
    ({"source": "m.pt2"}, "models by name"),
    ({"source": "m.onnx"}, "models by name"),
    ({"source": "m.py:build"}, "models by name"),
    ({"source": "", "command": ["board"]}, "models by name"),
    ({"job": "training"}, "shared weights cannot be written"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused_as_the_manifest_is_read(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        asked(**model)
    asked(share=False, **model)
