"""The contract between xsp and whatever sees one level of the stack.

A collector has a hot half and a cold half. Between `start` and `stop` it sits inside the measured program:
there it appends to plain buffers and does nothing else. `spans` turns the buffers into rows after the step,
when nobody's clock runs. `open` and `close` bracket a whole profiling block, so that what is dear to install
(a patched class, a registered hook) is installed once, and gone afterwards.

The order of calls, which `xsp.testing.check_collector` holds every collector to:

    available → open → (start → stop → spans)* → close
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, ClassVar, NamedTuple

from xsp.errors import UsageError
from xsp.schema import Kind, Level, Span
from xsp.subjects import Subjects


class Signal(enum.Enum):
    """A boundary in the program that a collector saw, for programs that name no steps of their own."""

    CALL_BEGIN = enum.auto()  # the outermost call of a module begins; the subject is the module
    CALL_END = enum.auto()  # it ended; the subject is what it returned, None if it raised
    BACKWARD_END = enum.auto()
    OPTIMIZER_BEGIN = enum.auto()  # the subject is the optimizer
    OPTIMIZER_END = enum.auto()
    DATA_END = enum.auto()  # a wait for data ended; the subject is its length in nanoseconds
    UNUSUAL = enum.auto()  # of a hushed collector: what begins is not in `Outline.usual`


class Kernels(str, enum.Enum):
    """Where device work comes from: the runtime's calls, kernels and copies have one source in a process."""

    AUTO = "auto"  # the first of those below that passes its trial
    CUPTI = "cupti"  # cupti-python
    KINETO = "kineto"  # torch.profiler

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, text: str) -> Kernels:
        """Read a source's name.

        Raises:
            UsageError: it is none.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"kernels={text!r}: device work comes from {', '.join(cls)}; write one of them") from None


class Token(NamedTuple):
    """A word of an outline: an outermost call, a backward pass, an optimizer's step."""

    kind: Kind
    subject: int
    """Number of the module or the optimizer, see `xsp.subjects`; 0 where an optimizer's step or a backward pass begins,
    1 where a backward pass ends, 2 where it returns its gradients (`torch.autograd.grad`)."""
    type: type | None = None
    """Its class."""
    trains: bool = False
    """Of a call: the module is in training mode, and gradients are on."""
    shape: tuple[int, ...] | None = None
    """Of a call's first tensor; None if it has none."""


class Outline(deque[tuple[Any, ...]]):
    """What a step did, in the order in which it did it: the fields of `Token` as plain tuples; the last ones stay."""

    LONGEST = 1024

    def __init__(self) -> None:
        super().__init__(maxlen=self.LONGEST)
        self.thread: int | None = None
        """Native id of the only thread whose calls are noted; None for any, between steps."""

        self.usual: Set[tuple[Any, ...]] | None = None
        """The words of the steps in the current stretch, see `xsp.record.quiet`; None outside of stretches. A hushed
        collector signals `UNUSUAL` before it notes another word."""

        self.ended_ns: int | None = None
        """When the last step of the current stretch ended; None while a step is open, and outside of stretches."""

        self.began_ns = self.between_ns = self.begun = 0
        """When the last step of the current stretch began; the time between its steps so far; how many have begun."""

        self.subjects = Subjects()
        self.numbers = self.subjects.numbers
        """Of modules and optimizers that were met, by their `id`; `meet` gives one to others."""

    def begin_step(self, now_ns: int) -> None:
        """Note that a step of the current stretch begins, unless one is open.

        Args:
            now_ns: a reading of the monotonic clock.
        """
        if self.ended_ns is not None:
            self.began_ns = now_ns
            self.between_ns += now_ns - self.ended_ns
            self.begun += 1
            self.ended_ns = None

    def meet(self, subject: object, trains: bool = True) -> int:
        """Return the number of a module or an optimizer that is not in `numbers`.

        Args:
            subject: which.
            trains: it is an optimizer, or called in training mode with gradients on.
        """
        # between steps there are words of the last one
        return self.subjects.meet(subject, trains, self if self.thread is not None else deque())


def ignore(signal: Signal, subject: object) -> None:
    """Take a signal and do nothing: what a collector's `notify` is until a session listens."""


class Probe(NamedTuple):
    """A piece of work that makes a known number of spans and next to nothing else.

    The session runs it with the collector on and off, in turns, to learn what one span costs.
    """

    run: Callable[[], object]
    spans: int


class Collector:
    """Base of all collectors; each method's default does nothing, so that a small one stays small."""

    name: ClassVar[str] = ""
    """Short, lower case, unique; it stands in the `collector` column."""

    levels: ClassVar[tuple[Level, ...]] = ()
    """The levels it produces. It is on in every rung that reaches the outermost of them."""

    epoch: ClassVar[bool] = False
    """True if its times are nanoseconds since the epoch; False if they are `time.perf_counter_ns`."""

    on_request: ClassVar[bool] = False
    """True if it is on only where it is asked for by name."""

    innermost: ClassVar[bool] = False
    """True if it must be switched on after all others, and off before them."""

    by_thread: ClassVar[bool] = False
    """True if all its spans tell their threads and `spans_during` works while it is on, so that several recordings
    at a time can share it. Its times are `time.perf_counter_ns`."""

    on_one_thread: bool = False
    """True if it sees only the thread that switched it on, and must be switched off there."""

    notify: Callable[[Signal, object], None] = staticmethod(ignore)
    """Where it sends the boundaries it sees; set by a session that listens."""

    outline: Outline | None = None
    """Where it notes in a word what the program does, in steps that are not recorded too; set by a session. It is
    what kinds of steps are told by, and costs every step, so a word is a plain tuple."""

    def available(self) -> str | None:
        """Return None if it can work in this process, else the reason and what to install or do."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return variables that libraries read once, at their first use, and that are not set.

        `xsp run` and `xsp profile` set them before the program begins.
        """
        return {}

    def details(self) -> Mapping[str, object]:
        """Return what else is to be known of it on this machine: versions, errors; no paths, no names of people."""
        return {}

    def open(self) -> None:
        """Install what stays for the whole block. Called once, before the first `start`."""

    def close(self) -> None:
        """Remove everything that `open` installed. Called once, also after errors."""

    def start(self, rung: Level, describe: bool) -> None:
        """Begin a step. Hot from here on.

        Args:
            rung: the deepest level that is switched on in this step.
            describe: True in a step whose times do not count: record shapes and memory, at any cost.
        """

    def stop(self) -> None:
        """End the step. Hot until here."""

    def settle(self) -> None:
        """Wait until work that the step started elsewhere is done; called before the step's end is read."""

    def spans(self) -> Iterable[Span]:
        """Return what was seen since the last call, and forget it. Cold."""
        return ()

    def spans_during(self, start: int, end: int, thread: int | None = None) -> Iterable[Span]:
        """Return what began and ended between two times, on one thread or on all, and keep it; it may be on meanwhile.

        Of collectors with `by_thread`.
        """
        return ()

    def drop_before(self, time: int) -> None:
        """Forget what ended before a time; it may be on meanwhile. Of collectors with `by_thread`."""

    def hush(self, quiet: bool, but: Signal | None = None) -> None:
        """Note and signal nothing, also between steps, until told otherwise; called between steps.

        Args:
            quiet: False for as before.
            but: the only signal to give meanwhile.
        """

    def forget(self) -> None:
        """Forget what was seen since the last step; called at the end of a step that is not recorded. Hot."""

    def notes(self) -> Iterable[str]:
        """Return, once each, sentences on what it could not see; they end up in the run's health."""
        return ()

    def probe(self) -> Probe | None:
        """Return work to measure its cost per span with, or None if that makes no sense for it."""
        return None

    def outer_probe(self) -> Probe | None:
        """Return work of one or two spans of the model level, to measure what it costs while hushed; else None."""
        return None


class DeviceCollector(Collector):
    """Base of collectors that can record device work: of those in a block, one at a time does."""

    device_work: ClassVar[Kernels]
    """The source of device work that it can be."""

    is_device_source: bool = False
    """Whether it records device work in this block; set from outside, between steps."""

    gave_up: str | None = None
    """Why it can no longer be the source of device work; set by itself, between steps, and another takes over."""

    def trial(self) -> str | None:
        """Return None if it can be the source of device work in this process, else the reason and what to do.

        Called between `available` and `open`. It leaves nothing behind.
        """
        return None
