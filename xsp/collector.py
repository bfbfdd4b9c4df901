"""The contract between xsp and a collector, which observes one level or several levels of the stack.

A collector has a hot part and a cold part. Between `start` and `stop` it runs inside the measured program:
there it only appends to plain buffers. `spans` turns the buffers into rows after the step, outside of any
measured time. `open` and `close` bracket a whole profiling block, so that expensive installations (a patched
class, a registered hook) are made once, and undone afterwards.

The order of calls, which `xsp.testing.check_collector` checks:

    available → open → (start → stop → spans)* → close
"""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, ClassVar, NamedTuple, TypeAlias

from xsp.errors import UsageError
from xsp.schema import Kind, Level, Span
from xsp.subjects import Subjects


class Signal(enum.Enum):
    """A boundary in the program that a collector observed; it delimits steps if the program does not mark its own."""

    CALL_BEGIN = enum.auto()  # the outermost call of a module begins; the subject is the module; see `Listener`
    CALL_END = enum.auto()  # that call ended; the subject is its return value, None if it raised
    BACKWARD_BEGIN = enum.auto()  # of a pass in no other one; the subject is None
    BACKWARD_END = enum.auto()  # of a pass in no other one; the subject: the last optimizer that stepped in it, or None
    OPTIMIZER_BEGIN = enum.auto()  # the subject is the optimizer
    OPTIMIZER_END = enum.auto()
    DATA_END = enum.auto()  # a wait for data ended; the subject is its length in nanoseconds
    UNUSUAL = enum.auto()  # from a muted collector: the work that begins is not in `Outline.usual`


Listener: TypeAlias = Callable[[Signal, object], "bool | None"]
"""What receives signals. It returns True if a call that begins is part of no step: it is not recorded, its end is not
signalled, and calls in it are outermost."""


class Kernels(str, enum.Enum):
    """The source of device work: in a process, runtime calls, kernels and copies come from one source."""

    AUTO = "auto"  # the first source below that passes its trial
    CUPTI = "cupti"  # cupti-python
    KINETO = "kineto"  # torch.profiler

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, text: str) -> Kernels:
        """Return the source of a name.

        Raises:
            UsageError: there is no such source.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"kernels={text!r}: device work comes from {', '.join(cls)}; write one of them") from None


class Token(NamedTuple):
    """A word of an outline: an outermost call, a backward pass or an optimizer's step."""

    kind: Kind
    subject: int
    """Number of the module or the optimizer, see `xsp.subjects`; 0 where an optimizer's step or a backward pass begins,
    1 where a backward pass ends, 2 where it returns its gradients (`torch.autograd.grad`)."""
    type: type | None = None
    """Class of the subject."""
    trains: bool = False
    """For a call: whether the module is in training mode with gradients on."""
    shape: tuple[int, ...] | None = None
    """For a call: shape of its first tensor; None if it has none."""


class Outline(deque[tuple[Any, ...]]):
    """What a step did, in order: the fields of `Token` as plain tuples; only the last `LONGEST` are kept."""

    LONGEST = 1024

    def __init__(self) -> None:
        super().__init__(maxlen=self.LONGEST)
        self.thread: int | None = None
        """Native id of the only thread whose calls are noted; None for any thread, between steps."""

        self.usual: Set[tuple[Any, ...]] | None = None
        """Words of the steps in the current stretch, see `xsp.record.quiet`; None outside of a stretch. A muted
        collector signals `UNUSUAL` before it notes another word."""

        self.ended_ns: int | None = None
        """End of the last step of the current stretch; None while a step is open, and outside of a stretch."""

        self.began_ns = self.between_ns = self.begun = 0
        """Start of the last step of the current stretch; total time between its steps so far; number of steps begun."""

        self.times: list[Any] | None = None
        """Signals with which phases of the step of `thread` began and ended, each followed by its time; None while
        phases are not timed. See `time`."""

        self.hook_times: list[int] | None = None
        """In the step of a stretch in which hooks are timed, a reading of the monotonic clock for each hook's end, and
        a negative one for its begin, so that their sum is the time in hooks; else None. Hooks run on cold caches, so no
        calibration tells what they take."""

        self.apart: set[int] = set()
        """Numbers of modules whose calls between steps are part of no step, see `xsp.record.autostep`."""

        self.beside: dict[int, deque[tuple[Any, ...]]] = {}
        """Words of the steps that other threads run beside the one of `thread`, by native id."""

        self.calls: dict[int, tuple[Any, ...]] = {}
        """The word of each thread's last call, with which its next step may begin."""

        self.subjects = Subjects()
        self.numbers = self.subjects.numbers
        """Numbers of the known modules and optimizers, by their `id`; `register` assigns one to a new object."""

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

    def time(self, signal: Signal, thread: int, now_ns: int) -> None:
        """Note the time at which a phase of a step of a thread begins or ends, if `times` is not None. Hot."""
        times = self.times
        if times is not None and thread == self.thread:
            times += (signal, now_ns)

    def note(self, thread: int, word: tuple[Any, ...]) -> None:
        """Add a word of a thread to its step; without effect if it has none while another thread has one. Hot."""
        words = self.beside.get(thread)
        if words is not None:
            words.append(word)
        elif (owner := self.thread) in (None, thread):
            self.append(word)
            if owner is None and self.thread not in (None, thread):  # another thread has begun a step meanwhile
                with contextlib.suppress(ValueError):
                    self.remove(word)

    def note_call(self, thread: int, word: tuple[Any, ...]) -> None:
        """Add the word of a call that begins, as `note`, and remember it: a step may begin with it. Hot."""
        if len(self.calls) >= self.LONGEST:
            self.calls.clear()
        self.calls[thread] = word
        self.note(thread, word)

    def begin(self, thread: int, by_call: bool) -> tuple[Any, ...] | None:
        """Forget the words of the last step, and return the first word of the next one, if it begins with a call."""
        word = self.calls.get(thread) if by_call else None
        self.clear()
        if word is not None:
            self.append(word)
        return word

    def begin_beside(self, thread: int, by_call: bool) -> None:
        """Note the words of a thread separately from now on, if `by_call` from its last call on."""
        word = self.calls.get(thread) if by_call else None
        self.beside[thread] = deque([] if word is None else [word], maxlen=self.LONGEST)

    def end_beside(self, thread: int) -> tuple[tuple[Any, ...], ...]:
        """Return the words that were noted since `begin_beside`."""
        return tuple(self.beside.pop(thread, ()))

    def register(self, subject: object, trains: bool = True) -> int:
        """Return the number of a module or an optimizer that is not in `numbers`.

        Args:
            subject: the module or the optimizer.
            trains: whether it is an optimizer, or called in training mode with gradients on.
        """
        # between steps, the outline still holds the words of the last step
        return self.subjects.register(subject, trains, self if self.thread is not None else deque())


def ignore(signal: Signal, subject: object) -> None:
    """Ignore a signal: the default of a collector's `notify` until a session listens."""


class Probe(NamedTuple):
    """A piece of work that makes a known number of spans and almost nothing else.

    The session runs it alternately with the collector on and off, to measure the cost of one span.
    """

    run: Callable[[], object]
    spans: int


class Collector:
    """Base of all collectors; each method's default does nothing, so that a small collector stays small."""

    name: ClassVar[str] = ""
    """Short unique name in lower case; the value of the `collector` column."""

    levels: ClassVar[tuple[Level, ...]] = ()
    """Levels of its spans. It is on in every rung that reaches the outermost of them."""

    epoch: ClassVar[bool] = False
    """True if its times are nanoseconds since the epoch; False if they are of `time.perf_counter_ns`."""

    on_request: ClassVar[bool] = False
    """True if it is on only when it is requested by name."""

    innermost: ClassVar[bool] = False
    """True if it must be switched on after all others, and off before them."""

    by_thread: ClassVar[bool] = False
    """True if all its spans have a thread and `spans_during` works while it is on, so that several concurrent
    recordings can share it. Its times are of `time.perf_counter_ns`."""

    on_one_thread: bool = False
    """True if it sees only the thread that switched it on, and must be switched off on that thread."""

    notify: Listener = staticmethod(ignore)
    """Callback for the boundaries that it sees; set by a session that listens."""

    outline: Outline | None = None
    """Outline to which it adds a word for each thing that the program does, also in steps that are not recorded; set
    by a session. It distinguishes kinds of steps, and every step pays for it, so a word is a plain tuple."""

    def available(self) -> str | None:
        """Return None if the collector can work in this process, else the reason and what to install or do."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return environment variables that libraries read once, at their first use, and that are not set.

        `xsp run` and `xsp profile` set them before the program begins.
        """
        return {}

    def details(self) -> Mapping[str, object]:
        """Return further facts about it on this machine: versions, errors; no paths, no names of people."""
        return {}

    def open(self) -> None:
        """Install everything that stays for the whole block. Called once, before the first `start`."""

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
        """Wait until the asynchronous work of the step is done; called before the end of the step is read."""

    def spans(self) -> Iterable[Span]:
        """Return the spans seen since the last call, and forget them. Cold."""
        return ()

    def spans_during(self, start: int, end: int, thread: int | None = None) -> Iterable[Span]:
        """Return the spans that began and ended between two times, on one thread or on all, and keep them.

        Only for collectors with `by_thread`; the collector may be on meanwhile.
        """
        return ()

    def drop_before(self, time: int) -> None:
        """Forget the spans that ended before a time; the collector may be on meanwhile. Only with `by_thread`."""

    def mute(self, quiet: bool, except_signal: Signal | None = None) -> None:
        """Stop noting and signalling, also between steps, until the next call; called between steps.

        Args:
            quiet: False to resume.
            except_signal: the only signal that is still sent.
        """

    def forget(self) -> None:
        """Forget everything seen since the last step; called at the end of a step that is not recorded. Hot."""

    def notes(self) -> Iterable[str]:
        """Return sentences on what it could not see, each once; they become part of the run's health."""
        return ()

    def probe(self) -> Probe | None:
        """Return work for measuring its cost per span; None if that makes no sense for this collector."""
        return None


class DeviceCollector(Collector):
    """Base of collectors that can record device work; in a block, one of them at a time records it."""

    device_work: ClassVar[Kernels]
    """The source of device work that it reads."""

    is_device_source: bool = False
    """Whether it records device work in this block; set from outside, between steps."""

    gave_up: str | None = None
    """Reason why it can no longer record device work, set by itself between steps; another collector takes over."""

    def trial(self) -> str | None:
        """Return None if it can be the source of device work in this process, else the reason and what to do.

        Called between `available` and `open`. It leaves nothing behind.
        """
        return None
