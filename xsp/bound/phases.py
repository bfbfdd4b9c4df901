"""A training step by its phases and layers: times of forward, backward and update, and the bytes of gradients.

A layer is a module with its own calls. Its update is found through memory: a parameter belongs to the layer whose
forward call reads it first, and the optimizer state of the parameter (a momentum, a mean of squares) is at the same
index of the lists of a `_foreach_` or fused call, or in the same call. A call on lists is divided by the bytes of each
parameter. Time that belongs to no layer is reported as `NO_LAYER`, and is not spread over the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xsp.bound import totals
from xsp.bound.ladder import Bound, Rung
from xsp.bound.totals import Figure
from xsp.errors import GraphError
from xsp.graph import paths
from xsp.graph.node import Graph, KnownBy, Node, Phase, Role, Tensor
from xsp.stats import known_sum

OUTERMOST = "(outermost module)"
NO_LAYER = "(no layer)"

RUNGS = (Rung.IN_PLACE, Rung.AS_RUN, Rung.CEILING)
"""Rungs with the times, in order of preference: the run, timings, ceilings."""


@dataclass(frozen=True)
class PhaseTotal:
    """A phase on a rung. Times are nanoseconds; None if a call has no figure."""

    phase: Phase
    calls: int
    known_calls: int
    """Number of calls with a figure."""

    ns: float | None
    half_ns: float | None
    path_ns: float | None
    """The longest path over data in the phase; None if data flow or a figure is unknown."""

    @property
    def off_path_ns(self) -> float | None:
        """Time that could overlap with the longest path on unlimited processors: weight gradients, in backward."""
        return None if self.ns is None or self.path_ns is None else max(0.0, self.ns - self.path_ns)


@dataclass(frozen=True)
class TrainedLayer:
    """Times of a layer by phase, and the bytes of its gradients. None is unknown, 0 is none."""

    module: str
    forward_ns: float | None
    backward_ns: float | None
    update_ns: float | None
    parameter_bytes: int | None
    """Bytes of the parameters that the step updates, equal to those of their gradients; None without data flow."""

    calls: int


@dataclass(frozen=True)
class Training:
    """A training step by phases and layers."""

    name: str
    rung: Rung
    """The rung of the figures of `phases` and `layers`."""

    phases: tuple[PhaseTotal, ...]
    by_rung: Mapping[Rung, tuple[PhaseTotal, ...]]
    layers: tuple[TrainedLayer, ...]
    """Layers in the order of the forward pass."""

    holes: int
    """Number of calls without a figure."""

    can_time: bool = True
    """Whether calls of the step can be timed here."""


def check(graph: Graph) -> None:
    """Refuse a step that has no phases.

    Raises:
        GraphError: it has no backward pass.
    """
    if not any(node.phase is Phase.BACKWARD for node in graph.computing):
        raise GraphError(f"{graph.name}: the step has no backward pass; give --train, or a run of training")


def of(bound: Bound) -> Training:
    """Return the phases and layers of the bound of a training step.

    Raises:
        GraphError: the step has no backward pass, or none of its calls has a figure.
    """
    graph = bound.graph
    check(graph)
    rungs = [rung for rung in RUNGS if any(bound.figures.get(rung.value) or ())]
    if not rungs:
        raise GraphError(f"{graph.name}: no call of the step has a figure; time them with --fill 60s")
    rung = next((rung for rung in rungs if bound.rungs[rung.value].coverage.share >= totals.MIN_COVERAGE), rungs[0])
    by_rung = {rung: tuple(_phases(bound, bound.figures[rung.value])) for rung in rungs}
    figures = bound.figures[rung.value]
    holes = sum(computes and figure is None for figure, computes in zip(figures, bound.is_computing, strict=True))
    can_time = "environment" in bound.settings
    return Training(graph.name, rung, by_rung[rung], by_rung, tuple(_layers(bound, figures)), holes, can_time)


def _phases(bound: Bound, figures: Sequence[Figure | None]) -> Iterator[PhaseTotal]:
    graph = bound.graph
    predecessors = None if graph.known_by is KnownBy.ORDER else paths.predecessors_of(graph)
    for phase in Phase:
        indices = [n for n, node in enumerate(graph.nodes) if node.phase is phase and bound.is_computing[n]]
        if not indices:
            continue
        phase_figures = [figures[index] for index in indices]
        complete = all(figure is not None for figure in phase_figures)
        path = None
        if complete and predecessors is not None:
            members = set(indices)
            times = [
                figure.ns if figure is not None and index in members else 0.0 for index, figure in enumerate(figures)
            ]
            path, _ = paths.longest(predecessors, times)
        yield PhaseTotal(
            phase,
            len(indices),
            sum(figure is not None for figure in phase_figures),
            math.fsum(figure.ns for figure in phase_figures if figure is not None) if complete else None,
            totals.half(phase_figures) if complete else None,
            path,
        )


def _layers(bound: Bound, figures: Sequence[Figure | None]) -> Iterator[TrainedLayer]:
    """Yield each module with its own calls or parameters, in order of first appearance."""
    graph = bound.graph
    owners = _owners(graph)
    weight_of = _weight_of_storage(graph, owners)
    times: dict[tuple[str, Phase], list[float | None]] = defaultdict(list)
    names: dict[str, int] = {}
    updated: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        if not bound.is_computing[index]:
            continue
        figure = figures[index]
        if node.phase is not Phase.OPTIMIZER:
            name = _layer(node)
            names[name] = names.get(name, 0) + 1
            times[name, node.phase].append(None if figure is None else figure.ns)
            continue
        for storage, share, size, parameter in _shares(graph, node, weight_of):
            name = owners[storage] if storage is not None else NO_LAYER
            names.setdefault(name, 0)
            times[name, node.phase].append(None if figure is None else share * figure.ns)
            if storage is not None and parameter:
                updated[storage] = max(updated.get(storage, 0), size)
    sizes: dict[str, int] = defaultdict(int)
    for storage, size in updated.items():
        sizes[owners[storage]] += size
    has_flow = graph.known_by is not KnownBy.ORDER  # the updated parameters are known only from memory
    for name, calls in names.items():
        forward, backward, update = (known_sum(times[name, phase]) for phase in Phase)
        is_known = has_flow or name == NO_LAYER
        yield TrainedLayer(
            name, forward, backward, update if is_known else None, sizes[name] if has_flow else None, calls
        )


def _layer(node: Node) -> str:
    return node.module.partition("#")[0] or OUTERMOST


def _owners(graph: Graph) -> dict[int, str]:
    """Return the layer that reads each weight first, by the storage of the weight."""
    owners: dict[int, str] = {}
    for node in graph.nodes:
        if node.phase is Phase.OPTIMIZER:
            continue
        for number in node.reads:
            value = graph.values[number]
            if value.role is Role.WEIGHT:
                owners.setdefault(value.storage, _layer(node))
    return owners


def _groups(node: Node) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield groups of related tensors in an optimizer's call: indices among its inputs, with the tensors.

    For a call on lists, a group has the tensors at the same index of each list; else the largest tensors of one shape.
    """
    lists: list[list[tuple[int, Tensor]]] = []
    singles: list[tuple[int, Tensor]] = []
    position = 0
    for _, value in node.call.arguments:
        if isinstance(value, tuple) and any(isinstance(element, Tensor) for element in value):
            lists.append([])
            for element in value:
                if isinstance(element, Tensor):
                    lists[-1].append((position, element))
                    position += 1
        elif isinstance(value, Tensor):
            singles.append((position, value))
            position += 1
    if lists:
        longest = max(map(len, lists))
        for index in range(longest):
            yield [tensors[index] for tensors in lists if len(tensors) == longest]
        return
    shapes: dict[tuple[int, ...] | None, list[tuple[int, Tensor]]] = defaultdict(list)
    for entry in singles:
        shapes[entry[1].shape].append(entry)
    largest = max(shapes.values(), key=lambda group: group[0][1].elements or 0, default=[])
    if largest:
        yield largest


def _weight_of_storage(graph: Graph, owners: Mapping[int, str]) -> dict[int, int]:
    """Return storage → storage of the weight for which an optimizer uses it; a weight maps to itself."""
    links: dict[int, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.phase is not Phase.OPTIMIZER:
            continue
        groups = list(_groups(node))
        for index, group in enumerate(groups):
            storages = [
                graph.values[node.reads[position]].storage for position, _ in group if position < len(node.reads)
            ]
            if len(node.returns) == len(groups):
                storages.append(graph.values[node.returns[index]].storage)
            for member in storages:
                links[member].update(storages)
    weight_of = {storage: storage for storage in owners}
    pending = list(weight_of)
    while pending:
        storage = pending.pop()
        for linked in links.get(storage, ()):
            if linked not in weight_of:
                weight_of[linked] = weight_of[storage]
                pending.append(linked)
    return weight_of


def _shares(graph: Graph, node: Node, weight_of: Mapping[int, int]) -> Iterable[tuple[int | None, float, int, bool]]:
    """Return the weights of an optimizer's call, each with its share of the call and its bytes.

    The last value is whether the weight itself is among the tensors.
    """
    rows: list[tuple[int | None, int, bool]] = []
    for group in _groups(node):
        storages = [graph.values[node.reads[position]].storage for position, _ in group if position < len(node.reads)]
        weight = next((weight_of[storage] for storage in storages if storage in weight_of), None)
        size = max((tensor.bytes or 0 for _, tensor in group), default=0)
        rows.append((weight, size, weight in storages))
    total = sum(size for _, size, _ in rows)
    if not rows or not total:
        return [(None, 1.0, 0, False)]
    return [(weight, size / total, size, parameter) for weight, size, parameter in rows]
