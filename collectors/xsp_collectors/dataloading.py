"""Waits for `torch.utils.data.DataLoader`, at the model level.

A loop requests its batch before its step begins, so this collector is also active between steps; a wait belongs to the
step in which it ends, or else to the next step. Waits of steps that are not recorded are discarded with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader

from xsp.clock import monotonic_ns
from xsp.collector import Collector, Signal
from xsp.schema import Kind, Level, Span
from xsp_collectors.modules import IN_DATA, THREADS


class DataLoading(Collector):
    """Waits for the next batch (DATA)."""

    name = "dataloading"
    levels = (Level.MODEL,)

    def __init__(self) -> None:
        self._waits: list[tuple[int, int, int, str]] = []
        self._original: Any = None
        self._wrapper: Any = None

    def open(self) -> None:
        """Wrap the `__next__` of all DataLoader iterators."""
        self._original = original = dataloader._BaseDataLoaderIter.__next__

        def __next__(iterator: Any) -> Any:
            start, status, state = monotonic_ns(), "ok", THREADS.state
            state[0] += IN_DATA
            try:
                return original(iterator)
            except StopIteration:
                status = "end"
                raise
            except BaseException as error:
                status = f"error:{type(error).__name__}"
                raise
            finally:
                state[0] -= IN_DATA
                end = monotonic_ns()
                self._waits.append((threading.get_native_id(), start, end, status))
                if status != "end":
                    self.notify(Signal.DATA_END, end - start)

        self._wrapper = __next__
        dataloader._BaseDataLoaderIter.__next__ = self._wrapper  # type: ignore[method-assign]

    def close(self) -> None:
        """Remove the wrapper."""
        if dataloader._BaseDataLoaderIter.__next__ is self._wrapper:
            dataloader._BaseDataLoaderIter.__next__ = self._original  # type: ignore[method-assign]

    def forget(self) -> None:
        """Discard the waits of a step that is not recorded."""
        self._waits.clear()

    def spans(self) -> Iterator[Span]:
        """Return the waits since the last call, without requests to an exhausted loader."""
        waits, self._waits = self._waits, []
        for thread, start, end, status in waits:
            if status != "end":
                yield Span(
                    level=Level.MODEL,
                    kind=Kind.DATA.value,
                    name="DataLoader",
                    start_ns=start,
                    dur_ns=end - start,
                    thread=thread,
                    status=status,
                    collector=self.name,
                )
