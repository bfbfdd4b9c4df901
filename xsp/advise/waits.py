"""What makes the host wait for a device: values that are read, sizes of masks, copies, and calls of synchronize().

A call of the runtime that waits belongs to the operator that made it. What made no operator was asked for by the
program itself, in a hook, a timer or a loop.
"""

from __future__ import annotations

from typing import NamedTuple

from xsp.advise.advice import MOST_SPANS, Place
from xsp.advise.loops import READS
from xsp.analyses.answers import Answers
from xsp.device.kernelnames import TO_DEVICE, TO_HOST
from xsp.schema import Kind, Level
from xsp.store.devicework import prepare
from xsp.table import literal

SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave")
"""Operators whose results have a size that depends on values, so that the host waits to know it."""

MOST_PLACES = 3


class Wait(NamedTuple):
    """The calls of one cause that make the host wait, in all recorded iterations."""

    cause: str
    calls: int
    ms: float
    """Milliseconds that the host is in these calls."""

    places: tuple[Place, ...]


WORDS = {
    "values": ("single values are read ({count} times, {places})",
        "read them together and once: .tolist() of a stacked tensor, every N steps; keep decisions on the device "
        "(torch.where)"),
    "sizes": ("results have a size that depends on values, which the host waits for (x[mask], nonzero: {count} times, "
        "{places})",
        "keep the size: torch.where(mask, x, 0), x * mask, or a fixed number of elements (topk)"),
    "results": ("results are copied to the host ({count} times, {places})",
        "keep them on the device, and copy what is needed once, at the end, into pinned memory with non_blocking=True"),
    "inputs": ("inputs are copied to the device and waited for ({count} times, {places})",
        "pin_memory=True in the loader and .to(device, non_blocking=True): the host does not wait"),
    "synchronize": ("the program calls synchronize() ({count} times, {places})",
        "remove torch.cuda.synchronize() from hooks, timers and loops; time with events, and wait once at the end"),
}  # fmt: skip
"""Cause → what is observed, and what helps."""


def of(answers: Answers) -> list[Wait]:
    """Return what makes the host wait, the longest first."""
    trace = answers.trace
    prepare(trace)
    reads, sized = (", ".join(literal(name) for name in names) for names in (READS, [f"aten::{op}" for op in SIZED]))
    rows = trace.con.execute(
        f"""
        WITH copies AS (
            SELECT rank, trace_id, op_id, any_value(name) AS copy_name FROM device_work WHERE kind = '{Kind.COPY}'
            GROUP BY ALL
        ), waits AS (
            SELECT CASE WHEN op.kind IS DISTINCT FROM '{Kind.OP}' AND call.kind = '{Kind.SYNC}' THEN 'synchronize'
                        WHEN op.name IN ({reads}) THEN 'values' WHEN op.name IN ({sized}) THEN 'sizes'
                        WHEN regexp_matches(copy_name, {literal(TO_HOST)}) THEN 'results'
                        WHEN regexp_matches(copy_name, {literal(TO_DEVICE)}) THEN 'inputs' END AS cause,
                   layer.name AS layer, CASE WHEN op.kind = '{Kind.OP}' THEN op.name ELSE call.name END AS name,
                   call.span_id, call.dur_ns,
                   CASE WHEN op.kind = '{Kind.OP}' THEN op.span_id ELSE call.span_id END AS occasion
            FROM spans call
            LEFT JOIN spans op ON op.rank = call.rank AND op.trace_id = call.trace_id AND op.span_id = call.parent_id
            LEFT JOIN spans layer
                ON layer.rank = call.rank AND layer.trace_id = call.trace_id AND layer.span_id = call.layer_id
            LEFT JOIN copies ON copies.rank = call.rank AND copies.trace_id = call.trace_id
                AND copies.op_id = op.span_id
            WHERE call.level = {int(Level.RUNTIME)} AND (call.kind = '{Kind.SYNC}'
                OR (call.kind = '{Kind.LAUNCH}' AND regexp_matches(call.name, '(?i)memcpy')))
        )
        SELECT cause, layer, name, count(DISTINCT occasion), sum(dur_ns) / 1e6 AS ms, list(span_id)[:{MOST_SPANS}]
        FROM waits WHERE cause IS NOT NULL GROUP BY ALL ORDER BY ms DESC, layer, name
        """
    ).fetchall()
    found: dict[str, list[tuple[str | None, str, int, float, list[str]]]] = {}
    for cause, *row in rows:
        found.setdefault(cause, []).append(tuple(row))
    waits = [
        Wait(
            cause, sum(row[2] for row in group), sum(row[3] for row in group),
            tuple(Place(layer, name, tuple(spans), count) for layer, name, count, _, spans in group[:MOST_PLACES]),
        )
        for cause, group in found.items()
    ]  # fmt: skip
    return sorted(waits, key=lambda wait: -wait.ms)


def words(wait: Wait, iterations: int) -> tuple[str, str]:
    """Return what is observed of a wait, and what helps."""
    observation, do = WORDS[wait.cause]
    names = dict.fromkeys(place.module or place.op or "" for place in wait.places)
    count = f"{wait.calls / iterations:.3g}"
    return observation.format(count=count, places="in " + ", ".join(filter(None, names))), do
