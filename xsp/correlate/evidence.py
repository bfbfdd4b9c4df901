"""Give each span its parent, by evidence, strongest first, and never by a guess.

1. **explicit**: the collector or the caller named the parent (steps, user spans, an incoming trace context);
2. **correlation**: device work takes the parent of the runtime call that launched it, which is weaker evidence
   (**graph**) where that call replays a graph: the layer that replays it is not the one that it came from; where
   the graph's capture was seen, the collector names that layer (**capture**);
3. **sequence**: a backward op belongs to the layer of the forward op with its sequence number;
4. **containment**: the innermost span around it on its thread that is no deeper in the stack than itself.

A span that carries no thread (oneDNN does not tell it) is looked for on all threads, and gets a parent only
if exactly one thread offers one. What finds none stays an orphan: `parent_id` is null, and where there were
several candidates they stand in its attributes for a serialised re-run to decide (see `resolve`).
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xsp.schema import WEAK, Grade, Kind, Level, Rule, Span

TOLERANCE_NS = 500
"""By how much a span may stick out of its parent: sources on different clocks are placed on the epoch with
an error of a few hundred nanoseconds, and a caller's own bookkeeping around a callee takes longer."""


@dataclass(eq=False, slots=True)
class _Node:
    """A span on its way to a parent."""

    span: Span
    order: int
    start: int
    end: int
    middle: int
    parent: _Node | None = None
    rule: Rule | None = None
    children: list[_Node] = field(default_factory=list)
    candidates: list[_Node] = field(default_factory=list)
    alloc_bytes: int | None = None
    key: str = ""
    named_in: _Node | None = None
    """Of a user's span: the one that was open around it, which may be further out than its parent."""

    def within(self, outer: _Node) -> bool:
        """True if this span may be a child of `outer` by time and by level.

        A user names blocks wherever he likes: in a module too, which is deeper in the stack.
        """
        deepest = max(self.span.level, Level.LAYER) if self.span.kind == Kind.USER else self.span.level
        return (
            (outer.span.level <= deepest or _runs_operators(outer.span, self.span))
            and outer.start <= self.middle <= outer.end
            and self.end <= outer.end + TOLERANCE_NS
        )


def _runs_operators(call: Span, span: Span) -> bool:
    """Return whether a span is an operator that may run inside a library's call: gloo's do, on threads of their own."""
    is_call = call.level == Level.LIBRARY and call.kind == Kind.CALL and span.level == Level.OP
    return is_call and call.collector is not None and call.collector == span.collector  # times of one clock


def correlate(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of one step with identities, parents, rules, keys and what follows from them.

    Args:
        spans: of one step, from all collectors, in any order. One of kind STEP is the root.

    Returns:
        The spans, parents before children, siblings by start. Allocations are folded into the spans around
        them (`alloc_bytes`); nothing else is left out.
    """
    nodes = [_node(span, order) for order, span in enumerate(spans)]
    allocations = [node for node in nodes if node.span.kind == Kind.ALLOC]
    kept = [node for node in nodes if node.span.kind != Kind.ALLOC]
    identifiers = _identifiers(len(kept))
    for node, identifier in zip(kept, identifiers, strict=True):
        if node.span.span_id is None:
            node.span = node.span._replace(span_id=identifier)

    by_thread = _by_thread(kept)
    for thread in by_thread.values():
        _contain(thread)
    _contain_threadless([n for n in kept if _is_threadless(n)], by_thread)
    _follow_sequence_numbers(kept)
    _follow_correlation_ids(kept)
    _adopt_explicit(kept)
    _attach_to_step(kept)
    _state_devices(kept, _fold_allocations(allocations, by_thread))
    return _finish(kept)


def resolve(spans: Sequence[Span], serialised: Iterable[Span]) -> list[Span]:
    """Decide ambiguous parents by a run of the same program with one thing at a time.

    Args:
        spans: of one step, correlated. Orphans with several candidates carry the candidates' keys.
        serialised: correlated spans of the serialised run.

    Returns:
        The spans; an orphan has a parent now if exactly one of its candidates had such a child in the
        serialised run. The others stay as they were.
    """
    serial = list(serialised)
    keys = {span.span_id: span.key for span in serial}
    seen = {(keys[span.parent_id], *_what(span)) for span in serial if span.parent_id in keys}
    nodes = [_node(span, order) for order, span in enumerate(spans)]
    by_id = {node.span.span_id: node for node in nodes}
    by_key = {node.span.key: node for node in nodes}
    for node in nodes:
        span = node.span
        node.alloc_bytes = span.alloc_bytes
        node.parent = by_id.get(span.parent_id) if span.parent_id is not None else None
        node.rule = Rule(span.parent_rule) if span.parent_rule is not None else None
        candidates = json.loads(span.attributes or "{}").get("candidates", [])
        fitting = [key for key in candidates if (key, *_what(span)) in seen and key in by_key]
        if node.parent is None and len(fitting) == 1:
            node.parent, node.rule = by_key[fitting[0]], Rule.SERIALISED
            node.span = span._replace(attributes=_what(span)[2])
    return _finish(nodes)


def _what(span: Span) -> tuple[str, str | None, str | None]:
    """Return what a span is of, wherever it ran: name, type, and attributes but for its candidates."""
    attributes = json.loads(span.attributes or "{}")
    attributes.pop("candidates", None)
    return span.name, span.type, json.dumps(attributes, sort_keys=True) if attributes else None


def _node(span: Span, order: int) -> _Node:
    return _Node(span, order, span.start_ns, span.end_ns, span.start_ns + span.dur_ns // 2)


def _identifiers(count: int) -> list[str]:
    # not from `random`, whose state belongs to the program if this runs inside it
    digits = os.urandom(8 * count).hex()
    return [digits[16 * place : 16 * place + 16] for place in range(count)]


def _by_thread(nodes: Sequence[_Node]) -> dict[tuple[int | None, int], list[_Node]]:
    """Return the host's spans per (process, thread), outer before inner."""
    threads: dict[tuple[int | None, int], list[_Node]] = defaultdict(list)
    for node in nodes:
        if node.span.thread is not None and node.span.device is None:
            threads[node.span.process, node.span.thread].append(node)
    for thread in threads.values():
        thread.sort(key=_outer_first)
    return threads


def _outer_first(node: _Node) -> tuple[int, int, int, int, int]:
    # An op's clock may put it just before the layer that it runs in.
    slack = TOLERANCE_NS if node.span.level >= Level.OP else 0
    # Of equal intervals the step is the outermost; of modules, reported as they end, the least deep.
    inside = -1 if node.span.kind == Kind.STEP else node.span.depth or 0
    return (node.start + slack, node.span.level, -node.end, inside, node.order)


def _earliest(node: _Node) -> int:
    """Return a time before which no span begins that is sorted after this one."""
    return _outer_first(node)[0] - TOLERANCE_NS


def _contain(thread: list[_Node]) -> None:
    """Sweep one thread, its spans sorted, with a stack of what is open."""
    stack: list[_Node] = []
    for node in thread:
        earliest, inside = _earliest(node), []
        while stack and node.parent is None:
            outer = stack[-1]
            if node.within(outer):
                node.parent, node.rule = outer, Rule.CONTAINMENT
            else:
                stack.pop()
                if outer.end >= earliest:  # a later span may still be in it
                    inside.append(outer)
        stack += [*reversed(inside), node]


def _is_threadless(node: _Node) -> bool:
    """Return whether a span ran on a thread that its source does not tell; layers of replays ran on none."""
    return node.span.thread is None and node.span.device is None and not _is_replayed(node)


def _is_replayed(node: _Node) -> bool:
    """Return whether it is the call of a layer that a collector found in a replayed graph."""
    return node.span.level == Level.LAYER and node.span.correlation_id is not None


def _contain_threadless(nodes: Sequence[_Node], by_thread: dict[tuple[int | None, int], list[_Node]]) -> None:
    """Look for a parent on all threads; several threads with an operator under way are ambiguous."""
    starts = {name: [_outer_first(node)[0] for node in thread] for name, thread in by_thread.items()}
    for node in nodes:
        found = []
        for name, thread in by_thread.items():
            outer: _Node | None = None
            place = bisect_right(starts[name], node.middle + TOLERANCE_NS)
            while place and thread[place - 1].start > node.middle:
                place -= 1
            if place:
                outer = thread[place - 1]
            while outer is not None and not node.within(outer):
                outer = outer.parent
            if outer is not None:
                found.append(outer)
        deepest = [outer for outer in found if outer.span.level >= Level.OP] or found
        if len(deepest) == 1:
            node.parent, node.rule = deepest[0], Rule.CONTAINMENT
        else:
            node.candidates = deepest


def _follow_sequence_numbers(nodes: Sequence[_Node]) -> None:
    """Hang the outermost frame of each backward op under the layer of its forward op.

    Until a forward op makes its autograd node the counter stands still, so several ops carry the same
    number; the last of them to begin before the backward op is the one that made it. A frame in a frame of another
    number (a checkpoint's) follows its own.
    """
    makers: dict[tuple[int | None, int | None, int], _Node] = {}
    for node in sorted((each for each in nodes if each.span.sequence_nr is not None), key=_outer_first):
        span, inside = node.span, node.parent
        if span.forward_thread is None:
            if span.phase != "backward":
                makers[span.process, span.thread, span.sequence_nr or 0] = node
            continue
        if (
            inside is not None
            and inside.span.sequence_nr == span.sequence_nr
            and inside.span.forward_thread is not None
        ):
            continue  # inside a frame that follows this number
        layer = makers.get((span.process, span.forward_thread, span.sequence_nr or 0))
        while layer is not None and layer.span.level >= Level.OP:
            layer = layer.parent
        if layer is not None and (inside is None or layer.span.level == Level.LAYER):
            node.parent, node.rule = layer, Rule.SEQUENCE


def _follow_correlation_ids(nodes: Sequence[_Node]) -> None:
    launches = {
        (node.span.process, node.span.correlation_id): node
        for node in nodes
        if node.span.correlation_id is not None and node.span.device is None and not _is_replayed(node)
    }
    for node in nodes:
        if node.span.correlation_id is not None and (node.span.device is not None or _is_replayed(node)):
            launch = launches.get((node.span.process, node.span.correlation_id))
            if launch is not None and launch.parent is not None:
                replayed = "GraphLaunch" in launch.span.name
                node.parent, node.rule = launch.parent, Rule.GRAPH if replayed else Rule.CORRELATION


def _adopt_explicit(nodes: Sequence[_Node]) -> None:
    by_id = {node.span.span_id: node for node in nodes}
    for node in nodes:
        if node.span.parent_id is None:
            continue
        named = by_id.get(node.span.parent_id)
        inside = node.parent
        if node.span.kind == Kind.USER and named is not None:
            node.named_in = named
            if inside is not None and inside.span.level == Level.LAYER and named.start <= inside.start:
                continue  # a module that was called in the named block is the closer one
        node.parent, node.rule = named, Rule(node.span.parent_rule or Rule.EXPLICIT)


def _attach_to_step(nodes: Sequence[_Node]) -> None:
    """Give the parts of a step their step, and the autograd engine's own threads their backward pass.

    Model spans of other threads were collected in this step and in no other, so the step is their parent for
    certain. Deeper spans on a thread without a model span stay orphans, but for backward ops in the one
    backward pass that runs at the time.
    """
    step = next((node for node in nodes if node.span.kind == Kind.STEP), None)
    around_step = set()
    outer = step
    while outer is not None and id(outer) not in around_step:
        around_step.add(id(outer))
        outer = outer.parent
    passes = [node for node in nodes if node.span.kind == Kind.BACKWARD]
    for node in nodes:
        if node.parent is not None or id(node) in around_step or node.rule is not None:
            continue
        if node.span.level <= Level.MODEL:
            if step is not None:
                node.parent, node.rule = step, Rule.EXPLICIT
        elif node.span.phase == "backward":
            around = [outer for outer in passes if node.within(outer)]
            if len(around) == 1:
                node.parent, node.rule = around[0], Rule.CONTAINMENT


def _state_devices(nodes: Sequence[_Node], devices: Sequence[int]) -> None:
    """Say in the step of whose memory `alloc_bytes` speaks; nothing where it is the host's."""
    for node in nodes:
        if devices and node.span.kind == Kind.STEP:
            known = json.loads(node.span.attributes or "{}")
            node.span = node.span._replace(attributes=json.dumps({**known, "alloc_devices": devices}))


def _fold_allocations(allocations: Sequence[_Node], by_thread: dict[tuple[int | None, int], list[_Node]]) -> list[int]:
    """Add each allocation to all spans that were open on its thread when it happened.

    In a step that allocates on devices those on the host do not count: a sum of both would be of no memory at all.

    Returns:
        The devices.
    """
    devices = sorted({node.span.device for node in allocations if node.span.device is not None})
    allocations = [node for node in allocations if (node.span.device is not None) == bool(devices)]
    for name, thread in by_thread.items():
        here = [n for n in allocations if (n.span.process, n.span.thread) == name]
        if not here:
            continue
        for node in thread:
            node.alloc_bytes = 0
        stack: list[_Node] = []
        for node in sorted([*thread, *here], key=_outer_first):
            while stack and stack[-1].end < _earliest(node):
                stack.pop()
            if node.span.kind == Kind.ALLOC:
                for outer in stack:
                    if node.within(outer) and outer.alloc_bytes is not None:
                        outer.alloc_bytes += node.span.alloc_bytes or 0
            else:
                stack.append(node)
    return devices


def _finish(nodes: Sequence[_Node]) -> list[Span]:
    """Return the rows, parents first, with keys, phases, layer numbers and operations counted once."""
    roots = []
    for node in nodes:
        if node.parent is None:
            roots.append(node)
        else:
            node.parent.children.append(node)
    ordered: list[_Node] = []
    _walk(roots, "", ordered)
    layers = sorted((node for node in ordered if node.span.level == Level.LAYER), key=_outer_first)
    index = {id(node): place for place, node in enumerate(layers)}
    counted = _counted_below(ordered)
    return [_row(node, index.get(id(node)), id(node) in counted) for node in ordered]


def _walk(siblings: list[_Node], parent_key: str, ordered: list[_Node]) -> None:
    """Visit spans depth first without recursion, and name each one's place in the structure.

    A key is made of the parent's key, level, kind, name, and the ordinal among siblings that share them; so
    it is the same in every step that has the same structure, whatever else was recorded around it.
    """
    pending = [(sorted(siblings, key=_outer_first), parent_key)]
    seen: dict[str, int] = defaultdict(int)
    while pending:
        group, outer_key = pending.pop()
        for node in group:
            span = node.span
            # what a user named is the same span whether or not the module around it was recorded
            above = node.named_in.key if node.named_in is not None else outer_key
            alike = f"{above}/{(span.level, span.kind, span.name, span.phase if span.level >= Level.OP else None)}"
            text = f"{alike}#{seen[alike]}"
            seen[alike] += 1
            node.key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            ordered.append(node)
            if node.children:
                pending.append((sorted(node.children, key=_outer_first), node.key))


def _counted_below(ordered: Sequence[_Node]) -> set[int]:
    """Return the spans whose operations a span beneath them states more closely."""
    above: set[int] = set()
    for node in reversed(ordered):
        if node.span.flops is not None or id(node) in above:
            outer = node.parent
            while outer is not None and id(outer) not in above:
                above.add(id(outer))
                outer = outer.parent
    return above


def _row(node: _Node, layer_index: int | None, counted_below: bool) -> Span:
    span = node.span
    parent = node.parent
    phase = span.phase
    if phase is None and span.level > Level.MODEL:
        outer = parent
        while outer is not None and phase is None:
            phase, outer = outer.span.phase, outer.parent
    layer: _Node | None = node
    while layer is not None and layer.span.level != Level.LAYER:
        layer = layer.parent
    attributes = span.attributes
    if node.candidates:
        known = json.loads(attributes) if attributes else {}
        attributes = json.dumps({**known, "candidates": [outer.key for outer in node.candidates]})
    return span._replace(
        parent_id=parent.span.span_id if parent is not None else span.parent_id,
        parent_rule=node.rule.value if node.rule is not None else None,
        phase=phase,
        key=node.key,
        layer_index=layer_index,
        depth=_depth(node),
        layer_id=layer.span.span_id if layer is not None else None,
        grade=_grade(node, layer),
        alloc_bytes=node.alloc_bytes,
        flops=None if counted_below else span.flops,
        flops_source=None if counted_below else span.flops_source,
        attributes=attributes,
    )


def _depth(node: _Node) -> int | None:
    """Return the number of module calls around one, where its collector could not know it."""
    if node.span.depth is not None or node.span.level != Level.LAYER or node.parent is None:
        return node.span.depth
    outer: _Node | None = node.parent
    count = 0
    while outer is not None:
        count += outer.span.level == Level.LAYER
        outer = outer.parent
    return count


def _grade(node: _Node, layer: _Node | None) -> str | None:
    """Return how surely the layer of device work is known; None on the host."""
    if node.span.device is None:
        return None
    if layer is None:
        return str(Grade.UNKNOWN)
    step: _Node | None = node
    while step is not None and step is not layer:
        if step.rule in WEAK:
            return str(Grade.INFERRED)
        step = step.parent
    return str(Grade.EXACT)
