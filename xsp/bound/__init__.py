"""Estimates of the minimum time of a step, and the differences to the measured time.

>>> import xsp
>>> bound = xsp.bound.of("torchvision:resnet50", fill=60)     # doctest: +SKIP
>>> bound.rungs["best"].sequential, bound.coverage            # doctest: +SKIP
"""

from __future__ import annotations

from xsp.bound.ladder import Bound, Hole, LadderDifference, LadderLayer, Rung
from xsp.bound.sources import of
from xsp.bound.totals import Coverage, Figure, Total

__all__ = ["Bound", "Coverage", "Figure", "Hole", "LadderDifference", "LadderLayer", "Rung", "Total", "of"]
