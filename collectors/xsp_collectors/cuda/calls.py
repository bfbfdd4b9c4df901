"""Calls of CUDA's runtime and driver, their waits, and CUPTI's own work, as spans (RUNTIME)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xsp.callnames import awaited_of, kind_of
from xsp.schema import Kind, Level, Span, spans_of
from xsp_collectors.cuda.activities import COLLECTOR, Activity, ApiCall, Overhead, Wait, thread_of

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
    api_calls: Sequence[tuple[Activity, ApiCall]],
    waits: Iterable[Wait],
    find_name: NameLookup,
    find_thread: ThreadLookup,
) -> Iterator[Span]:
    """Yield a span for each call that the program made.

    A driver call inside a runtime call has the same correlation id: it is the same launch, and is put into the
    attributes of the runtime call. Driver calls outside of any (Triton's, NCCL's) are launches of their own.
    """
    driver = Activity.DRIVER
    identities = [(call.process_id, call.correlation_id) for _, call in api_calls]
    runtime_ids = {
        identity
        for identity, (kind, _) in zip(identities, api_calls, strict=True)
        if kind is not driver and identity[1]
    }
    driver_calls = {
        identity: call.cbid
        for identity, (kind, call) in zip(identities, api_calls, strict=True)
        if kind is driver and identity in runtime_ids
    }
    waits_by_id = {wait.correlation_id: wait for wait in waits if wait.type in _WAITS}
    own = [
        (kind, call, driver_calls.get(identity))
        for identity, (kind, call) in zip(identities, api_calls, strict=True)
        if kind is not driver or identity not in driver_calls
    ]
    descriptions: dict[tuple[Any, ...], Description] = {}

    def describe(kind: Activity, call: ApiCall, driver_number: int | None) -> Description:
        wait = waits_by_id.pop(call.correlation_id, None) if waits_by_id else None
        key = (kind, call.cbid, driver_number, wait and wait.type, call.return_value)
        if key not in descriptions:
            driver_name = None if driver_number is None else plain_name(find_name(driver, driver_number))
            descriptions[key] = _describe(plain_name(find_name(kind, call.cbid)), driver_name, *key[3:])
        return descriptions[key]

    if own:
        kinds, names, attributes = zip(*(describe(*each) for each in own), strict=True)
        columns = {
            "kind": kinds,
            "name": names,
            "start_ns": [call.start for _, call, _ in own],
            "dur_ns": [max(call.end - call.start, 0) for _, call, _ in own],
            "thread": [find_thread(call.thread_id) for _, call, _ in own],
            "correlation_id": [call.correlation_id or None for _, call, _ in own],
            "attributes": attributes,
        }
        yield from spans_of(columns, level=Level.RUNTIME, collector=COLLECTOR)
    for wait in waits_by_id.values():  # waits whose call was not recorded
        subject = _WAITS[wait.type]
        yield _span(Kind.SYNC, f"synchronize {subject}", wait, {"sync": subject, "context": wait.context_id})


def overhead(record: Overhead, find_thread: ThreadLookup) -> Span:
    """Return the span of the profiler's or the driver's own work, with its thread if it has one."""
    name = _OVERHEADS.get(record.overhead_kind, f"overhead of kind {record.overhead_kind}")
    return _span(Kind.OVERHEAD, name, record, {}, find_thread(thread_of(record)))


def _describe(name: str, driver: str | None, wait: int | None, returned: int) -> Description:
    """Return the description of a call; `driver` is the call in it, `wait` CUPTI's number of its wait."""
    kind = kind_of(name)
    attributes: dict[str, Any] = {"driver": driver} if driver is not None else {}
    if kind is Kind.SYNC or wait is not None:
        attributes["sync"] = awaited_of(name) or (_WAITS[wait] if wait is not None else "context")
    if returned:
        attributes["returned"] = returned
    return kind.value, name, json.dumps(attributes) if attributes else None


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
