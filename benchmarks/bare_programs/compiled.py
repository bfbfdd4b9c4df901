"""A model compiled by `torch.compile`, in training; needs a compiler."""

from __future__ import annotations

import argparse

import torch
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--batch", type=int, default=64)
clock = Clock(parser)
options = clock.options
torch.manual_seed(0)
blocks = [
    nn.Sequential(nn.Linear(options.width, options.width), nn.LayerNorm(options.width), nn.GELU())
    for _ in range(options.depth)
]
model = nn.Sequential(*blocks).to(clock.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
compiled = torch.compile(model)
x = torch.randn(options.batch, options.width, device=clock.device)
for _ in clock.iterations():
    optimizer.zero_grad()
    compiled(x).square().mean().backward()
    optimizer.step()
    clock.lap()
clock.say()
