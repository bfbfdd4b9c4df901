"""Training that prints a lot on both streams, or shows a bar of tqdm."""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--lines", type=int, default=20, help="of each iteration")
parser.add_argument("--bar", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
truth = Truth()
for number in tqdm(range(options.iterations), disable=not options.bar):
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    optimizer.zero_grad()
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    if not options.bar:
        for line in range(options.lines):
            print(f"iteration {number}, line {line}: " + "x" * 60)
        print(f"warning of iteration {number}", file=sys.stderr)
    truth.calls += 1
    truth.optimizer_steps += 1
    truth.lap("training", 32)
truth.say(loss=round(loss.item(), 6))
