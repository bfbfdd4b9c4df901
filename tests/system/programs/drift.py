"""A program that becomes slower: each iteration goes through all that was before, as forgotten bookkeeping does."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=300)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--where", choices=["step", "between"], default="step", help="in the model, or between steps")
options = parser.parse_args()

torch.manual_seed(0)


class Remembering(nn.Module):
    """Keeps all that it saw, and goes through it in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        if options.where == "step":
            self.seen.append(x)
            x = x - torch.cat(self.seen).mean(0)
        return self.net(x)


net = Remembering()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
history: list[torch.Tensor] = []
truth = Truth()
for number in range(options.iterations):
    x, y = torch.randn(options.batch, 128), torch.randint(10, (options.batch,))
    loss = functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if options.where == "between":
        history.append(loss.detach())
        mean = float(sum(history)) / len(history)
    truth.calls += 1
    truth.optimizer_steps += 1
    quarter = 4 * number // options.iterations
    truth.lap(f"quarter {quarter}", options.batch)
truth.say(loss=round(loss.item(), 6))
