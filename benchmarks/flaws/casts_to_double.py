"""An activation function that is computed in float64 and cast back, for accuracy that is not needed."""

import torch
from running import FLAWED, predict


class Block(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if FLAWED:
            return torch.nn.functional.gelu(x.double()).float()
        return torch.nn.functional.gelu(x)


predict(torch.nn.Sequential(*(Block() for _ in range(6))), torch.rand(16, 197, 256))
