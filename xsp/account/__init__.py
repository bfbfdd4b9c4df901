"""Where every second of a program went: one computation that all shares, limits and gains are read from."""

from xsp.account.assembly import of
from xsp.account.entries import Account, Doubt, Entry, Iterations, LateRank, Limit, Side

__all__ = ["Account", "Doubt", "Entry", "Iterations", "LateRank", "Limit", "Side", "of"]
