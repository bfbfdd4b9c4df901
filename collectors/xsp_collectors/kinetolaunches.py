"""Kineto's details of launches and copies, besides name and times.

Kineto gives them as the inside of a JSON object: `"device": 0, …, "grid": [8, 1, 1], …`. Older versions of torch give
them only in the file that they write, not in the process.
"""

from __future__ import annotations

import json
from typing import Any

_WORDS = {
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    "context": "context",
    "bytes": "bytes",
}
"""Kineto's names, and the names in the column `attributes`."""


def attributes(event: Any) -> str | None:
    """Return the attributes of device work in the form of the importer of Kineto's files; None without details."""
    ask = getattr(event, "metadata_json", None)
    told = _read(ask()) if ask is not None else {}
    found = {ours: told[theirs] for theirs, ours in _WORDS.items() if theirs in told}
    if told.get("graph node id"):
        found |= {"graph": True, "graph_node": told["graph node id"]}
    return json.dumps(found) if found else None


def _read(text: str) -> dict[str, Any]:
    try:
        told = json.loads("{" + text + "}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
