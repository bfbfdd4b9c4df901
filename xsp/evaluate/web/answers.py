"""Answers of the server: JSON, and messages of errors without paths of the server."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastapi.responses import Response

_PATH = re.compile(r"(?<![\w./~-])(?:(?<!:)|(?!//))(?:file:)?~?/+(?:[^\s'\"():,;\[\]{}<>]*/)?([^\s'\"():,;\[\]{}<>/]*)")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON without validation, which for a thousand rows would take longer than reading them."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    try:
        text = encoder.encode(content)
    except ValueError:  # some numbers are not finite, which is rare
        text = encoder.encode(json.loads(json.dumps(content, default=str), parse_constant=lambda _: None))
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")


def without_paths(text: str, store: Path) -> str:
    """Return a message in which each absolute path is replaced by its last part: clients learn no directories.

    Args:
        text: the message.
        store: folder of results.
    """
    folders = {store, store.resolve(), Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    for folder in sorted(map(str, folders), key=len, reverse=True):  # their names may contain spaces
        if len(folder) > 1 and os.path.isabs(folder):
            text = text.replace(f"{folder}{os.sep}", "").replace(folder, "")
    return _PATH.sub(r"\1", text)
