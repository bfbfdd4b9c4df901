"""What do xsp's model, layer and op levels add to a step, compared with torch.profiler alone?

Conditions: `bare`; `xsp` with the model, layer and op levels on; torch.profiler with `record_shapes=True`
(its documentation's first example, and the goal's peer); torch.profiler without shapes, to separate the cost of
shapes. Starting, stopping and decoding are outside the measured time for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from parts import turns, workloads
from parts.levels import Levels
from parts.turns import Condition, Group

from xsp.models import Workload
from xsp.schema import Level

COLUMNS = (
    "model", "layers + ops", "rounds", "bare ms", "xsp adds %", "torch.profiler adds %", "without shapes adds %",
    "xsp step / torch.profiler step", "added: xsp / torch.profiler", "≤ torch.profiler",
)  # fmt: skip


def torch_profiler(name: str, workload: Workload, shapes: bool) -> Condition:
    """Return the condition in which torch.profiler records the step."""
    from torch.profiler import ProfilerActivity, profile

    active: list[profile] = []

    def start() -> None:
        active.append(profile(activities=[ProfilerActivity.CPU], record_shapes=shapes))
        active[0].start()

    def stop() -> None:
        active.pop().stop()

    return Condition(name, workload.step, start, stop=stop)


def rounds_of(workload: Workload, method: turns.Turns, rounds: int) -> tuple[list[turns.Round], int]:
    """Return the measured rounds, and the number of layer and operator spans in a step."""
    levels = Levels("modules", "training", "dataloading", "torchops")
    bare_conditions = [
        Condition("bare", workload.step),
        torch_profiler("torch", workload, shapes=True),
        torch_profiler("torch without shapes", workload, shapes=False),
    ]
    groups = [Group(bare_conditions), Group([levels.condition("xsp", workload.step, Level.OP)], levels.installation)]
    rounds_taken = method.take(groups, rounds, workload.step)
    return rounds_taken, levels.span_counts["xsp"][Level.LAYER] + levels.span_counts["xsp"][Level.OP]


def added_ratio(rounds: Sequence[turns.Round]) -> float:
    """Return xsp's overhead over torch.profiler's, both medians of differences; nan if torch.profiler adds nothing."""
    xsp_ns = turns.median([round_times["xsp"] - round_times["bare"] for round_times in rounds])
    torch_ns = turns.median([round_times["torch"] - round_times["bare"] for round_times in rounds])
    return xsp_ns / torch_ns if torch_ns > 0 else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(workloads.add_options(turns.parser(__doc__)), arguments)
    title = "Overhead of xsp's model + layer + op levels and of torch.profiler, % of the bare step [95 %]"
    report = turns.Report("op_overhead", title, COLUMNS)
    verdicts, method = [], turns.turns_of(options)
    with report.until_interrupted():
        for workload in workloads.build_workloads(options):
            rounds, spans = rounds_of(workload, method, workloads.rounds_of(workload, options))
            names = ("xsp", "torch", "torch without shapes")
            against_bare = {name: turns.ratio(rounds, name, "bare") for name in names}
            steps = turns.ratio(rounds, "xsp", "torch")
            added = turns.bootstrap(rounds, added_ratio, options.seed)
            verdicts.append(turns.verdict(steps, 1.0))
            bare = turns.median([round_times["bare"] for round_times in rounds])
            percents = [figure.text(1, 100, -1) for figure in against_bare.values()]
            head = [workload.name, str(spans), str(len(rounds)), f"{bare / 1e6:.2f}"]
            report.add([*head, *percents, steps.text(3), added.text(2), verdicts[-1]],
                       spans=spans, ratios=against_bare, steps=steps, added=added, rounds=rounds)  # fmt: skip
    goal = "a step takes no longer with xsp than with torch.profiler"
    report.notes += [workloads.summary_line(verdicts, goal), method.note()]
    report.finish(options)


if __name__ == "__main__":
    main()
