"""A batch takes 21 ms to load and a step 1 ms: the loader is what is slow."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--load-ms", type=float, default=21.0, help="for a batch")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--inference", action="store_true")
parser.add_argument(
    "--transform", action="store_true", help="the dataset calls a module, as torchvision's transforms are"
)
options = parser.parse_args()


class Transform(nn.Module):
    def forward(self, x):
        time.sleep(options.load_ms / options.batch / 1e3)
        return x


class Slow(Dataset):
    """As a file and its decoding: it takes time, on no core of ours."""

    def __len__(self) -> int:
        return options.iterations * options.batch

    transform = Transform() if options.transform else None

    def __getitem__(self, index):
        sample = torch.full((256,), index / 1e3)
        if self.transform is not None:
            return self.transform(sample), index % 10
        time.sleep(options.load_ms / options.batch / 1e3)
        return sample, index % 10


def batches(loader):
    iterator = iter(loader)
    while True:
        with truth.waiting():
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if options.inference:
        net.eval().requires_grad_(False)
    for x, y in batches(DataLoader(Slow(), options.batch, num_workers=options.workers)):
        loss = functional.cross_entropy(net(x), y)
        truth.calls += 1
        if not options.inference:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            truth.optimizer_steps += 1
        truth.lap("inference" if options.inference else "training", len(x))
    truth.say(loss=round(loss.item(), 6))


if __name__ == "__main__":
    truth = Truth()
    main()
