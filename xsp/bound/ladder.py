"""The ladder: the time of a step if only its calls took time, rung by rung, up to the measured time.

| rung | time of a call | the difference to the rung below |
|---|---|---|
| fused ceiling | as in the one above, without moving results from call to call (`xsp.bound.fused`) | |
| ceiling | the longer of FLOPs at the peak and of bytes at the bandwidth | intermediate results |
| best | the shortest of the timed variants | kernel efficiency |
| as run | the variant that the framework uses, timed alone | choice of algorithm, layout and threads |
| blocks | as part of a block of several calls | neighbours |
| with framework | plus calls of modules and views, at the time of empty ones | framework |
| in place | its time in the trace (used instead of timings if there are none) | kernel efficiency |
| replayed | on an accelerator: the step captured once and replayed, without the host | neighbours |
| issued | on an accelerator: the longer of what it and of what the host needs for the step | launches |
| measured | the true step of the trace | page faults, where they were counted; waiting and interference |

All rungs but the lowest add up single calls: the ceiling of a call contains the bytes of its intermediate results, and
the others are times of the installed kernels. Fused calls, as by `torch.compile`, can take less than any of them, but
not less than the fused ceiling (`scope`).

Figures are multiples of 1/`PARTS` ns, so the differences add up exactly.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from xsp.bench.spec import Loss
from xsp.bound import totals
from xsp.bound.join import Join
from xsp.bound.totals import Coverage, Figure, Total
from xsp.device import devices
from xsp.graph.node import Graph
from xsp.stats import known_sum
from xsp.texts import ns_text


class Rung(str, enum.Enum):
    """A rung of the ladder, lowest first."""

    FUSED = "fused_ceiling"
    CEILING = "ceiling"
    BEST = "best"
    AS_RUN = "as_run"
    BLOCKS = "blocks"
    FRAMEWORK = "with_framework"
    IN_PLACE = "in_place"
    REPLAYED = "replayed"
    ISSUED = "issued"
    MEASURED = "measured"


NAMES: Mapping[Rung, str] = {
    Rung.FUSED: "fused ceiling", Rung.CEILING: "ceiling", Rung.BEST: "best", Rung.AS_RUN: "as run",
    Rung.BLOCKS: "blocks", Rung.FRAMEWORK: "with framework", Rung.IN_PLACE: "in place", Rung.REPLAYED: "replayed",
    Rung.ISSUED: "issued", Rung.MEASURED: "measured",
}  # fmt: skip

BY_NODE = (Rung.CEILING, Rung.BEST, Rung.AS_RUN, Rung.IN_PLACE)
"""Rungs with a figure for each node."""

PARTS = 1024
"""Parts of a nanosecond: a power of 2, so that sums are exact, and fine enough for the ceiling of a tiny call."""

INTERMEDIATE = "intermediate results"
KERNEL = "kernel efficiency"
CHOICE = "choice of algorithm"
NEIGHBOURS = "neighbours"
FRAMEWORK = "framework"
WAITING = "waiting and interference"
PAGE_FAULTS = "page faults"
LAUNCHES = "launches"
"""Time by which the host needs longer to issue a step than the device to do it."""

IN_PLACE = "in place"
"""Time of a call in the trace beyond its timing alone."""

SCOPES = {
    "torch": "call by call, with PyTorch's own kernels", "onnxruntime": "node by node, with ONNX Runtime's kernels",
}  # fmt: skip
"""What the figures of a bound are about, by the runtime of its timings."""

ORDER = (INTERMEDIATE, KERNEL, CHOICE, NEIGHBOURS, FRAMEWORK, IN_PLACE, LAUNCHES, PAGE_FAULTS, WAITING)
"""Names of differences from the ceiling up."""

_DIFFERENCE_NAMES: Mapping[tuple[Rung, Rung], str] = {
    (Rung.FUSED, Rung.CEILING): INTERMEDIATE,
    (Rung.FUSED, Rung.MEASURED): "kernel efficiency and waiting",
    (Rung.CEILING, Rung.BEST): KERNEL,
    (Rung.CEILING, Rung.IN_PLACE): KERNEL,
    (Rung.BEST, Rung.AS_RUN): CHOICE,
    (Rung.AS_RUN, Rung.BLOCKS): NEIGHBOURS,
    (Rung.AS_RUN, Rung.FRAMEWORK): FRAMEWORK,
    (Rung.BLOCKS, Rung.FRAMEWORK): FRAMEWORK,
    (Rung.FRAMEWORK, Rung.MEASURED): WAITING,
    (Rung.AS_RUN, Rung.IN_PLACE): IN_PLACE,
    (Rung.IN_PLACE, Rung.MEASURED): "framework and waiting",
    (Rung.AS_RUN, Rung.MEASURED): "framework and waiting",
    (Rung.BLOCKS, Rung.MEASURED): "framework and waiting",
    (Rung.AS_RUN, Rung.REPLAYED): NEIGHBOURS,
    (Rung.BLOCKS, Rung.REPLAYED): NEIGHBOURS,
    (Rung.IN_PLACE, Rung.REPLAYED): NEIGHBOURS,
    **{(rung, Rung.ISSUED): LAUNCHES for rung in (Rung.AS_RUN, Rung.BLOCKS, Rung.IN_PLACE, Rung.REPLAYED)},
    (Rung.REPLAYED, Rung.MEASURED): "launches and waiting",
    (Rung.ISSUED, Rung.MEASURED): WAITING,
}

_CACHES = {"warm": "with warm caches", "chain": "with the caches of a step"}
"""States of the caches in words; with cold ones there is nothing to compare."""

WORTH_A_CAPTURE = 1.05
"""Measured step ÷ work of the device, below which a capture gives nothing worth its trouble."""

Figures = Sequence[Figure | None]


def difference_name(below: Rung, above: Rung) -> str:
    """Return the name of the difference between two rungs."""
    return _DIFFERENCE_NAMES.get((below, above), f"{NAMES[below]} to {NAMES[above]}")


@dataclass(frozen=True)
class LadderDifference:
    """A named difference between two rungs; all differences add up to the highest minus the lowest rung."""

    name: str
    below: Rung
    above: Rung
    ns: float
    half_ns: float | None = None
    """Half of the 95 % interval; None if unknown."""

    calls: int | None = None
    """Number of calls, for a difference of calls with a figure on only one of the two rungs; else None."""


@dataclass(frozen=True)
class LadderLayer:
    """A module, or an operator if the source has no modules, with the time of its calls on each rung."""

    name: str
    nodes: tuple[int, ...]
    ns: Mapping[Rung, float | None]
    """Time of all its computing calls by rung; None if one is unknown."""

    differences: tuple[tuple[str, float], ...]
    """Named differences of the calls with figures on both rungs, largest first."""


@dataclass(frozen=True)
class Hole:
    """Calls of an operator without a time, with the reason."""

    op: str
    reason: str
    calls: int
    expected_ns: float | None
    """Expected time of all these calls; None if unknown."""


@dataclass(frozen=True)
class Bound:
    """Estimates of the time of a step, and their differences. Times are nanoseconds."""

    graph: Graph
    rungs: Mapping[str, Total]
    """Totals by the names of `Rung`; without a figure if `absent` has a reason."""

    figures: Mapping[str, tuple[Figure | None, ...]]
    """Figures of each node, by rung."""

    is_computing: tuple[bool, ...]
    """Whether each node computes."""

    differences: tuple[LadderDifference, ...]
    layers: tuple[LadderLayer, ...]
    """Layers, the largest differences first."""

    holes: tuple[Hole, ...]
    """Holes of the timings, or of the ceilings if there are no timings; the longest expected time first."""

    absent: Mapping[str, str] = field(default_factory=dict)
    """Rung → why it has no figure."""

    join: Join | None = None
    below_ceiling: int = 0
    """Number of calls that were timed below their ceiling."""

    problems: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    untimed_reason: str = ""
    """The most frequent reason why calls that were tried have no timing; empty if none was tried in vain."""

    loss: Loss | None = None
    """The device, if it was lost while calls were timed for this bound."""

    @property
    def coverage(self) -> Coverage:
        """Coverage of the graph by timings, or by ceilings if there are no timings."""
        by_timings = self.rungs[Rung.AS_RUN.value].coverage
        return by_timings if by_timings.nodes else self.rungs[Rung.CEILING.value].coverage

    @property
    def ladder(self) -> list[Rung]:
        """The rungs of the ladder that have a total, lowest first."""
        is_timed = self.rungs[Rung.AS_RUN.value].sequential is not None
        omitted = Rung.IN_PLACE if is_timed else Rung.FRAMEWORK
        return [rung for rung in Rung if rung is not omitted and self.rungs[rung.value].sequential is not None]

    @property
    def limit_text(self) -> str:
        """What limits a step on an accelerator, and what its capture would give; empty if that is unknown."""
        totals_ns = {rung: self.rungs[rung.value].sequential for rung in Rung}
        step_ns, issue_ns = totals_ns[Rung.MEASURED], self.settings.get("issue_ns")
        works = ((Rung.REPLAYED, "the device"), (Rung.IN_PLACE, "the device"), (Rung.AS_RUN, "its calls alone"))
        known = ((ns, what) for rung, what in works if (ns := totals_ns[rung]))
        work_ns, what = next(known, (0.0, ""))
        if not step_ns or not work_ns or issue_ns is None:
            return ""
        if step_ns < WORTH_A_CAPTURE * work_ns:
            largest = max(self.differences, key=lambda difference: difference.ns)
            most = f"; the largest difference is {largest.name}, {ns_text(largest.ns)}"
            return f"the device limits: {what} {ns_text(work_ns)} of {ns_text(step_ns)}{most}"
        how, times = devices.captured_by(str(self.settings.get("device_kind"))), step_ns / work_ns
        if issue_ns > work_ns:
            needs = f"it takes {ns_text(issue_ns)} to issue the step, and {what} {ns_text(work_ns)}"
            return f"the host limits: {needs}; capture it{how}: up to {times:.1f} times as fast"
        waits = f"the device waits {ns_text(step_ns - work_ns)} of {ns_text(step_ns)}"
        return f"{waits}; capture it{how}: up to {times:.2f} times as fast"

    @property
    def energy_text(self) -> str:
        """What an accelerator uses per step, and captured; empty without a counter of energy."""
        joules, captured = self.settings.get("joules"), self.settings.get("replayed_joules")
        if joules is None:
            return ""
        less = "" if captured is None else f"; captured {captured:.3g} J"
        return f"energy: {joules:.3g} J a step that is waited for, {self.settings['watts']:.0f} W{less}"

    @property
    def caches_text(self) -> str:
        """What the calls alone take with cold caches, and how much of a longer replayed step they explain; or empty."""
        state, cold_ns = str(self.settings.get("state")), self.settings.get("as_run_cold_ns")
        alone_ns, replayed_ns = (self.rungs[rung.value].sequential for rung in (Rung.AS_RUN, Rung.REPLAYED))
        if cold_ns is None or alone_ns is None or cold_ns <= alone_ns or state not in _CACHES:
            return ""
        alone = f"its calls alone take {ns_text(alone_ns)} {_CACHES[state]}, {ns_text(cold_ns)} with cold ones"
        if replayed_ns is None or replayed_ns <= alone_ns:
            return alone
        most_ns, more_ns = cold_ns - alone_ns, replayed_ns - alone_ns
        explained = "all of" if most_ns >= more_ns else f"up to {ns_text(most_ns)} of"
        return f"{alone}: they explain {explained} the {ns_text(more_ns)} that the replayed step takes longer"

    @property
    def scope(self) -> str:
        """What the figures above the fused ceiling are about: single calls, and the kernels that the timings are of."""
        return SCOPES.get(str(self.settings.get("runtime")), "call by call")

    @property
    def scope_note(self) -> str:
        """The scope, and the least time of fused calls if it is known."""
        least = self.rungs[Rung.FUSED.value].sequential
        return f"{self.scope}; fused calls {'can take less' if least is None else f'at least {ns_text(least)}'}"

    @property
    def ratio(self) -> float | None:
        """Best over measured time: Benanza's ratio, whose inverse is the potential speed-up; None if one is unknown."""
        best, step = (self.rungs[rung.value].sequential for rung in (Rung.BEST, Rung.MEASURED))
        return None if best is None or not step else best / step


def quantized(figure: Figure | None) -> Figure | None:
    """Return a figure rounded to multiples of 1/`PARTS` ns, so that sums and differences are exact."""
    if figure is None:
        return None
    threads = {count: round(ns * PARTS) / PARTS for count, ns in figure.threads.items()}
    return Figure(round(figure.ns * PARTS) / PARTS, figure.half_ns, figure.key, threads)


def differences(
    order: Sequence[Rung],
    rungs: Mapping[str, Total],
    figures: Mapping[str, Figures],
    is_computing: Sequence[bool],
    unattributed_ns: float = 0.0,
    page_faults: Figure | None = None,
) -> list[LadderDifference]:
    """Return the named differences between neighbours of a ladder; their sum is exactly its last minus its first rung.

    Calls with a figure on only one of two rungs are a separate difference. So is device work that belongs to no call
    (`unattributed_ns`), between the calls in place and the whole step; and the time of page faults, between timings in
    isolation and the whole step, as far as the difference is that large.
    """
    result = []
    for below, above in pairwise(order):
        low, high = rungs[below.value], rungs[above.value]
        assert low.sequential is not None
        assert high.sequential is not None
        name = difference_name(below, above)
        if below not in BY_NODE or above not in BY_NODE:
            half = None if low.half_ns is None or high.half_ns is None else math.hypot(low.half_ns, high.half_ns)
            unattributed = float(round(unattributed_ns)) if below is Rung.IN_PLACE else 0.0
            if unattributed:
                result.append(LadderDifference("device work outside calls", below, above, unattributed))
            if page_faults is not None and above is Rung.MEASURED and below is not Rung.IN_PLACE:
                fault_ns = float(round(min(page_faults.ns, max(0.0, high.sequential - low.sequential))))
                if fault_ns:
                    result.append(LadderDifference(PAGE_FAULTS, below, above, fault_ns, page_faults.half_ns))
                    half = None if half is None else math.hypot(half, page_faults.half_ns)
                    unattributed += fault_ns
            result.append(LadderDifference(name, below, above, high.sequential - low.sequential - unattributed, half))
            continue
        low_figures, high_figures = (
            _computing_figures(figures[below.value], is_computing),
            _computing_figures(figures[above.value], is_computing),
        )
        pairs = [(a, b) for a, b in zip(low_figures, high_figures, strict=True) if a is not None and b is not None]
        deltas = [
            Figure(b.ns - a.ns, 0.0 if a == b else math.hypot(a.half_ns, b.half_ns), b.key or a.key) for a, b in pairs
        ]
        result.append(
            LadderDifference(name, below, above, math.fsum(delta.ns for delta in deltas), totals.half(deltas))
        )
        for sign, present, opposite, rung in (
            (1, high_figures, low_figures, below),
            (-1, low_figures, high_figures, above),
        ):
            unmatched = [a for a, b in zip(present, opposite, strict=True) if a is not None and b is None]
            if unmatched:
                label = f"calls without {_WITHOUT[rung]}"
                ns = sign * math.fsum(figure.ns for figure in unmatched)
                result.append(LadderDifference(label, below, above, ns, totals.half(unmatched), len(unmatched)))
        remainder = (
            high.sequential
            - low.sequential
            - math.fsum(
                difference.ns for difference in result if (difference.below, difference.above) == (below, above)
            )
        )
        if remainder:
            result.append(LadderDifference("work outside the graph", below, above, remainder))
    return result


_WITHOUT = {
    Rung.CEILING: "a ceiling", Rung.BEST: "a timing", Rung.AS_RUN: "a timing", Rung.IN_PLACE: "a place in the trace",
}  # fmt: skip


def _computing_figures(figures: Figures, is_computing: Sequence[bool]) -> list[Figure | None]:
    return [figure if computes else None for figure, computes in zip(figures, is_computing, strict=True)]


def layers(graph: Graph, figures: Mapping[str, Figures], is_computing: Sequence[bool]) -> list[LadderLayer]:
    """Return the modules of a graph (operators, if it has no modules), largest difference first.

    A layer that is faster than its ceiling has none: that ceiling is not valid.
    """
    has_modules = any(node.module for node in graph.nodes)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if is_computing[index]:
            groups[(node.module or "(outermost module)") if has_modules else node.call.op].append(index)
    rungs = [rung for rung in BY_NODE if any(figures.get(rung.value) or ())]
    result = [_layer(name, numbers, rungs, figures) for name, numbers in groups.items()]
    return sorted(result, key=_difference_then_time)


def _difference_then_time(layer: LadderLayer) -> tuple[float, float]:
    """Return a sort key: largest difference first, then largest time first."""
    return -max((ns for _, ns in layer.differences), default=0.0), -max(filter(None, layer.ns.values()), default=0.0)


def _layer(name: str, numbers: list[int], rungs: Sequence[Rung], figures: Mapping[str, Figures]) -> LadderLayer:
    ns: dict[Rung, float | None] = {}
    for rung in rungs:
        rung_figures = (figures[rung.value][number] for number in numbers)
        ns[rung] = known_sum(None if figure is None else figure.ns for figure in rung_figures)
    ceiling_ns, others = ns.get(Rung.CEILING), [time for rung, time in ns.items() if rung is not Rung.CEILING]
    if ceiling_ns is not None and any(time is not None and time < ceiling_ns for time in others):
        ns[Rung.CEILING] = None
        rungs = [rung for rung in rungs if rung is not Rung.CEILING]
    deltas = []
    for below, above in pairwise(rungs):
        pairs = [(figures[below.value][number], figures[above.value][number]) for number in numbers]
        times = [b.ns - a.ns for a, b in pairs if a is not None and b is not None]
        if times:
            deltas.append((difference_name(below, above), math.fsum(times)))
    return LadderLayer(name, tuple(numbers), ns, tuple(sorted(deltas, key=lambda delta: -delta[1])))
