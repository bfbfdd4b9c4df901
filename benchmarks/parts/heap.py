"""What glibc does with memory that steps free: it gives some back to the system, and the next steps take it anew.

Where it does, the page faults of bare steps differ from stretch to stretch, whether xsp is there or not; a comparison
of steps that are to be alike keeps that memory on both sides (see docs/adr/107-page-faults-are-counted.md).
"""

from __future__ import annotations

import argparse
import ctypes

KEPT = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def add_options(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--keep-heap`."""
    made.add_argument("--keep-heap", action="store_true", help="have glibc give no memory back between steps")
    return made


def keep() -> None:
    """Have glibc keep memory that was freed, in this process; elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for what in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(what, KEPT)
