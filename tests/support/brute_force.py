"""The parent of each span, found by trying every pair: the rules of docs/understand/correlation.md, and slow."""

from __future__ import annotations

from collections.abc import Sequence

from xsp.schema import Kind, Level, Rule, Span

TOLERANCE_NS = 500
"""By how much a span may end after its parent, and an operator begin before its layer."""

Found = tuple[int | None, str | None]
"""Place of the parent in the list, and the rule."""


def parents(spans: Sequence[Span]) -> list[Found]:
    """Return the parent of each span of a process."""
    return [_parent(place, spans) for place in range(len(spans))]


def _parent(place: int, spans: Sequence[Span]) -> Found:
    """Follow the strongest evidence that there is."""
    if spans[place].device is not None:
        return _by_launch(place, spans)
    return _by_sequence(place, spans) or _around(place, spans)


def _around(place: int, spans: Sequence[Span]) -> Found:
    """Return the innermost span around this one on its thread that is no deeper in the stack."""
    around = [outer for outer in range(len(spans)) if _contains(spans, outer, place)]
    if not around:
        return None, None
    return max(around, key=lambda outer: _inwards(spans, outer)), Rule.CONTAINMENT.value


def _contains(spans: Sequence[Span], outer: int, inner: int) -> bool:
    a, b = spans[outer], spans[inner]
    middle = b.start_ns + b.dur_ns // 2
    deepest = max(b.level, Level.LAYER) if b.kind == Kind.USER else b.level
    return (
        a.device is None and (a.process, a.thread) == (b.process, b.thread)
        and (a.level <= deepest or (
            (a.level, a.kind, b.level) == (Level.LIBRARY, Kind.CALL, Level.OP)
            and a.collector == b.collector is not None
        ))
        and a.start_ns <= middle <= a.end_ns
        and b.end_ns <= a.end_ns + TOLERANCE_NS
        and _inwards(spans, outer) < _inwards(spans, inner)
    )  # fmt: skip


def _inwards(spans: Sequence[Span], place: int) -> tuple[int, int, int, int]:
    """Order spans from the outside to the inside."""
    span = spans[place]
    begin = span.start_ns + (TOLERANCE_NS if span.level >= Level.OP else 0)
    return begin, span.level, -span.end_ns, place


def _by_launch(place: int, spans: Sequence[Span]) -> Found:
    """Return the parent of the call that launched this device work."""
    number = spans[place].correlation_id
    for launch, span in enumerate(spans):
        if number is not None and span.device is None and span.correlation_id == number:
            parent, _ = _parent(launch, spans)
            return (parent, Rule.CORRELATION.value) if parent is not None else (None, None)
    return None, None


def _by_sequence(place: int, spans: Sequence[Span]) -> Found | None:
    """Return the layer of the forward operator of a backward one; None where containment decides."""
    span = spans[place]
    if span.sequence_nr is None or span.forward_thread is None:
        return None
    inside, _ = _around(place, spans)
    if inside is not None and spans[inside].sequence_nr == span.sequence_nr and spans[inside].forward_thread:
        return None  # a frame in the frame that follows this number
    forward = [
        each
        for each, other in enumerate(spans)
        if (other.thread, other.sequence_nr, other.forward_thread) == (span.forward_thread, span.sequence_nr, None)
        and _inwards(spans, each) < _inwards(spans, place)
    ]
    outer = max(forward, key=lambda each: _inwards(spans, each), default=None)
    while outer is not None and spans[outer].level >= Level.OP:
        outer, _ = _parent(outer, spans)
    if outer is None or (inside is not None and spans[outer].level != Level.LAYER):
        return None
    return outer, Rule.SEQUENCE.value
