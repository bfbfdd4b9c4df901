"""Parents of random spans, which cross each other as they like, are those that trying every pair finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import brute_force
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp.correlate import correlate
from xsp.span import Kind, Level, Span

KINDS = {Kind.USER: Level.APPLICATION, Kind.MODULE: Level.LAYER, Kind.OP: Level.OP, Kind.LAUNCH: Level.RUNTIME}
"""What a host does; device work comes beside it."""

FORWARD, BACKWARD = 1, 2
"""The two threads."""


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
            host = host._replace(correlation_id=number)
            started = number + draw(st.integers(0, 1))  # by this call, or by one that may not be there
            found.append(Span(level=Level.KERNEL, kind="kernel", name=f"k{number}", start_ns=draw(times), dur_ns=100,
                              process=7, device=0, stream=7, correlation_id=started))  # fmt: skip
        elif kind == Kind.OP and draw(st.booleans()):
            backward = FORWARD if thread == BACKWARD else None
            host = host._replace(sequence_nr=draw(st.integers(0, 3)), forward_thread=backward)
        found.append(host)
    return found


def told(spans: Sequence[Span]) -> dict[str, tuple[str | None, str | None]]:
    """Return by name the parent's name and the rule that `correlate` gives."""
    rows = correlate(spans)
    names = {row.span_id: row.name for row in rows}
    return {row.name: (names.get(row.parent_id), row.parent_rule) for row in rows}


def expected(spans: Sequence[Span]) -> dict[str, tuple[str | None, str | None]]:
    found = zip(spans, brute_force.parents(spans), strict=True)
    return {span.name: (None if place is None else spans[place].name, rule) for span, (place, rule) in found}


@settings(deadline=None, max_examples=300)
@given(program(), st.randoms())
def test_parents_are_those_that_trying_every_pair_finds(spans: list[Span], order: random.Random) -> None:
    order.shuffle(spans)
    assert told(spans) == expected(spans)
