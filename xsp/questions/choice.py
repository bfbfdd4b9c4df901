"""Q3: is each layer's algorithm and layout the best one? Compares settings that apply to a whole program.

A setting is one line of code, so its gain is that of all calls that it changes, including those that become slower, and
not the sum over each call's best variant. The figures come from timings of single calls, in variants with the same
results within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xsp.advise import Advice, AdviceContext, Interval, Needs, question
from xsp.bench.spec import AS_RUN, Timing
from xsp.questions import layouts
from xsp.questions.timedcalls import Difference, Ground, difference, milliseconds

OFF = "onednn-off"
ONEDNN_FROM = 20480
"""Number of elements of an image above which torch always uses oneDNN for its convolution."""

OF_ONEDNN = "aten::mkldnn_convolution"
WITHOUT = ("aten::_slow_conv2d_forward", "aten::thnn_conv2d", "aten::_conv_depthwise2d", "aten::slow_conv3d_forward")
"""Operators that torch calls for a convolution on a processor without oneDNN."""

BACKENDS = {"attention-math": ("MATH", "sdpa=math"), "attention-flash": ("FLASH_ATTENTION", "sdpa=flash")}
"""Variant → name of the back end, and of the trial that selects it."""

BETTER = 0.03
"""Minimum gain of mixed layouts over a single layout, as a share of the step, to be worth the additional code."""


@dataclass(frozen=True)
class Setting:
    """The gain of one setting over all calls that it changes."""

    nodes: tuple[int, ...]
    gain: Difference
    gains: dict[int, float]
    """Gain of each node in nanoseconds; negative for a node that becomes slower."""

    missing: int
    """Number of calls that the setting may change, but that were not timed both ways: assumed to be unchanged."""

    before_ns: float
    after_ns: float


@question("choice", "Does each call use the best installed algorithm and layout?", number="Q3", needs=Needs.BOUND)
def choice(context: AdviceContext) -> Iterator[Advice]:
    """Layout of images, oneDNN, and back end of attention: calls timed each way, and added up over the graph."""
    ground: Ground = context.part("ground")
    yield from pieces(ground)


def pieces(ground: Ground) -> Iterator[Advice]:
    """Yield the changes to make, for a graph with timings."""
    off = without_onednn(ground)
    yield from _onednn(ground, off)
    yield from _layouts(ground)
    yield from _attention(ground)


def setting(ground: Ground, variant: str, to: str = "", nodes: Sequence[int] | None = None) -> Setting | None:
    """Return the gain of computing calls in the variant `to` (by default as run) instead of `variant`.

    None if no call was timed both ways.
    """
    pairs: dict[int, tuple[Timing, Timing]] = {}
    missing = 0
    for node in ground.computing if nodes is None else nodes:
        before, after = ground.timing(node, variant), ground.timing(node, to or AS_RUN)
        if before is not None and after is not None:
            pairs[node] = before, after
        elif ground.supports(node, variant if variant != AS_RUN else to):
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


def without_onednn(ground: Ground) -> tuple[int, ...]:
    """Return convolutions that ran without oneDNN although torch would use it; empty if any convolution used it."""
    nodes = []
    for node in ground.computing:
        call = ground.graph.nodes[node].call
        seen_call = ground.traced_calls[node] if ground.traced_calls else None
        if seen_call is None or "conv" not in call.op or not call.inputs or call.inputs[0].dtype != "float32":
            continue
        if OF_ONEDNN in seen_call.inner_operators:
            return ()
        large = (call.inputs[0].elements or 0) > ONEDNN_FROM and len(call.inputs[0].shape or ()) == 4
        if large and not seen_call.inner_operators.isdisjoint(WITHOUT):
            nodes.append(node)
    return tuple(nodes)


def _onednn(ground: Ground, off: tuple[int, ...]) -> Iterator[Advice]:
    if not off:
        change = setting(ground, AS_RUN, OFF)
        if change is not None and change.gain.sure:
            yield _advice(
                ground,
                change,
                f"oneDNN is slower here than torch's own kernels, in {len(change.nodes)} calls in total",
                "torch.backends.mkldnn.enabled = False",
                None,
            )
        return
    change = setting(ground, OFF, nodes=off)
    what = f"oneDNN is switched off: {len(off)} convolutions run without it"
    do = "remove torch.backends.mkldnn.enabled = False (or set it to True)"
    if change is not None:
        if change.gain.sure:
            yield _advice(ground, change, what, do, "onednn=on")
        return
    calls_ns = ground.in_place_ns(off)
    if calls_ns:
        gain = Interval(calls_ns / 1e6, calls_ns / 1e6, calls_ns / 1e6)
        yield Advice(
            "choice",
            what,
            ground.places(dict.fromkeys(off, 1.0)),
            gain,
            True,
            100 * calls_ns / ground.total_ns,
            (f"all of their time in the trace, {calls_ns / 1e6:.3g} ms; not timed with oneDNN yet: --fill 60s",),
            do,
            trial="onednn=on",
        )


def _layouts(ground: Ground) -> Iterator[Advice]:
    plans = {to: layouts.uniform(ground, to) for to in (layouts.LAST, layouts.CONTIGUOUS)}
    to, plan = max(
        ((to, candidate) for to, candidate in plans.items() if candidate is not None),
        key=lambda pair: pair[1].gain.ns,
        default=(layouts.LAST, None),
    )
    mixed = layouts.best(ground)
    if mixed is not None and mixed.gain.sure:
        single = plan.gain.ns if plan is not None and plan.gain.sure else 0.0
        if mixed.gain.ns - single > BETTER * ground.total_ns:
            yield _mixed_advice(ground, mixed, plan)
            return
    if plan is None or not plan.gain.sure:
        return
    last = to == layouts.LAST
    yield _planned(
        ground,
        plan,
        "images are contiguous; channels-last is faster here" if last
        else "images are channels-last; contiguous is faster here",
        "model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)" if last
        else "omit memory_format=torch.channels_last: model.to(memory_format=torch.contiguous_format), and x too",
        "channels_last" if last else None,
    )  # fmt: skip


def _mixed_advice(ground: Ground, plan: layouts.Plan, single: layouts.Plan | None) -> Advice:
    modules = list(dict.fromkeys(ground.graph.nodes[node].module or "the model" for node in plan.changed))
    listing = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    last = layouts.label_of(ground.graph.nodes[plan.changed[0]]) == layouts.CONTIGUOUS
    name = "channels_last" if last else "contiguous_format"
    advice = _planned(
        ground,
        plan,
        f"{len(plan.changed)} calls are faster in another layout than the rest",
        f"convert the input of {listing}: x.contiguous(memory_format=torch.{name}), and convert back after them",
        None,
    )
    single_gain = "nothing" if single is None or single.gain.ns <= 0 else f"{single.gain.ns / 1e6:.3g} ms"
    return Advice(**{**vars(advice), "why": (*advice.why, f"the same layout for all calls gains {single_gain}")})


def _planned(ground: Ground, plan: layouts.Plan, what: str, do: str, trial: str | None) -> Advice:
    gains = {
        node: _ns(ground.timing(node)) - _ns(ground.timing(node, layouts.VARIANTS[1 - _label(ground, node)]))
        for node in plan.changed
    }
    why = [
        f"{len(plan.changed)} calls timed in both layouts, {ground.reference} threads",
        f"{plan.conversions} conversions are subtracted, {plan.converted_ns / 1e6:.3g} ms",
    ]
    if plan.holes:
        why.append(f"{plan.holes} calls are not timed in both, and keep their layout")
    gain, percent = ground.gain(plan.gain, plan.changed)
    return Advice(
        "choice", what, ground.places(gains), gain, False, percent, tuple(why), do,
        trial=trial, by_call=milliseconds(gains), once_ms=plan.converted_ns / 1e6,
    )  # fmt: skip


def _label(ground: Ground, node: int) -> int:
    return layouts.label_of(ground.graph.nodes[node]) or layouts.CONTIGUOUS


def _ns(timing: Timing | None) -> float:
    return 0.0 if timing is None else timing.trimmed_ns or 0.0


def _attention(ground: Ground) -> Iterator[Advice]:
    candidates = [(name, candidate) for name in BACKENDS if (candidate := setting(ground, AS_RUN, name)) is not None]
    if not candidates:
        return
    name, best = max(candidates, key=lambda candidate: candidate[1].gain.ns)
    if best.gain.sure:
        backend, trial = BACKENDS[name]
        yield _advice(
            ground,
            best,
            f"attention is faster with another back end: {backend}",
            f"with torch.nn.attention.sdpa_kernel(SDPBackend.{backend}): ...",
            trial,
        )


def _advice(ground: Ground, change: Setting, what: str, do: str, trial: str | None) -> Advice:
    gain, percent = ground.gain(change.gain, change.nodes)
    why = [
        f"{len(change.nodes)} calls in isolation: {change.before_ns / 1e6:.3g} ms now, {change.after_ns / 1e6:.3g} ms "
        f"with the change, {ground.reference} threads"
    ]
    if change.missing:
        why.append(f"{change.missing} calls are not timed both ways, and keep their time")
    return Advice(
        "choice", what, ground.places(change.gains), gain, False, percent, tuple(why), do,
        trial=trial, by_call=milliseconds(change.gains),
    )  # fmt: skip
