"""`generate()` of a small GPT-2 with random weights: for each prompt a prefill, then decodes of one token."""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--prompts", type=int, default=40)
parser.add_argument("--tokens", type=int, default=8, help="new ones of each prompt")
parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 48], help="of the prompts, in turn")
options = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=256, n_positions=128, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
model.generation_config.pad_token_id = 0
truth = Truth()


def count(module, inputs, output):
    truth.calls += 1
    truth.lap("decode" if truth.calls % options.tokens != 1 else "prefill", 1)


model.register_forward_hook(count)
total = 0
for number in range(options.prompts):
    prompt = torch.randint(1, 256, (1, options.lengths[number % len(options.lengths)]))
    truth.start()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=options.tokens, max_new_tokens=options.tokens
    )
    total += int(tokens.sum())
truth.say(total=total)
