"""What does each rung add to a step on a GPU, and what does torch.profiler with CUDA activity add?

Conditions, in turns: `bare`; the model level (`M`); with layers (`M/L`); with operators and device work through CUPTI
(`cupti`) and through Kineto (`kineto`); torch.profiler alone, recording the host and CUDA. All steps end when the
device has finished their work. Starting, stopping and decoding are outside the measured time for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from parts import gpu_workloads, turns
from parts.levels import Levels
from parts.turns import Condition, Group

from xsp.models import Workload
from xsp.schema import Level

LAYER_GOAL = 1.02
COLUMNS = (
    "model", "rounds", "bare ms", "M %", "M/L %", "cupti %", "kineto %", "torch.profiler %", "kernels",
    "cupti / torch.profiler", "M/L ≤ 2 %", "kernels ≤ torch.profiler",
)  # fmt: skip
LAYERS = ("modules", "training", "dataloading")


def torch_profiler(workload: Workload) -> Condition:
    """Return the condition in which torch.profiler records the host and CUDA."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    running: list[profile] = []

    def start() -> None:
        running.append(profile(activities=activities))
        running[0].start()

    def stop() -> None:
        running.pop().stop()

    return Condition("torch.profiler", workload.step, start, stop=stop)


def groups_of(workload: Workload, notes: set[str]) -> tuple[list[Group], dict[str, Levels]]:
    """Return the conditions that are available here; add to `notes` why others are not."""
    layers = Levels(*LAYERS)
    inside = [layers.condition("M", workload.step, Level.MODEL), layers.condition("M/L", workload.step, Level.LAYER)]
    groups = [Group([Condition("bare", workload.step), torch_profiler(workload)]), Group(inside, layers.installed)]
    kept = {}
    for name, collectors in {"cupti": ("torchops", "cupti"), "kineto": ("torchops",)}.items():
        try:
            kept[name] = Levels(*LAYERS, *collectors, source=collectors[-1])
        except LookupError as error:
            notes.add(f"Not measured: {name}, because {error}.")
            continue
        groups.append(Group([kept[name].condition(name, workload.step, Level.KERNEL)], kept[name].installed))
    return groups, kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(gpu_workloads.add_options(turns.parser(__doc__), seconds=8.0), arguments)
    gpu_workloads.need_a_gpu()
    report = turns.Report("gpu_rungs", "Overhead of xsp's rungs on a GPU, % of the bare step [95 %]", COLUMNS)
    notes: set[str] = set()
    taker = turns.turns_of(options)
    for workload in gpu_workloads.each(options):
        groups, kept = groups_of(workload, notes)
        rounds = taker.take(groups, gpu_workloads.rounds_of(workload, options, len(kept) + 4), workload.step)
        _add(report, workload.name, rounds, kept)
        notes.update(note for levels in kept.values() for note in levels.notes())
    report.notes += [*sorted(notes), gpu_workloads.device_line(), taker.note()]
    report.finish(options)


def _add(report: turns.Report, name: str, rounds: Sequence[turns.Round], kept: dict[str, Levels]) -> None:
    missing = turns.Figure(float("nan"), float("nan"), float("nan"))
    ratios = {
        each: turns.ratio(rounds, each, "bare") if each in rounds[0] else missing
        for each in ("M", "M/L", "cupti", "kineto", "torch.profiler")
    }
    ours = next((each for each in ("cupti", "kineto") if each in kept), None)
    against = turns.ratio(rounds, ours, "torch.profiler") if ours is not None else missing
    kernels = kept[ours].seen[ours][Level.KERNEL] if ours is not None else 0
    report.add(
        [
            name, str(len(rounds)), f"{turns.median([one['bare'] for one in rounds]) / 1e6:.2f}",
            *(figure.shown(1, 100, -1) for figure in ratios.values()), str(kernels), against.shown(3),
            turns.verdict(ratios["M/L"], LAYER_GOAL), turns.verdict(against, 1.0) if ours is not None else "–",
        ],
        ratios=ratios, against=against, source=ours, kernels=kernels, rounds=rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
