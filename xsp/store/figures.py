"""Figures of one span of the merged step, from the timed steps: raw and true time, interval, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xsp import stats
from xsp.levels import depth
from xsp.schema import Kind, Level, Span
from xsp.store import iterations
from xsp.store.reference import MAX_COLD_SHARE, Coldness
from xsp.store.trace import Rung

UNMEASURED = "not measured with its level as the deepest one"
NO_RUNG_OUTSIDE = "no shallower level set to measure the cost of this one"

_QUANTILES = (0.5, 0.9, 0.99)
_MAX_STEPS = 2**31 - 1
"""Maximum number of steps that fits into its column."""


def own_rung(level: int, rungs: Sequence[Rung]) -> Rung | None:
    """Return the rung in which a level is the deepest one that is on; None if no steps were measured there."""
    return next((rung for rung in rungs if rung.level >= max(level, Level.MODEL)), None)


@dataclass
class DurationStats:
    """Statistics of the durations of the spans with one key, in nanoseconds."""

    raw: float | None = None
    """Mean at the deepest rung; None if that rung has no such span."""

    steps: int = 0
    """Number of durations that `mean`, `interval` and `quantiles` are computed from; 0 if the span has no own rung."""

    mean: float = 0.0
    interval: stats.Interval | None = None
    quantiles: tuple[float | None, ...] = (None, None, None)
    """The median, the 90th and the 99th percentile."""

    def set_from_own_rung(self, durations: list[float], interval: stats.Interval | None) -> None:
        """Compute the statistics from the durations at the own rung; `interval` is that of `stats.interval`."""
        self.steps, self.interval = len(durations), interval
        self.mean = interval.value if interval is not None else stats.trimmed_mean(durations)
        self.quantiles = tuple(stats.percentile(durations, quantile) for quantile in _QUANTILES)

    def set_from_bare_steps(self, steps: Sequence[iterations.BareStep]) -> None:
        """Compute the statistics from steady bare steps, in the order in which they ran."""
        self.steps, self.mean = min(iterations.step_count(steps), _MAX_STEPS), iterations.mean_ns(steps)
        self.interval = iterations.bare_interval(steps)
        self.quantiles = tuple(iterations.percentile_ns(steps, share) for share in _QUANTILES)


class Figures(NamedTuple):
    """The values of `MERGED_COLUMNS`, in their order."""

    steps: int
    raw_ns: float | None
    true_ns: float | None = None
    true_lo_ns: float | None = None
    true_hi_ns: float | None = None
    median_ns: float | None = None
    p90_ns: float | None = None
    p99_ns: float | None = None
    explained_ns: float | None = None
    cause: str | None = None


def figures_of(
    span: Span, inner_counts: Mapping[int, int], durations: DurationStats, rungs: Sequence[Rung], min_ns: float
) -> Figures:
    """Return the figures of one span from the timed steps.

    Args:
        span: span of the template.
        inner_counts: number of spans inside it, by the level of the rung that adds them.
        durations: statistics of its counterparts.
        rungs: outermost first.
        min_ns: true time of the spans directly inside it.
    """
    measured_rung = rungs[0] if span.kind == Kind.STEP and rungs else own_rung(span.level, rungs)
    if measured_rung is None or not durations.steps:
        return Figures(0, durations.raw, cause=UNMEASURED)
    median, p90, p99 = durations.quantiles
    if measured_rung.added_ns is None and measured_rung.level > Level.MODEL:
        return Figures(durations.steps, durations.raw, median_ns=median, p90_ns=p90, p99_ns=p99, cause=NO_RUNG_OUTSIDE)
    nested, interval = inner_counts.get(measured_rung.level, 0), durations.interval
    deeper_rungs = [rung for rung in rungs if rung.level > measured_rung.level]
    true = max(min(min_ns, durations.mean), durations.mean - nested * measured_rung.cost_ns)
    low, high = None, None
    if interval is not None:
        low = min(true, max(0.0, interval.low - nested * measured_rung.cost_interval.high))
        high = max(true, interval.high - nested * measured_rung.cost_interval.low)
    explained_ns = nested * measured_rung.cost_ns + sum(
        inner_counts.get(rung.level, 0) * rung.cost_ns for rung in deeper_rungs
    )
    cause = _cause(nested, measured_rung, inner_counts, deeper_rungs)
    return Figures(durations.steps, durations.raw, true, low, high, median, p90, p99, explained_ns, cause)


def on_cold_caches(figures: Figures, cold: Coldness) -> Figures:
    """Return the figures of a span corrected for steps that ran on cold caches.

    The lower end of the interval assumes that the span is slowed as much as its step. If a step is slowed by more than
    `MAX_COLD_SHARE`, the true time of the span is unknown.
    """
    if figures.true_ns is None or cold.ratio <= 1:
        return figures
    if cold.ratio > 1 + MAX_COLD_SHARE:
        reason = f"recorded on cold caches, where a step takes {cold.ratio:.2f} times as long"
        return figures._replace(true_ns=None, true_lo_ns=None, true_hi_ns=None, cause=reason)
    low = figures.true_lo_ns if figures.true_lo_ns is not None else figures.true_ns
    return figures._replace(true_lo_ns=low / cold.ratio, true_hi_ns=figures.true_hi_ns or figures.true_ns)


def _cause(
    nested: int, measured_rung: Rung, inner_counts: Mapping[int, int], deeper_rungs: Sequence[Rung]
) -> str | None:
    """Return the difference between raw and true duration in words; None if nothing explains it."""
    counted = [(nested, measured_rung), *((inner_counts.get(rung.level, 0), rung) for rung in deeper_rungs)]
    parts = [
        f"{count} spans of {depth(rung.level)} at {rung.cost_ns / 1e3:.2f} µs"
        for count, rung in counted
        if count and rung.cost_ns
    ]
    return " + ".join(parts) or None
