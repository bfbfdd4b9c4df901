"""The formulas of XSP, section III-D, as SQL over whichever figures: of a kernel, of a sum, of a published table.

Times are nanoseconds, so that operations over time are GFLOP/s and bytes over time GB/s.
"""

from __future__ import annotations

from xsp.device.ceilings import PRECISIONS, Ceiling


def intensity(flops: str, read_bytes: str, write_bytes: str) -> str:
    """Return operations per byte."""
    return f"({flops} / nullif({read_bytes} + {write_bytes}, 0)::DOUBLE)"


def throughput(amount: str, ns: str) -> str:
    """Return operations or bytes per nanosecond, which are GFLOP/s and GB/s."""
    return f"({amount} / nullif({ns}, 0)::DOUBLE)"


def memory_bound(flop_per_byte: str, ideal: str) -> str:
    """Return whether memory bounds: the intensity is below the ideal one, the peak over the bandwidth."""
    return f"({flop_per_byte} < {ideal})"


def attainable(flop_per_byte: str, peak_gflop_per_s: str, gbyte_per_s: str) -> str:
    """Return the height of the roof at an intensity, in GFLOP/s; null where the intensity is."""
    return f"CASE WHEN {flop_per_byte} IS NOT NULL THEN least({peak_gflop_per_s}, {flop_per_byte} * {gbyte_per_s}) END"


def occupancy(of_each: str, ns: str) -> str:
    """Return the occupancy of several kernels: the mean by their time, over those whose occupancy is known."""
    return f"(sum({ns} * {of_each}) / nullif(sum({ns}) FILTER ({of_each} IS NOT NULL), 0))"


def share(part: str, whole: str) -> str:
    """Return a part of a whole in percent."""
    return f"(100.0 * {part} / nullif({whole}, 0))"


def roofs(ceiling: Ceiling | None) -> str:
    """Return the table `roofs` to put behind WITH: peak and ideal intensity by precision; empty without a ceiling."""
    kinds = sorted({*ceiling.precisions(), *PRECISIONS.values()}) if ceiling is not None else []
    rows = [
        f"('{kind}', {_or_null(ceiling.peak(kind))} / 1e9, {ceiling.bytes_per_s} / 1e9, "
        f"{_or_null(ceiling.ideal_intensity(kind))})"
        for kind in kinds
        if ceiling is not None
    ]
    made = f"VALUES {', '.join(rows)}" if rows else "SELECT NULL, NULL::DOUBLE, NULL::DOUBLE, NULL::DOUBLE WHERE false"
    return f"roofs(precision, peak_gflop_per_s, bandwidth_gbyte_per_s, ideal) AS ({made})"


def _or_null(value: float | None) -> str:
    return "NULL" if value is None else repr(value)
