"""What became of the calls of instrumented models: counted by model, added up by handle."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

MOST_REASONS, OTHER_REASONS = 50, "other reasons, too many to list"
_logger = logging.getLogger("xsp")


class Counts(NamedTuple):
    """What became of the calls of instrumented models, in this process."""

    calls: int
    """Calls of the models, in requests and outside them."""

    sampled: int
    """Calls in chosen requests: those that have a model span."""

    recorded: int
    """Of those, calls whose layers were recorded, and what is deeper as far as `layers_only` does not count them."""

    layers_only: int
    """Of those, calls whose operators and deeper levels were asked for and not recorded; `lost` says why."""

    delivered: int
    """Spans below the models' that the service's processors took, or that were sent."""

    strangers: int
    """Spans that were recorded at the same time and are not known to be of any of the calls; they were left out."""

    ambiguous: int
    """Spans that tell no thread and may be of one call as of another, in each that they may be of; left out, too."""

    lost: dict[str, int]
    """Chosen calls whose deeper spans are missing, in whole or in part, by reason."""


class Tally:
    """What became of the calls of one model in one process; all threads may use it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.under_way = 0
        self._given_up = False
        self._changed = threading.Condition()

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        with self._changed:
            self.counts[name] += number

    def lose(self, reason: str, calls: int = 1, expected: bool = False) -> None:
        """Count calls that miss spans; a reason that was not to be expected is logged when it first occurs."""
        with self._changed:
            first = reason not in self.lost
            if first and len(self.lost) >= MOST_REASONS:
                reason, first = OTHER_REASONS, OTHER_REASONS not in self.lost
            self.lost[reason] += calls
        if first and not expected:
            _logger.warning("spans of a sampled call are lost: %s", reason)

    def begin(self) -> None:
        """A recorded call is on its way."""
        with self._changed:
            self.under_way += 1

    def finish(self, reason: str | None = None) -> None:
        """It has arrived, or has not for a reason."""
        if reason is not None and not self._given_up:
            self.lose(reason)
        with self._changed:
            self.under_way -= 1
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until no call is on its way; False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.under_way == 0, timeout)

    def give_up(self, reason: str) -> None:
        """Count what is still on its way as lost, whatever becomes of it."""
        with self._changed:
            left, self._given_up = self.under_way, True
        if left:
            self.lose(reason, left)


def added(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts of several models."""
    each = list(counts)
    calls, sampled, recorded, layers_only, delivered, strangers, ambiguous = (
        sum(column) for column in zip(*(one[:-1] for one in each), strict=True)
    )
    lost = sum((Counter(one.lost) for one in each), Counter[str]())
    return Counts(calls, sampled, recorded, layers_only, delivered, strangers, ambiguous, dict(lost))
