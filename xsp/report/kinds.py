"""The kinds of steps of a run on the page: the heaviest are shown, the rest are listed with how to see them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from xsp.report.loop import kind_of, weights
from xsp.trace import Trace

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
    known = {each.get("kind"): each for each in trace.run.get("kinds") or ()}
    if len(known) < 2:
        return {"shown": [], "others": []}
    shares = weights(trace)
    here = [kind_of(each) for each in shown]
    run = shlex.quote(trace.path.name) if trace.path else "RUN"

    def said(kind: int | None) -> dict[str, Any]:
        one = known.get(kind, {})
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


def heaviest(trace: Trace, most: int = MOST) -> list[int]:
    """Return the kinds of a run that take most of its loop's time, without the one that a trace is of."""
    known = {each.get("kind") for each in trace.run.get("kinds") or ()}
    return [kind for kind in weights(trace) if kind in known and kind != kind_of(trace)][: most - 1]
