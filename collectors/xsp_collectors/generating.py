"""Requests and steps of transformers' `generate`: each row of a batch is a request, each call of the model a step.

It has no spans: it states them to `xsp.serving`, as an engine that takes no request into a batch that runs. A step ends
when the library asks whether rows have ended, and the next one begins: what it does for the next call is part of it. A
row that has ended is no longer served, but its request ends when `generate` returns. Sampling and the greedy search are
seen; beams and a drafting model are not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from xsp.clock import monotonic_ns
from xsp.schema import Level
from xsp.serving import DECODE, PREFILL, Engine, RunningStep
from xsp_collectors.imported import MethodWrapper

OWNER, METHOD, CRITERIA = "GenerationMixin", "_sample", "stopping_criteria"


class Generation(MethodWrapper):
    """The calls of `generate` in this process."""

    name = "generation"
    module = "transformers.generation.utils"
    levels = (Level.MODEL,)
    by_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._engines: dict[tuple[str, int], Engine] = {}
        """By class of the model and thread: the steps of an engine follow one another."""

        self._numbers = itertools.count()

    def close(self) -> None:
        """Restore the method; calls that still run end as they would have."""
        super().close()
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _wrap(self, module: ModuleType) -> None:
        owner = getattr(module, OWNER, None)
        if not isinstance(owner, type) or not callable(owner.__dict__.get(METHOD)):
            self._notes.append(f"transformers has no {OWNER}.{METHOD}: requests of `generate` are not recorded")
            return
        self._replace(owner, METHOD, self._sample)

    def _sample(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun = self._begin(arguments, options)
        if begun is None:
            return call()
        status = "error:BaseException"
        try:
            result = call(**{CRITERIA: begun.criteria})
            status = "ok"
            return result
        except BaseException as error:
            status = f"error:{type(error).__name__}"
            raise
        finally:
            begun.end(status)

    def _begin(self, arguments: Sequence[Any], options: dict[str, Any]) -> _Batch | None:
        """Return the batch of a call; None if it cannot be told."""
        try:
            model = arguments[0]
            ids = arguments[1] if len(arguments) > 1 else options["input_ids"]
            criteria = options[CRITERIA]
            engine = self._engine_of(model)
            mask = options.get("attention_mask")
            rows, length = int(ids.shape[0]), int(ids.shape[1])
            if mask is not None and tuple(mask.shape) == (rows, length):
                prompts = [max(1, int(tokens)) for tokens in mask.sum(1).tolist()]
            else:
                prompts = [max(1, length)] * rows
            return _Batch(engine, next(self._numbers), prompts, length, criteria, self._fail)
        except Exception as error:  # another version of the library
            self._fail(error)
            return None

    def _engine_of(self, model: Any) -> Engine:
        name = type(model).__name__
        key = name, threading.get_ident()
        if (engine := self._engines.get(key)) is None:
            number = 1 + sum(other == name for other, _ in self._engines)
            title = f"{name}.generate{f' #{number}' if number > 1 else ''}"
            engine = self._engines[key] = Engine(title, model, name)
        return engine

    def _fail(self, error: BaseException) -> None:
        note = f"requests of transformers' `generate` are incomplete: {type(error).__name__}: {error}"
        if note not in self._notes:
            self._notes.append(note)


class _Batch:
    """A call of `generate`."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        prompts: Sequence[int],
        length: int,
        criteria: Any,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._fail = engine, fail
        several = len(prompts) > 1
        self._open = {row: f"{number}.{row}" if several else str(number) for row in range(len(prompts))}
        self._names = tuple(self._open.values())
        self.criteria = _criteria_like(criteria, self._on_asked)
        now_ns = monotonic_ns()
        for row, name in self._open.items():
            engine.arrive(name, prompts[row], now_ns)
        self._step: RunningStep | None = self._next(
            [(name, PREFILL, prompts[row], 1) for row, name in self._open.items()], len(prompts) * length
        )

    def _next(self, parts: Sequence[tuple[str, str, int, int]], computed: int) -> RunningStep:
        step = self._engine.step(parts, computed)
        step.begin()
        return step

    def _on_asked(self, has_ended: Any) -> None:
        """End a step, and begin the next one with the rows that have not ended."""
        try:
            # the library reads them next, but for this device, where it does not wait
            is_read = not isinstance(has_ended, bool) and has_ended.device.type != "mps"
            ended = has_ended.tolist() if is_read else [has_ended is True] * len(self._names)
            if self._step is not None:
                self._step.end()
            self._step = None
            for row in [row for row in self._open if ended[row]]:
                del self._open[row]
            if self._open:
                self._step = self._next([(name, DECODE, 1, 1) for name in self._open.values()], len(self._names))
        except Exception as error:
            self._fail(error)

    def end(self, status: str) -> None:
        """End the requests, and the step that runs if the call failed."""
        try:
            if self._step is not None:
                self._step.end(status)
            for name in self._names:
                self._engine.finish(name, status)
        except Exception as error:
            self._fail(error)


def _criteria_like(criteria: Any, on_asked: Callable[[Any], None]) -> Any:
    """Return stopping criteria of the same class that also tell which rows have ended."""
    base = type(criteria)

    class Telling(base):  # type: ignore[misc, valid-type]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            has_ended = super().__call__(*arguments, **options)
            on_asked(has_ended)
            return has_ended

    Telling.__name__, Telling.__qualname__ = base.__name__, base.__qualname__
    return Telling(criteria)
