"""L-BFGS: the optimizer's step calls a closure with forward and backward several times."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
truth = Truth()
for _ in range(options.iterations):
    x = torch.randn(options.batch, 32)
    y = x.sum(1, keepdim=True).sin()

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = functional.mse_loss(net(x), y)
        loss.backward()
        truth.calls += 1
        return loss

    loss = optimizer.step(closure)
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
