"""What is said of a language model's forward pass, with a real one."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp_collectors import language  # noqa: E402


@pytest.mark.slow
def test_a_language_models_span_speaks_of_generation(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    with xsp.profile("gpt2", out=tmp_path / "run", collectors=["modules"], warmup=0, levels="M/L") as prof:
        for _ in range(4):
            with prof.step(), torch.no_grad():
                model(input_ids=torch.zeros(2, 7, dtype=torch.int64))
    rows = xsp.load(tmp_path / "run").sql("SELECT attributes FROM spans WHERE kind = 'forward'").fetchall()
    assert json.loads(rows[0][0]) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "gpt2",
        "gen_ai.usage.input_tokens": 14,
    }


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), torch.nn.Sequential()])
def test_another_models_span_does_not(model) -> None:
    assert language.attributes(model, "[[2, 7]]") == {}


def test_tokens_of_unknown_shape_are_not_counted() -> None:
    class Model(torch.nn.Module):
        def can_generate(self) -> bool:
            return True

    assert "gen_ai.usage.input_tokens" not in language.attributes(Model(), "[[2, 7, 16]]")
    assert language.attributes(Model(), None)["gen_ai.request.model"] == "Model"
