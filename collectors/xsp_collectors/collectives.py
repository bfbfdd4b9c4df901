"""The identity of collectives in `c10d` operators: communicator and sequence number, equal on all ranks.

Kineto records that a collective ran, but not which one. Each communicator counts its collectives, in the same order on
all ranks. So its counter is read before and after a step, and the collectives that ran in between get the numbers in
between. If the counts disagree, or several communicators counted, they get none: nothing is guessed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xsp.schema import Kind, Level, Span
from xsp_collectors.layercalls import new_span_id

NAME = "xsp.collective.name"
COMMUNICATOR = "xsp.collective.communicator"
SEQUENCE = "xsp.collective.seq"
ID = "xsp.collective.id"
GROUP_SIZE = "xsp.collective.group_size"

_ATTRIBUTES = {
    "Collective name": NAME,
    "Process Group Name": COMMUNICATOR,
    "Seq": SEQUENCE,
    "In msg nelems": "xsp.collective.in_elements",
    "Out msg nelems": "xsp.collective.out_elements",
    "dtype": "xsp.collective.dtype",
    "Group size": GROUP_SIZE,
}
"""Kineto's names of a collective's parameters, and the names of the attributes."""

PARAMETERS = "record_param_comms"
"""The operator that carries the parameters, inside the operator of the collective."""

_POINT_TO_POINT = ("c10d::send", "c10d::recv")
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")


class CollectiveCounts:
    """The communicators' counters before and after a step."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        """Number of processes of each communicator."""

    def begin(self) -> None:
        """Read the counters before the step."""
        self.before = _counters()

    def end(self) -> None:
        """Read the counters after the step."""
        self.after = _counters()
        self.sizes = {str(group.group_name): int(group.size()) for group in _communicators()}


class LabelledSpans(NamedTuple):
    """Spans of a step, and a sentence if their collectives could not be identified."""

    spans: list[Span]
    note: str | None


def label(spans: Sequence[Span], counts: CollectiveCounts) -> LabelledSpans:
    """Identify each collective, and make the backend's own part of it its child.

    Args:
        spans: spans of one step, from the profiler.
        counts: counters of that step.
    """
    names = set(filter(_is_collective, {span.name for span in spans}))
    operators = sorted((span for span in spans if span.name in names), key=lambda span: span.start_ns) if names else []
    new_counts = {name: number for name, number in counts.after.items() if number > counts.before.get(name, number)}
    if not operators:
        return LabelledSpans(list(spans), None)
    if len(new_counts) != 1:
        subject = f"{len(new_counts)} communicators counted" if new_counts else "no communicator counted"
        return LabelledSpans(list(spans), f"{subject} the collectives of a step: they cannot be matched")
    (communicator,) = new_counts
    first_number = counts.before[communicator]
    if new_counts[communicator] - first_number != len(operators):
        text = f"communicator {communicator} counted {new_counts[communicator] - first_number} collectives in a step of"
        return LabelledSpans(list(spans), f"{text} {len(operators)} operators: they cannot be matched")
    parameter_spans = [span for span in spans if span.name == PARAMETERS and span.attributes]
    size = {GROUP_SIZE: counts.sizes[communicator]} if communicator in counts.sizes else {}
    numbered_spans = {
        id(span): _with_number(span, communicator, number, {**_inner_parameters(span, parameter_spans), **size})
        for number, span in enumerate(operators, start=first_number + 1)
    }
    parts = _parts([numbered_spans[id(span)] for span in operators], [span for span in spans if _is_part(span)])
    return LabelledSpans([numbered_spans.get(id(span)) or parts.get(id(span)) or span for span in spans], None)


def _counters() -> dict[str, int]:
    """Return the number of collectives that each communicator of this process has begun, by its name."""
    counts = {}
    for group in _communicators():
        try:
            counts[str(group.group_name)] = int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a backend that does not count
            continue
    return counts


def _communicators() -> list[Any]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return list(distributed._world.pg_map) if distributed is not None and distributed.is_initialized() else []


def parameters_json(event: Any, name: str) -> str | None:
    """Return the parameters of a collective from a torch.profiler event, as JSON; None if it has none.

    Older versions of torch write them to the exported file, but do not expose them in the process.

    Args:
        event: event of the operator.
        name: name of the operator.
    """
    read_metadata = getattr(event, "metadata_json", None) if name == PARAMETERS else None
    if read_metadata is None:
        return None
    try:
        metadata = json.loads("{" + read_metadata() + "}")
    except ValueError:
        return None
    parameters = {
        attribute: metadata[key] for key, attribute in _ATTRIBUTES.items() if metadata.get(key) not in (None, "")
    }
    return json.dumps(parameters) if parameters else None


def _inner_parameters(collective: Span, candidates: Iterable[Span]) -> dict[str, Any]:
    """Return the parameters recorded inside a collective's operator; empty if there are several (coalesced calls)."""
    matches = [
        span
        for span in candidates
        if span.thread == collective.thread and collective.start_ns <= span.start_ns < collective.end_ns
    ]
    return json.loads(matches[0].attributes or "{}") if len(matches) == 1 else {}


def _is_collective(name: str) -> bool:
    return name.startswith("c10d::") and not name.startswith(_POINT_TO_POINT)


def _is_part(span: Span) -> bool:
    return span.name.startswith(_BACKENDS)


def as_call(span: Span) -> Span:
    """Return a backend's span of its own work as a library call; other spans unchanged."""
    return span._replace(level=Level.LIBRARY, kind=Kind.CALL.value) if _is_part(span) else span


def _with_number(span: Span, communicator: str, number: int, parameters: dict[str, Any]) -> Span:
    attributes = {
        **parameters,
        NAME: span.name.removeprefix("c10d::").strip("_"),
        COMMUNICATOR: communicator,
        SEQUENCE: number,
        ID: f"{communicator}:{number}",
    }
    return span._replace(span_id=new_span_id(), attributes=json.dumps(attributes))


def _parts(operators: Sequence[Span], parts: Iterable[Span]) -> dict[int, Span]:
    """Assign each part to its collective: the only one that has begun and has no part yet."""
    children: dict[int, Span] = {}
    candidates: list[Span] = []
    pending = list(operators)
    for part in sorted(parts, key=lambda span: span.start_ns):
        while pending and pending[0].start_ns <= part.start_ns:
            candidates.append(pending.pop(0))
        if len(candidates) == 1:
            owner = candidates.pop()
            children[id(part)] = part._replace(parent_id=owner.span_id, attributes=owner.attributes)
        else:  # several could match: from here on nothing is certain
            break
    return children
