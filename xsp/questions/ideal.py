"""Q1: what would be ideal? The ladder of the bound in a few lines: best kernels, ceilings, and the gaps between."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from xsp.advise import AdviceContext, provides
from xsp.bound.ladder import NAMES, Bound, Rung
from xsp.errors import AnalysisError
from xsp.questions.target import reason_without_timings
from xsp.texts import ns_text, share_text

MOST_NAMED = 3
"""Maximum number of differences and of operators that are named."""

MOST_RATIO = 1.2
"""Multiple of the step above which the best kernels are no ideal: timed on a busy machine, or with other layouts."""

LEAST_SHARE = 0.05
"""Minimum share of the step for a difference or operator to be named."""


@provides("ideal")
def ideal(context: AdviceContext) -> tuple[str, ...]:
    """Return lines on how far the step is from the best installed kernels, and where the time is lost.

    Raises:
        AnalysisError: the calls of the device of the step are not timed.
        XspError: there is no bound.
    """
    if (reason := reason_without_timings(context)) is not None:
        raise AnalysisError(reason)
    return tuple(lines(context.bound))


def lines(bound: Bound) -> Iterator[str]:
    """Yield the lines for a bound; nothing if it has no total of timings, or one far above the step."""
    rungs = {rung: bound.rungs[rung.value].sequential for rung in Rung}
    best, as_run = rungs[Rung.BEST], rungs[Rung.AS_RUN]
    step_ns = rungs[Rung.MEASURED] or as_run
    if best is None or as_run is None or not step_ns or best > MOST_RATIO * step_ns:
        return
    coverage = "" if bound.coverage.is_complete else f" (of {bound.coverage.nodes} of {bound.coverage.of_nodes} calls)"
    ceiling = rungs[Rung.CEILING]
    fused = rungs[Rung.FUSED]
    limit = "" if fused is None else f", fused {ns_text(fused)}"
    where = bound.settings.get("device") or "this machine"
    roof = "" if ceiling is None else f"; at the peak rates of {where}, {ns_text(ceiling)}{limit}"
    if "not valid" in bound.absent.get(Rung.CEILING.value, ""):
        roof = "; the step is below the ceilings that were measured here, so measure them again: xsp doctor --measure"
    share = share_text(best / step_ns)
    yield f"ideal {bound.scope}: {ns_text(best)}{coverage}, {share} of the step{roof}"
    differences = [
        difference
        for difference in bound.differences
        if difference.ns >= LEAST_SHARE * step_ns and difference.below not in (Rung.FUSED, Rung.CEILING)
    ]
    differences.sort(key=lambda difference: -difference.ns)
    if differences:
        yield "above it: " + ", ".join(
            f"{difference.name} {ns_text(difference.ns)}" for difference in differences[:MOST_NAMED]
        )
    families = _by_operator(bound)
    largest = [(op, ns) for op, ns in families if ns >= LEAST_SHARE * step_ns][:MOST_NAMED]
    if largest:
        upper = NAMES[_upper_rung(bound)]
        yield f"furthest above their best, {upper}: " + ", ".join(f"{op} {ns_text(ns)}" for op, ns in largest)


def _upper_rung(bound: Bound) -> Rung:
    return Rung.IN_PLACE if any(bound.figures.get(Rung.IN_PLACE.value) or ()) else Rung.AS_RUN


def _by_operator(bound: Bound) -> list[tuple[str, float]]:
    """Return operators with the time of their calls beyond the best, most first, over calls known on both rungs."""
    upper, lower = (bound.figures.get(rung.value) or () for rung in (_upper_rung(bound), Rung.BEST))
    excess: dict[str, list[float]] = defaultdict(list)
    for number, (upper_figure, lower_figure) in enumerate(zip(upper, lower, strict=False)):
        if upper_figure is not None and lower_figure is not None and bound.is_computing[number]:
            op = bound.graph.nodes[number].call.op
            excess[op.rpartition("::")[2].strip("_")].append(upper_figure.ns - lower_figure.ns)
    return sorted(((op, math.fsum(gaps)) for op, gaps in excess.items()), key=lambda entry: -entry[1])
