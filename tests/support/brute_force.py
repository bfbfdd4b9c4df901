"""Parents of spans by brute force: the rules of docs/understand/correlation.md, applied to every pair of spans."""

from __future__ import annotations

from collections.abc import Sequence

from xsp.schema import Kind, Level, Rule, Span

TOLERANCE_NS = 500
"""Nanoseconds by which a span may end after its parent, and an operator may begin before its layer."""

ParentAndRule = tuple[int | None, str | None]
"""Index of the parent in the list, and the rule."""


def parents(spans: Sequence[Span]) -> list[ParentAndRule]:
    """Return the parent of each span of a process."""
    return [_parent(place, spans) for place in range(len(spans))]


def _parent(place: int, spans: Sequence[Span]) -> ParentAndRule:
    """Return the parent by the strongest evidence."""
    if spans[place].device is not None:
        return _by_launch(place, spans)
    return _by_sequence(place, spans) or _container(place, spans)


def _container(place: int, spans: Sequence[Span]) -> ParentAndRule:
    """Return the innermost span around this one on its thread that is no deeper in the stack."""
    containers = [outer for outer in range(len(spans)) if _contains(spans, outer, place)]
    if not containers:
        return None, None
    return max(containers, key=lambda outer: _nesting_key(spans, outer)), Rule.CONTAINMENT.value


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
        and _nesting_key(spans, outer) < _nesting_key(spans, inner)
    )  # fmt: skip


def _nesting_key(spans: Sequence[Span], place: int) -> tuple[int, int, int, int]:
    """Return a key that sorts spans from the outermost to the innermost."""
    span = spans[place]
    begin = span.start_ns + (TOLERANCE_NS if span.level >= Level.OP else 0)
    return begin, span.level, -span.end_ns, place


def _by_launch(place: int, spans: Sequence[Span]) -> ParentAndRule:
    """Return the parent of the call that launched this device work."""
    number = spans[place].correlation_id
    for launch, span in enumerate(spans):
        if number is not None and span.device is None and span.correlation_id == number:
            parent, _ = _parent(launch, spans)
            return (parent, Rule.CORRELATION.value) if parent is not None else (None, None)
    return None, None


def _by_sequence(place: int, spans: Sequence[Span]) -> ParentAndRule | None:
    """Return the layer of the forward operator of a backward one; None if containment decides."""
    span = spans[place]
    if span.sequence_nr is None or span.forward_thread is None:
        return None
    container, _ = _container(place, spans)
    if container is not None and spans[container].sequence_nr == span.sequence_nr and spans[container].forward_thread:
        return None  # the enclosing frame already follows this number
    forward = [
        index
        for index, candidate in enumerate(spans)
        if (candidate.thread, candidate.sequence_nr, candidate.forward_thread)
        == (span.forward_thread, span.sequence_nr, None)
        and _nesting_key(spans, index) < _nesting_key(spans, place)
    ]
    outer = max(forward, key=lambda index: _nesting_key(spans, index), default=None)
    while outer is not None and spans[outer].level >= Level.OP:
        outer, _ = _parent(outer, spans)
    if outer is None or (container is not None and spans[outer].level != Level.LAYER):
        return None
    return outer, Rule.SEQUENCE.value
