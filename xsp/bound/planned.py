"""The graph of a bound, and the trace with which it is compared: the planned and the recorded calls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.errors import GraphError, ModelError, UsageError
from xsp.graph import sources as graphs
from xsp.graph import spans
from xsp.graph.node import Graph

if TYPE_CHECKING:
    from xsp.store.trace import Trace


_OPTIONS = (("sequence", "--sequence"), ("shape", "--input"), ("prefill", "--prefill"), ("decode", "--decode"))
"""Settings of a model, and the options of `xsp profile` that set them."""


def of(what: Any, args: Any, trace: Any, of_model: Mapping[str, Any]) -> tuple[Graph, Trace | None]:
    """Return the graph, and the trace to compare with it: the given trace, or the trace from which the graph is made.

    Args:
        what: the model, graph or trace as in `xsp.bound.of`.
        args: arguments of a module.
        trace: a loaded trace, or its path; None without one.
        of_model: settings of `xsp.graph.of`.
    """
    given = _trace(trace)
    if isinstance(what, (str, Path)) and graphs.is_trace(what):
        what = _trace(what)
    if hasattr(what, "con") and hasattr(what, "rungs"):
        graphs.check(what, of_model)
        return _planned(what), what
    return graphs.of(what, *args, **of_model), given


def _trace(place: Any) -> Any:
    if place is None or not isinstance(place, (str, Path)):
        return place
    from xsp.ingest.load import load

    return load(place)


def _planned(trace: Trace) -> Graph:
    """Return the graph of the model that a run names, which is more complete than its calls; else that of its calls."""
    named = _model_of(trace)
    if named is not None:
        spec, settings = named
        with contextlib.suppress(GraphError, ModelError, UsageError):
            return graphs.of(spec, **settings)
    return spans.of(trace)


def _model_of(trace: Trace) -> tuple[str, dict[str, Any]] | None:
    """Return the model that `xsp profile` ran, with its settings; None if the command of the run does not have it."""
    command = [str(each) for each in trace.run.get("command") or ()]
    spec = next((each for each in command[2:] if re.match(r"(torchvision|timm|transformers|micro):\w", each)), None)
    if command[:2] != ["xsp", "profile"] or spec is None:
        return None
    settings: dict[str, Any] = {"train": "--train" in command, "batch": trace.run.batch_size or 1}
    for name, option in _OPTIONS:
        value = _option(command, option)
        if value == "***":
            return None
        if value is not None and name != "shape":
            settings[name] = int(value) if value.isdecimal() else 128
        elif value is not None:
            settings[name] = tuple(int(size) for size in re.findall(r"\d+", value))
    return spec, settings


def _option(command: Sequence[str], name: str) -> str | None:
    for place, each in enumerate(command):
        if each == name and place + 1 < len(command):
            return command[place + 1]
        if each.startswith(f"{name}="):
            return each.partition("=")[2]
    return None
