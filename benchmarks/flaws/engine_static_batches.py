"""An engine by hand whose batches are padded, and end when the longest answer is there."""

import torch
from running import FLAWED, STEPS, language_model
from transformers import DynamicCache

from xsp.serving import Engine

BATCH = 8
model, engine = language_model(), Engine("by hand")


def serve(numbers: range) -> None:
    lengths = [80 if FLAWED and number % BATCH == 0 else 16 for number in numbers]
    answers = [48 if FLAWED and number % BATCH == 1 else 12 for number in numbers]
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    new, cache = torch.randint(3, 1024, mask.shape), DynamicCache()
    for place in range(max(answers)):
        parts = [
            (f"r{number}", "decode", 1) if place else (f"r{number}", "prefill", length)
            for number, length, answer in zip(numbers, lengths, answers, strict=True)
            if place < answer
        ]
        with engine.step(parts):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            output = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            new = output.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones(BATCH, 1, dtype=torch.long)], dim=1)


with torch.inference_mode():
    for first in range(0, 2 * STEPS, BATCH):
        numbers = range(first, first + BATCH)
        for number in numbers:
            engine.arrive(f"r{number}")
        serve(numbers)
        for number in numbers:
            engine.finish(f"r{number}")
