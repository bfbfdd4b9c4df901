"""The plain data of an account: entries that add up, the two sides of an iteration, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

ITERATION = "iteration"
DATA, FORWARD, BACKWARD, OPTIMIZER = "waiting for data", "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
OUTSIDE, BETWEEN, DRAINING = "outside the phases", "between steps", "waiting for the device after the step"
RUNNING, ISSUING, WAITING = "running", "issuing device work", "waiting for the device"
OTHER_THREADS = "other threads run steps"
OTHER_RANKS, TRANSFER = "waiting for other ranks", "transfer"
BUSY, COMPUTATION, COMMUNICATION, COPIES = "busy", "computation", "exposed communication", "exposed copies"
IDLE, HOST_LATE, HOST_DATA, DRAINED, COPYING, QUEUED, BEFORE_FIRST, AFTER_LAST, NO_LAUNCH, NOT_RECORDED = (
    "idle",
    "the host issues too late",
    "the host waits for data",
    "the host had waited for the device",
    "a copy is prepared",
    "launched work waits",
    "before the first launch of a step",
    "after the last work of a step",
    "the trace does not show why",
    "between steps, not recorded",
)
BARE, RECORDED = "iterations that were not recorded", "recorded iterations"
"""Sources of entries."""

OF_IDLE = "idle: "
"""Prefix of the causes of idle time where they are parts beside others."""

TO_DEVICE, FROM_DEVICE, READING = "copies to the device", "copies from the device", "values read one by one (item)"
UNLIKE = "in slow steps that were not recorded"
OUTSIDE_OPERATORS, OTHER_OPERATORS, ASLEEP = "outside operators", "other operators", "the thread sleeps"
OF_COLLECTIVES = (OTHER_RANKS, TRANSFER)
"""Times of the host in collectives that it runs itself, while it computes nothing."""

STATES = (WAITING, ISSUING, *OF_COLLECTIVES)
"""What the host does in a phase while it does not run."""

EARLIER, UNEXPLAINED = "launched before the recording", "unexplained"
STEP, USUAL, SLOW = "step", "usual iterations", "slow iterations"
SLOW_GAPS = "slow gaps"
COMPILING, FIRST, OUTSIDE_STEPS = "compiling", "first iterations", "in no step"
ANEW = "compiling anew"
COMPILER = "torch's notes of what it compiled"
"""Source of the time of compiling where each compilation is known; else it is inferred from slow first iterations."""


def of_model(phase: str, model: str) -> str:
    """Return the name of the part of a phase that one of several models takes."""
    return f"{phase} of {model}"


@dataclass(frozen=True)
class Entry:
    """A part of the time of an iteration: its milliseconds, where they were measured, and its own parts."""

    name: str
    ms: float | None
    """Milliseconds per iteration; None if nothing measured it."""

    source: str = ""
    """The measurement: steps that were not recorded, or recorded ones."""

    low_ms: float | None = None
    high_ms: float | None = None
    """Ends of the 95 % interval; None if there were too few iterations for one."""

    children: tuple[Entry, ...] = ()
    place: str | None = None
    """The module, operator, class of kernels or line that takes most of it."""

    place_ms: float | None = None
    """Milliseconds per iteration of `place`."""

    spans: tuple[str, ...] = ()
    """Ids of the spans of `place`, the first ones."""

    calls: float | None = None
    """Number of calls of `place` in an iteration; of the entry itself if it has no place."""

    def walk(self) -> Iterator[Entry]:
        """Yield this entry and all entries inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def part(self, name: str) -> float:
        """Return the milliseconds of the entries of this name inside; 0 if there are none."""
        return sum(entry.ms or 0.0 for entry in self.walk() if entry.name == name and entry is not self)


@dataclass(frozen=True)
class Side:
    """An iteration as the host spent it, or as one device did: entries that add up to the iteration."""

    name: str
    entries: tuple[Entry, ...]
    device: int | None = None
    hidden_communication_ms: float = 0.0
    """Communication that ran while the device also computed; part of computation, not of the sum."""

    def __getitem__(self, name: str) -> Entry | None:
        """Return the first entry of this name at any depth; None if there is none."""
        return next((entry for top in self.entries for entry in top.walk() if entry.name == name), None)

    def ms(self, name: str) -> float:
        """Return the milliseconds of the first entry of this name; 0 if there is none or they are unknown."""
        entry = self[name]
        return (entry.ms or 0.0) if entry is not None else 0.0

    @property
    def total_ms(self) -> float:
        """The sum of the entries."""
        return sum(entry.ms or 0.0 for entry in self.entries)


@dataclass(frozen=True)
class Limit:
    """The side that limits an iteration. Without waits for each other it takes the longer one of both times."""

    side: str
    """`host`, `device`, or `unknown`."""

    host_ms: float
    """Time of the host without its waits for the device; 0 where the trace does not show these waits."""

    device_ms: float
    """Time in which the busiest device works."""

    least_host_ms: float | None = None
    """Time that the host needs in a fast iteration, with its waits: a quarter of them take no longer; None if unknown.
    Where the host waits for the device without a call that shows it, it needs less than `host_ms`."""

    @property
    def lead_ms(self) -> float:
        """By how much the limiting side takes longer than the other one."""
        return abs(self.host_ms - self.device_ms)


@dataclass(frozen=True)
class SlowIterations:
    """Iterations of a kind that take much longer than the others."""

    part: str
    """What is slow in them: a phase of the step, the step, waiting for data, or the time between steps."""

    count: int
    of: int
    """Number of iterations among which they are."""

    period: int | None
    """Every how many steps one of them runs; None if that varies."""

    slow_ms: float
    """Mean time of one of them."""

    usual_ms: float
    """Median time of the others."""

    cost: Entry
    """What they take longer, per iteration of the kind, with the place that takes most of it; of its time."""

    steps: tuple[int, ...] = ()
    """Numbers of the first ones."""

    is_line: bool = False
    """Whether the place is a line of the program that runs only in some iterations, and is what they do besides."""


@dataclass(frozen=True)
class FirstIterations:
    """The first iterations of a program, in which code is compiled and loaded, memory allocated, and kernels chosen."""

    count: int
    ms: float
    """What they take longer than as many others, all together."""

    longest_ms: float
    usual_ms: float
    is_compiling: bool
    """Whether code that a compiler made runs in the program."""


@dataclass(frozen=True)
class Growth:
    """Iterations that take longer and longer: times at the beginning and at the end."""

    first_ms: float
    last_ms: float
    where: str | None = None
    """The part of an iteration that grows, where one makes up most of it."""


@dataclass(frozen=True)
class Course:
    """The iterations of a kind over the time of the program."""

    first: FirstIterations | None = None
    slow: tuple[SlowIterations, ...] = ()
    growth: Growth | None = None


@dataclass(frozen=True)
class Iterations:
    """The account of the iterations of one kind on one rank."""

    rank: int
    kind: int | None
    name: str
    unit: str
    """`iteration`; `window` in a trace without steps."""

    count: int
    recorded: int
    detailed: int
    """Recorded iterations with the most detail, from which the parts come."""

    time: Entry
    host: Side
    devices: tuple[Side, ...] = ()
    limit: Limit | None = None
    share: float = 1.0
    """Share of the loop's time in iterations of this kind."""

    is_beginning: bool = False
    """Whether it only begins the program, see `xsp.store.iterations.beginning_kinds`."""

    samples_per_s: float | None = None
    """Samples per second of the loop, on all threads together."""

    at_once: float = 1.0
    """Mean number of iterations that run at the same time, on several threads."""

    threads: int = 1
    """Number of threads that run its steps. Of several, the time between steps is that in which none of them does: they
    may wait for work then."""

    trains: bool | None = None
    """Whether its steps train a model; None if unknown."""

    @property
    def subject(self) -> str:
        """What the account is of, in a sentence."""
        return "the recording" if self.unit == "window" else "an iteration"

    earlier: Entry | None = None
    """Device work that was launched before the recording, and belongs to no iteration; per iteration."""

    def percent(self, ms: float | None) -> float | None:
        """Return a time as a percentage of the iteration; None if one of them is unknown."""
        return 100 * ms / self.time.ms if ms is not None and self.time.ms else None

    course: Course | None = None
    """Slow iterations and growth; None in traces that do not show the loop."""

    @property
    def device(self) -> Side | None:
        """The busiest device."""
        return max(self.devices, key=lambda side: side.ms(BUSY), default=None)

    def bound_ms(self, side: str, gain_ms: float) -> float:
        """Return the most that an iteration can become shorter if one side takes less time.

        Args:
            side: `host` or `device`.
            gain_ms: time that the side takes less.

        Returns:
            At most what the other side leaves: the iteration less the longer of both sides after the change.
        """
        if self.limit is None or self.time.ms is None:
            return gain_ms
        host_ms, device_ms = self.limit.host_ms, self.limit.device_ms
        if side == "device" and self.limit.least_host_ms is not None:
            host_ms = min(host_ms, self.limit.least_host_ms)
        if side == "host":
            host_ms = max(0.0, host_ms - gain_ms)
        else:
            device_ms = max(0.0, device_ms - gain_ms)
        return max(0.0, min(gain_ms, self.time.ms - max(host_ms, device_ms)))


@dataclass(frozen=True)
class LateRank:
    """A rank that others wait for in collectives."""

    rank: int
    late_ms: float
    """Its delay at the collective at which others wait longest for it, the median over the iterations."""

    collective: str
    """That collective."""

    is_first: bool
    """Whether it is the first collective of its name in a step."""

    waited_ms: float
    """Time that the other ranks waited for it, all together, per iteration."""

    exposed_ms: float
    """Exposed communication of all ranks together, per iteration."""

    ranks: int
    part: str | None = None
    """The part of its iteration on the host that takes longer than on the others, if that explains its delay."""

    part_ms: float = 0.0
    """By how much."""


@dataclass(frozen=True)
class Doubt:
    """Something impossible or missing in a trace, and what cannot be said because of it."""

    subject: str
    text: str
    best_grade: str
    forbids: frozenset[str] = frozenset()
    """`busy`: how busy devices are; `cause`: why they are idle."""


@dataclass(frozen=True)
class Account:
    """Where the time of a program went: of each kind of iteration, on the host and on each device."""

    iterations: tuple[Iterations, ...]
    """Of each rank and kind, the kind with most time first; the first one is what the trace's figures describe."""

    wall_ms: float | None = None
    """Wall time of the loop, from the start of the first step to the end of the last."""

    outside_ms: float | None = None
    """Part of it that belongs to no iteration of any kind."""

    program: tuple[Entry, ...] = ()
    """Entries that add up to `wall_ms`: the iterations of each kind, what the first ones took longer, the time in no
    step, and what remains (recorded iterations take longer than others); empty without a loop."""

    doubts: tuple[Doubt, ...] = ()
    late_rank: LateRank | None = None
    steps_found: bool = True
    """False if modules are called in turn in no order that repeats: then each call counts as a step, and no iteration
    of the program is known."""

    violations: tuple[str, ...] = field(default=())
    """What does not add up, see `xsp.account.check`."""

    @property
    def main(self) -> Iterations | None:
        """The account of the kind and rank that the trace's figures describe; None without a step or a window."""
        return self.iterations[0] if self.iterations else None

    @property
    def job(self) -> Iterations | None:
        """The account that stands for the program: of several ranks, which wait for each other, the slowest one."""
        known = [each for each in self.ranks if each.time.ms is not None]
        return max(known, key=lambda each: each.time.ms or 0.0) if len(known) > 1 else self.main

    @property
    def ranks(self) -> tuple[Iterations, ...]:
        """The account of the same kind on each rank, by rank."""
        main = self.main
        if main is None:
            return ()
        same = [each for each in self.iterations if (each.rank == main.rank and each is main) or each.rank != main.rank]
        by_rank: dict[int, Iterations] = {}
        for each in same:
            by_rank.setdefault(each.rank, each)
        return tuple(by_rank[rank] for rank in sorted(by_rank))

    def of(self, rank: int, kind: int | None) -> Iterations | None:
        """Return the account of a rank and kind; None if there is none."""
        return next((each for each in self.iterations if (each.rank, each.kind) == (rank, kind)), None)

    def forbids(self, what: str) -> bool:
        """Return whether a doubt forbids statements on `busy` or `cause`."""
        return any(what in doubt.forbids for doubt in self.doubts)


def scaled(entries: Sequence[Entry], factor: float) -> tuple[Entry, ...]:
    """Return entries with all their times multiplied by a factor."""

    def of(ms: float | None) -> float | None:
        return None if ms is None else ms * factor

    return tuple(
        replace(
            entry,
            ms=of(entry.ms),
            low_ms=of(entry.low_ms),
            high_ms=of(entry.high_ms),
            place_ms=of(entry.place_ms),
            children=scaled(entry.children, factor),
        )
        for entry in entries
    )
