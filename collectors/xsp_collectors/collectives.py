"""Which collective an operator of `c10d` was: communicator and sequence number, the same on all its ranks.

Kineto records that a collective ran, not which one. But each communicator counts its collectives, in the same
order on all ranks; so its counter is read before and after a step, and the collectives that ran in between
carry the numbers in between. Only if exactly as many ran as were counted, and of one communicator: never a
guess.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xsp.schema import Kind, Level, Span

NAME = "xsp.collective.name"
COMMUNICATOR = "xsp.collective.communicator"
SEQUENCE = "xsp.collective.seq"
ID = "xsp.collective.id"
GROUP_SIZE = "xsp.collective.group_size"

_TOLD = {
    "Collective name": NAME,
    "Process Group Name": COMMUNICATOR,
    "Seq": SEQUENCE,
    "In msg nelems": "xsp.collective.in_elements",
    "Out msg nelems": "xsp.collective.out_elements",
    "dtype": "xsp.collective.dtype",
    "Group size": GROUP_SIZE,
}
"""Kineto's words for what a collective is called with, and ours."""

PARAMETERS = "record_param_comms"
"""The operator in which torch states them, inside that of the collective."""

_POINT_TO_POINT = ("c10d::send", "c10d::recv")
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")


class Counts:
    """The communicators' counters before and after a step."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        """Processes of each communicator."""

    def begin(self) -> None:
        """Read the counters before the step."""
        self.before = _counters()

    def end(self) -> None:
        """Read them after it."""
        self.after = _counters()
        self.sizes = _sizes()


class Labelled(NamedTuple):
    """Spans of a step, and a sentence if their collectives could not be told."""

    spans: list[Span]
    note: str | None


def label(spans: Sequence[Span], counts: Counts) -> Labelled:
    """Say of each collective which one it was, and hang the backend's own part of it beneath it.

    Args:
        spans: of one step, as the profiler saw them.
        counts: of that step.
    """
    names = set(filter(_is_collective, {span.name for span in spans}))
    issued = sorted((span for span in spans if span.name in names), key=lambda span: span.start_ns) if names else []
    moved = {name: number for name, number in counts.after.items() if number > counts.before.get(name, number)}
    if not issued:
        return Labelled(list(spans), None)
    if len(moved) != 1:
        counted = f"{len(moved)} communicators counted" if moved else "no communicator counted"
        return Labelled(list(spans), f"{counted} the collectives of a step: which is which is unknown")
    (communicator,) = moved
    first = counts.before[communicator]
    if moved[communicator] - first != len(issued):
        text = f"communicator {communicator} counted {moved[communicator] - first} collectives in a step of"
        return Labelled(list(spans), f"{text} {len(issued)} operators: which is which is unknown")
    stated = [span for span in spans if span.name == PARAMETERS and span.attributes]
    size = {GROUP_SIZE: counts.sizes[communicator]} if communicator in counts.sizes else {}
    numbered = {
        id(span): _numbered(span, communicator, number, {**_inside(span, stated), **size})
        for number, span in enumerate(issued, start=first + 1)
    }
    parts = _parts([numbered[id(span)] for span in issued], [span for span in spans if _is_part(span)])
    return Labelled([numbered.get(id(span)) or parts.get(id(span)) or span for span in spans], None)


def _counters() -> dict[str, int]:
    """Return how many collectives each communicator of this process has begun."""
    found = {}
    for group in _communicators():
        try:
            found[str(group.group_name)] = int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a backend that does not count
            continue
    return found


def _sizes() -> dict[str, int]:
    """Return how many processes each communicator of this process has."""
    return {str(group.group_name): int(group.size()) for group in _communicators()}


def _communicators() -> list[Any]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return list(distributed._world.pg_map) if distributed is not None and distributed.is_initialized() else []


def told(event: Any, name: str) -> str | None:
    """Return what an event of torch.profiler's says of a collective, as attributes; None where it says nothing.

    Older versions of torch say it in the file that they write, and not in the process.

    Args:
        event: of the operator.
        name: its name.
    """
    ask = getattr(event, "metadata_json", None) if name == PARAMETERS else None
    if ask is None:
        return None
    try:
        stated = json.loads("{" + ask() + "}")
    except ValueError:
        return None
    found = {ours: stated[theirs] for theirs, ours in _TOLD.items() if stated.get(theirs) not in (None, "")}
    return json.dumps(found) if found else None


def _inside(collective: Span, stated: Iterable[Span]) -> dict[str, Any]:
    """Return what is stated inside a collective's operator, if that is one statement: several are coalesced calls."""
    within = [
        span
        for span in stated
        if span.thread == collective.thread and collective.start_ns <= span.start_ns < collective.end_ns
    ]
    return json.loads(within[0].attributes or "{}") if len(within) == 1 else {}


def _is_collective(name: str) -> bool:
    return name.startswith("c10d::") and not name.startswith(_POINT_TO_POINT)


def _is_part(span: Span) -> bool:
    return span.name.startswith(_BACKENDS)


def as_call(span: Span) -> Span:
    """Return what a backend says of its own work as the library call that it is."""
    return span._replace(level=Level.LIBRARY, kind=Kind.CALL.value) if _is_part(span) else span


def _numbered(span: Span, communicator: str, number: int, stated: dict[str, Any]) -> Span:
    known = {
        **stated,
        NAME: span.name.removeprefix("c10d::").strip("_"),
        COMMUNICATOR: communicator,
        SEQUENCE: number,
        ID: f"{communicator}:{number}",
    }
    return span._replace(span_id=os.urandom(8).hex(), attributes=json.dumps(known))


def _parts(issued: Sequence[Span], parts: Iterable[Span]) -> dict[int, Span]:
    """Find the collective that each part belongs to: the only one that was issued and not yet taken up."""
    found: dict[int, Span] = {}
    waiting: list[Span] = []
    pending = list(issued)
    for part in sorted(parts, key=lambda span: span.start_ns):
        while pending and pending[0].start_ns <= part.start_ns:
            waiting.append(pending.pop(0))
        if len(waiting) == 1:
            owner = waiting.pop()
            found[id(part)] = part._replace(parent_id=owner.span_id, attributes=owner.attributes)
        else:  # several could be it: from here on nothing is certain
            break
    return found
