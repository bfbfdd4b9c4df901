"""A test kit for authors of collectors: a fake clock, steps from text, and a check of the contract.

>>> print(tree(spans("step train 0-100\\n  forward Net 10-60 batch_size=8\\n    op aten::mm 20-40")))
step train
  forward Net
    op aten::mm
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from xsp.collector import Collector
from xsp.schema import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.store.trace import Trace

LEVELS = {
    Kind.RUN: Level.APPLICATION, Kind.LOOP: Level.APPLICATION, Kind.USER: Level.APPLICATION,
    Kind.BEFORE: Level.APPLICATION,
    Kind.STEP: Level.MODEL, Kind.FORWARD: Level.MODEL, Kind.BACKWARD: Level.MODEL, Kind.OPTIMIZER: Level.MODEL,
    Kind.DATA: Level.MODEL, Kind.MODULE: Level.LAYER, Kind.OP: Level.OP, Kind.ALLOC: Level.OP,
    Kind.PRIMITIVE: Level.LIBRARY, Kind.CALL: Level.LIBRARY, Kind.LAUNCH: Level.RUNTIME, Kind.SYNC: Level.RUNTIME,
    Kind.OVERHEAD: Level.RUNTIME,
    Kind.KERNEL: Level.KERNEL, Kind.COPY: Level.KERNEL,
}  # fmt: skip
"""The usual level of each kind of span."""

_NO_THREAD: dict[Level, dict[str, Any]] = {
    Level.LIBRARY: {"thread": None},
    Level.KERNEL: {"thread": None, "device": 0, "stream": 7},
}


class FakeClock:
    """A clock under the control of a test; call it like `time.perf_counter_ns`."""

    def __init__(self, now: int = 0, tick: int = 0) -> None:
        """Start at `now`, and advance by `tick` nanoseconds at each reading."""
        self.now, self.tick = now, tick

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        now, self.now = self.now, self.now + self.tick
        return now

    def advance(self, nanoseconds: int) -> None:
        """Advance the clock."""
        self.now += nanoseconds


def spans(text: str, **columns: Any) -> list[Span]:
    """Return the spans of a step written as text, one per line: `kind name start-end column=value …`.

    Times are microseconds. Indentation is only for the reader: `xsp.correlate` finds the parents. A span is on
    thread 1 of process 1; primitives have no thread, kernels and copies have a device and a stream.

    Args:
        text: the lines.
        columns: values for all spans that do not state them.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        kind, name, times, *assignments = line.split()
        start, end = (round(float(time) * 1000) for time in times.split("-"))
        level = LEVELS[Kind(kind)]
        values = {"level": level, "process": 1, "thread": 1, **_NO_THREAD.get(level, {}), **columns}
        values |= {
            column: None if value == "None" else int(value) if value.lstrip("-").isdigit() else value
            for column, value in (assignment.split("=", 1) for assignment in assignments)
        }
        rows.append(Span(kind=kind, name=name, start_ns=start, dur_ns=end - start)._replace(**values))
    return rows


def tree(step: Iterable[Span]) -> str:
    """Correlate the spans of a step and return them as indented lines `kind name`, each span under its parent."""
    from xsp.correlate.evidence import correlate

    rows = correlate(step)
    ids = {row.span_id for row in rows}
    lines: list[str] = []

    def draw(parent: str | None, depth: int) -> None:
        for row in rows:
            if row.parent_id == parent or (parent is None and row.parent_id not in ids):
                lines.append(f"{'  ' * depth}{row.kind} {row.name}")
                draw(row.span_id, depth + 1)

    draw(None, 0)
    return "\n".join(lines)


def trace_of(rows: Iterable[Span], run: Mapping[str, Any] | None = None) -> Trace:
    """Return the trace of fabricated spans: each step correlated, all merged, in memory.

    Spans without a step belong to step 0; each rank has steps of its own. A span without a rung gets the level of the
    deepest span in its step, and is timed unless it states otherwise. In a step with a span of kind `before`, what
    begins before the step is in the table `before`.
    """
    from xsp import table
    from xsp.correlate.evidence import correlate
    from xsp.store import before
    from xsp.store.merge import true_trace

    steps = defaultdict(list)
    for row in rows:
        steps[row.step or 0, row.rank].append(row)
    con = table.connect()
    table.create(con, "spans")
    for (number, rank), step in steps.items():
        common = {
            "trace_id": f"{rank << 32 | number:032x}",
            "step": number,
            "rung": max(int(row.level) for row in step),
            "timed": True,
        }
        own, earlier = before.split(list(zip(*(_with_defaults(row, common) for row in step), strict=True)))
        table.insert(con, "spans", correlate(Span(*values) for values in zip(*own, strict=True)))
        if earlier[0]:
            if not table.has_table(con, "before"):
                table.create(con, "before")
            table.insert(con, "before", correlate(Span(*values) for values in zip(*earlier, strict=True)))
    return true_trace(con, run or {})


def _with_defaults(row: Span, columns: dict[str, Any]) -> Span:
    missing: dict[str, Any] = {name: value for name, value in columns.items() if getattr(row, name) is None}
    return row._replace(**missing)


_LOOP_DEFAULTS = {"rank": 0, "steps": 1, "kind": 0, "rung": int(Level.APPLICATION), "steady": True, "start_ns": 0,
            "before_ns": 0.0, "data_ns": 0.0, "own_ns": 0.0, "status": "ok"}  # fmt: skip


def with_loop(trace: Trace, rows: Iterable[dict[str, Any]], kind: int | None = None) -> Trace:
    """Return a trace with the table `loop` of fabricated steps, recorded or not, and merged with these steps.

    Args:
        trace: a trace from `trace_of`, which must not be used afterwards.
        rows: rows of the loop; missing columns get the values of a steady step without waits.
        kind: kind of the steps in the figures; by default the heaviest.
    """
    from xsp import table
    from xsp.schema import LOOP_COLUMNS
    from xsp.store.merge import true_trace

    table.create(trace.con, "loop", LOOP_COLUMNS)
    full_rows = [{**_LOOP_DEFAULTS, **row} for row in rows]
    values = [[row.get(column.name) for column in LOOP_COLUMNS] for row in full_rows]
    table.insert(trace.con, "loop", values, LOOP_COLUMNS)
    trace.con.execute("DROP TABLE IF EXISTS merged")
    return true_trace(trace.con, trace.run, kind=kind)


def check_collector(
    collector: Collector,
    work: Callable[[], object],
    *,
    rung: Level | None = None,
    between_steps: bool = False,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[Span]:
    """Check twice that a collector keeps the contract of `xsp.collector`, and return the spans of the first check.

    Args:
        collector: a closed collector.
        work: a function that makes spans.
        rung: rung of the steps; by default the collector's deepest level.
        between_steps: whether it listens between steps too, as its documentation says.
        clock: clock of a collector whose times are not on the epoch.

    Raises:
        AssertionError: it breaks the contract; the message says how.
    """
    reason = collector.available()
    assert reason is None, f"{collector.name} is not available: {reason}"
    assert collector.name, "a collector has a name"
    assert collector.levels, "a collector has levels"
    now = time.time_ns if collector.epoch else clock
    before = process_state()
    cycles = [_cycle(collector, work, rung or Level(max(collector.levels)), between_steps, now) for _ in range(2)]
    after = process_state()
    assert after == before, f"left behind: {sorted(k for k in before | after if before.get(k) != after.get(k))}"
    return cycles[0]


def _cycle(
    collector: Collector, work: Callable[[], object], rung: Level, between_steps: bool, now: Callable[[], int]
) -> list[Span]:
    first_spans: list[Span] = []
    begin = now()
    collector.open()
    try:
        for describe in (False, True):
            work()
            begin = begin if between_steps else now()
            collector.start(rung, describe)
            work()
            collector.settle()
            collector.stop()
            end = now()
            step_spans = list(collector.spans())
            assert step_spans, "the work made no spans"
            kinds = {kind.value for kind in Kind}
            for span in step_spans:
                assert (begin - 1_000) <= span.start_ns <= span.end_ns <= (end + 1_000), f"outside its step: {span}"
                assert span.level in collector.levels, f"not of its levels: {span}"
                assert span.kind in kinds, f"of no kind: {span}"
                assert span.collector == collector.name or span.kind == Kind.ALLOC, (
                    f"without its collector's name: {span}"
                )
                assert span.name, f"without a name: {span}"
            assert not list(collector.spans()), "spans() does not forget what it returned"
            first_spans, begin = first_spans or step_spans, end
            if not between_steps:
                work()
                assert not list(collector.spans()), "spans of what ran between steps"
    finally:
        collector.close()
    work()
    assert not list(collector.spans()), "spans of what ran after close"
    return first_spans


def process_state() -> dict[str, object]:
    """Return the state of the process that collectors change, so that before and after can be compared."""
    state: dict[str, object] = {f"environment {name}": value for name, value in os.environ.items()}
    state["file descriptor 1"] = os.fstat(1)[:3]
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch.optim.optimizer" in sys.modules:
        optimizer = sys.modules["torch.optim.optimizer"]
        state["Module.__call__"] = torch.nn.Module.__call__
        state["the autograd engine's entry"] = torch.autograd._engine_run_backward
        state["the profiler of torch"] = torch._C._autograd._profiler_enabled()
        for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            state[f"optimizers' {hooks}"] = tuple(getattr(optimizer, hooks))
    dataloader: Any = sys.modules.get("torch.utils.data.dataloader")
    if dataloader is not None:
        state["DataLoader's __next__"] = dataloader._BaseDataLoaderIter.__next__
    return state
