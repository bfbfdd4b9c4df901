"""Inputs of models of transformers are found from what they say of themselves, and values that decide are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xsp
from xsp import models
from xsp.graph.knownvalues import KnownValues
from xsp.models import Settings


def taken(spec: str) -> dict[str, list[int]]:
    """Return the shapes of what a model takes, without values."""
    with KnownValues():
        built = models.on_device(spec, models.build(spec, Settings(), device="meta"), Settings(device="meta"))
    return {name: list(each.shape) for name, each in built.kwargs.items() if isinstance(each, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("transformers:bert", {"input_ids": [1, 128]}),
        ("transformers:bart", {"input_ids": [1, 128], "decoder_input_ids": [1, 128]}),
        ("transformers:clip", {"input_ids": [1, 77], "pixel_values": [1, 3, 224, 224]}),
        ("transformers:videomae", {"pixel_values": [1, 16, 3, 224, 224]}),
        ("transformers:wav2vec2", {"input_values": [1, 16000]}),
        ("transformers:patchtst", {"past_values": [1, 32, 1]}),
        ("transformers:qwen2_5_vl_vision", {"hidden_states": [256, 1176], "grid_thw": [1, 3]}),
    ],
)
def test_a_type_has_the_inputs_of_its_kind(spec: str, shapes: dict[str, list[int]]) -> None:
    pytest.importorskip("transformers")
    assert taken(spec) == shapes


@pytest.mark.slow
def test_as_many_tokens_stand_for_an_image_as_the_model_makes_features_of_it() -> None:
    pytest.importorskip("transformers")
    spec = "transformers:llava?num_hidden_layers=1"
    found = taken(spec.partition("?")[0])
    assert found["pixel_values"] == [1, 3, 336, 336]
    assert found["input_ids"] == [1, (336 // 14) ** 2 + 16]


def test_a_number_of_tokens_that_was_asked_for_is_never_cut() -> None:
    pytest.importorskip("transformers")
    settings = Settings(sequence=600)
    built = models.build("transformers:bert?num_hidden_layers=1", settings, device="meta")
    assert built.candidates is not None
    assert next(built.candidates(built.model))()["input_ids"].shape == built.kwargs["input_ids"].shape == (1, 600)


class Chooses(nn.Module):
    """Takes rows by a mask, a list, and how many there are."""

    def forward(self, x, mask):
        rows = x[mask]
        count = int(mask.sum())
        assert mask.any(), mask.tolist()
        return rows[:, [0, -1]].reshape(count, -1), x.masked_select(mask.unsqueeze(-1)), torch.arange(count).tolist()


def test_a_graph_with_known_values_has_the_calls_of_real_ones() -> None:
    mask = torch.tensor([True, False, True, True])
    found = xsp.graph.of(Chooses(), torch.randn(4, 6), mask)
    assert found.settings["rung"] == "moved to meta"
    shapes = [[out.shape for out in node.call.outputs] for node in found.nodes if node.call.op == "aten::index"]
    assert shapes[0] == [(3, 6)]
    assert [
        out.shape for node in found.nodes if node.call.op == "aten::masked_select" for out in node.call.outputs
    ] == [(18,)]


def test_what_is_written_over_with_unknown_values_is_unknown() -> None:
    with KnownValues() as values:
        known = torch.zeros(4, device="meta")
        part = known[:2]
        assert values.of(part) is not None
        part.copy_(torch.empty(2, device="meta"))
        assert values.of(known) is None
        with pytest.raises(RuntimeError, match="meta"):
            known.sum().item()
        again = torch.ones(4, device="meta")
        again[1] = 3
        assert again.tolist() == [1, 3, 1, 1]
        assert values.of(torch.rand(3, device="meta")) is None
        assert values.of(torch.empty(3, device="meta")) is None
