"""How close is the step time that xsp reconstructs to the step time without xsp?

Ten models by name run their step in a loop: without xsp in one process, under `xsp run` in another, in turns
(`parts/pairs.py`). xsp's true time of the step is what remains of the recorded steps when the cost of recording is
taken off; the program's own is the mean by its own clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from parts import pairs, turns, workloads
from parts.apart import Program
from parts.pairs import Pair

from xsp import models

COLUMNS = (
    "model", "pairs", "own ms", "xsp's true ms", "true / own", "error %", "goal", "covers", "processes differ %",
)  # fmt: skip


def program_of(text: str, seed: int, name_of: Callable[[str, models.Settings], str] = workloads.name_of) -> Program:
    """Return the program that runs the step of a model: `SPEC[,batch=N][,sequence=N][,train]`, under its name."""
    spec, settings = workloads.parse(text, seed)
    command = f"model.py {spec} --batch {settings.batch} --sequence {settings.sequence} --seed {seed}"
    command += " --train" if settings.train else ""
    return Program(name_of(spec, settings), command, ("--step", "step"), spec.partition(":")[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="names as in layer_overhead.py (default: ten)")
    options = pairs.parse(parser, arguments)
    report = turns.Report("true_time", "xsp's true step time compared with the step without xsp [95 %]", COLUMNS)
    names = options.models or (workloads.QUICK if options.quick else workloads.TEN_MODELS)
    measured = pairs.measure(
        pairs.selected([program_of(text, options.seed) for text in names], options), options, report
    )
    for name, known in measured.items():
        _add(report, name, known)
    report.notes += _summary(measured)
    report.finish(options)


def _add(report: turns.Report, name: str, known: Sequence[Pair]) -> None:
    (kind,) = known[0].bare.kinds
    own_s = pairs.own_s(known, kind)
    stated = [figure[0] for pair in known if (figure := pair.stated(kind, "true")) is not None]
    ratio = pairs.ratios(known, kind, "true")
    row = [
        name, str(len(known)), f"{1e3 * own_s:.2f}", f"{1e3 * statistics.median(stated):.2f}" if stated else "–",
        ratio.text(4), f"{100 * (ratio.value - 1):+.2f}" if stated else "–", pairs.verdict(ratio, own_s),
        f"{sum(pair.covers(kind, 'true') for pair in known)} of {len(known)}",
        pairs.number(pairs.spread_percent(known, kind), 1),
    ]  # fmt: skip
    report.add(row, ratio=ratio, pairs=[pair.as_stored() for pair in known])


def _summary(measured: Mapping[str, Sequence[Pair]]) -> list[str]:
    if not measured:
        return ["No model was measured."]
    errors = []
    for known in measured.values():
        (kind,) = known[0].bare.kinds
        errors.append(abs(pairs.ratios(known, kind, "true").value - 1))
    stated = [error for error in errors if error == error]
    if not stated:
        return ["No true time was stated."]
    return [
        f"Median |error| {100 * turns.median(stated):.2f} %, largest {100 * max(stated):.2f} %.",
        *pairs.within(measured, "true"),
    ]


if __name__ == "__main__":
    main()
