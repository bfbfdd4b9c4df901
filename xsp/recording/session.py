"""`profile()` and `step()`: which levels are on in which step, and what becomes of what they saw.

Everything here runs inside the measured program. Between the two clock readings of a step it does nothing;
before and after, it switches collectors, and hands raw rows to a second process (`xsp.recording.writer`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from xsp import clock, identity, plugins, rundir, scrub
from xsp.collector import Collector, Kernels
from xsp.device import machine as device
from xsp.errors import OutputError, UsageError
from xsp.recording import budget as budgets
from xsp.recording.account import Account
from xsp.recording.collecting import Collecting, Listener
from xsp.recording.schedule import Turn, parse_levels, rung_name
from xsp.recording.underway import Underway
from xsp.span import Kind, Level, Span
from xsp.version import __version__

_active: profile | None = None


class profile:
    """Profile the steps of a program, in a `with` block.

    >>> with profile("train", levels="M/L/G", out="runs/train") as prof:     # doctest: +SKIP
    ...     for batch in loader:
    ...         with prof.step():
    ...             train_one(batch)

    Steps take turns at the levels, after warm-up; each stored step is one segment of the run directory. What
    the block could not see or store is counted and stands in the run, and nothing that goes wrong in xsp
    after the block was entered is raised into the program.
    """

    def __init__(
        self,
        name: str = "run",
        *,
        levels: str = "M/L/G",
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        warmup: int | None = None,
        settle: bool = True,
        every: int | None = None,
        budget: str | float | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        collectors: Sequence[str | Collector] | None = None,
        kernels: str = Kernels.AUTO.value,
        only: Level | None = None,
        listener: Callable[[profile], Listener] | None = None,
        hosts: bool = False,
        samples: bool = True,
        otlp: str | None = None,
        otlp_policy: str = "wait",
        enabled: bool = True,
    ) -> None:
        """Check the settings; nothing is installed before the block is entered.

        Args:
            name: of the run, and of its steps.
            levels: `M`, `M/L`, `M/L/G`, or names of levels, `model/layer/op`.
            out: the run directory; `runs/<name>` unless told otherwise.
            overwrite: replace a run that is there.
            warmup: steps of which nothing is kept; as many as there are rungs unless told otherwise.
            settle: run a step bare before each recorded one, so that it does not run on cold caches.
            every: record one step in so many; the others run with all collectors off.
            budget: of the program's time, `"1%"` or 0.01: how often and how deep to record, so that all that
                profiling costs stays below it (see `xsp.recording.budget`).
            seed: of the order in which the levels take turns.
            batch_size: samples in a step; the first dimension of the model's input unless told otherwise.
            collectors: names of entry points, or instances; all that are installed unless told otherwise.
            kernels: where device work comes from: `cupti`, `kineto` (torch.profiler), or `auto`, the first of them
                that passes a trial on this machine.
            only: measure at this rung alone (a program that is run once per level).
            listener: makes the function that collectors signal the program's boundaries to.
            hosts: a profile that is opened inside this block lends its steps to this one (`xsp run` of a
                program that profiles itself).
            samples: read power, clocks, memory and use of devices, process and machine meanwhile, in the process that
                stores the steps.
            otlp: deliver each step while the run goes on: `http://…`, `grpc://…`, or `env` for what the variables
                `OTEL_EXPORTER_OTLP_*` say.
            otlp_policy: what happens when the receiver is slow. `wait`: the program is held between steps, in
                bounds; `shed`: steps stay in the run directory.
            enabled: False makes the block and its steps do nothing.

        Raises:
            UsageError: settings that make no sense, unknown levels among them.
        """
        self._kernels = Kernels.parse(kernels)
        self.name = name
        self.levels = levels
        self.out = Path(out) if out is not None else Path("runs") / _file_name(name)
        self.account = Account()
        self.schedule = budgets.schedule_of(
            parse_levels(levels), self.account, budget, warmup=warmup, seed=seed, only=only, settle=settle, every=every
        )
        self.hosts = hosts
        self.has_explicit_steps = False
        self.steps_stored = 0
        self.steps_lost = 0
        self.steps_skipped = 0
        self._enabled = enabled
        self._host: profile | None = None
        self._overwrite = overwrite
        self._batch_size = batch_size
        self._wanted = collectors
        self._listener = listener
        self._samples = samples
        self._otlp = (otlp, otlp_policy) if otlp is not None else None
        self._collecting = Collecting()
        self._underway = Underway()
        self._pending: list[Span] = []
        self._taken = threading.Lock()
        self._count = 0
        self._step: _Step | None = None
        self._writer: Any = None

    # --- the block ------------------------------------------------------------------------------------

    def __enter__(self) -> profile:
        """Make the run directory, start the storing process, install the collectors.

        Raises:
            UsageError: another block is active in this process; `otlp` is no endpoint.
            OutputError: the run directory exists or cannot be written.
            PluginError: a collector or a source of device work that was asked for by name cannot work here, or what
                `otlp` needs is not there.
        """
        global _active
        if not self._enabled:
            return self
        if _active is not None and _active.hosts:
            self._host = _active
            _active.has_explicit_steps = True
            _active.discard_step()
            return self
        if _active is not None:
            raise UsageError(f"the profile {_active.name!r} is active in this process; one at a time")
        from xsp.recording.writer import Writer  # not needed by programs that only import xsp

        began_ns = clock.monotonic_ns()
        self._collecting.find(self._wanted, self.schedule.rungs[-1], self._kernels)
        if self._otlp is not None:
            plugins.load("xsp.exporters", "otlp").check(*self._otlp)
        self.out = rundir.create(of_this_rank(self.out), overwrite=self._overwrite)
        self._identity = identity.of_this_process()
        self._started_ns = time.time_ns()
        self._writer = Writer(self.out)
        rundir.write_run(self.out, self._run(finished=False))
        if self._otlp is not None:
            self._writer.deliver_to(*self._otlp)
        if self._samples and not self._writer.sample(self._identity.rank, _devices()):
            self._collecting.note("samples", "the process that stores spans did not begin to sample")
        self._collecting.open(self._listener(self) if self._listener is not None else None)
        if isinstance(self.schedule, budgets.Budgeted):
            self._collecting.try_out(self.schedule.rungs[-1])
        _forget_in_children()
        _active = self
        self._underway.begin(self.out)
        self.account.start_ns = clock.monotonic_ns() - began_ns
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take everything out again, merge what was stored, write `run.json` for good."""
        global _active
        self._host = None
        if not self._enabled or _active is not self:
            return
        if self._step is not None:
            self._collecting.note("xsp", f"step {self._step.number} was never closed; it was closed with the block")
            self._step.close("unclosed")
        _active = None
        self._underway.end()
        costs = self._collecting.close()
        self._store_rest()
        if kind is not None:
            self._collecting.note("xsp", f"the block was left by {kind.__name__}; the steps before it are kept")
        try:
            self._finish(costs)
        finally:
            self._writer.close()

    def step(self, batch_size: int | None = None) -> contextlib.AbstractContextManager[object]:
        """Return the context of one step: one prediction, or one training step.

        Args:
            batch_size: samples in this step, if it differs from the block's.
        """
        if self._host is not None:
            return self._host.step(batch_size)
        if _active is not self:
            return _NOTHING
        return _Step(self, batch_size)

    def discard_step(self) -> None:
        """Close the open step, if there is one, and let its times not count."""
        if self._step is not None:
            self._step.close("unclosed")

    def show_line(self) -> None:
        """Draw a line in the terminal of how far the run is, between steps, once a second."""
        self._underway.draws = True

    def note(self, text: str) -> None:
        """Put a sentence on what the run is missing into the run."""
        self._collecting.note("program", text)

    def _finish(self, costs: dict[str, Any]) -> None:
        """Have the run finished, here if need be, and say on stderr what became of it."""
        missing = f"{self.steps_lost} steps were not stored"
        if self.steps_lost and self._writer.failed is not None:
            self._collecting.note("xsp", f"{missing}: {self._writer.failed}")
        done = self._writer.finish(self._run(finished=True, costs=costs))
        if done is None:
            self._collecting.note("xsp", f"the merged step was not written: {self._writer.failed}")
            with contextlib.suppress(OutputError):  # where the disk is full, the run says that it was interrupted
                rundir.write_run(self.out, self._run(finished=True, costs=costs))
        if (self.steps_lost or done is None) and self._writer.failed is not None:
            print(f"xsp: {self.out}: {missing} ({self._writer.failed})", file=sys.stderr)
        if self._otlp is not None:
            self._say_what_is_left(done.get("delivery") if done is not None else None)

    def _say_what_is_left(self, delivery: dict[str, Any] | None) -> None:
        """Say on one line what was not delivered, why, and what to type."""
        if delivery is None:
            print(f"xsp: what was delivered is not known; `xsp export {self.out} --resume` sends it", file=sys.stderr)
        elif delivery["left"] or delivery["rejected"]:
            what = f"{delivery['left']} traces were not delivered, {delivery['rejected']} spans were rejected"
            why = "; ".join(delivery["messages"])
            print(f"xsp: {what} ({why}); `xsp export {self.out} --resume` sends what is left", file=sys.stderr)

    # --- what was seen --------------------------------------------------------------------------------

    def _store(self, step: _Step) -> None:
        pending, self._pending = self._pending, []
        rows = self._collecting.rows(step.anchor) + [clock.on_epoch(span, step.anchor) for span in pending]
        if not step.turn.kept:
            return
        batch = step.batch_size or self._batch_size
        if batch is None:
            batch = next((row.batch_size for row in rows if row.batch_size is not None), None)
        common: dict[str, Any] = {
            "trace_id": step.trace_id,
            "step": step.number,
            "rank": self._identity.rank,
            "rung": int(step.turn.rung),
            "timed": step.turn.timed,
            "process": self._identity.process,
        }
        rows = [row._replace(level=int(row.level), **common) for row in [step.span(batch), *rows]]
        if self._writer.store(step.number, rows):
            self.steps_stored += 1
        else:
            self.steps_lost += 1

    def _store_rest(self) -> None:
        """Store user spans that ended after the last step, around several steps for instance."""
        rest, self._pending = self._pending, []
        if rest and self.steps_stored:
            anchor, own = clock.anchor(), self._identity
            common: dict[str, Any] = {"trace_id": own.trace_id, "process": own.process, "rank": own.rank}
            rows = [clock.on_epoch(row, anchor)._replace(level=int(row.level), **common) for row in rest]
            self._writer.store(self._count, rows)

    def _progress(self) -> dict[str, Any]:
        """Return how far the run has come, for those who watch it."""
        spent = budgets.progress(self.schedule, self.account)
        stored, lost = self.steps_stored, self.steps_lost
        return {"seen": self._count, "stored": stored, "lost": lost, "time_ns": time.time_ns(), "budget": spent}

    def _caller(self) -> identity.Caller | None:
        """Return the run's own span, if its trace is shared: then its steps are in it too."""
        own = self._identity
        return identity.Caller(own.trace_id, own.span_id) if own.shared else None

    def _run(self, finished: bool, costs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of `run.json`."""
        own, now_ns = self._identity, time.time_ns()
        return {
            "xsp": __version__,
            "id": own.id,
            "name": self.name,
            "finished": finished,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_ns // 10**9)),
            "seconds": round((now_ns - self._started_ns) / 1e9, 3),
            "start_ns": self._started_ns,
            "end_ns": now_ns,
            "otel": own.otel,
            "rank": own.rank,
            "local_rank": own.local_rank,
            "world_size": own.world_size,
            "process": own.process,
            "host": own.host,
            "command": scrub.command(sys.argv),
            "levels": self.levels,
            "rungs": [rung_name(rung) for rung in self.schedule.rungs],
            "warmup": self.schedule.warmup,
            "settle": self.schedule.settle,
            "seed": self.schedule.seed,
            "batch_size": self._batch_size,
            "budget": budgets.content(self.schedule, self.account),
            "clock": {"durations": "perf_counter_ns", "epoch_error_ns": clock.anchor().error_ns},
            "steps": {
                "seen": self._count,
                "stored": self.steps_stored,
                "lost": self.steps_lost,
                "skipped": self.steps_skipped,
            },
            "collectors": self._collecting.names,
            "absent": self._collecting.absent,
            "kernels": self._collecting.device_work.content(),
            "costs": costs or {},
            "notes": self._collecting.notes,
            "machine": device.describe(),
        }


class _Step:
    """One step: the only place where the measured program's clock is read."""

    def __init__(self, session: profile, batch_size: int | None) -> None:
        self.batch_size = batch_size
        self._session = session
        self._recording = False

    def __enter__(self) -> _Step:
        entered, session = clock.monotonic_ns(), self._session
        if not session._taken.acquire(blocking=False):
            session.steps_skipped += 1
            session._collecting.note("xsp", "steps that began while another one was being recorded were not recorded")
            return self
        self._recording = True
        self.number = session._count
        session._count += 1
        session._step = self
        self.turn: Turn = session.schedule.next()
        try:
            self._on = [] if self.turn.bare else self._switch_on()
        except BaseException:  # an interrupt of the program's own: this step does not begin
            self._recording, session._step = False, None
            session.steps_skipped += 1
            session._taken.release()
            raise
        self._start = self._end = clock.monotonic_ns()
        self._before_ns = self._start - entered
        return self

    def _switch_on(self) -> list[Collector]:
        session = self._session
        caller = _caller() or session._caller()
        self.trace_id = caller.trace_id if caller else os.urandom(16).hex()
        self._parent_id = caller.span_id if caller else None
        self.span_id = os.urandom(8).hex()
        self.thread = threading.get_native_id()
        _users.stack.append(self.span_id)
        on = session._collecting.start(self.turn.rung, self.turn.describe)
        self.anchor = clock.anchor()
        return on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording:
            self.close("ok" if kind is None else f"error:{kind.__name__}")

    def close(self, status: str) -> None:
        """Read the clock, switch everything off, store the step."""
        session, stored = self._session, self._session.steps_stored
        try:
            session._collecting.settle(self._on)
            self._end = clock.monotonic_ns()
            self._recording, self._status = False, status
            session._step = None
            self._take_in()
        except Exception as error:
            session.steps_lost += 1
            session._collecting.note("xsp", f"a step could not be stored: {type(error).__name__}: {error}")
        except BaseException as interrupt:  # the program's own affair
            session.steps_lost += session.steps_stored == stored
            session._collecting.note("xsp", f"{type(interrupt).__name__} came while a step was stored: counted as lost")
            raise
        finally:
            self._recording, session._step = False, None
            try:
                self._account_for(status)
            finally:
                session._taken.release()

    def _account_for(self, status: str) -> None:
        session = self._session
        shown_ns = session._underway.show(session._progress()) if session._underway.is_due(self._end) else 0
        session.account.spend(shown_ns)
        if status != "unclosed":  # it ended anywhere
            session.account.add(self.turn, self._end - self._start, self._before_ns, self._end + shown_ns)

    def _take_in(self) -> None:
        session = self._session
        if self.turn.bare:
            session._pending.clear()
            return
        session._collecting.stop(self._on)
        if self.span_id in _users.stack:
            del _users.stack[_users.stack.index(self.span_id) :]
        session._store(self)

    def span(self, batch_size: int | None) -> Span:
        """Return the step's own span, the root of its trace."""
        return clock.on_epoch(
            Span(
                span_id=self.span_id,
                parent_id=self._parent_id,
                level=Level.MODEL,
                kind=Kind.STEP.value,
                name=self._session.name,
                start_ns=self._start,
                dur_ns=self._end - self._start,
                thread=self.thread,
                status=self._status,
                batch_size=batch_size,
                collector="session",
            ),
            self.anchor,
        )


class span:
    """Name a block of the program: `with xsp.span("preprocess"): ...`, nested at will, in any thread.

    Without an active profile it does nothing. A block between two steps belongs to the step after it.
    """

    __slots__ = ("_id", "_name", "_session", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._session: profile | None = None

    def __enter__(self) -> span:
        session = self._session = _active
        if session is not None:
            self._id = os.urandom(8).hex()
            _users.stack.append(self._id)
            self._start = clock.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        if session is None:
            return
        end = clock.monotonic_ns()
        stack = _users.stack
        if self._id in stack:
            del stack[stack.index(self._id) :]
        session._pending.append(
            Span(
                span_id=self._id,
                parent_id=stack[-1] if stack else None,
                level=Level.APPLICATION,
                kind=Kind.USER.value,
                name=self._name,
                start_ns=self._start,
                dur_ns=end - self._start,
                thread=threading.get_native_id(),
                status="ok" if kind is None else f"error:{kind.__name__}",
                collector="session",
            )
        )


class _Users(threading.local):
    """The user spans and the step that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[str] = []


_users = _Users()
_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def _caller() -> identity.Caller | None:
    """Return the OpenTelemetry span that the program is in, if it uses OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    valid = context.is_valid
    return identity.Caller(f"{context.trace_id:032x}", f"{context.span_id:016x}") if valid else None


def _devices() -> list[str]:
    """Return what tells the storing process which devices are the program's, if the program uses any by now."""
    try:
        return device.identities()
    except Exception:  # a device that failed must fail in the program, not here; the environment tells as well
        return []


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name) or "run"


def of_this_rank(out: Path) -> Path:
    """Give each process of a distributed program a run directory of its own."""
    own = identity.of_this_process()
    # under torchrun a single process is a job too: xsp's launcher has a run.json of its own in `out`
    distributed = own.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    return out / rundir.rank_part(own.rank) if distributed else out


_fork_seen = False


def _forget_in_children() -> None:
    """In a forked child (a DataLoader's worker) the profile goes on in the parent alone."""
    global _fork_seen
    if not _fork_seen and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
        _fork_seen = True


def _forget() -> None:
    global _active
    session, _active = _active, None
    if session is not None and session._writer is not None:
        session._writer.forget()
