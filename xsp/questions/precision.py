"""Q6: what would reduced precision gain, and do the kernels of a device use tensor cores?

On a processor, calls that autocast computes in bfloat16 are timed under it, including casts, and their results are
compared with the original ones. Reduced precision changes results, and the advice states by how much. For devices, the
analysis `tensor-cores` derives the use of tensor cores from kernel names, and needs only the trace.
"""

from __future__ import annotations

from collections.abc import Iterator

from xsp.advise import Advice, AdviceContext, Needs, question
from xsp.bench.spec import AS_RUN
from xsp.graph.node import Phase
from xsp.questions.choice import setting
from xsp.questions.timedcalls import TimedGraph, milliseconds

AUTOCAST = "autocast-bfloat16"


@question("precision", "What would computing in bfloat16 gain?", number="Q6", needs=Needs.BOUND)
def precision(context: AdviceContext) -> Iterator[Advice]:
    """Products and convolutions of float32 under autocast in bfloat16, compared with the original calls."""
    yield from pieces(context.part("timed-graph"))


def pieces(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield advice on reduced precision, for a graph with timings."""
    change = setting(timed_graph, AS_RUN, AUTOCAST)
    if change is None or not change.gain.is_gain:
        return
    errors = [
        timing.error_max
        for node in change.nodes
        if (timing := timed_graph.timing(node, AUTOCAST)) is not None and timing.error_max is not None
    ]
    gain, percent = timed_graph.gain(change.gain, change.nodes)
    worst = f"up to {100 * max(errors):.2g} % of the largest result of a call" if errors else "an unknown amount"
    why = [
        f"{len(change.nodes)} calls in isolation: {change.before_ns / 1e6:.3g} ms in float32, "
        f"{change.after_ns / 1e6:.3g} ms under autocast, casts included, {timed_graph.reference} threads"
    ]
    if change.missing_count:
        why.append(f"{change.missing_count} calls are not timed both ways, and keep their time")
    if any(timed_graph.graph.nodes[node].phase is Phase.BACKWARD for node in change.nodes):
        why.append("the backward pass uses the precision of the forward pass")
    yield Advice(
        "precision",
        "products and convolutions in bfloat16 are faster here than in float32",
        timed_graph.places(change.gains),
        gain,
        False,
        percent,
        tuple(why),
        'with torch.autocast("cpu", dtype=torch.bfloat16): ...',
        f"results differ by {worst}, measured call by call on random values",
        option=True,
        trial="autocast=bfloat16",
        by_call=milliseconds(change.gains),
    )
