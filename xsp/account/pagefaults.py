"""The time that page faults take from a step, from their number and the system time of the program."""

from __future__ import annotations

import math

from xsp.run import Machine
from xsp.stats import Interval

PAGE_US = 5.0
"""Maximum system time per page fault in microseconds; system time beyond that is other work. 1 to 2.5 µs were measured
on a virtual machine, where faults are most expensive."""


def threads(machine: Machine) -> int:
    """Return the number of threads that compute at once on the machine of a run."""
    return max(1, min(machine.torch_threads or 1, machine.cores or 1))


def cost(faults: float, system_ms: float, threads: int) -> Interval:
    """Return the milliseconds of an iteration that page faults take: expected, with the least and the most.

    System time is summed over all threads. If threads fault in parallel, the step loses the time of one thread; if they
    wait for each other, it loses all of the time: the geometric mean of both is expected.

    Args:
        faults: page faults in an iteration.
        system_ms: system time of all threads in an iteration.
        threads: number of threads that compute.
    """
    limited_ms = min(system_ms, faults * PAGE_US / 1e3)
    return Interval(limited_ms / threads, limited_ms / math.sqrt(threads), limited_ms)
