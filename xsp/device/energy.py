"""The energy that a device uses per call of a function, from the device's own counter."""

from __future__ import annotations

import time
from collections.abc import Callable

from xsp.device.contract import Device

POLL_NS = 5_000_000
"""Time between two readings of the counter: long compared with a reading, short compared with its period."""

LEAST_NS = 500_000_000
MOST_NS = 2_000_000_000
"""Longest time without an update, after which the counter counts as one that does not move."""

LEAST_UPDATES = 5
MOST_CALLS = 1_000
"""Most calls between two readings."""

MOST_CALL_NS = 1_000_000_000
"""Longest call whose energy is measured: longer ones would need most of a minute."""


def joules_per_call(device: Device, repeat: Callable[[int], object]) -> float | None:
    """Return the joules that a device uses per call, idle time between calls included; None without a counter.

    The counter is an integral, and updated far less often than a call ends (on an H200 every 100 ms). So calls are
    counted from one update to another, at least `LEAST_NS` and `LEAST_UPDATES` later. The first period is left out: the
    device's power still rises. Calls of more than `MOST_CALL_NS` are not measured.

    Args:
        device: the device.
        repeat: makes a number of calls, and waits for them.
    """
    if device.energy_joules() is None:
        return None
    begin = device.host_ns()
    repeat(1)
    call_ns = max(1, device.host_ns() - begin)
    if call_ns > MOST_CALL_NS:
        return None
    calls = min(MOST_CALLS, max(1, round(POLL_NS / call_ns)))
    first = _next_update(device, repeat, calls) and _next_update(device, repeat, calls)
    if first is None:
        return None
    start_joules, start_ns, counted, updates = first[0], time.perf_counter_ns(), 0, 0
    while updates < LEAST_UPDATES or time.perf_counter_ns() - start_ns < LEAST_NS:
        update = _next_update(device, repeat, calls)
        if update is None:
            return None
        joules, made = update
        counted, updates = counted + made, updates + 1
    return (joules - start_joules) / counted


def _next_update(device: Device, repeat: Callable[[int], object], calls: int) -> tuple[float, int] | None:
    """Make calls until the counter changes; return its value and the number of calls, None if it does not change."""
    before, begin, made = device.energy_joules(), time.perf_counter_ns(), 0
    while time.perf_counter_ns() - begin < MOST_NS:
        repeat(calls)
        made += calls
        now = device.energy_joules()
        if now is None or before is None:
            return None
        if now != before:
            return now, made
    return None
