"""The collectors of a block: found by name, switched together, and kept from harming the program."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from xsp import clock, plugins, processes
from xsp.collector import Collector, DeviceCollector, Kernels, Listener, Outline, Signal, ignore
from xsp.errors import PluginError
from xsp.record.calibration import cost_per_span
from xsp.record.kernelsource import KernelSource
from xsp.schema import COLUMNS, Level, Span

OBSERVED_PACKAGE = "torch"
"""The package that collectors observe: a program with steps imports it whether or not it is profiled."""


class Collecting:
    """The collectors of the levels down to a deepest one.

    A collector that raises is removed and noted, and the program continues.
    """

    def __init__(self) -> None:
        self.collectors: list[Collector] = []
        self.absent: dict[str, str] = {}
        """Reasons why collectors cannot work here, by name."""

        self.import_ns = 0
        """Nanoseconds of importing the observed package here instead of in the program."""

        self.device_work = KernelSource()
        self._with_forget: list[Collector] = []

        self.notes: list[dict[str, str]] = []
        """Sentences on what could not be recorded, each with its source, without repetitions."""

    @property
    def names(self) -> list[str]:
        """Sorted names of the working collectors."""
        return sorted(collector.name for collector in self.collectors)

    def find(
        self, requested: Sequence[str | Collector] | None, deepest: Level, kernels: Kernels = Kernels.KINETO
    ) -> None:
        """Load the requested collectors, else all that can work here; remember why the others cannot.

        Args:
            requested: names of entry points, or instances; None for all that are installed.
            deepest: deepest level of the run.
            kernels: requested source of device work.

        Raises:
            PluginError: a collector or a source of device work that was requested by name cannot work here.
        """
        requests: Sequence[str | Collector] = plugins.names("xsp.collectors") if requested is None else requested
        collectors = []
        for request in requests:
            try:
                collector, reason = self._load_collector(request)
            except PluginError as error:
                if requested is not None:
                    raise
                self.absent[str(request)] = str(error)
                if not isinstance(error.__cause__, ImportError):  # a missing package is not a fault of the collector
                    self.note(str(request), f"{error}; it was left out")
                continue
            if requested is None and collector.on_request:
                continue
            if reason is not None:
                self.absent[collector.name] = reason
            elif min(collector.levels) <= deepest:
                collectors.append(collector)
        self.device_work = KernelSource(kernels)
        collectors = self.device_work.choose(collectors, self.absent, deepest)
        for name in self.device_work.reasons:  # an absent source is not missing if there is no device
            self.absent.pop(name, None)
        self.collectors = _in_switch_order(collectors)
        if (note := self.device_work.note()) is not None:
            self.note("xsp", note)

    def _load_collector(self, request: str | Collector) -> tuple[Collector, str | None]:
        """Return a collector and why it cannot work here, or None; add the time of importing torch, if it did that."""
        was_imported, began_ns = OBSERVED_PACKAGE in sys.modules, clock.monotonic_ns()
        try:
            return plugins.collector(request)
        finally:
            if not was_imported and OBSERVED_PACKAGE in sys.modules:
                self.import_ns += clock.monotonic_ns() - began_ns

    def widen(self, additional: Collecting, notify: Listener) -> None:
        """Add and install the collectors of `additional` whose names are not here yet; no collector is on meanwhile."""
        installed = {collector.name: collector for collector in self.collectors}
        if self.device_work.source is None and (source := additional.device_work.source) is not None:
            self.device_work = additional.device_work
            installed_source = installed.get(source.name)
            self.device_work.source = installed_source if isinstance(installed_source, DeviceCollector) else source
            self.device_work.source.is_device_source = True
        additions = [collector for collector in additional.collectors if collector.name not in installed]
        additions = [
            collector for collector in additions if not collector.innermost or collector is self.device_work.source
        ]
        self.absent = {**additional.absent, **self.absent}
        self.collectors = _in_switch_order([*self.collectors, *additions])
        self.open(notify, collectors=additions)

    def open(
        self,
        notify: Listener | None,
        outline: Outline | None = None,
        collectors: Iterable[Collector] | None = None,
    ) -> None:
        """Install the collectors.

        Args:
            notify: receives the signals at the program's boundaries.
            outline: where the collectors note the calls of each step, recorded or not.
            collectors: the collectors to install; default: all.
        """
        for collector in list(self.collectors if collectors is None else collectors):
            if notify is not None:
                collector.notify = notify
            collector.outline = outline
            self._guard(collector, "open", collector.open)
        self._with_forget = [
            collector for collector in self.collectors if type(collector).forget is not Collector.forget
        ]

    def close(self, calibrate: bool = True, limit_ns: float = math.inf) -> dict[str, Any]:
        """Remove the collectors, and return the cost of one span of each, by name.

        Args:
            calibrate: whether to measure the costs; a program that continues to serve has no time for it.
            limit_ns: as for `cost_per_span`.
        """
        costs = {}
        for collector in reversed(self.collectors):
            self._guard(collector, "close", collector.close)
            self._collect_notes(collector)
        for collector in self.collectors:
            collector.notify, collector.outline = ignore, None
            cost = None
            if calibrate:
                with contextlib.suppress(Exception), without_collections():  # a probe that fails costs only a figure
                    cost = cost_per_span(collector, limit_ns)
            if cost is not None:
                costs[collector.name] = cost
        return costs

    def try_out(self, rung: Level) -> None:
        """Switch the collectors of this rung on and off once, so that no step pays for setting up their first use."""
        self.stop(self.start(rung, describe=False))
        self.rows(clock.anchor())

    def start(self, rung: Level, describe: bool, by_thread: bool | None = None) -> list[Collector]:
        """Switch on the collectors of this rung, and return them.

        Args:
            rung: the deepest level.
            describe: record shapes and memory, too.
            by_thread: only collectors that can (True) or cannot (False) separate concurrent recordings by thread.
        """
        active = [collector for collector in self._select(by_thread) if min(collector.levels) <= rung]
        try:
            for collector in active:
                self._guard(collector, "start", lambda c=collector: c.start(rung, describe))  # type: ignore[misc]
        except BaseException:  # an interrupt
            self.stop(active)
            raise
        return active

    def settle(self, active: Iterable[Collector]) -> None:
        """Wait for asynchronous work that the step started, for instance on a device."""
        for collector in active:
            try:
                collector.settle()
            except Exception as error:  # a device that failed must fail in the program, not here
                if processes.is_from_signal_handler(error):
                    raise

    def stop(self, active: Sequence[Collector]) -> None:
        """Switch off the collectors that `start` returned; an interrupt is raised when all are off."""
        interrupts: list[BaseException] = []
        for collector in reversed(active):
            try:
                self._guard(collector, "stop", collector.stop)
            except BaseException as interrupt:
                interrupts.append(interrupt)
                self._guard(collector, "stop", collector.stop)  # it may have stopped half-way
        if interrupts:
            raise interrupts[0]

    def mute(self, quiet: bool, except_signal: Signal | None = None) -> None:
        """Make collectors ignore everything between steps, except for one signal; or end that."""
        for collector in tuple(self.collectors):
            self._guard(collector, "mute", lambda c=collector: c.mute(quiet, except_signal))  # type: ignore[misc]

    def disable(self) -> None:
        """Make the collectors ignore everything from now on, in a forked child; they stay installed."""
        for collector in self.collectors:
            collector.notify, collector.outline = ignore, None
        self.mute(True)

    def forget(self) -> None:
        """Discard the rows of a step that is not recorded."""
        for collector in tuple(self._with_forget):
            self._guard(collector, "forget", collector.forget)

    def rows(self, anchor: clock.Anchor, by_thread: bool | None = None) -> list[Span]:
        """Take the collectors' spans, with times on the epoch, and their notes; `by_thread` as in `start`."""
        rows: list[Span] = []
        for collector in self._select(by_thread):
            spans = self._guard(collector, "spans", lambda c=collector: _check_spans(c.spans())) or []  # type: ignore[misc]
            # Rows that a collector placed on the epoch itself, corrected for settings of the clock during the run.
            rows += (
                ([row._replace(start_ns=row.start_ns - anchor.set_ns) for row in spans] if anchor.set_ns else spans)
                if collector.epoch
                else [clock.on_epoch(span, anchor) for span in spans]
            )
            self._collect_notes(collector)
        if (change := self.device_work.replace()) is not None:
            self.note("xsp", change)
        return rows

    def drop_invalid_rows(self, rows: Sequence[Span]) -> list[Span]:
        """Return the rows without those of collectors that gave any value of another type than its column.

        These collectors are left out from then on, and noted.
        """
        errors = {row.collector: text for row in rows if (text := _type_mismatch(row)) is not None}
        for collector in list(self.collectors):
            if collector.name in errors:
                self._guard(collector, "spans", partial(_raise, TypeError(errors[collector.name])))
        return [row for row in rows if row.collector not in errors]

    def rows_during(self, anchor: clock.Anchor, start: int, end: int, thread: int | None = None) -> list[Span]:
        """Return the spans of the collectors that can separate recordings by thread, with times on the epoch.

        Args:
            anchor: anchor of the clock.
            start: earliest start, of `clock.monotonic_ns`.
            end: latest end, of `clock.monotonic_ns`.
            thread: the only thread; None for all.
        """
        rows: list[Span] = []
        for collector in self._select(by_thread=True):
            spans = self._guard(collector, "spans", lambda c=collector: list(c.spans_during(start, end, thread)))  # type: ignore[misc]
            rows += [clock.on_epoch(span, anchor) for span in spans or []]
            self._collect_notes(collector)
        return rows

    def drop_before(self, time: int) -> None:
        """Make these collectors discard spans that ended before a time of `clock.monotonic_ns`."""
        for collector in self._select(by_thread=True):
            self._guard(collector, "drop_before", lambda c=collector: c.drop_before(time))  # type: ignore[misc]

    def _select(self, by_thread: bool | None) -> list[Collector]:
        return [collector for collector in self.collectors if by_thread is None or collector.by_thread is by_thread]

    def note(self, source: str, text: str) -> None:
        """Remember a sentence on what is missing, unless it was noted before."""
        note = {"source": source, "text": text}
        if note not in self.notes:
            self.notes.append(note)

    def _collect_notes(self, collector: Collector) -> None:
        for text in self._guard(collector, "notes", lambda: list(collector.notes())) or ():
            self.note(collector.name, text)

    def _guard(self, collector: Collector, operation: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except plugins.PLUGIN_ERRORS as error:
            if processes.is_from_signal_handler(error):  # meant for the program, which it interrupted here
                raise
            self.note(
                collector.name, f"{operation} failed and the collector was left out: {type(error).__name__}: {error}"
            )
            if isinstance(collector, DeviceCollector) and collector.is_device_source and collector.gave_up is None:
                collector.gave_up = f"{operation} failed: {type(error).__name__}: {error}"
            if collector in self.collectors:
                self.collectors.remove(collector)
                self._with_forget = [candidate for candidate in self._with_forget if candidate is not collector]
                if operation != "close":
                    with contextlib.suppress(Exception):
                        collector.stop()
                    with contextlib.suppress(Exception):
                        collector.close()
            return None


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspend Python's search for cycles: it would go through ten thousands of new spans again and again, and a whole
    search, which so many new objects bring about, takes 0.2 s in a process that has imported torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_spans(spans: Iterable[Any]) -> list[Span]:
    """Return the spans of a collector as a list.

    Raises:
        TypeError: an item is not a span, or its name or a time does not have the type of its column.
    """
    rows = list(spans)
    for row in rows:
        if not isinstance(row, Span):
            raise TypeError(f"{type(row).__name__} is not a Span")
        if not (isinstance(row.name, str) and isinstance(row.start_ns, int) and isinstance(row.dur_ns, int)):
            raise TypeError(f"a span without a name or times: {tuple(row)[:10]}")
    return rows


def _type_mismatch(row: Span) -> str | None:
    """Return the first value that does not fit its column as text, None if all fit."""
    for column, value in zip(COLUMNS, row, strict=True):
        if value is not None and not isinstance(value, _PYTHON_TYPES[column.type.partition("(")[0]]):
            return f"{column.name} = {str(value)[:100]!r} is not of type {column.type}"
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return f"{column.name} = {str(value)[:100]} is out of range"
    return None


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("VARCHAR",), str),
    **dict.fromkeys(("SMALLINT", "INTEGER", "BIGINT"), int),
    "BOOLEAN": bool,
    "DOUBLE": (int, float),
}


def _raise(error: Exception) -> NoReturn:
    raise error


def _in_switch_order(collectors: Iterable[Collector]) -> list[Collector]:
    """Return collectors in the order of switching on: deeper ones first, and off last; innermost ones at the end."""
    return sorted(collectors, key=lambda collector: (not collector.innermost, min(collector.levels)), reverse=True)
