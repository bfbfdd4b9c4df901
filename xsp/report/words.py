"""What the page says instead of letters and numbers: how deep a step was recorded, which devices a trace is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from xsp.levels import depth
from xsp.schema import Level
from xsp.store.trace import Trace


def explained(rungs: Iterable[str]) -> str:
    """Return rungs with what they record: `steps and calls (M), layers too (M/L)`."""
    return ", ".join(f"{depth(rung)}{' too' if place else ''} ({rung})" for place, rung in enumerate(rungs))


def used_devices(trace: Trace) -> list[tuple[int, int]]:
    """Return rank and number of each device that work of the trace ran on."""
    return trace.con.execute(
        f"SELECT DISTINCT rank, device FROM spans WHERE level = {int(Level.KERNEL)} AND device IS NOT NULL ORDER BY ALL"
    ).fetchall()


def devices(trace: Trace) -> str:
    """Return the devices that work ran on, and how many more the machine has; nothing where none is known.

    `2 × NVIDIA A100 (of 8 in the machine)`; a trace of one GPU is of one, whatever stands beside it.
    """
    machine = trace.run.get("machine") or {}
    held = [str(each) for each in machine.get("devices") or []]
    used = used_devices(trace)
    if not used:
        return f"{_counted(held)} (no work of it in the trace)" if held else ""
    names = [_name(held, device) for _, device in used]
    idle = len(held) > len(used)
    return _counted(names) + (f" (of {len(held)} in the machine)" if idle else "")


def _name(held: list[str], device: int) -> str:
    if len(set(held)) == 1:
        return held[0]
    return held[device] if 0 <= device < len(held) else _UNNAMED


def _counted(names: Iterable[str]) -> str:
    """Return names with how many times they occur: `8 × NVIDIA A100`."""
    return ", ".join(
        f"{count} GPU{'s' * (count > 1)}" if name == _UNNAMED else f"{count} × {name}" if count > 1 else name
        for name, count in Counter(names).items()
    )


_UNNAMED = ""
"""What a device is called of which the trace does not say what it is."""
