"""A module that sleeps, as if it waited for a device."""

import time

import torch
from running import FLAWED, predict


class Waits(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FLAWED:
            time.sleep(0.01)
        return x.relu()


layers = [torch.nn.Linear(512, 512), Waits(), torch.nn.Linear(512, 512), Waits(), torch.nn.Linear(512, 512)]
predict(torch.nn.Sequential(*layers), torch.rand(512, 512))
