"""Parents of random spans, which cross each other as they like, are those that trying every pair finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import brute_force
import pytest
from depth import deep
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp import table
from xsp.correlate import columns
from xsp.correlate.evidence import correlate
from xsp.importers.contract import RAW_COLUMNS, Losses, SourceInfo
from xsp.schema import Kind, Level, Span

KINDS = {Kind.USER: Level.APPLICATION, Kind.MODULE: Level.LAYER, Kind.OP: Level.OP, Kind.LAUNCH: Level.RUNTIME}
"""What a host does; device work comes beside it."""

FORWARD, BACKWARD = 1, 2
"""The two threads."""

Parents = dict[str, tuple[str | None, str | None]]
"""By a span's name: its parent's, and the rule."""


@st.composite
def program(draw: st.DrawFn) -> list[Span]:
    """Up to 25 spans on two threads, whose launches start kernels and whose operators have sequence numbers."""
    times = st.integers(0, 20).map(lambda tick: tick * 400)  # some differ by less than the tolerance
    found: list[Span] = []
    for number in range(draw(st.integers(1, 25))):
        kind, thread = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from([FORWARD, BACKWARD]))
        start, end = sorted((draw(times), draw(times)))
        host = Span(level=KINDS[Kind(kind)], kind=str(kind), name=str(number), start_ns=start, dur_ns=end - start,
                    process=7, thread=thread)  # fmt: skip
        if kind == Kind.LAUNCH:
            host = host._replace(correlation_id=number + 1)
            started = number + draw(st.integers(1, 2))  # by this call, or by one that may not be there
            found.append(Span(level=Level.KERNEL, kind="kernel", name=f"k{number}", start_ns=draw(times), dur_ns=100,
                              process=7, device=0, stream=7, correlation_id=started))  # fmt: skip
        elif kind == Kind.OP and draw(st.booleans()):
            of_forward = draw(st.sampled_from([None, FORWARD, BACKWARD]))
            phase = None if of_forward is None else "backward"
            host = host._replace(sequence_nr=draw(st.integers(0, 3)), forward_thread=of_forward, phase=phase)
        found.append(host)
    return found


def one_step(spans: Sequence[Span]) -> Parents:
    """As `xsp.correlate` finds them in the spans of a step."""
    rows = correlate(spans)
    names = {row.span_id: row.name for row in rows}
    return {row.name: (names.get(row.parent_id), row.parent_rule) for row in rows}


def in_bulk(spans: Sequence[Span]) -> Parents:
    """As `xsp.ingest` finds them in the table that an importer filled."""
    con = table.connect()
    table.create(con, "raw_spans", RAW_COLUMNS)
    step = Span(level=Level.MODEL, kind="step", name="step", start_ns=0, dur_ns=9000, process=7, thread=0)
    for number, span in enumerate([*spans, step]):
        values = {**span._asdict(), "number": number}
        con.execute(
            f"INSERT INTO raw_spans VALUES ({', '.join('?' * len(RAW_COLUMNS))})",
            [values.get(each.name) for each in RAW_COLUMNS],
        )
    columns.correlate_table(con, SourceInfo({}, Losses(), brute_force.TOLERANCE_NS), "0")
    rows = con.execute(
        "SELECT own.name, up.name, own.parent_rule "
        "FROM correlated own LEFT JOIN correlated up ON up.span_id = own.parent_id"
    ).fetchall()
    return {name: (parent, rule) for name, parent, rule in rows if name != "step"}


def expected(spans: Sequence[Span]) -> Parents:
    found = zip(spans, brute_force.parents(spans), strict=True)
    return {span.name: (None if place is None else spans[place].name, rule) for span, (place, rule) in found}


@pytest.mark.parametrize(("find", "examples"), [(one_step, 50), (in_bulk, 5), deep(one_step, 500), deep(in_bulk, 50)])
def test_parents_are_those_that_trying_every_pair_finds(
    find: Callable[[Sequence[Span]], Parents], examples: int
) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(program(), st.randoms())
    def holds(spans: list[Span], order: random.Random) -> None:
        order.shuffle(spans)
        assert find(spans) == expected(spans)

    holds()
