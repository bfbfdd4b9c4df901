"""An engine by hand that turns the whole text of each request into words again after each of its steps."""

import torch
from running import FLAWED, STEPS, language_model
from transformers import DynamicCache

from xsp.serving import Engine

WORDS = [f"w{number:x}" for number in range(1024)]
model, engine = language_model(), Engine("by hand")


def text_of(ids: list[int]) -> str:
    text = ""
    for token in ids * 20:  # as tokenizers in Python take
        for letter in WORDS[token]:
            text = text + letter.upper().lower()
    return text


with torch.inference_mode():
    for number in range(max(3, STEPS // 10)):
        request, ids, cache = f"r{number}", [1 + (number * place) % 1000 for place in range(200)], DynamicCache()
        engine.arrive(request, prompt_tokens=len(ids))
        for place in range(24):
            new = ids if place == 0 else ids[-1:]
            with engine.step([(request, "decode" if place else "prefill", len(new))]):
                output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
                ids.append(int(output.logits[0, -1].argmax()))
            text = text_of(ids if FLAWED else ids[-1:])
        engine.finish(request)
