"""The loop: one row for each step that the program ran, recorded or not.

Users judge a run by its loop: wall time per step, samples per second, waits between steps. These come from the steps
that are not recorded. A row is a few integers in one flat array, so that each step costs one `extend`, and a million
rows are 136 MB. After `UNFOLDED_ROWS` rows, consecutive bare steps of one kind on one thread are folded into rows that
represent several steps and at least `FOLDED_NS`; their times are means.
"""

from __future__ import annotations

import array
import enum
import sys
from typing import NamedTuple

from xsp.schema import LOOP_COLUMNS, PHASE_COLUMNS, Level

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

WIDTH = len(LOOP_COLUMNS)
UNFOLDED_ROWS = 50_000
FOLDED_NS = 50_000_000
BARE = int(Level.APPLICATION)
MOST_FOLDED = 64
"""Most threads whose rows are folded at a time."""

BUFFERED_ROWS = 32_768
"""Rows that are buffered until they are handed over; about 4 MB."""


class Status(enum.IntEnum):
    """The outcome of a step, as a number."""

    OK = 0
    ERROR = 1
    UNCLOSED = 2


class LoggedStep(NamedTuple):
    """One step; times are nanoseconds of the monotonic clock. The fields are `xsp.schema.LOOP_COLUMNS`."""

    rank: int
    step: int
    steps: int
    kind: int
    rung: int
    steady: int
    start_ns: int
    dur_ns: int
    before_ns: int
    data_ns: int
    own_ns: int
    samples: int
    status: int
    faults: int = -1
    system_ns: int = -1
    thread: int = -1
    beside_ns: int = 0
    forward_ns: int = -1
    backward_ns: int = -1
    optimizer_ns: int = -1


UNKNOWN = -1
"""Placeholder for unknown values: the time before the first step, samples without an input."""

_MEANS = ("dur_ns", "before_ns", "data_ns", "own_ns", "faults", "system_ns", "beside_ns", *PHASE_COLUMNS)
"""Fields that are means in a row that represents several steps."""


class Usage:
    """Page faults and system time of the process from the end of a step to the end of the next one.

    Memory that an allocator returns after a step, and gets again in the next one, costs a fault for each page.
    """

    def __init__(self) -> None:
        self._faults = self._system_s = 0.0
        self._is_known = False

    def forget(self) -> None:
        """Leave out the time until the next call of `read`, because it includes work of xsp."""
        self._is_known = False

    def read(self, steps: int = 1) -> tuple[int, int]:
        """Return page faults and system time in nanoseconds since the last call, per step of `steps`. Hot.

        Returns:
            `UNKNOWN` for both after `forget`, at the first call, and if the system does not report them.
        """
        if resource is None:
            return UNKNOWN, UNKNOWN
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults, system_s, was_known = self._faults, self._system_s, self._is_known
        self._faults, self._system_s, self._is_known = usage.ru_minflt, usage.ru_stime, True
        if not was_known:
            return UNKNOWN, UNKNOWN
        return round((usage.ru_minflt - faults) / steps), round((usage.ru_stime - system_s) * 1e9 / steps)


class Loop:
    """The rows that were not handed over yet."""

    def __init__(self) -> None:
        self._rows = array.array("q")
        self._unfolded_rows = 0
        self._folded_rows: dict[int, LoggedStep] = {}
        """The row of each thread that is not complete."""

    def add(self, row: tuple[int, ...]) -> None:
        """Add a step, given as the fields of `LoggedStep` in their order. Hot."""
        if self._unfolded_rows < UNFOLDED_ROWS:
            self._unfolded_rows += 1
            self._rows.extend(row)
            return
        self._fold(LoggedStep(*row))

    def _fold(self, row: LoggedStep) -> None:
        if row.rung != BARE:  # recorded: its spans are found by its number
            self._end_fold(row.thread)
            self._rows.extend(row)
            return
        if row.steps > 1:  # a stretch, whose times are means
            row = row._replace(**{name: getattr(row, name) * row.steps for name in _MEANS})
        folded = self._folded_rows.get(row.thread)
        if folded is not None and (
            _fold_key(folded) != _fold_key(row) or folded.dur_ns + folded.before_ns >= FOLDED_NS
        ):
            self._end_fold(row.thread)
            folded = None
        if folded is not None:
            sums = {name: getattr(folded, name) + getattr(row, name) for name in _MEANS}
            row = folded._replace(steps=folded.steps + row.steps, **sums)
        elif len(self._folded_rows) >= MOST_FOLDED:
            self._end_folds()
        self._folded_rows[row.thread] = row

    def _end_folds(self) -> None:
        for thread in list(self._folded_rows):
            self._end_fold(thread)

    def _end_fold(self, thread: int) -> None:
        row = self._folded_rows.pop(thread, None)
        if row is not None:
            means = {name: getattr(row, name) // row.steps for name in _MEANS}
            self._rows.extend(row._replace(**means))

    @property
    def is_full(self) -> bool:
        """Whether the rows should be handed over now."""
        return len(self._rows) >= BUFFERED_ROWS * WIDTH

    def take(self) -> bytes:
        """Return the rows as little-endian 64-bit numbers, and forget them."""
        self._end_folds()
        rows, self._rows = self._rows, array.array("q")
        if sys.byteorder == "big":
            rows.byteswap()
        return rows.tobytes()


def _fold_key(row: LoggedStep) -> tuple[object, ...]:
    """Return the properties that steps in one row must share."""
    # a sum of unknowns is negative, too
    return row.kind, row.rung, row.steady, row.status, row.samples, row.faults < 0, row.forward_ns < 0
