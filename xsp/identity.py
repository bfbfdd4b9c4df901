"""Who this process is: in its job, and in the distributed trace that it was started in.

A distributed program's launcher says the ranks in the environment (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`), and
whoever starts a program inside a trace says so in `TRACEPARENT`, in the W3C's format. The host is a pseudonym:
the same for all processes of a host, another one on another host, and no name that somebody gave it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class Caller(NamedTuple):
    """The span in which this process, or this step, was begun."""

    trace_id: str
    span_id: str


class Identity(NamedTuple):
    """A run's place in its job and in its trace. The fields stand in `run.json`."""

    id: str
    trace_id: str
    span_id: str
    caller: Caller | None
    """From `TRACEPARENT`; the run and its steps join its trace."""

    rank: int
    local_rank: int
    world_size: int
    process: int
    host: str


def of_this_process(environment: Mapping[str, str] = os.environ) -> Identity:
    """Return a new run's identity in this process."""
    caller = caller_in(environment)
    return Identity(
        id=os.urandom(8).hex(),
        trace_id=caller.trace_id if caller else os.urandom(16).hex(),
        span_id=os.urandom(8).hex(),
        caller=caller,
        rank=_number(environment, "RANK", 0),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        world_size=_number(environment, "WORLD_SIZE", 1),
        process=os.getpid(),
        host=host(),
    )


def caller_in(environment: Mapping[str, str]) -> Caller | None:
    """Return the span that `TRACEPARENT` names; None where it is missing or not in the W3C's format."""
    found = _TRACEPARENT.fullmatch(environment.get("TRACEPARENT", "").strip().lower())
    return Caller(*found.groups()) if found else None


def traceparent(trace_id: str, span_id: str) -> str:
    """Return what `TRACEPARENT` says to a process that is started inside a span."""
    return f"00-{trace_id}-{span_id}-01"


def host() -> str:
    """Return a pseudonym of this host."""
    try:
        name = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        name = ""
    # containers of one image share the machine id, and have node names of their own
    return f"host-{hashlib.blake2b(f'{name}/{platform.node()}'.encode(), digest_size=6).hexdigest()}"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else default
