"""Outcomes of the calls of instrumented models: counted per model, added up per handle."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

MOST_REASONS, OTHER_REASONS = 50, "other reasons, too many to list"
_logger = logging.getLogger("xsp")


class Counts(NamedTuple):
    """Outcomes of the calls of instrumented models in this process."""

    calls: int
    """Calls of the models, in requests and outside them."""

    sampled: int
    """Calls in chosen requests; these have a model span."""

    recorded: int
    """Sampled calls whose layers were recorded, and the deeper levels too unless `layers_only` counts the call."""

    layers_only: int
    """Recorded calls whose operators and deeper levels were requested but not recorded; `lost` has the reasons."""

    delivered: int
    """Spans below the models' spans that the service's processors accepted, or that were sent."""

    strangers: int
    """Spans that were recorded at the same time and could not be assigned to any of the calls; they were left out."""

    ambiguous: int
    """Spans without a thread that may belong to several calls, counted in each of them; they were left out, too."""

    lost: dict[str, int]
    """Chosen calls whose deeper spans are missing, wholly or partly, by reason."""


class Tally:
    """Outcomes of the calls of one model in one process; thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.pending = 0
        self._has_given_up = False
        self._changed = threading.Condition()

    def add(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        with self._changed:
            self.counts[name] += number

    def lose(self, reason: str, calls: int = 1, expected: bool = False) -> None:
        """Count calls that miss spans; an unexpected reason is logged when it first occurs."""
        with self._changed:
            is_first = reason not in self.lost
            if is_first and len(self.lost) >= MOST_REASONS:
                reason, is_first = OTHER_REASONS, OTHER_REASONS not in self.lost
            self.lost[reason] += calls
        if is_first and not expected:
            _logger.warning("spans of a sampled call are lost: %s", reason)

    def begin(self) -> None:
        """Count a recorded call as under way."""
        with self._changed:
            self.pending += 1

    def finish(self, reason: str | None = None) -> None:
        """Count a call as no longer under way; with a reason, as lost."""
        if reason is not None and not self._has_given_up:
            self.lose(reason)
        with self._changed:
            self.pending -= 1
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until no call is under way; return False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pending == 0, timeout)

    def give_up(self, reason: str) -> None:
        """Count the calls that are still under way as lost, even if they are delivered later."""
        with self._changed:
            remaining, self._has_given_up = self.pending, True
        if remaining:
            self.lose(reason, remaining)


def sum_counts(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts of several models."""
    entries = list(counts)
    calls, sampled, recorded, layers_only, delivered, strangers, ambiguous = (
        sum(column) for column in zip(*(entry[:-1] for entry in entries), strict=True)
    )
    lost = sum((Counter(entry.lost) for entry in entries), Counter[str]())
    return Counts(calls, sampled, recorded, layers_only, delivered, strangers, ambiguous, dict(lost))
