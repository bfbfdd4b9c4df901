"""Like BYOL: two views through an online net, two through its moving average, one backward pass, then the average."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
options = parser.parse_args()

torch.manual_seed(0)
online = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
predictor = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
average = copy.deepcopy(online)
optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.01, momentum=0.9)
truth = Truth()
for _ in range(options.iterations):
    x = torch.randn(options.batch, 128)
    one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    said = predictor(online(one)), predictor(online(two))
    with torch.no_grad():
        targets = average(two), average(one)
    loss = 2 - sum(functional.cosine_similarity(p, z).mean() for p, z in zip(said, targets, strict=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, new in zip(average.parameters(), online.parameters(), strict=True):
            mean.lerp_(new, 0.01)
    truth.calls += 6
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
