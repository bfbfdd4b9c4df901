"""When requests are due. Everything is drawn before the first request, from one seed, so it can be drawn again.

`online`, `batched` and `multi_stream` are closed loops: a request is due when the one before it ended, and how long a
model takes decides how many there are. All others are open: requests come when they come.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xsp.errors import UsageError
from xsp.evaluate.load.requests import Times
from xsp.ingest import load as runs
from xsp.schema import Kind

MOST_REQUESTS = 10_000_000
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Schedule:
    """Requests to come."""

    kind: str
    batch: Times
    """Inputs of each request."""

    due_ns: Times | None
    """When each is due, from the begin, in order; None in a closed loop."""

    rate: float | None = None
    """Requests a second, over the whole; None of a closed loop, and where all are due at once."""

    def __len__(self) -> int:
        return len(self.batch)


def online(requests: int) -> Schedule:
    """Return single inputs, one at a time."""
    return _closed("online", requests, 1)


def batched(requests: int, batch: int) -> Schedule:
    """Return batches, one at a time."""
    return _closed("batched", requests, batch)


def multi_stream(requests: int, streams: int) -> Schedule:
    """Return an input of each of so many streams at once, and the next when all ended (MLPerf's multi-stream)."""
    return _closed("multi-stream", requests, streams)


def offline(inputs: int, batch: int = 1) -> Schedule:
    """Return all inputs, due at once, in batches; the last one has what is left."""
    _positive(inputs, "inputs")
    _positive(batch, "inputs of a batch")
    sizes = np.full(math.ceil(inputs / batch), batch, np.int64)
    sizes[-1] = inputs - batch * (len(sizes) - 1)
    return Schedule("offline", sizes, np.zeros(len(sizes), np.int64))


def poisson(rate: float, requests: int, seed: int = 0, batch: int = 1) -> Schedule:
    """Return requests that come independently of each other.

    Args:
        rate: requests a second, on average.
        requests: how many.
        seed: of the times between them, which are exponential.
        batch: inputs of each.
    """
    return _poisson("poisson", rate, requests, seed, batch)


def server(rate: float, requests: int, seed: int = 0) -> Schedule:
    """Return single inputs that come independently of each other (MLPerf's server scenario)."""
    return _poisson("server", rate, requests, seed, 1)


def constant(rate: float, requests: int, batch: int = 1) -> Schedule:
    """Return requests at equal distances."""
    _rate(rate)
    sizes = _sizes(requests, batch)
    return Schedule("constant", sizes, np.round(np.arange(requests) * (SECOND / rate)).astype(np.int64), rate)


def burst(rate: float, requests: int, together: int, seed: int = 0, batch: int = 1) -> Schedule:
    """Return requests that come several at once; the bursts come independently of each other.

    Args:
        rate: requests a second, on average.
        requests: how many in all.
        together: requests of a burst.
        seed: of the times between bursts.
        batch: inputs of a request.
    """
    _rate(rate)
    _positive(together, "requests of a burst")
    sizes = _sizes(requests, batch)
    starts = _poisson("burst", rate / together, math.ceil(requests / together), seed, 1).due_ns
    assert starts is not None
    return Schedule("burst", sizes, np.repeat(starts, together)[:requests], rate)


def replay(times_s: Sequence[float], batch: Sequence[int] | int = 1, speed: float = 1.0) -> Schedule:
    """Return requests at given times.

    Args:
        times_s: of the requests, in any order; the first of them is the begin.
        batch: inputs of each, in the order of the times.
        speed: 2 for twice as many a second.

    Raises:
        UsageError: there are none, or a time that is no number.
    """
    if not speed > 0 or not math.isfinite(speed):
        raise UsageError(f"a replay at {speed} times its speed does not make sense")
    sizes = _sizes(len(times_s), batch)
    times = np.asarray(times_s, float)
    if not np.isfinite(times).all():
        raise UsageError(f"{np.count_nonzero(~np.isfinite(times))} times of the replay are no numbers")
    order = np.argsort(times, kind="stable")
    due = np.round((times[order] - times.min()) / speed * SECOND).astype(np.int64)
    rate = (len(due) - 1) * SECOND / int(due[-1]) if len(due) > 1 and due[-1] else None
    return Schedule("replay", sizes[order], due, rate)


def times_from_file(path: str | os.PathLike[str]) -> list[float]:
    """Return the times of a file, in seconds: a JSON list, or one number a line; empty lines and `#…` are skipped.

    Raises:
        UsageError: it cannot be read, with the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.lstrip().startswith("["):
            return [float(each) for each in json.loads(text)]
    except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise UsageError(f"{os.fspath(path)} holds no times of requests: {error}") from error
    times = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (said := line.partition("#")[0].strip()):
            continue
        try:
            times.append(float(said))
        except ValueError:
            raise UsageError(f"{os.fspath(path)}:{number}: {said[:40]!r} is no time in seconds") from None
    return times


def times_from_run(path: str | os.PathLike[str]) -> list[float]:
    """Return when the steps of a run began, in seconds from the first: of a service, its requests.

    Steps that ran without being recorded count, where the run knows of them.

    Raises:
        As `xsp.load`; UsageError: the run has no steps.
    """
    trace = runs.load(path)
    known = trace.con.execute("SELECT 1 FROM duckdb_columns() WHERE table_name = 'loop' LIMIT 1").fetchall()
    tables = [f"SELECT start_ns FROM spans WHERE kind = '{Kind.STEP}' AND start_ns IS NOT NULL ORDER BY 1"]
    if known:
        tables.insert(0, "SELECT start_ns FROM loop WHERE start_ns IS NOT NULL ORDER BY 1")
    starts = next((found for each in tables if (found := trace.con.execute(each).fetchall())), [])
    if not starts:
        raise UsageError(f"{os.fspath(path)} holds no step, so there is nothing to replay")
    return [(int(each) - int(starts[0][0])) / SECOND for (each,) in starts]


def _closed(kind: str, requests: int, batch: int) -> Schedule:
    return Schedule(kind, _sizes(requests, batch), None)


def _poisson(kind: str, rate: float, requests: int, seed: int, batch: int) -> Schedule:
    _rate(rate)
    sizes = _sizes(requests, batch)
    between = np.random.default_rng(seed).exponential(SECOND / rate, requests)
    return Schedule(kind, sizes, np.round(np.cumsum(between)).astype(np.int64), rate)


def _sizes(requests: int, batch: Sequence[int] | int) -> Times:
    _positive(requests, "requests")
    sizes = np.full(requests, batch, np.int64) if isinstance(batch, int) else np.asarray(batch, np.int64)
    if len(sizes) != requests:
        raise UsageError(f"{len(sizes)} sizes of batches for {requests} requests: give one for each, or one for all")
    if sizes.min() < 1:
        raise UsageError("a request has at least one input")
    return sizes


def _positive(number: int, of: str) -> None:
    if not 1 <= number <= MOST_REQUESTS:
        raise UsageError(f"{number} {of}: give a number from 1 to {MOST_REQUESTS:,}")


def _rate(rate: float) -> None:
    if not rate > 0 or not math.isfinite(rate):
        raise UsageError(f"a rate of {rate} requests a second: give a number above 0")
