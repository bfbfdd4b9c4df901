"""Q6: what would reduced precision gain, and do the kernels of a device use tensor cores?

Calls that autocast computes in bfloat16 are timed under it, including casts, and their results are compared with the
original ones; on a GPU also calls in TF32. Reduced precision changes results, and the advice states by how much. For
devices, the analysis `tensor-cores` derives the use of tensor cores from kernel names, and needs only the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xsp.advise import Advice, AdviceContext, Needs, question
from xsp.bench.spec import AS_RUN
from xsp.graph.node import Phase
from xsp.questions.choice import setting
from xsp.questions.timedcalls import TimedGraph, milliseconds

AUTOCAST = "autocast-bfloat16"
TF32 = "tf32"


class Precision(NamedTuple):
    """A precision in which products and convolutions may be computed, in words."""

    what: str
    under: str
    do: str
    trial: str


PRECISIONS = {
    AUTOCAST: Precision(
        "products and convolutions in bfloat16 are faster here than in float32", "under autocast, casts included",
        'with torch.autocast({device}, dtype=torch.bfloat16): ...', "autocast=bfloat16",
    ),
    TF32: Precision(
        "products and convolutions in TF32 are faster here than in float32", "in TF32",
        'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True', "tf32",
    ),
}  # fmt: skip
"""Variant → its words."""


@question("precision", "What would computing in bfloat16 gain?", number="Q6", needs=Needs.BOUND)
def precision(context: AdviceContext) -> Iterator[Advice]:
    """Products and convolutions of float32 under autocast in bfloat16, on a GPU also in TF32, compared with the
    original calls."""
    yield from pieces(context.part("timed-graph"))


def pieces(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield advice on reduced precision, for a graph with timings."""
    for variant in PRECISIONS:
        yield from _piece(timed_graph, variant)


def _piece(timed_graph: TimedGraph, variant: str) -> Iterator[Advice]:
    change, words = setting(timed_graph, AS_RUN, variant), PRECISIONS[variant]
    if change is None or not change.gain.is_gain:
        return
    errors = [
        timing.error_max
        for node in change.nodes
        if (timing := timed_graph.timing(node, variant)) is not None and timing.error_max is not None
    ]
    gain, percent = timed_graph.gain(change.gain, change.nodes)
    worst = f"up to {100 * max(errors):.2g} % of the largest result of a call" if errors else "an unknown amount"
    why = [
        f"{len(change.nodes)} calls in isolation: {change.before_ns / 1e6:.3g} ms in float32, "
        f"{change.after_ns / 1e6:.3g} ms {words.under}, {timed_graph.conditions}"
    ]
    if change.missing_count:
        why.append(f"{change.missing_count} calls are not timed both ways, and keep their time")
    if any(timed_graph.graph.nodes[node].phase is Phase.BACKWARD for node in change.nodes):
        why.append("the backward pass uses the precision of the forward pass")
    yield Advice(
        "precision",
        words.what,
        timed_graph.places(change.gains),
        gain,
        False,
        percent,
        tuple(why),
        words.do.format(device="x.device.type" if timed_graph.on_device else '"cpu"'),
        f"results differ by {worst}, measured call by call on random values",
        option=True,
        trial=words.trial,
        by_call=milliseconds(change.gains),
        side=timed_graph.side,
    )
