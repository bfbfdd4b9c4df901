"""Layer normalisation written out with mean, variance and square root."""

import torch
from running import FLAWED, predict

WIDTH = 192


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(WIDTH)), torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            mean = given.mean(-1, keepdim=True)
            variance = (given - mean).pow(2).mean(-1, keepdim=True)
            return (given - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias
        return torch.nn.functional.layer_norm(given, (WIDTH,), self.weight, self.bias)


def block() -> torch.nn.Module:
    return torch.nn.Sequential(Norm(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


predict(torch.nn.Sequential(*(block() for _ in range(6))), torch.rand(16, 256, WIDTH))
