"""The identity of this process in its job, and in the distributed trace that it was started in.

The launcher of a distributed program sets the ranks in the environment (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`), and a
process that starts a program inside a trace sets `TRACEPARENT`, in the W3C's format. The host is a pseudonym: the same
for all processes of a host, different on another host, and not its real name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class Caller(NamedTuple):
    """The span in which this process, or this step, was started."""

    trace_id: str
    span_id: str


class Identity(NamedTuple):
    """A run's place in its job and in its trace. `run.json` has the fields."""

    id: str
    trace_id: str
    span_id: str
    caller: Caller | None
    """From `TRACEPARENT`."""

    shared: bool
    """Whether the trace belongs to a caller or to several ranks; then the steps are in it too."""

    rank: int
    local_rank: int
    world_size: int
    process: int
    host: str

    @property
    def otel(self) -> dict[str, str | None]:
        """The run's own span, in the form of `run.json`."""
        parent = self.caller.span_id if self.caller else None
        return {"trace_id": self.trace_id, "span_id": self.span_id, "parent_id": parent}


def of_this_process(environment: Mapping[str, str] = os.environ) -> Identity:
    """Return the identity of a new run in this process."""
    caller = caller_in(environment)
    shared_trace = caller.trace_id if caller else _trace_of_ranks(environment)
    return Identity(
        id=os.urandom(8).hex(),
        trace_id=shared_trace or os.urandom(16).hex(),
        span_id=os.urandom(8).hex(),
        caller=caller,
        shared=shared_trace is not None,
        rank=number_from(environment, "RANK", 0),
        local_rank=number_from(environment, "LOCAL_RANK", 0),
        world_size=number_from(environment, "WORLD_SIZE", 1),
        process=os.getpid(),
        host=host(),
    )


def caller_in(environment: Mapping[str, str]) -> Caller | None:
    """Return the span that `TRACEPARENT` names; None where it is missing or not in the W3C's format."""
    match = _TRACEPARENT.fullmatch(environment.get("TRACEPARENT", "").strip().lower())
    return Caller(*match.groups()) if match else None


def current_caller() -> Caller | None:
    """Return the program's current OpenTelemetry span; None if there is none, or OpenTelemetry is not loaded."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return Caller(f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else None


def traceparent(trace_id: str, span_id: str) -> str:
    """Return the value of `TRACEPARENT` for a process that is started inside a span."""
    return f"00-{trace_id}-{span_id}-01"


def host() -> str:
    """Return a pseudonym of this host."""
    try:
        name = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        name = ""
    # containers of one image share the machine id, but have different node names
    return f"host-{hashlib.blake2b(os.fsencode(f'{name}/{platform.node()}'), digest_size=6).hexdigest()}"


def _trace_of_ranks(environment: Mapping[str, str]) -> str | None:
    """Return a trace id for ranks that one launcher started on one host: all of them compute it, and no other job does.

    None for a single process, and for ranks on several hosts, which share nothing that is new in each run.
    """
    ranks = number_from(environment, "WORLD_SIZE", 1)
    if ranks < 2 or ranks != number_from(environment, "LOCAL_WORLD_SIZE", 0):
        return None
    launcher = os.getppid()
    try:
        start_time = (
            Path(f"/proc/{launcher}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError):
        return None
    return hashlib.blake2b(f"{host()}/{launcher}/{start_time}".encode(), digest_size=16).hexdigest()


def number_from(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the value of an environment variable that holds a non-negative integer; else the default."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default
