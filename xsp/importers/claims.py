"""Descriptions of runs and devices as sources state them. Only values of the expected type are used."""

from __future__ import annotations

import json
import re
from typing import Any

from xsp.importers.contract import Losses
from xsp.run import Run

_ID = re.compile(r"[0-9a-f]{1,32}")


def run_of(text: str, losses: Losses) -> Run | None:
    """Parse a `run.json`; fields of unexpected types are left out.

    Args:
        text: JSON.
        losses: counts fields that were left out.

    Returns:
        The run, which has an `id`; None if the text does not describe a run.
    """
    try:
        run = Run.of(json.loads(text, parse_constant=_refuse))
    except (ValueError, TypeError, AttributeError, RecursionError):
        run = Run.of({})
    if run.id is None or not _ID.fullmatch(run.id):
        losses.changed["description of a run that is not valid"] += 1
        return None
    for name in run.misfits:
        losses.changed[f"field {name} of a run left out: it does not have xsp's type"] += 1
    return Run.of({name: value for name, value in run.items() if name not in _DIRECTORY_FIELDS})


def device(name: str, sms: Any, memory_bytes: Any, major: Any, minor: Any, warp_size: Any) -> dict[str, Any]:
    """Return the properties of a device in the form of `run.json`; values that the source does not state are None."""
    return {
        "name": name,
        "sms": sms,
        "memory_bytes": memory_bytes,
        "compute": None if major is None or minor is None else f"{major}.{minor}",
        "warp_size": warp_size,
    }


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DIRECTORY_FIELDS = frozenset({"format", "parts", "ranks", "imported", "received", "delivery"})
"""Fields about the run directory itself; the process that writes the directory sets them."""
