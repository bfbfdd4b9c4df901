"""The best layout of each call of a graph, contiguous or channels-last, for all calls together.

The best layout of each call alone ignores the cost of conversions between calls. Here a call costs its timing in its
layout, and a value the timing of its conversion, once for all of its readers; the minimum over all choices is a minimum
cut (`xsp.questions.mincut`), and so exact. Weights are converted ahead of time, at no cost. Values from outside,
returned values, and calls with a single layout are unchanged. A call without timings in both layouts is unchanged, and
is counted; a conversion without a timing is not made.

If only the order of calls is known, a call is assumed to read the latest value with the shape of its input. This is
sufficient for a single layout, where only values that enter or leave are converted, but not for mixed layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xsp.bench.environment import Environment
from xsp.bench.plan import effective_state, runtime_of
from xsp.bench.spec import AS_RUN, CacheState, Spec, Timing
from xsp.bound import timed
from xsp.graph.blocks import LASTING, Block, Wires
from xsp.graph.node import Call, Graph, KnownBy, Node, Role, Tensor
from xsp.questions import mincut
from xsp.questions.timedcalls import TimedGraph, VariantDifference, difference

CONTIGUOUS, CHANNELS_LAST = 0, 1
VARIANTS = ("contiguous", "channels-last")
FORMATS = ("contiguous_format", "channels_last")

NEUTRAL_OPS = frozenset(
    "relu relu6 hardtanh silu gelu sigmoid hardswish hardsigmoid mish leaky_relu elu celu selu softplus tanh clamp "
    "clamp_min clamp_max add sub rsub mul div neg exp sqrt rsqrt pow abs maximum minimum where dropout "
    "feature_dropout bernoulli threshold threshold_backward hardtanh_backward silu_backward gelu_backward cat "
    "hardswish_backward sigmoid_backward".split()
)
"""Operators that work in memory order and keep the layout: equally fast in both."""

MODEL_ARGUMENTS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
"""Arguments that are not activations, for graphs without roles of values."""


@dataclass(frozen=True)
class Plan:
    """A choice of calls that run in another layout, and its gain."""

    changed: tuple[int, ...]
    """Nodes that were timed in both layouts and change to the other one."""

    gain: VariantDifference
    conversions: int
    conversion_ns: float
    """Nanoseconds of all conversions together."""

    untimed_count: int
    """Number of calls that support two layouts, but were not timed in both: they stay as they ran."""


def layout_of(tensor: Tensor) -> int | None:
    """Return the layout of a tensor; None if it has none, or if both layouts are the same for it."""
    if tensor.shape is None or len(tensor.shape) != 4:
        return None
    _, channels, height, width = tensor.shape
    if channels <= 1 or height * width <= 1:
        return None
    return CHANNELS_LAST if tensor.stride is not None and tensor.stride[1] == 1 else CONTIGUOUS


def node_layout(node: Node) -> int | None:
    """Return the layout in which a call ran: a channels-last input of an image operator gives such a result."""
    labels = {layout_of(tensor) for tensor in node.call.inputs} - {None}
    return CHANNELS_LAST if CHANNELS_LAST in labels else CONTIGUOUS if labels else None


def conversions(graph: Graph, threads: int, environment: Environment | None = None) -> list[Spec]:
    """Return the specs of conversions of values to the other layout and back: a few shapes for a whole model."""
    problem = _Problem(graph, threads, effective_state(graph, CacheState.CHAIN, environment))
    if not problem.choices:
        return []
    specs = (
        problem.conversion(value.tensor, to)
        for value in problem.values
        if value.tensor
        for to in (CHANNELS_LAST, CONTIGUOUS)
    )
    return list({spec.key: spec for spec in specs}.values())


def uniform(timed_graph: TimedGraph, target: int) -> Plan | None:
    """Return the gain if all possible calls run in layout `target`; None if too little is timed, or nothing changes."""
    return _best_plan(timed_graph, target)


def best(timed_graph: TimedGraph) -> Plan | None:
    """Return the best choice of layouts; None if the data flow is unknown, nothing is timed, or nothing changes."""
    return None if timed_graph.graph.known_by is KnownBy.ORDER else _best_plan(timed_graph, None)


def _best_plan(timed_graph: TimedGraph, forced: int | None) -> Plan | None:
    problem = _Problem(timed_graph.graph, timed_graph.reference, timed_graph.state)
    costs: list[tuple[mincut.Cost, mincut.Cost]] = [(0, 0) for _ in range(problem.count)]
    pairs: dict[int, tuple[Timing, Timing]] = {}
    for number in range(problem.count):
        layout = problem.layouts[number]
        if number in problem.choices and layout is not None:
            pair = timed_graph.timing(number), timed_graph.timing(number, VARIANTS[1 - layout])
            if pair[0] is not None and pair[1] is not None:
                pairs[number] = pair[0], pair[1]
                ns = [round(timing.trimmed_ns or 0.0) for timing in pairs[number]]
                costs[number] = (
                    (None if forced == CHANNELS_LAST else ns[layout]),
                    (None if forced == CONTIGUOUS else ns[1 - layout]),
                )
                continue
        if number not in problem.neutral and layout is not None:
            costs[number] = (None, 0) if layout else (0, None)
    prices: dict[str, Timing | None] = {}
    values = []
    for value in problem.values:
        to_one, to_zero = (
            _price(timed_graph, problem, value.tensor, target, prices) for target in (CHANNELS_LAST, CONTIGUOUS)
        )
        values.append(mincut.SharedValue(value.maker, value.readers, to_one, to_zero))
    try:
        labels = mincut.two_labels(costs, values)
    except ValueError:
        return None  # a necessary conversion was not timed
    changed = [number for number in pairs if labels[number] != problem.layouts[number]]
    if not changed:
        return None
    conversion_timings = [
        prices[problem.conversion(value.tensor, 1 - labels[value.maker]).key]
        for value in problem.values
        if value.tensor is not None and any(labels[reader] != labels[value.maker] for reader in value.readers)
    ]
    known_timings = [timing for timing in conversion_timings if timing is not None]
    return Plan(
        tuple(changed),
        difference(
            (pairs[number][0] for number in changed), [*(pairs[number][1] for number in changed), *known_timings]
        ),
        len(known_timings),
        math.fsum(timing.trimmed_ns or 0.0 for timing in known_timings),
        len(problem.choices) - len(pairs),
    )


def _price(
    timed_graph: TimedGraph, problem: _Problem, tensor: Tensor | None, target: int, prices: dict[str, Timing | None]
) -> mincut.Cost:
    """Return the cost of converting a value; 0 if both layouts are the same for it, None if it was not timed."""
    if tensor is None:
        return 0
    spec = problem.conversion(tensor, target)
    timing = timed_graph.timings.get(spec.key)
    prices[spec.key] = timing if timing is not None and timing.is_timed else None
    stored = prices[spec.key]
    return None if stored is None else round(stored.trimmed_ns or 0.0)


@dataclass(frozen=True)
class _Value:
    maker: int
    readers: tuple[int, ...]
    tensor: Tensor | None
    """None if both layouts are the same for it."""


class _Problem:
    """The possible layouts of nodes, and the values between nodes. Terminals follow the nodes."""

    def __init__(self, graph: Graph, threads: int, state: CacheState) -> None:
        from xsp.bench.variants import VARIANTS as KNOWN

        self.graph = graph
        self._state, self._runtime, self._threads = state, runtime_of(graph), threads
        self.layouts: list[int | None] = [node_layout(node) for node in graph.nodes]
        self.choices: set[int] = set()
        self.neutral: set[int] = set()
        for number, spec in enumerate(timed.specs_of(graph, threads, state)):
            node, layout = graph.nodes[number], self.layouts[number]
            if layout is None or node.call.op.partition("::")[2].rstrip("_") in NEUTRAL_OPS or not node.computes:
                self.neutral.add(number)
            elif spec is not None and KNOWN["channels-last"].may_change(spec):
                self.choices.add(number)
        only_order = graph.known_by is KnownBy.ORDER
        self.values = list(_by_shape(self) if only_order else _by_flow(self))

    @property
    def count(self) -> int:
        """Number of nodes and terminals."""
        return len(self.layouts)

    def terminal(self, layout: int) -> int:
        """Return a new terminal: something outside the graph, which has one layout."""
        self.layouts.append(layout)
        return len(self.layouts) - 1

    def conversion(self, tensor: Tensor, to: int) -> Spec:
        """Return the spec of the conversion of a tensor to a layout."""
        source, target = (Tensor(tensor.dtype, tensor.shape, _strides(tensor, layout)) for layout in (1 - to, to))
        call = Call("aten::contiguous", (("self", source), ("memory_format", FORMATS[to])), (target,))
        return Spec(Block((call,), (Wires((0,), (1,), (1,)),)), AS_RUN, self._state, self._threads, self._runtime)

    def value(self, maker: int, readers: Sequence[int], tensor: Tensor | None) -> _Value | None:
        """Return a value between nodes, or None without readers. A reader that ran in another layout already paid."""
        layout = self.layouts[maker]
        remaining = [
            reader
            for reader in dict.fromkeys(readers)
            if None in (layout, self.layouts[reader]) or self.layouts[reader] == layout
        ]
        convertible = None if tensor is None or layout_of(tensor) is None else tensor
        return _Value(maker, tuple(remaining), convertible) if remaining else None


def _strides(tensor: Tensor, layout: int) -> tuple[int, ...] | None:
    assert tensor.shape is not None
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, width * channels, channels) if layout == CHANNELS_LAST else None


def _by_flow(problem: _Problem) -> Iterator[_Value]:
    """Yield the values of a graph whose data flow is known."""
    graph = problem.graph
    tensors: dict[int, Tensor] = {}
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for value, tensor in zip(node.reads, node.call.inputs, strict=False):
            if node.computes:
                readers.setdefault(value, []).append(number)
            if len(tensor.shape or ()) == 4:
                tensors.setdefault(value, tensor)
        for value in node.writes:
            makers[value] = number
        for value, tensor in zip(node.returns, node.call.outputs, strict=False):
            if len(tensor.shape or ()) == 4:
                tensors.setdefault(value, tensor)
    for value, tensor in tensors.items():
        if graph.values[value].role in LASTING or graph.values[value].role is Role.CONSTANT:
            continue
        layout = layout_of(tensor)
        maker = makers.get(value)
        if maker is None:
            maker = problem.terminal(layout or CONTIGUOUS)
        consumers = readers.get(value) or [problem.terminal(problem.layouts[maker] or CONTIGUOUS)]
        if (entry := problem.value(maker, consumers, tensor)) is not None:
            yield entry


def _by_shape(problem: _Problem) -> Iterator[_Value]:
    """Yield the values of a graph with known order only: a call reads the latest value with its input's shape."""
    latest: dict[Any, tuple[int, Tensor]] = {}
    readers: dict[int, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    external_makers: dict[Any, int] = {}
    for number, node in enumerate(problem.graph.nodes):
        for name, argument in node.call.arguments:
            for tensor in argument if isinstance(argument, tuple) else (argument,):
                if not isinstance(tensor, Tensor) or layout_of(tensor) is None or name in MODEL_ARGUMENTS:
                    continue
                signature = tensor.dtype, tensor.shape
                maker = latest[signature][0] if signature in latest else external_makers.get(signature)
                if maker is None:
                    maker = external_makers[signature] = problem.terminal(layout_of(tensor) or CONTIGUOUS)
                readers.setdefault(maker, []).append(number)
                tensors.setdefault(maker, tensor)
        for tensor in node.call.outputs:
            if layout_of(tensor) is not None:
                latest[tensor.dtype, tensor.shape] = number, tensor
    for maker, consumers in readers.items():
        if (entry := problem.value(maker, consumers, tensors[maker])) is not None:
            yield entry
