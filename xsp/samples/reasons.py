"""Why a device's clocks were not at their highest: the bits of NVML's mask, and which of them mean held down.

Bits and meanings: NVML API reference, "NvmlClocksEventReasons" (nvml.h: nvmlClocksEventReason…, before driver 535
nvmlClocksThrottleReason…).
"""

from __future__ import annotations

from typing import NamedTuple

MASK = "gpu.clock.reasons"
"""Name of the sample whose value is the mask."""


class Reason(NamedTuple):
    """One bit of the mask."""

    bit: int
    name: str
    held: bool
    """Whether the device was slower than it had been without; an idle device and clocks that were set are not."""
    harm: bool = False
    """Whether something is wrong with cooling or power; a power cap is how devices work at full load."""


REASONS: tuple[Reason, ...] = (
    Reason(0x001, "idle", held=False),
    Reason(0x002, "clocks set by the user", held=False),
    Reason(0x004, "power cap", held=True),
    Reason(0x008, "hardware slowdown", held=True, harm=True),
    Reason(0x010, "sync boost group", held=True),
    Reason(0x020, "too hot, driver", held=True, harm=True),
    Reason(0x040, "too hot, hardware", held=True, harm=True),
    Reason(0x080, "power brake", held=True, harm=True),
    Reason(0x100, "display clocks", held=False),
)

HELD = sum(reason.bit for reason in REASONS if reason.held)
"""The bits that mean held down."""

ALL_BITS = sum(reason.bit for reason in REASONS)

WHILE = f"""
    readings AS (
        SELECT rank, device, value::BIGINT AS mask, time_ns AS from_ns,
               lead(time_ns) OVER (PARTITION BY rank, device ORDER BY time_ns) AS to_ns
        FROM samples WHERE name = '{MASK}'
    ),
    why AS (SELECT * FROM (VALUES {", ".join(f"({r.bit}, '{r.name}', {r.held}, {r.harm})" for r in REASONS)},
                                  ({1 << 62}, 'a reason that this xsp does not know', false, false))
            AS known(bit, reason, held, harm)),
    reasons AS (
        SELECT rank, device, from_ns, to_ns, reason, held, harm
        FROM readings JOIN why ON mask & bit <> 0 OR (bit = {1 << 62} AND mask & {ALL_BITS} <> mask)
        WHERE to_ns IS NOT NULL
    )
"""
"""SQL to put behind WITH: each reason with the time from the reading that saw it to the next one."""
