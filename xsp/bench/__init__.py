"""Timings of blocks: each distinct operator call is timed once per machine, in isolation, and the timing is stored.

>>> from xsp import bench, graph
>>> pairs = bench.specs(graph.of("torchvision:resnet50"))           # doctest: +SKIP
>>> timings = bench.Timings.open()                                 # doctest: +SKIP
>>> bench.fill([spec for spec, _ in pairs], timings, seconds=60)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xsp.bench.spec import TIMED, CacheState, Spec, Status, Timing

if TYPE_CHECKING:
    from xsp.bench.environment import Environment
    from xsp.bench.plan import fill, specs
    from xsp.bench.timings import Timings

__all__ = ["TIMED", "CacheState", "Environment", "Spec", "Status", "Timing", "Timings", "fill", "specs"]

# Lazy, because the worker process imports this package and must not load the table engine.
_LAZY = {
    "Environment": "xsp.bench.environment",
    "Timings": "xsp.bench.timings",
    "fill": "xsp.bench.plan",
    "specs": "xsp.bench.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'xsp.bench' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
