"""Sines and cosines of all positions, which each layer computes again in each call."""

import math

import torch
from running import FLAWED, predict

WIDTH, LENGTH = 256, 512


def positions(length: int) -> torch.Tensor:
    position = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH))
    return torch.cat((torch.sin(position * rate), torch.cos(position * rate)), 1)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", positions(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = positions(x.shape[1]) if FLAWED else self.table[: x.shape[1]]
        return torch.relu(self.linear(x + table))


predict(torch.nn.Sequential(*(Layer() for _ in range(4))), torch.rand(1, LENGTH, WIDTH))
