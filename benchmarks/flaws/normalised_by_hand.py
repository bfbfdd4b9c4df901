"""Layer normalisation written out with mean, variance and square root."""

import torch
from running import FLAWED, predict

WIDTH = 192


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(WIDTH)), torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            mean = x.mean(-1, keepdim=True)
            variance = (x - mean).pow(2).mean(-1, keepdim=True)
            return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias
        return torch.nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)


def block() -> torch.nn.Module:
    return torch.nn.Sequential(Norm(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


predict(torch.nn.Sequential(*(block() for _ in range(6))), torch.rand(16, 256, WIDTH))
