"""Layers in compiled code: its operators become children of the layers that they were compiled from.

A profiler shows the call of a compiled graph and, inside it, the kernels and operators that the generated code calls,
in execution order. `provenance` knows the layers of each call site. Together they give the calls of layers: a call
lasts from the first to the last of consecutive operators of one layer. In a backward pass an operator is assigned to
the layer whose call was observed in the forward pass of the same graph.

An operator that was fused from several layers belongs to the innermost layer that contains all of them. This is weaker
evidence (`xsp.schema.Rule.PROVENANCE`); its attributes name the layers and the nodes.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp.schema import Kind, Level, Rule, Span
from xsp_collectors.layercalls import LayerCalls, Path, common_prefix, new_span_id
from xsp_collectors.provenance import CompiledGraph, CompiledGraphs, Site

_CALL = re.compile(r"^## Call CompiledFxGraph (\S+) ##$")
_PREFIX = re.compile(r"^graph_\d+_(?=cpp_)")

SOURCES, LAYERS = "sources", "layers"
"""Attributes of an operator in compiled code: the nodes that it was made of, and their layers."""


class CompiledPlacement(NamedTuple):
    """Spans of a step, and sentences on compiled code without a known layer."""

    spans: list[Span]
    notes: list[str]


class _Run(NamedTuple):
    """A call of a graph in this step."""

    call: Span
    frame: Span | None
    """The enclosing autograd operator; both passes of a graph have its sequence number."""

    operators: list[Span]
    """The outermost operators of the call, in order."""

    graph: CompiledGraph | None

    @property
    def is_backward(self) -> bool:
        return self.frame is not None and (self.frame.forward_thread is not None or self.frame.phase == "backward")


class _Origin(NamedTuple):
    """The origin of an operator."""

    path: Path
    sources: tuple[str, ...]
    layers: tuple[str, ...]
    is_certain: bool
    """Whether all of its nodes are known to belong to one layer."""


def place(spans: Sequence[Span], graphs: CompiledGraphs) -> CompiledPlacement:
    """Make the operators of compiled graphs children of their layers, and add the calls of those layers.

    Args:
        spans: spans of one step, from the profiler.
        graphs: graphs that were compiled so far.
    """
    if not any(map(_CALL.match, {span.name for span in spans})):
        return CompiledPlacement(list(spans), [])
    placer = _Placer()
    runs = [run for thread in _operators_by_thread(spans) for run in _runs(thread, graphs)]
    for run in sorted(runs, key=lambda run: (run.is_backward, run.call.start_ns)):
        placer.add(run)
    updated_spans = [placer.changed_spans.get(id(span), span) for span in spans]
    return CompiledPlacement([*updated_spans, *placer.layers], placer.notes())


class _Placer:
    """The operators that were assigned to layers, and the calls of those layers."""

    def __init__(self) -> None:
        self.changed_spans: dict[int, Span] = {}
        self.layers: list[Span] = []
        self._forward: dict[tuple[int | None, int | None], dict[Path, list[Span]]] = {}
        self._unknown_graphs = 0
        self._unknown_operators: Counter[str] = Counter()

    def notes(self) -> list[str]:
        """Return sentences on operators without a layer."""
        notes = []
        if self._unknown_graphs:
            notes.append(
                f"{self._unknown_graphs} calls of compiled graphs in a step are of graphs that were not compiled while "
                "the profile was open, or that share a key: what they run belongs to the compiled module as a whole"
            )
        if self._unknown_operators:
            names = ", ".join(f"{name} ({count})" for name, count in self._unknown_operators.most_common(3))
            notes.append(
                f"{sum(self._unknown_operators.values())} operators of compiled graphs in a step name no layer, "
                f"{names} among them: they belong to the compiled module as a whole. Less is known about code from "
                "inductor's caches; with TORCHINDUCTOR_AUTOGRAD_CACHE=0 backward passes are traced again"
            )
        return notes

    def add(self, run: _Run) -> None:
        """Place the operators of one call."""
        if run.graph is None:
            self._unknown_graphs += 1
            return
        origins = _origins(run.operators, run.graph)
        site_names = {site.operator for site in run.graph.sites}
        unknown_names = (_plain_name(operator.name) for operator in run.operators if id(operator) not in origins)
        self._unknown_operators.update(name for name in unknown_names if name in site_names)
        if run.is_backward:
            self._place_backward(run, origins)
        else:
            self._place_forward(run, origins)

    def _place_forward(self, run: _Run, origins: dict[int, _Origin]) -> None:
        """Make a span of each run of consecutive operators of one layer, inside the calls of the enclosing layers."""
        layer_calls = LayerCalls("inductor")
        for operator in run.operators:
            origin = origins.get(id(operator))
            layer = layer_calls.add(operator, origin.path if origin is not None else ())
            if origin is not None:
                self._assign(operator, origin, (layer or self._call(run)).span_id, origin.is_certain)
        self.layers += layer_calls.calls
        if run.frame is not None:
            self._forward[run.frame.thread, run.frame.sequence_nr] = layer_calls.by_path

    def _place_backward(self, run: _Run, origins: dict[int, _Origin]) -> None:
        """Assign each operator to its layer's call in the graph's forward pass, or to the nearest enclosing layer."""
        frame = run.frame
        calls = self._forward.get((frame.forward_thread, frame.sequence_nr), {}) if frame is not None else {}
        for operator in run.operators:
            origin = origins.get(id(operator))
            if origin is None:
                continue
            path = origin.path
            while path and len(calls.get(path, ())) != 1:
                path = path[:-1]
            # without a layer it stays in its frame, which is linked to the compiled module by its number
            parent = calls[path][0] if path else self._call(run)
            self._assign(operator, origin, parent.span_id, origin.is_certain and path == origin.path, "backward")

    def _call(self, run: _Run) -> Span:
        """Return a graph's call, with an id that can serve as a parent id."""
        call = self.changed_spans.get(id(run.call), run.call)
        if call.span_id is None:
            call = self.changed_spans[id(run.call)] = call._replace(span_id=new_span_id())
        return call

    def _assign(
        self, operator: Span, origin: _Origin, parent: str | None, is_certain: bool, phase: str | None = None
    ) -> None:
        attributes = json.loads(operator.attributes) if operator.attributes else {}
        self.changed_spans[id(operator)] = operator._replace(
            parent_id=parent,
            parent_rule=None if is_certain else Rule.PROVENANCE.value,
            phase=phase or operator.phase,
            attributes=json.dumps({**attributes, SOURCES: list(origin.sources), LAYERS: list(origin.layers)}),
        )


# --- execution --------------------------------------------------------------------------------------------


def _operators_by_thread(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the operators of each thread, outer ones before inner ones."""
    by_thread: dict[int | None, list[Span]] = defaultdict(list)
    for span in spans:
        if span.device is None and span.level == Level.OP and span.kind != Kind.ALLOC:
            by_thread[span.thread].append(span)
    for thread in by_thread.values():
        yield sorted(thread, key=lambda span: (span.start_ns, -span.dur_ns))


def _runs(thread: Sequence[Span], graphs: CompiledGraphs) -> Iterator[_Run]:
    """Yield the calls of graphs on one thread, in one sweep with a stack of open spans."""
    stack: list[Span] = []
    runs: dict[int, _Run] = {}
    for span in thread:
        while stack and stack[-1].end_ns < span.end_ns:
            stack.pop()
        match = _CALL.match(span.name)
        if match:
            frame = next((open_span for open_span in reversed(stack) if open_span.sequence_nr is not None), None)
            runs[id(span)] = _Run(span, frame, [], graphs.get(match[1]))
        elif stack and id(stack[-1]) in runs:
            runs[id(stack[-1])].operators.append(span)
        stack.append(span)
    yield from runs.values()


def _origins(operators: Sequence[Span], graph: CompiledGraph) -> dict[int, _Origin]:
    """Return the origins of operators, by their `id`.

    The nth operator of a name is the code's nth call of that name, if both counts are equal. Calls that a profiler does
    not show at all, such as C++ kernels, do not matter; if only some calls of a name are shown, none gets an origin.
    """
    sites: dict[str, list[Site]] = defaultdict(list)
    for site in graph.sites:
        sites[site.operator].append(site)
    by_name: dict[str, list[Span]] = defaultdict(list)
    for operator in operators:
        by_name[_plain_name(operator.name)].append(operator)
    origins = {}
    for name, group in by_name.items():
        if len(group) == len(sites[name]):
            for operator, site in zip(group, sites[name], strict=True):
                origin = _origin(site, graph)
                if origin is not None:
                    origins[id(operator)] = origin
    return origins


def _plain_name(name: str) -> str:
    return _PREFIX.sub("", name)


def _origin(site: Site, graph: CompiledGraph) -> _Origin | None:
    """Return the origin of a site in the code; None if the layer of any of its nodes is unknown."""
    if any(name not in graph.paths for name in site.sources):
        return None
    node_paths = [graph.paths[name] for name in site.sources]
    paths = list(dict.fromkeys(path for path in node_paths if path is not None))
    if not paths:
        return None
    layers = tuple(path[-1].name or path[-1].type if path else "" for path in paths)
    return _Origin(common_prefix(paths), site.sources, layers, is_certain=len(paths) == 1 and None not in node_paths)
