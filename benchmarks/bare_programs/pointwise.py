"""A linear layer and a long chain of elementwise operators."""

from __future__ import annotations

import argparse

import torch
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=512)
clock = Clock(parser)


class Chain(nn.Module):
    """Sixteen rounds of the same small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slope = nn.Linear(512, 512), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for _ in range(8):
            x = torch.sigmoid(self.slope * x) * x + torch.tanh(x) / 8 - x.square() / 128
        return x


torch.manual_seed(0)
half = torch.float32 if clock.device == "cpu" else torch.bfloat16
model = Chain().to(clock.device, half).eval()
x = torch.randn(clock.options.rows, 512, device=clock.device, dtype=half)
with torch.inference_mode():
    for _ in clock.iterations():
        model(x)
        clock.lap("inference")
clock.say()
