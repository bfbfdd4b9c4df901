"""Transfers and collectives as specs, by family and size, and the curves that their timings form.

A transfer is a block of one call, `transfer::copy`, `collective::all_reduce`, whose arguments hold the number of bytes
and other conditions; the runtimes `transfers` and `collectives` run it. So it has a key, a status and a row in the
table like any other block. Neither torch nor the table engine is needed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xsp.bench.shapes import MIN_POINTS, Shape, fit
from xsp.bench.spec import CacheState, Spec, Timing, spec_of
from xsp.errors import BenchError, UsageError, nearest
from xsp.graph.blocks import Block, Wires
from xsp.graph.node import Call, Tensor

TRANSFERS = "transfers"
COLLECTIVES = "collectives"
"""Names of the runtimes, and of the corresponding targets of `xsp bench`."""

DIRECTORY = "XSP_TRANSFERS_DIRECTORY"
"""Environment variable that names the folder in which the worker process times storage."""

KIB, MIB = 1 << 10, 1 << 20

ROOM = 4
"""Multiple of a file's bytes that must be free on its disk."""


@dataclass(frozen=True)
class Family:
    """A kind of transfer."""

    name: str
    group: str
    description: str
    """Description in words."""

    most: int = 64 * MIB
    """Bytes of the largest transfer."""

    least: int = 4 * KIB
    traffic: int = 1
    """Memory traffic over bytes: how often they are read or written, counted as in STREAM."""

    threaded: bool = False
    """Whether torch's threads do the work."""

    cold: bool = False
    device: bool = False
    peers: bool = False
    """Whether it needs several devices."""

    nodes: bool = False
    """Whether it needs several NUMA nodes."""

    disk: bool = False
    """Whether it needs a file system that stores its files on a disk instead of in memory."""

    @property
    def in_folder(self) -> bool:
        """Whether it uses a file, so that the kind of file system is one of its conditions."""
        return self.group == STORAGE or self.name == "mapped-file"


MEMORY, PROCESSES, STORAGE, DEVICE = "memory", "processes", "storage", "device"

FAMILIES = {
    family.name: family
    for family in (
        Family("copy", MEMORY, "a tensor is copied", traffic=2, threaded=True),
        Family("read", MEMORY, "a tensor is summed", threaded=True),
        Family("write", MEMORY, "a tensor is filled", threaded=True),
        Family("triad", MEMORY, "a = b + s·c, bytes of one array", traffic=3, threaded=True),
        Family("memcpy", MEMORY, "memmove of the C library", traffic=2),
        Family("strided", MEMORY, "every other row of 256 bytes is copied", traffic=2, threaded=True),
        Family("strided-3d", MEMORY, "every other row of 256 bytes of every other plane", traffic=2, threaded=True),
        Family("copy-near-node", MEMORY, "memmove within a NUMA node, by a core of it", traffic=2, nodes=True),
        Family("copy-far-node", MEMORY, "the same from the furthest node", traffic=2, nodes=True),
        Family("first-touch", MEMORY, "fresh pages are written for the first time"),
        Family("first-touch-huge", MEMORY, "the same with huge pages", least=4 * MIB),
        Family("shared-memory", PROCESSES, "one writes into a memfd, the other reads and answers", traffic=2),
        Family("mapped-file", PROCESSES, "the same with a file that both map", traffic=2),
        Family("pipe", PROCESSES, "a message through a pipe, answered by one byte"),
        Family("unix-socket", PROCESSES, "the same through a UNIX socket"),
        Family("tcp-loopback", PROCESSES, "the same through TCP on loopback"),
        Family("tcp-loopback-duplex", PROCESSES, "both send at once", most=16 * MIB),
        Family("write-buffered", STORAGE, "into the page cache"),
        Family("write-fsync", STORAGE, "until the system reports it as stored", most=16 * MIB, disk=True),
        Family("read-cached", STORAGE, "from the page cache"),
        Family("read-cold", STORAGE, "after its pages are dropped from the cache", cold=True, disk=True),
        Family("read-mapped", STORAGE, "a mapped file, each page is touched"),
        Family("read-direct", STORAGE, "bypassing the page cache", disk=True),
        Family("write-direct", STORAGE, "bypassing the page cache", most=16 * MIB, disk=True),
        Family("host-to-device-pageable", DEVICE, "from pageable memory", device=True),
        Family("host-to-device-pinned", DEVICE, "from pinned memory", device=True),
        Family("device-to-host-pageable", DEVICE, "to pageable memory", device=True),
        Family("device-to-host-pinned", DEVICE, "to pinned memory", device=True),
        Family("both-ways-pinned", DEVICE, "host to device and device to host at once", device=True),
        Family("device-copy", DEVICE, "within a device", traffic=2, device=True),
        Family("device-read", DEVICE, "a tensor on a device is summed", device=True),
        Family("device-write", DEVICE, "a tensor on a device is filled", device=True),
        Family("device-strided", DEVICE, "every other row of 256 bytes is copied", traffic=2, device=True),
        Family("zero-copy", DEVICE, "pinned memory of the host is read by a kernel", device=True),
        Family("managed-demand", DEVICE, "managed pages on the host are read by a kernel", device=True),
        Family("managed-prefetch", DEVICE, "managed pages on the host are prefetched", device=True),
        Family("kernel-launch", DEVICE, "the host launches a kernel that does almost nothing", most=0, device=True),
        Family("graph-launch", DEVICE, "the same by a replay of one captured kernel", most=0, device=True),
        Family("synchronize", DEVICE, "the host waits for an idle device", most=0, device=True),
        Family("peer-copy", DEVICE, "from one device to another", device=True, peers=True),
    )
}

DUPLEX = {
    "tcp-loopback-duplex": "tcp-loopback",
    "both-ways-pinned": "host-to-device-pinned",
    "send-both": "send",
}
"""Both ways at once → one way. The ratio of their rates is 2 if neither disturbs the other, 1 if they share."""

OF_RANKS = {
    family.name: family
    for family in (
        Family("all_reduce", COLLECTIVES, "sum over all ranks, on all ranks"),
        Family("broadcast", COLLECTIVES, "from rank 0 to all"),
        Family("reduce", COLLECTIVES, "sum over all ranks, on rank 0"),
        Family("all_gather", COLLECTIVES, "bytes of the result"),
        Family("reduce_scatter", COLLECTIVES, "bytes of the input"),
        Family("all_to_all", COLLECTIVES, "bytes of the input"),
        Family("barrier", COLLECTIVES, "no data"),
        Family("send", COLLECTIVES, "half of a round trip from rank 0 to rank 1"),
        Family("send-both", COLLECTIVES, "ranks 0 and 1 send at once"),
        Family("together-product", COLLECTIVES, "each rank multiplies matrices of 256 × 256"),
        Family("together-copy", COLLECTIVES, "each rank copies 16 MiB"),
        Family("beside", COLLECTIVES, "each rank multiplies during an all-reduce"),
        Family("after", COLLECTIVES, "an all-reduce after each rank has multiplied; without the products"),
    )
}

PREDICTED = ("all_reduce", "together-product", "together-copy", "beside", "after")
"""Families that predictions of training on this machine need."""

BUS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Rate on the busiest link over bytes by time is this factor times (n - 1)/n, as in nccl-tests; 1 for all others."""

PRODUCTS = {1 * MIB: 8, 8 * MIB: 64, 32 * MIB: 256}
"""For `beside`: bytes of the all-reduce → matrix products that each rank computes during it."""

PRODUCTS_BEFORE = {64 * KIB: 32, 1 * MIB: 32, 8 * MIB: 32, 32 * MIB: 32}
"""For `after`: bytes of the all-reduce → matrix products that each rank computes before it, some milliseconds."""

WITH_PRODUCTS = {"beside": PRODUCTS, "after": PRODUCTS_BEFORE}

COPY_BYTES = 16 * MIB
"""Bytes of `together-copy`."""

ROW = 256
"""Bytes of a row of strided copies; a plane contributes 4 copied rows."""


def sizes(family: Family) -> list[int]:
    """Return the bytes at which a family is timed, 0 if it moves none: steps of 4 first, then those between."""
    if not family.most:
        return [0]
    doubled = [family.least << power for power in range(64) if family.least << power <= family.most]
    coarse = doubled[::2] if len(doubled) % 2 else [*doubled[::2], doubled[-1]]
    return [*coarse, *(size for size in doubled if size not in coarse)]


def spec(op: str, runtime: str, size: int, threads: int = 1, cold: bool = False, **conditions: Any) -> Spec:
    """Return a transfer as a spec.

    Args:
        op: a name of `FAMILIES` or `OF_RANKS`.
        runtime: `TRANSFERS` or `COLLECTIVES`.
        size: bytes.
        threads: number of torch threads.
        cold: whether the caches hold other data.
        conditions: other arguments, as plain values for JSON.
    """
    arguments: tuple[tuple[str, Any], ...] = (("bytes", size), *sorted(conditions.items()))
    wires = Wires((), (), ())
    if size:
        arguments, wires = (*arguments, ("data", Tensor("uint8", (size,)))), Wires((0,), (), ())
    vocabulary = "transfer" if runtime == TRANSFERS else "collective"
    block = Block((Call(f"{vocabulary}::{op}", arguments),), (wires,))
    return Spec(block, state=CacheState.COLD if cold else CacheState.WARM, threads=threads, runtime=runtime)


def of_transfers(names: Sequence[str], threads: Sequence[int], storage: str = "") -> list[Spec]:
    """Return the specs of transfers, a few sizes of each family before all sizes of any.

    Args:
        names: names of families.
        threads: numbers of threads for families whose work torch's threads do; the others have one.
        storage: type of the file system, which is a condition of transfers of files.
    """
    by_family = []
    for name in names:
        family = FAMILIES[name]
        conditions = {"filesystem": storage} if family.in_folder else {}
        for count in threads if family.threaded else (1,):
            by_family.append([spec(name, TRANSFERS, size, count, family.cold, **conditions) for size in sizes(family)])
    return list(_coarse_first(by_family))


def of_collectives(names: Sequence[str], ranks: Sequence[int], threads: int = 1) -> list[Spec]:
    """Return the specs of collectives, those of `PREDICTED` first.

    Collectives that take two ranks are included once for any `ranks`.
    """
    by_family = []
    for name in sorted(names, key=lambda name: name not in PREDICTED):
        for count in ranks:
            if name.startswith("together"):
                for number in dict.fromkeys((1, count)):
                    by_family.append([spec(name, COLLECTIVES, 0, threads, ranks=number)])
            elif name in WITH_PRODUCTS:
                by_family.append(
                    [
                        spec(name, COLLECTIVES, size, threads, ranks=count, products=products)
                        for size, products in WITH_PRODUCTS[name].items()
                    ]
                )
            elif name == "barrier":
                by_family.append([spec(name, COLLECTIVES, 0, threads, ranks=count)])
            else:
                rank_count = 2 if name.startswith("send") else count
                all_sizes = sizes(OF_RANKS[name])
                by_family.append([spec(name, COLLECTIVES, size, threads, ranks=rank_count) for size in all_sizes])
    return list({transfer.key: transfer for transfer in _coarse_first(by_family)}.values())


def _coarse_first(families: Sequence[Sequence[Spec]]) -> Iterator[Spec]:
    """Yield the coarse sizes of all families, then the others."""
    halves = [(specs[: (len(specs) + 2) // 2], specs[(len(specs) + 2) // 2 :]) for specs in families]
    for half in (0, 1):
        for specs in halves:
            yield from specs[half]


def select_families(text: str | None, families: dict[str, Family]) -> list[str]:
    """Return the families in a comma-separated text of families or groups; without a text, all of them.

    Raises:
        UsageError: there is no such family.
    """
    if text is None:
        return list(families)
    selected: list[str] = []
    groups = {family.group for family in families.values()}
    for word in (part.strip() for part in text.split(",")):
        if word not in families and word not in groups:
            names = (*sorted(groups - {COLLECTIVES}), *families)
            raise UsageError(f"--families {word!r}: no such family{nearest(word, names)}; there are {', '.join(names)}")
        selected += [word] if word in families else [name for name, family in families.items() if family.group == word]
    return list(dict.fromkeys(selected))


# --- curves ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferCurve:
    """The timings of one family under equal conditions, by size."""

    family: Family
    threads: int
    ranks: int
    conditions: str
    """Other conditions, such as `ext4`; empty for none."""

    timings: tuple[tuple[int, Timing], ...]
    """Bytes and timing of each size that has a figure, smallest first."""

    holes: tuple[tuple[int, Timing], ...] = ()
    """Bytes and timing of each size without a figure."""

    shape: Shape | None = field(default=None, compare=False)
    """Fitted shape; None if there are fewer sizes than a fit needs."""

    @property
    def name(self) -> str:
        """Name from family, ranks (`× 2` for two threads each), threads and other conditions."""
        ranks = f" {self.ranks} ranks" if self.ranks else ""
        threads = f" {self.threads} threads" if self.family.threaded and self.threads > 1 else ""
        if self.ranks and self.threads > 1:
            threads = f" × {self.threads}"
        return f"{self.family.name}{ranks}{threads}{f' {self.conditions}' if self.conditions else ''}"

    @property
    def bus_factor(self) -> float:
        """Rate on the busiest link over bytes by time."""
        times = BUS.get(self.family.name)
        return 1.0 if times is None else times * (self.ranks - 1) / self.ranks

    @property
    def canary(self) -> float | None:
        """The largest `canary_ratio` of its timings."""
        return max((timing.canary_ratio for _, timing in self.timings if timing.canary_ratio), default=None)

    def rate(self, size: int, timing: Timing) -> float:
        """Return the rate in bytes per second."""
        return size / (timing.trimmed_ns or float("inf")) * 1e9

    @property
    def best(self) -> tuple[int, float] | None:
        """The size with the highest rate, and that rate in bytes per second."""
        rates = [(self.rate(size, timing), size) for size, timing in self.timings if size]
        return (max(rates)[1], max(rates)[0]) if rates else None


def curves(timings: Iterable[Timing], keep: Callable[[Spec], bool] = lambda spec: True) -> list[TransferCurve]:
    """Return the fitted curves of timings of transfers and collectives; other timings are left out."""
    grouped: dict[tuple[str, int, int, str], list[tuple[int, Timing]]] = {}
    for timing in timings:
        if timing.runtime not in (TRANSFERS, COLLECTIVES):
            continue
        transfer = spec_of(timing)
        if not keep(transfer):
            continue
        name, conditions = arguments(transfer)
        if name in FAMILIES or name in OF_RANKS:
            key = name, timing.threads, int(conditions.get("ranks", 0)), str(conditions.get("filesystem", ""))
            grouped.setdefault(key, []).append((int(conditions["bytes"]), timing))
    order = {name: position for position, name in enumerate((*FAMILIES, *OF_RANKS))}
    return [_curve(*key, grouped[key]) for key in sorted(grouped, key=lambda key: (order[key[0]], key[2], key[1]))]


def arguments(transfer: Spec) -> tuple[str, dict[str, Any]]:
    """Return the family of a spec and its arguments.

    Raises:
        BenchError: the spec is no transfer.
    """
    call = transfer.block.calls[0] if transfer.block.calls else None
    if call is None or not call.op.startswith(("transfer::", "collective::")):
        raise BenchError(f"{transfer.op} is not a transfer")
    return call.op.partition("::")[2], dict(call.arguments)


def _curve(name: str, threads: int, ranks: int, conditions: str, timings: list[tuple[int, Timing]]) -> TransferCurve:
    family = FAMILIES.get(name) or OF_RANKS[name]
    ordered = sorted(timings, key=lambda pair: pair[0])
    timed = tuple((size, timing) for size, timing in ordered if timing.is_timed)
    holes = tuple((size, timing) for size, timing in ordered if not timing.is_timed)
    shape = None
    if len(timed) >= MIN_POINTS and all(size for size, _ in timed) and name not in WITH_PRODUCTS:
        halves = [(timing.half_ns or 0.0) / (timing.trimmed_ns or 1.0) for _, timing in timed]
        shape = fit(
            [size for size, _ in timed], [(timing.trimmed_ns or 0.0) / 1e9 for _, timing in timed],
            statistics.median(halves),
        )  # fmt: skip
    return TransferCurve(family, threads, ranks, conditions, timed, holes, shape)


@dataclass(frozen=True)
class Ratio:
    """The ratio of two curves, or of two pieces of a curve, with its interval."""

    name: str
    value: float
    low: float
    high: float
    description: str


def ratios(fitted_curves: Sequence[TransferCurve]) -> list[Ratio]:
    """Return duplex ratios (of rates), and locality ratios (of seconds per byte).

    Locality ratios compare the last piece of a curve with its first, and the furthest NUMA node with the local one.
    """
    shaped = {
        (curve.family.name, curve.ranks, curve.threads, curve.conditions): curve
        for curve in fitted_curves
        if curve.shape is not None
    }
    results = []
    for (name, ranks, threads, how), curve in shaped.items():
        assert curve.shape is not None
        one_way = shaped.get((DUPLEX.get(name, ""), ranks, threads, how))
        if one_way is not None and one_way.shape is not None and curve.shape.beta.value:
            single, duplex = one_way.shape.beta, curve.shape.beta
            results.append(
                Ratio(f"duplex {one_way.name}", 2 * single.value / duplex.value, 2 * single.low / duplex.high,
                      2 * single.high / (duplex.low or duplex.value), "rate of both directions over that of one")
            )  # fmt: skip
        near_node = shaped.get(("copy-near-node", ranks, threads, how)) if name == "copy-far-node" else None
        if near_node is not None and near_node.shape is not None and near_node.shape.beta.value:
            local, remote = near_node.shape.beta, curve.shape.beta
            results.append(
                Ratio("locality of NUMA nodes", remote.value / local.value, remote.low / local.high,
                      remote.high / (local.low or local.value),
                      "seconds per byte from the furthest node over those from its own")
            )  # fmt: skip
        if curve.family.group == MEMORY and len(curve.shape.pieces) > 1:
            inner, outer = curve.shape.pieces[0].per_byte, curve.shape.beta
            if inner.value:
                results.append(
                    Ratio(f"locality {curve.name}", outer.value / inner.value, outer.low / inner.high,
                          outer.high / (inner.low or inner.value),
                          "seconds per byte beyond the caches over those within")
                )  # fmt: skip
    return results


def crowding_factor(measured_curves: Iterable[TransferCurve], name: str, ranks: int, threads: int) -> float | None:
    """Return how much longer a rank computes if others do so too, by a family `together-…`; None if not timed.

    Args:
        measured_curves: curves.
        name: name of the family.
        ranks: number of ranks.
        threads: number of threads of each rank.
    """
    matching = [
        curve for curve in measured_curves if (curve.family.name, curve.threads) == (name, threads) and curve.timings
    ]
    by_ranks = {curve.ranks: curve.timings[0][1].trimmed_ns for curve in matching}
    single_ns, crowded_ns = by_ranks.get(1), by_ranks.get(ranks)
    return None if not single_ns or not crowded_ns else crowded_ns / single_ns


class Slowdown(NamedTuple):
    """The factor by which work takes longer if all ranks do it at once."""

    ranks: int
    threads: int
    what: str
    factor: float


def slowdowns(measured_curves: Sequence[TransferCurve]) -> list[Slowdown]:
    """Return the slowdown of ranks that compute at the same time, by threads, ranks and kind of work."""
    results = []
    for name in ("together-product", "together-copy"):
        keys = {
            (curve.threads, curve.ranks) for curve in measured_curves if curve.family.name == name and curve.ranks > 1
        }
        for threads, ranks in sorted(keys):
            factor = crowding_factor(measured_curves, name, ranks, threads)
            if factor is not None:
                results.append(Slowdown(ranks, threads, name.removeprefix("together-"), factor))
    return results
