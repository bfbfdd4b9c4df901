"""Deliver a run while it is recorded, from the storing process.

This is a `Sender` of `xsp.plugins`. A thread delivers the steps in the order in which they were stored. With the
policy `wait`, the program is held between two steps until the step is delivered, for at most `MAX_WAIT_S`. If the
receiver takes longer or fails, the circuit breaker opens, and the program does not wait until the receiver has caught
up. With the policy `shed`, the program never waits. Steps that are not delivered `FINISH_S` after the last step stay in
the run directory, and are counted.

The top level of this module imports nothing heavy, because the measured program calls `check`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import processes
from xsp.errors import DeliveryError, UsageError
from xsp.otlp import endpoint

if TYPE_CHECKING:
    from xsp.otlp.delivery import Delivery

MAX_WAIT_S = 5.0
"""Maximum number of seconds that the program is held after a step."""

FINISH_S = 10.0
"""Maximum number of seconds that the end of the run waits for undelivered steps."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_RUN_SPAN = None
"""Queue entry for the run's own span, which is sent last."""

_JOIN_TIMEOUT_S = 0.2
_NICE = 10


class Policy(str, enum.Enum):
    """What happens when steps are stored faster than the receiver accepts them."""

    WAIT = "wait"  # the program is held between steps, for a bounded time
    SHED = "shed"  # steps stay on the disk

    def __str__(self) -> str:
        return self.value


class Live:
    """The delivery of one run to one endpoint while it is recorded."""

    @staticmethod
    def check(target: str, policy: str) -> None:
        """Check a target and a policy before the run.

        Raises:
            UsageError: the target or the policy is invalid.
            PluginError: a package is missing.
        """
        if policy not in {choice.value for choice in Policy}:
            raise UsageError(f"--otlp-policy {policy!r}: choose wait or shed")
        if endpoint.endpoint(target).is_file:
            raise UsageError(f"--otlp {target}: a file cannot follow a run; `xsp export` writes it afterwards")

    def __init__(self, run: Path, target: str, policy: str) -> None:
        """Start the thread that delivers.

        Raises:
            As `check`.
        """
        from xsp.otlp.delivery import Delivery
        from xsp.otlp.send import STARTING_S, Exporter

        self._policy = Policy(policy)
        self._stop = threading.Event()
        """Set when the thread must stop trying."""

        self._finishing = threading.Event()
        """Set at the end of the run: no more pauses between attempts."""

        self._changed = threading.Condition()
        self._queue: deque[int | None] = deque()
        self._keeps_up = True
        exporter = Exporter(endpoint.endpoint(target), MAX_WAIT_S, self._stop, STARTING_S)
        self._delivery: Delivery = Delivery(run, exporter, fresh=True, threads=1)
        self._delivery.delivered.save()  # so that a run killed before its first delivery can be resumed
        self._thread = processes.start_thread(self._deliver_queue, "xsp delivers")

    def stored(self, step: int) -> None:
        """Queue a stored step for delivery; return when the program may continue."""
        with self._changed:
            self._queue.append(step)
            self._changed.notify_all()
            if self._policy is Policy.WAIT and self._keeps_up:
                self._changed.wait_for(lambda: not self._queue or not self._keeps_up, MAX_WAIT_S)
                self._keeps_up = not self._queue

    def finish(self) -> dict[str, Any]:
        """Retry undelivered steps once, send the run's own span, and return the entry for `run.json`."""
        with self._changed:
            self._queue.append(_RUN_SPAN)
            self._changed.notify_all()
            self._finishing.set()
            self._changed.wait_for(lambda: not self._queue or self._stop.is_set(), FINISH_S)
        self._cancel()
        self._thread.join(_JOIN_TIMEOUT_S)
        counts, undelivered = self._delivery.exporter.counts, self._delivery.summary()["left"]
        if undelivered:
            counts.add_message(f"{self._delivery.exporter.endpoint.name}: the delivery took too long")
        self._delivery.record_result(counts.messages[:1] if undelivered or counts.rejected else [])
        return self._delivery.summary()

    def close(self) -> None:
        """Stop the thread and release all resources, whether the run was finished or not."""
        self._cancel()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            self._delivery.remove_temporary()
        else:
            self._delivery.close()

    def _deliver_queue(self) -> None:
        """Deliver the queue, the oldest entry first; pause after a failure, longer each time."""
        with contextlib.suppress(OSError):  # lowers the priority of this thread alone, where possible
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        pause = _FIRST_PAUSE_S
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stop.is_set())
                step = self._queue[0] if self._queue else _RUN_SPAN
            is_last_attempt = self._finishing.is_set()
            if self._stop.is_set() or self._deliver(step):
                pause = _FIRST_PAUSE_S
                continue
            if is_last_attempt:
                self._cancel()
            self._finishing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _cancel(self) -> None:
        """Stop all attempts."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, step: int | None) -> bool:
        """Deliver the first entry of the queue; return whether it is finished, delivered or not."""
        counts = self._delivery.exporter.counts
        try:
            if step is _RUN_SPAN:
                self._delivery.reload_run()
                self._delivery.finish()
            else:
                self._delivery.deliver_step(step)
        except DeliveryError as error:
            counts.add_message(str(error))
            self._keeps_up = False
            if getattr(error, "is_permanent", False):
                self._cancel()
            with self._changed:
                self._changed.notify_all()
            return False
        except Exception as error:  # any error: the step is on the disk, and the next one may succeed
            counts.add_message(f"{type(error).__name__}: {error}")
        with self._changed:
            self._queue.popleft()
            self._keeps_up = self._keeps_up or not self._queue
            self._changed.notify_all()
        return True
