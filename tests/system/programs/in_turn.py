"""Programs without an outer module: layers called by hand, a gate and its experts, several models in turn."""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import nn
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=("layers", "experts", "routed", "random", "functions"))
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
draw = random.Random(0)


class Part(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(32, 32), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


parts = [Part(0.001) for _ in range(12)]
gate, flatten, activation, softmax = Part(0.001), nn.Flatten(), nn.ReLU(), nn.Softmax(-1)
truth = Truth()


def iteration(x: torch.Tensor) -> torch.Tensor:
    if options.what == "layers":
        x = flatten(x)
        for part in parts:
            x = activation(part(x))
        truth.calls += 26
        return softmax(x)
    if options.what == "random":
        chosen = [draw.choice(parts[:4])]
    elif options.what == "routed":
        chosen = [gate, *draw.sample(parts, 4)]
    else:
        chosen = [gate, *parts]
    truth.calls += len(chosen)
    return torch.stack([part(x) for part in chosen]).sum(0)


truth.start()
with torch.inference_mode():
    for _ in range(options.iterations):
        y = iteration(torch.randn(options.batch, 32))
        time.sleep(0.004)
        truth.lap("iteration", options.batch)
truth.say(sum=round(float(y.sum()), 4))
