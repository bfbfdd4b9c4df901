"""Waits for `torch.utils.data.DataLoader`, at the model level.

A loop requests its batch before its step begins, so this collector is also active between steps; a wait belongs to the
step in which it ends, or else to the next step. Waits of steps that are not recorded are discarded with them. A loader
with worker processes is also waited for while it starts them, or makes them begin anew, and while it ends them.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader

from xsp.clock import monotonic_ns
from xsp.collector import Collector, Signal
from xsp.schema import PERSISTENT, WORKERS, Kind, Level, Span
from xsp_collectors.modules import IN_DATA, THREADS


class DataLoading(Collector):
    """Waits for the next batch (DATA)."""

    name = "dataloading"
    levels = (Level.MODEL,)

    def __init__(self) -> None:
        self._waits: list[tuple[int, int, int, str, int, bool]] = []
        self._wrapped: list[tuple[type, str, Any, Any]] = []
        """Class, name of its method, the method itself, and what is in its place."""

    def open(self) -> None:
        """Wrap the `__next__` of all iterators of a DataLoader, and its `__iter__`."""
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", "_num_workers", "_persistent_workers", True)
        self._wrap(dataloader.DataLoader, "__iter__", "num_workers", "persistent_workers", False)

    def _wrap(self, owner: type, name: str, workers_name: str, kept_name: str, always: bool) -> None:
        """Wrap a method of loaders or of their iterators; without `always`, only of those with workers.

        The end of an iterator is a wait only with workers: others just notice that there is no batch left.

        Args:
            owner: the class.
            name: the method.
            workers_name: attribute of the class with the number of workers.
            kept_name: attribute that says whether they are kept for the next epoch.
            always: whether calls without workers are waits, too.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(subject: Any) -> Any:
            state, workers = THREADS.state, getattr(subject, workers_name, 0)
            if state[0] >= IN_DATA or not (workers or always):  # a loader inside a loader's wait
                return original(subject)
            start, status = monotonic_ns(), "ok"
            state[0] += IN_DATA
            try:
                return original(subject)
            except StopIteration:
                status = "ok" if workers else "end"
                raise
            except BaseException as error:
                status = f"error:{type(error).__name__}"
                raise
            finally:
                state[0] -= IN_DATA
                end = monotonic_ns()
                if status != "end":
                    is_kept = bool(getattr(subject, kept_name, False))
                    self._waits.append((threading.get_native_id(), start, end, status, workers, is_kept))
                    self.notify(Signal.DATA_END, end - start)

        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))

    def close(self) -> None:
        """Remove the wrappers."""
        for owner, name, original, wrapper in self._wrapped:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()

    def forget(self) -> None:
        """Discard the waits of a step that is not recorded."""
        self._waits.clear()

    def spans(self) -> Iterator[Span]:
        """Return the waits since the last call, without requests to an exhausted loader."""
        waits, self._waits = self._waits, []
        for thread, start, end, status, workers, is_kept in waits:
            yield Span(
                level=Level.MODEL,
                kind=Kind.DATA.value,
                name="DataLoader",
                start_ns=start,
                dur_ns=end - start,
                thread=thread,
                status=status,
                attributes=json.dumps({WORKERS: workers, PERSISTENT: is_kept}) if workers else None,
                collector=self.name,
            )
