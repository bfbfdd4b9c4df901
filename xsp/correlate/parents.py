"""Assign each span its parent by evidence, strongest first, and never by a guess.

1. **explicit**: the collector or the caller named the parent (steps, user spans, an incoming trace context);
2. **correlation**: device work takes the parent of the runtime call that launched it. The evidence is weaker
   (**graph**) if that call replays a graph, because the layer that replays it is not the layer that the work came from.
   If the capture of the graph was recorded, the collector names that layer (**capture**). If the launch was not
   recorded, the source may name the operator (**external**);
3. **sequence**: a backward op belongs to the layer of the forward op with its sequence number;
4. **containment**: the innermost span around it on its thread that is no deeper in the stack than itself.

For a span without a thread (oneDNN does not report it) all threads are searched; it gets a parent only if exactly one
thread has a candidate. A span without a parent stays an orphan.
"""

from __future__ import annotations

import numpy as np

from xsp.correlate.arrays import (
    BACKWARD,
    CONTAINED,
    EXPLICIT,
    EXTERNAL,
    FOLLOWED,
    LAUNCHED,
    NONE,
    REPLAYED,
    Array,
    Launches,
    NamedParents,
    Parents,
    Sequences,
    Spans,
    StepParts,
)
from xsp.correlate.containment import find_containers
from xsp.schema import MAX_NESTING, Level


def find(spans: Spans, tolerance: int, root: int = -1) -> Parents:
    """Return the parent of each span and the evidence for it.

    Args:
        spans: sorted by `outer_first`.
        tolerance: nanoseconds by which a span may extend beyond the span around it.
        root: index of the span around all others on threads: the step that stands for a whole trace; -1 if none.
    """
    parent, enclosing, candidates = find_containers(spans, tolerance)
    rule = np.where(parent >= 0, CONTAINED, 0).astype(np.int8)
    parents = Parents(parent, rule, enclosing, candidates=candidates)
    if spans.sequences is not None:
        _follow_sequence_numbers(spans, spans.sequences, parent, rule)
    _limit_depth(parent)
    if root >= 0:
        orphans = (parent < 0) & (spans.thread_index >= 0)
        orphans[root] = False
        parent[orphans], rule[orphans] = root, CONTAINED
        if enclosing is not None:
            enclosing[(enclosing < 0) & (spans.thread_index >= 0)] = root
    if spans.launches is not None:
        _follow_launches(spans, spans.launches, parent, rule)
    if spans.named is not None:
        _adopt_named(spans, spans.named, parents)
    if spans.parts is not None:
        _attach_to_step(spans, spans.parts, parents, tolerance)
    return parents


def as_named(spans: Spans) -> Parents:
    """Return only the parents that are named."""
    parents = Parents(np.full(len(spans), -1), np.zeros(len(spans), np.int8))
    if spans.named is not None:
        _adopt_named(spans, spans.named, parents)
    parents.named_in = None
    return parents


def depths(parent: Array) -> Array:
    """Return the number of spans above each span; a very large number for spans in a cycle."""
    count = len(parent)
    jump = np.append(np.where(parent < 0, count, parent), count)
    depth = (jump < count).astype(np.int64)
    for _ in range(count.bit_length() + 1):
        if jump.min() == count:
            break
        depth += depth[jump]
        jump = jump[jump]
    return depth[:-1]


def _limit_depth(parent: Array) -> None:
    """Attach spans nested deeper than `DEEPEST`, which no program reaches, to their ancestor at that limit."""
    depth = depths(parent)
    if not len(depth) or depth.max() <= MAX_NESTING:
        return
    above = np.where(depth < MAX_NESTING, np.arange(len(depth)), parent)
    while (above != above[above]).any():
        above = above[above]
    parent[depth > MAX_NESTING] = above[depth > MAX_NESTING]


# --- sequence numbers -------------------------------------------------------------------------------------


def _follow_sequence_numbers(spans: Spans, sequences: Sequences, parent: Array, rule: Array) -> None:
    """Attach the outermost frame of each backward op to the layer of its forward op.

    The counter does not advance until a forward op creates its autograd node, so several ops carry the same
    number; the last of them to begin before the backward op created the node. A frame inside a frame with another
    number (of a checkpoint) follows its own number.
    """
    known = sequences.number != NONE
    frames = known & sequences.backward
    inner = frames & (parent >= 0) & frames[parent] & (sequences.number[parent] == sequences.number)
    followers = np.flatnonzero(frames & ~inner)
    if not followers.size:
        return
    creators = _creators(spans, sequences, np.flatnonzero(known & ~sequences.backward), followers, parent, frames)
    stops = spans.level < Level.OP
    follows = np.zeros(len(spans), bool)
    follows[followers] = True
    targets = _first_above(creators, parent, stops | follows)
    otherwise = _first_above(parent[followers], parent, stops | follows)
    redirects: dict[int, int] = {}
    for follower, target, outer, container in zip(
        followers.tolist(), targets.tolist(), otherwise.tolist(), parent[followers].tolist(), strict=True
    ):
        while target in redirects:
            target = redirects[target]
        is_moved = target >= 0 and (container < 0 or spans.level[target] == Level.LAYER)
        if is_moved:
            parent[follower], rule[follower] = target, FOLLOWED
        if not stops[follower]:
            redirects[follower] = target if is_moved else outer


def _first_above(first: Array, parent: Array, stops: Array) -> Array:
    """Return for each index the nearest span in `stops`: the span itself or an ancestor; -1 if there is none."""
    nearest: Array = first.copy()
    active = np.flatnonzero((nearest >= 0) & ~stops[nearest])
    while active.size:
        nearest[active] = parent[nearest[active]]
        active = active[(nearest[active] >= 0) & ~stops[nearest[active]]]
    return nearest


def _creators(
    spans: Spans, sequences: Sequences, creators: Array, followers: Array, parent: Array, frames: Array
) -> Array:
    """Return for each backward op the index of the forward op that created its node; -1 if none is known."""
    numbers = _distinct(sequences.number[creators])
    creator_number = np.searchsorted(numbers, sequences.number[creators])
    number = _index(numbers, sequences.number[followers])
    line = sequences.forward[followers].astype(np.int64)
    if (line == -1).any():
        outermost = (parent[creators] < 0) | ~frames[parent[creators]]
        only_line = _only_lines(spans, creators[outermost], creator_number[outermost], followers, number)
        line = np.where(line == -1, only_line, line)
    pairs, creator_pair = np.unique(spans.thread_index[creators] * len(numbers) + creator_number, return_inverse=True)
    pair = np.where((line >= 0) & (number >= 0), _index(pairs, line * len(numbers) + number), -1)
    return _last(creator_pair, creators, pair, followers, len(spans))


def _distinct(values: Array) -> Array:
    """Return the distinct values in order; `np.unique` alone hashes them, which takes 20 times as long for ids."""
    return np.unique(values, return_index=True)[0]


def _index(ordered: Array, wanted: Array) -> Array:
    """Return the index of each value in a sorted array; -1 if it is missing."""
    if not len(ordered):
        return np.full(len(wanted), -1, np.int64)
    index = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[index] == wanted, index, -1)


def _last(groups: Array, places: Array, group: Array, queries: Array, count: int) -> Array:
    """Return for each query the last place of its `group` before the place in `queries`; -1 if there is none."""
    if not len(places):
        return np.full(len(queries), -1, np.int64)
    ordered = np.sort(groups * count + places)
    last = np.searchsorted(ordered, group * count + queries) - 1
    return np.where((group >= 0) & (last >= 0) & (ordered[last] // count == group), ordered[last] % count, -1)


def _only_lines(spans: Spans, creators: Array, creator_number: Array, followers: Array, number: Array) -> Array:
    """Return the thread of the forward ops that had a backward op's number before it; -1 if none or several did."""
    processes = np.unique(spans.process)
    groups = _group(processes, spans.process[creators], creator_number)
    wanted = np.where(number >= 0, _group(processes, spans.process[followers], number), -1)
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    differs = (
        spans.thread_index[creators] != spans.thread_index[creators[first]][group_of]
        if len(creators)
        else np.zeros(0, bool)
    )
    last = _last(groups, creators, wanted, followers, len(spans))
    other = _last(groups[differs], creators[differs], wanted, followers, len(spans))
    return np.where((last >= 0) & (other < 0), spans.thread_index[last], -1)


def _group(processes: Array, process: Array, number: Array) -> Array:
    return number * len(processes) + np.searchsorted(processes, process)


# --- device work ------------------------------------------------------------------------------------------


def _follow_launches(spans: Spans, launches: Launches, parent: Array, rule: Array) -> None:
    """Give device work the parent of its launch, else the operator that the source names.

    Device work without a known process is matched to a launch only if a single process has used the correlation id.
    """
    seeking = np.flatnonzero(launches.seeks)
    on_host = parent.copy()
    launching = np.flatnonzero(launches.may_launch & (launches.correlation != NONE))
    ids = _distinct(launches.correlation[launching])
    processes = np.unique(spans.process[launching])
    pairs, first = np.unique(
        np.searchsorted(ids, launches.correlation[launching]) * len(processes)
        + np.searchsorted(processes, spans.process[launching]),
        return_index=True,
    )
    wanted, process = _index(ids, launches.correlation[seeking]), spans.process[seeking]
    place = _index(processes, process)
    pair = np.where(
        (wanted >= 0) & (place >= 0) & (process != NONE), _index(pairs, wanted * len(processes) + place), -1
    )
    if len(pairs):
        single, only, uses = np.unique(pairs // len(processes), return_index=True, return_counts=True)
        alone = _index(single[uses == 1], wanted)
        certain = (wanted >= 0) & (process == NONE) & (alone >= 0)
        pair = np.where(certain, only[uses == 1][alone] if (uses == 1).any() else -1, pair)
        launch = np.where(pair >= 0, launching[first[pair]], -1)
        above = np.where(launch >= 0, on_host[launch], -1)
        graph = launches.graph[seeking] | launches.graph[launch]
        resolved = above >= 0
        parent[seeking[resolved]] = above[resolved]
        rule[seeking[resolved]] = np.where(graph[resolved], REPLAYED, LAUNCHED)
    if launches.operator is not None:
        _ask_operators(spans, launches.operator, seeking[parent[seeking] < 0], parent, rule)


def _ask_operators(spans: Spans, operator: Array, seeking: Array, parent: Array, rule: Array) -> None:
    """Give device work without a launch the operator that its source names, if it is unique and began earlier."""
    operators = np.flatnonzero((spans.level == Level.OP) & (operator != NONE))
    ids, first, uses = np.unique(operator[operators], return_index=True, return_counts=True)
    place = _index(ids, operator[seeking])
    if not len(ids):
        return
    above = operators[first[place]]
    matches = (place >= 0) & (uses[place] == 1) & (spans.start[above] <= spans.start[seeking]) & (above != seeking)
    parent[seeking[matches]], rule[seeking[matches]] = above[matches], EXTERNAL


# --- what the caller named --------------------------------------------------------------------------------


def _adopt_named(spans: Spans, named: NamedParents, found: Parents) -> None:
    """Take the named parents, except where a module called inside the named user block is a closer parent."""
    parent, rule = found.parent, found.rule
    is_named = named.parent != -1
    index_of = np.full(int(spans.number.max(initial=0)) + 1, -1)
    index_of[spans.number] = np.arange(len(spans))
    named_parent = np.where(named.parent >= 0, index_of[np.maximum(named.parent, 0)], -1)
    within = named.is_user & (named_parent >= 0)
    found.named_in = np.where(within, named_parent, -1)
    module = (parent >= 0) & (spans.level[parent] == Level.LAYER)
    closer = within & module & (spans.start[named_parent] <= spans.start[parent])
    adopted = is_named & ~closer
    parent[adopted], rule[adopted] = named_parent[adopted], named.rule[adopted]
    cycle = depths(parent) >= len(parent)
    if cycle.any():  # the named parents are wrong
        cycle &= is_named
        parent[cycle], rule[cycle] = -1, 0


def _attach_to_step(spans: Spans, parts: StepParts, found: Parents, tolerance: int) -> None:
    """Attach the parts of a step to the step, and ops on the autograd engine's own threads to their backward pass.

    Model spans of other threads were collected in this step and in no other, so the step is certainly their
    parent. Deeper spans on a thread without a model span stay orphans, except backward ops during which exactly one
    backward pass runs.
    """
    parent, rule = found.parent, found.rule
    orphans = (parent < 0) & (rule == 0)
    steps = np.flatnonzero(parts.is_step)
    step = int(steps[np.argmin(spans.number[steps])]) if steps.size else -1
    outer = step
    while outer >= 0:
        orphans[outer], outer = False, int(parent[outer])
    deep = spans.level > Level.MODEL
    backward = np.flatnonzero(orphans & deep & (spans.phase == BACKWARD))
    if step >= 0:
        shallow = orphans & ~deep
        parent[shallow], rule[shallow] = step, EXPLICIT
    passes = np.flatnonzero(parts.is_pass)
    if not backward.size or not passes.size:
        return
    end = spans.end[backward, None]
    middle = (spans.start[backward, None] + end) // 2
    fits = (
        (spans.level[passes] <= spans.deepest[backward, None])
        & (spans.start[passes] <= middle)
        & (middle <= spans.end[passes])
        & (end <= spans.end[passes] + tolerance)
    )
    unambiguous = fits.sum(axis=1) == 1
    parent[backward[unambiguous]] = passes[fits[unambiguous].argmax(axis=1)]
    rule[backward[unambiguous]] = CONTAINED
