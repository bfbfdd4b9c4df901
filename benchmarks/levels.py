"""xsp's collectors as conditions: driven through their contract, as a session drives them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import turns

from xsp import plugins
from xsp.collector import Collector
from xsp.span import Level


class Levels:
    """Some collectors, and the conditions in which those of a rung are on.

    A step then holds what a user's step holds between the two readings of the session's clock: the hot half
    of the collectors, and their `settle`. Switching them, and turning buffers into spans, is outside.
    """

    def __init__(self, *names: str) -> None:
        found: list[Collector] = [plugins.load("xsp.collectors", name)() for name in names]
        self._collectors = sorted(found, key=lambda each: min(each.levels), reverse=True)
        self.seen: dict[str, Counter[int]] = {}
        """Spans per level of the last step, by condition."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Open all collectors, as entering a `profile` block does."""
        for collector in self._collectors:
            collector.open()
        try:
            yield
        finally:
            for collector in reversed(self._collectors):
                collector.close()

    def condition(self, name: str, step: Callable[[], object], rung: Level) -> turns.Condition:
        """Return the condition in which the collectors of a rung record; with APPLICATION, none."""
        on = [collector for collector in self._collectors if min(collector.levels) <= rung]

        def start() -> None:
            for collector in on:
                collector.start(rung, describe=False)

        def last() -> None:
            for collector in on:
                collector.settle()

        def stop() -> None:
            for collector in reversed(on):
                collector.stop()
            self.seen[name] = Counter(int(span.level) for collector in on for span in collector.spans())

        return turns.Condition(name, step, start, last, stop)
