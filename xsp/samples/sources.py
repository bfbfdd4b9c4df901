"""All sources of samples."""

from __future__ import annotations

import os
from collections.abc import Sequence

from xsp.samples.host import Host
from xsp.samples.nvml import Nvml
from xsp.samples.source import Source


def of(process: int, devices: Sequence[str] = ()) -> list[Source]:
    """Return the sources for one measured process, whose environment this one has inherited.

    Args:
        process: its number.
        devices: UUIDs of its devices in CUDA's order, if it has initialised CUDA; else the environment must tell.
    """
    return [Host(process), Nvml(process, devices, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))]


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
