"""DistributedDataParallel over gloo: `torchrun --nproc-per-node 2 ddp.py`. Rank 0 says what the job did."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from truth import Truth

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--batch", type=int, default=8, help="of a micro-batch of a rank")
parser.add_argument("--micro-batches", type=int, default=1, help="all but the last under no_sync")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
torch.manual_seed(rank)
truth = Truth()
for _ in range(options.iterations):
    optimizer.zero_grad()
    for micro in range(options.micro_batches):
        x, y = torch.randn(options.batch, 256), torch.randint(10, (options.batch,))
        net.require_backward_grad_sync = micro == options.micro_batches - 1
        functional.cross_entropy(net(x), y).backward()
        truth.calls += 1
    optimizer.step()
    truth.optimizer_steps += 1
    truth.lap("training", options.batch * options.micro_batches)
if rank == 0:
    truth.say(ranks=ranks, weights=round(sum(float(p.detach().abs().sum()) for p in net.parameters()), 4))
dist.destroy_process_group()
