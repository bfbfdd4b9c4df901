"""Depthwise and pointwise convolutions in the channels-first layout, where channels last is faster."""

import torch
from running import FLAWED, STEPS, images


def block(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(width, width, 3, padding=1, groups=width), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 1)
    )


kind = torch.contiguous_format if FLAWED else torch.channels_last
model = torch.nn.Sequential(*(block(64) for _ in range(6))).eval().to(memory_format=kind)
batch = images(8, 64, 56).contiguous(memory_format=kind)
with torch.inference_mode():
    for _ in range(STEPS):
        model(batch)
