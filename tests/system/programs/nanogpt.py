"""A small GPT from scratch, trained as nanoGPT trains: random windows, micro-batches, AdamW, clipping, evaluation."""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--batch", type=int, default=4, help="of a micro-batch")
parser.add_argument("--eval-interval", type=int, default=40)
parser.add_argument("--eval-iterations", type=int, default=5)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()

VOCABULARY, BLOCK, HEADS = 96, 64, 4
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, options.width), nn.Embedding(BLOCK, options.width)
        self.h = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.ln_f, self.lm_head = nn.LayerNorm(options.width), nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


text = torch.randint(VOCABULARY, (20_000,))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
truth = Truth()


def get_batch():
    starts = torch.randint(len(text) - BLOCK - 1, (options.batch,))
    x = torch.stack([text[i : i + BLOCK] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(options.eval_iterations)
    for k in range(options.eval_iterations):
        _, loss = model(*get_batch())
        truth.calls += 1
        losses[k] = loss.item()
        truth.lap("evaluation", options.batch)
    model.train()
    return losses.mean()


X, Y = get_batch()
truth.start()
for iteration in range(options.iterations):
    rate = 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * iteration / options.iterations))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if options.eval_interval and iteration % options.eval_interval == 0:
        print(f"step {iteration}: val loss {estimate_loss():.4f}")
    for _ in range(options.micro_batches):
        _, loss = model(X, Y)
        truth.calls += 1
        (loss / options.micro_batches).backward()
        X, Y = get_batch()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    truth.optimizer_steps += 1
    optimizer.zero_grad(set_to_none=True)
    truth.lap("training", options.batch * options.micro_batches)
truth.say(loss=round(loss.item(), 6))
