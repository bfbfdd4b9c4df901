"""Where every second of a program went: one computation that all shares, limits and gains are read from."""

from xsp.account.entries import Account, Doubt, Entry, Iterations, LateRank, Limit, Side
from xsp.store.trace import Trace

__all__ = ["Account", "Doubt", "Entry", "Iterations", "LateRank", "Limit", "Side", "of"]


def of(trace: Trace) -> Account:
    """Return the account of a trace; computed once, in time proportional to the recorded spans.

    The time of an iteration comes from iterations that were not recorded, its parts from recorded ones. Where both
    differ, host times are scaled to the iteration, and busy times of devices are not: recording slows only the host.
    """
    from xsp.account import assembly  # it needs NumPy, which tables do not load before they are asked for

    return trace.cached("account", lambda: assembly.of(trace))
