"""Four independent branches, run one after the other, whose operators are too small to gain from threads."""

import torch
from running import FLAWED, predict


class Branches(torch.nn.Module):
    def __init__(self, width: int = 48, depth: int = 30) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))) for _ in range(4)
        )
        for branch in self.branches:
            for layer in branch:
                torch.nn.init.orthogonal_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            return torch.cat([branch(x) for branch in self.branches], 1)
        branches = [torch.jit.fork(branch, x) for branch in self.branches]
        return torch.cat([torch.jit.wait(branch) for branch in branches], 1)


predict(Branches(), torch.rand(256, 48))
