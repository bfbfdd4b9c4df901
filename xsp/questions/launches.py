"""Q4: does the host issue a step as fast as the device does it? Otherwise a capture of the step shortens it."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.advise import Advice, AdviceContext, Interval, Needs, question
from xsp.advise.advice import CoveredElsewhere
from xsp.bound.ladder import WORTH_A_CAPTURE
from xsp.device import devices
from xsp.errors import AnalysisError
from xsp.graph.node import NodeKind
from xsp.questions.timedcalls import ALLOWANCE, TimedGraph
from xsp.texts import ns_text


@question("launches", "Does the host issue a step as fast as the device does it?", number="Q4", needs=Needs.BOUND)
def launches(context: AdviceContext) -> Iterator[Advice]:
    """The step of a model on an accelerator, waited for, against the same step captured once and replayed, which needs
    the host for one launch; a trace has the question `device-idle`."""
    timed_graph: TimedGraph = context.part("timed-graph")
    if context.trace is not None or not timed_graph.on_device:
        raise CoveredElsewhere("a trace and a step on the processor have other questions on the host")
    yield from pieces(timed_graph)


def pieces(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield advice on a step whose whole time is known.

    Raises:
        AnalysisError: the whole step was not timed.
    """
    whole = timed_graph.whole_step
    if whole is None:
        raise AnalysisError(f"the whole step is not timed; {timed_graph.remedy}")
    if whole.ns < WORTH_A_CAPTURE * whole.device_ns:
        return
    kind = str((timed_graph.timings.environment.device or {}).get("kind"))
    gain_ns, half_ns = whole.ns - whole.device_ns, ALLOWANCE * whole.ns
    subject = "the captured step" if whole.is_replayed else "all of its calls alone"
    yield Advice(
        "launches",
        f"the device waits for the host {ns_text(gain_ns)} of a step: the host issues it in {ns_text(whole.issue_ns)}",
        (),
        Interval((gain_ns - half_ns) / 1e6, gain_ns / 1e6, min(gain_ns + half_ns, whole.ns) / 1e6),
        not whole.is_replayed,
        100 * gain_ns / whole.ns,
        (f"a step that is waited for takes {ns_text(whole.ns)}, {subject} {ns_text(whole.device_ns)}",),
        f"{_first(timed_graph)}capture the step once and replay it{devices.captured_by(kind)}; or a larger batch",
    )


def _first(timed_graph: TimedGraph) -> str:
    """Return what has to precede a capture: no capture holds a call that reads a value."""
    reads = {node.call.op.partition("::")[2] for node in timed_graph.graph.nodes if node.kind is NodeKind.SYNC}
    return f"keep on the device what the step reads ({', '.join(sorted(reads))}), then " if reads else ""
