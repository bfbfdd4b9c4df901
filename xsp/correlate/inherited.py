"""Values that spans derive from one another: steps, layers, phases and keys from ancestors, sums from descendants.

Spans are sorted by depth, so that all spans of one depth take the values of their parents at once.
"""

from __future__ import annotations

from hashlib import md5
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from xsp.correlate.arrays import CONTAINMENT, RULES, SEQUENCE, Array, Parents, Spans
from xsp.correlate.parents import depths
from xsp.schema import WEAK_RULES, Level

MAX_BYTES = 2**63 - 1
"""Maximum number of bytes that the table can hold: the largest 64-bit integer."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: an odd number; multiplying by it spreads values that differ little."""

_WEAK = np.array([rule in WEAK_RULES for rule in RULES])


class StepTimes(NamedTuple):
    """The steps of a trace, in the order of their starts, in nanoseconds."""

    starts: Array
    ends: Array

    def at(self, times: Array) -> Array:
        """Return for each time the number of the step that contains it; -1 if there is none."""
        if not len(self.starts):
            return np.full(len(times), -1, np.int64)
        step = np.searchsorted(self.starts, times, side="right") - 1
        return np.where((step >= 0) & (times < self.ends[step]), step, -1)


class Inherited(NamedTuple):
    """Derived values, one per span; -1 means none."""

    order: Array
    """Indices of the spans, parents before children, siblings as they were sorted."""

    step: Array
    layer: Array
    """Index of the layer: the span itself, or the innermost layer above it."""

    layers: Array
    """Number of layers above the span, plus one if it is a layer itself."""

    layer_index: Array
    """For a layer: its position among the layers of its step."""

    phase: Array
    key: Array
    """Place in the structure of the step, as a 64-bit hash."""

    is_weak: Array
    """True if the evidence for the layer is weak: see `xsp.schema.WEAK_RULES`."""

    allocated: Array
    """Bytes that were allocated inside the span; -1 if they exceed the maximum of the table."""

    inner_figure_bits: Array
    """Bit mask of the sorts of figures that are known for a descendant."""


class _Depths(NamedTuple):
    """Spans sorted by depth."""

    order: Array
    edges: list[int]
    """Where the spans of each depth begin in that order, and the end."""

    @classmethod
    def of(cls, parent: Array) -> _Depths:
        depth = depths(parent)
        counts = np.bincount(depth) if len(depth) else depth
        narrow = depth.astype(np.int16 if len(counts) < 1 << 15 else np.int32)  # 16 bits: a radix sort
        return cls(np.argsort(narrow, kind="stable"), [0, *np.cumsum(counts).tolist()])


def inherit(spans: Spans, parents: Parents, codes: Array, steps: StepTimes | None = None) -> Inherited:
    """Return the values that spans derive from their ancestors and descendants.

    Args:
        spans: sorted by `outer_first`.
        parents: their parents, without cycles.
        codes: 64-bit hash of a span's identity, indexed by `Spans.identity`; equal for spans that are alike.
        steps: steps of the trace; None if all spans belong to one step.
    """
    by_depth = _Depths.of(parents.parent)
    order = by_depth.order
    is_layer = spans.level == Level.LAYER
    indices = np.arange(len(spans))
    step = np.zeros(len(spans), np.int64) if steps is None else steps.at(spans.start)
    layer = np.where(is_layer, indices, -1)
    layers = is_layer.astype(np.int64)
    phase = spans.phase.copy()
    weak = _WEAK[parents.rule] & ~is_layer
    for low, high in pairwise(by_depth.edges[1:]):
        rows = order[low:high]
        parent = parents.parent[rows]
        step[rows] = step[parent]
        layer[rows] = np.where(is_layer[rows], rows, layer[parent])
        layers[rows] += layers[parent]
        phase[rows] = np.where(phase[rows] == 0, phase[parent], phase[rows])
        weak[rows] |= weak[parent] & ~is_layer[rows]
    allocated, inner_bits = _descendant_sums(spans, parents)
    return Inherited(
        order, step, layer, layers, _layer_index(is_layer, step), phase, _keys(spans, parents, codes, step, by_depth),
        weak, allocated, inner_bits,
    )  # fmt: skip


def _layer_index(is_layer: Array, step: Array) -> Array:
    """Number the layers of each step."""
    index = np.full(len(step), -1, np.int64)
    layers = np.flatnonzero(is_layer)
    if layers.size:
        index[layers] = _ordinals(step[layers]) - 1
    return index


def _ordinals(group: Array) -> Array:
    """Return the position of each value among the values equal to it, from 1."""
    order, ordered = _stable_order(group)
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))[: len(group)]
    ordinals = np.empty(len(group), np.int64)
    ordinals[order] = np.arange(1, len(group) + 1) - np.repeat(first, np.diff(np.append(first, len(group))))
    return ordinals


def _stable_order(values: Array) -> tuple[Array, Array]:
    """Return the stable order of values, and the values in that order.

    Where value and position fit into one integer together, sorting these takes a fifth of the time of a stable sort.
    """
    count = len(values)
    if count and 0 <= int(values.min()) <= int(values.max()) < MAX_BYTES // count:
        ordered, order = np.divmod(np.sort(values * count + np.arange(count)), count)
        return order, ordered
    order = np.argsort(values, kind="stable")
    return order, values[order]


def _keys(spans: Spans, parents: Parents, codes: Array, step: Array, by_depth: _Depths) -> Array:
    """Return the keys of spans: their places in the structure of their steps.

    A key is made of the parent's key, the span's identity, and its number among siblings of that identity. So it is the
    same in every step with the same structure, whatever else was recorded. Spans that a sequence number placed under a
    layer are numbered separately. The key of a user block builds on the key of the user block around it, so it does not
    depend on a module recorded between them. Stored runs hold keys, so this computation must not change.
    """
    count, parent = len(spans), parents.parent
    if parents.outer_block is not None and parents.outer_block.max() >= 0:
        parent = np.where(parents.outer_block >= 0, parents.outer_block, parent)
        parent = np.where(depths(parent) >= count, -1, parent)  # user blocks whose named parents form a cycle
        by_depth = _Depths.of(parent)
    link = np.where(parents.rule == SEQUENCE, SEQUENCE, np.where(parent >= 0, CONTAINMENT, 0))
    order = by_depth.order
    group = (np.where(parent >= 0, parent, count + 1 + step) * 3 + link) * max(len(codes), 1) + spans.identity
    ordinal = np.empty(count, np.int64)
    ordinal[order] = _ordinals(group[order])
    numbered = (ordinal << 2 | link).astype(np.uint64)
    is_device_work = (
        np.zeros(count, bool) if spans.launches is None else spans.launches.seeks_launch & (spans.level != Level.LAYER)
    )
    code, key = codes[spans.identity], np.zeros(count, np.uint64)
    for low, high in pairwise(by_depth.edges):
        rows = order[low:high]
        outer = key[parent[rows]] if low else key[rows]
        mixed = (outer ^ code[rows]) * _MIX + numbered[rows]
        key[rows] = mixed ^ (mixed >> np.uint64(32))
        if (is_device := is_device_work[rows]).any():
            device_rows = rows[is_device]
            key[device_rows] = _device_keys(outer[is_device], code[device_rows], ordinal[device_rows])
    return key


def _device_keys(parent_key: Array, code: Array, ordinal: Array) -> Array:
    """Return the keys of device work: MD5 of the parent's key, the identity and the number."""
    identities = list(zip(parent_key.tolist(), code.tolist(), ordinal.tolist(), strict=True))
    keys = {
        identity: md5(b"%d/%d/%d" % identity, usedforsecurity=False).digest()[8:] for identity in {*identities}
    }  # steps repeat
    return np.frombuffer(b"".join(map(keys.__getitem__, identities)), "<u8")


def _descendant_sums(spans: Spans, parents: Parents) -> tuple[Array, Array]:
    """Return the bytes allocated inside each span on its thread, and the bit mask of figures known for descendants."""
    allocated, inner_bits = np.zeros(len(spans), np.int64), np.zeros(len(spans), np.int64)
    if spans.allocations is not None and parents.enclosing is not None:
        approximate = np.zeros(len(spans))
        rows = np.flatnonzero(spans.allocations.size > 0)
        outer = parents.enclosing[rows]
        while len(outer := outer[keep := outer >= 0]):
            rows = rows[keep]
            contains = spans.level[outer] <= spans.max_outer_level[rows]
            size = spans.allocations.size[rows[contains]]
            np.add.at(allocated, outer[contains], size)
            np.add.at(approximate, outer[contains], size.astype(float))
            outer = parents.enclosing[outer]
        allocated[(approximate > MAX_BYTES) | (allocated < 0)] = -1
    rows = np.flatnonzero(spans.figure_bits > 0)
    bits, outer = spans.figure_bits[rows].astype(np.int64), parents.parent[rows]
    while len(outer := outer[keep := outer >= 0]):
        bits = bits[keep]
        changed = (inner_bits[outer] & bits) != bits
        outer, bits = outer[changed], bits[changed]
        np.bitwise_or.at(inner_bits, outer, bits)
        outer = parents.parent[outer]
    return allocated, inner_bits
