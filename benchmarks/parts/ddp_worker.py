"""One rank of a training loop: alone and recorded by xsp, or one of several under DistributedDataParallel, bare.

python ddp_worker.py MODEL BATCH STEPS one RUN
python ddp_worker.py MODEL BATCH STEPS RANK RANKS STORE      prints, on rank 0, JSON
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WARM = 6
"""Steps before those that count: DistributedDataParallel has rebuilt its buckets by then."""


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
    model, given = build(), torch.randn(int(batch), *shape)
    if role[0] == "one":
        alone(model, given, int(steps), Path(role[1]))
    else:
        rank, ranks, store = int(role[0]), int(role[1]), role[2]
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        together(model, given, int(steps), rank)
        dist.destroy_process_group()


def stepping(model: nn.Module, given: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    return step


def alone(model: nn.Module, given: torch.Tensor, steps: int, run: Path) -> None:
    import xsp

    step = stepping(model, given)
    with xsp.profile("train", out=run, levels="M/L", batch_size=len(given)) as profile:
        for _ in range(WARM + steps):
            with profile.step():
                step()


def together(model: nn.Module, given: torch.Tensor, steps: int, rank: int) -> None:
    wrapped: Any = nn.parallel.DistributedDataParallel(model)
    step = stepping(wrapped, given)
    took = []
    for place in range(WARM + steps):
        began = time.perf_counter()
        step()
        if place >= WARM:
            took.append(time.perf_counter() - began)
    found: dict[str, Any] = {"seconds": sorted(took)[len(took) // 2], "mean": sum(took) / len(took)}
    try:
        wrapped._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(5):
            step()
        told = wrapped._get_ddp_logging_data()
        whole = told["avg_backward_comm_time"]
        found["overlap"] = told["avg_backward_compute_comm_overlap_time"] / whole if whole else None
    except (AttributeError, KeyError, RuntimeError):  # torch's own account, which it need not have
        found["overlap"] = None
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
