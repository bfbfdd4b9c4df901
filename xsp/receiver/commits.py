"""Group commit: entries of several threads that wait at the same time are written and flushed to disk together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


@dataclass(eq=False)
class _Waiting(Generic[Entry]):
    entry: Entry
    is_done: bool = False
    error: BaseException | None = None


class GroupCommit(Generic[Entry]):
    """Calls a function with all entries that wait; only one thread at a time is in the function.

    The first thread that finds nobody there commits what waits, its own entry included. What arrives meanwhile waits
    for the next turn, so that a flush of the disk serves more requests the more there are, and a single one at once.
    """

    def __init__(self, commit: Callable[[list[Entry]], None]) -> None:
        self._commit = commit
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[Entry]] = []
        self._is_busy = False

    def add(self, entry: Entry) -> None:
        """Return when an entry is committed.

        Raises:
            BaseException: what the function raised for this entry alone.
        """
        own = _Waiting(entry)
        with self._changed:
            self._waiting.append(own)
            while self._is_busy and not own.is_done:
                self._changed.wait()
            if not own.is_done:
                self._is_busy = True
                together, self._waiting = self._waiting, []
        if not own.is_done:
            try:
                self._commit_all(together)
            finally:
                with self._changed:
                    for waiting in together:
                        waiting.is_done = True
                    self._is_busy = False
                    self._changed.notify_all()
        if own.error is not None:
            raise own.error

    def _commit_all(self, together: list[_Waiting[Entry]]) -> None:
        """Commit entries together; after an error one by one, so that it is only that of the entry which causes it."""
        try:
            self._commit([waiting.entry for waiting in together])
        except Exception as error:
            if len(together) == 1:
                together[0].error = error
                return
            for waiting in together:
                self._commit_all([waiting])
