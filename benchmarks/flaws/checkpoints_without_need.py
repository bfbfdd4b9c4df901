"""Activation checkpointing of a model that fits into memory many times over."""

import torch
from running import FLAWED, train
from torch.utils.checkpoint import checkpoint


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)) for _ in range(6)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = value + (checkpoint(block, value, use_reentrant=False) if FLAWED else block(value))
        return value


model = Blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train(model, torch.randn(128, 512), optimizer.step, optimizer.zero_grad)
