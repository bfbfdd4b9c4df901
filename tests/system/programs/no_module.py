"""Tensors and no module: a linear regression by hand. Nothing here says what a step is."""

from __future__ import annotations

import argparse

import torch
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=200)
options = parser.parse_args()

torch.manual_seed(0)
x, y = torch.randn(512, 64), torch.randn(512, 1)
weights = torch.zeros(64, 1)
truth = Truth()
for _ in range(options.iterations):
    weights -= 0.1 * x.T @ (x @ weights - y) / len(x)
    truth.lap("training", len(x))
truth.say(total=round(float(weights.sum()), 6))
