"""What Kineto says of a launch and of a copy, beside name and time.

Kineto gives it as the inside of a JSON object: `"device": 0, …, "grid": [8, 1, 1], …`. Older versions of torch do not
give it in the process at all, only in the file that they write.
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
"""Kineto's words, and those of the column `attributes`."""


def attributes(event: Any) -> str | None:
    """Return the attributes of device work as the importer of Kineto's files writes them; None if nothing is said."""
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
