"""Optimizers that step inside the backward pass, in hooks that run when a gradient is ready."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--one", action="store_true", help="one optimizer, which steps when the last gradient is ready")
parser.add_argument("--micro-batches", type=int, default=1, help="backward passes before the optimizers step")
parser.add_argument("--losses", type=int, default=1, help="losses of one forward pass, each with a backward pass")
parser.add_argument("--checkpoint", choices=("reentrant", "other"))
parser.add_argument("--adversarial", action="store_true", help="a second model is trained by its own backward pass")
parser.add_argument("--joint", action="store_true", help="as --adversarial; both forward passes come first")
parser.add_argument("--dense", action="store_true", help="the last layer has an optimizer that steps after the pass")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
truth = Truth()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        for block in self.blocks:
            if options.checkpoint:
                x = checkpoint(block, x, use_reentrant=options.checkpoint == "reentrant")
            else:
                x = block(x)
        return x


def step_in_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Let optimizers of parameters step in hooks: one per parameter, or one for all."""
    parameters = list(parameters)
    groups = [parameters] if options.one else [[parameter] for parameter in parameters]
    for group in groups:
        optimizer, ready = torch.optim.SGD(group, lr=1e-3), [0]
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, optimizer, ready, len(group)))


def on_gradient(optimizer: torch.optim.Optimizer, ready: list[int], count: int, parameter: torch.Tensor) -> None:
    ready[0] += 1
    if ready[0] == count * options.micro_batches * options.losses:
        ready[0] = 0
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer_steps += 1


def passes(net: nn.Module, lap: str, after: Callable[[], None] = lambda: None) -> None:
    """Run the passes of one step, and end its lap."""
    for _ in range(options.micro_batches):
        y = net(torch.randn(options.batch, 32, requires_grad=options.checkpoint == "reentrant"))
        truth.calls += 1
        for number in range(options.losses):
            y.square().mean().backward(retain_graph=number < options.losses - 1)
    after()
    time.sleep(0.004)
    truth.lap(lap, options.batch * options.micro_batches)


net, other = Net(), Net()
last = list(net.blocks[-1].parameters()) if options.dense else []
step_in_hooks(parameter for parameter in net.parameters() if all(parameter is not each for each in last))
step_in_hooks(other.parameters())
dense = torch.optim.Adam(last) if last else None
truth.start()
for _ in range(options.iterations):
    if options.joint:
        results = [model(torch.randn(options.batch, 32)) for model in (net, other)]
        for result in results:
            result.square().mean().backward()
        time.sleep(0.004)
        truth.lap("training", options.batch)
        continue
    passes(net, "training", dense.step if dense is not None else lambda: None)
    if options.adversarial:
        passes(other, "other")
truth.say(sum=round(float(sum(parameter.sum() for parameter in net.parameters())), 5))
