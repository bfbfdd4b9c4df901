"""What was recorded before a step, apart from the step: its own segment, and the table `before`.

Analyses of steps read `spans`, in which a step contains all of its time. The rows of the time before a step are in
`before`, with the same columns: a root of kind `before`, and below it operators, copies and device work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xsp.schema import COLUMNS, Kind, Level

_PLACES = {column.name: place for place, column in enumerate(COLUMNS)}
IN_BOTH = f"(kind = '{Kind.DATA}' OR kind = '{Kind.USER}' AND level = {int(Level.APPLICATION)})"
"""SQL condition on spans before a step that are rows of the step as well: waits for data, and blocks of `xsp.span`."""

Columns = Sequence[Sequence[Any]]


def split(columns: Columns) -> tuple[Columns, Columns]:
    """Divide the rows of a step into its own and those of the time before it; the latter are empty without a window.

    Device work belongs to the part in which it was launched. Rows of `IN_BOTH` are in both parts.

    Args:
        columns: the values of each of `COLUMNS`.
    """
    kinds, starts = columns[_PLACES["kind"]], columns[_PLACES["start_ns"]]
    devices, launches = columns[_PLACES["device"]], columns[_PLACES["correlation_id"]]
    if Kind.BEFORE not in kinds:
        return columns, [[] for _ in columns]
    step_ns = starts[kinds.index(Kind.STEP)]
    on_host = {
        launch: start < step_ns
        for launch, start, device in zip(launches, starts, devices, strict=True)
        if launch is not None and device is None
    }
    is_before = [
        kind != Kind.STEP and (on_host.get(launch, start < step_ns) if device is not None else start < step_ns)
        for kind, start, device, launch in zip(kinds, starts, devices, launches, strict=True)
    ]
    own = [
        not early or kind == Kind.DATA or (kind == Kind.USER and level == Level.APPLICATION)
        for early, kind, level in zip(is_before, kinds, columns[_PLACES["level"]], strict=True)
    ]
    return _select(columns, own), _select(columns, is_before)


def _select(columns: Columns, chosen: Sequence[bool]) -> Columns:
    return [[value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen] for values in columns]
