"""The graph of a bound, and the trace with which it is compared: the planned and the recorded calls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.bound import join, recordedcalls
from xsp.bound.join import Join
from xsp.bound.recordedcalls import RecordedCall
from xsp.errors import GraphError, ModelError, UsageError
from xsp.graph import sources as graphs
from xsp.graph import spans
from xsp.graph.node import Graph, Source

if TYPE_CHECKING:
    from xsp.store.trace import Trace

MIN_PAIRED_SHARE = 0.5
"""Minimum share of computing nodes that must be found in a trace for it to be a trace of the graph."""

MAX_RESHAPED_SHARE = 0.1
"""Maximum share of calls with another shape in a run; low, as optimizer and weights have equal shapes in any batch."""

_OPTIONS = (("sequence", "--sequence"), ("shape", "--input"), ("prefill", "--prefill"), ("decode", "--decode"))
"""Settings of a model, and the options of `xsp profile` that set them."""


def of(source: Any, args: Any, trace: Any, model_options: Mapping[str, Any]) -> tuple[Graph, Trace | None]:
    """Return the graph, and the trace to compare with it: the given trace, or the trace from which the graph is made.

    Args:
        source: the model, graph or trace as in `xsp.bound.of`.
        args: arguments of a module.
        trace: a loaded trace, or its path; None without one.
        model_options: settings of `xsp.graph.of`.

    Raises:
        UsageError: both are traces.
    """
    if is_trace(source):
        paths = [Path(path) for path in (source, trace) if isinstance(path, (str, Path))]
        if trace is not None and trace is not source and (len(paths) < 2 or paths[0] != paths[1]):
            raise UsageError(
                f"{source if isinstance(source, (str, Path)) else source.name} is itself a run, and cannot be "
                "compared with another: omit --run, or name the model instead"
            )
        source = _trace(source)
        graphs.check(source, model_options)
        return _model_graph(source), source
    loaded_trace = _trace(trace)  # first, since a graph may take long
    return graphs.of(source, *args, **model_options), loaded_trace


def is_trace(source: Any) -> bool:
    """Return whether a source is a loaded trace, or the path of one."""
    if isinstance(source, (str, Path)):
        return graphs.is_trace(source)
    return hasattr(source, "con") and hasattr(source, "rungs")


def match_calls(
    graph: Graph, trace: Trace, is_only_source: bool, notes: list[str]
) -> tuple[Graph, Sequence[RecordedCall], Join | None]:
    """Return a graph with the calls of a trace, and their pairs; no pairs if the nodes are these calls, in order.

    Args:
        graph: the planned graph.
        trace: the trace to compare with.
        is_only_source: whether the trace is also the source: if the graph of its model does not match, because the
            software here is different, the graph of its calls is returned.
        notes: gets notes on the differences.

    Raises:
        GraphError: the trace is of another model, or of other shapes.
    """
    if graph.source is Source.SPANS:
        calls = recordedcalls.calls_of_nodes(trace)
        if [node.call.op for node in graph.nodes] == [call.op for call in calls]:  # else it was saved, from another run
            return graph, calls, None
    try:
        pairs = _match(graph, trace, notes)
    except GraphError as error:
        if not is_only_source:
            raise
        notes.append(f"graph: from the calls of the run, because that of its model does not match ({error})")
        return spans.of(trace), recordedcalls.calls_of_nodes(trace), None
    return graph, pairs.calls, pairs


def kind_notes(trace: Trace) -> list[str]:
    """Return a note if a run has several kinds of steps, since a bound is of one kind; else nothing."""
    kinds = trace.run.kinds
    if len(kinds) < 2:
        return []
    names = ", ".join(f"{kind.name} ({kind.steps})" for kind in kinds[:4])
    return [f"steps: {len(kinds)} kinds, {names}; this is only kind {trace.kind}"]


def _match(graph: Graph, trace: Trace, notes: list[str]) -> Join:
    """Return which calls of a graph are which of a trace's, and add notes on those that differ.

    Raises:
        GraphError: the trace is one of another model, or of other shapes.
    """
    pairs = join.of(graph, recordedcalls.of(trace, {node.call.op for node in graph.nodes}))
    if pairs.share(graph) < MIN_PAIRED_SHARE:
        computing = len(graph.computing)
        paired = computing - len(pairs.unmatched_nodes)
        if not recordedcalls.is_compiled(trace):  # the calls of a compiled run need not be found
            raise GraphError(
                f"{trace.name} is not a run of {graph.name}: {paired} of its {computing} calls are in the trace; "
                "give the model, batch and mode of the run, or only the run"
            )
        notes.append(f"calls: {paired} of {computing} found in the compiled run")
    different, comparable = pairs.shape_differences(graph)
    if different > MAX_RESHAPED_SHARE * comparable:
        raise GraphError(
            f"{trace.name} is a run of {graph.name} with other shapes: {different} of {comparable} calls have another "
            "first input; give the --batch, --input and --sequence of the run"
        )
    if different:
        notes.append(f"shapes: {different} of {comparable} calls had another first input in the run")
    return pairs


def _trace(source: Any) -> Any:
    if source is None or not isinstance(source, (str, Path)):
        return source
    from xsp.ingest.load import load

    return load(source)


def _model_graph(trace: Trace) -> Graph:
    """Return the graph of the model that a run names, which is more complete than its calls; else that of its calls."""
    model = _model_of(trace)
    if model is not None:
        spec, settings = model
        with contextlib.suppress(GraphError, ModelError, UsageError):
            return graphs.of(spec, **settings)
    return spans.of(trace)


def model_of(source: Any, model_options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and settings of a model that another process can build; None for other sources."""
    if not isinstance(source, str) or ":" not in source or is_trace(source):
        return None
    names = ("batch", "train", "seed", "shape", "sequence", "prefill", "decode")
    settings = {name: value for name in names if (value := model_options.get(name)) is not None}
    return source, {**settings, "batch": settings.get("batch", 1)}


def _model_of(trace: Trace) -> tuple[str, dict[str, Any]] | None:
    """Return the model that `xsp profile` ran, with its settings; None if the command of the run does not have it."""
    command = [str(word) for word in trace.run.get("command") or ()]
    spec = next((word for word in command[2:] if re.match(r"(torchvision|timm|transformers|micro):\w", word)), None)
    if command[:2] != ["xsp", "profile"] or spec is None:
        return None
    trains = any(len(word) > 2 and "--train".startswith(word) for word in command)
    settings: dict[str, Any] = {"train": trains, "batch": trace.run.batch_size or 1}
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
    """Return the value of an option, which the user may have abbreviated; None if it was not given."""
    for index, word in enumerate(command):
        typed, equals, value = word.partition("=")
        if len(typed) > 2 and typed.startswith("--") and name.startswith(typed):
            return value if equals else next(iter(command[index + 1 : index + 2]), None)
    return None
