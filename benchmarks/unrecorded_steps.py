"""What does a step that `xsp run` does not record cost more than without xsp?

A process without xsp and one under `xsp run` run the same program step by step in turns (`parts/lockstep.py`). Times
are of a whole iteration by the program's own clock; `CPU` is the time of its thread on a processor. Compared are pairs
of iterations of equal number, by what xsp did in them: steady steps, which its figures come from, other unrecorded
steps, and those right after a recorded one. `corrected` are steady steps less the time of idle collectors that xsp
subtracts in its figures. `faults` are page faults in an iteration of each try, without xsp → with it. The control are
two processes without xsp.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from parts import pairs, turns
from parts.apart import Program, Runner
from parts.lockstep import AFTER, CONTROL, OTHER, STEADY, Compared, Try, try_once

PROGRAMS = (
    Program("forward 1 ms", "mlp.py --width 256 --depth 8 --batch 96"),
    Program("forward 4 ms", "mlp.py --width 512 --depth 6 --batch 128"),
    Program("forward 9 ms", "mlp.py --width 512 --depth 8 --batch 224"),
    Program("forward 30 ms", "mlp.py --width 1024 --depth 8 --batch 192"),
    Program("training 9 ms", "mlp.py --train SGD --width 384 --depth 8 --batch 96"),
    Program("tiny modules", "tiny_modules.py"),
    Program("SGD", "mlp.py --train SGD --width 128 --depth 3"),
    Program("AdamW", "mlp.py --train AdamW --depth 8"),
    Program("hooks", "mlp.py --hooks --depth 40 --width 64"),
    Program("sleep", "mlp.py --train SGD --width 64 --sleep-ms 5"),
    Program("scaler skips", "scaler.py"),
    Program("loader", "loader.py"),
)
QUICK = ("forward 9 ms",)
COLUMNS = (
    "program", "tries", "own CPU ms", "steady: CPU ×", "steady: time ×", "steady: CPU +µs", "steady: corrected time ×",
    "other: CPU ×", "after recorded: CPU ×", "control: CPU ×", "control: time ×", "faults",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = pairs.parse(pairs.parser(__doc__, pairs=5), arguments)
    report = turns.Report("unrecorded_steps", "Steps that are not recorded, beside those without xsp [95 %]", COLUMNS)
    programs = pairs.selected(PROGRAMS, options, QUICK)
    runner = Runner(options.of_seconds, options.threads)
    tries: dict[str, list[Try]] = defaultdict(list)
    with report.until_interrupted():
        for number in range(pairs.QUICK_PAIRS if options.quick else options.rounds):
            for program in programs:
                with report.trying(program.name):
                    if program.name not in runner.counts:
                        runner.bare(program)
                    tries[program.name].append(try_once(runner, program, number))
                    turns.say(f"  {program.name}: {_brief(tries[program.name][-1].compared)}")
    for name, known in tries.items():
        _add(report, name, known)
    report.finish(options)


def _brief(compared: dict[str, Compared]) -> str:
    return ", ".join(
        f"{state} CPU × {each.cpu:.3f} time × {each.time:.3f} corrected × {each.corrected:.3f}"
        for state, each in compared.items()
    )


def _add(report: turns.Report, name: str, known: Sequence[Try]) -> None:
    def middle(state: str, field: str) -> turns.Figure:
        return pairs.middle([getattr(each.compared[state], field) for each in known if state in each.compared])

    own_s = statistics.median(used_s for each in known for _, used_s in each.bare.steps)
    row = [
        name, str(len(known)), f"{1e3 * own_s:.3f}", middle(STEADY, "cpu").text(3), middle(STEADY, "time").text(3),
        middle(STEADY, "added_s").text(0, 1e6), middle(STEADY, "corrected").text(3),
        middle(OTHER, "cpu").text(3), middle(AFTER, "cpu").text(3),
        middle(CONTROL, "cpu").text(3), middle(CONTROL, "time").text(3),
        "; ".join(f"{each.bare.faults:.0f} → {each.profiled.faults:.0f}" for each in known),
    ]  # fmt: skip
    report.add(row, tries=[each.compared for each in known])


if __name__ == "__main__":
    main()
