"""What does each level set add to a step on a GPU, and what does torch.profiler with CUDA activity add?

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
    active: list[profile] = []

    def start() -> None:
        active.append(profile(activities=activities))
        active[0].start()

    def stop() -> None:
        active.pop().stop()

    return Condition("torch.profiler", workload.step, start, stop=stop)


def groups_of(workload: Workload, notes: set[str]) -> tuple[list[Group], dict[str, Levels]]:
    """Return the conditions that are available here; add to `notes` why others are not."""
    layers = Levels(*LAYERS)
    conditions = [
        layers.condition("M", workload.step, Level.MODEL),
        layers.condition("M/L", workload.step, Level.LAYER),
    ]
    groups = [
        Group([Condition("bare", workload.step), torch_profiler(workload)]),
        Group(conditions, layers.installation),
    ]
    sources = {}
    for name, collectors in {"cupti": ("torchops", "cupti"), "kineto": ("torchops",)}.items():
        try:
            sources[name] = Levels(*LAYERS, *collectors, source=collectors[-1])
        except LookupError as error:
            notes.add(f"Not measured: {name}, because {error}.")
            continue
        groups.append(Group([sources[name].condition(name, workload.step, Level.KERNEL)], sources[name].installation))
    return groups, sources


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(gpu_workloads.add_options(turns.parser(__doc__), seconds=8.0), arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_rungs", "Overhead of xsp's rungs on a GPU, % of the bare step [95 %]", COLUMNS)
    notes: set[str] = set()
    method = turns.turns_of(options)
    with report.until_interrupted():
        for workload in gpu_workloads.build_workloads(options):
            groups, sources = groups_of(workload, notes)
            rounds = method.take(groups, gpu_workloads.rounds_of(workload, options, len(sources) + 4), workload.step)
            _add(report, workload.name, rounds, sources)
            notes.update(note for levels in sources.values() for note in levels.notes())
    report.notes += [*sorted(notes), gpu_workloads.device_line(), method.note()]
    report.finish(options)


def _add(report: turns.Report, name: str, rounds: Sequence[turns.Round], sources: dict[str, Levels]) -> None:
    missing = turns.Figure(float("nan"), float("nan"), float("nan"))
    ratios = {
        condition: turns.ratio(rounds, condition, "bare") if condition in rounds[0] else missing
        for condition in ("M", "M/L", "cupti", "kineto", "torch.profiler")
    }
    source = next((candidate for candidate in ("cupti", "kineto") if candidate in sources), None)
    against = turns.ratio(rounds, source, "torch.profiler") if source is not None else missing
    kernels = sources[source].span_counts[source][Level.KERNEL] if source is not None else 0
    report.add(
        [
            name, str(len(rounds)), f"{turns.median([times['bare'] for times in rounds]) / 1e6:.2f}",
            *(figure.text(1, 100, -1) for figure in ratios.values()), str(kernels), against.text(3),
            turns.verdict(ratios["M/L"], LAYER_GOAL), turns.verdict(against, 1.0) if source is not None else "–",
        ],
        ratios=ratios, against=against, source=source, kernels=kernels, rounds=rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
