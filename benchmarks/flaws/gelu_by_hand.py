"""GELU written out in seven operators, each of which reads and writes all activations."""

import math

import torch
from running import FLAWED, predict


class Gelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
        return torch.nn.functional.gelu(x, approximate="tanh")


def block(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, 4 * width), Gelu(), torch.nn.Linear(4 * width, width))


predict(torch.nn.Sequential(*(block(192) for _ in range(4))), torch.rand(8, 128, 192))
