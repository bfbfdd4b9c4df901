"""Gradient checkpointing: blocks are called again inside the backward pass."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--reentrant", action="store_true", help="the older way, with a backward pass inside the backward")
parser.add_argument("--bare-blocks", action="store_true", help="blocks that no outer module calls")
options = parser.parse_args()

torch.manual_seed(0)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=options.reentrant)
        return self.last(x)


net = Deep()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
truth = Truth()
for _ in range(options.iterations):
    x, y = torch.randn(options.batch, 64), torch.randint(10, (options.batch,))
    said = net.forward(x) if options.bare_blocks else net(x)
    loss = functional.cross_entropy(said, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.calls += 1
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
