"""Calls of CUDA's runtime and driver, their waits, and CUPTI's own work, as spans (RUNTIME)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from xsp.callnames import awaited_of, kind_of
from xsp.schema import Kind, Level, Span, spans_of
from xsp_collectors.cuda.activities import (
    COLLECTOR,
    UNKNOWN,
    Activity,
    Integers,
    Overhead,
    Table,
    Wait,
    distinct,
    thread_of,
)

NameLookup = Callable[[Activity, int], str]
"""Returns the name of a call for its interface and CUPTI's number of it."""

ThreadLookup = Callable[[int | None], int | None]
"""Returns the operating system's id for a record's number of a thread, or None."""

Description = tuple[str, str, str | None]
"""Kind, name and attributes of a call."""

_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d{4,})?$")

_WAITS = {1: "event", 3: "stream", 4: "context"}
"""CUPTI's numbers of the waits of a host; 2 is a stream that waits for an event."""

_OVERHEADS = {
    1: "driver compiler",
    1 << 16: "CUPTI buffer flush",
    2 << 16: "CUPTI instrumentation",
    3 << 16: "CUPTI resource",
    4 << 16: "module loading triggered by the runtime",
    5 << 16: "lazy function loading",
    6 << 16: "command buffer full",
    7 << 16: "activity buffer request",
    8 << 16: "unified memory initialisation",
}


@functools.lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """Return the name that programs use, without the suffixes for version and default stream that CUPTI adds.

    >>> plain_name("cudaLaunchKernel_ptsz_v7000"), plain_name("cuMemcpyDtoD_v2")
    ('cudaLaunchKernel', 'cuMemcpyDtoD_v2')
    """
    return _VERSION.sub("", name)


def calls(
    api_calls: Table,
    waits: Iterable[Wait],
    find_name: NameLookup,
    find_thread: ThreadLookup,
) -> Iterator[Span]:
    """Yield a span for each call that the program made.

    A driver call inside a runtime call has the same correlation id: it is the same launch, and is put into the
    attributes of the runtime call. Driver calls outside of any (Triton's, NCCL's) are launches of their own.

    Args:
        api_calls: records of `ApiCall`.
        waits: the waits of these calls, and of calls that were not recorded.
        find_name: returns the name of a call.
        find_thread: returns the operating system's id of a thread.
    """
    own, driver_numbers = _without_inner(api_calls)
    waits_by_id = {wait.correlation_id: wait for wait in waits if wait.type in _WAITS}
    if len(own):
        keys, examples = distinct(
            (own.kind, own["cbid"], driver_numbers, _wait_types(own, waits_by_id), own["return_value"])
        )

        def describe(key: bytes) -> Description:
            kind, number, driver_number, wait_type, returned = np.frombuffer(key, np.int64).tolist()
            driver = None if driver_number == UNKNOWN else plain_name(find_name(Activity.DRIVER, driver_number))
            name = plain_name(find_name(Activity(kind), number))
            wait = None if wait_type == UNKNOWN else wait_type
            kind = kind_of(name)
            attributes: dict[str, Any] = {"driver": driver} if driver is not None else {}
            if kind is Kind.SYNC or wait is not None:
                attributes["sync"] = awaited_of(name) or (_WAITS[wait] if wait is not None else "context")
            if returned:
                attributes["returned"] = returned
            return kind.value, name, json.dumps(attributes) if attributes else None

        descriptions = {key: describe(key) for key in examples}
        kinds, names, attributes = zip(*map(descriptions.__getitem__, keys), strict=True)
        threads = {number: find_thread(number) for number in set(own["thread_id"].tolist())}
        columns = {
            "kind": kinds,
            "name": names,
            "start_ns": own["start"].tolist(),
            "dur_ns": np.maximum(own["end"] - own["start"], 0).tolist(),
            "thread": [threads[number] for number in own["thread_id"].tolist()],
            "correlation_id": [number or None for number in own["correlation_id"].tolist()],
            "attributes": attributes,
        }
        yield from spans_of(columns, level=Level.RUNTIME, collector=COLLECTOR)
    for wait in waits_by_id.values():  # waits whose call was not recorded
        subject = _WAITS[wait.type]
        yield _span(Kind.SYNC, f"synchronize {subject}", wait, {"sync": subject, "context": wait.context_id})


def _without_inner(api_calls: Table) -> tuple[Table, Integers]:
    """Return the calls that are in no other one, and the number of the driver's call in each, or UNKNOWN."""
    identities = (api_calls["process_id"] << 32) | api_calls["correlation_id"]
    is_driver = api_calls.kind == Activity.DRIVER
    is_inner = np.zeros(len(api_calls), np.bool_)
    is_runtime = ~is_driver & (api_calls["correlation_id"] != 0)
    is_inner[is_driver] = np.isin(identities[is_driver], identities[is_runtime])
    if not is_inner.any():
        return api_calls, np.full(len(api_calls), UNKNOWN)
    inner_numbers = dict(zip(identities[is_inner].tolist(), api_calls["cbid"][is_inner].tolist(), strict=True))
    own_identities = identities[~is_inner].tolist()
    numbers = [inner_numbers.get(identity, UNKNOWN) for identity in own_identities]
    return api_calls.where(~is_inner), np.array(numbers, np.int64)


def _wait_types(own: Table, waits_by_id: dict[int, Wait]) -> Integers:
    """Return CUPTI's number of the wait of each call, or UNKNOWN; and remove these waits from `waits_by_id`."""
    types = np.full(len(own), UNKNOWN)
    if waits_by_id:
        numbers = own["correlation_id"]
        for position in np.flatnonzero(np.isin(numbers, list(waits_by_id))).tolist():
            wait = waits_by_id.pop(int(numbers[position]), None)
            if wait is not None:
                types[position] = wait.type
    return types


def overhead(record: Overhead, find_thread: ThreadLookup) -> Span:
    """Return the span of the profiler's or the driver's own work, with its thread if it has one."""
    name = _OVERHEADS.get(record.overhead_kind, f"overhead of kind {record.overhead_kind}")
    return _span(Kind.OVERHEAD, name, record, {}, find_thread(thread_of(record)))


def _span(
    kind: Kind,
    name: str,
    record: Wait | Overhead,
    attributes: dict[str, Any],
    thread: int | None = None,
) -> Span:
    return Span(
        level=Level.RUNTIME,
        kind=kind.value,
        name=name,
        start_ns=record.start,
        dur_ns=max(record.end - record.start, 0),
        thread=thread,
        collector=COLLECTOR,
        attributes=json.dumps(attributes) if attributes else None,
    )
