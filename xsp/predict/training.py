"""One data-parallel training step as tasks on resources: the DAG of synchronous SGD, for any number of ranks.

After Shi, Chu and Li (arXiv 1805.03812): read → decode → copy → forward 1 … L → backward L … 1 → update; gradients are
communicated as they arrive, and the input of the next step is loaded concurrently. Extensions are buckets,
accumulation, sharding, loaders with several workers on one disk, and ranks that are slower than others.

Ranks that do the same at the same times are one class of ranks, so a job of 1,000 ranks has no more tasks than one of
two. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xsp.errors import UsageError
from xsp.predict import buckets, collectives
from xsp.predict.buckets import Buckets
from xsp.predict.collectives import Algorithm, Link
from xsp.predict.schedule import Cause, Task, seconds

ALL = -1
"""The rank of a task that all ranks do together."""

OUT = "out of the buckets"
"""The task that copies gradients back, on ranks that share cores."""

NO_LINK = Link("none", 0.0, 0.0, source="one rank communicates with nobody")


@dataclass(frozen=True)
class Layer:
    """A part of the model whose gradients are ready at the end of its backward pass."""

    name: str
    forward: float
    """Seconds."""

    backward: float
    """Seconds."""

    gradients: tuple[int, ...] = ()
    """Bytes of each gradient, in the order of the parameters; gradients become ready in reverse order."""


@dataclass(frozen=True)
class Input:
    """Loading of a batch; durations are seconds."""

    read: float = 0.0
    """Time on the storage, which serves one worker at a time."""

    decode: float = 0.0
    """Time in a worker after reading."""

    copy: float = 0.0
    """Time to copy from host to device."""

    workers: int = 0
    """Worker processes of the loader; with 0 the training process loads the batch, and computes nothing meanwhile."""

    prefetch_limit: int | None = None
    """Maximum number of batches that a loader reads or holds at a time; default: two for each worker."""

    copy_ahead: bool = False
    """Whether a copy runs on a separate engine beside computation; if not, it runs in the compute stream."""


@dataclass(frozen=True)
class Work:
    """The work of one rank in a step."""

    layers: tuple[Layer, ...]
    update: float = 0.0
    """Seconds of the optimizer."""

    other: float = 0.0
    """Seconds of host work outside all phases (the loss, Python, logging), placed before the forward pass."""

    input: Input = field(default_factory=Input)

    def __post_init__(self) -> None:
        """Reject invalid durations and sizes, and a step without layers."""
        if not self.layers:
            raise UsageError("a step without layers has nothing to predict")
        for layer in self.layers:
            seconds(layer.forward, f"forward of {layer.name}")
            seconds(layer.backward, f"backward of {layer.name}")
            if any(size < 0 for size in layer.gradients):
                raise UsageError(f"{layer.name} has a gradient of negative size")
        loader = self.input
        for value, what in ((self.update, "update"), (self.other, "other work"), (loader.read, "reading"),
                            (loader.decode, "decoding"), (loader.copy, "copying")):  # fmt: skip
            seconds(value, what)
        if loader.workers < 0 or (loader.prefetch_limit is not None and loader.prefetch_limit < 1):
            raise UsageError("a loader must have 0 or more workers, and hold at least one batch")

    @property
    def arrivals(self) -> tuple[int, ...]:
        """Bytes of the gradients in the order in which they arrive."""
        return tuple(size for layer in reversed(self.layers) for size in reversed(layer.gradients))

    def scaled(self, computing: float = 1.0, update: float = 1.0, loading: float = 1.0) -> Work:
        """Return the step with durations multiplied by factors: layers and other work, update, input."""
        layers = tuple(
            replace(layer, forward=layer.forward * computing, backward=layer.backward * computing)
            for layer in self.layers
        )
        loader = self.input
        loaded = replace(loader, read=loader.read * loading, decode=loader.decode * loading, copy=loader.copy * loading)
        return Work(layers, self.update * update, self.other * computing, loaded)


class Slow(str, enum.Enum):
    """Which ranks are slow, and when. In all cases but the first, all ranks have the same mean."""

    ONE = "one"  # one rank, always
    TURNS = "turns"  # each rank in one step of N, one rank in each step
    TOGETHER = "together"  # each rank in one step of N, all in the same one: no rank waits for another

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Straggler:
    """Ranks whose computation takes longer in some steps."""

    factor: float = 1.0
    who: Slow = Slow.ONE

    def __post_init__(self) -> None:
        """Reject an invalid factor."""
        if not seconds(self.factor, "the factor of a straggler"):
            raise UsageError("with a factor of 0 a rank would take no time; give one above 0, such as 1.3")


@dataclass(frozen=True)
class Job:
    """How the step is distributed."""

    ranks: int = 1
    link: Link = NO_LINK
    algorithm: Algorithm = Algorithm.AUTO
    bucket: int | None = None
    """Size of a bucket in bytes; None: as in PyTorch."""

    plan: Buckets | None = None
    """Explicit buckets, used instead of `bucket`."""

    overlap: bool = True
    """Whether gradients are sent during the backward pass."""

    accumulate: int = 1
    """Batches per update; gradients are sent in the last backward pass only."""

    sharded: bool = False
    """Whether each rank keeps only its share of the parameters, and gathers them before each pass."""

    straggler: Straggler = field(default_factory=Straggler)
    on_link: int = 1
    """Number of ranks that share a link."""

    on_disk: int = 1
    """Number of ranks that share a disk."""

    compress: float = 1.0
    """Compression factor of communicated gradients; gathered parameters are not compressed."""

    collective_seconds: tuple[float, ...] = ()
    """Seconds of the all-reduce of each bucket, used instead of the link."""

    def __post_init__(self) -> None:
        """Reject an invalid job."""
        collectives.all_reduce(Algorithm.RING, self.link, self.ranks)
        if min(self.accumulate, self.on_link, self.on_disk) < 1:
            raise UsageError("batches per update, and ranks per link and per disk, must be 1 or more")
        if not 0 < seconds(self.compress, "the compression of gradients") < 1e6:
            raise UsageError("gradients must be compressed by a factor above 0, such as 2: 16 bits instead of 32")
        if self.collective_seconds and (
            self.sharded or self.plan is None or len(self.collective_seconds) != len(self.plan)
        ):
            raise UsageError("durations of all-reduces need a plan of buckets, and one for each of its buckets")
        for duration in self.collective_seconds:
            seconds(duration, "an all-reduce")


class Class(NamedTuple):
    """Ranks that do the same at the same times."""

    ranks: int
    factors: tuple[float, ...]
    """Factors of the time of computation, step by step; they repeat from the first one after the last."""


def classes(job: Job) -> tuple[Class, ...]:
    """Return the classes of ranks of a job; `Slow.TOGETHER` needs one class, see `xsp.predict.prediction`."""
    slow, who = job.straggler.factor, job.straggler.who
    if slow == 1.0 or who is Slow.TOGETHER:
        return (Class(job.ranks, (1.0,)),)
    if job.ranks == 1:
        return (Class(1, (slow,)),)
    if who is Slow.ONE:
        return (Class(job.ranks - 1, (1.0,)), Class(1, (slow,)))
    turns = (Class(1, (slow, 1.0)), Class(1, (1.0, slow)))
    return turns if job.ranks == 2 else (Class(job.ranks - 2, (1.0,)), *turns)


def sent_bytes(size: int, job: Job) -> int:
    """Return the communicated bytes of a bucket of gradients."""
    return round(size / job.compress)


def plan_of(work: Work, job: Job) -> Buckets:
    """Return the buckets of gradients, as indices into `Work.arrivals`."""
    if job.plan is None:
        return buckets.of_ddp(work.arrivals, job.bucket)
    if tuple(itertools.chain(*job.plan)) != tuple(range(len(work.arrivals))) or not all(job.plan):
        raise UsageError("a plan of buckets must have each gradient once, in the order of arrival")
    return job.plan


def tasks(work: Work, job: Job, steps: int, *, fine: bool = True) -> list[Task]:
    """Return the tasks of consecutive steps.

    Args:
        work: work of one rank in a step with one batch.
        job: distribution of the step.
        steps: number of steps.
        fine: create a task for each layer and pass; else one for each stretch of layers without a task that waits for
            one of them, which takes the same time.
    """
    return _Builder(work, job, fine).all(steps)


class _Builder:
    """A builder of the list of tasks."""

    def __init__(self, work: Work, job: Job, fine: bool) -> None:
        self.work, self.job = work, job
        self.rank_classes = classes(job)
        self.plan = plan_of(work, job) if job.ranks > 1 else ()
        self.sizes = [sum(work.arrivals[index] for index in bucket) for bucket in self.plan]
        self.link = job.link.shared(min(job.on_link, job.ranks))
        measured = job.link.measured
        self.sharing = measured.at(job.ranks) if measured is not None and job.ranks > 1 else None
        self.buckets_of, self.full_at = _buckets_by_layer(work, self.plan)
        numbers = range(len(work.layers))
        self.forward = [[number] for number in numbers] if fine or job.sharded else [list(numbers)]
        self.backward = self._backward(fine or job.sharded)
        self.tasks: list[Task] = []
        count = len(self.rank_classes)
        self.computed: list[list[int]] = [[] for _ in range(count)]  # tasks that the next task of the stream waits for
        self.decoded: list[list[int]] = [[] for _ in range(count)]
        self.copied: list[list[int]] = [[] for _ in range(count)]
        self.sent: list[int] = []
        self.ahead = self.clock = self.channel = 0.0

    def _backward(self, fine: bool) -> list[list[int]]:
        """Return the layers of the backward pass by task; unless `fine`, a task ends where a bucket is full."""
        stretches: list[list[int]] = [[]]
        for number in range(len(self.work.layers) - 1, -1, -1):
            stretches[-1].append(number)
            if number and (fine or self.full_at[number]):
                stretches.append([])
        return stretches

    def all(self, steps: int) -> list[Task]:
        for step in range(steps):
            for part in range(self.job.accumulate):
                self._part(step, part)
            self._update(step)
        return self.tasks

    def _put(
        self, name: str, cause: Cause, duration: float, on: Sequence[str], after: Sequence[int], rank: int, step: int
    ) -> int:
        self.tasks.append(Task(name, cause, duration, tuple(on), tuple(dict.fromkeys(after)), rank, step))
        return len(self.tasks) - 1

    def _compute(self, name: str, cause: Cause, duration: float, after: Sequence[int], rank: int, step: int) -> int:
        """Append a task after the last one of the compute stream, and return its index."""
        factor = 1.0 if cause in (Cause.INPUT, Cause.COPY) else self._factor(rank, step)
        on = [f"compute {rank}"] + ([f"storage {rank}"] if cause is Cause.INPUT else [])
        number = self._put(name, cause, duration * factor, on, [*self.computed[rank], *after], rank, step)
        self.computed[rank] = [number]
        return number

    def _factor(self, rank: int, step: int) -> float:
        factors = self.rank_classes[rank].factors
        return factors[step % len(factors)]

    def _part(self, step: int, part: int) -> None:
        """Append the input, the forward and the backward pass of one batch."""
        ranks = range(len(self.rank_classes))
        for rank in ranks:
            self._input(rank, step)
            if self.work.other:
                self._compute("other", Cause.OTHER, self.work.other, (), rank, step)
        self._pass(step, self.forward, Cause.FORWARD)
        self._pass(step, self.backward, Cause.BACKWARD, last=part == self.job.accumulate - 1)

    def _input(self, rank: int, step: int) -> None:
        loader = self.work.input
        read = loader.read * min(self.job.on_disk, self.job.ranks)
        index = len(self.decoded[rank])
        if loader.workers:
            after = (
                self.decoded[rank][index - loader.workers : index - loader.workers + 1]
                if index >= loader.workers
                else []
            )
            limit = loader.prefetch_limit or 2 * loader.workers
            after = [*after, *(self.copied[rank][index - limit : index - limit + 1] if index >= limit else [])]
            worker = f"worker {rank}.{index % loader.workers}"
            loaded = self._put("read", Cause.INPUT, read, (worker, f"storage {rank}"), after, rank, step)
            loaded = self._put("decode", Cause.INPUT, loader.decode, (worker,), [loaded], rank, step)
        elif read + loader.decode:
            loaded = self._compute("read, decode", Cause.INPUT, read + loader.decode, (), rank, step)
        else:
            loaded = -1
        self.decoded[rank].append(loaded)
        if loader.copy_ahead:
            after = [] if loaded < 0 else [loaded]
            copied = self._put("copy", Cause.COPY, loader.copy, (f"copy {rank}",), after, rank, step)
            self.computed[rank].append(copied)
        elif loader.copy or loader.workers:
            copied = self._compute("copy", Cause.COPY, loader.copy, [] if loaded < 0 else [loaded], rank, step)
        else:
            copied = loaded
        self.copied[rank].append(copied)

    def _pass(self, step: int, stretches: list[list[int]], cause: Cause, *, last: bool = False) -> None:
        """Append the layers of a pass, with the collectives that gather their parameters and send their gradients.

        Parameters are gathered one bucket ahead: the next bucket arrives during computation with the current one.
        """
        gathered: dict[int, int] = {}
        last_tasks: dict[int, list[int]] = {}  # bucket → the last tasks that computed with it
        previous = [number for stream in self.computed for number in stream]
        computed = previous
        self.ahead = sum(self.work.layers[number].backward for stretch in stretches for number in stretch)
        self.clock = self.channel = 0.0
        for stretch in stretches:
            layers = [self.work.layers[number] for number in stretch]
            if self.job.sharded:
                needed = {bucket for number in stretch for bucket in self.buckets_of[number]}
                for bucket in sorted(needed - set(gathered), reverse=cause is Cause.FORWARD):
                    limit = last_tasks.get(list(gathered)[-2], previous) if len(gathered) > 1 else previous
                    gathered[bucket] = self._collective("all-gather", bucket, limit, step)
            dependencies = [
                gathered[bucket] for number in stretch for bucket in self.buckets_of[number] if bucket in gathered
            ]
            duration = sum(layer.forward if cause is Cause.FORWARD else layer.backward for layer in layers)
            name = f"{cause} {layers[0].name}" + (f" … {layers[-1].name}" if len(layers) > 1 else "")
            computed = [
                self._compute(name, cause, duration, dependencies, rank, step) for rank in range(len(self.rank_classes))
            ]
            self.ahead, self.clock = self.ahead - duration, self.clock + duration
            for number in stretch:
                last_tasks |= dict.fromkeys(self.buckets_of[number], computed)
                if last and self.job.overlap:
                    for bucket in self.full_at[number]:
                        self._reduce(bucket, computed, step)
        if last and not self.job.overlap:
            for bucket in range(len(self.plan)):
                self._reduce(bucket, computed, step)

    def _reduce(self, bucket: int, after: Sequence[int], step: int) -> None:
        """Append the collective of a bucket after those of the previous buckets.

        On shared cores the gradients are copied into the bucket, and both the collective and concurrent computation
        take longer, by `Sharing.lost` of the time in which both would run.
        """
        collective = "reduce-scatter" if self.job.sharded else "all-reduce"
        slowdown = 0.0
        shared = self.sharing
        ranks = range(len(self.rank_classes))
        if shared is not None:
            duration = shared.copy_per_byte * self.sizes[bucket]
            after = [self._compute(f"bucket {bucket}", Cause.SERVING, duration, after, rank, step) for rank in ranks]
            slowdown = (
                shared.lost * self._overlapped(duration, self._seconds(collective, bucket)) if self.job.overlap else 0.0
            )
            self.clock, self.channel = self.clock + slowdown, self.channel + slowdown
        self.sent.append(self._collective(collective, bucket, after, step, slowdown))
        if slowdown:
            for rank in ranks:
                self._compute(f"beside {collective} {bucket}", Cause.SERVING, slowdown, (), rank, step)

    def _overlapped(self, copied: float, sent: float) -> float:
        """Return the seconds of a collective that overlap with layers of the backward pass, and advance the channel."""
        self.clock += copied
        start = max(self.clock, self.channel)
        self.channel = start + sent
        return max(0.0, min(sent, self.ahead - (start - self.clock)))

    def _seconds(self, collective: str, bucket: int) -> float:
        if self.job.collective_seconds:
            return self.job.collective_seconds[bucket]
        size, ranks = self.sizes[bucket], self.job.ranks
        if collective == "all-gather":
            return collectives.gather_seconds(self.link, ranks, size)
        size = sent_bytes(size, self.job)
        if collective == "reduce-scatter":
            return collectives.scatter_seconds(self.link, ranks, size)
        return collectives.all_reduce_seconds(self.job.algorithm, self.link, ranks, size)

    def _collective(self, collective: str, bucket: int, after: Sequence[int], step: int, extra: float = 0.0) -> int:
        duration = self._seconds(collective, bucket) + extra
        if collective == "all-reduce":
            after = [*after, *self.sent[-1:]]
        return self._put(f"{collective} {bucket}", Cause.COMMUNICATION, duration, ("channel",), after, ALL, step)

    def _update(self, step: int) -> None:
        duration = self.work.update / (self.job.ranks if self.job.sharded else 1)
        for rank in range(len(self.rank_classes)):
            after: Sequence[int] = self.sent
            if self.sharing is not None and self.sent:
                copy_back = self.sharing.copy_per_byte * sum(self.sizes)
                after = [self._compute(OUT, Cause.SERVING, copy_back, self.sent, rank, step)]
            self._compute("update", Cause.UPDATE, duration, after, rank, step)
        self.sent = []


def _buckets_by_layer(work: Work, plan: Buckets) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each layer, the buckets with its gradients, and the buckets that are full at its end."""
    bucket_of = {place: number for number, bucket in enumerate(plan) for place in bucket}
    last = {bucket[-1]: number for number, bucket in enumerate(plan)}
    holding: list[list[int]] = [[] for _ in work.layers]
    full: list[list[int]] = [[] for _ in work.layers]
    place = 0
    for number in range(len(work.layers) - 1, -1, -1):
        places = range(place, place + len(work.layers[number].gradients))
        holding[number] = sorted({bucket_of[index] for index in places if index in bucket_of})
        full[number] = sorted(last[index] for index in places if index in last)
        place = places.stop
    return holding, full
