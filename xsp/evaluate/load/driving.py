"""Drive a model with a schedule.

The schedule is the queue: a free server thread takes the next request, waits until it is due, and serves it. So no
second thread hands over requests and competes with the model for the interpreter. A request that is due while all
servers are busy has arrived nevertheless, and its latency counts from then: a slow model does not slow its load down
(no coordinated omission). The delay of a request that found a free server is the generator's lateness; it is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from xsp.errors import UsageError
from xsp.evaluate.load.requests import Requests, Times
from xsp.evaluate.load.schedules import SECOND, Schedule

Serve = Callable[[int, int], object]
"""Called with the number of a request and its number of inputs; returns when they are predicted."""

SPIN_NS = 300_000
"""Nanoseconds before a due time in which the waiting thread spins instead of sleeping; more than `sleep` oversleeps."""

LEAST_SERVED, LEAST_WAITING = 50, 50
"""Minimum numbers of requests served without a pause, and of waiting requests, to report that a queue is growing."""

GROWTH_STANDARD_ERRORS = 4.0
"""Number of standard errors by which the mean service time must exceed the time between requests."""


class Clock:
    """The clock of a schedule; this one is real."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        return time.perf_counter_ns()

    def wait_until(self, due_ns: int) -> None:
        """Return at that time: sleep, then spin. Each turn of the spin loop lets other threads have the interpreter."""
        while (remaining := due_ns - time.perf_counter_ns()) > 0:
            time.sleep((remaining - SPIN_NS) / SECOND if remaining > SPIN_NS else 0)


class VirtualClock(Clock):
    """A simulated clock, advanced by waiting and by reported durations."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the simulated time."""
        return self._now_ns

    def wait_until(self, due_ns: int) -> None:
        """Advance to that time."""
        self._now_ns = max(self._now_ns, due_ns)

    def advance(self, ns: int) -> None:
        """Advance by the time that a simulator reports for its model."""
        self._now_ns += ns


Progress = Callable[[int, int], object]
"""Called after a request, with its number from 1, or the number of those that have ended, and the total number."""


def drive(
    schedule: Schedule,
    serve: Serve,
    *,
    clock: Clock | None = None,
    servers: int = 1,
    stop_early: bool = True,
    most_seconds: float | None = None,
    progress: Progress | None = None,
) -> Requests:
    """Send the requests of a schedule to a function, and return the times of each request.

    Args:
        schedule: when requests are due.
        serve: predicts. With one server it is called on the calling thread.
        clock: real time, if not given.
        servers: concurrent server threads; one for a simulated clock and for a closed loop.
        stop_early: stop an open loop whose queue grows without bound.
        most_seconds: take no further requests after this time.
        progress: called after each request, on the thread that served it.

    Raises:
        UsageError: several servers, but the schedule or the clock allows only one.
        Whatever `serve` raises, once the requests in progress have ended.
    """
    clock = clock or Clock()
    if servers < 1 or (servers > 1 and (schedule.due_ns is None or isinstance(clock, VirtualClock))):
        raise UsageError(f"{servers} servers: several servers need an open-loop schedule in real time")
    driver = _Driver(schedule, serve, clock, servers, stop_early, most_seconds, progress)
    threads = [threading.Thread(target=driver.work, daemon=True) for _ in range(servers - 1)]
    for thread in threads:
        thread.start()
    driver.work()
    for thread in threads:
        thread.join()
    if driver.error is not None:
        raise driver.error
    return driver.requests()


class _Driver:
    """The execution of a schedule."""

    def __init__(
        self, schedule: Schedule, serve: Serve, clock: Clock, servers: int, stop_early: bool,
        most_seconds: float | None, progress: Progress | None,
    ) -> None:  # fmt: skip
        self._schedule, self._serve, self._clock, self._servers = schedule, serve, clock, servers
        self._progress = progress
        self._lock = threading.Lock()
        self._next_number = 0
        self._stop_reason: str | None = None
        self._is_growing = False
        self.error: BaseException | None = None
        n = len(schedule)
        self._issued, self._start, self._end = (np.zeros(n, np.int64) for _ in range(3))
        self._was_queued = np.zeros(n, bool)
        begin = clock.now_ns()
        self._due = np.zeros(n, np.int64) if schedule.due_ns is None else schedule.due_ns + begin
        self._begin = begin
        self._deadline = None if most_seconds is None else begin + round(most_seconds * SECOND)
        self._growth = _Growth(schedule, servers) if stop_early and schedule.rate is not None else None

    def work(self) -> None:
        """Take and serve requests until there are none."""
        try:
            while (number := self._next_request()) is not None:
                start = self._clock.now_ns()
                self._serve(number, int(self._schedule.batch[number]))
                end = self._clock.now_ns()
                self._start[number], self._end[number] = start, end
                self._record(number)
        except BaseException as error:
            self.error = self.error or error
            self._stop_reason = self._stop_reason or "an error"

    def _next_request(self) -> int | None:
        """Return the next request when it is due; meanwhile other free servers wait for the lock."""
        with self._lock:
            number = self._next_number
            if number == len(self._schedule) or self._stop_reason is not None:
                return None
            if self._schedule.due_ns is None:
                now = self._clock.now_ns()
                self._due[number] = self._issued[number] = now
                if self._deadline is not None and now > self._deadline:
                    self._stop_reason = "the time limit was reached"
                    return None
            else:
                due = int(self._due[number])
                now = self._clock.now_ns()
                if self._deadline is not None and max(now, due) > self._deadline:
                    self._stop_reason = "the time limit was reached"
                    return None
                if now < due:
                    self._clock.wait_until(due)
                    self._issued[number] = self._clock.now_ns()
                else:
                    self._issued[number] = due  # it waited for a free server, not for the generator
                    self._was_queued[number] = True
            self._next_number = number + 1
            return number

    def _record(self, number: int) -> None:
        """Look, after a request, whether the queue grows without end, and report the progress."""
        if self._growth is not None:
            service = int(self._end[number] - self._start[number])
            elapsed = int(self._end[number]) - self._begin
            with self._lock:
                message = self._growth.message(number, bool(self._was_queued[number]), service, elapsed)
                if message is not None and self._stop_reason is None:
                    self._stop_reason, self._is_growing = message, True
        if self._progress is not None:
            self._progress(number + 1, len(self._schedule))

    def requests(self) -> Requests:
        """Return the requests that ended."""
        n = self._next_number
        return Requests(
            self._due[:n], self._issued[:n], self._start[:n], self._end[:n], self._schedule.batch[:n].copy(),
            is_open_loop=self._schedule.due_ns is not None, servers=self._servers, schedule_length=len(self._schedule),
            stop_reason=self._stop_reason, is_growing=self._is_growing,
        )  # fmt: skip


class _Growth:
    """Detector of unbounded queue growth: without a pause, serving takes longer than the time between arrivals."""

    def __init__(self, schedule: Schedule, servers: int) -> None:
        assert schedule.due_ns is not None
        assert schedule.rate is not None
        self._due_ns, self._servers = schedule.due_ns, servers
        self._interval_ns = servers * SECOND / schedule.rate
        self._reset()

    def _reset(self) -> None:
        self._served, self._sum, self._squares = 0, 0.0, 0.0

    def message(self, number: int, was_queued: bool, service_ns: int, elapsed_ns: int) -> str | None:
        """Return a message if the queue grows without bound, after a request that did or did not wait in the queue."""
        if not was_queued:
            self._reset()
            return None
        self._served += 1
        self._sum += service_ns
        self._squares += float(service_ns) ** 2
        if self._served < LEAST_SERVED or self._served % 10:
            return None
        mean = self._sum / self._served
        error = (max(0.0, self._squares / self._served - mean * mean) / self._served) ** 0.5
        waiting = int(np.searchsorted(self._due_ns, elapsed_ns, "right")) - number - 1
        if waiting < LEAST_WAITING or mean - GROWTH_STANDARD_ERRORS * error <= self._interval_ns:
            return None
        return (
            f"the queue grows without bound: {waiting} requests wait, a request takes {mean / 1e6:.3g} ms and "
            f"{self._servers} at once are served, and one comes each {self._interval_ns / self._servers / 1e6:.3g} ms"
        )


def simulate(schedule: Schedule, service_ns: Times, servers: int = 1) -> Requests:
    """Return the result of a schedule with given service times, first come first served, without driving it.

    Args:
        schedule: an open-loop schedule.
        service_ns: service time of each request.
        servers: number of requests that are served concurrently.
    """
    if schedule.due_ns is None or len(service_ns) != len(schedule):
        raise UsageError("a simulation needs an open-loop schedule, with a service time for each request")
    due = schedule.due_ns
    if servers == 1:  # each end is a maximum over earlier j: due of j + all service from j on
        busy_ns = np.cumsum(service_ns)
        end = busy_ns + np.maximum.accumulate(due - (busy_ns - service_ns))
        start = end - service_ns
    else:
        free_at, start = [0] * servers, np.zeros(len(due), np.int64)
        for index, (arrival, duration) in enumerate(zip(due.tolist(), service_ns.tolist(), strict=True)):
            server = free_at.index(min(free_at))
            start[index] = max(arrival, free_at[server])
            free_at[server] = int(start[index]) + duration
        end = start + service_ns
    return Requests(due, due, start, end, schedule.batch, servers=servers, schedule_length=len(due))
