"""As with torch.profiler: `prof.step()` is called bare at the end of each iteration."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from truth import Truth

import xsp

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=120)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--out", default="runs/bare_step")
parser.add_argument("--bare", action="store_true", help="without a profile")
parser.add_argument("--never", action="store_true", help="never call prof.step()")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
truth = Truth()
with xsp.profile("bare_step", out=options.out, overwrite=True, enabled=not options.bare) as prof:
    truth.start()
    for _ in range(options.iterations):
        x, y = torch.randn(options.batch, 128), torch.randint(10, (options.batch,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if not options.never:
            prof.step()
        truth.calls += 1
        truth.optimizer_steps += 1
        truth.lap("training", options.batch)
truth.say(loss=round(loss.item(), 6))
