"""Matrix products by broadcasting and a sum: all elementwise products are written to memory and read again."""

import torch
from running import FLAWED, predict


class Mixing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return (x.unsqueeze(-1) * self.weight).sum(-2)
        return x @ self.weight


predict(torch.nn.Sequential(*(Mixing() for _ in range(4))), torch.rand(48, 256))
