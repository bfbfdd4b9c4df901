"""Models that are too large are refused before anything of them is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from depth import deep

pytest.importorskip("pydantic")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")

from xsp import models
from xsp.evaluate.manifest import Model
from xsp.evaluate.web import modelsize
from xsp.evaluate.web.modelsize import MOST_PARAMETERS, ModelSizes

MANY_MODULES = "transformers:bert?num_hidden_layers=1000000&hidden_size=2&num_attention_heads=1&intermediate_size=1"
TOO_LARGE = (
    "transformers:bert?vocab_size=1000000&hidden_size=2400",
    "transformers:bert?hidden_size=99999999",
    "transformers:bert?num_hidden_layers=1000000",
    MANY_MODULES,
    "transformers:bert?max_position_embeddings=10000000000",
    "transformers:llama",
    "transformers:ctrl?n_positions=1000000&n_embd=100000",
)


@pytest.mark.parametrize("source", [deep(each) if each == MANY_MODULES else each for each in TOO_LARGE])
def test_all_parameters_together_are_bounded(source: str) -> None:
    assert modelsize.count(source, models.Settings()) > MOST_PARAMETERS


def test_all_modules_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelsize, "MOST_MODULES", 1000)
    assert modelsize.count(MANY_MODULES, models.Settings()) > MOST_PARAMETERS


def test_the_parameters_of_a_model_are_counted_once_and_exactly() -> None:
    assert modelsize.count("torchvision:resnet18", models.Settings()) == 11_689_512 + 9_620  # and buffers
    tied = modelsize.count("transformers:GPT2LMHeadModel", models.Settings())
    assert tied == modelsize.count("transformers:gpt2", models.Settings()) == 124_439_808


def test_no_hook_is_left() -> None:
    from torch.nn.modules import module

    for source in ("torchvision:resnet18", TOO_LARGE[0]):
        modelsize.count(source, models.Settings())
    assert not module._global_parameter_registration_hooks
    assert not module._global_module_registration_hooks


@pytest.fixture
def sizes() -> Iterator[ModelSizes]:
    found = ModelSizes()
    yield found
    found.close()


@pytest.mark.slow
def test_a_process_counts_and_answers_for_each(sizes: ModelSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "more than" in str(sizes.objection(Model(name="x", source=TOO_LARGE[0])))
    process = sizes._process
    assert process is not None
    assert sizes.objection(Model(name="x", source="torchvision:resnet18")) is None
    assert "has no model" in str(sizes.objection(Model(name="x", source="torchvision:nothing")))
    assert sizes._process is process
    monkeypatch.setattr(modelsize, "COUNT_S", 0.0)
    assert "too large" in str(sizes.objection(Model(name="x", source="timm:resnet50")))
    assert process.has_ended()
    monkeypatch.undo()
    assert sizes.objection(Model(name="x", source="torchvision:alexnet")) is None


@pytest.mark.slow
def test_the_memory_of_that_process_is_limited(sizes: ModelSizes, tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    file.write_text(
        "import torch\ndef build(size):\n    return torch.nn.Linear(1, 1), torch.zeros(3 << 30, device='cpu')\n"
    )
    assert sizes.objection(Model(name="x", source=f"{file}:build")) is not None
    assert sizes.objection(Model(name="x", source="torchvision:alexnet")) is None
