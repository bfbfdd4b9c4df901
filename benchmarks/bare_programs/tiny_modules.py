"""A model of hundreds of tiny modules, two deep, in inference or in training."""

from __future__ import annotations

import argparse

import torch
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=120)
parser.add_argument("--train", action="store_true")
clock = Clock(parser)


class Block(nn.Module):
    """Three modules of a microsecond or two each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(clock.options.blocks)]).to(clock.device)
x = torch.randn(8, 16, device=clock.device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
if not clock.options.train:
    model.eval()
with torch.set_grad_enabled(clock.options.train):
    for _ in clock.iterations():
        y = model(x)
        if clock.options.train:
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
        clock.lap("training" if clock.options.train else "inference")
clock.say()
