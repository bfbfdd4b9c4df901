"""A loop that reads single values of a tensor into Python, one at a time."""

import torch
from running import FLAWED, predict


class Penalty(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if FLAWED:
            total = 0.0
            for row in x.abs().sum(1):
                total += row.item()
        else:
            total = x.abs().sum()
        return x * (1.0 / (1.0 + total))


predict(torch.nn.Sequential(*(Penalty() for _ in range(4))), torch.rand(512, 128))
