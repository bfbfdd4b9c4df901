"""Training and validation in turn: twenty batches of the one, five of the other."""

from __future__ import annotations

import torch
from clock import Clock
from torch import nn
from torch.nn import functional

clock = Clock()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 13 * 13, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while clock.runs():
    model.train()
    for _ in range(20):
        clock.runs()
        x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        clock.lap()
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
            functional.cross_entropy(model(x), y)
            clock.lap("validation")
clock.say()
