"""xsp's collectors as benchmark conditions: driven through their interface, as a session drives them."""

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
    """Some collectors, and the conditions in which the collectors of a rung record.

    A step then includes what a user's step includes between the two readings of the session's clock: the hot path of
    the collectors, and their `settle`. Starting and stopping them, and decoding buffers into spans, is not included.
    """

    def __init__(self, *names: str, source: str | None = None) -> None:
        """Load collectors by name; `source` is the collector that records device work.

        Raises:
            LookupError: a collector does not work here, or not as the source; the message gives the reason.
        """
        loaded: list[Collector] = [plugins.load("xsp.collectors", name)() for name in names]
        for collector in loaded:
            reason = collector.available()
            if isinstance(collector, DeviceCollector):
                collector.is_device_source = collector.name == source
                reason = reason or (collector.trial() if collector.is_device_source else None)
            if reason is not None:
                raise LookupError(f"{collector.name}: {reason}")
        self._collectors = sorted(
            loaded, key=lambda collector: (not collector.innermost, min(collector.levels)), reverse=True
        )
        self.span_counts: dict[str, Counter[int]] = {}
        """Spans per level of the last step, by condition."""

    @contextlib.contextmanager
    def installation(self) -> Iterator[None]:
        """Open all collectors, as entering a `profile` block does."""
        for collector in self._collectors:
            collector.open()
        try:
            yield
        finally:
            for collector in reversed(self._collectors):
                collector.close()

    def record(self, step: Callable[[], object], rung: Level, warmup: int = 2) -> list[Span]:
        """Record one step after warm-up steps, with newly opened collectors, and return its spans."""
        with self.installation():
            for _ in range(warmup):
                self.record_step(step, rung)
            return self.record_step(step, rung)

    def record_step(self, step: Callable[[], object], rung: Level) -> list[Span]:
        """Record a step with the open collectors, and return its spans."""
        return self.record_timed(step, rung)[1]()

    def record_timed(self, step: Callable[[], object], rung: Level) -> tuple[int, Callable[[], list[Span]]]:
        """Record a step; return its nanoseconds, and a function that decodes its spans."""
        active = [collector for collector in self._collectors if min(collector.levels) <= rung]
        for collector in active:
            collector.start(rung, describe=False)
        begin = perf_counter_ns()
        step()
        for collector in active:
            collector.settle()
        ns = perf_counter_ns() - begin
        for collector in reversed(active):
            collector.stop()
        return ns, lambda: [span for collector in active for span in collector.spans()]

    def notes(self) -> list[str]:
        """Return the collectors' notes on what they could not record."""
        return [note for collector in self._collectors for note in collector.notes()]

    def condition(self, name: str, step: Callable[[], object], rung: Level) -> turns.Condition:
        """Return the condition in which the collectors of a rung record; with `Level.APPLICATION` none do."""
        active = [collector for collector in self._collectors if min(collector.levels) <= rung]

        def start() -> None:
            for collector in active:
                collector.start(rung, describe=False)

        def finish() -> None:
            for collector in active:
                collector.settle()

        def stop() -> None:
            for collector in reversed(active):
                collector.stop()
            self.span_counts[name] = Counter(int(span.level) for collector in active for span in collector.spans())

        return turns.Condition(name, step, start, finish, stop)
