"""What does the layer level add to a step? A bare step against one with the model and layer levels on.

Conditions: `bare` (no xsp block), `off` (a block is active and nothing records: the cost in every other step of a
profiled program), `M` (model level), `M/L` (model and layer level). Times are between the two readings of the clock
that a session takes; the session's work before and after a step is not included.
"""

from __future__ import annotations

from collections.abc import Sequence

from parts import turns, workloads
from parts.levels import Levels
from parts.turns import Condition, Group

from xsp.models import Workload
from xsp.schema import Level

GOAL = 1.03
COLUMNS = ("model", "layers", "rounds", "bare ms", "off %", "M %", "M/L %", "ns per layer", "≤ 3 %")


def rounds_of(workload: Workload, method: turns.Turns, rounds: int) -> tuple[list[turns.Round], int]:
    """Return the measured rounds, and the number of layer spans in a step."""
    levels = Levels("modules", "training", "dataloading")
    rungs = {"off": Level.APPLICATION, "M": Level.MODEL, "M/L": Level.LAYER}
    conditions = [levels.condition(name, workload.step, rung) for name, rung in rungs.items()]
    groups = [Group([Condition("bare", workload.step)]), Group(conditions, levels.installation)]
    rounds_taken = method.take(groups, rounds, workload.step)
    return rounds_taken, levels.span_counts["M/L"][Level.LAYER]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(workloads.add_options(turns.parser(__doc__)), arguments)
    report = turns.Report("layer_overhead", "Overhead of xsp's levels, % of the bare step [95 %]", COLUMNS)
    verdicts, method = [], turns.turns_of(options)
    with report.until_interrupted():
        for workload in workloads.build_workloads(options):
            rounds, layers = rounds_of(workload, method, workloads.rounds_of(workload, options))
            ratios = {name: turns.ratio(rounds, name, "bare") for name in ("off", "M", "M/L")}
            layer_cost = turns.difference(rounds, "M/L", "bare").text(0, 1 / layers)
            verdicts.append(turns.verdict(ratios["M/L"], GOAL))
            bare = turns.median([round_times["bare"] for round_times in rounds])
            added = [figure.text(2, 100, -1) for figure in ratios.values()]
            row = [workload.name, str(layers), str(len(rounds)), f"{bare / 1e6:.2f}", *added, layer_cost, verdicts[-1]]
            report.add(row, layers=layers, ratios=ratios, rounds=rounds)
    report.notes += [workloads.summary_line(verdicts, "the layer level adds at most 3 %"), method.note()]
    report.finish(options)


if __name__ == "__main__":
    main()
