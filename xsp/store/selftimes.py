"""What each operator of the host took by itself, without the operators and primitives inside it.

Operators on one thread nest, so their own times are disjoint: together with the primitives of a CPU's library they add
up to the time of the outermost operators, and nothing of it is left out or counted twice. A primitive is measured in
steps of a deeper rung than its operator; its share of the operator's time there is taken to be that of the true one.
Which operator is inside
which, the times on their thread tell. Parents do not: a module that is called inside an operator (a checkpoint's
recomputation, a function of autograd's in Python) has the module around it as its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xsp import table
from xsp.schema import Column, Kind
from xsp.store.trace import Trace

NS = "coalesce(true_ns, raw_ns, dur_ns)"
"""The best that a trace knows of a span's duration: true, else averaged, else as recorded."""

BOOKKEEPING = frozenset(
    (
        "_reshape_alias alias as_strided as_strided_ chunk contiguous detach empty empty_like empty_strided expand "
        "expand_as flatten lift_fresh narrow permute reshape resize_ resize_as_ resolve_conj resolve_neg select set_ "
        "slice split split_with_sizes squeeze squeeze_ t to transpose transpose_ unbind unflatten unsafe_split "
        "unsqueeze unsqueeze_ view view_as"
    ).split()
)
"""Operators that allocate or look at memory differently, and compute nothing themselves; where one of them has
to copy, the copy is an operator of its own inside it."""

TABLE = "own_times"

_AT_ONCE = 100_000
"""Operators that are read at a time."""

_COLUMNS = [
    Column("span_id", "VARCHAR", "of an operator"),
    Column("around_id", "VARCHAR", "the operator around it on its thread; null for an outermost one"),
    Column("within_id", "VARCHAR", "the operator of the same name that did nothing but call this one; null elsewhere"),
    Column("without_ops_ns", "DOUBLE", "without the operators inside it"),
    Column("own_ns", "DOUBLE", "without the operators and the primitives inside it"),
    Column("scale", "DOUBLE", "times what the primitives inside took, what they take of the operator's time"),
    Column("computes", "BOOLEAN", "whether work of its own is done in this time, and not only work handed on"),
    Column("counts_bytes", "BOOLEAN", "whether the bytes that it states are those of no operator inside it"),
]


class _Row(NamedTuple):
    """What is asked of an operator."""

    place: int
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
    beside_ns: float | None
    """Its duration in the steps in which primitives are measured, without what recording them and operators costs."""

    primitives_ns: float
    """Time in which at least one of the primitives directly inside it runs: several threads may run them at once."""

    primitives: int
    """Those of them that compute: not the ones that only bring memory into another order."""

    @property
    def scale(self) -> float:
        """What primitives, measured in other steps than the operator, are multiplied by to be part of its time."""
        return self.ns / max(self.beside_ns or self.ns, self.primitives_ns, 1.0)

    @property
    def is_busy(self) -> bool:
        """Whether it is of those that compute: neither bookkeeping nor a frame of the autograd engine."""
        return not self.name.startswith("autograd::") and self.name.removeprefix("aten::") not in BOOKKEEPING


@dataclass(slots=True)
class _Operator:
    """An operator whose end has not been reached."""

    row: _Row
    around: _Operator | None
    operators_ns: float = 0.0
    """Of the operators directly inside it."""

    holds_work: bool = False
    """Whether something that computes is inside it, at any depth."""

    holds_bytes: bool = False
    inside: int = 0
    """How many operators are directly inside it."""

    same: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of the one operator inside it, if that has its name, and of those which that one stands for."""

    def open(self) -> list[tuple[Any, ...]]:
        """Count it as inside the one around it, and return the rows that this makes ready."""
        if self.around is None:
            return []
        self.around.inside += 1
        ready, self.around.same = self.around.same, []
        return ready

    def close(self) -> list[tuple[Any, ...]]:
        """Tell the operator around it what was inside that, and return the rows that are ready."""
        row = self._row()
        rows = [row, *((span_id, around_id, row[0], *rest) for span_id, around_id, _, *rest in self.same)]
        around = self.around
        if around is None:
            return rows
        around.operators_ns += self.row.ns
        around.holds_work |= self.holds_work or self.row.is_busy or self.row.primitives > 0
        around.holds_bytes |= self.holds_bytes or self.row.states_bytes
        if around.inside == 1 and around.row.name == self.row.name:
            around.same = rows
            return []
        return rows

    def _row(self) -> tuple[Any, ...]:
        row = self.row
        without_ops_ns = max(0.0, row.ns - self.operators_ns)
        own_ns = max(0.0, without_ops_ns - row.primitives_ns * row.scale)
        # an operator whose operations are its own moves what it says, too
        counts_bytes = row.states_bytes and (row.states_flops or not self.holds_bytes)
        computes = own_ns > row.ns / 2 or not (row.primitives or self.holds_work)
        computes = computes or (not row.primitives and (row.states_flops or counts_bytes))
        around_id = self.around.row.span_id if self.around is not None else None
        computes = computes and row.is_busy
        return row.span_id, around_id, None, without_ops_ns, own_ns, row.scale, computes, counts_bytes


def make(trace: Trace) -> None:
    """Make the table `own_times` of the operators of the merged step, unless this trace has it."""
    if trace.has_made(TABLE):
        return
    table.create(trace.con, "own_times_found", _COLUMNS)
    found: list[tuple[Any, ...]] = []
    for row in _swept(_operators(trace)):
        found.append(row)
        if len(found) == _AT_ONCE:
            table.insert(trace.con, "own_times_found", found, _COLUMNS)
            found.clear()
    table.insert(trace.con, "own_times_found", found, _COLUMNS)
    trace.once(TABLE, "SELECT * FROM own_times_found")


def _operators(trace: Trace) -> Iterator[_Row]:
    """Yield the operators, thread by thread, the outer ones first."""
    trace.once(
        "own_times_of",
        f"""
        WITH ran AS (
            SELECT parent_id, start_ns, start_ns + dur_ns AS end_ns, {NS} AS ns, type,
                   max(start_ns + dur_ns) OVER (PARTITION BY parent_id ORDER BY start_ns, span_id
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
            FROM merged WHERE kind = '{Kind.PRIMITIVE}' AND parent_id IS NOT NULL AND dur_ns IS NOT NULL
        ), inside AS (
            SELECT parent_id, count(*) FILTER (type IS DISTINCT FROM 'reorder') AS primitives,
                   coalesce(sum(ns)::DOUBLE / nullif(sum(end_ns - start_ns), 0)
                            * sum(greatest(end_ns - greatest(start_ns, coalesce(until_ns, start_ns)), 0)), 0) AS ns
            FROM ran GROUP BY parent_id
        )
        SELECT row_number() OVER (ORDER BY process, thread, start_ns, dur_ns DESC, depth) AS place,
               span_id, merged.parent_id, name, process, thread, start_ns, start_ns + coalesce(dur_ns, 0) AS end_ns,
               coalesce({NS}, 0)::DOUBLE AS ns, flops IS NOT NULL AS states_flops,
               dram_read_bytes IS NOT NULL AS states_bytes, raw_ns - explained_ns AS beside_ns,
               coalesce(inside.ns, 0)::DOUBLE AS primitives_ns,
               coalesce(inside.primitives, 0) AS primitives
        FROM merged LEFT JOIN inside ON inside.parent_id = merged.span_id
        WHERE device IS NULL AND kind = '{Kind.OP}'
        """,
    )
    first = 1
    while rows := trace.sql(
        "SELECT * FROM own_times_of WHERE place BETWEEN ? AND ? ORDER BY place", [first, first + _AT_ONCE - 1]
    ).fetchall():
        yield from map(_Row._make, rows)
        first += _AT_ONCE


def _swept(operators: Iterable[_Row]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table, each as soon as all that is inside its operator is known."""
    thread: tuple[int | None, int | None] | None = None
    open_ones: list[_Operator] = []
    threadless: dict[str, _Operator] = {}
    for row in operators:
        if row.thread is None:  # of a source that tells no threads: there, parents tell what they can
            threadless[row.span_id] = each = _Operator(row, threadless.get(row.parent_id or ""))
            yield from each.open()
            continue
        middle = (row.start_ns + row.end_ns) // 2  # an end may be rounded to beyond the end around it
        while open_ones and (thread != (row.process, row.thread) or open_ones[-1].row.end_ns <= middle):
            yield from open_ones.pop().close()
        thread = (row.process, row.thread)
        open_ones.append(_Operator(row, open_ones[-1] if open_ones else None))
        yield from open_ones[-1].open()
    for each in (*reversed(open_ones), *reversed(threadless.values())):
        yield from each.close()
