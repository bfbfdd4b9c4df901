"""When requests are due. Everything is drawn from one seed before the first request, so it is reproducible.

`online`, `batched` and `multi_stream` are closed loops: a request is due when the previous one has ended, so the
model's speed determines the rate. All others are open loops: requests arrive independently of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsp.errors import UsageError
from xsp.evaluate.load.requests import Times

MOST_REQUESTS = 10_000_000
SECOND = 1_000_000_000
MOST_NS = 1 << 62


@dataclass(frozen=True)
class Schedule:
    """The requests to issue."""

    kind: str
    batch: Times
    """Number of inputs of each request."""

    due_ns: Times | None
    """When each request is due, from the start, in order; None in a closed loop."""

    rate: float | None = None
    """Requests per second, overall; None for a closed loop, and if all are due at once."""

    def __len__(self) -> int:
        return len(self.batch)


def online(requests: int) -> Schedule:
    """Return a schedule of single inputs, one at a time."""
    return _closed("online", requests, 1)


def batched(requests: int, batch: int) -> Schedule:
    """Return a schedule of batches, one at a time."""
    return _closed("batched", requests, batch)


def multi_stream(requests: int, streams: int) -> Schedule:
    """Return a schedule of requests with one input per stream, one at a time (MLPerf's multi-stream)."""
    return _closed("multi-stream", requests, streams)


def offline(inputs: int, batch: int = 1) -> Schedule:
    """Return a schedule of all inputs, due at once, in batches; the last batch has the remainder."""
    _check_count(inputs, "inputs")
    _check_count(batch, "inputs per batch")
    sizes = np.full(math.ceil(inputs / batch), batch, np.int64)
    sizes[-1] = inputs - batch * (len(sizes) - 1)
    return Schedule("offline", sizes, np.zeros(len(sizes), np.int64))


def poisson(rate: float, requests: int, seed: int = 0, batch: int = 1) -> Schedule:
    """Return a schedule of independent arrivals.

    Args:
        rate: mean requests per second.
        requests: number of requests.
        seed: seed of the times between them, which are exponential.
        batch: inputs per request.
    """
    return _poisson("poisson", rate, requests, seed, batch)


def server(rate: float, requests: int, seed: int = 0) -> Schedule:
    """Return a schedule of single inputs that arrive independently (MLPerf's server scenario)."""
    return _poisson("server", rate, requests, seed, 1)


def constant(rate: float, requests: int, batch: int = 1) -> Schedule:
    """Return a schedule of requests at equal intervals."""
    _check_rate(rate)
    sizes = _sizes(requests, batch)
    return Schedule(
        "constant", sizes, _due(np.arange(requests, dtype=np.float64) * min(SECOND / rate, float(MOST_NS))), rate
    )


def burst(rate: float, requests: int, burst_size: int, seed: int = 0, batch: int = 1) -> Schedule:
    """Return a schedule of bursts of requests; the bursts arrive independently.

    Args:
        rate: mean requests per second.
        requests: total number of requests.
        burst_size: requests per burst.
        seed: seed of the times between bursts.
        batch: inputs per request.
    """
    _check_rate(rate)
    _check_count(burst_size, "requests per burst")
    sizes = _sizes(requests, batch)
    starts = _poisson("burst", rate / burst_size, math.ceil(requests / burst_size), seed, 1).due_ns
    assert starts is not None
    return Schedule("burst", sizes, np.repeat(starts, burst_size)[:requests], rate)


def replay(times_s: Sequence[float], batch: Sequence[int] | int = 1, speed: float = 1.0) -> Schedule:
    """Return a schedule of requests at given times.

    Args:
        times_s: times of the requests, in any order; the earliest is the start.
        batch: inputs of each, in the order of the times.
        speed: 2 for twice the rate.

    Raises:
        UsageError: there are no times, or a time is not finite.
    """
    if not speed > 0 or not math.isfinite(speed):
        raise UsageError(f"a replay at {speed} times its speed does not make sense")
    sizes = _sizes(len(times_s), batch)
    times = np.asarray(times_s, float)
    if not np.isfinite(times).all():
        raise UsageError(f"{np.count_nonzero(~np.isfinite(times))} times of the replay are not numbers")
    order = np.argsort(times, kind="stable")
    with np.errstate(over="ignore"):
        due = _due((times[order] - times.min()) / speed * SECOND)
    rate = (len(due) - 1) * SECOND / int(due[-1]) if len(due) > 1 and due[-1] else None
    return Schedule("replay", sizes[order], due, rate)


def _closed(kind: str, requests: int, batch: int) -> Schedule:
    return Schedule(kind, _sizes(requests, batch), None)


def _poisson(kind: str, rate: float, requests: int, seed: int, batch: int) -> Schedule:
    _check_rate(rate)
    sizes = _sizes(requests, batch)
    intervals_ns = np.random.default_rng(seed).exponential(SECOND / rate, requests)
    return Schedule(kind, sizes, _due(np.cumsum(intervals_ns)), rate)


def _due(times: NDArray[np.float64]) -> Times:
    """Return ordered times in nanoseconds as integers.

    Raises:
        UsageError: the last one is too late for a clock.
    """
    if not times[-1] < MOST_NS:
        raise UsageError(f"the last request would be due after {times[-1] / SECOND:.3g} s, which exceeds the clock")
    return np.round(times).astype(np.int64)


def _sizes(requests: int, batch: Sequence[int] | int) -> Times:
    _check_count(requests, "requests")
    sizes = np.full(requests, batch, np.int64) if isinstance(batch, int) else np.asarray(batch, np.int64)
    if len(sizes) != requests:
        raise UsageError(f"{len(sizes)} sizes of batches for {requests} requests: give one for each, or one for all")
    if sizes.min() < 1:
        raise UsageError("a request must have at least one input")
    return sizes


def _check_count(number: int, name: str) -> None:
    if not 1 <= number <= MOST_REQUESTS:
        raise UsageError(f"{number} {name}: give a number from 1 to {MOST_REQUESTS:,}")


def _check_rate(rate: float) -> None:
    if not rate > 0 or not math.isfinite(rate):
        raise UsageError(f"a rate of {rate} requests per second: give a number above 0")
