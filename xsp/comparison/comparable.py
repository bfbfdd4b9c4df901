"""What differs between two runs beside their times: to be read before any figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xsp.comparison.loading import kind_name
from xsp.errors import AnalysisError
from xsp.levels import rung_name
from xsp.schema import Kind, Level
from xsp.store.trace import Trace


class Difference(NamedTuple):
    """Something that the two runs do not have in common."""

    subject: str
    a: str
    b: str


def differences(a: Sequence[Trace], b: Sequence[Trace]) -> list[Difference]:
    """Return in what the runs of two sides differ: work, depth of profiling, machine, versions.

    Raises:
        AnalysisError: one of them holds no step.
    """
    for trace in (*a, *b):
        if not trace.con.execute("SELECT 1 FROM merged LIMIT 1").fetchall():
            raise AnalysisError(f"{trace.name!r} holds no step, so there is nothing to compare")
    one, other = _of_side(a), _of_side(b)
    subjects = [*one, *(subject for subject in other if subject not in one)]
    unknown = [_text(None)]
    return [
        Difference(subject, " | ".join(one.get(subject, unknown)), " | ".join(other.get(subject, unknown)))
        for subject in subjects
        if set(one.get(subject, unknown)) != set(other.get(subject, unknown))
    ]


def same_work(runs: Sequence[Trace]) -> bool:
    """Return whether the steps of all runs are of one kind: all train, or all only predict."""
    return len({tuple(_phases(run)) for run in runs}) == 1


def _of_side(runs: Sequence[Trace]) -> dict[str, list[str]]:
    """Return what is known of the runs of a side: of each subject the different texts, in the order of the runs."""
    of_runs = [dict(_facts(run)) for run in runs]
    subjects = dict.fromkeys(subject for facts in of_runs for subject in facts)
    return {subject: list(dict.fromkeys(_text(facts.get(subject)) for facts in of_runs)) for subject in subjects}


def _phases(trace: Trace) -> list[str]:
    kinds = f"'{Kind.BACKWARD}', '{Kind.OPTIMIZER}'"
    rows = trace.con.execute(f"SELECT DISTINCT kind FROM merged WHERE kind IN ({kinds}) ORDER BY kind").fetchall()
    return [str(kind) for (kind,) in rows]


def _facts(trace: Trace) -> Iterator[tuple[str, Any]]:
    run, machine = trace.run, trace.run.get("machine", {})
    work = trace.con.execute(
        f"SELECT max(batch_size), min(input_shapes) FILTER (kind = '{Kind.FORWARD}'), "
        f"min(dtype) FILTER (kind = '{Kind.FORWARD}') FROM merged"
    ).fetchall()[0]
    yield "a step does", ["forward", *_phases(trace)]
    yield "kind of step", kind_name(trace)
    yield "batch size", run.get("batch_size") or work[0]
    yield "input shapes", work[1]
    yield "element type", work[2]
    yield "ranks", run.get("world_size")
    yield "levels seen", [level.name.lower() for level in Level if trace.has(level)]
    yield "steps timed at", [rung_name(rung.level) for rung in trace.rungs]
    yield "timed steps", {rung_name(rung.level): rung.steps for rung in trace.rungs}
    yield "finished", run.get("finished")
    yield "collectors", run.get("collectors")
    for name in ("cpu", "cores", "memory_bytes", "devices", "system", "kernel", "python", "torch_threads"):
        yield name.replace("_", " "), machine.get(name)
    for name, version in sorted((machine.get("packages") or {}).items()):
        yield name, version
    yield "xsp", run.get("xsp")


def _text(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {each}" for name, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
