"""Passes without gradients through a model that the same training step also trains, as for a metric on its batch."""

from __future__ import annotations

from collections.abc import Sequence

from xsp.run import StepKind
from xsp.schema import Kind
from xsp.store.trace import Trace

WITHOUT_GRADIENTS = " without gradients"
"""Ending of the name of a model in such a pass."""


def without_gradients(kind: StepKind) -> frozenset[int]:
    """Return the places of these passes among the outermost calls of a step of a kind.

    A pass is one of these if the step also calls the same module in training mode, with gradients on and with an input
    of the same shape. A model that is never trained in the step, such as a teacher, has none.
    """
    calls = _calls(kind)
    trained = {(call.get("module"), str(call.get("shape"))) for call in calls if call.get("trains")}
    return frozenset(
        place
        for place, call in enumerate(calls)
        if call.get("trains") is False and (call.get("module"), str(call.get("shape"))) in trained
    )


def _calls(kind: StepKind) -> list[dict[str, object]]:
    return [dict(call) for call in kind.calls if call.get("what") == str(Kind.FORWARD)]


def names(trace: Trace, rank: int, rows: Sequence[tuple[str, int | None]]) -> list[str]:
    """Return the names of outermost calls, of those passes with `WITHOUT_GRADIENTS`.

    Args:
        trace: the trace.
        rank: the rank.
        rows: name and step of each call, in order.
    """
    run = trace.run.of_rank(rank)
    known = {tuple(call.get("type") for call in _calls(kind)): without_gradients(kind) for kind in run.kinds}
    by_step: dict[int | None, list[int]] = {}
    for place, (_, step) in enumerate(rows):
        by_step.setdefault(step, []).append(place)
    found = [name for name, _ in rows]
    for places in by_step.values():
        for number in known.get(tuple(found[place] for place in places), ()):
            found[places[number]] += WITHOUT_GRADIENTS
    return found
