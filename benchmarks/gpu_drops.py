"""Are records dropped at 200,000 kernels a second, and how fast are they decoded?

A CUDA graph of many tiny kernels is replayed repeatedly, which runs them faster than any program can launch them. The
number of kernels is known; it is compared with the records that CUPTI delivered, its counter of dropped records, and
the time of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from parts import gpu_workloads, turns
from parts.levels import Levels

from xsp.schema import Kind, Level

GOAL_PER_S = 200_000
NODES = 1000
COLUMNS = (
    "replays", "kernels", "rounds", "kernels a second, recorded", "bare", "recorded kernels", "dropped or lost",
    "to decode, kernels a second", "≥ 200,000 a second and none dropped",
)  # fmt: skip


class Burst(NamedTuple):
    """One recorded burst."""

    ns: int
    kernels: int
    decode_ns: int


def burst(replays: int) -> Callable[[], None]:
    """Return a step that replays a graph of tiny kernels `replays` times, and waits for the device."""
    import torch

    value = torch.zeros(32, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        value.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            value.add_(1)

    def run() -> None:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()

    return run


def record_bursts(levels: Levels, step: Callable[[], None], rounds: int) -> list[Burst]:
    """Record the burst `rounds` times."""
    bursts = []
    with levels.installation():
        levels.record_step(step, Level.KERNEL)  # the first use of CUPTI takes long
        for _ in range(rounds):
            ns, decode = levels.record_timed(step, Level.KERNEL)
            begin = perf_counter_ns()
            kernels = sum(span.kind == Kind.KERNEL for span in decode())
            bursts.append(Burst(ns, kernels, perf_counter_ns() - begin))
    return bursts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=7), arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_drops", "Kernels of graphs replayed as fast as the device runs them [95 %]", COLUMNS)
    with report.until_interrupted():
        for replays in (10, 50) if options.quick else (10, 100, 400):
            step = burst(replays)
            step()
            bare = [_time(step) for _ in range(options.rounds)]
            try:
                levels = Levels("cupti", source="cupti")
            except LookupError as error:
                raise SystemExit(f"CUPTI is not available here: {error}") from error
            _add(report, replays, bare, record_bursts(levels, step, options.rounds))
            notes = levels.notes()
            dropped = [note for note in notes if "dropped" in note]
            report.notes += (
                notes if dropped else [*notes, f"{replays} replays: CUPTI's counter of dropped records stayed at 0."]
            )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


def _add(report: turns.Report, replays: int, bare: Sequence[int], bursts: Sequence[Burst]) -> None:
    expected = replays * NODES
    rate = turns.middle([expected / sample.ns * 1e9 for sample in bursts])
    lost = sum(expected - sample.kernels for sample in bursts)
    decoding = turns.middle([sample.kernels / sample.decode_ns * 1e9 for sample in bursts])
    is_met = rate.value >= GOAL_PER_S and not lost
    report.add(
        [
            str(replays), str(expected), str(len(bursts)), rate.text(0),
            turns.middle([expected / bare_ns * 1e9 for bare_ns in bare]).text(0), str(bursts[0].kernels), str(lost),
            decoding.text(0), "met" if is_met else "missed",
        ],
        bare=bare, found=bursts,
    )  # fmt: skip


def _time(step: Callable[[], None]) -> int:
    begin = perf_counter_ns()
    step()
    return perf_counter_ns() - begin


if __name__ == "__main__":
    main()
