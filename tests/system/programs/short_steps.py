"""Steps as short as one likes: the width says how long one is, from hundredths of a millisecond on."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=2000)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--train", action="store_true")
parser.add_argument("--by-hand", action="store_true", help="train without an optimizer of torch's")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers))).train(options.train)
optimizer = None if options.by_hand else torch.optim.SGD(net.parameters(), lr=1e-3)
x = torch.randn(options.batch, options.width)
truth = Truth()
with torch.set_grad_enabled(options.train):
    for _ in range(options.iterations):
        said = net(x)
        truth.calls += 1
        if options.train:
            net.zero_grad()
            said.square().mean().backward()
            if options.by_hand:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.sub_(parameter.grad, alpha=1e-3)
            else:
                optimizer.step()
            truth.optimizer_steps += 1
        truth.lap("training" if options.train else "inference", options.batch)
truth.say(total=round(float(said.detach().sum()), 4))
