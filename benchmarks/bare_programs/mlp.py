"""A chain of linear layers, in inference or in training, with options for what slows such programs down."""

from __future__ import annotations

import argparse
import time

import torch
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--train", choices=("SGD", "Adam", "AdamW"))
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--sleep-ms", type=float, default=0.0, help="in each iteration, outside of the model")
parser.add_argument("--hooks", action="store_true", help="read a number of the output of each layer")
parser.add_argument("--norms", action="store_true", help="read the norm of each gradient")
parser.add_argument("--one-by-one", action="store_true", help="update one parameter after the other")
clock = Clock(parser)
options = clock.options

torch.manual_seed(0)
layers: list[nn.Module] = []
for _ in range(options.depth):
    layers += [nn.Linear(options.width, options.width), nn.ReLU()]
model = nn.Sequential(*layers).to(clock.device)
x = torch.randn(options.batch, options.width, device=clock.device)
largest = 0.0


def look(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    global largest
    largest = max(largest, output.detach().abs().max().item())


if options.hooks:
    for layer in model:
        layer.register_forward_hook(look)

settings = {"foreach": False} if options.one_by_one else {}
optimizer = getattr(torch.optim, options.train or "SGD")(model.parameters(), lr=1e-4, **settings)


def learn() -> None:
    """Take a step of training."""
    global largest
    optimizer.zero_grad()
    for _ in range(options.micro_batches):
        (model(x).square().mean() / options.micro_batches).backward()
    if options.norms:
        largest = max(parameter.grad.norm().item() for parameter in model.parameters())
    optimizer.step()


def predict() -> None:
    """Call the model."""
    with torch.inference_mode():
        model(x)


step, kind = (learn, "training") if options.train else (predict, "inference")
model.train(step is learn)
for _ in clock.iterations():
    step()
    if options.sleep_ms:
        time.sleep(options.sleep_ms / 1e3)
    clock.lap(kind)
clock.say()
