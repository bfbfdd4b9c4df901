"""What `torch.compile` compiled during a run, as torch itself noted it: when, how long, and why anew.

A step in which code is compiled takes up to a thousand times as long as the others, and code is compiled anew whenever
the inputs do not fit what was compiled before. torch keeps the latest of these notes whether or not a program is
profiled, so reading them at the end costs the program nothing.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from xsp.record.between import shown_path

MOST = 1000
"""Most compilations that are kept: the latest ones. torch itself keeps 64 by default."""

MOST_LETTERS = 160
"""Longest reason."""

_VALUE = re.compile(r"==\s*(?P<quote>['\"]).*?(?P=quote)")
_EARLIER = re.compile(r"^\d+/\d+: ")


def compilations(since_ns: int) -> list[dict[str, Any]]:
    """Return the compilations that began after a time, for `run.json`, see `xsp.run.Compilation`.

    Args:
        since_ns: nanoseconds since the epoch.
    """
    try:
        found = [
            {
                "start_ns": round(note.start_time * 1e9),
                "dur_ns": round((note.entire_frame_compile_time_s or 0.0) * 1e9),
                "function": note.co_name or "",
                "file": shown_path(note.co_filename or ""),
                "line": note.co_firstlineno or 0,
                "reason": _reason(note.recompile_reason),
            }
            for note in _notes()
        ]
    except Exception:  # private to torch: another version may keep other notes, or none
        return []
    return [each for each in found if each["start_ns"] >= since_ns]


def latest_compilations() -> list[tuple[int, int]]:
    """Return start and end of the compilations that torch still knows, in nanoseconds since the epoch."""
    try:
        times = [(note.start_time, note.entire_frame_compile_time_s or 0.0) for note in _notes()]
        return [(round(start_s * 1e9), round((start_s + seconds) * 1e9)) for start_s, seconds in times]
    except Exception:  # private to torch, as above
        return []


def _notes() -> list[Any]:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return list(dynamo.get_compilation_metrics())[-MOST:] if dynamo is not None else []


def _reason(text: str | None) -> str | None:
    """Return why code was compiled anew: the first reason, without values, which may be secrets; None for new code."""
    if not text:
        return None
    line = _EARLIER.sub("", text.strip().splitlines()[0])
    return _VALUE.sub("== …", line)[:MOST_LETTERS]
