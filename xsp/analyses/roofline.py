"""A9, A14 and A15: where kernels, layers and the model stand under the roof of the machine.

They need DRAM traffic from a device's counters, which no collector records yet; so for now they refuse.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.errors import AnalysisError
from xsp.span import Level
from xsp.trace import Trace


def _refuse(identity: str) -> AnalysisError:
    return AnalysisError(
        f"{identity} needs the DRAM traffic of each kernel from a device's counters; this trace has none, and "
        "no collector of this version records them"
    )


@analysis("A9", "Kernel roofline", Level.OP)
def A9(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of each kernel against the machine's roof."""
    raise _refuse("A9")


@analysis("A14", "Layer roofline", Level.LAYER, Level.OP)
def A14(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of each layer against the machine's roof."""
    raise _refuse("A14")


@analysis("A15", "Kernels by model", Level.OP)
def A15(trace: Trace) -> Table:
    """All kernels of the model together, and whether memory bounds it."""
    raise _refuse("A15")
