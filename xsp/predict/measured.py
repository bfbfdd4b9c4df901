"""The link between ranks on this machine, from the table of timings that `xsp bench collectives` measured.

Collectives take the time of their curves for exactly that number of ranks. Ranks on shared cores compute more slowly,
copy gradients into buckets and out of them, and lose cores to concurrent collectives; each of these was timed too, and
is part of the link. Other numbers of ranks raise an error: on other machines they would have other cores and a network.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xsp.bench import transfers
from xsp.bench.shapes import Shape
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, Curve
from xsp.errors import UsageError
from xsp.predict.collectives import Link

NAME = "measured"


@dataclass(frozen=True)
class Sharing:
    """Slowdown of ranks that share cores."""

    computing: float
    """Time of matrix products if all ranks compute at once, relative to one rank."""

    copying: float
    """Time of memory copies if all ranks copy at once, relative to one rank."""

    copy_per_byte: float
    """Seconds of a rank per copied byte while the other ranks copy too."""

    lost: float
    """Seconds that each second of computing beside a collective costs both of them; 0 to 1.

    Alone, computing takes C and the collective R; together they take max(C, R) + lost · min(C, R): 0 if neither
    disturbs the other, 1 if they run one after the other.
    """


@dataclass(frozen=True)
class Measured:
    """Curves of collectives, and the slowdown of ranks that share cores, by number of ranks."""

    shapes: Mapping[tuple[str, int], Shape]
    sharing: Mapping[int, Sharing]
    alpha: float
    beta: float
    """Latency and seconds per byte of the measured link: the ratio of another link's to these scales the curves."""

    cores: int | None = None
    threads: int = 1
    """Threads of each rank in the run."""

    timed_threads: int = 1
    """Threads of each rank when the curves were timed."""

    other_cpu: str | None = None
    """The processor of the run, if it differs from that of this machine."""

    def seconds(self, what: str, over: Link, ranks: int, size: float) -> float:
        """Return the seconds of a collective of `size` bytes.

        Raises:
            UsageError: the collective was not timed with this number of ranks.
        """
        if ranks == 1:
            return 0.0
        shape = self.shapes.get((what, ranks))
        if shape is None:
            known = sorted({count for name, count in self.shapes if name == what})
            there = f"there are figures of {', '.join(map(str, known))} ranks" if known else "there are none"
            raise UsageError(
                f"{what} of {ranks} ranks was not measured here ({there}): measure it, `xsp bench collectives --ranks "
                f"{ranks}`; for ranks on several machines give their link"
            )
        piece = shape.piece(size)
        latency = over.alpha / self.alpha if self.alpha else 1.0
        rate = over.beta / self.beta if self.beta else 1.0
        return max(0.0, piece.start.value * latency + piece.per_byte.value * size * rate)

    def at(self, ranks: int) -> Sharing:
        """Return the slowdown of a number of ranks; none for one rank, or if it was not timed."""
        return self.sharing.get(ranks, ALONE) if ranks > 1 else ALONE

    def tells(self, what: str, ranks: int) -> bool:
        """Return whether a collective was timed with a number of ranks; always true for one rank."""
        return ranks == 1 or (what, ranks) in self.shapes

    def crowded(self, ranks: int) -> bool:
        """Return whether a number of ranks has more threads than there are cores."""
        return bool(self.cores) and ranks * self.threads > (self.cores or 0)

    def notes(self, ranks: Sequence[int], largest: float) -> list[str]:
        """Return notes on the link for some numbers of ranks and the bytes of the largest bucket."""
        found = ["The link is this machine, and loopback is not a network; several machines have another link."]
        if self.other_cpu is not None:
            found.append(
                f"The run was recorded on another processor, {self.other_cpu}: ranks here would compute at another "
                "speed."
            )
        if self.threads != self.timed_threads and max(ranks) > 1:
            found.append(
                f"The run has {_threads(self.threads)}, ranks were timed with {self.timed_threads}: their slowdown is "
                f"at least the ratio of threads to cores. `xsp bench collectives --threads {self.threads}` measures "
                "it; under torchrun a rank has one thread, unless OMP_NUM_THREADS is set."
            )
        for count in ranks:
            if count == 1:
                continue
            shared = self.sharing.get(count)
            if shared is None:
                found.append(f"The slowdown of {count} ranks that compute at once was not measured; it is left out.")
                continue
            of = f" of {_threads(self.threads)}" if self.threads > 1 else ""
            more = f"Cores are shared: {count} ranks{of} have {self.cores}. " if self.crowded(count) else ""
            found.append(
                f"{more}{count} ranks at once: products take {shared.computing:.2f} times as long, copies "
                f"{shared.copying:.2f}; a second of collectives beside computation costs both {shared.lost:.2f} s."
            )
            shape = self.shapes.get(("all_reduce", count))
            if shape is not None and largest > shape.reach:
                found.append(
                    f"A bucket of {largest / 1e6:.4g} MB is beyond the {shape.reach / 1e6:.4g} MB up to which the "
                    f"all-reduce of {count} ranks can be extrapolated."
                )
        return found


ALONE = Sharing(1.0, 1.0, 0.0, 0.0)
"""A rank that shares its cores with no other rank."""


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def of(timings: Timings, threads: int | None = None, cpu: str | None = None) -> Link:
    """Return the link of this machine from the table of timings.

    Args:
        timings: timings with collectives.
        threads: threads of each rank; default: one. If no all-reduce was timed with this number, the curves are those
            of ranks with one thread, and ranks slow down at least by the ratio of their threads to the cores.
        cpu: the processor of the run, if known.

    Raises:
        UsageError: no all-reduce was timed.
    """
    found = transfers.curves(each for each in timings if each.runtime == COLLECTIVES)
    own = [each for each in found if each.threads == (threads or 1)]
    timed_threads = threads or 1
    if not any(each.family.name == "all_reduce" for each in own):
        own, timed_threads = [each for each in found if each.threads == 1], 1
    shapes = {(each.family.name, each.ranks): each.shape for each in own if each.shape is not None}
    reduced = sorted(ranks for name, ranks in shapes if name == "all_reduce")
    if not reduced:
        raise UsageError(
            f"{timings.folder}: no all-reduce was timed on this machine: `xsp bench collectives --ranks 2,4`"
        )
    first = shapes["all_reduce", reduced[0]]
    alpha, beta = first.alpha.value, first.beta.value
    known = timings.cores
    crowd = {ranks: max(1.0, ranks * min(threads or 1, known) / known if known else 1.0) for ranks in reduced}
    sharing = {
        ranks: each for ranks in reduced if (each := _sharing(own, ranks, timed_threads, crowd[ranks])) is not None
    }
    here = timings.environment.equal.get("cpu")
    other = cpu if cpu and here and cpu != here else None
    held = Measured(shapes, sharing, alpha, beta, known, threads or 1, timed_threads, other)
    source = f"gloo on this machine, all-reduce of {reduced[0]} ranks (xsp bench collectives)"
    return Link(NAME, alpha, beta, source=source, measured=held)


READS = ("read-cold", "read-direct", "read-cached")
"""Storage families for the time to read a batch, of which the first timed one is used; the last one is memory."""


def reading(timings: Timings, size: int) -> tuple[float, str]:
    """Return the seconds to read a batch of `size` bytes from this machine's storage, and the source in words.

    Raises:
        UsageError: no reading was timed on this machine.
    """
    found = [each for each in transfers.curves(each for each in timings if each.runtime == transfers.TRANSFERS)
             if each.family.name in READS and each.shape is not None]  # fmt: skip
    if not found:
        raise UsageError(
            f"{timings.folder}: reading from storage was not timed on this machine: `xsp bench transfers --families "
            "storage`, or give READ as a time"
        )
    curve = min(found, key=lambda each: READS.index(each.family.name))
    shape = curve.shape
    assert shape is not None
    told = f"reading: a batch of {size / 1e6:.4g} MB as {curve.name} takes on this machine (xsp bench transfers)"
    if curve.family.name == "read-cached":
        told += ", from memory: the time of the disk is unknown"
    if size > shape.reach:
        told += f", beyond the {shape.reach / 1e6:.4g} MB up to which it can be extrapolated"
    return max(0.0, shape.seconds(size)), told


def _sharing(found: Sequence[Curve], ranks: int, threads: int, least: float) -> Sharing | None:
    """Return the slowdown of ranks, with factors of at least `least` for computing and copying; None if not timed."""
    computing = transfers.together(found, "together-product", ranks, threads)
    copying = transfers.together(found, "together-copy", ranks, threads)
    if computing is None or copying is None:
        return None
    took = {(each.family.name, each.ranks): each for each in found}
    copied = (took["together-copy", ranks].timings[0][1].trimmed_ns or 0.0) / 1e9
    product = (took["together-product", ranks].timings[0][1].trimmed_ns or 0.0) / 1e9
    lost = []
    beside, reduce = took.get(("beside", ranks)), took.get(("all_reduce", ranks))
    if beside is not None and reduce is not None and reduce.shape is not None:
        for size, timing in beside.timings:
            alone = transfers.PRODUCTS.get(size, 0) * product, reduce.shape.seconds(size)
            both = (timing.trimmed_ns or 0.0) / 1e9
            if min(alone) > 0:
                lost.append(min(1.0, max(0.0, (both - max(alone)) / min(alone))))
    return Sharing(
        max(least, computing), max(least, copying), copied / transfers.COPIED, statistics.median(lost) if lost else 0.0
    )
