"""One rank of a training loop: alone and recorded by xsp, or one of several under DistributedDataParallel, bare.

python ddp_worker.py MODEL BATCH STEPS one RUN
python ddp_worker.py MODEL BATCH STEPS RANK RANKS STORE [MIB,MIB]      prints, on rank 0, JSON

These kinds of steps alternate in each process: steps of rank 0 while the other ranks wait (`alone`), steps of all ranks
that exchange nothing (`beside`), and steps of DistributedDataParallel, for each bucket size (`ddp`, `ddp 4`).
Disturbances of the machine affect all of them, and contention between ranks is separated from communication.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WARMUP_STEPS = 3
"""Warm-up steps of the recorded process."""

BLOCKS, SETTLE_STEPS, LEAST_STEPS = 4, 1, 3
"""Number of turns of each kind; steps at the start of a turn that do not count; minimum number of steps that count."""

BUDGET_S = 40.0
"""Seconds for one process; the number of long steps is reduced to fit."""

PARTS = ("step", "forward", "backward", "update")


def mlp(width: int, depth: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))


def cnn(width: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        parts += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def autoencoder() -> nn.Module:
    sizes = [784, 1024, 256, 32, 256, 1024, 784]
    return nn.Sequential(*(part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp-narrow": (mlp(512, 8), (512,)),
    "mlp-wide": (mlp(2048, 3), (2048,)),
    "mlp-deep": (mlp(384, 24), (384,)),
    "autoencoder": (autoencoder, (784,)),
    "cnn": (lambda: cnn(32), (3, 32, 32)),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 3, enable_nested_tensor=False
        ),
        (32, 256),
    ),
    "resnet18": (lambda: __import__("torchvision").models.resnet18(num_classes=10), (3, 64, 64)),
}


def main() -> None:
    name, batch, steps, *role = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, inputs = build(), torch.randn(int(batch), *shape)
    if role[0] == "one":
        record_alone(model, inputs, int(steps), Path(role[1]))
    else:
        rank, ranks, store = int(role[0]), int(role[1]), role[2]
        limits = [float(text) for text in role[3].split(",")] if len(role) > 3 else [None]
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        train_together(model, inputs, int(steps), rank, limits)
        dist.destroy_process_group()


def make_step(model: nn.Module, inputs: torch.Tensor) -> Callable[[], tuple[float, ...]]:
    """Return a step function that returns the seconds of each of `PARTS`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> tuple[float, ...]:
        start = time.perf_counter()
        optimizer.zero_grad()
        cleared = time.perf_counter()
        loss = model(inputs).square().mean()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        return end - start, forward - cleared, backward - forward, end - backward

    return step


def record_alone(model: nn.Module, inputs: torch.Tensor, steps: int, run: Path) -> None:
    import xsp

    step = make_step(model, inputs)
    with xsp.profile("train", out=run, levels="M/L", batch_size=len(inputs)) as profile:
        for _ in range(WARMUP_STEPS + steps):
            with profile.step():
                step()


def train_together(model: nn.Module, inputs: torch.Tensor, steps: int, rank: int, limits: list[float | None]) -> None:
    kinds: dict[str, Any] = {"alone": copy.deepcopy(model), "beside": copy.deepcopy(model)}
    for limit in limits:
        options = {} if limit is None else {"bucket_cap_mb": limit}
        name = "ddp" if limit is None else f"ddp {limit:g}"
        kinds[name] = nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options)
    step_functions = {name: make_step(module, inputs) for name, module in kinds.items()}
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in kinds}
    order = random.Random(0)
    count = torch.tensor([SETTLE_STEPS + -(-steps // BLOCKS)])
    if rank == 0:
        step_functions["alone"]()
        step_s = step_functions["alone"]()[0]
        max_steps = int(BUDGET_S / (2 * step_s * len(kinds) * (BLOCKS + 1)))
        count[0] = min(int(count[0]), max(SETTLE_STEPS + LEAST_STEPS, max_steps))
    dist.broadcast(count, 0)
    for block in range(BLOCKS + 1):  # the first block does not count: it rebuilds buckets
        for name in order.sample(sorted(kinds), k=len(kinds)):
            dist.barrier()
            if name == "alone" and rank:
                continue
            measured = [step_functions[name]() for _ in range(int(count))]
            times[name] += measured[SETTLE_STEPS:] if block else []
    results: dict[str, Any] = {
        name: dict(zip(PARTS, (sorted(column)[len(column) // 2] for column in zip(*rows, strict=True)), strict=True))
        for name, rows in times.items()
        if rows
    }
    results["overlap"] = None
    with contextlib.suppress(AttributeError, KeyError, RuntimeError):  # torch's own statistics, not always available
        wrapped = kinds[list(kinds)[2]]
        wrapped._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(5):
            step_functions[list(kinds)[2]]()
        logging = wrapped._get_ddp_logging_data()
        total = logging["avg_backward_comm_time"]
        results["overlap"] = logging["avg_backward_compute_comm_overlap_time"] / total if total else None
    if rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
