"""How late is the load generator, does a stall show as theory predicts, and does the search find the highest rate?

Lateness: requests arrive independently, 1,000 per second, at a function that does nothing, and at one that computes in
Python for half of the time. Lateness is measured on requests that found the server free. A spinning thread loses time
when other processes take its core, so run this on a quiet machine.

Stall: 10,000 requests, 1,000 per second, 0.1 ms each, and one that takes a second. For an open loop, theory predicts
how many requests wait and how long: 1,111, the k-th of them 1,000 - 0.9·k ms. A closed loop sees one slow request.

Search: simulated servers with exponential and with constant service times, whose highest rates are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from parts import turns

from xsp.evaluate.load import Requests, VirtualClock, drive, latencies, schedules, search, simulate

RATE = 1000.0
MS = 1_000_000
COLUMNS = ("what", "found", "expected", "more")

Serve = Callable[[int, int], object]


def nothing(number: int, batch: int) -> None:
    """Serve a request in no time."""


def half(number: int, batch: int) -> None:
    """Compute in Python, holding the GIL, for half of the time between requests."""
    end_ns = time.perf_counter_ns() + MS // 2
    while time.perf_counter_ns() < end_ns:
        pass


def lateness(report: turns.Report, name: str, serve: Serve, requests: int, rounds: int, seed: int) -> None:
    """Add the generator's lateness: the median over several runs of the percentiles of each."""
    runs = [latencies.summarise(drive(schedules.poisson(RATE, requests, seed + n), serve)) for n in range(rounds)]
    p50, p99, p999 = (
        turns.middle([run.lateness_ns[place].value_ns / 1000 for run in runs]) for place in range(3)
    )  # fmt: skip
    report.add(
        [f"lateness, {name}", f"{p999.text(0)} µs", "at most 1,000 µs", f"p50 {p50.text(1)}, p99 {p99.text(1)} µs"],
        p50_us=p50, p99_us=p99, p999_us=p999, requests=requests,
        late=[run.is_late for run in runs],
    )  # fmt: skip


def stalled(schedule: schedules.Schedule) -> Requests:
    """Serve a schedule in which one request takes a second and all others 0.1 ms."""
    clock = VirtualClock()
    return drive(schedule, lambda number, batch: clock.advance(1000 * MS if number == 5000 else MS // 10), clock=clock)


def stall(report: turns.Report) -> None:
    """Add the latencies of both loops around a stall of a second; exact, since time is simulated."""
    for name, schedule in (("open", schedules.constant(RATE, 10_000)), ("closed", schedules.online(10_000))):
        run = stalled(schedule)
        slow, p99 = int((run.latency_ns > MS).sum()), latencies.nearest_rank(run.latency_ns, 0.99) / MS
        expected = "1,110 slow, p99 910 ms" if name == "open" else "p99 0.1 ms: the stall is not seen"
        report.add([f"stall, {name} loop", f"{slow:,} slow, p99 {p99:.4g} ms", expected, ""], slow=slow, p99_ms=p99)


def one_server(exponential: bool, requests: int) -> Callable[[float, int], Requests]:
    """Return a probe of a simulated server that takes 1 ms on average."""

    def probe(rate: float, seed: int) -> Requests:
        draw = np.random.default_rng([seed, 1])
        service = draw.exponential(MS, requests) if exponential else np.full(requests, MS)
        return simulate(schedules.poisson(rate, requests, seed), service.astype(np.int64))

    return probe


def waits_within(rate: float, ms: int) -> float:
    """Return the share of requests that wait at most `ms` ms, an integer, in M/D/1 with 1 ms of service (Erlang)."""
    load = rate / 1000
    terms = [(load * (k - ms)) ** k / math.factorial(k) * math.exp(-load * (k - ms)) for k in range(ms + 1)]
    return (1 - load) * math.fsum(terms)


def constant_truth(limit_ms: int, share: float) -> float:
    """Return the rate at which M/D/1 with 1 ms of service just meets a limit on the latency."""
    low, high = 1.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if waits_within(middle, limit_ms - 1) > share else (low, middle)
    return low


def searches(report: turns.Report, rounds: int, seed: int) -> None:
    """Add the errors of the rates that the search finds, against the known rates."""
    for name, exponential, limit, share in (
        ("M/M/1, p99 20 ms", True, 20, 0.99),
        ("M/M/1, p90 10 ms", True, 10, 0.9),
        ("M/D/1, p99 10 ms", False, 10, 0.99),
        ("M/D/1, p90 4 ms", False, 4, 0.9),
    ):
        truth = 1000 + 1000 * math.log(1 - share) / limit if exponential else constant_truth(limit, share)
        probe = one_server(exponential, 12_000)
        results = [search.highest_rate(probe, limit * MS, share, 60.0, seed=seed + 1000 * n) for n in range(rounds)]
        max_error = max(abs((result.estimate or 0) / truth - 1) for result in results)
        covered = sum((result.low or 0) <= truth <= (result.high or math.inf) for result in results)
        report.add(
            [f"search, {name}", f"off by {100 * max_error:.1f} % at most", "at most 5 %, in 15 probes",
             f"interval holds {truth:.1f}/s in {covered} of {rounds}, "
             f"probes {max(len(result.probes) for result in results)}"],
            truth=truth, estimates=[result.estimate for result in results], held=covered,
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=5), arguments)
    report = turns.Report("load_generator", "Loads of evaluations: lateness, stalls, and the highest rate", COLUMNS)
    requests = 2_000 if options.quick else 20_000
    lateness(report, "idle", nothing, requests, options.rounds, options.seed)
    lateness(report, "half busy in Python", half, requests, options.rounds, options.seed)
    stall(report)
    searches(report, 2 if options.quick else 20, options.seed)
    report.notes += [
        "Lateness: the 99.9th percentile, nearest rank, of requests that found the server idle.",
        "Slow: above 1 ms. Stall and search run in simulated time.",
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
