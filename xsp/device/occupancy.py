"""Estimated occupancy of a kernel from its launch, for kernels without a counter.

A multiprocessor holds as many blocks as its warps, registers and shared memory allow, as in CUDA's own calculation
(`cuda_occupancy.h` of the CUDA toolkit 13): registers are allocated to warps in portions of 256, from one of the parts
of the multiprocessor's register file; shared memory is allocated to blocks in portions of 128 or 256 bytes, and the
driver reserves some of it. The limits by compute capability are those of the CUDA Programming Guide, "Technical
Specifications per Compute Capability", and of `cuda::arch_traits` in NVIDIA's CCCL. The split between shared memory
and cache is assumed to give this kernel as much shared memory as it needs.

A grid that is too small to fill the device is a further limit. The estimate ignores how evenly blocks end, and other
kernels that run meanwhile: a measured occupancy is lower.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp.run import Device, Run
from xsp.schema import Kind, Level

if TYPE_CHECKING:
    import duckdb

WARP = 32
REGISTER_PORTION = 256
ESTIMATE = "estimate"

_KIB = 1024


class OccupancyLimits(NamedTuple):
    """Limits of one multiprocessor."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_portion: int
    """Granularity of the shared memory of a block, in bytes."""

    reserved_bytes: int
    """Bytes of shared memory per block that the driver reserves."""

    registers: int = 64 * _KIB
    parts: int = 4
    """Number of parts of the register file; the registers of a warp are all in one part."""


def _before_8(warps: int, blocks: int, shared_kib: int, parts: int = 4) -> OccupancyLimits:
    return OccupancyLimits(warps, blocks, shared_kib * _KIB, 256, 0, parts=parts)


def _from_8(warps: int, blocks: int, shared_kib: int) -> OccupancyLimits:
    return OccupancyLimits(warps, blocks, shared_kib * _KIB, 128, _KIB)


LIMITS: Mapping[str, OccupancyLimits] = {
    "5.0": _before_8(64, 32, 64),
    "5.2": _before_8(64, 32, 96),
    "5.3": _before_8(64, 32, 64),
    "6.0": _before_8(64, 32, 64, parts=2),
    "6.1": _before_8(64, 32, 96),
    "6.2": _before_8(64, 32, 64),
    "7.0": _before_8(64, 32, 96),
    "7.2": _before_8(64, 32, 96),
    "7.5": _before_8(32, 16, 64),
    "8.0": _from_8(64, 32, 164),
    "8.6": _from_8(48, 16, 100),
    "8.7": _from_8(48, 16, 164),
    "8.9": _from_8(48, 24, 100),
    "9.0": _from_8(64, 32, 228),
    "10.0": _from_8(64, 32, 228),
    "10.3": _from_8(64, 32, 228),
    "11.0": _from_8(48, 24, 228),
    "12.0": _from_8(48, 24, 100),
    "12.1": _from_8(48, 24, 100),
}
"""Compute capability → limits. For other compute capabilities there is no estimate."""


def estimate(
    compute: str, threads: int, registers: int, shared_bytes: int, blocks: int | None = None, sms: int | None = None
) -> float | None:
    """Return the warps that a kernel can have active, as a share of those that a multiprocessor can hold.

    Args:
        compute: compute capability of the device, `9.0` for instance.
        threads: threads per block.
        registers: registers per thread.
        shared_bytes: shared memory per block, static and dynamic.
        blocks: blocks in the grid.
        sms: multiprocessors of the device; if this or the grid is unknown, the size of the grid is no limit.

    Returns:
        0 to 1; None for a device without known limits, or a launch that is impossible on such a device.
    """
    limits = LIMITS.get(compute)
    if limits is None or threads < 1 or registers < 0 or shared_bytes < 0:
        return None
    warps = ceil(threads / WARP)
    resident: float = resident_blocks(limits, warps, registers, shared_bytes)
    if blocks is not None and sms:
        resident = min(resident, blocks / sms)
    return resident * warps / limits.warps if resident else None


def resident_blocks(limits: OccupancyLimits, warps: int, registers: int, shared_bytes: int) -> int:
    """Return how many blocks of `warps` warps a multiprocessor holds at once; 0 if not even one fits."""
    counts = [limits.blocks, limits.warps // warps]
    if registers:
        per_warp = _portions(registers * WARP, REGISTER_PORTION)
        counts.append(limits.registers // limits.parts // per_warp * limits.parts // warps)
    shared = _portions(shared_bytes + limits.reserved_bytes, limits.shared_portion)
    if shared:
        counts.append(limits.shared_bytes // shared)
    return min(counts)


def fill(con: duckdb.DuckDBPyConnection, run: Run) -> None:
    """Estimate the occupancy of kernels of the merged step without one, if launch and device are known.

    An existing estimate of 0 is replaced, since the kernel ran: PyTorch writes 0 for blocks with more than 48 KiB of
    shared memory.

    Args:
        con: connection with the table `merged`.
        run: the run, with the `device_properties` of its machine.
    """
    devices = run.machine.device_properties
    if not devices:
        return
    kernels = (
        f"level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}' AND (merged.occupancy IS NULL "
        f"OR merged.occupancy = 0 AND occupancy_source = '{ESTIMATE}')"
    )
    launches = con.execute(
        f"SELECT DISTINCT device, attributes FROM merged WHERE {kernels} AND attributes IS NOT NULL"
    ).fetchall()
    estimates = list(_estimates(launches, devices))
    if estimates:
        con.execute(
            f"""
            UPDATE merged SET occupancy = estimates.occupancy, occupancy_source = '{ESTIMATE}'
            FROM (SELECT unnest(?::INTEGER[]) AS device, unnest(?::VARCHAR[]) AS attributes,
                         unnest(?::DOUBLE[]) AS occupancy) estimates
            WHERE {kernels} AND merged.device = estimates.device AND merged.attributes = estimates.attributes
            """,
            [list(column) for column in zip(*estimates, strict=True)],
        )


def _estimates(
    launches: Iterable[tuple[int | None, str]], devices: Sequence[Device]
) -> Iterator[tuple[int, str, float]]:
    for device, attributes in launches:
        if device is None or not 0 <= device < len(devices):
            continue
        try:
            value = _launch_estimate(json.loads(attributes), devices[device])
        except (ValueError, RecursionError):  # attributes from a file of another tool
            continue
        if value is not None:
            yield device, attributes, value


def _launch_estimate(launch: Any, device: Device) -> float | None:
    """Return the estimate for one launch, or None if its attributes are not sufficient."""
    if not isinstance(launch, dict) or not _are_sizes(launch.get("block")):
        return None
    registers, shared = launch.get("registers"), launch.get("shared_bytes", 0)
    if not isinstance(registers, int) or not isinstance(shared, int):
        return None
    return estimate(
        compute=str(device.compute),
        threads=prod(launch["block"]),
        registers=registers,
        shared_bytes=shared,
        blocks=prod(launch["grid"]) if _are_sizes(launch.get("grid")) else None,
        sms=device.sms,
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(size) is int and size > 0 for size in value)


def _portions(amount: int, portion: int) -> int:
    """Return an amount, rounded up to whole portions."""
    return -(-amount // portion) * portion
