"""Training that stops early: a `break` after a forward pass, out of a DataLoader that has more to give."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=90, help="before the break")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

torch.manual_seed(0)
rows = TensorDataset(torch.randn(4000, 64), torch.randint(10, (4000,)))
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
truth = Truth()
for number, (x, y) in enumerate(DataLoader(rows, options.batch, num_workers=options.workers)):
    loss = functional.cross_entropy(net(x), y)
    truth.calls += 1
    if number == options.iterations:
        print("good enough")
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.optimizer_steps += 1
    truth.lap("training", len(x))
truth.say(loss=round(loss.item(), 6))
