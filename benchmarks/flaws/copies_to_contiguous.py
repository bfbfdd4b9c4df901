"""A transposed copy and a copy back between layers, neither of which is needed."""

import torch
from running import FLAWED, predict


class Block(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            x = x.transpose(1, 2).contiguous().transpose(1, 2).contiguous()
        return torch.relu(self.inner(x))


predict(torch.nn.Sequential(*(Block() for _ in range(6))), torch.rand(16, 197, 256))
