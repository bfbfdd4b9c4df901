"""Training steps whose forward and backward pass and optimizer the program times itself."""

from __future__ import annotations

import argparse
import time

import torch
from clock import WARM_UP, Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("linear", "convolution", "attention"), default="linear")
parser.add_argument("--optimizer", choices=("SGD", "Adam", "AdamW"), default="SGD")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--one-by-one", action="store_true", help="update one parameter after the other")
clock = Clock(parser)
options = clock.options

torch.manual_seed(0)
width, batch = options.width, options.batch
if options.model == "linear":
    layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(options.depth)]
    x = torch.randn(batch, width)
elif options.model == "convolution":
    layers = [nn.Conv2d(width, width, 3, padding=1) for _ in range(options.depth)]
    x = torch.randn(batch, width, 16, 16)
else:
    layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(options.depth)]
    x = torch.randn(batch, 16, width)
model = nn.Sequential(*layers)
settings = {"foreach": False} if options.one_by_one else {}
optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-5, **settings)
spent = dict.fromkeys(("forward", "backward", "optimizer", "step"), 0.0)
for number in clock.iterations():
    begun = time.perf_counter()
    y = model(x)
    forward = time.perf_counter()
    loss = y.square().mean()
    optimizer.zero_grad()
    called = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    ended = time.perf_counter()
    if number >= WARM_UP:
        times = (forward - begun, backward - called, ended - backward, ended - begun)
        for name, seconds in zip(spent, times, strict=True):
            spent[name] += seconds
    clock.lap()
clock.say(phases={name: seconds / spent["step"] for name, seconds in spent.items() if name != "step"})
