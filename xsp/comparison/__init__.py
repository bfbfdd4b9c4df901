"""Comparison of two programs by their runs, aligned layer by layer: where the second is slower or faster.

>>> import xsp                                                           # doctest: +SKIP
>>> a = [xsp.load(f"runs/before-{k}") for k in range(5)]                 # doctest: +SKIP
>>> b = [xsp.load(f"runs/after-{k}") for k in range(5)]                  # doctest: +SKIP
>>> result = xsp.compare(a, b)                                           # doctest: +SKIP
>>> result.step.verdict, result.step.change_percent                      # doctest: +SKIP
>>> [row.name for row in result.rows if row.verdict == "slower"]         # doctest: +SKIP
"""

from xsp.comparison.comparable import SettingDifference
from xsp.comparison.evidence import Repeats
from xsp.comparison.rows import ComparedRow, Comparison, compare

__all__ = ["ComparedRow", "Comparison", "Repeats", "SettingDifference", "compare"]
