"""`generate()` of a GPT-2 of four layers: for each prompt a prefill, then decodes of one token."""

from __future__ import annotations

import torch
from clock import Clock
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 12
clock = Clock()
torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
model.generation_config.pad_token_id = 0
calls = 0


def count(module: torch.nn.Module, inputs: object, output: object) -> None:
    global calls
    clock.lap("decode" if calls % TOKENS else "prefill")
    calls += 1
    clock.runs()


model.register_forward_hook(count)
prompt = torch.randint(1, 512, (1, 64))
while clock.runs():
    model.generate(prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=TOKENS, max_new_tokens=TOKENS)
clock.say()
