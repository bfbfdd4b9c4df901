"""A language model that is called with the whole text again for each token."""

import torch
from running import FLAWED, STEPS
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=2048)).eval()
text = torch.randint(0, 2048, (1, 64))
cache = None
with torch.inference_mode():
    for _ in range(STEPS):
        tokens = text if FLAWED or cache is None else text[:, -1:]
        output = model(tokens, past_key_values=cache, use_cache=not FLAWED)
        cache = output.past_key_values
        text = torch.cat([text, output.logits[:, -1:].argmax(-1)], dim=1)
