"""Metric learning: one net is called two, three or more times before one backward pass."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--towers", type=int, choices=[2, 3], default=2, help="2: siamese; 3: triplets")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
truth = Truth()
for _ in range(options.iterations):
    views = [net(torch.randn(options.batch, 128)) for _ in range(options.towers)]
    truth.calls += options.towers
    if options.towers == 3:
        loss = functional.triplet_margin_loss(*views)
    else:
        loss = functional.cosine_embedding_loss(*views, torch.ones(options.batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
