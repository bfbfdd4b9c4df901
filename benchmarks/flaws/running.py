"""Shared code of the programs in this folder: the number of steps, and the switch for the flaw.

Each program is typical user code with one flaw; `--mended` leaves the flaw out. The environment variable STEPS sets the
number of steps.
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
    """Return a batch in channels-last layout, in which the convolutions here are fastest."""
    return torch.rand(batch, channels, side, side).contiguous(memory_format=torch.channels_last)


def predict(model: Any, *inputs: Any) -> None:
    """Call a model `STEPS` times, in the way that is right for inference."""
    model = model.eval().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(STEPS):
            model(*inputs)


def train(model: Any, inputs: torch.Tensor, step: Callable[[], None], clear: Callable[[], None]) -> None:
    """Train a model for `STEPS` steps on a placeholder loss."""
    for _ in range(STEPS):
        clear()
        model(inputs).square().mean().backward()
        step()
