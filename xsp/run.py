"""The content of `run.json` as a typed `Run`: the one place where its fields are read and checked.

```
Run                        every field is optional; docs/understand/table.md says what each means
├── otel: Otel             the run's own span
├── steps: Steps           how many were seen, stored, lost
├── kinds: StepKind …      the kinds of steps that the program ran
├── budget: Budget         what profiling cost
├── between: Between       which lines of the program ran between steps
├── lines: PhaseLines …    which ran in the phases of its steps
├── compilations: Compilation …  what torch.compile compiled, and why anew
├── costs: Cost …          the calibration, by collector
├── notes: Note …          what could not be seen
├── samples: Samples       what was sampled beside the spans
├── delivery: Sent …       what was delivered, by endpoint
├── machine: Machine       hardware and software
├── imported: Imported     what an import read and left out
└── ranks: Run …           of a distributed program
```

Another version of xsp, another tool or a sender of spans may have written a `run.json`. A field with a value
of another type gets its default and is listed in `misfits`; the rest of the run is unaffected. A field that this
version does not know is kept. Control characters in texts are replaced, because texts are shown in terminals.

A `Run` is also a read-only mapping of the content of the file: `run["kinds"]`, `"otel" in run`, `dict(run)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xsp.fields import Count, Fields, Id, Names, Number
from xsp.scrub import plain

MISSING = "missing files"
"""Source of notes on files that a run states, and that are not in its directory (`xsp.ingest.presence`)."""

RANKS = "ranks"  # `kind` of a directory that holds a run for each rank of a distributed program


@dataclass(frozen=True, eq=False)
class Note(Fields):
    """A note on something that could not be recorded, or was changed when it was read."""

    source: str
    text: str


@dataclass(frozen=True, eq=False)
class Otel(Fields):
    """The run's own span."""

    trace_id: Id
    span_id: Id
    parent_id: Id | None = None


@dataclass(frozen=True, eq=False)
class Steps(Fields):
    """Numbers of steps of the program; None if unknown."""

    seen: Count | None = None
    stored: Count | None = None
    lost: Count = 0
    """Steps that were recorded, but not stored."""

    skipped: Count = 0
    """Steps that began inside another one, and were not recorded."""

    found: bool = True
    """False if modules are called in turn in no order that repeats, and each call counts as a step for lack of more."""


@dataclass(frozen=True, eq=False)
class StepKind(Fields):
    """A kind of step."""

    kind: Count
    name: str
    training: bool | None = None
    calls: tuple[Mapping[str, Any], ...] = ()
    batch_size: Count | None = None
    batch_source: str | None = None
    """Source of the batch size: stated, input, guess."""

    steps: Count | None = None
    hooks_ns: Number | None = None
    """What hooks of xsp take in one of its steps that is not recorded."""


@dataclass(frozen=True, eq=False)
class Budget(Fields):
    """The cost of profiling; times in nanoseconds."""

    asked_percent: Number | None = None
    given_ns: Number = 0
    """Time that does not count against the budget: the first steps of each kind."""

    every: Number | None = None
    left_out: Mapping[str, Number | None] = field(default_factory=dict)
    """Rungs that were too expensive, with the bare steps that pay for one step; None if a less deep one was too."""

    overhead_percent: Number | None = None
    low_percent: Number | None = None
    high_percent: Number | None = None
    kept: bool | None = None
    program_percent: Number | None = None
    steps_ns: Number = 0
    waited_ns: Number = 0
    wall_ns: Number = 0
    spent_ns: Number = 0
    idle_ns: Number = 0
    """Time that collectors which recorded nothing added to steps that were not recorded, as it was measured in some of
    them; part of neither `spent_ns` nor the budget."""

    inside_ns: Number = 0
    around_ns: Number = 0
    after_ns: Number = 0
    start_ns: Number = 0
    end_ns: Number = 0
    screen_ns: Number = 0
    """Time of the first screen, for which the user waits, and of ending beyond `end_ns`."""

    bare_step_ns: Number | None = None
    taken: Mapping[str, Number | None] = field(default_factory=dict)
    cost_ns: Mapping[str, Number | None] = field(default_factory=dict)
    unknown_steps: Number = 0

    @property
    def added_ns(self) -> float:
        """Time that profiling added to the program in all."""
        return max(0.0, self.spent_ns + self.idle_ns + self.start_ns + self.end_ns + self.screen_ns)

    def with_screen(self, screen_ns: int) -> Budget:
        """Return the budget of a run whose first screen took `screen_ns`: part of what profiling added to it."""
        shown = self | {"screen_ns": screen_ns}
        if self.program_percent is None:
            return shown
        bare_ns = 100 * self.added_ns / self.program_percent if self.program_percent > 0 else self.wall_ns
        return shown | {"program_percent": round(100 * shown.added_ns / bare_ns, 2) if bare_ns > 0 else None}


LOOP_LINES = 3
"""Most lines from one line to the next of a loop whose lines count together."""

MIN_LOOP_SHARE = 0.1
"""Least share of the time of all lines that a line has to be one of a loop."""


@dataclass(frozen=True, eq=False)
class InnerLine(Fields):
    """A line inside a function of the program that another line called."""

    file: str
    line: Count
    calls: str = ""
    ns: Count = 0
    of_ns: Count = 0
    """Time that is known of all lines inside these functions; 0 in older runs."""

    last: Count = 0
    """Number of the last line of a loop that alternates between several; 0 for a single line."""

    is_loop: bool = False
    """Whether it is one of a loop of hundreds of lines of Python in one call."""


@dataclass(frozen=True, eq=False)
class Line(Fields):
    """A line of the program that ran between steps, or in one; see `xsp.record.between`."""

    file: str
    line: Count
    function: str = ""
    calls: str = ""
    """Names that the line calls."""

    ns: Count = 0
    gaps: Count = 0
    """Number of gaps in which it ran."""

    passes: Count = 0
    """How often it began to run in all of them, a loop's line once for each pass; 0 in older runs."""

    package: bool = False
    """Whether its file is one of a package, or of Python itself."""

    within: InnerLine | None = None
    """The line inside the functions that it calls that takes most of it; None where none does, or none was seen."""

    inner: tuple[InnerLine, ...] = ()
    """The lines inside these functions with most time, the first of them first; empty in older runs."""


@dataclass(frozen=True, eq=False)
class Between(Fields):
    """What the program did between its steps, after recorded ones; times in nanoseconds."""

    gaps: Count = 0
    ns: Count = 0
    lines: tuple[Line, ...] = ()
    rest_ns: Count = 0
    """Time in lines that are not named."""

    unknown_ns: Count = 0
    """Time in gaps that were followed no further, because they make too many calls."""

    asleep_ns: Count | None = None
    """Part of all of it in which the thread slept: it waited for input, files, locks or other threads; None if that is
    unknown."""


@dataclass(frozen=True, eq=False)
class PhaseLines(Between):
    """What the program did in a phase of its steps of a kind, after recorded ones; `gaps` is the number of steps."""

    kind: Count = 0
    phase: str = ""
    """`forward`, `backward`, `optimizer`; `outside`: in none of them. `slow gaps`, of kind 0: gaps between steps far
    longer than others, and `gaps` is their number."""


@dataclass(frozen=True, eq=False)
class Compilation(Fields):
    """A function that `torch.compile` compiled during the run; see `xsp.record.compilations`."""

    start_ns: Count
    """Nanoseconds since the epoch."""

    dur_ns: Count
    function: str = ""
    file: str = ""
    line: Count = 0
    reason: str | None = None
    """Why it was compiled anew; None for the first time."""


@dataclass(frozen=True, eq=False)
class Cost(Fields):
    """The cost of one span of a collector."""

    ns_per_span: Number
    level: Count
    rounds: Count | None = None


@dataclass(frozen=True, eq=False)
class Samples(Fields):
    """A summary of the samples of devices and machine."""

    interval_ms: Number | None = None
    kept_ms: Number | None = None
    readings: Count = 0
    missed: Count = 0
    reading_ms: Number | None = None
    longest_reading_ms: Number | None = None
    sources: Mapping[str, Names] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Names = ()


@dataclass(frozen=True, eq=False)
class Delivery(Fields):
    """A summary of the delivery to one endpoint."""

    endpoint: str
    steps: Count = 0
    spans: Count = 0
    rejected: Count = 0
    left: Count = 0
    messages: Names = ()


@dataclass(frozen=True, eq=False)
class Device(Fields):
    """Properties of a device; None for those that a source does not report."""

    name: str | None = None
    sms: Count | None = None
    memory_bytes: Count | None = None
    compute: str | None = None
    warp_size: Count | None = None

    _LENIENT = True


@dataclass(frozen=True, eq=False)
class Machine(Fields):
    """Hardware and software."""

    machine: str | None = None
    system: str | None = None
    kernel: str | None = None
    python: str | None = None
    cpu: str | None = None
    isa: Names | None = None
    """Instruction set extensions that the tensor types depend on, by their Linux names; None if unknown."""

    cores: Count | None = None
    memory_bytes: Count | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_threads: Count | None = None
    torch_seed: Any = None
    """An unsigned 64-bit number, which no column holds."""

    devices: Names = ()
    device_properties: tuple[Device, ...] = ()
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    """See `xsp.device.ceilings`, which checks them, because a user may have typed in measured values."""

    _LENIENT = True


@dataclass(frozen=True, eq=False)
class CounterSummary(Fields):
    """A metric of kernels whose counters could not be assigned to a span."""

    kernel: str
    metric: str
    kernels: Count
    sum: Number
    least: Number
    most: Number
    device: Count | None = None


@dataclass(frozen=True, eq=False)
class Counters(Fields):
    """The hardware counters that were joined, see docs; each tool adds further fields."""

    tool: str | None = None
    apart: tuple[CounterSummary, ...] = ()


@dataclass(frozen=True, eq=False)
class Source(Fields):
    """What an import read from one file."""

    source: str = ""
    importer: str | None = None
    spans: Count | None = None
    skipped: Mapping[str, Count] = field(default_factory=dict)
    changed: Mapping[str, Count] = field(default_factory=dict)
    notes: Names = ()


@dataclass(frozen=True, eq=False)
class Frame(Fields):
    """A long call of Python that another profiler recorded."""

    name: str = ""
    """File without its folder, line and function."""

    thread: Count = 0
    start_ns: Count = 0
    dur_ns: Count = 0


@dataclass(frozen=True, eq=False)
class Imported(Fields):
    """What an import read."""

    sources: tuple[Source, ...] = ()
    doubled: Count = 0


@dataclass(frozen=True, eq=False)
class Received(Fields):
    """What a receiver accepted."""

    requests: Count = 0
    skipped: Mapping[str, Count] = field(default_factory=dict)
    changed: Mapping[str, Count] = field(default_factory=dict)
    doubled: Count = 0
    runs: tuple[Run, ...] = ()
    """The content of each run's `run.json`, until the runs are put in order."""


@dataclass(frozen=True, eq=False)
class Run(Fields):
    """The description of a run; see docs/understand/table.md for each field."""

    format: Count | None = None
    xsp: str | None = None
    id: str | None = None
    name: str = ""
    kind: str | None = None
    finished: bool | None = None
    created: str | None = None
    seconds: Number | None = None
    start_ns: Count | None = None
    end_ns: Count | None = None
    otel: Otel | None = None
    rank: Count | None = None
    local_rank: Count | None = None
    world_size: Count | None = None
    process: Count | None = None
    host: str | None = None
    command: Names = ()
    typed: Names = ()
    levels: str | None = None
    rungs: Names = ()
    warmup: Count = 0
    settle: bool | Count | None = None
    seed: Number | None = None
    batch_size: Count | None = None
    kinds: tuple[StepKind, ...] = ()
    budget: Budget | None = None
    between: Between | None = None
    lines: tuple[PhaseLines, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    clock: Mapping[str, Any] = field(default_factory=dict)
    steps: Steps | None = None
    empty: str | None = None
    collectors: Names = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    counters: Counters | None = None
    costs: Mapping[str, Cost] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    samples: Samples | None = None
    delivery: tuple[Delivery, ...] = ()
    machine: Machine = field(default_factory=lambda: Machine.of({}))
    parts: Names = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[Run, ...] = ()
    imported: Imported | None = None
    frames: tuple[Frame, ...] = ()
    received: Received | None = None
    backend: str | None = None
    framework: str | None = None
    """Framework of the program; None if it is PyTorch, or not known. See `xsp.frameworks`."""

    timeline: bool | None = None
    """False if spans have durations, which are sums or means, and no moments: their starts and order mean nothing."""

    profiler: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    sides: Mapping[str, str] = field(default_factory=dict)
    turns: Count | None = None

    _LENIENT = True

    @property
    def is_job(self) -> bool:
        """Whether it represents the ranks of a distributed program, each with a run of its own."""
        return self.kind == RANKS

    @property
    def rank_runs(self) -> tuple[Run, ...]:
        """The runs of its ranks; the run itself if the program is not distributed."""
        return self.ranks or (self,)

    def of_rank(self, rank: int) -> Run:
        """Return the run of a rank; this one if it has no such rank, as that of a single process."""
        return next((each for each in self.rank_runs if (each.rank or 0) == rank), self)

    def with_notes(self, source: str, texts: Iterable[str]) -> Run:
        """Return a copy with those notes added that it does not have yet."""
        notes = [dict(note) for note in self.notes]
        for text in texts:
            if (note := {"source": source, "text": plain(text)}) not in notes:
                notes.append(note)
        return self | {"notes": notes} if len(notes) > len(self.notes) else self

    def without(self, *names: str) -> Run:
        """Return a copy without some fields."""
        return Run.of({name: value for name, value in self.content.items() if name not in names})
