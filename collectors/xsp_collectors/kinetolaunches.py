"""Kineto's details of launches and copies, besides name and times.

Kineto gives them as a JSON object without its braces: `"device": 0, …, "grid": [8, 1, 1], …`. Older versions of torch
write them to the exported file, but do not expose them in the process.
"""

from __future__ import annotations

import json
from typing import Any

_NAMES = {
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
    read_metadata = getattr(event, "metadata_json", None)
    details = _parse(read_metadata()) if read_metadata is not None else {}
    fields = {name: details[key] for key, name in _NAMES.items() if key in details}
    if details.get("graph node id"):
        fields |= {"graph": True, "graph_node": details["graph node id"]}
    return json.dumps(fields) if fields else None


def _parse(text: str) -> dict[str, Any]:
    try:
        details = json.loads("{" + text + "}")
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}
