"""Inference that records the graph for a backward pass that never runs."""

import torch
from running import FLAWED, STEPS

layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()) for _ in range(40)]
model = torch.nn.Sequential(*layers).eval()
batch = torch.rand(8, 64)
with torch.set_grad_enabled(True) if FLAWED else torch.inference_mode():
    for _ in range(10 * STEPS):
        model(batch)
