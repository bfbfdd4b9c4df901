"""A classifier of images that a DataLoader makes, with or without workers; on a device with copies to it."""

from __future__ import annotations

import argparse

import torch
from clock import Clock
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images that take some computing each, without end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((3, self.size, self.size), (index % 997) / 997)
        return (image.sin() + image.cos()) / 2, index % 10


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    clock = Clock(parser)
    options = clock.options
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(model, nn.LazyLinear(10)).to(clock.device)
    on_device = clock.device != "cpu"
    loader = DataLoader(Images(options.size), options.batch, num_workers=options.workers, pin_memory=on_device)
    batches = iter(loader)
    model(next(batches)[0].to(clock.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in clock.iterations():
        x, y = (part.to(clock.device, non_blocking=True) for part in next(batches))
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.lap()
    clock.say()


if __name__ == "__main__":
    main()
