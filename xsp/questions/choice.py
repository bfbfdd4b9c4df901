"""Q3: is each layer's algorithm and layout the best one? Compares settings that apply to a whole program.

A setting is one line of code, so its gain is that of all calls that it changes, including those that become slower, and
not the sum over each call's best variant. The figures come from timings of single calls, in variants with the same
results within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xsp.advise import Advice, AdviceContext, Interval, Needs, question
from xsp.bench.spec import AS_RUN, Timing
from xsp.questions import layouts
from xsp.questions.timedcalls import TimedGraph, VariantDifference, difference, milliseconds

ONEDNN_OFF = "onednn-off"
CUDNN_BENCHMARK = "cudnn-benchmark"
ONEDNN_FROM = 20480
"""Number of elements of an image above which torch always uses oneDNN for its convolution."""

ONEDNN_OP = "aten::mkldnn_convolution"
NATIVE_OPS = ("aten::_slow_conv2d_forward", "aten::thnn_conv2d", "aten::_conv_depthwise2d", "aten::slow_conv3d_forward")
"""Operators that torch calls for a convolution on a processor without oneDNN."""

BACKENDS: Mapping[str, tuple[str, str | None]] = {
    "attention-math": ("MATH", "sdpa=math"), "attention-flash": ("FLASH_ATTENTION", "sdpa=flash"),
    "attention-efficient": ("EFFICIENT_ATTENTION", None),
}  # fmt: skip
"""Variant → name of the back end, and of the trial that selects it."""

LEAST_MIXED_SHARE = 0.03
"""Minimum gain of mixed layouts over a single layout, as a share of the step, to be worth the additional code."""


@dataclass(frozen=True)
class Setting:
    """The gain of one setting over all calls that it changes."""

    nodes: tuple[int, ...]
    gain: VariantDifference
    gains: dict[int, float]
    """Gain of each node in nanoseconds; negative for a node that becomes slower."""

    missing_count: int
    """Number of calls that the setting may change, but that were not timed both ways: assumed to be unchanged."""

    before_ns: float
    after_ns: float


@question("choice", "Does each call use the best installed algorithm and layout?", number="Q3", needs=Needs.BOUND)
def choice(context: AdviceContext) -> Iterator[Advice]:
    """Layout of images, oneDNN or cuDNN's algorithms, and back end of attention: calls timed each way, and added up
    over the graph."""
    timed_graph: TimedGraph = context.part("timed-graph")
    yield from pieces(timed_graph)


def pieces(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield the changes to make, for a graph with timings."""
    convolutions = without_onednn(timed_graph)
    yield from _onednn(timed_graph, convolutions)
    yield from _layouts(timed_graph)
    yield from _attention(timed_graph)
    yield from _convolution_algorithms(timed_graph)


def setting(
    timed_graph: TimedGraph, variant: str, target: str = "", nodes: Sequence[int] | None = None
) -> Setting | None:
    """Return the gain of computing calls in the variant `target` (by default as run) instead of `variant`.

    None if no call was timed both ways.
    """
    pairs: dict[int, tuple[Timing, Timing]] = {}
    missing = 0
    for node in timed_graph.computing if nodes is None else nodes:
        before, after = timed_graph.timing(node, variant), timed_graph.timing(node, target or AS_RUN)
        if before is not None and after is not None:
            pairs[node] = before, after
        elif timed_graph.supports(node, variant if variant != AS_RUN else target):
            missing += 1
    if not pairs:
        return None
    ns = [[timing.trimmed_ns or 0.0 for timing in pair] for pair in pairs.values()]
    return Setting(
        tuple(pairs),
        difference((before for before, _ in pairs.values()), (after for _, after in pairs.values())),
        {node: before - after for node, (before, after) in zip(pairs, ns, strict=True)},
        missing,
        math.fsum(before for before, _ in ns),
        math.fsum(after for _, after in ns),
    )


def without_onednn(timed_graph: TimedGraph) -> tuple[int, ...]:
    """Return convolutions that ran without oneDNN although torch would use it; empty if any convolution used it."""
    nodes = []
    for node in timed_graph.computing:
        call = timed_graph.graph.nodes[node].call
        traced_call = timed_graph.traced_calls[node] if timed_graph.traced_calls else None
        if traced_call is None or "conv" not in call.op or not call.inputs or call.inputs[0].dtype != "float32":
            continue
        if ONEDNN_OP in traced_call.inner_operators:
            return ()
        is_large = (call.inputs[0].elements or 0) > ONEDNN_FROM and len(call.inputs[0].shape or ()) == 4
        if is_large and not traced_call.inner_operators.isdisjoint(NATIVE_OPS):
            nodes.append(node)
    return tuple(nodes)


def _onednn(timed_graph: TimedGraph, convolutions: tuple[int, ...]) -> Iterator[Advice]:
    if not convolutions:
        change = setting(timed_graph, AS_RUN, ONEDNN_OFF)
        if change is not None and change.gain.is_gain:
            yield _advice(
                timed_graph,
                change,
                f"oneDNN is slower here than torch's own kernels, in {len(change.nodes)} calls in total",
                "torch.backends.mkldnn.enabled = False",
                "onednn=off",
            )
        return
    change = setting(timed_graph, ONEDNN_OFF, nodes=convolutions)
    text = f"oneDNN is switched off: {len(convolutions)} convolutions run without it"
    remedy = "remove torch.backends.mkldnn.enabled = False (or set it to True)"
    if change is not None:
        if change.gain.is_gain:
            yield _advice(timed_graph, change, text, remedy, "onednn=on")
        return
    calls_ns = timed_graph.in_place_ns(convolutions)
    if calls_ns:
        gain = Interval(calls_ns / 1e6, calls_ns / 1e6, calls_ns / 1e6)
        yield Advice(
            "choice",
            text,
            timed_graph.places(dict.fromkeys(convolutions, 1.0)),
            gain,
            True,
            100 * calls_ns / timed_graph.total_ns,
            (f"all of their time in the trace, {calls_ns / 1e6:.3g} ms; not timed with oneDNN yet: --fill 60s",),
            remedy,
            trial="onednn=on",
        )


def _layouts(timed_graph: TimedGraph) -> Iterator[Advice]:
    plans = {layout: layouts.uniform(timed_graph, layout) for layout in (layouts.CHANNELS_LAST, layouts.CONTIGUOUS)}
    layout, plan = max(
        ((layout, candidate) for layout, candidate in plans.items() if candidate is not None),
        key=lambda pair: pair[1].gain.ns,
        default=(layouts.CHANNELS_LAST, None),
    )
    mixed = layouts.best(timed_graph)
    if mixed is not None and mixed.gain.is_gain:
        single_gain = plan.gain.ns if plan is not None and plan.gain.is_gain else 0.0
        if mixed.gain.ns - single_gain > LEAST_MIXED_SHARE * timed_graph.total_ns:
            yield _mixed_advice(timed_graph, mixed, plan)
            return
    if plan is None or not plan.gain.is_gain:
        return
    is_channels_last = layout == layouts.CHANNELS_LAST
    yield _plan_advice(
        timed_graph,
        plan,
        "images are contiguous; channels-last is faster here" if is_channels_last
        else "images are channels-last; contiguous is faster here",
        "model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)" if is_channels_last
        else "omit memory_format=torch.channels_last: model.to(memory_format=torch.contiguous_format), and x too",
        "channels_last" if is_channels_last else None,
    )  # fmt: skip


def _mixed_advice(timed_graph: TimedGraph, plan: layouts.Plan, uniform: layouts.Plan | None) -> Advice:
    modules = list(dict.fromkeys(timed_graph.graph.nodes[node].module or "the model" for node in plan.changed))
    listing = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    to_channels_last = layouts.node_layout(timed_graph.graph.nodes[plan.changed[0]]) == layouts.CONTIGUOUS
    name = "channels_last" if to_channels_last else "contiguous_format"
    advice = _plan_advice(
        timed_graph,
        plan,
        f"{len(plan.changed)} calls are faster in another layout than the rest",
        f"convert the input of {listing}: x.contiguous(memory_format=torch.{name}), and convert back after them",
        None,
    )
    uniform_gain = "nothing" if uniform is None or uniform.gain.ns <= 0 else f"{uniform.gain.ns / 1e6:.3g} ms"
    return Advice(**{**vars(advice), "why": (*advice.why, f"the same layout for all calls gains {uniform_gain}")})


def _plan_advice(timed_graph: TimedGraph, plan: layouts.Plan, text: str, remedy: str, trial: str | None) -> Advice:
    gains = {
        node: _ns(timed_graph.timing(node))
        - _ns(timed_graph.timing(node, layouts.VARIANTS[1 - _label(timed_graph, node)]))
        for node in plan.changed
    }
    why = [
        f"{len(plan.changed)} calls timed in both layouts, {timed_graph.conditions}",
        f"{plan.conversions} conversions are subtracted, {plan.conversion_ns / 1e6:.3g} ms",
    ]
    if plan.untimed_count:
        why.append(f"{plan.untimed_count} calls are not timed in both, and keep their layout")
    gain, percent = timed_graph.gain(plan.gain, plan.changed)
    return Advice(
        "choice", text, timed_graph.places(gains), gain, False, percent, tuple(why), remedy,
        trial=trial, by_call=milliseconds(gains), once_ms=plan.conversion_ns / 1e6, side=timed_graph.side,
    )  # fmt: skip


def _label(timed_graph: TimedGraph, node: int) -> int:
    return layouts.node_layout(timed_graph.graph.nodes[node]) or layouts.CONTIGUOUS


def _ns(timing: Timing | None) -> float:
    return 0.0 if timing is None else timing.trimmed_ns or 0.0


def _attention(timed_graph: TimedGraph) -> Iterator[Advice]:
    candidates = [
        (name, candidate) for name in BACKENDS if (candidate := setting(timed_graph, AS_RUN, name)) is not None
    ]
    if not candidates:
        return
    name, best = max(candidates, key=lambda candidate: candidate[1].gain.ns)
    if best.gain.is_gain:
        backend, trial = BACKENDS[name]
        yield _advice(
            timed_graph,
            best,
            f"attention is faster with another back end: {backend}",
            f"with torch.nn.attention.sdpa_kernel(SDPBackend.{backend}): ...",
            trial,
        )


def _convolution_algorithms(timed_graph: TimedGraph) -> Iterator[Advice]:
    change = setting(timed_graph, AS_RUN, CUDNN_BENCHMARK)
    if change is not None and change.gain.is_gain:
        yield _advice(
            timed_graph,
            change,
            f"{len(change.nodes)} convolutions are faster with the algorithms that cuDNN finds by timing",
            "torch.backends.cudnn.benchmark = True",
            "cudnn_benchmark",
        )


def _advice(timed_graph: TimedGraph, change: Setting, text: str, remedy: str, trial: str | None) -> Advice:
    gain, percent = timed_graph.gain(change.gain, change.nodes)
    why = [
        f"{len(change.nodes)} calls in isolation: {change.before_ns / 1e6:.3g} ms now, {change.after_ns / 1e6:.3g} ms "
        f"with the change, {timed_graph.conditions}"
    ]
    if change.missing_count:
        why.append(f"{change.missing_count} calls are not timed both ways, and keep their time")
    return Advice(
        "choice", text, timed_graph.places(change.gains), gain, False, percent, tuple(why), remedy,
        trial=trial, by_call=milliseconds(change.gains), side=timed_graph.side,
    )  # fmt: skip
