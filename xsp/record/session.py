"""`xsp.profile`: the block around a program's steps, from its settings to the final report."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xsp import clock, identity, plugins, processes, rundir, serving
from xsp.collector import Collector, Kernels, Listener
from xsp.device import machine as device
from xsp.errors import OutputError, UnwritableError, UsageError
from xsp.record import blocks, description, marks, output
from xsp.record import budget as budgets
from xsp.record.calibration import LIMIT_SHARE
from xsp.record.overhead import Account
from xsp.record.quiet import Quiet
from xsp.record.requests import StoredRequests
from xsp.record.schedule import DescribeOnce, Schedule
from xsp.record.settings import Settings, name_and_path, sample_count
from xsp.record.step import UNCLOSED, Step
from xsp.record.steps import Steps
from xsp.record.terminal import say
from xsp.schema import Level
from xsp.subjects import Subjects

if TYPE_CHECKING:
    from xsp.record.writer import Writer

_active: profile | None = None


class profile:
    """Profile the steps of a program, in a `with` block.

    >>> with profile("train", levels="M/L/G", out="runs/train") as prof:     # doctest: +SKIP
    ...     for batch in loader:
    ...         with prof.step():
    ...             train_one(batch)

    After the warm-up, recorded steps take turns at the levels. Each stored step is a segment of the run directory.
    Spans and steps that could not be recorded or stored are counted in the run. After the block was entered, xsp raises
    no error into the program. If no run can be written, because of the disk or another process, a line on stderr
    reports it, and the program continues without a profile.

    Args:
        name: name of the run and of its steps, or a path (`./a`, `~/a`, `/a`, `runs/a`, a `Path`) of the run.
        levels: `M`, `M/L`, `M/L/G`, or names of levels, `model/layer/op`.
        out: the run directory; default: `runs/<name>`. If it exists, the next free name is used, `runs/<name>-2`, and
            printed on stderr; `profile.out` is the directory that is written.
        overwrite: replace an existing run.
        warmup: number of steps of which nothing is kept; default: the number of rungs.
        settle: number of bare steps before each recorded one, so that it does not run on cold caches; default: as many
            as run in 2 ms.
        every: record one step in this many, on average; in the others all collectors are off.
        spread: draw the recorded steps at random, so that work in every second or tenth step is recorded as often as
            it occurs; False records at equal distances.
        budget: share of the program's time, `"1%"` or 0.01, that profiling may cost; it determines how many steps are
            recorded, and at which levels (see `xsp.record.budget`).
        seed: seed of the order in which the levels take turns.
        batch_size: samples in a step; default: the first dimension of the model's input.
        collectors: names of entry points, or instances; default: all that are installed.
        kernels: source of device work: `cupti`, `kineto` (torch.profiler), or `auto`, the first of them that passes a
            trial on this machine.
        only: record at this rung only (a program that is run once per level).
        listener: makes the function to which collectors report the boundaries of calls, passes and optimizer steps.
        hosts: use the steps of a profile that is opened inside this block (`xsp run` of a program that profiles
            itself).
        samples: sample power, clocks, memory and utilisation of devices, process and machine, in the process that
            stores the steps.
        otlp: send each step during the run, to `http://…`, `grpc://…`, or `env` for the target of the variables
            `OTEL_EXPORTER_OTLP_*`.
        otlp_policy: if the receiver is slow, `wait` lets the program wait between steps, for a limited time; `shed`
            leaves steps in the run directory.
        enabled: False makes the block and its steps do nothing.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] = "run",
        *,
        levels: str = "M/L/G",
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        warmup: int | None = None,
        settle: int | None = None,
        every: int | None = None,
        budget: str | float | None = None,
        spread: bool = True,
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

        Raises:
            UsageError: a setting is invalid, for instance a level is unknown, or two different paths are given.
        """
        values = locals()
        values["name"], values["out"] = name_and_path(name, out)
        settings = Settings(**{field.name: values[field.name] for field in fields(Settings) if field.name in values})
        self._set_up(settings, listener, hosts, enabled)

    @classmethod
    def of(
        cls, settings: Settings, listener: Callable[[profile], Listener] | None = None, hosts: bool = False
    ) -> profile:
        """Return a block with these settings; `listener` and `hosts` are described above."""
        block = cls.__new__(cls)
        block._set_up(settings, listener, hosts, enabled=True)
        return block

    def _set_up(
        self, settings: Settings, listener: Callable[[profile], Listener] | None, hosts: bool, enabled: bool
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.levels = settings.levels
        self.out = settings.directory
        self.hosts = hosts
        self.has_explicit_steps = False
        self.records = False
        """Whether the block was entered and a run is or was written."""

        self._enabled = enabled
        self._was_entered, self._has_begun = not enabled, False
        self._host: profile | None = None
        self._listener = listener
        account = Account()
        schedule = budgets.schedule_of(settings, account, is_alone=not output.is_one_of_several())
        self._steps = Steps(settings.name, schedule, account, settings.batch_size)
        self._marks = marks.Marks(self._steps)
        self.doubt: str | None = None
        """Why the whole program may look like one step, set by step detection; shown if no step is stored."""

        self.while_finishing: Callable[[int], object] | None = None
        """What else is done, in a thread, while the storing process finishes a run that has steps; it gets the time
        since when the budget counts the end, of `xsp.clock.monotonic_ns`."""

        self._children_s = 0.0
        """Processor time of child processes before it was entered, in seconds."""

        self._writer: Writer
        self._requests: StoredRequests

    @property
    def schedule(self) -> Schedule:
        """The schedule of turns; see `xsp.record.schedule`."""
        return self._steps.schedule

    @property
    def account(self) -> Account:
        """The cost of the steps; see `xsp.record.overhead`."""
        return self._steps.account

    @property
    def steps_stored(self) -> int:
        """Number of steps that are on the disk."""
        return self._steps.stored

    @property
    def steps_lost(self) -> int:
        """Number of recorded steps that could not be stored."""
        return self._steps.lost

    @property
    def steps_skipped(self) -> int:
        """Number of steps that began inside another one, and were not recorded."""
        return self._steps.skipped

    def describe_once(self) -> None:
        """Run warm-up and the describing step, and all others bare; to be called before the block is entered."""
        self._steps.schedule = DescribeOnce(self.schedule.rungs, self.schedule.warmup)

    # --- the block ------------------------------------------------------------------------------------

    def __enter__(self) -> profile:
        """Make the run directory, start the storing process, install the collectors.

        Raises:
            UsageError: another block is active in this process; `otlp` is not an endpoint.
            OutputError: the settings require a run, and it cannot be written; or the run directory is taken, and the
                settings do not allow the next free name.
            PluginError: a collector or a source of device work that was requested by name cannot work here, or a
                requirement of `otlp` is missing.
        """
        global _active
        self._was_entered = True
        if not self._enabled:
            return self
        if _active is not None and _active.hosts:
            self._host = _active
            _active.has_explicit_steps = True
            _active.discard_step()
            return self
        if _active is not None:
            raise UsageError(f"the profile {_active.name!r} is active in this process; leave its block first")
        if self._has_begun:  # entered again: a run of its own, with counts of its own
            self._set_up(self.settings, self._listener, self.hosts, self._enabled)
            self._was_entered = True
        began_ns = clock.monotonic_ns()
        collecting, rungs, kernels = self._steps.collecting, self.schedule.rungs, Kernels.parse(self.settings.kernels)
        find = functools.partial(collecting.find, self.settings.collectors, rungs[-1], kernels)
        may_refuse = self.settings.collectors is not None or kernels is not Kernels.AUTO
        if may_refuse:  # before a directory is made or replaced
            find()
        try:
            self._claim_run()
            if not may_refuse:
                self._find_while_loading(find)
            self._open_run()
        except UnwritableError as error:
            if self.settings.needs_run:
                raise
            say(f"{error}. The program continues without a profile.")
            return self
        self.records = self._has_begun = True
        self._children_s = _children_s()
        listener = self._listener(self) if self._listener is not None else None
        self._notify = self._steps.listener(listener)
        collecting.open(self._notify, self._steps.outline)
        if isinstance(self.schedule, budgets.Budgeted):
            collecting.try_out(rungs[-1])
        processes.call_in_children(_forget, before=_close_window)
        _active = self
        blocks.activate(self._steps.blocks)
        self._requests = StoredRequests(self._writer, self._identity, functools.partial(collecting.note, "engine"))
        serving.attach(self._requests)
        self._steps.progress.begin(self.out)
        account = self._steps.account
        account.start_ns = account.launch_ns + clock.monotonic_ns() - began_ns - collecting.import_ns
        return self

    def _find_while_loading(self, find: Callable[[], None]) -> None:
        """Find the collectors, which imports torch, while the storing process loads."""
        try:
            find()
        except BaseException:  # an interrupt: no process stays
            self._writer.close(0.0)
            raise

    def _claim_run(self) -> None:
        """Make the run directory, and start the process that stores, samples and delivers."""
        from xsp.record.writer import Writer  # not needed by programs that only import xsp

        settings = self.settings
        if settings.otlp is not None:
            plugins.sender().check(settings.otlp, settings.otlp_policy)
        self.out, self._writer = output.claim(
            self.out, Writer, overwrite=settings.overwrite, next_free=settings.next_free
        )

    def _open_run(self) -> None:
        """Write `run.json`, and tell the process that stores what else it does."""
        settings = self.settings
        self._identity = identity.of_this_process()
        self._started_ns = self._steps.clock.now_ns()
        self._steps.begin(self._identity, self._writer)
        try:
            rundir.write_run(self.out, self._run(finished=False))
        except UnwritableError:
            self._writer.close()
            raise
        if settings.otlp is not None:
            self._writer.deliver_to(settings.otlp, settings.otlp_policy)
        if settings.samples:
            self._writer.sample(self._identity.rank, _devices())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove all collectors, merge the stored steps, write the final `run.json`."""
        global _active
        self._host = None
        if not self._enabled or _active is not self:
            return
        try:
            self._end(kind)
        except BaseException:  # another interrupt: nothing that is installed stays
            _active = None
            blocks.activate(None)
            self._requests.abandon()
            self._steps.collecting.close(calibrate=False)
            self._writer.close(0.0)
            raise

    def _end(self, error_type: type[BaseException] | None) -> None:
        global _active
        steps = self._steps
        self._marks.end()
        if steps.quiet.has_begun:
            steps.quiet.end()
        if steps.open is not None and steps.open.awaits_work:
            steps.open.abandon()
        elif steps.open is not None:
            steps.collecting.note("xsp", f"step {steps.open.number} was not closed; it ended with the block")
            steps.open.close(UNCLOSED)
        steps.drop_window()
        steps.between.end()
        steps.progress.end()
        steps.storing.wait(counts_cost=True)
        began_ns = clock.monotonic_ns()
        limit_ns = LIMIT_SHARE * (began_ns - steps.account.began_ns)
        _active = None
        blocks.activate(None)
        costs = steps.collecting.close(limit_ns=limit_ns)
        self._requests.close()
        steps.account.end_ns = clock.monotonic_ns() - began_ns
        steps.store_rest()
        if error_type is not None:
            steps.collecting.note("xsp", f"the block was left by {error_type.__name__}; the steps before it are kept")
        try:
            self._finish(costs, began_ns)
        except Exception as error:  # the program ends as it would have without xsp
            say(f"{self.out}: the run was not finished ({type(error).__name__}: {error}); its steps are kept")
        finally:
            self._writer.close()
        if not steps.stored and not self._requests.stored and not self.settings.needs_run and not self.hosts:
            say(f"{self.out}: no step was stored: {self._why_empty()}")

    def step(self, batch_size: int | None = None) -> contextlib.AbstractContextManager[object]:
        """Return the context of one step: one prediction, or one training step.

        A bare call at the end of each iteration, as with `torch.profiler.profile.step`, ends a step and begins the next
        one; the first step is then the third iteration.

        Args:
            batch_size: samples in this step, if it differs from the block's.
        """
        if self._host is not None:
            return self._host.step(batch_size)
        if _active is not self:
            if not self._was_entered:
                self._was_entered = True  # it is printed once
                say(f"nothing is recorded: {self.name!r} was not entered; write `with xsp.profile(…) as prof:`")
            return _NO_STEP
        quiet = self._steps.quiet
        if quiet.remaining and not quiet.is_of_another_thread():
            if not quiet.by_mark:
                quiet.remaining -= 1
                return quiet.stretch_step
            if quiet.remaining > 1:
                quiet.on_mark()
                return quiet.stretch_step
        samples = sample_count(batch_size) if batch_size is not None else None
        if samples is None and batch_size is not None:
            self.note("prof.step(batch_size=…) got no whole number above 0: the samples of these steps are unknown")
        step = Step(self._steps, samples)
        quiet.by_context = self._marks.handle_request(step) and not self._steps.skipped
        return step

    def detected_step(self, by_call: bool) -> Step:
        """Return the context of a step that was detected at the program's boundaries.

        Args:
            by_call: whether it begins with the call of a module whose begin was just signalled.
        """
        return Step(self._steps, None, by_call)

    @property
    def subjects(self) -> Subjects:
        """Numbers of the modules and optimizers that the program's steps call."""
        return self._steps.outline.subjects

    @property
    def apart(self) -> set[int]:
        """Numbers of modules whose calls between steps are part of no step; the collectors read it in stretches."""
        return self._steps.outline.apart

    @property
    def quiet(self) -> Quiet:
        """Stretches of short steps that are timed as a whole; see `xsp.record.quiet`."""
        return self._steps.quiet

    def discard_step(self) -> None:
        """Abandon the open step, if there is one."""
        if self._steps.open is not None:
            self._steps.open.abandon()

    def show_line(self) -> None:
        """Draw a progress line in the terminal, between steps, once a second at most."""
        self._steps.progress.draws_line = True

    def note(self, text: str) -> None:
        """Add a sentence on what is missing to the run."""
        self._steps.collecting.note("program", text)

    def withdraw(self, text: str) -> None:
        """Remove a sentence that was added with `note` and turned out to be wrong."""
        notes = self._steps.collecting.notes
        notes[:] = [note for note in notes if note["text"] != text]

    # --- the end --------------------------------------------------------------------------------------

    def _run(self, finished: bool, costs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of `run.json`."""
        content = description.of_steps(
            self._steps, self.levels, self._identity, self._started_ns, finished, costs or {}
        )
        content["typed"] = list(self.settings.typed)
        return {**content, "empty": self._why_empty()} if finished and not self._steps.stored else content

    def _why_empty(self) -> str:
        """Return why no step was stored, and a remedy."""
        steps = self._steps
        if self._marks.has_unentered_context and steps.step_count == 0:
            return "prof.step() was called once and not entered; write `with prof.step(): …` around a step"
        if steps.lost:
            return f"{steps.lost} were recorded, and could not be written ({self._writer.failure})"
        if steps.step_count == 1 and self.doubt is not None:
            return self.doubt
        if steps.step_count and isinstance(self.schedule, budgets.Budgeted):
            percent = 100 * self.schedule.share
            remedy = f"larger budget (--budget {2 * percent:g}%, or off)" if percent < 50 else "budget of any size"
            reason = f"{steps.step_count} ran, so few or so short that {percent:g} % of their time does not pay for one"
            return f"{reason}: use a {remedy}"
        if steps.step_count and not self.schedule.warmup:
            settle_reason = f"{steps.step_count} ran, so short that all of them passed before one could be recorded"
            return f"{settle_reason}; run more, or set settle=0"
        if steps.step_count:
            warmup_reason = f"{steps.step_count} ran, the first {self.schedule.warmup} of them to warm up"
            return f"{warmup_reason}; run more, or set warmup=0 (--warmup 0)"
        children_s = _children_s() - self._children_s
        if children_s > CHILDREN_S:
            return (
                f"none ran in this process, and its child processes computed for {children_s:.0f} s: "
                "profile inside them, or start ranks with `xsp run torchrun`"
            )
        if self.hosts:
            return "no module of torch was called, and no optimizer stepped; name the function of a step with --step"
        return "prof.step() was never entered; write `with prof.step(): …` around a step"

    def _finish(self, costs: dict[str, Any], began_ns: int) -> None:
        """Finish the run, the end of which began at that time, if necessary in this process, and print problems."""
        note, lost = self._steps.collecting.note, self._steps.lost
        if self.settings.samples and not self._writer.has_sampled():
            note("samples", "the process that stores spans did not begin to sample")
        missing = f"{lost} steps were not stored" if lost else "its merged step and its end were not stored"
        if lost and self._writer.failure is not None:
            note("xsp", f"{missing}: {self._writer.failure}")
        run = self._run(finished=True, costs=costs)
        work = self.while_finishing if self._steps.stored else None
        with _beside(functools.partial(work, began_ns) if work is not None else None):
            report = self._writer.finish(run)
        if report is None:
            note("xsp", f"the merged step was not written: {self._writer.failure}")
            with contextlib.suppress(OutputError):  # on a full disk the run stays marked as interrupted
                rundir.write_run(self.out, self._run(finished=True, costs=costs))
        if (lost or report is None) and self._writer.failure is not None:
            say(f"{self.out}: {missing} ({self._writer.failure})")
        if self.settings.otlp is not None:
            delivery = report.get("delivery") if report is not None else None
            command = f"xsp export {shlex.quote(str(self.out))} --resume"
            if delivery is None:
                say(f"it is unknown what was delivered; `{command}` sends the rest")
            elif delivery["left"] or delivery["rejected"]:
                counts = f"{delivery['left']} traces were not delivered, {delivery['rejected']} spans were rejected"
                reasons = "; ".join(delivery["messages"])
                say(f"{counts} ({reasons}); `{command}` sends what is left")


CHILDREN_S = 1.0
"""Processor time of child processes in seconds above which they may have run the steps."""


def _children_s() -> float:
    """Return the processor time of child processes that have ended, in seconds."""
    return sum(os.times()[2:4])


_NO_STEP: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


@contextlib.contextmanager
def _beside(work: Callable[[], object] | None) -> Iterator[None]:
    """Let a thread work while the block waits, and wait for it; what it raises is lost."""
    if work is None:
        yield
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = processes.start_thread(run, "xsp prepares")
    try:
        yield
    finally:
        thread.join()


def _devices() -> list[str]:
    """Return the identities of the program's devices for the storing process, if the program uses any yet."""
    try:
        return device.device_uuids()
    except Exception:  # a failed device must fail in the program, not here; the environment lists devices as well
        return []


def _close_window() -> None:
    """Switch the collectors off before a fork between steps: the child would record without an end."""
    if _active is not None and _active._steps.window is not None:
        _active._steps.drop_window()


def _forget() -> None:
    """Drop the profile in a forked child (a DataLoader's worker): it continues only in the parent."""
    global _active
    block, _active = _active, None
    blocks.activate(None)
    if block is not None:
        serving.detach(block._requests)
        block.records, block.has_explicit_steps = False, True  # step detection finds none here
        block._writer.forget()
        block._steps.forget()
