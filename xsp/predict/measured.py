"""The link between ranks on this machine, from the table of timings that `xsp bench collectives` measured.

Collectives take the time of their curves for exactly that number of ranks. Ranks on shared cores compute more slowly,
copy gradients into buckets and out of them, and lose cores to concurrent collectives; each of these was timed too, and
is part of the link. Other numbers of ranks raise an error: on other machines they would have other cores and a network.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from xsp.bench import transfers
from xsp.bench.shapes import Shape
from xsp.bench.spec import Timing, spec_of
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, TransferCurve
from xsp.errors import UsageError
from xsp.predict.collectives import Link
from xsp.stats import student
from xsp.texts import counted

NAME = "measured"

PRIOR_DRIFT = 0.07
PRIOR_PAIRS = 4
"""Standard deviation of the logarithm of the ratio of two calibrations, assumed with the weight of this many pairs of
calibrations. With one calibration the interval is ± 21 %: two of them, four minutes apart on two shared cores, differed
by 18 %."""


@dataclass(frozen=True)
class Drift:
    """How much a calibration differs from the next one, as a 95 % interval of logarithms of ratios."""

    collectives: float
    """Of the time of collectives."""

    computing: float
    """Of the time of products or copies that ranks compute at once, whichever differs more: each calibration has
    processes of its own, so this is how much the same work differs between processes."""

    calibrations: int
    """Largest number of calibrations of one collective."""


@dataclass(frozen=True)
class Sharing:
    """Slowdown of ranks that share cores."""

    compute_factor: float
    """Time of matrix products if all ranks compute at once, relative to one rank."""

    copy_factor: float
    """Time of memory copies if all ranks copy at once, relative to one rank."""

    copy_per_byte: float
    """Seconds of a rank per copied byte while the other ranks copy too."""

    overlap_loss: float
    """Seconds that each second of computing beside a collective costs both of them; 0 to 1.

    Alone, computing takes C and the collective R; together they take max(C, R) + lost · min(C, R): 0 if neither
    disturbs the other, 1 if they run one after the other.
    """

    after_computing: tuple[tuple[int, float], ...] = ()
    """Bytes of an all-reduce, and the seconds that it takes longer after computing than after another all-reduce.

    It is measured, and its cause is not known: ranks arrive at different times, and caches hold what they computed.
    """

    def seconds_after_computing(self, size: float) -> float:
        """Return how much longer the first collective after computing takes, between timed sizes by their logarithm."""
        if not self.after_computing:
            return 0.0
        sizes, seconds = zip(*self.after_computing, strict=True)
        for (low, first), (high, second) in itertools.pairwise(zip(sizes, seconds, strict=True)):
            if low <= size <= high:
                return float(first + (second - first) * math.log(size / low) / math.log(high / low))
        return float(seconds[0] if size < sizes[0] else seconds[-1])


@dataclass(frozen=True)
class LinkCurves:
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

    drift: Drift = Drift(0.0, 0.0, 0)
    """Uncertainty of the curves and of the slowdown."""

    def seconds(self, collective: str, over_link: Link, ranks: int, size: float) -> float:
        """Return the seconds of a collective of `size` bytes.

        Raises:
            UsageError: the collective was not timed with this number of ranks.
        """
        if ranks == 1:
            return 0.0
        shape = self.shapes.get((collective, ranks))
        if shape is None:
            counts = sorted({count for name, count in self.shapes if name == collective})
            available = f"there are figures of {', '.join(map(str, counts))} ranks" if counts else "there are none"
            raise UsageError(
                f"{collective} of {ranks} ranks was not measured here ({available}): measure it, "
                f"`xsp bench collectives --ranks {ranks}`; for ranks on several machines give their link"
            )
        piece = shape.piece(size)
        latency = over_link.alpha / self.alpha if self.alpha else 1.0
        rate = over_link.beta / self.beta if self.beta else 1.0
        return max(0.0, piece.start.value * latency + piece.per_byte.value * size * rate)

    def seconds_after_computing(self, over_link: Link, ranks: int, size: float) -> float:
        """Return how much longer the first collective of `size` bytes after computing takes; 0 if it was not timed."""
        latency = over_link.alpha / self.alpha if self.alpha else 1.0
        return self.sharing_at(ranks).seconds_after_computing(size) * latency

    def sharing_at(self, ranks: int) -> Sharing:
        """Return the slowdown of a number of ranks; none for one rank, or if it was not timed."""
        return self.sharing.get(ranks, NO_SHARING) if ranks > 1 else NO_SHARING

    def has_curve(self, collective: str, ranks: int) -> bool:
        """Return whether a collective was timed with a number of ranks; always true for one rank."""
        return ranks == 1 or (collective, ranks) in self.shapes

    def is_crowded(self, ranks: int) -> bool:
        """Return whether a number of ranks has more threads than there are cores."""
        return bool(self.cores) and ranks * self.threads > (self.cores or 0)

    def notes(self, ranks: Sequence[int], largest: float) -> list[str]:
        """Return notes on the link for some numbers of ranks and the bytes of the largest bucket."""
        notes = ["The link is this machine, and loopback is not a network; several machines have another link."]
        if self.drift.calibrations and max(ranks) > 1:
            times = "once, so how much it changes is assumed" if self.drift.calibrations == 1 else (
                f"{self.drift.calibrations} times"
            )  # fmt: skip
            notes.append(
                f"The interval contains that of the link, {100 * math.expm1(self.drift.collectives):.0f} %: it was "
                f"measured {times}; and that between processes that compute, "
                f"{100 * math.expm1(self.drift.computing):.0f} %. `xsp bench collectives --again` repeats it."
            )
        if self.other_cpu is not None:
            notes.append(
                f"The run was recorded on another processor, {self.other_cpu}: ranks here would compute at another "
                "speed."
            )
        if self.threads != self.timed_threads and max(ranks) > 1:
            notes.append(
                f"The run has {_threads(self.threads)}, ranks were timed with {self.timed_threads}: their slowdown is "
                f"at least the ratio of threads to cores. `xsp bench collectives --threads {self.threads}` measures "
                "it; under torchrun a rank has one thread, unless OMP_NUM_THREADS is set."
            )
        for count in ranks:
            if count == 1:
                continue
            slowdown = self.sharing.get(count)
            if slowdown is None:
                notes.append(f"The slowdown of {count} ranks that compute at once was not measured; it is left out.")
                continue
            threads_note = f" of {_threads(self.threads)}" if self.threads > 1 else ""
            prefix = (
                f"Cores are shared: {count} ranks{threads_note} have {self.cores}. " if self.is_crowded(count) else ""
            )
            notes.append(
                f"{prefix}{count} ranks at once: products take {slowdown.compute_factor:.2f} times as long, copies "
                f"{slowdown.copy_factor:.2f}; a second of collectives beside computation costs both "
                f"{slowdown.overlap_loss:.2f} s."
                + (
                    f" The first one after computing takes {1e3 * slowdown.seconds_after_computing(largest):.2g} ms "
                    f"longer."
                    if slowdown.after_computing
                    else " How much longer the first one after computing takes was not measured, so steps are "
                    "predicted too short: `xsp bench collectives`."
                )
            )
            shape = self.shapes.get(("all_reduce", count))
            if shape is not None and largest > shape.reach:
                notes.append(
                    f"A bucket of {largest / 1e6:.4g} MB is beyond the {shape.reach / 1e6:.4g} MB up to which the "
                    f"all-reduce of {count} ranks can be extrapolated."
                )
        return notes


NO_SHARING = Sharing(1.0, 1.0, 0.0, 0.0)
"""A rank that shares its cores with no other rank."""


def _threads(count: int) -> str:
    return counted(count, "thread")


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
    curves = transfers.curves(_mean_timings(timings))
    matching = [curve for curve in curves if curve.threads == (threads or 1)]
    timed_threads = threads or 1
    if not any(curve.family.name == "all_reduce" for curve in matching):
        matching, timed_threads = [curve for curve in curves if curve.threads == 1], 1
    shapes = {(curve.family.name, curve.ranks): curve.shape for curve in matching if curve.shape is not None}
    reduce_ranks = sorted(ranks for name, ranks in shapes if name == "all_reduce")
    if not reduce_ranks:
        raise UsageError(
            f"{timings.folder}: no all-reduce was timed on this machine: `xsp bench collectives --ranks 2,4`"
        )
    smallest_shape = shapes["all_reduce", reduce_ranks[0]]
    alpha, beta = smallest_shape.alpha.value, smallest_shape.beta.value
    cores = timings.cores
    crowding = {ranks: max(1.0, ranks * min(threads or 1, cores) / cores if cores else 1.0) for ranks in reduce_ranks}
    sharing = {
        ranks: slowdown
        for ranks in reduce_ranks
        if (slowdown := _sharing(matching, ranks, timed_threads, crowding[ranks])) is not None
    }
    local_cpu = timings.environment.properties.get("cpu")
    other_cpu = cpu if cpu and local_cpu and cpu != local_cpu else None
    drift = drift_of(timings, timed_threads)
    link_curves = LinkCurves(shapes, sharing, alpha, beta, cores, threads or 1, timed_threads, other_cpu, drift)
    source = f"gloo on this machine, all-reduce of {reduce_ranks[0]} ranks (xsp bench collectives)"
    return Link(NAME, alpha, beta, source=source, curves=link_curves)


RECENT = 8
"""Number of the last calibrations whose mean is used."""


def _mean_timings(timings: Timings) -> Iterator[Timing]:
    """Yield each timing of collectives, with the geometric mean of its last calibrations: one may be off by 20 %."""
    taken = timings.history()
    for timing in timings:
        if timing.runtime == COLLECTIVES:
            known = [entry.trimmed_ns for entry in taken.get(timing.key, ()) if entry.is_timed and entry.trimmed_ns]
            is_repeated = timing.is_timed and len(known) > 1
            yield replace(timing, trimmed_ns=statistics.geometric_mean(known[-RECENT:])) if is_repeated else timing


def missing(curves: Sequence[TransferCurve], ranks: Sequence[int], threads: int = 1) -> list[str]:
    """Return for each number of ranks what predictions over this link lack, as a sentence; empty if nothing.

    Args:
        curves: curves of collectives.
        ranks: numbers of ranks.
        threads: threads of each rank.
    """
    known = {
        (curve.family.name, curve.ranks)
        for curve in curves
        if curve.threads == threads
        and (curve.shape is not None if curve.family.name == "all_reduce" else curve.timings)
    }
    sentences = []
    for count in ranks:
        lacks = [name for name in transfers.PREDICTED if (name, count) not in known]
        lacks += [
            f"{name} of one rank"
            for name in transfers.PREDICTED
            if name.startswith("together") and (name, 1) not in known
        ]
        if lacks:
            sentences.append(f"xsp predict --link measured of {count} ranks lacks {', '.join(lacks)}")
    return sentences


def drift_of(timings: Timings, threads: int) -> Drift:
    """Return how much calibrations of collectives differ, from repeated timings and the assumption for one calibration.

    Args:
        timings: timings with collectives.
        threads: threads of each rank.
    """
    by_family: dict[tuple[str, int], list[list[Timing]]] = {}
    for taken in timings.history().values():
        usable = [timing for timing in taken if timing.is_timed and timing.trimmed_ns]
        if usable and usable[-1].runtime == COLLECTIVES and usable[-1].threads == threads:
            name, conditions = transfers.arguments(spec_of(usable[-1]))
            by_family.setdefault((name, int(conditions.get("ranks", 0))), []).append(usable)
    reduces = [specs for (name, _), specs in by_family.items() if name in ("all_reduce", "after")]
    works = [
        [specs for (name, ranks), specs in by_family.items() if name == work and ranks > 1]
        for work in ("together-product", "together-copy")
    ]
    halves = [
        (timing[-1].half_ns or 0.0) / (timing[-1].trimmed_ns or 1.0) for specs in reduces for timing in specs
    ]  # fmt: skip
    within = statistics.median(halves) if halves else 0.0
    calibrations = max((len(taken) for specs in reduces for taken in specs), default=0)
    return Drift(math.hypot(_between(reduces), within), max(map(_between, works)), calibrations)


def _between(families: Sequence[Sequence[Sequence[Timing]]]) -> float:
    """Return the 95 % interval of the logarithm of the ratio of two calibrations.

    The sizes of a collective change together, so that each pair of successive calibrations has one ratio, the median.
    """
    squares = []
    for specs in families:
        for number in range(1, max(map(len, specs), default=0)):
            ratios = [
                math.log((taken[number].trimmed_ns or 1.0) / (taken[number - 1].trimmed_ns or 1.0))
                for taken in specs
                if len(taken) > number
            ]
            squares.append(statistics.median(ratios) ** 2)
    count = PRIOR_PAIRS + len(squares)
    return student(0.975, count) * math.sqrt((PRIOR_PAIRS * PRIOR_DRIFT**2 + sum(squares)) / count)


STORAGE_FAMILIES = ("read-cold", "read-direct", "read-cached")
"""Storage families for the time to read a batch, of which the first timed one is used; the last one is memory."""


def read_time(timings: Timings, size: int) -> tuple[float, str]:
    """Return the seconds to read a batch of `size` bytes from this machine's storage, and the source in words.

    Raises:
        UsageError: no reading was timed on this machine.
    """
    curves = [entry for entry in transfers.curves(entry for entry in timings if entry.runtime == transfers.TRANSFERS)
             if entry.family.name in STORAGE_FAMILIES and entry.shape is not None]  # fmt: skip
    if not curves:
        raise UsageError(
            f"{timings.folder}: reading from storage was not timed on this machine: `xsp bench transfers --families "
            "storage`, or give READ as a time"
        )
    curve = min(curves, key=lambda candidate: STORAGE_FAMILIES.index(candidate.family.name))
    shape = curve.shape
    assert shape is not None
    source = f"reading: a batch of {size / 1e6:.4g} MB as {curve.name} takes on this machine (xsp bench transfers)"
    if curve.family.name == "read-cached":
        source += ", from memory: the time of the disk is unknown"
    if size > shape.reach:
        source += f", beyond the {shape.reach / 1e6:.4g} MB up to which it can be extrapolated"
    return max(0.0, shape.seconds(size)), source


def _sharing(curves: Sequence[TransferCurve], ranks: int, threads: int, minimum: float) -> Sharing | None:
    """Return the slowdown of ranks, with factors of at least `minimum` for computing and copying; None if not timed."""
    compute_factor = transfers.crowding_factor(curves, "together-product", ranks, threads)
    copy_factor = transfers.crowding_factor(curves, "together-copy", ranks, threads)
    if compute_factor is None or copy_factor is None:
        return None
    by_family = {(curve.family.name, curve.ranks): curve for curve in curves}
    copy_seconds = (by_family["together-copy", ranks].timings[0][1].trimmed_ns or 0.0) / 1e9
    product_seconds = (by_family["together-product", ranks].timings[0][1].trimmed_ns or 0.0) / 1e9
    losses = []
    concurrent_curve, reduce_curve = by_family.get(("beside", ranks)), by_family.get(("all_reduce", ranks))
    if concurrent_curve is not None and reduce_curve is not None and reduce_curve.shape is not None:
        for size, timing in concurrent_curve.timings:
            separate_seconds = transfers.PRODUCTS.get(size, 0) * product_seconds, reduce_curve.shape.seconds(size)
            combined_seconds = (timing.trimmed_ns or 0.0) / 1e9
            if min(separate_seconds) > 0:
                losses.append(min(1.0, max(0.0, (combined_seconds - max(separate_seconds)) / min(separate_seconds))))
    return Sharing(
        max(minimum, compute_factor),
        max(minimum, copy_factor),
        copy_seconds / transfers.COPY_BYTES,
        statistics.median(losses) if losses else 0.0,
        tuple(_after_computing(by_family.get(("after", ranks)), reduce_curve)),
    )


def _after_computing(
    after_curve: TransferCurve | None, reduce_curve: TransferCurve | None
) -> Iterator[tuple[int, float]]:
    """Yield the bytes of an all-reduce, and by how many seconds it is longer after computing."""
    if after_curve is not None and reduce_curve is not None:
        back_to_back = dict(reduce_curve.timings)
        for size, timing in after_curve.timings:
            if size in back_to_back:
                longer_ns = (timing.trimmed_ns or 0.0) - (back_to_back[size].trimmed_ns or 0.0)
                yield size, max(0.0, longer_ns / 1e9)
