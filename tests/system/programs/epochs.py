"""Epochs of training and validation over a DataLoader whose last batch is smaller."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=900, help="29 batches of 32, the last one of 4")
parser.add_argument("--validation", type=int, default=200, help="7 batches, the last one of 8")
parser.add_argument("--batch", type=int, default=32)
options = parser.parse_args()

torch.manual_seed(0)


def data(samples, shuffle):
    rows = TensorDataset(torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,)))
    return DataLoader(rows, options.batch, shuffle=shuffle)


training, validation = data(options.samples, True), data(options.validation, False)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
truth = Truth()
for epoch in range(options.epochs):
    net.train()
    truth.start()
    for x, y in training:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        truth.calls += 1
        truth.optimizer_steps += 1
        truth.lap("training", len(x))
    net.eval()
    right = 0
    truth.start()
    with torch.no_grad():
        for x, y in validation:
            right += int((net(x).argmax(1) == y).sum())
            truth.calls += 1
            truth.lap("validation", len(x))
    print(f"epoch {epoch}: loss {loss.item():.4f}, {right} of {options.validation} right")
truth.say(loss=round(loss.item(), 6))
