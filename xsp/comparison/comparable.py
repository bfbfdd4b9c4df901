"""Differences between two runs other than their times, to be read before any figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xsp.errors import AnalysisError, UsageError
from xsp.ingest import load as runs
from xsp.ingest.ranks import Subject
from xsp.levels import depth
from xsp.schema import Kind, Level
from xsp.store.iterations import iterations
from xsp.store.trace import Trace


class SettingDifference(NamedTuple):
    """Something that the two runs do not have in common."""

    subject: str
    a: str
    b: str


def differences(a: Sequence[Trace], b: Sequence[Trace]) -> list[SettingDifference]:
    """Return the differences between the runs of two sides: work, depth of profiling, machine, versions.

    Raises:
        AnalysisError: a run holds no step.
    """
    for trace in (*a, *b):
        if not trace.con.execute("SELECT 1 FROM merged LIMIT 1").fetchall():
            raise AnalysisError(f"{trace.name!r} holds no step, so there is nothing to compare")
    facts_a, facts_b = _side_facts(a), _side_facts(b)
    subjects = [*facts_a, *(subject for subject in facts_b if subject not in facts_a)]
    unknown = [_text(None)]
    changes = [
        SettingDifference(subject, " | ".join(facts_a.get(subject, unknown)), " | ".join(facts_b.get(subject, unknown)))
        for subject in subjects
        if set(facts_a.get(subject, unknown)) != set(facts_b.get(subject, unknown))
    ]
    return [*changes, *_page_faults(a, b)]


MIN_FAULTS = 1000
"""Number of page faults in a step above which they may take a noticeable part of its time."""

MIN_FAULT_RATIO = 2.0
"""Minimum ratio of page faults between every run of one side and every run of the other to count as a difference."""


def _page_faults(a: Sequence[Trace], b: Sequence[Trace]) -> Iterator[SettingDifference]:
    """Yield the page faults of a step if one side has far more in each run: newly mapped memory takes time."""
    sides = [[faults for faults in map(_step_faults, side) if faults is not None] for side in (a, b)]
    if not all(sides):
        return
    low, high = sorted(sides, key=max)
    if min(high) >= max(MIN_FAULTS, MIN_FAULT_RATIO * max(low)):
        text_a, text_b = (" | ".join(dict.fromkeys(f"{faults:,.0f}" for faults in side)) for side in sides)
        yield SettingDifference("page faults", f"{text_a} in a step", text_b)


def _step_faults(trace: Trace) -> float | None:
    return next((row.faults for row in iterations(trace) if (row.rank, row.kind) == (trace.rank, trace.kind)), None)


def have_same_work(runs: Sequence[Trace]) -> bool:
    """Return whether the steps of all runs do the same work: all train, or all only predict."""
    return len({tuple(_phases(run)) for run in runs}) == 1


def _side_facts(runs: Sequence[Trace]) -> dict[str, list[str]]:
    """Return the facts of the runs of a side: for each subject, its distinct texts in the order of the runs."""
    facts_by_run = [dict(_facts(run)) for run in runs]
    subjects = dict.fromkeys(subject for facts in facts_by_run for subject in facts)
    return {subject: list(dict.fromkeys(_text(facts.get(subject)) for facts in facts_by_run)) for subject in subjects}


def _phases(trace: Trace) -> list[str]:
    kinds = f"'{Kind.BACKWARD}', '{Kind.OPTIMIZER}'"
    rows = trace.con.execute(f"SELECT DISTINCT kind FROM merged WHERE kind IN ({kinds}) ORDER BY kind").fetchall()
    return [str(kind) for (kind,) in rows]


def _facts(trace: Trace) -> Iterator[tuple[str, Any]]:
    run, machine = trace.run, trace.run.machine
    work = trace.con.execute(
        f"SELECT max(batch_size), min(input_shapes) FILTER (kind = '{Kind.FORWARD}'), "
        f"min(dtype) FILTER (kind = '{Kind.FORWARD}') FROM merged"
    ).fetchall()[0]
    yield "a step does", ["forward", *_phases(trace)]
    yield "kind of step", kind_name(trace)
    yield "batch size", run.batch_size or work[0]
    yield "input shapes", work[1]
    yield "element type", work[2]
    yield "ranks", run.world_size
    yield "levels seen", [level.name.lower() for level in Level if trace.has(level)]
    recorded = [rung for rung in trace.rungs if rung.level > Level.APPLICATION]
    yield "recorded in steps", [depth(rung.level) for rung in recorded]
    yield "unrecorded steps", sum(rung.steps for rung in trace.rungs if rung not in recorded)
    yield "timed steps", sum(rung.steps for rung in recorded)
    yield "finished", run.finished
    yield "collectors", run.collectors if "collectors" in run else None
    yield "cpu", machine.cpu
    yield "cores", machine.cores
    yield "memory bytes", machine.memory_bytes
    yield "devices", machine.devices if "devices" in machine else None
    yield "system", machine.system
    yield "kernel", machine.kernel
    yield "python", machine.python
    yield "torch threads", machine.torch_threads
    yield from sorted(machine.packages.items())
    yield "xsp", run.xsp


def _text(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {element}" for name, element in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


# --- loading -----------------------------------------------------------------------------------------------------
# Loading of the runs of both sides with figures of the same kind of step, if a program has several.


def load(
    a: Sequence[Subject], b: Sequence[Subject], kind: int | str | None = None, skip_damaged: bool = False
) -> tuple[list[Trace], list[Trace]]:
    """Load the runs of both sides.

    Args:
        a: arguments for `xsp.load`, at least one.
        b: likewise.
        kind: kind of step, as in `xsp.load`; by default that of the first run, in all runs with such steps.
        skip_damaged: as in `xsp.load`.

    Raises:
        As `xsp.load`.
    """
    traces_a: list[Trace] = []
    traces_b: list[Trace] = []
    for path in a:
        traces_a.append(load_like(traces_a[0] if traces_a else None, path, kind, skip_damaged))
    for path in b:
        traces_b.append(load_like((traces_b or traces_a)[0], path, kind, skip_damaged))
    return traces_a, traces_b


def load_like(
    reference: Trace | None, path: Subject, kind: int | str | None = None, skip_damaged: bool = False
) -> Trace:
    """Load a run with figures of the same kind of step as another run's, if it has such steps.

    The kind with the most time, which is the default, may differ between runs if two take about the same, as in a GAN.
    """
    trace = runs.load(path, kind=kind, skip_damaged=skip_damaged)
    if reference is None or kind is not None or kind_name(reference) in (None, kind_name(trace)):
        return trace
    numbers = [step_kind.kind for step_kind in trace.run.kinds if step_kind.name == kind_name(reference)]
    if not numbers:
        return trace
    try:
        return runs.load(path, kind=numbers[0], skip_damaged=skip_damaged)
    except UsageError:  # the run has such steps, but recorded none of them
        return trace


def kind_name(trace: Trace) -> str | None:
    """Return the name of the kind of step that a trace's figures are of; None if the trace has no kinds."""
    number = trace.kind
    return next((step_kind.name for step_kind in trace.run.kinds if step_kind.kind == number), None)
