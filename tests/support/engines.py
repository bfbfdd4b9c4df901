"""A sink that keeps what engines state, and traces of it, for the tests of serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xsp.serving import Engine, EngineStep, Log, Part, RequestAccount
from xsp.store.requestrows import request_row, step_row
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

MS = 1_000_000


class Told(Log):
    """A log that keeps what it is told."""

    def __init__(self, **options: Any) -> None:
        self.steps: list[tuple[int, EngineStep]] = []
        self.accounts: list[RequestAccount] = []
        self.notes: list[str] = []
        super().__init__(self._take, self.notes.append, **options)

    def _take(self, engine: Engine, steps: Sequence[Any], accounts: Sequence[Any]) -> None:
        self.steps += steps
        self.accounts += accounts

    # a sink that only keeps

    def accepts(self, engine: Engine) -> bool:
        return True

    def arrive(self, engine: Engine, request: Any, at_ns: int, prompt_tokens: int | None, is_stated: bool) -> None:
        self.put(engine, "arrive", request, at_ns, prompt_tokens, is_stated)

    def begin(self, engine: Engine, parts: Sequence[Part]) -> Any:
        return None

    def end(self, engine: Engine, step: EngineStep) -> None:
        self.put(engine, "step", step)

    def drop(self, engine: Engine, place: Any) -> None:
        pass

    def finish(self, engine: Engine, request: Any, at_ns: int, status: str) -> None:
        self.put(engine, "finish", request, at_ns, status)

    def end_engine(self, engine: Engine, at_ns: int) -> None:
        self.put(engine, "close", at_ns)


def trace(statements: Sequence[tuple[Any, ...]], also: Sequence[Any] = (), step: str | None = "step s 0-9000") -> Trace:
    """Return the trace of an engine, of a recorded step and of other spans; times are milliseconds."""
    engine, log = Engine("mine"), Told()
    for name, *arguments in statements:
        if name == "step":
            start, end, *parts = arguments
            log.put(engine, "step", EngineStep(start * MS, end * MS, [Part(*part) for part in parts]))
        else:
            request, at, *rest = arguments
            log.put(engine, name, request, at * MS, *rest)
    log.close()
    rows = [step_row(engine, number, step, 0) for number, step in log.steps]
    rows += [request_row(engine, account, 0) for account in log.accounts]
    rows = [row._replace(span_id=f"{number:016x}") for number, row in enumerate(rows)]
    found = trace_of([*(spans(step) if step else ()), *also, *rows])
    found.con.execute("CREATE OR REPLACE VIEW serving AS SELECT * FROM spans WHERE collector = 'serving'")
    return found


def served(count: int, start: int = 0) -> list[tuple[Any, ...]]:
    """Return requests that come one after the other, with three tokens each."""
    statements: list[tuple[Any, ...]] = []
    for number in range(count):
        at, name = start + 100 * number, f"r{start + number}"
        statements += [
            ("arrive", name, at, 5),
            ("step", at + 1, at + 11, (name, "prefill", 5)),
            ("step", at + 13, at + 23, (name, "decode", 1)),
            ("step", at + 24, at + 34, (name, "decode", 1)),
            ("finish", name, at + 35, "ok"),
        ]
    return statements
