"""Fabricated Kineto traces of a distributed training job with any number of ranks, and the truth about the job.

Modelled on traces of PyTorch's profiler on real GPUs (two ranks of 128, one of two with NCCL's metadata, one of
eight): one file per rank with `distributedInfo`, operators, launches, flows, kernels, and NCCL kernels with their
collective. Ranks communicate in groups (an all-gather in each layer's forward pass) and all together (an all-reduce in
each layer's backward pass, beside the computation). A rank leaves a collective after the last rank has arrived.

Each rank reads its own clock, which has an offset (skew) and a wrong rate (drift). Stragglers compute more slowly; some
ranks leave no file; ranks differ slightly in what they launch. Everything follows from a seed, and `truth.json` states
what the analyses have to find.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

BASE_NS = 1_790_000_000_000_000_000
"""Base of the times in the files, `baseTimeNanoseconds`."""

START_NS = 1_000_000_000
"""Start of the job in nanoseconds after `BASE_NS`."""

DEVICE = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_899_345_920, "computeMajor": 8,
          "computeMinor": 0, "numSms": 108, "warpSize": 32}  # fmt: skip
GEMM = "ampere_sgemm_128x64_nn"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::relu_kernel(float)>(int, float)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE_STREAM, NCCL_STREAM = 7, 20
LAUNCH_NS = 4_000
LEAVE_NS = 3_000
"""Maximum difference in nanoseconds between the times at which ranks leave a collective."""

ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Job:
    """The job to fabricate."""

    ranks: int = 8
    steps: int = 3
    layers: int = 4
    kernels: int = 4
    """Computation kernels in each layer and direction."""

    group: int = 4
    """Number of ranks in a group for all-gathers; 0 for a job without all-gathers."""

    stragglers: Mapping[int, float] = field(default_factory=dict)
    """Rank → factor on the duration of its computation."""

    missing: Sequence[int] = ()
    """Ranks that take part but leave no file."""

    skew_ns: int = 5_000_000
    """Maximum offset of a clock, in either direction."""

    drift_ppm: float = 20.0
    """Maximum error of a clock's rate, in either direction."""

    kernel_ns: int = 40_000
    seed: int = 0


@dataclass
class _Rank:
    """One rank while its file is being written; times are true nanoseconds after `BASE_NS`."""

    number: int
    skew_ns: int
    drift: float
    slowdown: float
    chance: random.Random
    file: IO[str] | None
    host: int = START_NS
    streams: dict[int, int] = field(default_factory=lambda: dict.fromkeys((COMPUTE_STREAM, NCCL_STREAM), START_NS))
    calls: int = 0

    def occupy(self, stream: int, earliest: int, duration_ns: int) -> tuple[int, int]:
        """Put work on a stream; return the begin and end of the work."""
        begin = max(earliest, self.streams[stream])
        self.streams[stream] = begin + duration_ns
        return begin, begin + duration_ns

    def put(self, **row: Any) -> None:
        """Write a row with the times of this rank's clock; the drift also scales durations."""
        if self.file is None:
            return
        begin = row.pop("start_ns")
        end = begin + row.pop("duration_ns", 0)
        clock_start, clock_end = (time + self.skew_ns + round(time * self.drift) for time in (begin, end))
        row["ts"] = clock_start / 1e3
        if row["ph"] == "X":
            row["dur"] = (clock_end - clock_start) / 1e3
        self.file.write(",\n" + json.dumps(row))


def write(folder: Path, job: Job) -> dict[str, Any]:
    """Write `traces/rank-N.json.gz` of each rank that is not missing, and `truth.json`, into a folder.

    Returns:
        The content of `truth.json`: seed, ranks, missing, stragglers, the skew of each rank's clock in the middle of
        the job and its drift, and the number of collectives that each rank takes part in.
    """
    traces = folder / "traces"
    traces.mkdir(parents=True)
    with ExitStack() as stack:
        ranks = [_rank(number, job, traces, stack) for number in range(job.ranks)]
        numbers = _SequenceNumbers()
        for step in range(job.steps):
            _step(ranks, job, step, numbers)
        for rank in ranks:
            _finish_file(rank)
    truth = _truth(ranks, job)
    (folder / "truth.json").write_text(json.dumps(truth, indent=2) + "\n")
    return truth


@dataclass
class _SequenceNumbers:
    """Sequence numbers of the collectives of each communicator, the same on all its ranks."""

    counts: dict[str, int] = field(default_factory=dict)

    def next(self, communicator: str) -> int:
        self.counts[communicator] = self.counts.get(communicator, 0) + 1
        return self.counts[communicator]


def _rank(number: int, job: Job, traces: Path, stack: ExitStack) -> _Rank:
    chance = random.Random(job.seed * 1_000_003 + number)
    skew = chance.randint(-job.skew_ns, job.skew_ns)
    drift = chance.uniform(-job.drift_ppm, job.drift_ppm) / 1e6
    file = None
    if number not in job.missing:
        file = stack.enter_context(_open(traces / f"rank-{number}.json.gz"))
        file.write(_head(number, job))
    return _Rank(number, skew, drift, job.stragglers.get(number, 1.0), chance, file)


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "wt", compresslevel=1, encoding="utf-8")


def _head(number: int, job: Job) -> str:
    keys = {
        "schemaVersion": 1,
        "deviceProperties": [DEVICE],
        "distributedInfo": {"backend": "nccl", "rank": number, "world_size": job.ranks},
        "baseTimeNanoseconds": BASE_NS,
        "displayTimeUnit": "ms",
    }
    process = {"ph": "M", "name": "process_name", "pid": _pid(number), "tid": 0, "ts": 0, "args": {"name": "python"}}
    return json.dumps(keys)[:-1] + ', "traceEvents": [\n' + json.dumps(process)


def _finish_file(rank: _Rank) -> None:
    if rank.file is not None:
        rank.file.write("\n]}\n")


def _pid(rank: int) -> int:
    return 4000 + 8 * rank


def _step(ranks: Sequence[_Rank], job: Job, step: int, numbers: _SequenceNumbers) -> None:
    """Run one step of all ranks, layer by layer."""
    begins = [rank.host for rank in ranks]
    for layer in range(job.layers):
        for rank in ranks:
            _compute(rank, job, "aten::mm", layer)
        for group in _groups(ranks, job):
            name = f"tensor_{group[0].number // job.group}"
            _collective(group, name, numbers.next(name), GATHER, "_all_gather_base", job, wait=True)
    for layer in reversed(range(job.layers)):
        for rank in ranks:
            _compute(rank, job, "MmBackward0", layer)
            _compute(rank, job, "MmBackward0", layer)
        _collective(ranks, "world", numbers.next("world"), REDUCE, "allreduce", job, wait=False)
    for rank, begin in zip(ranks, begins, strict=True):
        _end_step(rank, begin, step)


def _groups(ranks: Sequence[_Rank], job: Job) -> Iterator[Sequence[_Rank]]:
    for start in range(0, len(ranks) if job.group else 0, job.group or 1):
        yield ranks[start : start + job.group]


def _compute(rank: _Rank, job: Job, name: str, layer: int) -> None:
    """Launch the kernels of a layer; every third rank also launches a small copy."""
    begin = rank.host
    rows = []
    for number in range(job.kernels):
        duration_ns = round(job.kernel_ns * rank.slowdown * rank.chance.uniform(0.95, 1.05))
        rows.append(_launch(rank, COMPUTE_STREAM, duration_ns, GEMM if number % 2 == 0 else RELU))
    if layer == 0 and rank.number % 3 == 1:
        rows.append(_launch(rank, COMPUTE_STREAM, 1_500, "Memcpy DtoD (Device -> Device)"))
    rank.put(
        ph="X", cat="cpu_op", name=name, pid=_pid(rank.number), tid=1, start_ns=begin, duration_ns=rank.host - begin,
        args={"External id": rank.calls, "Input Dims": [[64, 256], [256, 256]], "Input type": ["float", "float"],
              **({"Sequence number": rank.calls, "Fwd thread id": 1} if name.endswith("Backward0") else {})},
    )  # fmt: skip
    for row in rows:
        _put_launched(rank, *row)


def _launch(rank: _Rank, stream: int, duration_ns: int, name: str) -> tuple[str, int, int, int, int, int]:
    """Launch work that involves one rank only; return its name, stream, call, launch, begin and end."""
    rank.calls += 1
    launch_ns = rank.host
    rank.host += LAUNCH_NS
    begin, end = rank.occupy(stream, rank.host, duration_ns)
    return name, stream, rank.calls, launch_ns, begin, end


def _put_launched(
    rank: _Rank, name: str, stream: int, call: int, launch_ns: int, begin: int, end: int, **details: Any
) -> None:
    """Write a launch, its flow, and the launched work."""
    pid = _pid(rank.number)
    rank.put(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", pid=pid, tid=1, start_ns=launch_ns,
             duration_ns=LAUNCH_NS - 500, args={"External id": call, "cbid": 211, "correlation": call})  # fmt: skip
    rank.put(ph="s", id=call, cat="ac2g", name="ac2g", pid=pid, tid=1, start_ns=launch_ns)
    rank.put(ph="f", id=call, cat="ac2g", name="ac2g", pid=0, tid=stream, start_ns=begin, bp="e")
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    args: dict[str, Any] = {"External id": call, "device": 0, "context": 1, "stream": stream, "correlation": call}
    args |= {"bytes": 4096} if category == "gpu_memcpy" else {"grid": [64, 1, 1], "block": [256, 1, 1], **details}
    rank.put(ph="X", cat=category, name=name, pid=0, tid=stream, start_ns=begin, duration_ns=end - begin, args=args)


def _collective(
    ranks: Sequence[_Rank], communicator: str, number: int, kernel: str, name: str, job: Job, wait: bool
) -> None:
    """Let ranks arrive at a collective, each when it is ready, and leave it together.

    Args:
        ranks: ranks of the communicator.
        communicator: name of the communicator.
        number: sequence number of this collective in the communicator.
        kernel: name of the kernel.
        name: PyTorch's name of the collective.
        job: the job to fabricate.
        wait: whether computation continues only after the collective; else it runs beside it.
    """
    arrivals = []
    for rank in ranks:
        rank.calls += 1
        launch_ns, rank.host = rank.host, rank.host + LAUNCH_NS
        # A collective waits for the preceding computation through a CUDA event, whatever its stream.
        arrivals.append((launch_ns, max(rank.host, *rank.streams.values()) + rank.chance.randint(0, 500)))
    last_arrival = max(arrival for _, arrival in arrivals) + job.kernel_ns
    details = {
        "Collective name": name, "In msg nelems": ELEMENTS, "Out msg nelems": ELEMENTS, "Group size": len(ranks),
        "dtype": "Float", "Process Group Name": communicator, "Process Group Description": communicator,
        "Process Group Ranks": str([rank.number for rank in ranks]), "Seq": number,
    }  # fmt: skip
    for rank, (launch_ns, arrival) in zip(ranks, arrivals, strict=True):
        end = last_arrival + rank.chance.randint(0, LEAVE_NS)
        rank.streams[NCCL_STREAM] = end
        if wait:
            rank.streams[COMPUTE_STREAM] = end
        rank.put(ph="X", cat="user_annotation", name=f"nccl:{name}", pid=_pid(rank.number), tid=1, start_ns=launch_ns,
                 duration_ns=LAUNCH_NS, args={"External id": rank.calls})  # fmt: skip
        _put_launched(rank, kernel, NCCL_STREAM, rank.calls, launch_ns, arrival, end, **details)


def _end_step(rank: _Rank, begin: int, step: int) -> None:
    """Wait for the device, and write the span of the step."""
    rank.calls += 1
    wait_start = rank.host
    rank.host = max(rank.host, *rank.streams.values()) + 5_000
    pid = _pid(rank.number)
    rank.put(ph="X", cat="cuda_runtime", name="cudaDeviceSynchronize", pid=pid, tid=1, start_ns=wait_start,
             duration_ns=rank.host - wait_start, args={"cbid": 165, "correlation": rank.calls})  # fmt: skip
    rank.put(ph="X", cat="user_annotation", name=f"ProfilerStep#{step}", pid=pid, tid=1, start_ns=begin,
             duration_ns=rank.host - begin, args={})  # fmt: skip
    rank.host += 10_000


def _truth(ranks: Sequence[_Rank], job: Job) -> dict[str, Any]:
    middle = (START_NS + max(rank.host for rank in ranks)) // 2
    return {
        "seed": job.seed,
        "ranks": job.ranks,
        "missing": sorted(job.missing),
        "stragglers": {str(rank): slower for rank, slower in sorted(job.stragglers.items())},
        "skew_ns": {str(rank.number): rank.skew_ns + round(middle * rank.drift) for rank in ranks},
        "drift_ppm": {str(rank.number): rank.drift * 1e6 for rank in ranks},
        "collectives_per_rank": 2 * job.layers * job.steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fabricate one job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="new folder for traces/ and truth.json")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kernels", type=int, default=8, help="kernels of computation in each layer and direction")
    parser.add_argument("--missing", type=int, nargs="*", default=[], help="ranks without a file")
    parser.add_argument("--straggler", type=int, help="a rank that computes one and a half times as long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    slow = {} if options.straggler is None else {options.straggler: 1.5}
    write(options.folder, Job(options.ranks, options.steps, options.layers, options.kernels, 4, slow, options.missing,
                            seed=options.seed))  # fmt: skip
    print(f"{options.folder}: {options.ranks - len(options.missing)} files, seed {options.seed}")


if __name__ == "__main__":
    main()
