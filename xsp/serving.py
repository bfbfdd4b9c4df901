"""Engines that serve language models: which requests each of their steps served, and where a request's time went.

An engine runs steps. A step computes tokens of several requests: a part of a prompt (prefill), or the next tokens
(decode). `Engine` is how a program, or an integration, states that; *sinks* take it: a profile stores it, a handle of
`xsp.instrument` sends it over OpenTelemetry. Without a sink an engine does nothing.

`Requests` turns what happened into accounts. The latency of a request, from its arrival to its end, is the sum of these
parts, in nanoseconds (`PARTS`):

- `queue`: from the arrival to the first step that serves it.
- `own_prefill`, `own_decode`: of each step that serves it, the share of its own tokens in the tokens of the step.
- `others_prefill`, `others_decode`: the rest of these steps, by the tokens of the other requests.
- `compiling`: of these steps, the time that is stated to be compilation.
- `host`: between two steps in a row that serve it, and from its last step to its end.
- `preempted`: between two steps that serve it, if the engine ran steps without it in between.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from xsp import clock, processes

PREFILL, DECODE, MIXED, IDLE = KINDS = ("prefill", "decode", "mixed", "idle")
"""Names of the kinds of engine steps by their numbers, as in traces of other engines."""

PARTS = (
    "queue", "own_prefill", "own_decode", "others_prefill", "others_decode", "compiling", "host", "preempted"
)  # fmt: skip
"""Parts of a request's latency, which add up to it."""

QUEUE, OWN_PREFILL, OWN_DECODE, OTHERS_PREFILL, OTHERS_DECODE, COMPILING, HOST, PREEMPTED = range(len(PARTS))

COLLECTOR = "serving"
"""Value of the column `collector` of requests and of engine steps."""

CANCELLED, UNCLOSED = "cancelled", "unclosed"

MOST_ENDED = 4096
"""Limit on the ids of ended requests that are remembered, to recognize an id that comes again."""

MOST_PROMPTS = 8
"""Limit on the prompts of a step, the longest ones, that can be a request's `largest_prefill`."""

MOST_OPEN = 100_000
"""Limit on requests that have not ended: a program that never ends them must not fill the memory."""


class Part(NamedTuple):
    """What a step computes for one request."""

    request: Hashable
    """Id of the request: unique among those that an engine serves at the same time."""

    phase: str
    """`prefill` if it reads tokens of the prompt, `decode` if it adds tokens."""

    tokens: int
    """Tokens that the step computes for the request."""

    new: int | None = None
    """Tokens that it generates; default: those of decode, and one at the end of a prompt."""


class EngineStep(NamedTuple):
    """A step that has ended; times are of `clock.monotonic_ns`."""

    start_ns: int
    end_ns: int
    parts: Sequence[Part]
    status: str = "ok"
    compiling_ns: int = 0
    """Nanoseconds of the step in which code was compiled."""

    thread: int | None = None
    place: Any = None
    """What the sink remembers of the step, such as the ids of its span."""

    computed: int | None = None
    """Tokens that the model was called with, with padding; None if they are not stated."""


class Segment(NamedTuple):
    """A time of a request's life: `queue`, one step of `prefill`, steps in a row of `decode`, or `preempted`."""

    name: str
    start_ns: int
    end_ns: int
    tokens: int
    steps: list[Any]
    """`EngineStep.place` of its steps."""


class RequestAccount(NamedTuple):
    """A request that has ended; times are of `clock.monotonic_ns`, parts are those of `PARTS`, in nanoseconds."""

    request: Hashable
    arrival_ns: int
    end_ns: int
    status: str
    """`ok`, `cancelled`, `error:<exception type>`, or `unclosed` if its end was not stated."""

    parts: tuple[int, ...]
    first_token_ns: int | None
    """When its first token was computed; None if none was."""

    first_parts: tuple[int, ...] | None
    """The parts of the time from its arrival to its first token."""

    last_token_ns: int | None
    prompt_tokens: int
    """Tokens of its prompt, as stated, else as far as they were computed before the first token."""

    output_tokens: int
    steps: int
    largest_prefill: tuple[Hashable, int] | None
    """The other request whose prefill took most of its time, and how long, in nanoseconds."""

    has_arrival: bool
    """Whether its arrival was stated; else its queue is unknown, and counts as 0."""

    segments: Sequence[Segment]
    context: Any
    """What the sink remembers of the request, such as its trace."""

    @property
    def latency_ns(self) -> int:
        """From its arrival to its end."""
        return self.end_ns - self.arrival_ns


class _Open:
    """A request that has not ended."""

    __slots__ = (
        "arrival_ns", "context", "first", "has_arrival", "has_decoded", "is_provisional", "last_end_ns", "last_number",
        "last_token_ns", "output_tokens", "parts", "prefill_by", "prefilled", "prompt_tokens", "segments", "steps",
    )  # fmt: skip

    def __init__(self, arrival_ns: int, has_arrival: bool, prompt_tokens: int | None, context: Any) -> None:
        self.arrival_ns, self.has_arrival, self.prompt_tokens, self.context = (
            arrival_ns, has_arrival, prompt_tokens, context,
        )  # fmt: skip
        self.parts = [0] * len(PARTS)
        self.last_end_ns = arrival_ns
        self.last_number = -1
        self.has_decoded = False
        self.is_provisional = False
        """Whether its last token is assumed: the step that read its prompt may not have been the last one to do so."""

        self.first: tuple[int, tuple[int, ...]] | None = None
        self.last_token_ns: int | None = None
        self.prefilled = self.output_tokens = self.steps = 0
        self.prefill_by: dict[Hashable, int] = {}
        self.segments: list[Segment] = []


class Requests:
    """The requests of one engine: told what happens in order, it returns the account of each that ends.

    A step is told when it ends, so an end may be told before a step that was running then; such a request ends with
    that step, and its account is returned with it.
    """

    def __init__(self, note: Callable[[str], object], keeps_segments: bool = False) -> None:
        """Start without requests.

        Args:
            note: takes a sentence on what the program stated wrongly.
            keeps_segments: whether accounts have `segments`.
        """
        self._note, self._keeps_segments = note, keeps_segments
        self._open: dict[Hashable, _Open | None] = {}
        """By id; None for a request that nobody asks for."""

        self._ending: dict[Hashable, tuple[int, str]] = {}
        self._ended: dict[Hashable, None] = {}
        self.step_count = 0

    def arrive(
        self,
        request: Hashable,
        at_ns: int,
        prompt_tokens: int | None = None,
        is_stated: bool = True,
        context: Any = None,
        is_kept: bool = True,
    ) -> list[RequestAccount]:
        """State that a request arrived; return the account of an earlier request with its id, if that is ending.

        Args:
            request: its id.
            at_ns: when it arrived.
            prompt_tokens: tokens of its prompt, if known.
            is_stated: False if the program did not state it, and a step serves the request.
            context: is returned with its account.
            is_kept: False for a request whose account nobody asks for.
        """
        accounts = self._settle(lambda other: other == request)
        if request in self._open:
            if is_stated:
                self._note(
                    f"the request {request!r} arrived again before it ended; the second arrival was left out: "
                    "requests that are served at the same time need different ids"
                )
            return accounts
        if not is_stated and request in self._ended:
            self._note(
                f"a step served the request {request!r} after its end, which was left out: an id that is used again "
                "needs an arrival"
            )
            return accounts
        if not is_stated:
            self._note("requests were served whose arrival was not stated: their time in a queue is unknown")
        self._ended.pop(request, None)
        if len(self._open) >= MOST_OPEN:
            self._note(f"more than {MOST_OPEN:,} requests had not ended, and the oldest ones were left out")
            accounts += self._close(next(iter(self._open)), at_ns, UNCLOSED)
        self._open[request] = _Open(at_ns, is_stated, prompt_tokens, context) if is_kept else None
        return accounts

    def step(self, step: EngineStep) -> list[RequestAccount]:
        """State that a step ended; return the accounts of requests that had ended before or during it."""
        parts = step.parts
        served = {part[0] for part in parts} if self._ending else set()
        accounts = self._settle(lambda request: request not in served or step.start_ns >= self._ending[request][0])
        number, self.step_count = self.step_count, self.step_count + 1
        kept = [(part, state) for part in parts if (state := self._open.get(part[0])) is not None]
        if kept:
            prefill = sum(part[2] for part in parts if part[1] == PREFILL)
            total = sum(part[2] for part in parts)
            prompts = [part for part in parts if part[1] == PREFILL]
            if len(prompts) > MOST_PROMPTS:
                prompts = sorted(prompts, key=lambda part: -part[2])[:MOST_PROMPTS]
            for part, state in kept:
                self._serve(part, state, step, number, prefill, total, prompts)
        return accounts + self._settle(lambda request: request in served)

    def pass_step(self) -> list[RequestAccount]:
        """State that a step ended that served none of the requests whose accounts are kept."""
        self.step_count += 1
        return self.settle()

    def _serve(
        self, part: Part, state: _Open, step: EngineStep, number: int, prefill: int, total: int, prompts: Sequence[Part]
    ) -> None:
        """Add a step to a request that it serves."""
        request, phase, tokens, new = part
        start_ns = max(step.start_ns, state.last_end_ns)
        end_ns = max(step.end_ns, start_ns)
        gap_ns, is_next = start_ns - state.last_end_ns, number == state.last_number + 1
        gap = QUEUE if not state.steps else HOST if is_next else PREEMPTED
        state.parts[gap] += gap_ns
        compiling_ns = min(step.compiling_ns, end_ns - start_ns)
        work_ns = end_ns - start_ns - compiling_ns
        is_prompt = phase == PREFILL
        own_ns = work_ns * tokens // total
        prefill_ns = work_ns * (prefill - tokens * is_prompt) // total
        state.parts[COMPILING] += compiling_ns
        state.parts[OWN_PREFILL if is_prompt else OWN_DECODE] += own_ns
        state.parts[OTHERS_PREFILL] += prefill_ns
        state.parts[OTHERS_DECODE] += work_ns - own_ns - prefill_ns
        for other in prompts if prefill_ns else ():
            if other[0] != request:
                state.prefill_by[other[0]] = state.prefill_by.get(other[0], 0) + work_ns * other[2] // total
        if self._keeps_segments:
            self._add_segments(state, step, phase, tokens, gap, start_ns, end_ns)
        state.last_end_ns, state.last_number, state.steps = end_ns, number, state.steps + 1
        self._count_tokens(state, is_prompt, tokens, new, end_ns)

    @staticmethod
    def _count_tokens(state: _Open, is_prompt: bool, tokens: int, new: int | None, end_ns: int) -> None:
        if is_prompt and not state.has_decoded:
            state.prefilled += tokens
        if new is not None or not is_prompt:
            state.is_provisional = False
            new = tokens if new is None else new
        else:
            if state.is_provisional:  # more of the prompt was read, so it was not complete
                state.output_tokens -= 1
                state.first = state.first if state.output_tokens else None
            new = int(state.prompt_tokens is None or state.prefilled >= state.prompt_tokens)
            state.is_provisional = bool(new)
        state.has_decoded |= not is_prompt
        if new:
            state.output_tokens += new
            state.last_token_ns = end_ns
            if state.first is None:
                state.first = end_ns, tuple(state.parts)

    @staticmethod
    def _add_segments(
        state: _Open, step: EngineStep, phase: str, tokens: int, gap: int, start_ns: int, end_ns: int
    ) -> None:
        segments = state.segments
        if gap in (QUEUE, PREEMPTED) and start_ns > state.last_end_ns:
            segments.append(Segment(PARTS[gap], state.last_end_ns, start_ns, 0, []))
        if phase == DECODE and segments and segments[-1].name == DECODE:
            last = segments[-1]
            last.steps.append(step.place)
            segments[-1] = last._replace(end_ns=end_ns, tokens=last.tokens + tokens)
        else:
            segments.append(Segment(phase, start_ns, end_ns, tokens, [step.place]))

    def finish(self, request: Hashable, at_ns: int, status: str = "ok") -> None:
        """State that a request ended: `ok`, `cancelled` or `error:<exception type>`."""
        if request in self._open:
            self._ending.setdefault(request, (at_ns, status))
        elif request not in self._ended:
            self._note(f"the request {request!r} ended, and had neither arrived nor been served")

    def settle(self) -> list[RequestAccount]:
        """Return the accounts of requests whose end was told; to be called while no step is running."""
        return self._settle(lambda request: True)

    def close(self, at_ns: int) -> list[RequestAccount]:
        """Return the accounts of all requests; those whose end was not stated have the status `unclosed`."""
        accounts = self.settle()
        left = [request for request, state in self._open.items() if state is not None]
        if left:
            names = ", ".join(map(repr, left[:3])) + (" …" if len(left) > 3 else "")
            self._note(
                f"{len(left):,} {'request' if len(left) == 1 else 'requests'} never ended ({names}): "
                "state the end of each with `finish`"
            )
        for request in list(self._open):
            accounts += self._close(request, at_ns, UNCLOSED)
        return accounts

    def _settle(self, is_over: Callable[[Hashable], bool]) -> list[RequestAccount]:
        accounts: list[RequestAccount] = []
        if self._ending:
            for request in [request for request in self._ending if is_over(request)]:
                accounts += self._close(request, *self._ending.pop(request))
        return accounts

    def _close(self, request: Hashable, at_ns: int, status: str) -> list[RequestAccount]:
        state = self._open.pop(request)
        self._ended[request] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        if state is None:
            return []
        end_ns = max(at_ns, state.last_end_ns)
        rest = QUEUE if not state.steps else HOST if state.last_number + 1 >= self.step_count else PREEMPTED
        state.parts[rest] += end_ns - state.last_end_ns
        if self._keeps_segments and rest != HOST and end_ns > state.last_end_ns:
            state.segments.append(Segment(PARTS[rest], state.last_end_ns, end_ns, 0, []))
        first_ns, first_parts = state.first if state.first is not None else (None, None)
        largest = max(state.prefill_by.items(), key=lambda item: item[1]) if state.prefill_by else None
        return [
            RequestAccount(
                request, state.arrival_ns, end_ns, status, tuple(state.parts), first_ns, first_parts,
                state.last_token_ns,
                state.prompt_tokens if state.prompt_tokens is not None else state.prefilled, state.output_tokens,
                state.steps, largest, state.has_arrival, state.segments, state.context,
            )
        ]  # fmt: skip


# --- what a program states ------------------------------------------------------------------------------------------


class Sink(Protocol):
    """What takes the statements of engines. Its methods run in the program, and must be short."""

    def accepts(self, engine: Engine) -> bool:
        """Return whether it takes the statements of an engine."""

    def arrive(self, engine: Engine, request: Hashable, at_ns: int, prompt_tokens: int | None, is_stated: bool) -> None:
        """Take the arrival of a request."""

    def begin(self, engine: Engine, parts: Sequence[Part]) -> Any:
        """Take the begin of a step; what it returns is `EngineStep.place`."""

    def end(self, engine: Engine, step: EngineStep) -> None:
        """Take the end of a step."""

    def drop(self, engine: Engine, place: Any) -> None:
        """Take that a step, for which `begin` returned this, did not take place."""

    def finish(self, engine: Engine, request: Hashable, at_ns: int, status: str) -> None:
        """Take the end of a request."""

    def end_engine(self, engine: Engine, at_ns: int) -> None:
        """Take the end of an engine."""

    def note(self, text: str) -> None:
        """Take a sentence on what the program stated wrongly."""


_sinks: list[Sink] = []


def attach(sink: Sink) -> None:
    """Give a sink the statements of all engines of this process that it accepts."""
    _sinks.append(sink)


def detach(sink: Sink) -> None:
    """Take the statements from a sink, if it has them."""
    with contextlib.suppress(ValueError):
        _sinks.remove(sink)


class Engine:
    """An engine that serves requests in steps.

    >>> engine = Engine("mine")
    >>> engine.arrive("a", prompt_tokens=17)
    >>> with engine.step([("a", "prefill", 17)]):
    ...     pass
    >>> with engine.step([("a", "decode", 1), ("b", "prefill", 512)]):
    ...     pass
    >>> engine.finish("a")

    Any thread may state arrivals and ends; the steps are those of one thread, one after the other. Nothing raises: what
    is stated wrongly becomes a note of the run or the handle.
    """

    def __init__(self, name: str = "engine", model: Any = None, model_name: str | None = None) -> None:
        """Make an engine.

        Args:
            name: its name in tables; different for each engine of a program.
            model: the module that its steps call; only a weak reference is kept.
            model_name: name of the model for OpenTelemetry; default: that of the engine.
        """
        self.name, self.model_name = name, model_name or name
        self._model = weakref.ref(model) if model is not None else None
        self.running = 0
        """Number of its steps that have begun and not ended."""

        self._known: set[Hashable] = set()

    @property
    def model(self) -> Any:
        """The module that its steps call; None if it is not known or no longer there."""
        return self._model() if self._model is not None else None

    def arrive(self, request: Hashable, prompt_tokens: int | None = None, at_ns: int | None = None) -> None:
        """State that a request arrived, in its own trace, if it has one: call it where the request is received.

        Args:
            request: its id: a text or a number, different from those of other requests that have not ended.
            prompt_tokens: tokens of its prompt; needed if its prefill is cut into several steps.
            at_ns: when it arrived, of `time.perf_counter_ns`; default: now.
        """
        if _sinks:
            self._arrive(request, prompt_tokens, clock.monotonic_ns() if at_ns is None else at_ns, is_stated=True)

    def _arrive(self, request: Hashable, prompt_tokens: int | None, at_ns: int, is_stated: bool) -> None:
        try:
            self._known.add(request)
            for sink in tuple(_sinks):
                if sink.accepts(self):
                    sink.arrive(self, request, at_ns, prompt_tokens, is_stated)
        except Exception as error:
            self.note(f"the arrival of a request was left out ({type(error).__name__}: {error})")

    def step(self, requests: Iterable[Sequence[Any]], computed: int | None = None) -> RunningStep:
        """Return the context of a step.

        Args:
            requests: for each request that the step serves its id, `prefill` or `decode`, its tokens in the step, and
                optionally how many tokens the step generates for it (see `Part`).
            computed: tokens that the model is called with, with padding, if there is some.
        """
        return RunningStep(self, requests, computed)

    def finish(self, request: Hashable, status: str = "ok", at_ns: int | None = None) -> None:
        """State that a request ended.

        Args:
            request: its id.
            status: `ok`, `cancelled` or `error:<exception type>`.
            at_ns: when it ended, of `time.perf_counter_ns`; default: now.
        """
        if not _sinks:
            return
        at_ns = clock.monotonic_ns() if at_ns is None else at_ns
        try:
            self._known.discard(request)
            for sink in tuple(_sinks):
                if sink.accepts(self):
                    sink.finish(self, request, at_ns, status)
        except Exception as error:
            self.note(f"the end of a request was left out ({type(error).__name__}: {error})")

    def note(self, text: str) -> None:
        """Give a sentence on what was stated wrongly to all sinks."""
        for sink in tuple(_sinks):
            if sink.accepts(self):
                sink.note(text)

    def close(self) -> None:
        """State that the engine ended; requests that have not ended have the status `unclosed`."""
        self._known.clear()
        for sink in tuple(_sinks):
            if sink.accepts(self):
                sink.end_engine(self, clock.monotonic_ns())


class RunningStep:
    """A step of an engine, from `begin` to `end`, or as a context."""

    __slots__ = ("_computed", "_engine", "_parts", "_places", "start_ns")

    def __init__(self, engine: Engine, parts: Iterable[Sequence[Any]], computed: int | None = None) -> None:
        self._engine, self._parts, self._computed = engine, parts, computed
        self._places: list[tuple[Sink, Any]] = []
        self.start_ns = 0
        """When it began, of `time.perf_counter_ns`; 0 before."""

    def begin(self) -> None:
        """Begin the step. Never raises."""
        if not _sinks:
            return
        engine, start_ns = self._engine, clock.monotonic_ns()
        engine.running += 1
        try:
            parts: Any = tuple(self._parts)
            self._parts = parts
            known = engine._known
            for part in parts:
                if part[0] not in known:
                    engine._arrive(part[0], None, start_ns, is_stated=False)
            for sink in tuple(_sinks):
                if sink.accepts(engine):
                    self._places.append((sink, sink.begin(engine, parts)))
        except Exception as error:
            engine.note(f"a step was left out, because its requests are not valid ({type(error).__name__}: {error})")
        self.start_ns = clock.monotonic_ns()

    def end(self, status: str = "ok", start_ns: int = 0, parts: Iterable[Sequence[Any]] | None = None) -> None:
        """End the step.

        Args:
            status: `ok` or `error:<exception type>`.
            start_ns: its start, if it began by waiting for an earlier step.
            parts: what it computed for the same requests, if that is known only now.
        """
        if not self.start_ns:
            return
        end_ns, thread = clock.monotonic_ns(), threading.get_native_id()
        if parts is not None:
            self._parts = tuple(parts)
        start_ns, parts, places = max(self.start_ns, start_ns), self._parts, self._places
        self.start_ns, self._places = 0, []
        for sink, place in places:
            step = EngineStep(start_ns, end_ns, parts, status, 0, thread, place, self._computed)  # type: ignore[arg-type]
            sink.end(self._engine, step)
        self._engine.running -= 1

    def drop(self) -> None:
        """Forget a step that did not take place after all."""
        if self.start_ns:
            for sink, place in self._places:
                sink.drop(self._engine, place)
            self.start_ns, self._places = 0, []
            self._engine.running -= 1

    def __enter__(self) -> RunningStep:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("ok" if kind is None else f"error:{kind.__name__}")


# --- what becomes of it -----------------------------------------------------------------------------------------------


MOST_ENTRIES = 200_000
"""Limit on statements that wait for the thread."""

PERIOD_S = 0.1

Deliver = Callable[["Engine", Sequence[tuple[int, EngineStep]], Sequence[RequestAccount]], object]
"""Takes the steps of an engine that ended, with their numbers, and the requests that ended."""


class Log:
    """Statements in the order in which they were made, and a thread that turns them into steps and accounts."""

    def __init__(
        self,
        deliver: Deliver,
        note: Callable[[str], object],
        keeps_segments: bool = False,
        compilations: Callable[[], Sequence[tuple[int, int]]] = tuple,
    ) -> None:
        """Start without statements; the thread starts with the first one.

        Args:
            deliver: is called on the thread.
            note: takes sentences on what the program stated wrongly, the first of each form.
            keeps_segments: as for `Requests`.
            compilations: returns start and end of the latest compilations, in nanoseconds since the epoch.
        """
        self._compilations = compilations
        self._compiled: Sequence[tuple[int, int]] = ()
        self._deliver, self._take_note, self._keeps_segments = deliver, note, keeps_segments
        self._entries: deque[tuple[Engine, str, tuple[Any, ...]]] = deque()
        self._requests: dict[Engine, Requests] = {}
        self._noted: set[str] = set()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, engine: Engine, operation: str, *arguments: Any) -> None:
        """Add a statement: the name of a method of `Requests`, and its arguments. Hot."""
        if len(self._entries) >= MOST_ENTRIES:
            self.note("statements of engines came faster than they could be handled, and some were left out")
            return
        if engine not in self._requests:
            self._requests.setdefault(engine, Requests(self.note, self._keeps_segments))
        self._entries.append((engine, operation, arguments))
        if self._thread is None:
            self._start()

    def note(self, text: str) -> None:
        """Take a sentence, unless one was taken that differs only in the request and in numbers."""
        form = _NAMES.sub("", text)
        if form not in self._noted:
            self._noted.add(form)
            self._take_note(text)

    def _start(self) -> None:
        """Start the thread that handles the entries, unless it runs or the log is closing."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = processes.start_thread(self._run, "xsp serves")

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self.drain()

    def drain(self) -> None:
        """Handle the statements so far. Never raises."""
        with self._lock:
            idle = [
                engine for engine in list(self._requests) if not engine.running
            ]  # before: a step may begin and end now
            found: dict[Engine, tuple[list[tuple[int, EngineStep]], list[RequestAccount]]] = {}
            # Start and end of the latest compilations, on the monotonic clock.
            latest = self._compilations() if self._entries else ()
            offset_ns = clock.anchor().offset_ns if latest else 0
            self._compiled = [(start_ns - offset_ns, end_ns - offset_ns) for start_ns, end_ns in latest]
            for _ in range(len(self._entries)):
                engine, operation, arguments = self._entries.popleft()
                try:
                    self._handle(found.setdefault(engine, ([], [])), engine, operation, arguments)
                except Exception as error:
                    self.note(f"a statement of {engine.name!r} was left out: {type(error).__name__}: {error}")
            for engine in idle:
                if (requests := self._requests.get(engine)) is not None:
                    found.setdefault(engine, ([], []))[1].extend(requests.settle())
            for engine, (steps, accounts) in found.items():
                if steps or accounts:
                    try:
                        self._deliver(engine, steps, accounts)
                    except Exception as error:
                        self.note(f"steps of {engine.name!r} are lost: {type(error).__name__}: {error}")

    def _handle(
        self,
        found: tuple[list[tuple[int, EngineStep]], list[RequestAccount]],
        engine: Engine,
        operation: str,
        arguments: tuple[Any, ...],
    ) -> None:
        requests = self._requests.get(engine)
        if requests is None:
            requests = self._requests[engine] = Requests(self.note, self._keeps_segments)
        if operation == "step":
            [step] = arguments
            compiling_ns = clock.covered_ns(self._compiled, step.start_ns, step.end_ns)
            step = step._replace(parts=tuple(self._valid(step.parts)), compiling_ns=compiling_ns)
            found[0].append((requests.step_count, step))
            arguments = (step,)
        found[1].extend(getattr(requests, operation)(*arguments) or ())
        if operation == "close":
            del self._requests[engine]

    def _valid(self, parts: Sequence[Any]) -> Iterable[Part]:
        """Return the valid parts of a step."""
        if not parts:
            self.note("a step of an engine served no request: it is idle, and belongs to no request's time")
        seen: set[Hashable] = set()
        for part in parts:
            request, phase, tokens, new = (*part, None) if len(part) == 3 else part
            if phase not in (PREFILL, DECODE) or not _is_count(tokens, 1) or not (new is None or _is_count(new, 0)):
                self.note(
                    f"the request {request!r} was left out of a step: {(phase, tokens, new)!r} is not `prefill` or "
                    "`decode` with a number of tokens above 0"
                )
            elif request in seen:
                self.note(f"the request {request!r} was served twice in one step; the first of both counts")
            else:
                seen.add(request)
                yield Part(request, phase, tokens, new)

    def close(self) -> None:
        """Handle all statements, and end the thread; requests that have not ended have the status `unclosed`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for engine in list(self._requests):
            self._entries.append((engine, "close", (clock.monotonic_ns(),)))
        self.drain()

    def renew(self) -> None:
        """Forget everything, in a forked child: the thread stayed with the parent, maybe with the locks."""
        self._entries.clear()
        self._requests.clear()
        self._lock, self._thread, self._closing = threading.Lock(), None, threading.Event()


_NAMES = re.compile(r"'[^']*'|\d[\d,]*|\(.*\)")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
