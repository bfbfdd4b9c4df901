"""Autocast with bfloat16 and a GradScaler; with `--overflow` the scaler skips the first optimizer steps, as in use."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--overflow", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if options.overflow else 2.0**10)
truth = Truth()
for _ in range(options.iterations):
    x, y = torch.randn(options.batch, 256), torch.randint(10, (options.batch,))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(net(x), y, reduction="sum")
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    truth.calls += 1
    truth.optimizer_steps += scaler.get_scale() >= scale
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
