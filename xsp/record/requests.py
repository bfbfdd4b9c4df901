"""The requests of the engines of a program, and all of their steps: stored in portions beside the recorded steps."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from xsp import clock, serving
from xsp.identity import current_caller
from xsp.record.compilations import latest_compilations
from xsp.schema import Span
from xsp.serving import Engine, EngineStep, Log, Part, RequestAccount
from xsp.store.requestrows import request_row, step_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from xsp.identity import Identity
    from xsp.record.writer import Writer

PORTION_ROWS, PORTION_NS = 20_000, 5_000_000_000


class StoredRequests(Log):
    """A sink that stores the requests and the steps of all engines."""

    def __init__(self, writer: Writer, identity: Identity, note: Callable[[str], object]) -> None:
        """Start without requests.

        Args:
            writer: the process that stores.
            identity: identity of the run.
            note: takes sentences on what the program stated wrongly.
        """
        super().__init__(self._add_rows, note, compilations=latest_compilations)
        self._writer, self._identity = writer, identity
        self._clock = clock.SteadyClock()
        self._rows: list[Span] = []
        self.stored = 0
        """Number of requests and engine steps that are on the disk."""

        self._stored_ns = clock.monotonic_ns()

    def accepts(self, engine: Engine) -> bool:
        """Return True: a run has all engines of its program."""
        return True

    def arrive(self, engine: Engine, request: Hashable, at_ns: int, prompt_tokens: int | None, is_stated: bool) -> None:
        """Take the arrival of a request, with the span of the program's own in which it is stated."""
        caller = current_caller() if is_stated else None
        self.put(engine, "arrive", request, at_ns, prompt_tokens, is_stated, caller)

    def begin(self, engine: Engine, parts: Sequence[Part]) -> Any:
        """Take the begin of a step."""
        return None

    def end(self, engine: Engine, step: EngineStep) -> None:
        """Take the end of a step."""
        self.put(engine, "step", step)

    def drop(self, engine: Engine, place: Any) -> None:
        """Take that a step did not take place: nothing has been stored of it."""

    def finish(self, engine: Engine, request: Hashable, at_ns: int, status: str) -> None:
        """Take the end of a request."""
        self.put(engine, "finish", request, at_ns, status)

    def end_engine(self, engine: Engine, at_ns: int) -> None:
        """Take the end of an engine."""
        self.put(engine, "close", at_ns)

    def abandon(self) -> None:
        """Take no more statements, and let the thread end; what is not stored is lost."""
        serving.detach(self)
        self._closing.set()

    def close(self) -> None:
        """Store what is left, and take no more statements."""
        serving.detach(self)
        super().close()
        self._store()

    def _add_rows(
        self, engine: Engine, steps: Sequence[tuple[int, EngineStep]], accounts: Sequence[RequestAccount]
    ) -> None:
        offset_ns = self._clock.anchor().offset_ns
        rows = [step_row(engine, number, step, offset_ns) for number, step in steps]
        common: dict[str, Any] = {
            "process": self._identity.process,
            "rank": self._identity.rank,
            "trace_id": self._identity.trace_id,
        }
        self._rows += [row._replace(span_id=os.urandom(8).hex(), **common) for row in rows]
        for account in accounts:
            row = request_row(engine, account, offset_ns)._replace(span_id=os.urandom(8).hex(), **common)
            if account.context is not None:
                trace_id, parent_id = account.context
                row = row._replace(trace_id=trace_id, parent_id=parent_id)
            self._rows.append(row)
        if len(self._rows) >= PORTION_ROWS or clock.monotonic_ns() - self._stored_ns >= PORTION_NS:
            self._store()

    def _store(self) -> None:
        rows, self._rows = self._rows, []
        self._stored_ns = clock.monotonic_ns()
        if rows and self._writer.add_requests(rows):
            self.stored += len(rows)
        elif rows:
            self.note(f"{len(rows):,} requests and engine steps were not stored: {self._writer.failure}")
