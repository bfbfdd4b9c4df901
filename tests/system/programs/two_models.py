"""`a(x); b(x)` in a loop: two models of different cost that are served in turn."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()

torch.manual_seed(0)
a = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
b = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 10)).eval()
truth = Truth()
with torch.inference_mode():
    for _ in range(options.iterations):
        x = torch.randn(options.batch, 256)
        first = a(x)
        truth.lap("a", options.batch)
        second = b(x)
        truth.lap("b", options.batch)
        truth.calls += 2
truth.say(total=round(float(first.sum() + second.sum()), 4))
