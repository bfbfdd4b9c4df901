"""Scores over a vocabulary that are fully sorted to get the five best."""

import torch
from running import FLAWED, predict


class Best(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(128, 20_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x)
        if FLAWED:
            return scores.sort(dim=-1, descending=True).values[:, :5]
        return scores.topk(5).values


predict(Best(), torch.rand(16, 128))
