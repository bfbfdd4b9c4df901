"""A sink that keeps what engines state, for the tests of serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xsp.serving import Engine, EngineStep, Log, Part, RequestAccount


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

    def finish(self, engine: Engine, request: Any, at_ns: int, status: str) -> None:
        self.put(engine, "finish", request, at_ns, status)

    def end_engine(self, engine: Engine, at_ns: int) -> None:
        self.put(engine, "close", at_ns)
