"""Two runs side by side, aligned layer by layer, and where the second is slower or faster than the first.

>>> import xsp                                                           # doctest: +SKIP
>>> found = xsp.compare(xsp.load("runs/before"), xsp.load("runs/after"))  # doctest: +SKIP
>>> found.step.verdict, found.step.change_percent                        # doctest: +SKIP
>>> [row.name for row in found.rows if row.verdict == "slower"]          # doctest: +SKIP
"""

from xsp.comparison.comparable import Difference
from xsp.comparison.evidence import RULE
from xsp.comparison.rows import Comparison, Row, compare

__all__ = ["RULE", "Comparison", "Difference", "Row", "compare"]
