"""A small language model of transformers, whose weights are drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch


def small_llama(seed: int = 0, layers: int = 1, hidden: int = 32) -> Any:
    """Return a model with 256 tokens and at most 4,096 positions, in evaluation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
