"""A recurrent net on sequences of varying lengths: no two steps in a row have the same shapes."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--longest", type=int, default=60)
parser.add_argument("--inference", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(100, 32), nn.LSTM(32, 64, batch_first=True)
        self.out = nn.Linear(64, 5)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


net = Tagger().train(not options.inference)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
truth = Truth()
with torch.set_grad_enabled(not options.inference):
    for _ in range(options.iterations):
        length = int(torch.randint(5, options.longest + 1, ()))
        tokens, tags = torch.randint(100, (options.batch, length)), torch.randint(5, (options.batch, length))
        loss = functional.cross_entropy(net(tokens).flatten(0, 1), tags.flatten())
        truth.calls += 1
        if not options.inference:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            truth.optimizer_steps += 1
        truth.lap("inference" if options.inference else "training", options.batch)
truth.say(loss=round(loss.item(), 6))
