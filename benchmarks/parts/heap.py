"""Makes glibc keep the memory that steps free, instead of returning it to the system and requesting it again.

Otherwise the page faults of bare steps vary over time, with and without xsp; a comparison of steps that should be equal
keeps the memory on both sides (see docs/adr/107-page-faults-are-counted.md).
"""

from __future__ import annotations

import argparse
import ctypes

KEPT_BYTES = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--keep-heap`."""
    parser.add_argument(
        "--keep-heap", action="store_true", help="let glibc return no memory to the system between steps"
    )
    return parser


def keep() -> None:
    """Make glibc keep freed memory in this process; do nothing with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(parameter, KEPT_BYTES)
