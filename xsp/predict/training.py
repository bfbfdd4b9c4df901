"""One data-parallel training step as tasks on resources: the DAG of synchronous SGD, for any number of ranks.

After Shi, Chu and Li (arXiv 1805.03812): read → decode → copy → forward 1 … L → backward L … 1 → update; gradients are
communicated as they arrive, and the input of the next step is loaded concurrently. Extensions are buckets,
accumulation, sharding, loaders with several workers on one disk, and ranks that are slower than others.

Ranks with the same tasks at the same times form one class, so a job of 1,000 ranks has no more tasks than one of two.
Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xsp.errors import UsageError
from xsp.predict import collectives
from xsp.predict.collectives import Algorithm, Link
from xsp.predict.schedule import Cause, Task, check_duration

ALL_RANKS = -1
"""The rank of a task that all ranks do together."""

COPY_OUT = "out of the buckets"
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
            check_duration(layer.forward, f"forward of {layer.name}")
            check_duration(layer.backward, f"backward of {layer.name}")
            if any(size < 0 for size in layer.gradients):
                raise UsageError(f"{layer.name} has a gradient of negative size")
        loader = self.input
        for value, label in ((self.update, "update"), (self.other, "other work"), (loader.read, "reading"),
                            (loader.decode, "decoding"), (loader.copy, "copying")):  # fmt: skip
            check_duration(value, label)
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
        scaled_input = replace(
            loader, read=loader.read * loading, decode=loader.decode * loading, copy=loader.copy * loading
        )
        return Work(layers, self.update * update, self.other * computing, scaled_input)


class SlowRanks(str, enum.Enum):
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
    slow_ranks: SlowRanks = SlowRanks.ONE

    def __post_init__(self) -> None:
        """Reject an invalid factor."""
        if not check_duration(self.factor, "the factor of a straggler"):
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
    """Whether each rank stores only its share of the parameters, and gathers them before each pass."""

    straggler: Straggler = field(default_factory=Straggler)
    ranks_per_link: int = 1
    """Number of ranks that share a link."""

    ranks_per_disk: int = 1
    """Number of ranks that share a disk."""

    compress: float = 1.0
    """Compression factor of communicated gradients; gathered parameters are not compressed."""

    collective_seconds: tuple[float, ...] = ()
    """Seconds of the all-reduce of each bucket, used instead of the link."""

    def __post_init__(self) -> None:
        """Reject an invalid job."""
        collectives.all_reduce(Algorithm.RING, self.link, self.ranks)
        if min(self.accumulate, self.ranks_per_link, self.ranks_per_disk) < 1:
            raise UsageError("batches per update, and ranks per link and per disk, must be 1 or more")
        if not 0 < check_duration(self.compress, "the compression of gradients") < 1e6:
            raise UsageError("gradients must be compressed by a factor above 0, such as 2: 16 bits instead of 32")
        if self.collective_seconds and (
            self.sharded or self.plan is None or len(self.collective_seconds) != len(self.plan)
        ):
            raise UsageError("durations of all-reduces need a plan of buckets, and one for each of its buckets")
        for duration in self.collective_seconds:
            check_duration(duration, "an all-reduce")


class RankClass(NamedTuple):
    """Ranks with the same tasks at the same times."""

    ranks: int
    factors: tuple[float, ...]
    """Factors of the time of computation, step by step; they repeat from the first one after the last."""


def rank_classes(job: Job) -> tuple[RankClass, ...]:
    """Return the classes of ranks of a job; `SlowRanks.TOGETHER` needs one class, see `xsp.predict.prediction`."""
    slow_factor, slow_ranks = job.straggler.factor, job.straggler.slow_ranks
    if slow_factor == 1.0 or slow_ranks is SlowRanks.TOGETHER:
        return (RankClass(job.ranks, (1.0,)),)
    if job.ranks == 1:
        return (RankClass(1, (slow_factor,)),)
    if slow_ranks is SlowRanks.ONE:
        return (RankClass(job.ranks - 1, (1.0,)), RankClass(1, (slow_factor,)))
    turns = (RankClass(1, (slow_factor, 1.0)), RankClass(1, (1.0, slow_factor)))
    return turns if job.ranks == 2 else (RankClass(job.ranks - 2, (1.0,)), *turns)


def compressed_bytes(size: int, job: Job) -> int:
    """Return the communicated bytes of a bucket of gradients."""
    return round(size / job.compress)


def plan_of(work: Work, job: Job) -> Buckets:
    """Return the buckets of gradients, as indices into `Work.arrivals`."""
    if job.plan is None:
        return ddp_buckets(work.arrivals, job.bucket)
    if tuple(itertools.chain(*job.plan)) != tuple(range(len(work.arrivals))) or not all(job.plan):
        raise UsageError("a plan of buckets must have each gradient once, in the order of arrival")
    return job.plan


def tasks(work: Work, job: Job, steps: int, *, per_layer: bool = True) -> list[Task]:
    """Return the tasks of consecutive steps.

    Args:
        work: work of one rank in a step with one batch.
        job: distribution of the step.
        steps: number of steps.
        per_layer: create a task for each layer and pass; else one for each stretch of layers up to the next
            collective, which takes the same time.
    """
    return _TaskBuilder(work, job, per_layer).build(steps)


class _TaskBuilder:
    """A builder of the list of tasks."""

    def __init__(self, work: Work, job: Job, per_layer: bool) -> None:
        self.work, self.job = work, job
        self.rank_classes = rank_classes(job)
        self.plan = plan_of(work, job) if job.ranks > 1 else ()
        self.sizes = [sum(work.arrivals[index] for index in bucket) for bucket in self.plan]
        self.link = job.link.shared_by(min(job.ranks_per_link, job.ranks))
        curves = job.link.curves
        self.sharing = curves.sharing_at(job.ranks) if curves is not None and job.ranks > 1 else None
        self.layer_buckets, self.full_buckets = _buckets_by_layer(work, self.plan)
        numbers = range(len(work.layers))
        self.forward = [[number] for number in numbers] if per_layer or job.sharded else [list(numbers)]
        self.backward = self._backward_stretches(per_layer or job.sharded)
        self.tasks: list[Task] = []
        count = len(self.rank_classes)
        # tasks that the next task of the stream waits for
        self.compute_tails: list[list[int]] = [[] for _ in range(count)]
        self.decode_tasks: list[list[int]] = [[] for _ in range(count)]
        self.copy_tasks: list[list[int]] = [[] for _ in range(count)]
        self.reductions: list[int] = []
        self.remaining_backward = self.clock = self.channel_end = 0.0

    def _backward_stretches(self, per_layer: bool) -> list[list[int]]:
        """Return the layers of the backward pass by task; unless `per_layer`, a task ends where a bucket is full."""
        stretches: list[list[int]] = [[]]
        for number in range(len(self.work.layers) - 1, -1, -1):
            stretches[-1].append(number)
            if number and (per_layer or self.full_buckets[number]):
                stretches.append([])
        return stretches

    def build(self, steps: int) -> list[Task]:
        for step in range(steps):
            for part in range(self.job.accumulate):
                ranks = range(len(self.rank_classes))
                for rank in ranks:
                    self._append_input(rank, step)
                    if self.work.other:
                        self._append_compute("other", Cause.OTHER, self.work.other, (), rank, step)
                self._append_pass(step, self.forward, Cause.FORWARD)
                self._append_pass(step, self.backward, Cause.BACKWARD, is_last=part == self.job.accumulate - 1)
            self._append_update(step)
        return self.tasks

    def _append(
        self, name: str, cause: Cause, duration: float, resources: Sequence[str], dependencies: Sequence[int],
        rank: int, step: int,
    ) -> int:  # fmt: skip
        self.tasks.append(Task(name, cause, duration, tuple(resources), tuple(dict.fromkeys(dependencies)), rank, step))
        return len(self.tasks) - 1

    def _append_compute(
        self, name: str, cause: Cause, duration: float, dependencies: Sequence[int], rank: int, step: int
    ) -> int:
        """Append a task after the last one of the compute stream, and return its index."""
        factors = self.rank_classes[rank].factors
        factor = 1.0 if cause in (Cause.INPUT, Cause.COPY) else factors[step % len(factors)]
        resources = [f"compute {rank}"] + ([f"storage {rank}"] if cause is Cause.INPUT else [])
        number = self._append(
            name, cause, duration * factor, resources, [*self.compute_tails[rank], *dependencies], rank, step
        )
        self.compute_tails[rank] = [number]
        return number

    def _append_input(self, rank: int, step: int) -> None:
        loader = self.work.input
        read = loader.read * min(self.job.ranks_per_disk, self.job.ranks)
        index = len(self.decode_tasks[rank])
        if loader.workers:
            dependencies = (
                self.decode_tasks[rank][index - loader.workers : index - loader.workers + 1]
                if index >= loader.workers
                else []
            )
            limit = loader.prefetch_limit or 2 * loader.workers
            dependencies = [
                *dependencies,
                *(self.copy_tasks[rank][index - limit : index - limit + 1] if index >= limit else []),
            ]
            worker = f"worker {rank}.{index % loader.workers}"
            load_task = self._append("read", Cause.INPUT, read, (worker, f"storage {rank}"), dependencies, rank, step)
            load_task = self._append("decode", Cause.INPUT, loader.decode, (worker,), [load_task], rank, step)
        elif read + loader.decode:
            load_task = self._append_compute("read, decode", Cause.INPUT, read + loader.decode, (), rank, step)
        else:
            load_task = -1
        self.decode_tasks[rank].append(load_task)
        if loader.copy_ahead:
            dependencies = [] if load_task < 0 else [load_task]
            copy_task = self._append("copy", Cause.COPY, loader.copy, (f"copy {rank}",), dependencies, rank, step)
            self.compute_tails[rank].append(copy_task)
        elif loader.copy or loader.workers:
            copy_task = self._append_compute(
                "copy", Cause.COPY, loader.copy, [] if load_task < 0 else [load_task], rank, step
            )
        else:
            copy_task = load_task
        self.copy_tasks[rank].append(copy_task)

    def _append_pass(self, step: int, stretches: list[list[int]], cause: Cause, *, is_last: bool = False) -> None:
        """Append the layers of a pass, with the collectives that gather their parameters and send their gradients.

        Parameters are gathered one bucket ahead: the next bucket arrives during computation with the current one.
        """
        gather_tasks: dict[int, int] = {}
        last_tasks: dict[int, list[int]] = {}  # bucket → the last tasks that computed with it
        previous_tasks = [number for stream in self.compute_tails for number in stream]
        stretch_tasks = previous_tasks
        self.remaining_backward = sum(self.work.layers[number].backward for stretch in stretches for number in stretch)
        self.clock = self.channel_end = 0.0
        for stretch in stretches:
            layers = [self.work.layers[number] for number in stretch]
            if self.job.sharded:
                required_buckets = {bucket for number in stretch for bucket in self.layer_buckets[number]}
                for bucket in sorted(required_buckets - set(gather_tasks), reverse=cause is Cause.FORWARD):
                    gate_tasks = previous_tasks
                    if len(gather_tasks) > 1:
                        gate_tasks = last_tasks.get(list(gather_tasks)[-2], previous_tasks)
                    gather_tasks[bucket] = self._append_collective("all-gather", bucket, gate_tasks, step)
            dependencies = [
                gather_tasks[bucket]
                for number in stretch
                for bucket in self.layer_buckets[number]
                if bucket in gather_tasks
            ]
            duration = sum(layer.forward if cause is Cause.FORWARD else layer.backward for layer in layers)
            name = f"{cause} {layers[0].name}" + (f" … {layers[-1].name}" if len(layers) > 1 else "")
            stretch_tasks = [
                self._append_compute(name, cause, duration, dependencies, rank, step)
                for rank in range(len(self.rank_classes))
            ]
            self.remaining_backward, self.clock = self.remaining_backward - duration, self.clock + duration
            for number in stretch:
                last_tasks |= dict.fromkeys(self.layer_buckets[number], stretch_tasks)
                if is_last and self.job.overlap:
                    for bucket in self.full_buckets[number]:
                        self._append_reduction(bucket, stretch_tasks, step)
        if is_last and not self.job.overlap:
            for bucket in range(len(self.plan)):
                self._append_reduction(bucket, stretch_tasks, step)

    def _append_reduction(self, bucket: int, dependencies: Sequence[int], step: int) -> None:
        """Append the collective of a bucket after those of the previous buckets.

        On shared cores the gradients are copied into the bucket, and both the collective and concurrent computation
        take longer, by `Sharing.overlap_loss` of the time in which both would run. The first one that follows the end
        of computation takes longer (`Sharing.after_computing`); with overlap that is the last one.
        """
        collective = "reduce-scatter" if self.job.sharded else "all-reduce"
        slowdown = extra = 0.0
        sharing = self.sharing
        ranks = range(len(self.rank_classes))
        if sharing is not None:
            duration = sharing.copy_per_byte * self.sizes[bucket]
            dependencies = [
                self._append_compute(f"bucket {bucket}", Cause.SERVING, duration, dependencies, rank, step)
                for rank in ranks
            ]
            slowdown = (
                sharing.overlap_loss * self._overlap_seconds(duration, self._seconds(collective, bucket))
                if self.job.overlap
                else 0.0
            )
            self.clock, self.channel_end = self.clock + slowdown, self.channel_end + slowdown
            if bucket == (len(self.plan) - 1 if self.job.overlap else 0):
                extra, curves = 0.0, self.job.link.curves
                if curves is not None:
                    size = compressed_bytes(self.sizes[bucket], self.job)
                    extra = curves.seconds_after_computing(self.link, self.job.ranks, size)
        self.reductions.append(self._append_collective(collective, bucket, dependencies, step, slowdown + extra))
        if slowdown:
            for rank in ranks:
                self._append_compute(f"beside {collective} {bucket}", Cause.SERVING, slowdown, (), rank, step)

    def _overlap_seconds(self, copy_seconds: float, collective_seconds: float) -> float:
        """Return the seconds of a collective that overlap with layers of the backward pass, and advance the channel."""
        self.clock += copy_seconds
        start = max(self.clock, self.channel_end)
        self.channel_end = start + collective_seconds
        return max(0.0, min(collective_seconds, self.remaining_backward - (start - self.clock)))

    def _seconds(self, collective: str, bucket: int) -> float:
        if self.job.collective_seconds:
            return self.job.collective_seconds[bucket]
        size, ranks = self.sizes[bucket], self.job.ranks
        if collective == "all-gather":
            return collectives.gather_seconds(self.link, ranks, size)
        size = compressed_bytes(size, self.job)
        if collective == "reduce-scatter":
            return collectives.scatter_seconds(self.link, ranks, size)
        return collectives.all_reduce_seconds(self.job.algorithm, self.link, ranks, size)

    def _append_collective(
        self, collective: str, bucket: int, dependencies: Sequence[int], step: int, extra_seconds: float = 0.0
    ) -> int:
        duration = self._seconds(collective, bucket) + extra_seconds
        if collective == "all-reduce":
            dependencies = [*dependencies, *self.reductions[-1:]]
        return self._append(
            f"{collective} {bucket}", Cause.COMMUNICATION, duration, ("channel",), dependencies, ALL_RANKS, step
        )

    def _append_update(self, step: int) -> None:
        duration = self.work.update / (self.job.ranks if self.job.sharded else 1)
        for rank in range(len(self.rank_classes)):
            dependencies: Sequence[int] = self.reductions
            if self.sharing is not None and self.reductions:
                copy_back = self.sharing.copy_per_byte * sum(self.sizes)
                dependencies = [self._append_compute(COPY_OUT, Cause.SERVING, copy_back, self.reductions, rank, step)]
            self._append_compute("update", Cause.UPDATE, duration, dependencies, rank, step)
        self.reductions = []


def _buckets_by_layer(work: Work, plan: Buckets) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each layer, the buckets with its gradients, and the buckets that are full at its end."""
    bucket_of = {position: number for number, bucket in enumerate(plan) for position in bucket}
    last_gradients = {bucket[-1]: number for number, bucket in enumerate(plan)}
    layer_buckets: list[list[int]] = [[] for _ in work.layers]
    full_buckets: list[list[int]] = [[] for _ in work.layers]
    position = 0
    for number in range(len(work.layers) - 1, -1, -1):
        positions = range(position, position + len(work.layers[number].gradients))
        layer_buckets[number] = sorted({bucket_of[index] for index in positions if index in bucket_of})
        full_buckets[number] = sorted(last_gradients[index] for index in positions if index in last_gradients)
        position = positions.stop
    return layer_buckets, full_buckets


# --- buckets of gradients ---------------------------------------------------------------------------------------------


MIB = 1 << 20
FIRST_BYTES = 1 * MIB
"""Size limit of the first bucket if the others have PyTorch's default size."""

BUCKET_BYTES = 25 * MIB

Buckets = tuple[tuple[int, ...], ...]
"""Indices of gradients in the order of arrival, by bucket; a bucket is full when its last gradient arrives."""


def ddp_buckets(sizes: Sequence[int], bucket: int | None = None) -> Buckets:
    """Return the buckets of gradients in the order of their arrival.

    A bucket is full as soon as it reaches its limit, so it may be larger than the limit. With the default size the
    limit of the first bucket is 1 MiB; a given size applies to all buckets.

    Args:
        sizes: bytes of each gradient, all of one element type.
        bucket: limit in bytes; default: PyTorch's 25 MiB.

    Raises:
        UsageError: a size is negative, or the limit is not above 0.
    """
    if bucket is not None and bucket <= 0:
        raise UsageError(f"a bucket of {bucket} bytes holds nothing; give a size above 0, such as 25MiB")
    if any(size < 0 for size in sizes):
        raise UsageError("the size of a gradient must not be negative")
    limit = FIRST_BYTES if bucket is None else bucket
    buckets: list[tuple[int, ...]] = []
    members: list[int] = []
    filled_bytes = 0
    for index, size in enumerate(sizes):
        members.append(index)
        filled_bytes += size
        if filled_bytes >= limit:
            buckets.append(tuple(members))
            members, filled_bytes = [], 0
            limit = BUCKET_BYTES if bucket is None else bucket
    return (*buckets, *([tuple(members)] if members else ()))
