"""A copy of the whole activation in every block, although nothing writes to it."""

import torch
from running import FLAWED, predict


class Block(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.clone() if FLAWED else x
        return before + self.inner(self.norm(x))


predict(torch.nn.Sequential(*(Block() for _ in range(8))), torch.rand(32, 197, 256))
