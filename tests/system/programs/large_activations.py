"""A small convolutional net with large activations: memory that goes back to the system takes most of a step."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

torch.manual_seed(0)


def block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 1),
    )


net = nn.Sequential(*(block(64) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
net = net.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
truth = Truth()
for _ in range(options.iterations):
    images = torch.rand(options.batch, 64, 56, 56).contiguous(memory_format=torch.channels_last)
    loss = nn.functional.cross_entropy(net(images), torch.randint(10, (options.batch,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.calls += 1
    truth.optimizer_steps += 1
    truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
