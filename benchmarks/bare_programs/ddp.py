"""DistributedDataParallel of one rank, over NCCL on a device and over Gloo on a processor."""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--batch", type=int, default=64)
clock = Clock(parser)
options = clock.options
on_device = clock.device != "cpu"
with tempfile.NamedTemporaryFile() as file:
    store = dist.FileStore(file.name, 1)
    dist.init_process_group("nccl" if on_device else "gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(options.width, options.width) for _ in range(options.depth)]).to(clock.device)
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(options.batch, options.width, device=clock.device)
    for _ in clock.iterations():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        clock.lap()
    clock.say()
    dist.destroy_process_group()
