"""Shared code of the programs in this folder: the number of steps, and the switch for the flaw.

Each program is typical user code with one flaw; `--mended` leaves the flaw out. The environment variable STEPS sets the
number of steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

FLAWED = "--mended" not in sys.argv
STEPS = int(os.environ.get("STEPS", "120"))

torch.manual_seed(0)


def images(batch: int = 8, channels: int = 3, side: int = 64) -> torch.Tensor:
    """Return a batch in channels-last layout, in which the convolutions here are fastest."""
    return torch.rand(batch, channels, side, side).contiguous(memory_format=torch.channels_last)


def predict(model: Any, *inputs: Any) -> None:
    """Call a model `STEPS` times, in the way that is right for inference."""
    model = model.eval().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(STEPS):
            model(*inputs)


def train(model: Any, inputs: torch.Tensor, step: Callable[[], None], clear: Callable[[], None]) -> None:
    """Train a model for `STEPS` steps on a placeholder loss."""
    for _ in range(STEPS):
        clear()
        model(inputs).square().mean().backward()
        step()


# --- engines ----------------------------------------------------------------------------------------------------------


def language_model(hidden: int = 256, layers: int = 4) -> Any:
    """Return a small language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1024, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def serve(users: int, prompt: Callable[[int], int], answers: Sequence[int] = (24,), **config: Any) -> None:
    """Serve requests by continuous batching: each of some users sends the next request when the last one is answered.

    Args:
        users: how many there are.
        prompt: takes the number of a request, and returns the tokens of its prompt.
        answers: tokens of the answers, which take turns.
        **config: options of the engine.
    """
    import random
    import threading
    import time

    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = {"num_blocks": 1024, "max_batch_tokens": 64, "max_requests_per_batch": 32, **config}
    manager = language_model().init_continuous_batching(
        GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(**config),
    )
    manager.start()
    while manager.batch_processor is None:  # else requests wait for the engine's start
        time.sleep(0.01)
    draw, lock, sent = random.Random(0), threading.Lock(), 0
    answered = {}

    def send() -> None:
        nonlocal sent
        with lock:
            number, sent = sent, sent + 1
        ids = [draw.randrange(3, 1024) for _ in range(prompt(number))]
        manager.add_request(ids, request_id=f"r{number}", max_new_tokens=answers[number % len(answers)])

    for _ in range(users):
        send()
    while len(answered) < STEPS:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            answered[result.request_id] = result
            if sent < STEPS:
                send()
    manager.stop(block=True)
