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
    CONTAINMENT,
    CORRELATION,
    EXPLICIT,
    EXTERNAL,
    GRAPH,
    NONE,
    SEQUENCE,
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
        root: index of the span around all others on threads: the step that represents a whole trace; -1 if none.
    """
    parent, enclosing, candidates = find_containers(spans, tolerance)
    rule = np.where(parent >= 0, CONTAINMENT, 0).astype(np.int8)
    parents = Parents(parent, rule, enclosing, candidates=candidates)
    if spans.sequences is not None:
        _follow_sequence_numbers(spans, spans.sequences, parent, rule)
    _limit_depth(parent)
    if root >= 0:
        orphans = (parent < 0) & (spans.thread_index >= 0)
        orphans[root] = False
        parent[orphans], rule[orphans] = root, CONTAINMENT
        if enclosing is not None:
            enclosing[(enclosing < 0) & (spans.thread_index >= 0)] = root
    if spans.launches is not None:
        _follow_launches(spans, spans.launches, parent, rule)
    if spans.named_parents is not None:
        _apply_named(spans, spans.named_parents, parents)
    if spans.step_parts is not None:
        _attach_to_step(spans, spans.step_parts, parents, tolerance)
    return parents


def named_parents(spans: Spans) -> Parents:
    """Return only the parents that are named."""
    parents = Parents(np.full(len(spans), -1), np.zeros(len(spans), np.int8))
    if spans.named_parents is not None:
        _apply_named(spans, spans.named_parents, parents)
    parents.outer_block = None
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
    """Attach spans nested deeper than `MAX_NESTING`, which no program reaches, to their ancestor at that limit."""
    depth = depths(parent)
    if not len(depth) or depth.max() <= MAX_NESTING:
        return
    ancestor = np.where(depth < MAX_NESTING, np.arange(len(depth)), parent)
    while (ancestor != ancestor[ancestor]).any():
        ancestor = ancestor[ancestor]
    parent[depth > MAX_NESTING] = ancestor[depth > MAX_NESTING]


# --- sequence numbers -------------------------------------------------------------------------------------


def _follow_sequence_numbers(spans: Spans, sequences: Sequences, parent: Array, rule: Array) -> None:
    """Attach the outermost frame of each backward op to the layer of its forward op.

    The counter does not advance until a forward op creates its autograd node, so several ops carry the same
    number; the last of them to begin before the backward op created the node. A frame inside a frame with another
    number (of a checkpoint) follows its own number.
    """
    numbered = sequences.number != NONE
    frames = numbered & sequences.backward
    inner = frames & (parent >= 0) & frames[parent] & (sequences.number[parent] == sequences.number)
    followers = np.flatnonzero(frames & ~inner)
    if not followers.size:
        return
    creators = _creators(spans, sequences, np.flatnonzero(numbered & ~sequences.backward), followers, parent, frames)
    is_stop = spans.level < Level.OP
    is_follower = np.zeros(len(spans), bool)
    is_follower[followers] = True
    targets = _nearest_stop(creators, parent, is_stop | is_follower)
    fallbacks = _nearest_stop(parent[followers], parent, is_stop | is_follower)
    redirects: dict[int, int] = {}
    for follower, target, outer, container in zip(
        followers.tolist(), targets.tolist(), fallbacks.tolist(), parent[followers].tolist(), strict=True
    ):
        while target in redirects:
            target = redirects[target]
        is_moved = target >= 0 and (container < 0 or spans.level[target] == Level.LAYER)
        if is_moved:
            parent[follower], rule[follower] = target, SEQUENCE
        if not is_stop[follower]:
            redirects[follower] = target if is_moved else outer


def _nearest_stop(first: Array, parent: Array, stops: Array) -> Array:
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
    thread = sequences.forward[followers].astype(np.int64)
    if (thread == -1).any():
        outermost = (parent[creators] < 0) | ~frames[parent[creators]]
        unique_thread = _unique_threads(spans, creators[outermost], creator_number[outermost], followers, number)
        thread = np.where(thread == -1, unique_thread, thread)
    pairs, creator_pair = np.unique(spans.thread_index[creators] * len(numbers) + creator_number, return_inverse=True)
    pair = np.where((thread >= 0) & (number >= 0), _index(pairs, thread * len(numbers) + number), -1)
    return _last_of_group(creator_pair, creators, pair, followers, len(spans))


def _distinct(values: Array) -> Array:
    """Return the distinct values in order; `np.unique` alone hashes them, which takes 20 times as long for ids."""
    return np.unique(values, return_index=True)[0]


def _index(ordered: Array, values: Array) -> Array:
    """Return the index of each value in a sorted array; -1 if it is missing."""
    if not len(ordered):
        return np.full(len(values), -1, np.int64)
    index = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[index] == values, index, -1)


def _last_of_group(groups: Array, members: Array, group: Array, queries: Array, count: int) -> Array:
    """Return for each query the last place of its `group` before the place in `queries`; -1 if there is none."""
    if not len(members):
        return np.full(len(queries), -1, np.int64)
    ordered = np.sort(groups * count + members)
    last = np.searchsorted(ordered, group * count + queries) - 1
    return np.where((group >= 0) & (last >= 0) & (ordered[last] // count == group), ordered[last] % count, -1)


def _unique_threads(spans: Spans, creators: Array, creator_number: Array, followers: Array, number: Array) -> Array:
    """Return the thread of the forward ops that had a backward op's number before it; -1 if none or several did."""
    processes = np.unique(spans.process)
    groups = _group_numbers(processes, spans.process[creators], creator_number)
    query_groups = np.where(number >= 0, _group_numbers(processes, spans.process[followers], number), -1)
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    differs = (
        spans.thread_index[creators] != spans.thread_index[creators[first]][group_of]
        if len(creators)
        else np.zeros(0, bool)
    )
    last = _last_of_group(groups, creators, query_groups, followers, len(spans))
    last_different = _last_of_group(groups[differs], creators[differs], query_groups, followers, len(spans))
    return np.where((last >= 0) & (last_different < 0), spans.thread_index[last], -1)


def _group_numbers(processes: Array, process: Array, number: Array) -> Array:
    return number * len(processes) + np.searchsorted(processes, process)


# --- device work ------------------------------------------------------------------------------------------


def _follow_launches(spans: Spans, launches: Launches, parent: Array, rule: Array) -> None:
    """Give device work the parent of its launch, else the operator that the source names.

    Device work without a known process is matched to a launch only if a single process has used the correlation id.
    """
    device_work = np.flatnonzero(launches.seeks_launch)
    on_host = parent.copy()
    launch_calls = np.flatnonzero(launches.may_launch & (launches.correlation != NONE))
    ids = _distinct(launches.correlation[launch_calls])
    processes = np.unique(spans.process[launch_calls])
    pairs, first = np.unique(
        np.searchsorted(ids, launches.correlation[launch_calls]) * len(processes)
        + np.searchsorted(processes, spans.process[launch_calls]),
        return_index=True,
    )
    id_index, process = _index(ids, launches.correlation[device_work]), spans.process[device_work]
    process_index = _index(processes, process)
    pair = np.where(
        (id_index >= 0) & (process_index >= 0) & (process != NONE),
        _index(pairs, id_index * len(processes) + process_index),
        -1,
    )
    if len(pairs):
        single, only_pair, process_counts = np.unique(pairs // len(processes), return_index=True, return_counts=True)
        single_index = _index(single[process_counts == 1], id_index)
        is_certain = (id_index >= 0) & (process == NONE) & (single_index >= 0)
        pair = np.where(
            is_certain, only_pair[process_counts == 1][single_index] if (process_counts == 1).any() else -1, pair
        )
        launch = np.where(pair >= 0, launch_calls[first[pair]], -1)
        launch_parent = np.where(launch >= 0, on_host[launch], -1)
        graph = launches.graph[device_work] | launches.graph[launch]
        has_parent = launch_parent >= 0
        parent[device_work[has_parent]] = launch_parent[has_parent]
        rule[device_work[has_parent]] = np.where(graph[has_parent], GRAPH, CORRELATION)
    if launches.operator is not None:
        _attach_to_operators(spans, launches.operator, device_work[parent[device_work] < 0], parent, rule)


def _attach_to_operators(spans: Spans, operator: Array, device_work: Array, parent: Array, rule: Array) -> None:
    """Give device work without a launch the operator that its source names, if it is unique and began earlier."""
    operators = np.flatnonzero((spans.level == Level.OP) & (operator != NONE))
    ids, first, counts = np.unique(operator[operators], return_index=True, return_counts=True)
    index = _index(ids, operator[device_work])
    if not len(ids):
        return
    named_operator = operators[first[index]]
    matches = (
        (index >= 0)
        & (counts[index] == 1)
        & (spans.start[named_operator] <= spans.start[device_work])
        & (named_operator != device_work)
    )
    parent[device_work[matches]], rule[device_work[matches]] = named_operator[matches], EXTERNAL


# --- named parents ----------------------------------------------------------------------------------------


def _apply_named(spans: Spans, named: NamedParents, parents: Parents) -> None:
    """Take the named parents, except where a module called inside the named user block is a closer parent."""
    parent, rule = parents.parent, parents.rule
    is_named = named.parent != -1
    index_of = np.full(int(spans.number.max(initial=0)) + 1, -1)
    index_of[spans.number] = np.arange(len(spans))
    named_parent = np.where(named.parent >= 0, index_of[np.maximum(named.parent, 0)], -1)
    in_block = named.is_user & (named_parent >= 0)
    parents.outer_block = np.where(in_block, named_parent, -1)
    module = (parent >= 0) & (spans.level[parent] == Level.LAYER)
    in_closer_module = in_block & module & (spans.start[named_parent] <= spans.start[parent])
    is_adopted = is_named & ~in_closer_module
    parent[is_adopted], rule[is_adopted] = named_parent[is_adopted], named.rule[is_adopted]
    in_cycle = depths(parent) >= len(parent)
    if in_cycle.any():  # the named parents are wrong
        in_cycle &= is_named
        parent[in_cycle], rule[in_cycle] = -1, 0


def _attach_to_step(spans: Spans, parts: StepParts, parents: Parents, tolerance: int) -> None:
    """Attach the parts of a step to the step, and ops on the autograd engine's own threads to their backward pass.

    Model spans of other threads were collected in this step and in no other, so the step is certainly their
    parent. Deeper spans on a thread without a model span stay orphans, except backward ops during which exactly one
    backward pass runs.
    """
    parent, rule = parents.parent, parents.rule
    orphans = (parent < 0) & (rule == 0)
    steps = np.flatnonzero(parts.is_step)
    step = int(steps[np.argmin(spans.number[steps])]) if steps.size else -1
    outer = step
    while outer >= 0:
        orphans[outer], outer = False, int(parent[outer])
    is_deep = spans.level > Level.MODEL
    backward = np.flatnonzero(orphans & is_deep & (spans.phase == BACKWARD))
    if step >= 0:
        is_shallow = orphans & ~is_deep
        parent[is_shallow], rule[is_shallow] = step, EXPLICIT
    passes = np.flatnonzero(parts.is_pass)
    if not backward.size or not passes.size:
        return
    end = spans.end[backward, None]
    middle = (spans.start[backward, None] + end) // 2
    fits = (
        (spans.level[passes] <= spans.max_outer_level[backward, None])
        & (spans.start[passes] <= middle)
        & (middle <= spans.end[passes])
        & (end <= spans.end[passes] + tolerance)
    )
    unambiguous = fits.sum(axis=1) == 1
    parent[backward[unambiguous]] = passes[fits[unambiguous].argmax(axis=1)]
    rule[backward[unambiguous]] = CONTAINMENT
