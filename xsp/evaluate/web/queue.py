"""Queue of requested evaluations: they run one at a time, in order of arrival, so that none disturbs another."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsp.errors import ManifestError, UsageError, XspError
from xsp.evaluate.agents import Agent, Options
from xsp.evaluate.manifest import Manifest

MOST_WAITING = 32
MOST_ENDED = 200
"""Number of ended evaluations in the list; older ones are dropped, but their results stay."""

TIME_LIMIT_S = 1800.0
"""Time limit of an evaluation, in seconds."""

CHECK_S = 60.0
"""Time limit of a check, in seconds."""

ENDED_STATES = ("done", "failed", "cancelled")


class QueueFullError(UsageError):
    """The queue is full."""


class _Stopped(Exception):
    """Raised in an agent's progress callback to end the evaluation."""


@dataclass
class QueuedEvaluation:
    """A requested evaluation."""

    manifest: Manifest
    agent: Agent
    options: Options
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "waiting"
    """`waiting`, `running`, `done`, `failed`, `cancelled`."""

    stage: str = ""
    done: int = 0
    total: int = 0
    result: str | None = None
    """Name of its directory."""

    error: str | None = None
    requested_s: float = field(default_factory=time.time)
    cancel: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Store the agent's name: a query of an agent on another machine may take seconds, and would delay requests."""
        self._agent_name = self.agent.facts().name

    def plain(self) -> dict[str, Any]:
        """Return its state as plain data."""
        return {
            "id": self.id, "name": self.manifest.title, "identity": self.manifest.identity, "state": self.state,
            "agent": self._agent_name, "what": self.stage, "done": self.done, "of": self.total,
            "result": self.result, "error": self.error, "asked_s": round(self.requested_s, 3),
        }  # fmt: skip


class Queue:
    """Runs evaluations on a thread of its own, one after the other, until `close`."""

    def __init__(self, seconds: float = TIME_LIMIT_S, most_waiting: int = MOST_WAITING) -> None:
        """Create the queue; its thread starts with the first evaluation.

        Args:
            seconds: time limit of an evaluation.
            most_waiting: maximum number of waiting evaluations.
        """
        self._seconds, self._most_waiting = seconds, most_waiting
        self._jobs: dict[str, QueuedEvaluation] = {}
        self._waiting: deque[QueuedEvaluation] = deque()
        self._changed = threading.Condition()
        self._machine = threading.Lock()
        """Held by what runs: one evaluation, or one check, since each would disturb the latencies of another."""

        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, manifest: Manifest, agent: Agent, options: Options) -> QueuedEvaluation:
        """Append an evaluation.

        Raises:
            QueueFullError: too many evaluations wait, or the server is shutting down.
        """
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down, and accepts no further evaluation")
            if len(self._waiting) >= self._most_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} evaluations are waiting already; try again when some have ended"
                )
            job = QueuedEvaluation(manifest, agent, options)
            self._jobs[job.id] = job
            self._waiting.append(job)
            ended = [entry for entry in self._jobs.values() if entry.state in ENDED_STATES]
            for entry in ended[: max(0, len(ended) - MOST_ENDED)]:
                del self._jobs[entry.id]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="xsp evaluations", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def check(self, manifest: Manifest, agent: Agent, options: Options) -> list[str] | None:
        """Let an agent do what precedes the load of a manifest, if nothing else runs.

        Returns:
            Its notes; None if an evaluation or another check runs, or if the agent does it only in an evaluation.

        Raises:
            ManifestError: it cannot be run, with the reason; or opening it takes too long.
        """
        if not self._machine.acquire(blocking=False):
            return None
        deadline = time.monotonic() + CHECK_S

        def progress(stage: str, done: int, total: int) -> None:
            del stage, done, total
            if time.monotonic() > deadline:
                raise ManifestError(f"what precedes the load takes longer than {CHECK_S:.0f} s")

        try:
            return agent.check(manifest, options.store, options, progress)
        finally:
            self._machine.release()

    def jobs(self) -> Sequence[QueuedEvaluation]:
        """Return all jobs, oldest first."""
        with self._changed:
            return list(self._jobs.values())

    def job(self, name: str) -> QueuedEvaluation | None:
        """Return the job of an ID; None if there is none."""
        with self._changed:
            return self._jobs.get(name)

    def cancel(self, job: QueuedEvaluation) -> None:
        """Cancel a job: at once if it waits, within a few seconds if it runs."""
        with self._changed:
            job.cancel.set()
            if job.state == "waiting":
                with contextlib.suppress(ValueError):  # the thread has just taken it
                    self._waiting.remove(job)
                    job.state = "cancelled"
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        with self._changed:
            self._closed = True
        for job in self.jobs():
            if job.state not in ENDED_STATES:
                self.cancel(job)
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(10.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                job.state = "running"
            with self._machine:
                self._carry_out(job)

    def _carry_out(self, job: QueuedEvaluation) -> None:
        deadline = time.monotonic() + self._seconds

        def progress(stage: str, done: int, total: int) -> None:
            job.stage, job.done, job.total = stage, done, total
            if job.cancel.is_set():
                raise _Stopped
            if time.monotonic() > deadline:
                raise _Stopped(f"it took longer than {self._seconds:,.0f} s")

        state, result, error = "failed", None, None
        try:
            progress("starting", 0, 0)
            # Relative paths in a manifest would start at the store; `policy` accepts none.
            result = Path(job.agent.submit(job.manifest, job.options.store, job.options, progress)).name
            state = "done"
        except _Stopped as stop:
            error = str(stop) or None
            state = "failed" if error else "cancelled"
        except XspError as failure:
            error = str(failure)
        except Exception as failure:  # further jobs must run nevertheless
            error = f"{type(failure).__name__}: {failure}"
        job.result, job.error = result, error
        job.state = state  # last, so that a reader who sees the end also sees the rest
