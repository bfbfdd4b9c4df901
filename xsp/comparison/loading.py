"""Load the runs of both sides with figures of one kind of step, where a program has several."""

from __future__ import annotations

import os
from collections.abc import Sequence

from xsp.errors import UsageError
from xsp.ingest import load as runs
from xsp.store.trace import Trace

Path = str | os.PathLike[str]


def load(
    a: Sequence[Path], b: Sequence[Path], kind: int | str | None = None, skip_damaged: bool = False
) -> tuple[list[Trace], list[Trace]]:
    """Load the runs of both sides.

    Args:
        a: what `xsp.load` takes, at least one.
        b: likewise.
        kind: of step, as `xsp.load` takes it; else that of the first run, in all that ran steps of it.
        skip_damaged: as `xsp.load` takes it.

    Raises:
        As `xsp.load`.
    """
    of_a: list[Trace] = []
    of_b: list[Trace] = []
    for path in a:
        of_a.append(load_like(of_a[0] if of_a else None, path, kind, skip_damaged))
    for path in b:
        of_b.append(load_like((of_b or of_a)[0], path, kind, skip_damaged))
    return of_a, of_b


def load_like(other: Trace | None, path: Path, kind: int | str | None = None, skip_damaged: bool = False) -> Trace:
    """Load a run with figures of the kind of step that those of another one are of, if it ran any.

    Which kind takes most of the time may differ from run to run where two take about as much, as in a GAN.
    """
    trace = runs.load(path, kind=kind, skip_damaged=skip_damaged)
    if other is None or kind is not None or kind_name(other) in (None, kind_name(trace)):
        return trace
    wanted = [each["kind"] for each in trace.run.get("kinds") or () if each.get("name") == kind_name(other)]
    if not wanted:
        return trace
    try:
        return runs.load(path, kind=wanted[0], skip_damaged=skip_damaged)
    except UsageError:  # it ran such steps and recorded none
        return trace


def kind_name(trace: Trace) -> str | None:
    """Return the name of the kind of step that a trace's figures are of; None where nothing tells kinds."""
    kinds = {each.get("kind"): each.get("name") for each in trace.run.get("kinds") or ()}
    found = kinds.get(trace.kind)
    return None if found is None else str(found)
