"""The highest rate at which a percentile of the latencies stays within a limit: an interval, not a number.

The rate is doubled or halved until one probe keeps the limit and one breaks it; then the interval is bisected on a
logarithmic scale. A probe runs with new seeds until the interval of the percentile excludes the limit; otherwise it is
undecided: close to the highest rate, no probe of bounded length can decide. So the answer ranges from the highest rate
that kept the limit to the lowest rate that broke it, and undecided rates are in between.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xsp.errors import UsageError
from xsp.evaluate.load.driving import Clock, Serve, drive
from xsp.evaluate.load.latencies import of_percentile
from xsp.evaluate.load.requests import Requests, Times
from xsp.evaluate.load.schedules import SECOND, batched, poisson

Probe = Callable[[float, int], Requests]
"""Called with a rate, in requests per second, and a seed; drives a schedule of that rate."""

SETTLING_SHARE = 0.1
"""Share of a run's requests to drop at its start: the queue begins empty, so their latencies are too short."""

CONFIDENCE = 0.99
"""Confidence of the percentile's interval in one check; a probe is checked several times."""


class LimitStatus(enum.Enum):
    """Whether a rate kept the limit."""

    YES = "held"
    NO = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ProbeResult:
    """A probed rate."""

    rate: float
    status: LimitStatus
    runs: int
    requests: int
    value_ns: int | None
    """The percentile; None if no request ended."""

    low_ns: int | None
    high_ns: int | None
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search; rates are requests per second."""

    low: float | None
    """The highest rate that kept the limit; None if none did."""

    high: float | None
    """The lowest rate above it that broke the limit; None if none did."""

    probes: tuple[ProbeResult, ...]
    share: float
    limit_ns: int
    end_reason: str
    """Why the search ended."""

    @property
    def estimate(self) -> float | None:
        """The rate within the interval that most likely meets the limit; None if an end is open.

        The inverse of a percentile falls about linearly with the rate where a queue causes it (exactly for exponential
        service). A line is fitted to all probes of the interval, each weighted by its number of requests; the result
        is where it crosses the limit, or the middle of the interval if that is outside.
        """
        if self.low is None or self.high is None:
            return None
        interval_probes = [probe for probe in self.probes if self.low <= probe.rate <= self.high and probe.value_ns]
        rates = np.array([probe.rate for probe in interval_probes])
        inverse = np.array([self.limit_ns / (probe.value_ns or 1) for probe in interval_probes])
        weights = np.array([probe.requests for probe in interval_probes], float)
        mean_rate, mean_inverse = np.average(rates, weights=weights), np.average(inverse, weights=weights)
        spread = float((weights * (rates - mean_rate) ** 2).sum())
        slope = float((weights * (rates - mean_rate) * (inverse - mean_inverse)).sum()) / spread if spread else 0.0
        crossing = float(mean_rate + (1 - mean_inverse) / slope) if slope < 0 else 0.0
        return crossing if self.low < crossing < self.high else math.sqrt(self.low * self.high)


def highest_rate(
    probe: Probe,
    limit_ns: int,
    share: float = 0.99,
    first_rate: float = 1.0,
    *,
    tolerance: float = 0.03,
    most_probes: int = 15,
    most_runs: int = 6,
    seed: int = 0,
    least_rate: float = 0.0,
) -> SearchResult:
    """Search for the highest rate at which a percentile stays within a limit.

    Args:
        probe: drives a rate with a seed.
        limit_ns: limit of the percentile.
        share: 0.99 for the 99th percentile.
        first_rate: the first rate to probe.
        tolerance: relative width of the interval at which the search ends.
        most_probes: maximum number of rates to probe.
        most_runs: maximum number of runs per rate, each with a new seed.
        seed: seed of the first run; each further run has the next one.
        least_rate: lowest rate to probe.

    Raises:
        UsageError: an argument is out of range.
    """
    if not (
        first_rate > 0
        and math.isfinite(first_rate)
        and limit_ns > 0
        and 0 < share < 1
        and most_probes > 0
        and most_runs > 0
    ):
        raise UsageError(
            f"a search from {first_rate} requests per second for {limit_ns} ns at the {100 * share:g}th percentile"
        )
    search = _Search(probe, limit_ns, share, tolerance, most_runs, seed)
    reason = f"{most_probes} probes were made"
    rate: float | None = first_rate
    while rate is not None and len(search.probes) < most_probes:
        search.probe(rate)
        if (end_reason := search.end_reason()) is not None:
            reason = end_reason
            break
        rate = search.next_rate
        if rate is not None and rate < least_rate:
            reason = (
                f"at {search.high:.3g} per second hardly any request waits for another one, and the limit is exceeded"
            )
            break
    return SearchResult(search.low, search.high, tuple(search.probes), share, limit_ns, reason)


LEAST_BEYOND = 10
"""Minimum number of a run's requests beyond the percentile: with fewer, its interval has no upper end."""

BEGIN_SHARE = 0.25
"""First rate of a search, as a share of the model's capacity, the rate at which it would always be busy."""

LEAST_SHARE = BEGIN_SHARE / 8
"""Share of the capacity below which a search ends: hardly any request waits there, so lower rates are not faster."""


def least_requests(share: float) -> int:
    """Return the minimum number of requests in a run for the percentile to have an interval."""
    return math.ceil(round(LEAST_BEYOND / (1 - share) / (1 - SETTLING_SHARE), 6))


def drive_to_limit(
    serve: Serve,
    limit_ns: int,
    share: float = 0.99,
    *,
    requests: int = 0,
    batch: int = 1,
    clock: Clock | None = None,
    seed: int = 0,
    most_probes: int = 15,
    on_run: Callable[[float, int], object] | None = None,
) -> tuple[SearchResult, Requests]:
    """Search for the highest rate by driving Poisson arrivals.

    Args:
        serve: as in `xsp.evaluate.load.drive`.
        limit_ns: limit of the percentile.
        share: 0.99 for the 99th percentile.
        requests: requests per run; at least `least_requests`.
        batch: inputs per request.
        clock: real time, if not given.
        seed: seed of the first run.
        most_probes: maximum number of rates to probe.
        on_run: called before each run with its rate and the number of earlier runs.

    Returns:
        The result, and the requests of the last run at its lower end. If no rate kept the limit, they are those of the
        last run at the first rate; if each request alone takes longer than the limit, those of a closed loop, and no
        rate was probed.
    """
    requests = max(requests, least_requests(share))
    clock = clock or Clock()
    idle_requests = drive(batched(10, batch), serve, clock=clock)
    if len(idle_requests) and (fastest := int(idle_requests.latency_ns.min())) > limit_ns:
        reason = f"a request takes at least {fastest / 1e6:.3g} ms even without another one before it"
        return SearchResult(None, None, (), share, limit_ns, reason), idle_requests
    last_requests: dict[float, Requests] = {}
    runs = 0

    def probe(rate: float, seed: int) -> Requests:
        nonlocal runs
        if on_run is not None:
            on_run(rate, runs)
        runs += 1
        last_requests[rate] = drive(poisson(rate, requests, seed, batch), serve, clock=clock)
        return last_requests[rate]

    capacity = SECOND / max(1.0, float(np.median(idle_requests.service_ns)))
    result = highest_rate(
        probe,
        limit_ns,
        share,
        BEGIN_SHARE * capacity,
        most_probes=most_probes,
        seed=seed,
        least_rate=LEAST_SHARE * capacity,
    )
    return result, last_requests[result.probes[0].rate if result.low is None else result.low]


class _Search:
    """The state of a search."""

    def __init__(
        self, probe: Probe, limit_ns: int, share: float, tolerance: float, most_runs: int, seed: int
    ) -> None:  # fmt: skip
        self._probe, self._limit_ns, self._share, self._tolerance = probe, limit_ns, share, tolerance
        self._most_runs, self._seed = most_runs, seed
        self.probes: list[ProbeResult] = []

    def probe(self, rate: float) -> None:
        """Run a rate until its percentile's interval excludes the limit."""
        latencies: list[Times] = []
        runs = requests = 0
        status, reason, percentile = LimitStatus.UNDECIDED, "", None
        while runs < self._most_runs and status is LimitStatus.UNDECIDED:
            run = self._probe(rate, self._seed)
            self._seed += 1
            runs, requests = runs + 1, requests + len(run)
            latencies.append(run.latency_ns[math.floor(SETTLING_SHARE * len(run)) :])
            pooled = np.concatenate(latencies)
            percentile = of_percentile(pooled, self._share, CONFIDENCE) if len(pooled) else None
            if run.is_growing:
                status, reason = LimitStatus.NO, run.stop_reason or ""
            elif percentile is not None and percentile.low_ns is not None and percentile.low_ns > self._limit_ns:
                status = LimitStatus.NO
            elif percentile is not None and percentile.high_ns is not None and percentile.high_ns <= self._limit_ns:
                status = LimitStatus.YES
        if status is LimitStatus.UNDECIDED:
            reason = f"the interval of the percentile contains the limit after {runs} runs"
        value, low, high = (
            (percentile.value_ns, percentile.low_ns, percentile.high_ns)
            if percentile is not None
            else (None, None, None)
        )
        self.probes.append(ProbeResult(rate, status, runs, requests, value, low, high, reason))

    @property
    def low(self) -> float | None:
        """The highest rate that kept the limit, below all that broke it."""
        high = self.high
        return max(
            (
                probe.rate
                for probe in self.probes
                if probe.status is LimitStatus.YES and (high is None or probe.rate < high)
            ),
            default=None,
        )

    @property
    def high(self) -> float | None:
        """The lowest rate that broke the limit."""
        return min((probe.rate for probe in self.probes if probe.status is LimitStatus.NO), default=None)

    @property
    def next_rate(self) -> float | None:
        """The middle of the wider gap next to an end, or a rate beyond the only known end; None if no gap remains."""
        low, high = self.low, self.high
        rates = [probe.rate for probe in self.probes]
        if low is None or high is None:
            return 2 * max(rates) if high is None else min(rates) / 2
        # the unprobed gaps next to both ends; undecided rates are between them
        inner_rates = [probe.rate for probe in self.probes if low < probe.rate < high]
        a, b = max(
            [(low, min(inner_rates)), (max(inner_rates), high)] if inner_rates else [(low, high)],
            key=lambda gap: gap[1] / gap[0],
        )
        return math.sqrt(a * b) if b / a > 1 + self._tolerance / 2 else None

    def end_reason(self) -> str | None:
        """Return why no further probe is needed; None if one is."""
        low, high = self.low, self.high
        if low is None or high is None:
            return None
        if high / low <= 1 + self._tolerance:
            return f"the ends are {100 * (high / low - 1):.1f} % apart"
        if self.next_rate is None:
            return "all rates in between are undecided"
        return None
