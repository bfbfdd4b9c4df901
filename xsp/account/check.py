"""Whether an account adds up: what every account must satisfy, whatever the program."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.account import entries as names
from xsp.account.entries import Account, Entry, Iterations

MAX_UNEXPLAINED_SHARE = 0.05
"""Largest share of an iteration that may be left unexplained on either side."""

TOLERANCE = 1e-3
"""Relative difference between a sum and its total that rounding may cause."""


def violations(account: Account) -> Iterator[str]:
    """Yield a sentence for each sum of an account that does not hold."""
    for each in account.iterations:
        yield from _of(each)
    total_ms = sum(entry.ms or 0.0 for entry in account.program)
    if account.program and account.wall_ms and abs(total_ms - account.wall_ms) > TOLERANCE * account.wall_ms:
        yield f"the parts of the program add up to {total_ms:.4g} of {account.wall_ms:.4g} ms"


def _of(account: Iterations) -> Iterator[str]:
    iteration_ms = account.time.ms
    if iteration_ms is None:
        return
    where = f" on rank {account.rank}" if account.rank else ""
    yield from _entry(account.time, "time", iteration_ms, where)
    for side in (account.host, *account.devices):
        for top in side.entries:
            if top.name == names.UNEXPLAINED:
                share = (top.ms or 0.0) / iteration_ms if iteration_ms else 0.0
                if abs(share) > MAX_UNEXPLAINED_SHARE:
                    rest = f"{abs(top.ms or 0.0):.4g} ms"
                    verdict = f"exceed an iteration by {rest}" if share < 0 else f"leave {rest} of it unexplained"
                    yield f"of an iteration of {iteration_ms:.4g} ms the parts of the {side.name} {verdict}{where}"
                continue
            yield from _entry(top, side.name, iteration_ms, where)
        if side.entries and abs(side.total_ms - iteration_ms) > TOLERANCE * iteration_ms:
            yield f"the parts of the {side.name} add up to {side.total_ms:.4g} of {iteration_ms:.4g} ms{where}"


def _entry(entry: Entry, side: str, parent_ms: float, where: str) -> Iterator[str]:
    ms = entry.ms
    if ms is None:
        return
    slack = TOLERANCE * max(parent_ms, 1e-3)
    if ms < -slack:
        yield f"{entry.name} of the {side} takes {ms:.4g} ms{where}"
    if ms > parent_ms + slack:
        yield f"{entry.name} of the {side} takes {ms:.4g} of {parent_ms:.4g} ms{where}"
    inside = sum(child.ms or 0.0 for child in entry.children)
    if entry.children and abs(inside - ms) > TOLERANCE * max(ms, 1e-3):
        yield f"the parts of {entry.name} of the {side} add up to {inside:.4g} of {ms:.4g} ms{where}"
    for child in entry.children:
        yield from _entry(child, side, ms, where)
