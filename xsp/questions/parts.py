"""What questions ask of beside a trace: its graph, and its bound."""

from __future__ import annotations

from typing import Any

from xsp import bound as bounds
from xsp.advise import Asked, provides
from xsp.bound import planned

OF_MODEL = ("batch", "train", "shape", "sequence")
OF_BOUND = ("device", "like", "threads")


@provides("graph")
def graph(asked: Asked) -> Any:
    """Return the graph of the model that was run or named, else that of the trace's calls."""
    found, _ = planned.of(_what(asked), (), None, _given(asked, OF_MODEL))
    return found


@provides("bound")
def bound(asked: Asked) -> Any:
    """Return the bound of the graph, joined with the trace where there is one."""
    what = asked.graph
    return bounds.of(what, trace=asked.trace, timings=asked.part("timings"), **_given(asked, OF_BOUND))


def _what(asked: Asked) -> Any:
    return asked.trace if asked.trace is not None else asked.source


def _given(asked: Asked, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: asked.settings[name] for name in names if asked.settings.get(name) is not None}
