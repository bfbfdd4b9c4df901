"""Requests and steps of transformers' `generate`: each row of a batch is a request, each call of the model a step.

It has no spans: it states them to `xsp.serving`, as an engine that takes no request into a batch that runs. A step ends
when the library asks whether rows have ended, and the next one begins: what it does for the next call is part of it. A
row that has ended is no longer served, but its request ends when `generate` returns.

- Of beams, a row of the batch before they were made is the request: a step computes a token of each of its beams, and
  adds one. All rows are served until the last one ends, since the library computes them all.
- With a drafting model (assisted, speculative decoding, lookups in the prompt) a step is drafting and the call that
  checks the draft, and adds as many tokens as were kept. The drafting model's own `generate` is part of the step, as is
  any other `generate` inside one.
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

OWNER, CRITERIA = "GenerationMixin", "stopping_criteria"
METHODS = {"_sample": "", "_beam_search": " with beams", "_assisted_decoding": " with a drafting model"}
"""The loops of `generate`, and what of `generate` each is."""


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
        self._inside = threading.local()

    def close(self) -> None:
        """Restore the methods; calls that still run end as they would have."""
        super().close()
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _wrap(self, module: ModuleType) -> None:
        owner = getattr(module, OWNER, None)
        for name, what in METHODS.items():
            if isinstance(owner, type) and callable(owner.__dict__.get(name)):
                self._replace(owner, name, getattr(self, name))
            else:
                self._notes.append(f"transformers has no {OWNER}.{name}: requests of `generate`{what} are not recorded")

    def _sample(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._generate(_Batch, call, arguments, options)

    def _beam_search(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._generate(_BeamBatch, call, arguments, options)

    def _assisted_decoding(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._generate(_DraftedText, call, arguments, options)

    def _generate(
        self, form: type[_Batch], call: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        begun = None if getattr(self._inside, "runs", False) else self._begin(form, arguments, options)
        if begun is None:
            return call()
        status, self._inside.runs = "error:BaseException", True
        try:
            result = call(**{CRITERIA: begun.criteria})
            status = "ok"
            return result
        except BaseException as error:
            status = f"error:{type(error).__name__}"
            raise
        finally:
            self._inside.runs = False
            begun.end(status)

    def _begin(self, form: type[_Batch], arguments: Sequence[Any], options: dict[str, Any]) -> _Batch | None:
        """Return the batch of a call; None if it cannot be told."""
        try:
            model = arguments[0]
            ids = arguments[1] if len(arguments) > 1 else options["input_ids"]
            criteria = options[CRITERIA]
            mask = options.get("attention_mask")
            rows, length = int(ids.shape[0]), int(ids.shape[1])
            if mask is not None and tuple(mask.shape) == (rows, length):
                prompts = [max(1, int(tokens)) for tokens in mask.sum(1).tolist()]
            else:
                prompts = [max(1, length)] * rows
            copies = form.copies(options)
            if rows % copies:
                raise ValueError(f"{rows} rows are not those of {copies} beams")
            engine = self._engine_of(model)
            return form(engine, next(self._numbers), prompts[::copies], length, copies, criteria, self._fail)
        except Exception as error:  # another version of the library
            self._fail(error)
            return None

    def _engine_of(self, model: Any) -> Engine:
        """Return the engine of a model's calls on this thread; a second model of the class gets a number."""
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
    """A call of `generate` that samples, or takes the most probable token."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        prompts: Sequence[int],
        length: int,
        copies: int,
        criteria: Any,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._fail, self._copies = engine, fail, copies
        self._length = length
        """Tokens of a row so far, with padding."""

        several = len(prompts) > 1
        self._open = {row: f"{number}.{row}" if several else str(number) for row in range(len(prompts))}
        self._names = tuple(self._open.values())
        self.criteria = _criteria_like(criteria, self._on_asked)
        now_ns = monotonic_ns()
        for row, name in self._open.items():
            engine.arrive(name, prompts[row], now_ns)
        self._parts: list[tuple[str, str, int, int]] = []
        self._step: RunningStep | None = None
        self._begin(
            [(name, PREFILL, copies * prompts[row], 1) for row, name in self._open.items()],
            len(prompts) * copies * length,
        )

    @staticmethod
    def copies(options: dict[str, Any]) -> int:
        """Return how many rows of the batch are of one request, from the options of the loop."""
        return 1

    def _begin(self, parts: list[tuple[str, str, int, int]], computed: int | None) -> None:
        self._parts = parts
        self._step = self._engine.step(parts, computed)
        self._step.begin()

    def _on_asked(self, ids: Any, has_ended: Any) -> None:
        """End a step, and begin the next one with the rows that have not ended."""
        try:
            ended = self._ended(has_ended)
            added = int(ids.shape[1]) - self._length
            self._length += added
            if self._step is not None:
                self._step.end(parts=self._with_added(added))
            self._step = None
            for row in [row for row in self._open if ended[row]]:
                del self._open[row]
            if self._open:
                count = self._copies
                self._begin([(name, DECODE, count, 1) for name in self._open.values()], self._computed())
        except Exception as error:
            self._fail(error)

    def _ended(self, has_ended: Any) -> Sequence[bool]:
        """Return of each row whether it has ended."""
        # the library reads them next, but for this device, where it does not wait
        is_read = not isinstance(has_ended, bool) and has_ended.device.type != "mps"
        ended: Sequence[bool] = has_ended.tolist() if is_read else [has_ended is True] * len(self._names)
        return ended

    def _with_added(self, added: int) -> list[tuple[str, str, int, int]]:
        """Return the parts of the step that ends, which added so many tokens to each row."""
        return self._parts

    def _computed(self) -> int | None:
        """Return how many tokens the model is called with in a step that decodes; None if it is not known."""
        return len(self._names)

    def end(self, status: str) -> None:
        """End the requests, and the step that runs if the call failed."""
        try:
            if self._step is not None and status == "ok":
                self._step.drop()  # the library asked for the last time, and no call of the model came
            elif self._step is not None:
                self._step.end(status)
            for name in self._names:
                self._engine.finish(name, status)
        except Exception as error:
            self._fail(error)


class _BeamBatch(_Batch):
    """A call of `generate` with beams, which are rows of their own."""

    @staticmethod
    def copies(options: dict[str, Any]) -> int:
        return int(options["generation_config"].num_beams)

    def _ended(self, has_ended: Any) -> Sequence[bool]:
        return [False] * len(self._names)  # the library tells of candidates only

    def _computed(self) -> int | None:
        return len(self._names) * self._copies


class _DraftedText(_Batch):
    """A call of `generate` of one text, several tokens of which may be added at once."""

    def _with_added(self, added: int) -> list[tuple[str, str, int, int]]:
        added = max(1, added)
        return [(name, phase, tokens if phase == PREFILL else added, added) for name, phase, tokens, _ in self._parts]

    def _computed(self) -> int | None:
        return None  # as many as were drafted, and one


def _criteria_like(criteria: Any, on_asked: Callable[[Any, Any], None]) -> Any:
    """Return stopping criteria of the same class that also tell the texts, and which of them have ended."""
    base = type(criteria)

    class Telling(base):  # type: ignore[misc, valid-type]
        def __call__(self, input_ids: Any, *arguments: Any, **options: Any) -> Any:
            has_ended = super().__call__(input_ids, *arguments, **options)
            on_asked(input_ids, has_ended)
            return has_ended

    Telling.__name__, Telling.__qualname__ = base.__name__, base.__qualname__
    return Telling(criteria)
