"""Bytes that a step of a language model must read: weights in use, those of the expected experts, and the cache.

If each token chooses k of E equally likely experts, n tokens are expected to need E·(1 − (1 − k/E)^n) different ones.
With a skew s the i-th expert is chosen in proportion to i^−s.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from xsp.bound.ceiling import PRECISIONS
from xsp.device.ceilings import Ceiling
from xsp.graph import work
from xsp.graph.node import Graph, Role

MOST_SEQUENCES = 1 << 20

WEIGHTS = (Role.WEIGHT, Role.BUFFER)


@dataclass(frozen=True)
class Stack:
    """Weights of several experts in one tensor."""

    experts: int
    per_token: float
    """Experts chosen by each token."""

    bytes: int


@dataclass(frozen=True)
class Active:
    """Data that a step reads and that outlives the step: weights and cache."""

    dense: int
    """Bytes of weights that every token needs; of a table, only the rows that are looked up."""

    stacks: tuple[Stack, ...]
    state: int
    """Bytes of the cache."""

    unknown: int
    """Number of reads of unknown size, which no other field includes."""

    def weights(self, tokens: float, skew: float = 0.0) -> float:
        """Return the bytes of the weights that a number of tokens is expected to need."""
        routed = (
            stack.bytes * distinct(stack.experts, stack.per_token, tokens, skew) / stack.experts
            for stack in self.stacks
        )
        return self.dense + math.fsum(routed)

    @property
    def all_weights(self) -> int:
        """Bytes of all weights, including those of experts that are not chosen."""
        return self.dense + sum(stack.bytes for stack in self.stacks)


def distinct(experts: int, per_token: float, tokens: float, skew: float = 0.0) -> float:
    """Return the expected number of different experts that tokens need.

    Args:
        experts: number of experts.
        per_token: number of different experts that each token chooses.
        tokens: number of routed tokens.
        skew: 0 if all experts are equally likely; else the exponent of Zipf's law.
    """
    if per_token >= experts:
        return float(experts) if tokens > 0 else 0.0
    return math.fsum(1 - (1 - share) ** tokens for share in _shares(experts, per_token, skew))


def _shares(experts: int, per_token: float, skew: float) -> list[float]:
    """Return the probability of each expert to be chosen by a token; each is at most 1, their sum is `per_token`."""
    certain = 0
    while True:  # an expert with a share above 1 is always chosen; the others share the rest
        # relative to the largest of them, which is 1: with a large skew all of them would underflow to 0
        weights = [((rank + 1) / (certain + 1)) ** -skew for rank in range(certain, experts)]
        scale = (per_token - certain) / math.fsum(weights)
        if scale <= 1 + 1e-12:
            return [1.0] * certain + [min(1.0, weight * scale) for weight in weights]
        certain += 1


def active(graph: Graph, tokens: int) -> Active:
    """Return the weights and the cache that a step reads.

    Args:
        graph: graph of prefill or decode.
        tokens: tokens that the step computes in all sequences together.
    """
    read_bytes: dict[int, int] = defaultdict(int)
    storage_bytes: dict[int, int] = {}
    state: dict[int, int] = {}
    stacks: dict[int, Stack] = {}
    unknown = 0
    for node in graph.computing:
        for index, (tensor, number) in enumerate(zip(node.call.inputs, node.reads, strict=False)):
            value = graph.values[number]
            if value.role not in WEIGHTS and value.role is not Role.STATE:
                continue
            size = tensor.bytes
            if node.call.op in work.LOOK_UPS and index == 0 and node.call.outputs:
                size = node.call.outputs[0].bytes
            if size is None:
                unknown += 1
            elif value.role is Role.STATE:
                state[value.storage] = max(state.get(value.storage, 0), size)
            elif node.call.op in work.ROUTED and index == 1 and tensor.shape is not None and node.call.inputs[0].shape:
                rows = node.call.inputs[0].shape[0]
                stacks[value.storage] = Stack(tensor.shape[0], min(rows / tokens, tensor.shape[0]), size)
            else:
                read_bytes[value.storage] += size
                storage_bytes[value.storage] = value.bytes if value.bytes is not None else read_bytes[value.storage]
    dense = sum(min(size, storage_bytes[storage]) for storage, size in read_bytes.items())
    return Active(dense, tuple(stacks.values()), sum(state.values()), unknown)


def least_ns(
    active: Active, flops: work.Total, tokens: int, graph: Graph, ceiling: Ceiling | str, skew: float = 0.0
) -> float | None:
    """Return the minimum time of a step: the longer of its bytes at the bandwidth and its FLOPs at the peak rate.

    Args:
        active: weights and cache that the step reads.
        flops: FLOPs of the step; their known part counts, so the time stays a minimum.
        tokens: tokens that the step computes in all sequences together.
        graph: graph of the step, for its element type.
        ceiling: ceilings of the device, or the reason why they are unknown.
        skew: see `distinct`.

    Returns:
        Nanoseconds; None if a part is unknown.
    """
    peak = None if isinstance(ceiling, str) else _peak(graph, ceiling)
    if isinstance(ceiling, str) or peak is None or active.unknown:
        return None
    traffic = active.weights(tokens, skew) + active.state
    return 1e9 * max(traffic / ceiling.bandwidth(round(traffic)), (flops.known or 0) / peak)


def _peak(graph: Graph, ceiling: Ceiling) -> float | None:
    precision = PRECISIONS.get(str(graph.settings.get("dtype")))
    return None if precision is None else ceiling.peak(precision)


def compute_bound(
    active: Active, flops: work.Total, batch: int, graph: Graph, ceiling: Ceiling, skew: float = 0.0
) -> int | None:
    """Return the smallest number of sequences with which a decoding step takes as long to compute as to read.

    Weights are read once for all sequences, a cache for each. None if there is no such number, because reading the
    cache of a sequence takes longer than computing the sequence, or if a part is unknown.
    """
    peak = _peak(graph, ceiling)
    if peak is None or flops.known is None or flops.unknown or active.unknown:
        return None

    step_flops = flops.known

    def is_compute_bound(sequences: int) -> bool:
        traffic = active.weights(sequences, skew) + sequences * active.state / batch
        return sequences * step_flops / batch / peak >= traffic / ceiling.bytes_per_s

    high = 1
    while not is_compute_bound(high):
        high *= 2
        if high > MOST_SEQUENCES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high
