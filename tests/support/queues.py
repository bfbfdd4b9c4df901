"""Queues whose truth is known, for tests of loads."""

from __future__ import annotations

import math

SERVICE_MS = 1.0


def md1_waiting_within(rate: float, whole_ms: int) -> float:
    """Return P(W ≤ t) of M/D/1 for t of whole service times: (1 − ρ)·Σ (ρ(k − t))^k / k! · e^(−ρ(k − t))."""
    load = rate * SERVICE_MS / 1000
    terms = [
        (load * (k - whole_ms)) ** k / math.factorial(k) * math.exp(-load * (k - whole_ms)) for k in range(whole_ms + 1)
    ]
    return (1 - load) * math.fsum(terms)


def md1_rate(limit_ms: int, share: float) -> float:
    low, high = 1.0, 1000 / SERVICE_MS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if md1_waiting_within(middle, limit_ms - 1) > share else (low, middle)
    return low
