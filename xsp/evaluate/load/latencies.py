"""Statistics of a scenario's requests: percentiles with intervals, throughput, lateness, and checks of queueing.

Percentiles are nearest ranks: of n ordered values the one at place ⌈share · n⌉, so each is the latency of a request.
Their intervals are order statistics. Neighbours in a queue wait for similar times, so the number of requests below the
percentile varies more than for independent requests; the means of batches show how much more (`xsp.stats`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsp import stats
from xsp.errors import UsageError
from xsp.evaluate.load.requests import Requests
from xsp.evaluate.load.schedules import SECOND

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
LATENESS_SHARES = (0.5, 0.99, 0.999)
LATE_SHARE = 0.01
"""Lateness of the generator at its 99th percentile, as a share of the median latency, above which a run is marked."""


@dataclass(frozen=True)
class Percentile:
    """A percentile of latencies with its interval, in nanoseconds; an end is None if there are too few requests."""

    share: float
    value_ns: int
    low_ns: int | None
    high_ns: int | None


@dataclass(frozen=True)
class Little:
    """Little's law: requests in the system = their rate × their time in it, between the first and the last arrival.

    The mean number in the system is a time average; the other side is computed from the requests that arrived. They are
    equal except for requests in the system at the end: a ratio other than 1 means a growing queue or a short run.
    """

    in_system: float
    rate_times_latency: float

    @property
    def ratio(self) -> float:
        """`in_system` over `rate_times_latency`."""
        return self.in_system / self.rate_times_latency if self.rate_times_latency else math.nan


@dataclass(frozen=True)
class Summary:
    """Statistics of the latencies of a scenario."""

    requests: int
    inputs: int
    percentiles: tuple[Percentile, ...]
    mean_ns: float
    trimmed_mean_ns: float
    trimmed_mean_interval_ns: stats.Interval | None
    service_ns: float
    """Mean service time of the model."""

    inputs_per_second: float | None
    utilisation: float | None
    """Share of the time in which the servers were busy; None if the requests took no time."""

    lateness_ns: tuple[Percentile, ...]
    """Lateness of the generator, over requests that found a free server: queueing cannot delay these."""

    is_late: bool
    """Whether the lateness exceeds `LATE_SHARE` of the median latency: then latencies include the generator's delay."""

    little: Little | None
    waiting_ns: float
    expected_waiting_ns: float | None
    """For Poisson arrivals at one server with these service times (Pollaczek and Khinchine); None if undefined."""

    stop_reason: str | None

    def percentile(self, share: float) -> Percentile:
        """Return one of the percentiles.

        Raises:
            UsageError: it was not computed.
        """
        for percentile in self.percentiles:
            if percentile.share == share:
                return percentile
        raise UsageError(f"the percentile {100 * share:g} was not requested")


def summarise(requests: Requests, shares: Sequence[float] = SHARES, poisson: bool = False) -> Summary:
    """Return percentiles and other figures of the latencies of requests.

    Args:
        requests: at least one request.
        shares: percentiles to compute, as shares from 0 to 1.
        poisson: whether arrivals were independent, for the waiting time that queueing theory expects.

    Raises:
        UsageError: there are no requests.
    """
    if not len(requests):
        reason = f": {requests.stop_reason}" if requests.stop_reason else ""
        raise UsageError(f"no request ended{reason}")
    latency, service = requests.latency_ns, requests.service_ns
    floats = latency.astype(float).tolist()
    percentiles = tuple(of_percentile(latency, share) for share in shares)
    lateness = requests.lateness_ns
    lateness_percentiles = tuple(
        of_percentile(lateness[lateness > 0] if (lateness > 0).any() else lateness, share) for share in LATENESS_SHARES
    )
    span = int(requests.end_ns.max() - requests.due_ns.min())
    return Summary(
        requests=len(requests),
        inputs=int(requests.batch.sum()),
        percentiles=percentiles,
        mean_ns=float(latency.mean()),
        trimmed_mean_ns=stats.trimmed_mean(floats),
        trimmed_mean_interval_ns=stats.drifting_interval(floats),
        service_ns=float(service.mean()),
        inputs_per_second=int(requests.batch.sum()) * SECOND / span if span else None,
        utilisation=float(service.sum()) / (span * requests.servers) if span else None,
        lateness_ns=lateness_percentiles,
        is_late=requests.is_open_loop and lateness_percentiles[1].value_ns > LATE_SHARE * nearest_rank(latency, 0.5),
        little=little(requests),
        waiting_ns=float(requests.waiting_ns.mean()),
        expected_waiting_ns=_expected_waiting(requests) if poisson else None,
        stop_reason=requests.stop_reason,
    )


def nearest_rank(values: NDArray[np.int64], share: float) -> int:
    """Return a percentile that is one of the values.

    Raises:
        UsageError: there are no values, or the share is not between 0 and 1.
    """
    _check_percentile(values, share)
    return int(np.partition(values, index := stats.nearest_rank(len(values), share))[index])


def of_percentile(values: NDArray[np.int64], share: float, confidence: float = stats.CONFIDENCE) -> Percentile:
    """Return a percentile with its interval.

    Args:
        values: in the order of measurement; at least one.
        share: 0.99 for the 99th.
        confidence: confidence level of the interval.
    """
    _check_percentile(values, share)
    low, value, high = stats.percentile_interval(values, share, confidence)
    return Percentile(share, int(value), None if low is None else int(low), None if high is None else int(high))


def _check_percentile(values: NDArray[np.int64], share: float) -> None:
    if not len(values) or not 0 < share <= 1:
        raise UsageError(f"the percentile {100 * share:g} of {len(values)} values does not exist")


def little(requests: Requests) -> Little | None:
    """Return both sides of Little's law; None for a closed loop, and if all requests were due at once."""
    first_ns, last_ns = int(requests.due_ns[0]), int(requests.due_ns[-1])
    if last_ns == first_ns or not requests.is_open_loop:
        return None
    before_last = requests.due_ns < last_ns  # the last one arrives as the window ends
    times = np.concatenate([requests.due_ns, requests.end_ns])
    changes = np.concatenate([np.ones(len(requests)), -np.ones(len(requests))])
    order = np.argsort(times, kind="stable")
    times, population = np.clip(times[order], first_ns, last_ns), np.cumsum(changes[order])
    in_system = float((population[:-1] * np.diff(times)).sum()) / (last_ns - first_ns)
    return Little(in_system, float(requests.latency_ns[before_last].sum()) / (last_ns - first_ns))


def _expected_waiting(requests: Requests) -> float | None:
    """Return λ·E[S²] / (2·(1 − ρ)): the mean waiting time at one server with independent arrivals."""
    span = int(requests.due_ns[-1] - requests.due_ns[0])
    if requests.servers != 1 or span <= 0:
        return None
    rate, service = (len(requests) - 1) / span, requests.service_ns.astype(float)
    utilisation = rate * float(service.mean())
    return rate * float((service**2).mean()) / (2 * (1 - utilisation)) if utilisation < 1 else None
