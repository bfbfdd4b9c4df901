"""Which graph a bound is of, and which trace it is held against: what was planned and what was seen."""

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
"""Settings of a model, and the options of `xsp profile` that say them."""


def of(what: Any, args: Any, trace: Any, of_model: Mapping[str, Any]) -> tuple[Graph, Trace | None]:
    """Return the graph, and the trace to hold against it: that which was named, or that which the graph is of.

    Args:
        what: as `xsp.bound.of` takes it.
        args: arguments of a module.
        trace: loaded, or where it lies.
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
    """Return the graph of the model that a run names, as its own calls tell less; else that of its calls."""
    named = _model_of(trace)
    if named is not None:
        spec, settings = named
        with contextlib.suppress(GraphError, ModelError, UsageError):
            return graphs.of(spec, **settings)
    return spans.of(trace)


def _model_of(trace: Trace) -> tuple[str, dict[str, Any]] | None:
    """Return the model that `xsp profile` ran, with its settings, where the run says so."""
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
