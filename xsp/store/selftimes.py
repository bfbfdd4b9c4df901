"""Self times of operators on the host: their time without the operators and primitives inside them.

Operators on one thread nest, so their self times are disjoint: together with the primitives of a CPU library they add
up to the time of the outermost operators, with nothing left out or counted twice. A primitive is measured in steps of a
deeper rung than its operator; its share of the operator's time in those steps is assumed to hold for the true time.
The nesting follows from the times on the thread, not from the parents: a module called inside an operator (the
recomputation of a checkpoint, an autograd function in Python) has the module around the operator as its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xsp import table
from xsp.schema import Column, Kind
from xsp.store.trace import Trace

NS = "coalesce(true_ns, raw_ns, dur_ns)"
"""The best known duration of a span: the true time, else the average, else the recorded time."""

BOOKKEEPING = frozenset(
    (
        "_reshape_alias alias as_strided as_strided_ chunk contiguous detach empty empty_like empty_strided expand "
        "expand_as flatten lift_fresh narrow numpy_T permute reshape resize_ resize_as_ resolve_conj resolve_neg "
        "select set_ slice split split_with_sizes squeeze squeeze_ t to transpose transpose_ unbind unflatten "
        "unsafe_split unsqueeze unsqueeze_ view view_as"
    ).split()
)
"""Operators that allocate memory or return views, and compute nothing themselves; if one of them has to copy, the copy
is a separate operator inside it."""

TABLE = "own_times"

_BATCH = 100_000
"""Number of operators that are read at a time."""

_COLUMNS = [
    Column("span_id", "VARCHAR", "of an operator"),
    Column("outer_id", "VARCHAR", "the operator around it on its thread; null for an outermost one"),
    Column("within_id", "VARCHAR", "the operator of the same name that did nothing but call this one; null elsewhere"),
    Column("without_ops_ns", "DOUBLE", "without the operators inside it"),
    Column("own_ns", "DOUBLE", "without the operators and the primitives inside it"),
    Column(
        "scale", "DOUBLE", "factor from the measured time of the primitives inside to their part of the operator's time"
    ),
    Column("computes", "BOOLEAN", "whether the operator itself computes in this time, and does not only call others"),
    Column("counts_bytes", "BOOLEAN", "whether its bytes do not belong to an operator inside it"),
]


class _OperatorRow(NamedTuple):
    """The values that the query returns for an operator."""

    position: int
    span_id: str
    parent_id: str | None
    name: str
    process: int | None
    thread: int | None
    start_ns: int
    end_ns: int
    ns: float
    states_flops: bool
    states_bytes: bool
    comparable_ns: float | None
    """Duration in the steps that measure primitives, without the cost of recording primitives and operators."""

    primitives_ns: float
    """Time in which at least one primitive directly inside it runs: several threads may run them at once."""

    primitives: int
    """Number of these primitives that compute, not counting reorders of memory."""

    @property
    def scale(self) -> float:
        """Factor that makes the times of primitives, measured in other steps, part of the operator's time."""
        return self.ns / max(self.comparable_ns or self.ns, self.primitives_ns, 1.0)

    @property
    def is_busy(self) -> bool:
        """Whether the operator computes: it is neither bookkeeping nor a frame of the autograd engine."""
        return not self.name.startswith("autograd::") and self.name.removeprefix("aten::") not in BOOKKEEPING


@dataclass(slots=True)
class _Operator:
    """An operator whose end the sweep has not reached."""

    row: _OperatorRow
    parent: _Operator | None
    operators_ns: float = 0.0
    """Total time of the operators directly inside it."""

    has_inner_work: bool = False
    """Whether an operator or primitive inside it, at any depth, computes."""

    has_inner_bytes: bool = False
    children: int = 0
    """Number of operators directly inside it."""

    waiting_rows: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of the only operator inside it if that has the same name, and the rows that waited for that one."""

    def open(self) -> list[tuple[Any, ...]]:
        """Register the operator with the operator around it, and return the rows that are now ready."""
        if self.parent is None:
            return []
        self.parent.children += 1
        ready, self.parent.waiting_rows = self.parent.waiting_rows, []
        return ready

    def close(self) -> list[tuple[Any, ...]]:
        """Add the operator's figures to the operator around it, and return the rows that are ready."""
        row = self._row()
        rows = [row, *((span_id, outer_id, row[0], *rest) for span_id, outer_id, _, *rest in self.waiting_rows)]
        outer = self.parent
        if outer is None:
            return rows
        outer.operators_ns += self.row.ns
        outer.has_inner_work |= self.has_inner_work or self.row.is_busy or self.row.primitives > 0
        outer.has_inner_bytes |= self.has_inner_bytes or self.row.states_bytes
        if outer.children == 1 and outer.row.name == self.row.name:
            outer.waiting_rows = rows
            return []
        return rows

    def _row(self) -> tuple[Any, ...]:
        row = self.row
        without_ops_ns = max(0.0, row.ns - self.operators_ns)
        own_ns = max(0.0, without_ops_ns - row.primitives_ns * row.scale)
        # if the operations are counted for this operator, the bytes that it states are its own too
        counts_bytes = row.states_bytes and (row.states_flops or not self.has_inner_bytes)
        computes = own_ns > row.ns / 2 or not (row.primitives or self.has_inner_work)
        computes = computes or (not row.primitives and (row.states_flops or counts_bytes))
        outer_id = self.parent.row.span_id if self.parent is not None else None
        computes = computes and row.is_busy
        return row.span_id, outer_id, None, without_ops_ns, own_ns, row.scale, computes, counts_bytes


def create_table(trace: Trace) -> None:
    """Make the table `own_times` of the operators of the merged step, unless this trace has made it."""
    if trace.has_temp_table(TABLE):
        return
    table.create(trace.con, "own_times_rows", _COLUMNS)
    batch: list[tuple[Any, ...]] = []
    for row in _table_rows(_operators(trace)):
        batch.append(row)
        if len(batch) == _BATCH:
            table.insert(trace.con, "own_times_rows", batch, _COLUMNS)
            batch.clear()
    table.insert(trace.con, "own_times_rows", batch, _COLUMNS)
    trace.create_temp_table(TABLE, "SELECT * FROM own_times_rows")


def _operators(trace: Trace) -> Iterator[_OperatorRow]:
    """Yield the operators, thread by thread, outer operators first."""
    trace.create_temp_table(
        "own_times_input",
        f"""
        WITH primitive_runs AS (
            SELECT parent_id, start_ns, start_ns + dur_ns AS end_ns, {NS} AS ns, type,
                   max(start_ns + dur_ns) OVER (PARTITION BY parent_id ORDER BY start_ns, span_id
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS previous_end_ns
            FROM merged WHERE kind = '{Kind.PRIMITIVE}' AND parent_id IS NOT NULL AND dur_ns IS NOT NULL
        ), primitive_times AS (
            SELECT parent_id, count(*) FILTER (type IS DISTINCT FROM 'reorder') AS primitives,
                   coalesce(sum(ns)::DOUBLE / nullif(sum(end_ns - start_ns), 0)
                            * sum(greatest(end_ns - greatest(start_ns, coalesce(previous_end_ns, start_ns)), 0)),
                            0) AS ns
            FROM primitive_runs GROUP BY parent_id
        )
        SELECT row_number() OVER (ORDER BY process, thread, start_ns, dur_ns DESC, depth) AS position,
               span_id, merged.parent_id, name, process, thread, start_ns, start_ns + coalesce(dur_ns, 0) AS end_ns,
               coalesce({NS}, 0)::DOUBLE AS ns, flops IS NOT NULL AS states_flops,
               dram_read_bytes IS NOT NULL AS states_bytes, raw_ns - explained_ns AS comparable_ns,
               coalesce(primitive_times.ns, 0)::DOUBLE AS primitives_ns,
               coalesce(primitive_times.primitives, 0) AS primitives
        FROM merged LEFT JOIN primitive_times ON primitive_times.parent_id = merged.span_id
        WHERE device IS NULL AND kind = '{Kind.OP}'
        """,
    )
    first = 1
    while rows := trace.sql(
        "SELECT * FROM own_times_input WHERE position BETWEEN ? AND ? ORDER BY position", [first, first + _BATCH - 1]
    ).fetchall():
        yield from map(_OperatorRow._make, rows)
        first += _BATCH


def _table_rows(operators: Iterable[_OperatorRow]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table, each as soon as everything inside its operator is known."""
    thread: tuple[int | None, int | None] | None = None
    stack: list[_Operator] = []
    threadless: dict[str, _Operator] = {}
    for row in operators:
        if row.thread is None:  # the source has no threads: the nesting follows from the parents instead
            threadless[row.span_id] = operator = _Operator(row, threadless.get(row.parent_id or ""))
            yield from operator.open()
            continue
        middle = (row.start_ns + row.end_ns) // 2  # rounding may put an end behind the end of the outer operator
        while stack and (thread != (row.process, row.thread) or stack[-1].row.end_ns <= middle):
            yield from stack.pop().close()
        thread = (row.process, row.thread)
        stack.append(_Operator(row, stack[-1] if stack else None))
        yield from stack[-1].open()
    for operator in (*reversed(stack), *reversed(threadless.values())):
        yield from operator.close()
