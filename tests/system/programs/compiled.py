"""A model compiled with torch.compile, trained; needs a C++ compiler."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--step", action="store_true", help="compile the function of the step, not the module")
parser.add_argument("--inference", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = net if options.step else torch.compile(net)


def losses(x, y):
    return functional.cross_entropy(model(x), y)


loss_of = torch.compile(losses) if options.step else losses
truth = Truth()
with torch.set_grad_enabled(not options.inference):
    for _ in range(options.iterations):
        x, y = torch.randn(options.batch, 64), torch.randint(10, (options.batch,))
        loss = loss_of(x, y)
        truth.calls += 1
        if not options.inference:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            truth.optimizer_steps += 1
        truth.lap("inference" if options.inference else "training", options.batch)
truth.say(loss=round(loss.item(), 5))
