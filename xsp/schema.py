"""The vocabulary of xsp: levels, kinds, and the columns of the span table.

`COLUMNS` is the single source of the Parquet schema, the validation, the names in OpenTelemetry and the page in
the docs.
A `Span` is a row in Python, as collectors write it; its fields are the columns, in their order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

SCHEMA_VERSION = 1
"""Version of the table; a column that changes its meaning raises it, an added column does not."""


class Level(enum.IntEnum):
    """Where in the stack a span was recorded, outermost first.

    The numbers leave gaps, as in `logging`, so that a third party can put a level between two.
    """

    APPLICATION = 10
    MODEL = 20
    LAYER = 30
    OP = 40
    LIBRARY = 50
    RUNTIME = 60
    KERNEL = 70


class Kind(str, enum.Enum):
    """The kind of interval that a span represents."""

    RUN = "run"  # a whole run of a program; its steps link to it
    LOOP = "loop"  # rows of the table `loop` on their way over OTLP; it is in no table of spans
    USER = "user"  # a block that the user named
    REQUEST = "request"  # a request that an engine served in several steps
    STEP = "step"  # one prediction or one training step
    BEFORE = "before"  # the time between the step before and a recorded one; only in the table `before`
    FORWARD = "forward"  # the outermost call of a module
    BACKWARD = "backward"  # a run of the autograd engine
    OPTIMIZER = "optimizer"  # an optimizer's step
    DATA = "data"  # waiting for the data loader
    MODULE = "module"  # a call of an nn.Module
    OP = "op"  # a framework operator
    PRIMITIVE = "primitive"  # a primitive of a CPU library
    CALL = "call"  # a call of a GPU library, a collective of a communication library
    LAUNCH = "launch"  # a runtime call that starts device work
    KERNEL = "kernel"  # device work: a kernel
    COPY = "copy"  # device work: a copy or a memset
    SYNC = "sync"  # waiting for the device
    OVERHEAD = "overhead"  # the profiler's own work, as it reports it
    ALLOC = "alloc"  # memory taken; folded into the spans around it and not kept

    __hash__ = str.__hash__  # Enum's own hash is a slow Python function, and kinds are hashed in the measured program

    def __str__(self) -> str:
        return self.value


class Rule(str, enum.Enum):
    """The evidence for the parent of a span, see docs/understand/correlation.md; an orphan has none."""

    EXPLICIT = "explicit"  # the collector or the caller named it
    CORRELATION = "correlation"  # device work takes the parent of its launch
    SEQUENCE = "sequence"  # a backward op belongs to the layer of its forward op
    CONTAINMENT = "containment"  # the innermost span around it, on its thread, no deeper than itself
    SERIALISED = "serialised"  # ambiguous here, found in the serialised re-run
    GRAPH = "graph"  # device work of a replayed graph takes the place of the replay's launch
    EXTERNAL = "external"  # the launch left no trace, but the source names the operator
    CAPTURE = "capture"  # device work of a replayed graph is of the layer in whose capture its node was made
    ORDER = "order"  # work of a replayed graph is of the operator at its place in the capture, or in a step without it
    PROVENANCE = "provenance"  # a compiler fused it from several layers; this is the innermost around all of them

    def __str__(self) -> str:
        return self.value


WEAK_RULES = (Rule.GRAPH, Rule.EXTERNAL, Rule.ORDER, Rule.PROVENANCE)
"""Rules whose evidence makes a layer only an inferred one."""

MAX_NESTING = 200
"""Most nested spans that are followed: no program nests deeper, but a file may, or contain a cycle."""

WINDOW = "window"
"""Name of the step that represents the whole of an imported trace, if it has no steps."""

ANNOTATION = "annotation"
"""Type of a layer that is a block which the user named, in traces without modules."""

OVERLOAD, DTYPES, STRIDES, SCALARS = "overload", "input_dtypes", "input_strides", "input_scalars"
PARAMETERS, OUTPUTS = "extra_repr", "output_shapes"
INPUT_TENSORS, OUTPUT_TENSORS = "input_tensors", "output_tensors"
TRAINABLE, PADDING = "trainable_bytes", "padding"
ROOT = "root"
"""Attribute of a module call: its outermost module, if a program calls several; absent for calls of the first one."""

WORKERS, PERSISTENT = "workers", "persistent"
"""Attributes of a wait for a data loader with worker processes: their number, and whether they outlive an epoch."""

DESCRIPTION_KEYS = {
    OVERLOAD: "of an operator: its overload, `Tensor` of `aten::add.Tensor`",
    DTYPES: "of an operator: element types of its arguments in Kineto's words, a list for a list of tensors; "
    "`Scalar`, `ScalarList` or empty where an argument is no tensor",
    STRIDES: "of an operator: strides of its tensor arguments in elements, null where they are contiguous; "
    "absent if all are",
    SCALARS: "of an operator: its arguments that are not tensors; null for tensors and for arguments that are not "
    "recorded (texts, devices); numbers that are not finite are text; absent if all are null",
    PARAMETERS: "of a module call: its hyper-parameters (`extra_repr`), the first 200 characters, without secrets",
    OUTPUTS: "of a module call: shapes of the tensors that it returned",
    INPUT_TENSORS: "of a module call inside another, or with tensors alone: a number for each input tensor, equal "
    "within a step for the same tensor with the same content; writes in inference mode are not detected",
    OUTPUT_TENSORS: "of a module call: these numbers for the tensors that it returned",
    TRAINABLE: "of a module call: bytes of the module's parameters that take a gradient, its children's included; "
    "absent if it has no parameters",
    PADDING: "of a forward pass with a batch of tokens in the host's memory: rows, columns, columns that any row uses, "
    "and tokens, without the value that ends, or begins, all rows",
}
"""Keys of the column `attributes` in describing steps and in the merged step, with their meanings."""


class Grade(str, enum.Enum):
    """Certainty of the layer of device work."""

    EXACT = "exact"  # by ids, sequence numbers and containment
    INFERRED = "inferred"  # by weaker evidence: a replayed graph, an operator without a launch, fused layers
    UNKNOWN = "unknown"  # no layer

    def __str__(self) -> str:
        return self.value


class Column(NamedTuple):
    """One column of the span table."""

    name: str
    type: str
    description: str
    attribute: str | None = None
    """Its name in OpenTelemetry, from the semantic conventions where they have one; None for a column that has
    a field of its own there, or that never leaves the table."""


COLUMNS: tuple[Column, ...] = (
    Column("trace_id", "VARCHAR", "one step, 32 hexadecimal digits as in OpenTelemetry"),
    Column("span_id", "VARCHAR", "16 hexadecimal digits as in OpenTelemetry"),
    Column("parent_id", "VARCHAR", "span_id of the parent; null for a root and for an orphan"),
    Column(
        "parent_rule",
        "VARCHAR",
        "the evidence for the parent, see Rule; null where there is no parent",
        "xsp.parent_rule",
    ),
    Column("level", "SMALLINT", "where in the stack, see Level", "xsp.level"),
    Column("kind", "VARCHAR", "what the interval is, see Kind", "xsp.kind"),
    Column("name", "VARCHAR", "full name: of the module in its model, of the operator, of the kernel"),
    Column("type", "VARCHAR", "class of the module, kind of primitive", "xsp.type"),
    Column("phase", "VARCHAR", "forward, backward or optimizer; null outside them", "xsp.phase"),
    Column("start_ns", "BIGINT", "nanoseconds since the epoch"),
    Column(
        "dur_ns", "BIGINT", "measured duration in nanoseconds, with the cost of the profiling in it", "xsp.duration_ns"
    ),
    Column("process", "BIGINT", "process id", "process.pid"),
    Column("thread", "BIGINT", "thread id of the operating system; null if unknown", "thread.id"),
    Column("device", "INTEGER", "device index; null on the host", "cuda.device"),
    Column("stream", "BIGINT", "stream of the device; null on the host", "cuda.stream"),
    Column("step", "INTEGER", "number of the step in its run, from 0, warm-up counted", "xsp.step"),
    Column("rank", "INTEGER", "number of the process in a distributed job; 0 if it is alone", "xsp.rank"),
    Column("rung", "SMALLINT", "deepest level whose collectors were on in that step", "xsp.rung"),
    Column("timed", "BOOLEAN", "false in describing steps (shapes, memory), whose times are not used", "xsp.timed"),
    Column("correlation_id", "BIGINT", "joins device work to its launch", "cuda.correlation_id"),
    Column("sequence_nr", "BIGINT", "joins a backward op to its forward op", "xsp.sequence_nr"),
    Column("forward_thread", "BIGINT", "thread on which the forward op of a backward op ran", "xsp.forward_thread"),
    Column("status", "VARCHAR", "ok; error:<exception type>; unclosed; of a request also cancelled", "xsp.status"),
    Column("key", "VARCHAR", "place in the structure of a step: the same span in another step has the same", "xsp.key"),
    Column("layer_index", "INTEGER", "position of the module call in execution order, from 0", "xsp.layer_index"),
    Column("depth", "INTEGER", "number of module calls around this one", "xsp.depth"),
    Column("layer_id", "VARCHAR", "span_id of its layer: itself, or the innermost layer above it"),
    Column("grade", "VARCHAR", "certainty of the layer of device work, see Grade; null on the host", "xsp.grade"),
    Column(
        "batch_size",
        "BIGINT",
        "samples in the step, as stated or as the first input's first dimension",
        "xsp.batch_size",
    ),
    Column("input_shapes", "VARCHAR", "shapes of the tensor inputs, as JSON", "xsp.input_shapes"),
    Column("dtype", "VARCHAR", "element type of the first tensor input", "xsp.dtype"),
    Column("param_bytes", "BIGINT", "bytes of the module's parameters, its children's included", "xsp.param_bytes"),
    Column("activation_bytes", "BIGINT", "bytes of the tensors that the module returned", "xsp.activation_bytes"),
    Column(
        "alloc_bytes",
        "BIGINT",
        "bytes that were newly allocated between start and end, on its thread; in a step that allocates on devices, "
        "only those of devices",
        "xsp.alloc_bytes",
    ),
    Column("flops", "BIGINT", "floating-point operations that the span itself does, a multiply-add is 2", "xsp.flops"),
    Column("flops_source", "VARCHAR", "how flops are known: shapes, counter", "xsp.flops_source"),
    Column(
        "dram_read_bytes", "BIGINT", "bytes read from the memory of a device for the span itself", "xsp.dram_read_bytes"
    ),
    Column("dram_write_bytes", "BIGINT", "bytes written to the memory of a device", "xsp.dram_write_bytes"),
    Column("bytes_source", "VARCHAR", "how the bytes are known: shapes, counter", "xsp.bytes_source"),
    Column("occupancy", "DOUBLE", "active warps divided by their maximum, 0 to 1", "xsp.occupancy"),
    Column(
        "occupancy_source", "VARCHAR", "how it is known: counter, or estimate from the launch", "xsp.occupancy_source"
    ),
    Column("collector", "VARCHAR", "the collector or importer that recorded it", "xsp.collector"),
    Column("attributes", "VARCHAR", "what only this kind of span has, as a JSON object", "xsp.attributes"),
)

STEP_KIND = "CASE WHEN json_valid(attributes) THEN TRY_CAST(attributes ->> '$.step_kind' AS INTEGER) END"
"""SQL of the kind of a step that an importer gave it: a number among `kinds` of run.json, an attribute of its span. In
a run of xsp the table `loop` has the kinds."""

HAS_WORKERS = f"""(
    kind = '{Kind.DATA}' AND (
        contains(name, 'MultiProcessing')
        OR json_valid(attributes) AND coalesce(TRY_CAST(attributes ->> '$.{WORKERS}' AS INTEGER), 0) > 0
    )
)"""
"""SQL of whether a span is a wait for a data loader with worker processes: importers name its iterator."""

MERGED_COLUMNS: tuple[Column, ...] = (
    Column("steps", "INTEGER", "timed steps that hold this span and in which its level is the deepest one recorded"),
    Column("raw_ns", "DOUBLE", "trimmed mean duration with all collectors on"),
    Column("true_ns", "DOUBLE", "duration without the cost of profiling; null where nothing measured it"),
    Column("true_lo_ns", "DOUBLE", "lower end of the 95 % interval of true_ns"),
    Column("true_hi_ns", "DOUBLE", "upper end of the 95 % interval of true_ns"),
    Column("median_ns", "DOUBLE", "median over the same steps as true_ns"),
    Column("p90_ns", "DOUBLE", "90th percentile over the same steps"),
    Column("p99_ns", "DOUBLE", "99th percentile over the same steps"),
    Column("explained_ns", "DOUBLE", "spans inside times what one of them costs, deeper levels than its own"),
    Column("cause", "VARCHAR", "where the difference between raw_ns and true_ns comes from"),
)
"""Columns that merging the leveled steps adds to a span; see `xsp.store.merge`."""


SAMPLE_COLUMNS: tuple[Column, ...] = (
    Column("time_ns", "BIGINT", "nanoseconds since the epoch, the middle of the reading"),
    Column("rank", "INTEGER", "number of the process whose run it belongs to; 0 where it is alone"),
    Column("device", "INTEGER", "device index as in the spans; null for the host"),
    Column("name", "VARCHAR", "what was read, see gpu.md"),
    Column("unit", "VARCHAR", "unit of the value"),
    Column("value", "DOUBLE", "the figure"),
)
"""Columns of the table `samples`, which accompanies the spans; see `xsp.samples`."""


LOOP_COLUMNS: tuple[Column, ...] = (
    Column("rank", "INTEGER", "number of the process; 0 where it is alone"),
    Column("step", "BIGINT", "number of the step, as in the spans; the first one if the row represents several"),
    Column("steps", "INTEGER", "number of consecutive steps that the row represents; its times are their means"),
    Column("kind", "INTEGER", "kind of step, a number among `kinds` of run.json"),
    Column("rung", "SMALLINT", "deepest level whose collectors were on; 10 in a step that was not recorded"),
    Column(
        "steady",
        "BOOLEAN",
        "not recorded, and long enough after the last recorded step to be unaffected by it; null in a step that ran "
        "while another one was being stored",
    ),
    Column("start_ns", "BIGINT", "nanoseconds since the epoch"),
    Column("dur_ns", "DOUBLE", "duration of the step"),
    Column(
        "before_ns",
        "DOUBLE",
        "time since the end of the step before, without the work of xsp; null for the first. While steps of several "
        "threads overlap: since the last step of the same thread, without the time in which other threads ran steps",
    ),
    Column("data_ns", "DOUBLE", "part of `before_ns` and `dur_ns` that is waiting for the data loader"),
    Column("own_ns", "DOUBLE", "time of the work of xsp between the step before and this one"),
    Column("samples", "BIGINT", "samples in the step; null if unknown"),
    Column("status", "VARCHAR", "ok, error or unclosed; compiling if torch compiled code in it"),
    Column(
        "faults",
        "DOUBLE",
        "page faults of the process that needed no disk, since the end of the step before; null if xsp worked in "
        "between, or the system does not count them",
    ),
    Column("system_ns", "DOUBLE", "system time of the process's threads in the same interval; null in the same cases"),
    Column("thread", "BIGINT", "native id of the thread that ran the step; null if unknown"),
    Column(
        "beside_ns",
        "DOUBLE",
        "time between the last step of the same thread and this one in which other threads ran steps, while steps of "
        "several threads overlap; else 0",
    ),
    Column(
        "forward_ns",
        "DOUBLE",
        "part of `dur_ns` in outermost calls of modules, as innermost phase; null if unknown, as in recorded steps",
    ),
    Column("backward_ns", "DOUBLE", "the same of backward passes"),
    Column("optimizer_ns", "DOUBLE", "the same of steps of optimizers"),
)
"""Columns of the table `loop`: a row for each step that the program ran, recorded or not; see `xsp.record.loop`."""

PHASE_COLUMNS = ("forward_ns", "backward_ns", "optimizer_ns")
"""Those of them that are times of phases."""


class Span(NamedTuple):
    """One named interval at one level, as a collector reports it.

    Times are nanoseconds of the clock that the collector states (see `xsp.collector.Collector.epoch`).
    `None` means "not measured"; it is never written as 0. Identities, the parent and the key are filled in
    by `xsp.correlate`; a collector sets `span_id` and `parent_id` only where it knows them for certain.
    """

    trace_id: str | None = None
    span_id: str | None = None
    parent_id: str | None = None
    parent_rule: str | None = None
    level: int = Level.APPLICATION
    kind: str = Kind.USER.value
    name: str = ""
    type: str | None = None
    phase: str | None = None
    start_ns: int = 0
    dur_ns: int = 0
    process: int | None = None
    thread: int | None = None
    device: int | None = None
    stream: int | None = None
    step: int | None = None
    rank: int = 0
    rung: int | None = None
    timed: bool | None = None
    correlation_id: int | None = None
    sequence_nr: int | None = None
    forward_thread: int | None = None
    status: str = "ok"
    key: str | None = None
    layer_index: int | None = None
    depth: int | None = None
    layer_id: str | None = None
    grade: str | None = None
    batch_size: int | None = None
    input_shapes: str | None = None
    dtype: str | None = None
    param_bytes: int | None = None
    activation_bytes: int | None = None
    alloc_bytes: int | None = None
    flops: int | None = None
    flops_source: str | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    bytes_source: str | None = None
    occupancy: float | None = None
    occupancy_source: str | None = None
    collector: str | None = None
    attributes: str | None = None

    @property
    def end_ns(self) -> int:
        """Start plus duration, in nanoseconds."""
        return self.start_ns + self.dur_ns


def spans_of(columns: Mapping[str, Sequence[Any]], **constants: Any) -> Iterator[Span]:
    """Yield spans from columns of the same length; one span at a time, with fields by name, takes twice as long.

    Args:
        columns: values by the name of the field, at least one column.
        constants: values that all spans have.
    """
    count = len(next(iter(columns.values())))
    filled: dict[str, Iterable[Any]] = {
        name: repeat(value, count) for name, value in Span(**constants)._asdict().items()
    }
    filled.update(columns)
    return map(partial(tuple.__new__, Span), zip(*filled.values(), strict=True))
