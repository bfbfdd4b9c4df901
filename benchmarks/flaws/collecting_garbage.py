"""A garbage collection after each step, which visits every object of the process."""

import gc

import torch
from running import FLAWED, train

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step_and_tidy() -> None:
    optimizer.step()
    if FLAWED:
        gc.collect()


train(model, torch.rand(64, 256), step_and_tidy, optimizer.zero_grad)
