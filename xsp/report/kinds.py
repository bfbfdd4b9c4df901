"""The kinds of steps of a run on the page: the heaviest are shown, the rest are listed with how to see them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from typing import Any

from xsp.analyses.loop import kinds_of
from xsp.errors import UsageError
from xsp.ingest import load as runs
from xsp.report.loop import weights
from xsp.store.trace import Trace

MOST = 4
"""Kinds whose figures stand on one page."""


def listed(trace: Trace, shown: Sequence[Trace]) -> dict[str, Any]:
    """Return the kinds of a run for the page.

    Args:
        trace: whose run it is.
        shown: traces of kinds that stand on the page, in the order of their data.

    Returns:
        `shown`: name, steps and share of the loop's time of each; `others`: the same, with the command that writes a
        page of it. Both are empty where the run has only one kind.
    """
    known = kinds_of(trace, trace.rank)
    if len(known) < 2:
        return {"shown": [], "others": []}
    shares = weights(trace)
    here = [each.kind for each in shown]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"

    def said(kind: int | None) -> dict[str, Any]:
        one = known.get(kind, {}) if kind is not None else {}
        share = shares.get(kind) if kind is not None else None
        return {
            "name": str(one.get("name", f"kind {kind}")),
            "steps": one.get("steps"),
            "percent": None if share is None else 100 * share,
        }

    rest = sorted((kind for kind in known if kind not in here), key=lambda kind: (-shares.get(kind, 0), kind))
    return {
        "shown": [said(kind) for kind in here],
        "others": [{**said(kind), "command": f"xsp report {run} --kind {kind}"} for kind in rest],
    }


def load(path: str | os.PathLike[str], kind: int | str | None = None, *, skip_damaged: bool = False) -> list[Trace]:
    """Load a run as traces of its kinds of steps: the one that is asked for, then the others that take most time.

    Args:
        path, kind, skip_damaged: as of `xsp.load`.

    Returns:
        At most `MOST`; one, where the run has one kind or tells none. A kind of which no step was recorded is left out.

    Raises:
        As `xsp.load`.
    """
    first = runs.load(path, skip_damaged=skip_damaged, kind=kind)
    loaded = [first]
    known = kinds_of(first, first.rank)
    for number in weights(first):
        if len(loaded) == MOST:
            break
        if number in known and number != first.kind:
            with contextlib.suppress(UsageError):
                loaded.append(runs.load(path, skip_damaged=skip_damaged, kind=number))
    return loaded
