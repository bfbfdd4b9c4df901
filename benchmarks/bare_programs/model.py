"""A step of a model by name, built as `xsp profile` builds it; on a device each step waits until its work has ended."""

from __future__ import annotations

import argparse

import torch
from clock import Clock

from xsp import models

parser = argparse.ArgumentParser()
parser.add_argument("model", help="as `xsp profile` takes it")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--train", action="store_true")
parser.add_argument("--seed", type=int, default=0)
clock = Clock(parser)
options = clock.options
settings = models.Settings(
    batch=options.batch, train=options.train, seed=options.seed, sequence=options.sequence, device=clock.device
)
workload = models.load(options.model, settings)


def step() -> None:
    """Run the step to its end."""
    workload.step()
    if clock.device != "cpu":
        torch.cuda.synchronize()


for _ in clock.iterations():
    step()
    clock.lap("training" if options.train else "inference")
clock.say()
