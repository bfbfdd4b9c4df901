"""Assign identities, parents, rules, keys and derived values to the spans of a recorded step.

`xsp.correlate.parents` describes the evidence. A span without a parent stays an orphan: its `parent_id` is null. If it
has several candidates, its attributes list them, so that a serialised re-run can decide (see `resolve`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from xsp.correlate import parents
from xsp.correlate.arrays import (
    EXPLICIT,
    NONE,
    PHASES,
    RULES,
    Allocations,
    Array,
    Calls,
    Launches,
    NamedParents,
    Parents,
    Sequences,
    Spans,
    StepParts,
    outer_first,
)
from xsp.correlate.inherited import inherit
from xsp.schema import Grade, Kind, Level, Rule, Span

TOLERANCE_NS = 500
"""Nanoseconds by which a span may extend beyond its parent: sources on different clocks are placed on the epoch with
an error of a few hundred nanoseconds, and a caller's own bookkeeping around a callee takes longer."""

_FIELDS = {name: place for place, name in enumerate(Span._fields)}
_NUMBERS = {None if rule is None else str(rule): number for number, rule in enumerate(RULES)}


def correlate(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of one step with identities, parents, rules, keys and derived values.

    Args:
        spans: all spans of one step, from all collectors, in any order. The span of kind STEP is the root.

    Returns:
        The spans, parents before children, siblings by start. Allocations are folded into the spans around
        them (`alloc_bytes`); nothing else is left out.
    """
    rows = list(spans)
    return _rows(correlate_columns(list(zip(*rows, strict=True)))) if rows else []


def correlate_columns(columns: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Correlate at least one span as `correlate` does, by columns; return columns, an empty list if no span is left."""
    step = _Step(columns)
    order = outer_first(step.spans, TOLERANCE_NS)
    ordered = step.spans.take(order)
    return step.result_columns(order, ordered, parents.find(ordered, TOLERANCE_NS))


def _rows(columns: Sequence[Sequence[Any]]) -> list[Span]:
    return list(map(Span._make, zip(*columns, strict=True)))


def resolve(spans: Sequence[Span], serialised: Iterable[Span]) -> list[Span]:
    """Resolve ambiguous parents with a serialised run of the same program, which does one thing at a time.

    Args:
        spans: correlated spans of one step. Orphans with several candidates carry the candidates' keys.
        serialised: correlated spans of the serialised run.

    Returns:
        The spans. An orphan gets a parent if exactly one of its candidates had such a child in the serialised run;
        other spans keep their parents.
    """
    serial = list(serialised)
    keys = {span.span_id: span.key for span in serial}
    serial_children = {(keys[span.parent_id], *_identity(span)) for span in serial if span.parent_id in keys}
    ids = {span.key: span.span_id for span in spans}
    span_ids = {span.span_id for span in spans}
    rows = []
    for span in spans:
        candidates = json.loads(span.attributes or "{}").get("candidates", [])
        matches = [key for key in candidates if (key, *_identity(span)) in serial_children and key in ids]
        if span.parent_id not in span_ids and len(matches) == 1:
            span = span._replace(
                parent_id=ids[matches[0]], parent_rule=Rule.SERIALISED.value, attributes=_identity(span)[2]
            )
        rows.append(span)
    if not rows:
        return []
    step = _Step(list(zip(*rows, strict=True)))
    order = outer_first(step.spans, TOLERANCE_NS)
    ordered = step.spans.take(order)
    return _rows(step.result_columns(order, ordered, parents.named_parents(ordered)))


def _identity(span: Span) -> tuple[str, str | None, str | None]:
    """Return the identity of a span, independent of where it ran: name, type, and attributes without candidates."""
    attributes = json.loads(span.attributes or "{}")
    attributes.pop("candidates", None)
    return span.name, span.type, json.dumps(attributes, sort_keys=True) if attributes else None


class _Step:
    """The columns of a step, and arrays made from them."""

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self._columns = columns
        level, start = self._integers("level"), self._integers("start_ns")
        device, thread = self._integers("device"), self._integers("thread")
        process, correlation = self._integers("process"), self._integers("correlation_id")
        kinds: dict[str, int] = {}
        kind = np.array([kinds.setdefault(name, len(kinds)) for name in self._column("kind")])
        is_alloc, is_user, is_step, is_backward, is_call = (
            kind == kinds.get(member, -1) for member in (Kind.ALLOC, Kind.USER, Kind.STEP, Kind.BACKWARD, Kind.CALL)
        )
        on_host = device == NONE
        replayed = (level == Level.LAYER) & (correlation != NONE)
        seeks_launch = ~is_alloc & (~on_host | replayed)
        lines: dict[tuple[int, int], int] = {}
        line = np.array([
            lines.setdefault(pair, len(lines)) if pair[1] != NONE and has_line else -1
            for pair, has_line in zip(zip(process.tolist(), thread.tolist(), strict=True),
                                    (on_host | is_alloc).tolist(), strict=True)
        ])  # fmt: skip
        self.on_host, self.is_alloc = on_host, is_alloc
        self.phases: list[str | None] = list(dict.fromkeys([*PHASES, *self._column("phase")]))
        phase_indices = {phase: index for index, phase in enumerate(self.phases)}
        identity, self._codes = self._identities(level)
        self.spans = Spans(
            number=np.arange(len(level)),
            start=start,
            end=start + self._integers("dur_ns"),
            level=level,
            max_outer_level=np.where(is_user, np.maximum(level, Level.LAYER), level),
            process=process,
            thread_index=line,
            nesting=np.where(is_step, -1, np.maximum(self._integers("depth"), 0)),
            identity=identity,
            phase=np.array([phase_indices[phase] for phase in self._column("phase")]),
            figure_bits=(self._integers("flops") != NONE).astype(np.int8),
            launches=self._launches(seeks_launch, on_host, replayed, correlation) if seeks_launch.any() else None,
            sequences=self._sequences(lines, process),
            allocations=self._allocations() if is_alloc.any() else None,
            is_threadless=(thread == NONE) & on_host & ~replayed & ~is_alloc,
            calls=self._calls(level, is_call & (level == Level.LIBRARY)),
            named_parents=self._named_parents(is_user),
            step_parts=StepParts(is_step, is_backward),
        )

    def _column(self, name: str) -> Sequence[Any]:
        return self._columns[_FIELDS[name]]

    def _integers(self, name: str) -> Array:
        """Return a column as integers; `NONE` for unknown values."""
        values = self._column(name)
        if values[0] is None and values.count(None) == len(values):
            return np.full(len(values), NONE, np.int64)
        return np.array([NONE if value is None else value for value in values] if None in values else values, np.int64)

    def _identities(self, level: Array) -> tuple[Array, Array]:
        """Return the index of each span's identity among the codes, and the codes."""
        identities: dict[tuple[int, str, str, str | None], int] = {}
        op = int(Level.OP)
        columns = level.tolist(), self._column("kind"), self._column("name"), self._column("phase")
        identity = [
            identities.setdefault((depth, kind, name, phase if depth >= op else None), len(identities))
            for depth, kind, name, phase in zip(*columns, strict=True)
        ]
        codes = [_code((depth, str(kind), name, phase)) for depth, kind, name, phase in identities]
        return np.array(identity), np.array(codes, np.uint64)

    def _launches(self, seeks_launch: Array, on_host: Array, replayed: Array, correlation: Array) -> Launches:
        graph = np.array(["GraphLaunch" in name for name in self._column("name")]) & on_host
        return Launches(seeks_launch, on_host & ~replayed & ~self.is_alloc, correlation, graph)

    def _sequences(self, lines: dict[tuple[int, int], int], process: Array) -> Sequences | None:
        number, forward = self._integers("sequence_nr"), self._integers("forward_thread")
        if not (number != NONE).any():
            return None
        backward = forward != NONE
        unlinked = ~backward & np.array([phase == "backward" for phase in self._column("phase")])
        threads = zip(process.tolist(), forward.tolist(), strict=True)
        return Sequences(
            np.where(unlinked, NONE, number), backward, np.array([lines.get(pair, -2) for pair in threads])
        )

    def _allocations(self) -> Allocations:
        """Return the allocations; if any is on a device, host ones do not count: a sum of both has no meaning."""
        counts = self.is_alloc & (self.on_host ^ (self.is_alloc & ~self.on_host).any())
        return Allocations(self.is_alloc, np.where(counts, np.maximum(self._integers("alloc_bytes"), 0), 0))

    def _calls(self, level: Array, calls: Array) -> Calls | None:
        if not calls.any():
            return None
        numbers: dict[str | None, int] = {None: 0}
        collector = np.array([numbers.setdefault(name, len(numbers)) for name in self._column("collector")])
        return Calls(np.where(calls, collector, 0), np.where(level == Level.OP, collector, 0))

    def _named_parents(self, is_user: Array) -> NamedParents | None:
        """Return the parents that the rows name; None if they name none."""
        if not any(self._column("parent_id")):
            return None
        ids = {span_id: index for index, span_id in enumerate(self._column("span_id")) if span_id is not None}
        parent = [-1 if parent_id is None else ids.get(parent_id, -2) for parent_id in self._column("parent_id")]
        rules = self._column("parent_rule")
        rule = [_NUMBERS[None if text is None else str(text)] or EXPLICIT for text in rules]
        return NamedParents(np.array(parent), np.array(rule, np.int8), is_user)

    def result_columns(self, order: Array, spans: Spans, tree: Parents) -> list[Sequence[Any]]:
        """Return the columns, parents first, with identities, keys, phases, layer numbers and operations counted once.

        Args:
            order: row of each span, in the order of `spans`.
            spans: sorted by `outer_first`.
            tree: their parents.
        """
        derived = inherit(spans, tree, self._codes)
        indices = derived.order[~self.is_alloc[order[derived.order]]]
        if not indices.size:
            return []
        rows = order[indices].tolist()
        pick = itemgetter(*rows) if len(rows) > 1 else lambda values: (values[rows[0]],)
        columns: list[Sequence[Any]] = [pick(values) for values in self._columns]

        def column(name: str) -> Sequence[Any]:
            return columns[_FIELDS[name]]

        new_ids = iter(_identifiers(len(rows)))
        ids = [next(new_ids) if span_id is None else span_id for span_id in column("span_id")]
        ids_by_index = dict(zip(indices.tolist(), ids, strict=True))
        ids_by_index[-1] = None
        is_layers, layer_counts = (spans.level[indices] == Level.LAYER).tolist(), derived.layers[indices].tolist()
        parent, layer = tree.parent[indices].tolist(), derived.layer[indices].tolist()
        keys = [f"{key:016x}" for key in derived.key.tolist()]
        deep = (spans.level[indices] > Level.MODEL).tolist()
        phases = zip(column("phase"), derived.phase[indices].tolist(), deep, strict=True)
        inner_bits = derived.inner_figure_bits[indices].tolist()
        changed = {
            "span_id": ids,
            "parent_id": [
                ids_by_index[outer] if outer >= 0 else parent_id
                for outer, parent_id in zip(parent, column("parent_id"), strict=True)
            ],
            "parent_rule": [_RULE_NAMES[rule] for rule in tree.rule[indices].tolist()],
            "phase": [self.phases[inherited] if is_deep else phase for phase, inherited, is_deep in phases],
            "key": [keys[index] for index in indices.tolist()],
            "layer_index": [None if index < 0 else index for index in derived.layer_index[indices].tolist()],
            "depth": [
                count - 1 if depth is None and is_layer and outer >= 0 else depth
                for depth, is_layer, outer, count in zip(column("depth"), is_layers, parent, layer_counts, strict=True)
            ],
            "layer_id": [ids_by_index[index] for index in layer],
            "grade": [
                None if device is None else _UNKNOWN if index < 0 else _INFERRED if weak else _EXACT
                for device, index, weak in zip(column("device"), layer, derived.is_weak[indices].tolist(), strict=True)
            ],
            "alloc_bytes": self._allocated(spans, derived.allocated, indices),
            "flops": [None if inner else flops for flops, inner in zip(column("flops"), inner_bits, strict=True)],
            "flops_source": [
                None if inner else source for source, inner in zip(column("flops_source"), inner_bits, strict=True)
            ],
            "attributes": self._attributes(indices, tree, keys, column("kind"), column("attributes")),
        }
        for name, values in changed.items():
            columns[_FIELDS[name]] = values
        return columns

    def _allocated(self, spans: Spans, allocated: Array, indices: Array) -> list[int | None]:
        """Return the bytes of each span on a thread whose allocations are known."""
        if spans.allocations is None:
            values = self._column("alloc_bytes")
            return [values[number] for number in spans.number[indices].tolist()]
        devices = self.is_alloc & ~self.on_host
        counted = devices if devices.any() else self.is_alloc
        lines = set(spans.thread_index[counted[spans.number]].tolist()) - {-1}
        return [
            size if line in lines else None
            for size, line in zip(allocated[indices].tolist(), spans.thread_index[indices].tolist(), strict=True)
        ]

    def _attributes(
        self,
        indices: Array,
        tree: Parents,
        keys: Sequence[str],
        kinds: Sequence[str],
        attributes: Sequence[str | None],
    ) -> Sequence[str | None]:
        """Return the attributes; add the keys of candidates, and to the step the devices that `alloc_bytes` covers."""
        attributes = list(attributes)
        devices = sorted(
            {int(device) for device in np.array(self._column("device"), object)[self.is_alloc & ~self.on_host]}
        )
        for row, kind in enumerate(kinds if devices else ()):
            if kind == Kind.STEP:
                attributes[row] = json.dumps({**json.loads(attributes[row] or "{}"), "alloc_devices": devices})
        if tree.candidates:
            rows = {index: row for row, index in enumerate(indices.tolist())}
            for index, candidates in tree.candidates.items():
                content = json.loads(attributes[rows[index]] or "{}")
                attributes[rows[index]] = json.dumps(
                    {**content, "candidates": [keys[candidate] for candidate in candidates]}
                )
        return attributes


_RULE_NAMES = tuple(None if rule is None else rule.value for rule in RULES)
_UNKNOWN, _INFERRED, _EXACT = str(Grade.UNKNOWN), str(Grade.INFERRED), str(Grade.EXACT)


@lru_cache(maxsize=1 << 16)
def _code(identity: tuple[int, str, str, str | None]) -> int:
    """Return a 64-bit hash of a span's identity: level, kind, name and, from the operator level down, phase."""
    return int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=8).digest(), "little")


def _identifiers(count: int) -> list[str]:
    # not from `random`: if this runs inside the measured program, its state belongs to that program
    digits = os.urandom(8 * count).hex()
    return [digits[16 * index : 16 * index + 16] for index in range(count)]
