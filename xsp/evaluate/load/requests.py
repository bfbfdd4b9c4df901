"""The times of each request of a scenario: when it was due, issued, started and ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """The requests that ended, in the order of the schedule; times are nanoseconds of one monotonic clock."""

    due_ns: Times
    """When the request should arrive. In a closed loop: when the previous request had ended."""

    issued_ns: Times
    """When it arrived: later than due by the generator's lateness."""

    start_ns: Times
    """When the model began to serve it; until then it waited for earlier requests."""

    end_ns: Times
    batch: Times
    """Number of inputs per request."""

    is_open_loop: bool = True
    """Whether due times were drawn beforehand, so that a slow model gets a queue instead of fewer requests."""

    servers: int = 1
    """Maximum number of requests served concurrently."""

    schedule_length: int | None = None
    """Number of requests of the schedule, some of which are missing if it was stopped."""

    stop_reason: str | None = None
    """Why the schedule was stopped before its end."""

    is_growing: bool = False
    """Whether it was stopped because its queue grows without bound."""

    def __len__(self) -> int:
        return len(self.due_ns)

    @property
    def latency_ns(self) -> Times:
        """Time from due to end, including waiting in the queue."""
        return self.end_ns - self.due_ns

    @property
    def service_ns(self) -> Times:
        """Time from start to end: the service time of the model."""
        return self.end_ns - self.start_ns

    @property
    def waiting_ns(self) -> Times:
        """Time from due to start."""
        return self.start_ns - self.due_ns

    @property
    def lateness_ns(self) -> Times:
        """Time from due to arrival: the generator's part of the latency."""
        return self.issued_ns - self.due_ns
