"""What `run.json` says of a run: a typed `Run`, the one place where its fields are read and checked.

```
Run                        every field is optional; docs/understand/table.md says what each means
├── otel: Otel             the run's own span
├── steps: Steps           how many were seen, stored, lost
├── kinds: StepKind …      the kinds of steps that the program ran
├── budget: Budget         what profiling cost
├── costs: Cost …          the calibration, by collector
├── notes: Note …          what could not be seen
├── samples: Samples       what was sampled beside the spans
├── delivery: Sent …       what was delivered, by endpoint
├── machine: Machine       hardware and software
├── imported: Imported     what an import read and left out
└── ranks: Run …           of a distributed program
```

Anybody may have written a `run.json`: another version of xsp, another tool, a sender of spans. A field that is not of
its type has its default, and is named in `misfits`; it costs the run nothing else. A field that this version
does not know is kept. Text has no control character, for it is shown in terminals.

A `Run` is a read-only mapping, too, of what stands in the file: `run["kinds"]`, `"otel" in run`, `dict(run)`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from xsp.scrub import plain

INT64 = 1 << 63

Count = Annotated[int, "not negative, and what a column of the table holds"]
Number = Annotated[float, "finite"]
Id = Annotated[str, re.compile(r"[0-9a-f]{1,32}")]
Names = tuple[str, ...]

RANKS = "ranks"  # `kind` of a directory that holds a run for each rank of a distributed program


class Misfit(ValueError):
    """A value is not of the type that its field has."""


T = TypeVar("T", bound="Fields")


@dataclass(frozen=True, eq=False)
class Fields(Mapping[str, Any]):
    """A JSON object whose known fields are attributes, of their types, and which is a mapping of all that it holds.

    A field that is null, or not there, has its default. One without a default must be there.
    """

    content: Mapping[str, Any] = field(repr=False)
    """As it stands in the file, with fields of other versions and tools, and with those that do not fit."""

    misfits: Names = field(repr=False)
    """Fields that are not of their type, which have their default as attributes, and are no keys."""

    @classmethod
    def of(cls: type[T], content: Mapping[str, Any]) -> T:
        """Return what a JSON object says.

        Raises:
            Misfit: a field that has no default is missing or not of its type.
        """
        if isinstance(content, cls):
            return content
        held = _plain(content)
        values: dict[str, Any] = {}
        wrong = []
        for name, (hint, needed) in _known(cls).items():
            value = held.get(name)
            if value is None and not needed:
                continue
            try:
                values[name] = _taken(hint, value)
            except Misfit:
                if needed or not cls._LENIENT:
                    raise Misfit(name) from None
                wrong.append(name)
        return cls(content=held, misfits=tuple(wrong), **values)

    _LENIENT = False
    """Whether a field that does not fit is left out, instead of the whole object."""

    @property
    def unknown(self) -> Names:
        """Fields that this version does not know: of another one, or of another tool."""
        return tuple(name for name in self.content if name not in _known(type(self)))

    def __getitem__(self, name: str) -> Any:
        if name in self.misfits:
            raise KeyError(name)
        return self.content[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.content if name not in self.misfits)

    def __len__(self) -> int:
        return len(self.content) - len(self.misfits)

    def __or__(self: T, changes: Mapping[str, Any]) -> T:
        """Return the same with other values of some fields, as `run.json` has them."""
        return type(self).of({**self.content, **changes})


@dataclass(frozen=True, eq=False)
class Note(Fields):
    """What could not be seen, or was taken otherwise than it stood there."""

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
    """Steps of the program; None where nothing tells."""

    seen: Count | None = None
    stored: Count | None = None
    lost: Count = 0
    """Recorded, but not stored."""

    skipped: Count = 0
    """Not recorded, because another step was under way."""


@dataclass(frozen=True, eq=False)
class StepKind(Fields):
    """A kind of step."""

    kind: Count
    name: str
    training: bool | None = None
    calls: tuple[Mapping[str, Any], ...] = ()
    batch_size: Count | None = None
    batch_source: str | None = None
    """How the batch size is known: stated, input, guess."""

    steps: Count | None = None


@dataclass(frozen=True, eq=False)
class Budget(Fields):
    """What profiling cost; times in nanoseconds."""

    asked_percent: Number | None = None
    given_ns: Number = 0
    """Not counted against the budget: the first steps of each kind."""

    every: Number | None = None
    left_out: Mapping[str, Number | None] = field(default_factory=dict)
    """Rungs that were too dear, with the bare steps that earn one; None where a less deep one was too dear."""

    overhead_percent: Number | None = None
    low_percent: Number | None = None
    high_percent: Number | None = None
    kept: bool | None = None
    program_percent: Number | None = None
    steps_ns: Number = 0
    waited_ns: Number = 0
    wall_ns: Number = 0
    spent_ns: Number = 0
    inside_ns: Number = 0
    around_ns: Number = 0
    after_ns: Number = 0
    start_ns: Number = 0
    end_ns: Number = 0
    bare_step_ns: Number | None = None
    taken: Mapping[str, Number | None] = field(default_factory=dict)
    cost_ns: Mapping[str, Number | None] = field(default_factory=dict)
    unknown_steps: Number = 0


@dataclass(frozen=True, eq=False)
class Cost(Fields):
    """What one span of a collector costs."""

    ns_per_span: Number
    level: Count
    ns_passing: Number = 0
    """Of a call that it lets pass; `outer` of an outermost one, `cold` on evicted caches, `sweep` evicts them."""

    ns_passing_outer: Number = 0
    ns_passing_cold: Number = 0
    sweep_ns: Number = 0
    rounds: Count | None = None


@dataclass(frozen=True, eq=False)
class Samples(Fields):
    """What was sampled of devices and machine."""

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
class Sent(Fields):
    """What was delivered to one endpoint."""

    endpoint: str
    steps: Count = 0
    spans: Count = 0
    rejected: Count = 0
    left: Count = 0
    messages: Names = ()


@dataclass(frozen=True, eq=False)
class Device(Fields):
    """Properties of a device; what a source does not say is None."""

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
    cores: Count | None = None
    memory_bytes: Count | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_threads: Count | None = None
    torch_seed: Any = None
    """Of 64 bits without a sign, which no column holds."""

    devices: Names = ()
    device_properties: tuple[Device, ...] = ()
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    """See `xsp.device.ceilings`, which checks it: what was measured by hand may be typed by hand."""

    _LENIENT = True


@dataclass(frozen=True, eq=False)
class Counted(Fields):
    """A metric of kernels whose counters belong to no span."""

    kernel: str
    metric: str
    kernels: Count
    sum: Number
    least: Number
    most: Number
    device: Count | None = None


@dataclass(frozen=True, eq=False)
class Counters(Fields):
    """What hardware counters were joined, see docs; of each tool more than stands here."""

    tool: str | None = None
    apart: tuple[Counted, ...] = ()


@dataclass(frozen=True, eq=False)
class Source(Fields):
    """What an import read of one file."""

    source: str = ""
    importer: str | None = None
    spans: Count | None = None
    skipped: Mapping[str, Count] = field(default_factory=dict)
    changed: Mapping[str, Count] = field(default_factory=dict)
    notes: Names = ()


@dataclass(frozen=True, eq=False)
class Imported(Fields):
    """What an import read."""

    sources: tuple[Source, ...] = ()
    doubled: Count = 0


@dataclass(frozen=True, eq=False)
class Received(Fields):
    """What a receiver took."""

    requests: Count = 0
    skipped: Mapping[str, Count] = field(default_factory=dict)
    changed: Mapping[str, Count] = field(default_factory=dict)
    doubled: Count = 0
    runs: tuple[Run, ...] = ()
    """What each said of itself, until they are put in order."""


@dataclass(frozen=True, eq=False)
class Run(Fields):
    """What is known of a run; see docs/understand/table.md for each field."""

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
    delivery: tuple[Sent, ...] = ()
    machine: Machine = field(default_factory=lambda: Machine.of({}))
    parts: Names = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[Run, ...] = ()
    imported: Imported | None = None
    received: Received | None = None
    backend: str | None = None
    profiler: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    sides: Mapping[str, str] = field(default_factory=dict)
    turns: Count | None = None

    _LENIENT = True

    @property
    def is_job(self) -> bool:
        """Whether it stands for the ranks of a distributed program, each with a run of its own."""
        return self.kind == RANKS

    @property
    def each_rank(self) -> tuple[Run, ...]:
        """The runs of its ranks, or itself where it is no distributed program's."""
        return self.ranks or (self,)

    def noted(self, source: str, texts: Iterable[str]) -> Run:
        """Return the same with notes that are not there yet."""
        notes = [dict(note) for note in self.notes]
        for text in texts:
            if (note := {"source": source, "text": plain(text)}) not in notes:
                notes.append(note)
        return self | {"notes": notes} if len(notes) > len(self.notes) else self

    def without(self, *names: str) -> Run:
        """Return the same without some fields."""
        return Run.of({name: value for name, value in self.content.items() if name not in names})


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that a column holds, and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < INT64


@cache
def _known(kind: type[Fields]) -> dict[str, tuple[Any, bool]]:
    """Return, by the name in the file, the type of each known field and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: (hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.name not in ("content", "misfits")
    }


def _taken(hint: Any, value: Any) -> Any:
    """Return a JSON value as an attribute of a type.

    Raises:
        Misfit: it is none of that type.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _of_several(inner, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_taken(inner[0], each) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _taken(inner[1], each) for name, each in value.items()}
    if origin is None and issubclass(hint, Fields) and isinstance(value, dict):
        return hint.of(value)
    if _is_single(hint, value):
        return value
    raise Misfit


def _of_several(hints: Iterable[Any], value: Any) -> Any:
    for hint in hints:
        if hint is not type(None):
            try:
                return _taken(hint, value)
            except Misfit:
                continue
        elif value is None:
            return None
    raise Misfit


def _is_single(hint: Any, value: Any) -> bool:
    """Return whether a value is the text, flag, count or number that a type asks for."""
    if hint == Count:
        return is_count(value)
    if hint == Number:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < INT64
    if hint == Id:
        return isinstance(value, str) and Id.__metadata__[0].fullmatch(value) is not None  # type: ignore[attr-defined]
    return hint in (str, bool) and isinstance(value, hint)


def _plain(value: Any) -> Any:
    """Return JSON with all of its texts as a terminal may show them."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Fields):
        return value.content
    if isinstance(value, Mapping):
        return {plain(str(name)): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
