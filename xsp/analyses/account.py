"""The account of an iteration as a table: both sides, part by part, as on the first screen, of all ranks and kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xsp import account
from xsp.account import Iterations, Side
from xsp.account import entries as names
from xsp.account.sentences import parts
from xsp.analyses.contract import Table, analysis, values
from xsp.store.trace import Trace

_COLUMNS = {
    "rank": "INTEGER", "kind": "INTEGER", "side": "VARCHAR", "part": "VARCHAR",
    **dict.fromkeys(("ms", "percent_of_iteration", "low_ms", "high_ms"), "DOUBLE"),
    "place": "VARCHAR", "place_ms": "DOUBLE", "source": "VARCHAR",
}  # fmt: skip

ITERATION = names.ITERATION


@analysis("account", "Where an iteration goes, on the host and on each device")
def account_of_iterations(trace: Trace) -> Table:
    """The parts of an iteration, as the host spent it and as each device did; the parts of a side add up to it.

    The rows are those of the first screen, with the small ones, for each rank and kind of step. The row `iteration` has
    the time of an iteration; `percent_of_iteration` is a percentage of it. Waits for the device are one part of the
    host's side, wherever the program waits. A device is busy with computation, exposed communication and exposed
    copies, or idle for a cause. `low_ms` and `high_ms` are the 95 % interval, null if there is none. `place` is the
    module, operator, class of kernels or line that takes most of a part, and `place_ms` its time. `source` says which
    iterations the time was measured in. docs/understand/account.md explains each part.
    """
    rows = [row for each in account.of(trace).iterations for row in _rows(each)]
    return values(trace, "account_of_iterations", _COLUMNS, rows)


def _rows(each: Iterations) -> Iterator[tuple[Any, ...]]:
    if each.time.ms is None:
        return
    time = each.time
    yield each.rank, each.kind, None, ITERATION, time.ms, 100.0, time.low_ms, time.high_ms, None, None, time.source
    for side in (each.host, *each.devices):
        for name, ms in parts(side).items():
            yield each.rank, each.kind, side.name, name, ms, each.percent(ms), *_details(side, name, ms)


def _details(side: Side, name: str, ms: float) -> tuple[Any, ...]:
    """Return interval, place and source of a part; the interval only if it is that of the whole entry."""
    entry = side[name.removeprefix(names.OF_IDLE)]
    if entry is None:
        return None, None, None, None, None
    ends = (entry.low_ms, entry.high_ms) if entry.ms == ms else (None, None)
    return *ends, entry.place, entry.place_ms, entry.source
