"""All steps are in child processes, one for each fold of a cross-validation; the parent only collects."""

from __future__ import annotations

import argparse

import torch
from torch import multiprocessing, nn
from torch.nn import functional
from truth import Truth


def train(fold: int, iterations: int) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(fold)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(torch.randn(16, 64)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--start", choices=["spawn", "fork"], default="spawn")
    options = parser.parse_args()
    truth = Truth()
    with multiprocessing.get_context(options.start).Pool(2) as pool:
        losses = pool.starmap(train, [(0, options.iterations), (1, options.iterations)])
    truth.say(loss=round(sum(losses), 6))


if __name__ == "__main__":
    main()
