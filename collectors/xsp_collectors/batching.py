"""Requests and steps of transformers' continuous batching (`generate_batch`, its manager, `transformers serve`).

It has no spans: it states to `xsp.serving` which requests each step of the generation loop served. A request arrives
when its state is created, in the thread that adds it. A step begins when its batch is prepared, and ends when the
tokens are there: what is before and after is the host's time between steps. With asynchronous batching a step ends
when its tokens have been read, and begins when the step before has ended.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from xsp.clock import monotonic_ns
from xsp.schema import Level
from xsp.serving import CANCELLED, DECODE, PREFILL, Engine, RunningStep
from xsp_collectors.imported import MethodWrapper

NEEDED = {
    "ContinuousBatchingManager": ("add_request", "cancel_request", "stop"),
    "ContinuousBatchProcessor": ("prepare_next_batch", "update_batch", "fail_all_requests"),
    "OutputRouter": ("fail_and_deliver",),
    "RequestState": ("__post_init__",),
}
"""Classes of the module, with the methods that are wrapped."""


class ContinuousBatching(MethodWrapper):
    """The engines of transformers in this process."""

    name = "batching"
    module = "transformers.generation.continuous_batching.continuous_api"
    levels = (Level.MODEL,)
    by_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._engines: weakref.WeakKeyDictionary[Any, _Served] = weakref.WeakKeyDictionary()
        """By the router of the outputs, which manager and processor share."""

        self._adding = threading.local()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Restore the methods; engines that still run are left."""
        super().close()
        for served in list(self._engines.values()):
            served.engine.close()
        self._engines.clear()

    def _wrap(self, module: ModuleType) -> None:
        missing = [
            f"{owner}.{name}"
            for owner, names in NEEDED.items()
            for name in names
            if name not in getattr(getattr(module, owner, None), "__dict__", ())
        ]
        if missing:
            version = getattr(sys.modules.get("transformers"), "__version__", "?")
            self._notes.append(
                f"continuous batching of transformers {version} has no {', '.join(missing)}, so its requests are not "
                "recorded; state them with `xsp.serving.Engine`"
            )
            return
        for owner, names in NEEDED.items():
            for name in names:
                self._replace(getattr(module, owner), name, getattr(self, f"_{name.strip('_')}"))

    # --- the manager, in the threads of its callers ---------------------------------------------------------

    def _add_request(self, call: Callable[[], Any], manager: Any, *_: Any, **__: Any) -> Any:
        self._adding.served = served = self._served(manager)
        self._adding.request = None
        try:
            return call()
        except BaseException as error:  # the queue is full
            if served is not None and self._adding.request is not None:
                served.engine.finish(self._adding.request, f"error:{type(error).__name__}")
            raise
        finally:
            self._adding.served = None

    def _served(self, manager: Any) -> _Served | None:
        """Return the engine of a manager; None if it cannot be told apart."""
        try:
            with self._lock:
                served = self._engines.get(manager.output_router)
                if served is None:
                    name = type(manager.model).__name__
                    taken = {each.engine.name for each in self._engines.values()}
                    names = (name if number == 1 else f"{name} #{number}" for number in range(1, len(taken) + 2))
                    free = next(each for each in names if each not in taken)
                    served = self._engines[manager.output_router] = _Served(Engine(free, manager.model, name))
                return served
        except Exception as error:
            self._fail(error)
            return None

    def _post_init(self, call: Callable[[], Any], state: Any, *_: Any, **__: Any) -> Any:
        result = call()
        served = getattr(self._adding, "served", None)
        if served is not None:
            with self._guarded():
                self._adding.request = state.request_id
                served.engine.arrive(state.request_id, len(state.initial_tokens), _ns(state.created_time))
        return result

    def _cancel_request(self, call: Callable[[], Any], manager: Any, request_id: Any = None, *_: Any, **__: Any) -> Any:
        with self._guarded():
            served = self._engines.get(manager.output_router)
            if served is not None and request_id is not None:
                served.cancelled.append((request_id, monotonic_ns()))
        return call()

    def _stop(self, call: Callable[[], Any], manager: Any, *_: Any, **__: Any) -> Any:
        result = call()
        with self._guarded():
            if not manager.is_running() and (served := self._engines.pop(manager.output_router, None)) is not None:
                served.engine.close()
        return result

    # --- the processor, in the thread of the loop -----------------------------------------------------------

    def _prepare_next_batch(self, call: Callable[[], Any], processor: Any, *_: Any, **__: Any) -> Any:
        served = self._find(processor)
        cancelled = [served.cancelled.popleft() for _ in range(len(served.cancelled))] if served is not None else []
        has_batch = call()
        if served is not None:
            with self._guarded():
                for request, at_ns in cancelled:
                    if not (
                        request in processor.scheduler.active_requests
                        or request in processor.scheduler.waiting_requests
                    ):
                        served.engine.finish(request, CANCELLED, at_ns)
                if has_batch:
                    served.begin(_batch(processor))
        return has_batch

    def _update_batch(self, call: Callable[[], Any], processor: Any, *_: Any, **__: Any) -> Any:
        served = self._find(processor)
        if served is None or not served.running:
            return call()
        states, is_async = served.running[0][1], True
        with self._guarded():
            is_async = processor.use_async_batching
            if not is_async:
                served.end("ok", 0)
        result = call()
        with self._guarded():
            if is_async:
                served.end("ok", served.ended_ns)
            served.finish(states)
        return result

    def _fail_all_requests(self, call: Callable[[], Any], processor: Any, error: Any = None, *_: Any, **__: Any) -> Any:
        with self._guarded():
            served = self._find(processor)
            while served is not None and served.running:  # the step that failed
                served.end(f"error:{type(error).__name__}", 0)
        return call()

    def _fail_and_deliver(
        self, call: Callable[[], Any], router: Any, state: Any = None, error: Any = None, *_: Any, **__: Any
    ) -> Any:
        result = call()
        with self._guarded():
            served = self._engines.get(router)
            if served is not None:
                served.engine.finish(state.request_id, f"error:{type(error).__name__}")
        return result

    def _find(self, processor: Any) -> _Served | None:
        """Return the engine of a processor; None if it has none, or cannot be told."""
        try:
            return self._engines.get(processor.output_router)
        except Exception as error:  # another version of the library
            self._fail(error)
            return None

    # --- failures -------------------------------------------------------------------------------------------

    def _guarded(self) -> _Guarded:
        return _Guarded(self._fail)

    def _fail(self, error: BaseException) -> None:
        note = f"requests of transformers' continuous batching are incomplete: {type(error).__name__}: {error}"
        if note not in self._notes:
            self._notes.append(note)


class _Guarded:
    """Keeps a failure of this module from the program."""

    __slots__ = ("_fail",)

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fail(error)
        return True


class _Served:
    """A running engine of transformers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: deque[tuple[RunningStep, Sequence[Any]]] = deque()
        """Steps that have begun, with the states of their requests: one, or two with asynchronous batching."""

        self.cancelled: deque[tuple[Any, int]] = deque()
        """Requests to be cancelled, and since when."""

        self.ended_ns = 0

    def begin(self, batch: Sequence[Any]) -> None:
        """Begin the step of a batch of `FutureRequestState`."""
        step = self.engine.step([_part(each) for each in batch])
        self.running.append((step, [each.state for each in batch]))
        step.begin()

    def end(self, status: str, start_ns: int) -> None:
        """End the oldest step."""
        step, _ = self.running.popleft()
        step.end(status, start_ns)
        self.ended_ns = monotonic_ns()

    def finish(self, states: Sequence[Any]) -> None:
        """End the requests that have all of their tokens."""
        for state in states:
            if state.status.name == "FINISHED" and state.lifespan[1] > 0:  # else it was preempted, and has a new state
                self.engine.finish(state.request_id, "ok", _ns(state.lifespan[1]))


def _batch(processor: Any) -> Sequence[Any]:
    """Return the batch that was prepared last."""
    buffers = processor.inputs_and_outputs
    if hasattr(buffers, "io_pairs"):
        buffers = buffers.io_pairs[buffers.current_pair].host_io
    return tuple(buffers.requests_in_batch)


def _part(each: Any) -> tuple[Any, str, int, int]:
    """Return what a step computes for a request; its position counts the tokens of this step already."""
    state = each.state
    phase = PREFILL if state.position_offset <= len(state.initial_tokens) else DECODE
    return state.request_id, phase, each.query_length, int(each.has_new_token)


def _ns(seconds: float) -> int:
    """Return a time of `time.perf_counter` in nanoseconds."""
    return round(seconds * 1e9)
