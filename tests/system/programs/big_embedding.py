"""A recommender: a large table of embeddings with dense gradients, so that the optimizer takes most of a step."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--rows", type=int, default=50_000)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--sparse", action="store_true", help="sparse gradients and SparseAdam: the remedy")
options = parser.parse_args()

torch.manual_seed(0)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(options.rows, 32, sparse=options.sparse)
        self.items = nn.Embedding(options.rows, 32, sparse=options.sparse)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)


net = Recommender()
optimizer = (torch.optim.SparseAdam if options.sparse else torch.optim.Adam)(net.parameters(), lr=1e-3)
truth = Truth()
for _ in range(options.iterations):
    user, item = torch.randint(options.rows, (2, options.batch))
    loss = functional.mse_loss(net(user, item), torch.rand(options.batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.calls += 1
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
