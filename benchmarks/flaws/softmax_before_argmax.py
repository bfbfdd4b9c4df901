"""Probabilities over a vocabulary of which only the most likely word is used."""

import torch
from running import FLAWED, predict


class Likeliest(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(64, 30_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x)
        if FLAWED:
            scores = scores.softmax(-1)
        return scores.argmax(-1)


predict(Likeliest(), torch.rand(64, 64))
