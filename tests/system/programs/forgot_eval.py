"""Inference by somebody who forgot `model.eval()` and `torch.no_grad()`."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--losses", action="store_true", help="and computes a loss, never its gradients")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
loss_of = nn.CrossEntropyLoss()
truth = Truth()
total = 0.0
for _ in range(options.iterations):
    said = net(torch.randn(options.batch, 256))
    truth.calls += 1
    if options.losses:
        total += float(loss_of(said, torch.zeros(options.batch, dtype=torch.long)))
        truth.calls += 1
    truth.lap("inference", options.batch)
truth.say(total=round(float(said.detach().sum()) + total, 4))
