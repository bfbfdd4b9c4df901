"""The content of `run.json`, for a run and for a run in parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from xsp import clock, rundir, scrub
from xsp.device import machine as device
from xsp.identity import Identity
from xsp.levels import rung_name
from xsp.record import budget
from xsp.record.compilations import compilations
from xsp.record.sequences import NO_STEP
from xsp.record.steps import Steps
from xsp.run import Run, StepKind
from xsp.version import __version__

_COMMON = (
    "xsp",
    "created",
    "command",
    "warmup",
    "settle",
    "seed",
    "kinds",
    "clock",
    "collectors",
    "absent",
    "kernels",
    "costs",
    "machine",
)
"""Entries that are the same in all parts of a run that was made once per level."""


def of_steps(
    steps: Steps, levels: str, identity: Identity, started_ns: int, finished: bool, costs: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of `run.json` for the run so far.

    Args:
        steps: the steps of its block.
        levels: the levels as the user wrote them.
        identity: the run's place in its job and its trace.
        started_ns: start of the run, in nanoseconds since the epoch.
        finished: whether the block was left.
        costs: the cost of one span of each collector, see `Collecting.close`; empty until then.
    """
    anchor, schedule, collecting = steps.clock.anchor(), steps.schedule, steps.collecting
    now_ns = clock.monotonic_ns() + anchor.offset_ns
    return {
        "xsp": __version__,
        "id": identity.id,
        "name": steps.name,
        "finished": finished,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_ns // 10**9)),
        "seconds": round((now_ns - started_ns) / 1e9, 3),
        "start_ns": started_ns,
        "end_ns": now_ns,
        "otel": identity.otel,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "process": identity.process,
        "host": identity.host,
        "command": scrub.command(sys.argv),
        "levels": levels,
        "rungs": [rung_name(rung) for rung in schedule.rungs],
        "warmup": schedule.warmup,
        "settle": schedule.settle,
        "seed": schedule.seed,
        "batch_size": steps.batch_size,
        "kinds": steps.kinds.content(),
        "budget": budget.content(schedule, steps.account),
        "between": steps.between.content(),
        "lines": steps.between.content_of_steps(),
        "compilations": compilations(started_ns) if finished else [],
        "clock": {"durations": "perf_counter_ns", "epoch_error_ns": anchor.error_ns},
        "steps": {
            "seen": steps.step_count,
            "stored": steps.stored,
            "lost": steps.lost,
            "skipped": steps.skipped,
            "found": all(note["text"] != NO_STEP for note in collecting.notes),
        },
        "collectors": collecting.names,
        "absent": collecting.absent,
        "kernels": collecting.device_work.content(),
        "costs": costs,
        "notes": [*collecting.notes, *_clock_notes(anchor)],
        "machine": device.describe(),
    }


def _clock_notes(anchor: clock.Anchor) -> list[dict[str, str]]:
    if not anchor.set_ns:
        return []
    change = f"{anchor.set_ns / 1e9:+.1f} s"
    return [
        {
            "source": "xsp",
            "text": f"the system clock was set by {change} during the run; "
            "the run's times continue from the first reading",
        }
    ]


def of_parts(parts: Sequence[Run]) -> dict[str, Any]:
    """Return the content for a run in parts: their common entries and the sums of their counts; empty without parts."""
    if not parts:
        return {}
    steps = [part.steps for part in parts if part.steps is not None]
    totals = {name: sum(counts.get(name) or 0 for counts in steps) for name in ("seen", "stored", "lost", "skipped")}
    notes = rundir.unique(dict(note) for part in parts for note in part.notes)
    common = {name: parts[-1][name] for name in _COMMON if name in parts[-1]}
    if "kinds" in common:
        common["kinds"] = [{**kind, "steps": _steps_of(kind, parts)} for kind in parts[-1].kinds]
    return {**common, "steps": {**totals, "found": all(counts.found for counts in steps)}, "notes": notes}


def _steps_of(kind: StepKind, parts: Sequence[Run]) -> int | None:
    """Return the number of steps of a kind in all parts; None if it is unknown for a part."""
    counts = [
        candidate.steps
        for part in parts
        for candidate in part.kinds
        if (candidate.kind, candidate.name) == (kind.kind, kind.name)
    ]
    return sum(count or 0 for count in counts) if None not in counts else None
