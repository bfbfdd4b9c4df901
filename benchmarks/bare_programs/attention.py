"""Blocks whose attention is written out: products, a mask, a softmax."""

from __future__ import annotations

import argparse
import math

import torch
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--depth", type=int, default=4)
clock = Clock(parser)
options = clock.options


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        width = options.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.more = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as (batch, heads, tokens, width of a head)."""
        return x.unflatten(-1, (options.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        query, key, value = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(-2))
        return x + self.more(self.norms[1](x))


torch.manual_seed(0)
half = torch.float32 if clock.device == "cpu" else torch.bfloat16
model = nn.Sequential(*[Block() for _ in range(options.depth)]).to(clock.device, half).eval()
x = torch.randn(options.batch, options.tokens, options.width, device=clock.device, dtype=half)
with torch.inference_mode():
    for _ in clock.iterations():
        model(x)
        clock.lap("inference")
clock.say()
