"""Two optimizers that step one after the other after one backward pass, as encoders with heads of their own have."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
options = parser.parse_args()

torch.manual_seed(0)
encoder, head = nn.Sequential(nn.Linear(128, 256), nn.ReLU()), nn.Linear(256, 10)
optimizers = torch.optim.SGD(encoder.parameters(), lr=0.01), torch.optim.AdamW(head.parameters(), lr=1e-3)
truth = Truth()
for _ in range(options.iterations):
    x, y = torch.randn(options.batch, 128), torch.randint(10, (options.batch,))
    loss = functional.cross_entropy(head(encoder(x)), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    truth.calls += 2
    truth.optimizer_steps += 2
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
