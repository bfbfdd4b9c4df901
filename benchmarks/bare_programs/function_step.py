"""A step that is a function: no module, no optimizer, only tensors (`xsp run --step learn`)."""

from __future__ import annotations

import torch
from clock import Clock

clock = Clock()
torch.manual_seed(0)
x, target = torch.randn(128, 256), torch.randn(128, 16)
weights = [torch.randn(256, 256).mul_(0.05).requires_grad_(), torch.randn(256, 16).mul_(0.05).requires_grad_()]


def learn() -> None:
    """Take one step of gradient descent."""
    loss = ((x @ weights[0]).relu() @ weights[1] - target).square().mean()
    gradients = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.01 * gradient


for _ in clock.iterations():
    learn()
    clock.lap()
clock.say()
