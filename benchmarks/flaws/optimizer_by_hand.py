"""Adam written as a loop in Python, for many small parameters."""

import torch
from running import FLAWED, train

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(80)))
parameters = list(model.parameters())
means = [torch.zeros_like(parameter) for parameter in parameters]
squares = [torch.zeros_like(parameter) for parameter in parameters]
fused = torch.optim.Adam(parameters, lr=1e-3, fused=True)


@torch.no_grad()
def by_hand() -> None:
    for parameter, mean, square in zip(parameters, means, squares, strict=True):
        mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
        square.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        parameter -= 1e-3 * mean / (square.sqrt() + 1e-8)


train(model, torch.rand(16, 64), by_hand if FLAWED else fused.step, fused.zero_grad)
