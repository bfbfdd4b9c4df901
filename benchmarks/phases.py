"""Are the shares of forward, backward and optimizer that xsp states those of the program without xsp?

Programs that time their phases themselves (`bare_programs/phases.py`) run without xsp and under `xsp run`, each in a
process of its own, in turns (`parts/pairs.py`). A share is one of the step. `stated` is xsp's, from all steps that it
did not record; `as recorded` that of the steps that it recorded at the level of models. `off by` are points between
xsp's share and the program's own, the largest over the phases; `of processes` those between two processes without xsp.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from parts import pairs, turns
from parts.apart import Program, Runner

import xsp
from xsp import account
from xsp.account import entries as names
from xsp.schema import Level

PROGRAMS = (
    Program("linear, SGD", "phases.py"),
    Program("linear, AdamW", "phases.py --optimizer AdamW --depth 9"),
    Program("linear, Adam one by one", "phases.py --optimizer Adam --width 512 --one-by-one"),
    Program("convolution, Adam", "phases.py --model convolution --optimizer Adam --width 32 --batch 8"),
    Program("attention, AdamW", "phases.py --model attention --optimizer AdamW --width 128 --depth 3 --batch 8"),
    Program("wide, SGD", "phases.py --width 1024 --batch 128"),
)
QUICK = ("linear, AdamW",)
COLUMNS = (
    "program",
    "pairs",
    "own %",
    "stated %",
    "as recorded %",
    "stated: off by",
    "recorded: off by",
    "processes: off by",
)

Shares = Mapping[str, float]


class Pair(NamedTuple):
    """Shares of phases without xsp, as xsp states them, and as it recorded them."""

    own: Shares
    stated: Shares
    recorded: Shares


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = pairs.parse(pairs.parser(__doc__, pairs=5, seconds=3.0), arguments)
    report = turns.Report("phases", "Shares of phases, in percent of a step [95 %]", COLUMNS)
    runner = Runner(options.of_seconds, options.threads)
    known: dict[str, list[Pair]] = defaultdict(list)
    with report.until_interrupted():
        for number in range(pairs.QUICK_PAIRS if options.quick else options.rounds):
            for program in pairs.selected(PROGRAMS, options, QUICK):
                with report.trying(program.name):
                    known[program.name].append(_pair(runner, program, number))
                    turns.say(f"  {program.name}: {_in_words(known[program.name][-1])}")
    for name, measured in known.items():
        own = [pair.own for pair in measured]
        report.add(
            [
                name, str(len(measured)), _shares(own), _shares([pair.stated for pair in measured]),
                _shares([pair.recorded for pair in measured]),
                pairs.middle([_distance(pair.own, pair.stated) for pair in measured]).text(1),
                pairs.middle([_distance(pair.own, pair.recorded) for pair in measured]).text(1),
                pairs.middle([_distance(*both) for both in pairwise(own)]).text(1),
            ],
            pairs=[pair._asdict() for pair in measured],
        )  # fmt: skip
    report.finish(options)


def _pair(runner: Runner, program: Program, number: int) -> Pair:
    """Run both processes; the very first one is without xsp, because it decides the iterations."""
    if number % 2 == 0:
        own = runner.bare(program).phases
        return Pair(own, *_profiled(runner, program))
    profiled = _profiled(runner, program)
    return Pair(runner.bare(program).phases, *profiled)


def _profiled(runner: Runner, program: Program) -> tuple[Shares, Shares]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        runner.recorded(program, out)
        trace = xsp.load(out)
        main = account.of(trace).main
        assert main is not None
        step_ms = main.host.total_ms - main.host.ms(names.BETWEEN)
        rows = trace.sql(
            f"SELECT kind, sum(dur_ns) FROM spans WHERE timed AND rung = {int(Level.MODEL)} GROUP BY kind"
        ).fetchall()
        recorded_ns = dict(rows)
        return (
            {name: main.host.ms(name) / step_ms for name in names.PHASES},
            {name: recorded_ns.get(name, 0.0) / recorded_ns.get("step", 1.0) for name in names.PHASES},
        )


def _distance(one: Shares, other: Shares) -> float:
    return 100 * max(abs(one[name] - other[name]) for name in names.PHASES)


def _shares(each: Sequence[Shares]) -> str:
    return " / ".join(f"{100 * turns.median([shares[name] for shares in each]):.0f}" for name in names.PHASES)


def _in_words(pair: Pair) -> str:
    return f"own {_shares([pair.own])}, stated {_shares([pair.stated])}, as recorded {_shares([pair.recorded])}"


if __name__ == "__main__":
    main()
