"""Language models as two steps: what prefill and decode call, with the cache as state."""

from __future__ import annotations

import pytest
from depth import deep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import xsp  # noqa: E402
from xsp import causal, models  # noqa: E402
from xsp.cli import main  # noqa: E402
from xsp.errors import ModelError  # noqa: E402
from xsp.graph.node import Role  # noqa: E402

GPT2 = "transformers:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64"
LLAMA = (
    "transformers:llama?num_hidden_layers=2&hidden_size=32&intermediate_size=64&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=64&head_dim=8"
)
MISTRAL = LLAMA.replace("llama", "mistral") + "&sliding_window=16"
MAMBA = "transformers:mamba?num_hidden_layers=1&hidden_size=16&vocab_size=64"


def state_bytes(graph) -> int:
    return sum({each.storage: each.bytes for each in graph.values if each.role is Role.STATE}.values())


def timed_as(graph) -> list[str]:
    from xsp.graph.keys import work_key

    return [work_key(each.call) for each in graph.computing]


@pytest.mark.parametrize("spec", [GPT2, LLAMA])
def test_decoding_reads_the_cache_as_state_and_only_attention_and_the_cache_depend_on_the_length(spec) -> None:
    short, long = (xsp.graph.of(spec, decode=n) for n in (16, 32))
    heads, width, layers = (2, 16, 2) if spec == GPT2 else (2, 8, 2)
    assert [state_bytes(each) for each in (short, long)] == [2 * layers * heads * width * n * 4 for n in (15, 31)]
    different = {
        node.call.op
        for node, here, there in zip(long.computing, timed_as(short), timed_as(long), strict=True)
        if here != there
    }
    assert different == {"aten::cat", "aten::scaled_dot_product_attention"}
    assert long.settings["decode"] == 32


def test_reading_has_no_cache_before_it_and_computes_the_logits_of_the_last_token_alone() -> None:
    graph = xsp.graph.of(GPT2, prefill=24)
    assert state_bytes(graph) == 0
    assert graph.nodes[-1].call.outputs[0].shape == (1, 1, 64)
    assert graph.settings["prefill"] == 24


@pytest.mark.slow
def test_a_window_that_slides_holds_no_more_than_its_tokens() -> None:
    sizes = [state_bytes(xsp.graph.of(MISTRAL, decode=n)) for n in (8, 24, 40)]
    assert sizes[0] < sizes[1] == sizes[2]
    assert timed_as(xsp.graph.of(MISTRAL, decode=24)) == timed_as(xsp.graph.of(MISTRAL, decode=40))


def test_a_recurrent_state_has_one_size_for_all_lengths() -> None:
    short, long = (xsp.graph.of(MAMBA, decode=n) for n in (8, 16))
    assert state_bytes(short) == state_bytes(long) > 0
    assert timed_as(short) == timed_as(long)


def test_what_is_decoded_with_a_cache_is_what_is_read_at_once() -> None:
    settings = models.Settings(decode=12, batch=2)
    built = models.on_device(GPT2, models.build(GPT2, settings), settings)
    with torch.inference_mode():
        tokens = torch.cat([built.prefix, built.kwargs["input_ids"]], dim=1)
        whole = built.model(input_ids=tokens).logits[:, -1]
    step = models.step_of(built, settings)
    for _ in range(3):  # each goes on from the same cache
        assert torch.allclose(step().logits[:, -1], whole, atol=1e-5)


def test_a_step_leaves_the_cache_before_it_as_it_was() -> None:
    settings = models.Settings(decode=12)
    built = models.on_device(LLAMA, models.build(LLAMA, settings), settings)
    before = [each.shape for each in causal.tensors(built.state())]
    models.step_of(built, settings)()
    assert [each.shape for each in causal.tensors(built.state())] == before


def test_a_module_of_transformers_has_both_steps_too() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    model = transformers.GPT2LMHeadModel(config)
    assert timed_as(xsp.graph.of(model, decode=8)) == timed_as(
        xsp.graph.of("transformers:gpt2?n_layer=1&n_embd=16&n_head=2&vocab_size=32", decode=8)
    )
    assert model.training
    with pytest.raises(ModelError, match="language models of transformers"):
        xsp.graph.of(torch.nn.Linear(2, 2), decode=8)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        deep("transformers:t5", {"decode": 8}, "is an encoder-decoder"),
        ("transformers:vit", {"prefill": 8}, "not a causal language model"),
        deep("transformers:bert?num_hidden_layers=1", {"decode": 8}, "keeps no cache"),
        (GPT2, {"decode": 1025}, "takes up to 1,024 tokens"),
        (GPT2, {"decode": 1}, "no token before it"),
        (GPT2, {"decode": 8, "prefill": 8}, "give one of them"),
        (GPT2, {"decode": 8, "train": True}, "omit --train"),
        deep("torchvision:resnet18", {"decode": 8}, "language models of transformers"),
    ],
)
def test_what_has_no_such_step_is_refused_in_one_line(spec, options, said) -> None:
    if spec.startswith("torchvision"):
        pytest.importorskip("torchvision")
    with pytest.raises(ModelError, match=said) as raised:
        xsp.graph.of(spec, **options)
    assert "\n" not in str(raised.value)


def test_a_transformers_whose_caches_lack_tokens_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("xsp.causal._version", lambda: "4.57.1")
    with pytest.raises(ModelError, match=r"--decode and --prefill need transformers 5\.5 or later, not 4\.57\.1"):
        xsp.graph.of(GPT2, decode=4)


def test_the_command_says_which_step_it_shows(capsys) -> None:
    assert main(["graph", LLAMA, "--decode", "16"]) == 0
    assert "decode 16" in capsys.readouterr().out.split("\n\n")[1]
