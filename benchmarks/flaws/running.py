"""What the programs of this folder share: how often they step, and whether their flaw is there.

Each is a program as people write them, with one flaw; `--mended` leaves the flaw out. STEPS says how often it steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

FLAWED = "--mended" not in sys.argv
STEPS = int(os.environ.get("STEPS", "120"))

torch.manual_seed(0)


def images(batch: int = 8, channels: int = 3, side: int = 64) -> torch.Tensor:
    """Return a batch with the channels last, which convolutions here are fastest on."""
    return torch.rand(batch, channels, side, side).contiguous(memory_format=torch.channels_last)


def predict(model: Any, *inputs: Any) -> None:
    """Call a model again and again, as it should be called for predictions."""
    model = model.eval().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(STEPS):
            model(*inputs)


def train(model: Any, inputs: torch.Tensor, step: Callable[[], None], clear: Callable[[], None]) -> None:
    """Train a model on a stand-in loss."""
    for _ in range(STEPS):
        clear()
        model(inputs).square().mean().backward()
        step()
