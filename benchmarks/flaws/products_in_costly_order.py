"""Two matrices that are multiplied before their product is applied to a few columns."""

import torch
from running import FLAWED, predict


class Projection(torch.nn.Module):
    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(width, width) / width)
        self.down = torch.nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.up @ self.down @ x if FLAWED else self.up @ (self.down @ x)
        return torch.relu(mixed)


predict(Projection(), torch.rand(768, 16))
