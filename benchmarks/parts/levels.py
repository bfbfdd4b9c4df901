"""xsp's collectors as conditions: driven through their contract, as a session drives them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter_ns

from parts import turns
from xsp import plugins
from xsp.collector import Collector, DeviceCollector
from xsp.schema import Level, Span


class Levels:
    """Some collectors, and the conditions in which those of a rung are on.

    A step then holds what a user's step holds between the two readings of the session's clock: the hot half
    of the collectors, and their `settle`. Switching them, and turning buffers into spans, is outside.
    """

    def __init__(self, *names: str, source: str | None = None) -> None:
        """Load collectors by name; `source` is the one that records device work.

        Raises:
            LookupError: a collector cannot work here, or not as the source; the message says why.
        """
        found: list[Collector] = [plugins.load("xsp.collectors", name)() for name in names]
        for collector in found:
            reason = collector.available()
            if isinstance(collector, DeviceCollector):
                collector.is_device_source = collector.name == source
                reason = reason or (collector.trial() if collector.is_device_source else None)
            if reason is not None:
                raise LookupError(f"{collector.name}: {reason}")
        self._collectors = sorted(found, key=lambda each: (not each.innermost, min(each.levels)), reverse=True)
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

    def record(self, step: Callable[[], object], rung: Level, warmup: int = 2) -> list[Span]:
        """Record one step after some that warm up, in a block of its own, and return what was seen of it."""
        with self.installed():
            for _ in range(warmup):
                self.once(step, rung)
            return self.once(step, rung)

    def once(self, step: Callable[[], object], rung: Level) -> list[Span]:
        """Record a step in the block that is open."""
        return self.timed(step, rung)[1]()

    def timed(self, step: Callable[[], object], rung: Level) -> tuple[int, Callable[[], list[Span]]]:
        """Record a step; return its nanoseconds, and what decodes what was seen of it."""
        on = [collector for collector in self._collectors if min(collector.levels) <= rung]
        for collector in on:
            collector.start(rung, describe=False)
        begin = perf_counter_ns()
        step()
        for collector in on:
            collector.settle()
        ns = perf_counter_ns() - begin
        for collector in reversed(on):
            collector.stop()
        return ns, lambda: [span for collector in on for span in collector.spans()]

    def notes(self) -> list[str]:
        """Return what the collectors have to say on what they could not see."""
        return [note for collector in self._collectors for note in collector.notes()]

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
