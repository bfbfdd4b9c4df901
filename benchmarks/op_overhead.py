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


def torch_profiler(name: str, step: Workload, shapes: bool) -> Condition:
    """Return the condition in which torch.profiler records the step."""
    from torch.profiler import ProfilerActivity, profile

    running: list[profile] = []

    def start() -> None:
        running.append(profile(activities=[ProfilerActivity.CPU], record_shapes=shapes))
        running[0].start()

    def stop() -> None:
        running.pop().stop()

    return Condition(name, step.step, start, stop=stop)


def rounds_of(workload: Workload, taker: turns.Turns, rounds: int) -> tuple[list[turns.Round], int]:
    """Return the measured rounds, and the number of layer and operator spans in a step."""
    levels = Levels("modules", "training", "dataloading", "torchops")
    outside = [
        Condition("bare", workload.step),
        torch_profiler("torch", workload, shapes=True),
        torch_profiler("torch without shapes", workload, shapes=False),
    ]
    groups = [Group(outside), Group([levels.condition("xsp", workload.step, Level.OP)], levels.installed)]
    measured = taker.take(groups, rounds, workload.step)
    return measured, levels.seen["xsp"][Level.LAYER] + levels.seen["xsp"][Level.OP]


def added_ratio(rounds: Sequence[turns.Round]) -> float:
    """Return xsp's overhead over torch.profiler's, both medians of differences; nan if torch.profiler adds nothing."""
    ours = turns.median([each["xsp"] - each["bare"] for each in rounds])
    theirs = turns.median([each["torch"] - each["bare"] for each in rounds])
    return ours / theirs if theirs > 0 else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(workloads.add_options(turns.parser(__doc__)), arguments)
    title = "Overhead of xsp's model + layer + op levels and of torch.profiler, % of the bare step [95 %]"
    report = turns.Report("op_overhead", title, COLUMNS)
    verdicts, taker = [], turns.turns_of(options)
    with report.until_interrupted():
        for workload in workloads.each(options):
            rounds, spans = rounds_of(workload, taker, workloads.rounds_of(workload, options))
            names = ("xsp", "torch", "torch without shapes")
            against_bare = {name: turns.ratio(rounds, name, "bare") for name in names}
            steps = turns.ratio(rounds, "xsp", "torch")
            added = turns.bootstrap(rounds, added_ratio, options.seed)
            verdicts.append(turns.verdict(steps, 1.0))
            bare = turns.median([one["bare"] for one in rounds])
            percents = [figure.shown(1, 100, -1) for figure in against_bare.values()]
            head = [workload.name, str(spans), str(len(rounds)), f"{bare / 1e6:.2f}"]
            report.add([*head, *percents, steps.shown(3), added.shown(2), verdicts[-1]],
                       spans=spans, ratios=against_bare, steps=steps, added=added, rounds=rounds)  # fmt: skip
    goal = "a step takes no longer with xsp than with torch.profiler"
    report.notes += [workloads.summary_line(verdicts, goal), taker.note()]
    report.finish(options)


if __name__ == "__main__":
    main()
