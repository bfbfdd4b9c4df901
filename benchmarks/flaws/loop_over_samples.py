"""A batch whose samples go through the layers one by one."""

import torch
from running import FLAWED, predict


class OneByOne(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return torch.stack([self.inner(sample) for sample in x])
        return self.inner(x)


predict(torch.nn.Sequential(*(OneByOne() for _ in range(3))), torch.rand(64, 256))
