"""A9, A14 and A15: where kernels, layers and the model stand under the roof of the machine.

They need DRAM traffic from a device's counters, which no collector records yet; so for now they refuse.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.span import Level
from xsp.trace import Trace


@analysis("A9", "Kernel roofline", Level.OP, counters=True)
def A9(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of each kernel against the machine's roof."""
    raise NotImplementedError("A9 has no counters to stand on yet")


@analysis("A14", "Layer roofline", Level.LAYER, Level.OP, counters=True)
def A14(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of each layer against the machine's roof."""
    raise NotImplementedError("A14 has no counters to stand on yet")


@analysis("A15", "Kernels by model", Level.OP, counters=True)
def A15(trace: Trace) -> Table:
    """All kernels of the model together, and whether memory bounds it."""
    raise NotImplementedError("A15 has no counters to stand on yet")
