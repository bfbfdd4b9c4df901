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


class Found(NamedTuple):
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


def recorded(levels: Levels, step: Callable[[], None], rounds: int) -> list[Found]:
    """Record the burst `rounds` times."""
    found = []
    with levels.installed():
        levels.once(step, Level.KERNEL)  # the first use of CUPTI takes long
        for _ in range(rounds):
            ns, take = levels.timed(step, Level.KERNEL)
            begin = perf_counter_ns()
            kernels = sum(span.kind == Kind.KERNEL for span in take())
            found.append(Found(ns, kernels, perf_counter_ns() - begin))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=7), arguments)
    gpu_workloads.need_a_gpu()
    report = turns.Report("gpu_drops", "Kernels of graphs replayed as fast as the device runs them [95 %]", COLUMNS)
    for replays in (10, 50) if options.quick else (10, 100, 400):
        step = burst(replays)
        step()
        bare = [_time(step) for _ in range(options.rounds)]
        try:
            levels = Levels("cupti", source="cupti")
        except LookupError as error:
            raise SystemExit(f"CUPTI is not available here: {error}") from error
        _add(report, replays, bare, recorded(levels, step, options.rounds))
        said = levels.notes()
        dropped = [note for note in said if "dropped" in note]
        report.notes += (
            said if dropped else [*said, f"{replays} replays: CUPTI's counter of dropped records stayed at 0."]
        )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


def _add(report: turns.Report, replays: int, bare: Sequence[int], found: Sequence[Found]) -> None:
    ran = replays * NODES
    rate = turns.middle([ran / each.ns * 1e9 for each in found])
    lost = sum(ran - each.kernels for each in found)
    decoding = turns.middle([each.kernels / each.decode_ns * 1e9 for each in found])
    kept = rate.value >= GOAL_PER_S and not lost
    report.add(
        [
            str(replays), str(ran), str(len(found)), rate.shown(0),
            turns.middle([ran / each * 1e9 for each in bare]).shown(0), str(found[0].kernels), str(lost),
            decoding.shown(0), "met" if kept else "missed",
        ],
        bare=bare, found=found,
    )  # fmt: skip


def _time(step: Callable[[], None]) -> int:
    begin = perf_counter_ns()
    step()
    return perf_counter_ns() - begin


if __name__ == "__main__":
    main()
