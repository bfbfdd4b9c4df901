"""The innermost span around each span on its thread, found for all spans at once.

With outer spans sorted before inner ones, it is the last earlier span on the thread that ends late enough and is not
too deep in the stack. All spans search backwards at once, by pointer jumping: if a candidate ends too early, so do all
spans between it and the position that its own search has reached, and the search continues from there. So the number of
rounds grows with the logarithm of the number of siblings, and with the nesting depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xsp.correlate.arrays import Array, Spans, sort_times
from xsp.schema import Level

_MIN_TIME, _MAX_TIME = np.iinfo(np.int64).min, np.iinfo(np.int64).max

MAX_LATE_ROUNDS = 400
"""Maximum number of rounds in which a search skips spans that end late enough but begin too late to be around."""


class _Query(NamedTuple):
    """The conditions that each span sets for a span around it; times in nanoseconds."""

    min_end: Array
    """Earliest end of the outer span."""

    max_start: Array
    """Latest start of the outer span."""


class _Threads(NamedTuple):
    """Spans that may be around others, thread by thread. The last entry is a sentinel that is around everything."""

    indices: Array
    """Indices among all spans."""

    starts: Array
    ends: Array
    previous: Array
    """Index of the previous span on the same thread; of the sentinel if there is none."""

    candidate: Array
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
    by_thread, query = _conditions(spans, tolerance)
    threadless = np.zeros(len(spans), bool) if spans.is_threadless is None else spans.is_threadless
    seekers = np.flatnonzero((spans.thread_index >= 0) | threadless)
    members = by_thread if spans.allocations is None else by_thread[~spans.allocations.is_allocation[by_thread]]
    all_threads = _threads(spans, members, query) if spans.allocations is not None else None
    for level, collector in _classes(spans, seekers):
        fits: Array = spans.level[members] <= level
        fits = fits | (spans.calls.call_collector[members] == collector) if collector and spans.calls else fits
        threads = all_threads if all_threads is not None and fits.all() else _threads(spans, members[fits], query)
        group = seekers[_is_in_class(spans, seekers, level, collector)]
        on_threads = group[~threadless[group]]
        outer[on_threads] = _innermost(spans, threads, on_threads, query)
        if len(on_threads) < len(group):
            _search_all_threads(spans, threads, group[threadless[group]], query, tolerance, outer, candidates)
    enclosing = None
    if all_threads is not None:
        enclosing = np.full(len(spans), -1, np.int64)
        enclosing[by_thread] = _innermost(spans, all_threads, by_thread, query)
    return Containers(outer, enclosing, candidates)


def _conditions(spans: Spans, tolerance: int) -> tuple[Array, _Query]:
    """Return the indices of the spans on threads, thread by thread, and the conditions for a span around each one."""
    by_thread = np.flatnonzero(spans.thread_index >= 0)
    middle = (spans.start + spans.end) // 2
    return by_thread[np.argsort(spans.thread_index[by_thread], kind="stable")], _Query(
        np.maximum(middle, spans.end - tolerance), middle
    )


def _classes(spans: Spans, seekers: Array) -> list[tuple[int, int]]:
    """Return the classes of spans whose parents are found together: the deepest level around them, and the collector
    of calls that may be around operators."""
    # not np.unique, whose first call imports the masked arrays, in the storing process for the first step
    levels = sorted(set(spans.max_outer_level[seekers].tolist()))
    collectors = sorted(set(spans.calls.call_collector.tolist()) - {0}) if spans.calls is not None else []
    return [*((level, 0) for level in levels), *((int(Level.OP), collector) for collector in collectors)]


def _is_in_class(spans: Spans, indices: Array, level: int, collector: int) -> Array:
    fits: Array = spans.max_outer_level[indices] == level
    if spans.calls is None or level != Level.OP:
        return fits
    collectors = spans.calls.op_collector[indices]
    in_call: Array = (collectors > 0) & np.isin(collectors, spans.calls.call_collector)
    return fits & in_call & (collectors == collector) if collector else fits & ~in_call


def _threads(spans: Spans, indices: Array, query: _Query) -> _Threads:
    count = len(indices)
    thread, min_end = spans.thread_index[indices], query.min_end[indices]
    previous = np.arange(-1, count)
    previous[:-1][np.concatenate(([True], thread[1:] != thread[:-1]))[:count]] = count
    previous[-1] = count
    ends = np.append(spans.end[indices], _MAX_TIME)
    candidate = previous.copy()
    active = np.flatnonzero(ends[candidate[:-1]] < min_end)
    while active.size:
        earlier = candidate[candidate[active]]
        candidate[active] = earlier
        active = active[ends[earlier] < min_end[active]]
    starts = np.append(spans.start[indices], _MIN_TIME)
    return _Threads(np.append(indices, -1), starts, ends, previous, candidate)


def _first_candidates(spans: Spans, threads: _Threads, seekers: Array) -> Array:
    """Return where each search begins: at the last candidate before the span on its thread, or at one further out."""
    members = threads.indices[:-1]
    count = len(members)
    index_of = np.full(len(spans), -1, np.int64)
    index_of[members] = np.arange(count)
    seeker_index = index_of[seekers]
    first = threads.candidate[seeker_index]
    outside = np.flatnonzero(seeker_index < 0)
    if outside.size:
        thread = spans.thread_index[members].astype(np.int64)
        keys = thread * len(spans) + members
        outsiders = seekers[outside]
        seeker_thread = spans.thread_index[outsiders].astype(np.int64)
        previous = np.searchsorted(keys, seeker_thread * len(spans) + outsiders) - 1
        first[outside] = np.where((previous >= 0) & (np.append(thread, -1)[previous] == seeker_thread), previous, count)
    return first


def _innermost(spans: Spans, threads: _Threads, seekers: Array, query: _Query) -> Array:
    """Return the index of the innermost span of `threads` around each span, on its thread; -1 if there is none."""
    outer: Array = threads.indices[_search(threads, _first_candidates(spans, threads, seekers), seekers, query)]
    return outer


def _search(threads: _Threads, first: Array, seekers: Array, query: _Query) -> Array:
    """Return for each span the index in `threads` of the span around it, searching from `first`."""
    current = first
    min_end, max_start = query.min_end[seekers], query.max_start[seekers]
    late_rounds = 0
    active = np.flatnonzero((threads.ends[current] < min_end) | (threads.starts[current] > max_start))
    while active.size:
        index = current[active]
        ends_early = threads.ends[index] < min_end[active]
        late_rounds += not ends_early.all()
        previous = threads.previous[index] if late_rounds <= MAX_LATE_ROUNDS else len(threads.indices) - 1
        index = np.where(ends_early, threads.candidate[index], previous)
        current[active] = index
        active = active[(threads.ends[index] < min_end[active]) | (threads.starts[index] > max_start[active])]
    return current


def _search_all_threads(
    spans: Spans,
    threads: _Threads,
    seekers: Array,
    query: _Query,
    tolerance: int,
    outer: Array,
    candidates: dict[int, list[int]],
) -> None:
    """Search all threads for the spans around those in `seekers`."""
    members = threads.indices[:-1]
    if not members.size:
        return
    thread = spans.thread_index[members]
    begin = sort_times(spans, tolerance)[members]
    edges = np.flatnonzero(np.concatenate(([True], thread[1:] != thread[:-1], [True])))
    outer_by_thread = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        last = low + np.searchsorted(begin[low:high], query.max_start[seekers] + tolerance, side="right") - 1
        first = np.where(last >= low, last, len(members))
        outer_by_thread.append(threads.indices[_search(threads, first, seekers, query)])
    for seeker, outer_spans in zip(seekers.tolist(), np.array(outer_by_thread).T.tolist(), strict=True):
        valid = [candidate for candidate in outer_spans if candidate >= 0]
        deepest = [candidate for candidate in valid if spans.level[candidate] >= Level.OP] or valid
        if len(deepest) == 1:
            outer[seeker] = deepest[0]
        elif deepest:
            candidates[seeker] = deepest
