"""What came of each request of a scenario: when it was due, given out, begun and ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """The requests that ended, in the order of the schedule; times are nanoseconds of one clock that only goes on."""

    due_ns: Times
    """When the request was to arrive. In a closed loop: when the one before it had ended."""

    issued_ns: Times
    """When it did arrive. Later than due by what the generator was late."""

    start_ns: Times
    """When the model began with it; until then it waited for the requests before it."""

    end_ns: Times
    batch: Times
    """Inputs of the request."""

    open_loop: bool = True
    """Whether the times due were drawn beforehand, so that a slow model meets a queue and not fewer requests."""

    servers: int = 1
    """Requests that are served at once, at most."""

    scheduled: int | None = None
    """Requests of the schedule, of which some are missing where it was stopped."""

    stopped: str | None = None
    """Why the schedule was not carried out to its end."""

    def __len__(self) -> int:
        return len(self.due_ns)

    @property
    def latency_ns(self) -> Times:
        """From the time due to the end: what waited in a queue waited."""
        return self.end_ns - self.due_ns

    @property
    def service_ns(self) -> Times:
        """From the beginning to the end: what the model took."""
        return self.end_ns - self.start_ns

    @property
    def waiting_ns(self) -> Times:
        """From the time due to the beginning."""
        return self.start_ns - self.due_ns

    @property
    def lateness_ns(self) -> Times:
        """From the time due to the arrival: the generator's own part of the latency."""
        return self.issued_ns - self.due_ns

    def after(self, first: int) -> Requests:
        """Return all but so many of the first requests."""
        return Requests(
            self.due_ns[first:], self.issued_ns[first:], self.start_ns[first:], self.end_ns[first:], self.batch[first:],
            self.open_loop, self.servers, self.scheduled, self.stopped,
        )  # fmt: skip
