"""The innermost span around each span on its thread, found for all spans at once.

With outer spans sorted before inner ones, it is the last earlier span on the thread that ends late enough and is not
too deep in the stack. All spans search backwards at once, by pointer jumping: if a candidate ends too early, so do all
spans between it and the position that its own search has reached, and the search continues from there. So the number of
rounds grows with the logarithm of the number of siblings, and with the nesting depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xsp.correlate.arrays import Array, Spans, begins
from xsp.schema import Level

_NEVER, _ALWAYS = np.iinfo(np.int64).min, np.iinfo(np.int64).max

MOST_LATE = 400
"""Maximum number of rounds in which a search skips spans that end late enough but begin too late to be around."""


class _Query(NamedTuple):
    """The conditions that each span sets for a span around it; times in nanoseconds."""

    end: Array
    """Earliest end of the outer span."""

    start: Array
    """Latest start of the outer span."""


class _Threads(NamedTuple):
    """Spans that may be around others, thread by thread. The last entry is a sentinel that is around everything."""

    places: Array
    """Indices among all spans."""

    starts: Array
    ends: Array
    previous: Array
    """Index of the previous span on the same thread; of the sentinel if there is none."""

    before: Array
    """Index of the nearest earlier span on the same thread that ends late enough to be around this one."""


class Containers(NamedTuple):
    """The innermost span around each span on its thread. All values are indices into the spans; -1 if there is none."""

    outer: Array
    """Only spans that are no deeper in the stack count."""

    enclosing: Array | None
    """Spans at any level count; only if there are allocations: one inside a module that an operator calls is inside
    the operator too."""

    candidates: dict[int, list[int]]
    """The candidates for spans on an unknown thread, where there are several."""


def find_containers(spans: Spans, tolerance: int) -> Containers:
    """Find the innermost span around each span on its thread.

    For spans without a thread all threads are searched; candidates on several threads are ambiguous. Among these
    candidates, operators and deeper spans take precedence over spans above the operator level.

    Args:
        spans: sorted by `outer_first`.
        tolerance: nanoseconds by which a span may extend beyond the span around it.
    """
    outer = np.full(len(spans), -1, np.int64)
    candidates: dict[int, list[int]] = {}
    on_line, query = _conditions(spans, tolerance)
    threadless = np.zeros(len(spans), bool) if spans.is_threadless is None else spans.is_threadless
    seekers = np.flatnonzero((spans.thread_index >= 0) | threadless)
    members = on_line if spans.allocations is None else on_line[~spans.allocations.is_one[on_line]]
    whole = _threads(spans, members, query) if spans.allocations is not None else None
    for level, collector in _classes(spans, seekers):
        fits = _may_hold(spans, members, level, collector)
        threads = whole if whole is not None and fits.all() else _threads(spans, members[fits], query)
        group = seekers[_may_ask(spans, seekers, level, collector)]
        on_threads = group[~threadless[group]]
        outer[on_threads] = _around(spans, threads, on_threads, query)
        if len(on_threads) < len(group):
            _roam(spans, threads, group[threadless[group]], query, tolerance, outer, candidates)
    enclosing = None
    if whole is not None:
        enclosing = np.full(len(spans), -1, np.int64)
        enclosing[on_line] = _around(spans, whole, on_line, query)
    return Containers(outer, enclosing, candidates)


def _conditions(spans: Spans, tolerance: int) -> tuple[Array, _Query]:
    """Return the indices of the spans on threads, thread by thread, and the conditions for a span around each one."""
    on_line = np.flatnonzero(spans.thread_index >= 0)
    middle = (spans.start + spans.end) // 2
    return on_line[np.argsort(spans.thread_index[on_line], kind="stable")], _Query(
        np.maximum(middle, spans.end - tolerance), middle
    )


def _classes(spans: Spans, seekers: Array) -> list[tuple[int, int]]:
    """Return the classes of spans whose parents are found together: the deepest level around them, and the collector
    of calls that may be around operators."""
    levels = [(level, 0) for level in np.unique(spans.deepest[seekers]).tolist()]
    collectors = (
        [] if spans.calls is None else [collector for collector in np.unique(spans.calls.runs).tolist() if collector]
    )
    return levels + [(int(Level.OP), collector) for collector in collectors]


def _may_hold(spans: Spans, indices: Array, level: int, collector: int) -> Array:
    fits: Array = spans.level[indices] <= level
    return fits | (spans.calls.runs[indices] == collector) if collector and spans.calls else fits


def _may_ask(spans: Spans, indices: Array, level: int, collector: int) -> Array:
    fits: Array = spans.deepest[indices] == level
    if spans.calls is None or level != Level.OP:
        return fits
    collectors = spans.calls.collector[indices]
    inside: Array = (collectors > 0) & np.isin(collectors, spans.calls.runs)
    return fits & inside & (collectors == collector) if collector else fits & ~inside


def _threads(spans: Spans, places: Array, query: _Query) -> _Threads:
    count = len(places)
    line, needed_end = spans.thread_index[places], query.end[places]
    previous = np.arange(-1, count)
    previous[:-1][np.concatenate(([True], line[1:] != line[:-1]))[:count]] = count
    previous[-1] = count
    ends = np.append(spans.end[places], _ALWAYS)
    before = previous.copy()
    active = np.flatnonzero(ends[before[:-1]] < needed_end)
    while active.size:
        further = before[before[active]]
        before[active] = further
        active = active[ends[further] < needed_end[active]]
    starts = np.append(spans.start[places], _NEVER)
    return _Threads(np.append(places, -1), starts, ends, previous, before)


def _last_before(spans: Spans, threads: _Threads, seekers: Array) -> Array:
    """Return where each search begins: at the last candidate before the span on its thread, or at one further out."""
    members = threads.places[:-1]
    count = len(members)
    index_of = np.full(len(spans), -1, np.int64)
    index_of[members] = np.arange(count)
    own_index = index_of[seekers]
    first = threads.before[own_index]
    outside = np.flatnonzero(own_index < 0)
    if outside.size:
        line = spans.thread_index[members].astype(np.int64)
        keys = line * len(spans) + members
        outsiders = seekers[outside]
        own_line = spans.thread_index[outsiders].astype(np.int64)
        last = np.searchsorted(keys, own_line * len(spans) + outsiders) - 1
        first[outside] = np.where((last >= 0) & (np.append(line, -1)[last] == own_line), last, count)
    return first


def _around(spans: Spans, threads: _Threads, seekers: Array, query: _Query) -> Array:
    """Return the index of the innermost span of `threads` around each span, on its thread; -1 if there is none."""
    around: Array = threads.places[_search(threads, _last_before(spans, threads, seekers), seekers, query)]
    return around


def _search(threads: _Threads, first: Array, seekers: Array, query: _Query) -> Array:
    """Return for each span the index in `threads` of the span around it, searching from `first`."""
    current = first
    needed, start = query.end[seekers], query.start[seekers]
    late_rounds = 0
    active = np.flatnonzero((threads.ends[current] < needed) | (threads.starts[current] > start))
    while active.size:
        index = current[active]
        ends_early = threads.ends[index] < needed[active]
        late_rounds += not ends_early.all()
        previous = threads.previous[index] if late_rounds <= MOST_LATE else len(threads.places) - 1
        index = np.where(ends_early, threads.before[index], previous)
        current[active] = index
        active = active[(threads.ends[index] < needed[active]) | (threads.starts[index] > start[active])]
    return current


def _roam(
    spans: Spans,
    threads: _Threads,
    seekers: Array,
    query: _Query,
    tolerance: int,
    outer: Array,
    candidates: dict[int, list[int]],
) -> None:
    """Search all threads for the spans around those in `seekers`."""
    members = threads.places[:-1]
    if not members.size:
        return
    line = spans.thread_index[members]
    begin = begins(spans, tolerance)[members]
    edges = np.flatnonzero(np.concatenate(([True], line[1:] != line[:-1], [True])))
    offers = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        last = low + np.searchsorted(begin[low:high], query.start[seekers] + tolerance, side="right") - 1
        first = np.where(last >= low, last, len(members))
        offers.append(threads.places[_search(threads, first, seekers, query)])
    for seeker, offered in zip(seekers.tolist(), np.array(offers).T.tolist(), strict=True):
        valid = [candidate for candidate in offered if candidate >= 0]
        deepest = [candidate for candidate in valid if spans.level[candidate] >= Level.OP] or valid
        if len(deepest) == 1:
            outer[seeker] = deepest[0]
        elif deepest:
            candidates[seeker] = deepest
