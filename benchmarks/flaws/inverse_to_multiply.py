"""Matrices that are inverted to multiply by the inverse, where solving a linear system is enough."""

import torch
from running import FLAWED, predict


class Whitening(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = torch.nn.Parameter(torch.randn(384, 384) + 40 * torch.eye(384))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return torch.linalg.inv(self.mixing) @ x
        return torch.linalg.solve(self.mixing, x)


predict(torch.nn.Sequential(*(Whitening() for _ in range(3))), torch.rand(384, 4))
