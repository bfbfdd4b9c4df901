"""Do programs take under `xsp run` what xsp states, and does it cost what it states? Each is compared with itself.

Programs with a clock of their own (`bare_programs/`) run without xsp and under `xsp run` with default options, each
time in a process of its own, in turns (`parts/apart.py`). Per program and kind of iteration: the iteration that xsp
states compared with the program's own, whether xsp's interval contains it, the loop as the stated iterations add up
compared with the program's own, how much longer the whole process took and how much xsp says, and the seconds before
the first and after the last iteration, without xsp → with it. `processes differ` is how much two processes without
xsp differ: closer than that no figure can be tested.

`--device cuda` takes the programs for a device; `--minutes` ends after that time and reports what there is.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parts import apart, turns
from parts.apart import COMPILER, Bare, Pair, Program, Runner
from parts.quiet import Patience

BUDGET_PERCENT, BUDGET_S = 10.0, 1.0
"""Goal: the process takes at most this percentage plus these seconds longer."""

SAID_SHARE = 0.1
"""Goal: the factor that xsp states for the whole program is at most this share from the one that pairs show."""

QUICK_PAIRS = 2
EXPECTED_S = 25.0
"""Seconds that the first pair of a program is expected to take."""

COLUMNS = (
    "program", "pairs", "own ms", "stated ms", "stated / own", "goal", "covers", "loop: stated / own",
    "processes differ %", "whole process ×", "longer by s", "xsp says ×", "before s", "after s",
)  # fmt: skip

ON_PROCESSOR = (
    Program("tiny inference", "mlp.py --width 128 --depth 3 --batch 1"),
    Program("SGD", "mlp.py --train SGD --width 128 --depth 3"),
    Program("AdamW", "mlp.py --train AdamW --depth 8"),
    Program("accumulation", "mlp.py --train SGD --micro-batches 4"),
    Program("forward 9 ms", "mlp.py --width 512 --depth 8 --batch 224"),
    Program("sleep", "mlp.py --train SGD --width 64 --sleep-ms 5"),
    Program("sleep inference", "mlp.py --width 64 --sleep-ms 2"),
    Program("hooks", "mlp.py --hooks --depth 40 --width 64"),
    Program("tiny modules", "tiny_modules.py"),
    Program("scaler skips", "scaler.py"),
    Program("loader", "loader.py"),
    Program("loader, 2 workers", "loader.py --workers 2"),
    Program("epochs", "epochs.py"),
    Program("GAN", "gan.py"),
    Program("generate", "generate.py", needs="transformers"),
    Program("threads", "threads.py"),
    Program("function", "function_step.py", ("--step", "learn")),
    Program("compiled", "compiled.py", needs=COMPILER),
    Program("DDP, one rank", "ddp.py"),
    Program("resnet18", "named.py resnet18", needs="torchvision"),
    Program("resnet18 training", "named.py resnet18 --train --batch 2", needs="torchvision"),
    Program("bert training", "named.py bert --batch 4 --size 64 --train", needs="transformers"),
    Program("Trainer", "frameworks.py trainer", needs="accelerate"),
    Program("Lightning", "frameworks.py lightning", needs="pytorch_lightning"),
    Program("accelerate", "frameworks.py accelerate", needs="accelerate"),
)
QUICK = ("sleep", "AdamW", "epochs")

ON_DEVICE = (
    Program("gradient norms read", "mlp.py --train AdamW --width 512 --depth 24 --batch 256 --norms"),
    Program("pageable copies", "named.py resnet18 --train --batch 256 --half bfloat16 --from-host", "torchvision"),
    Program("float32 products", "mlp.py --train SGD --width 6144 --depth 4 --batch 2048"),
    Program("half convolutions", "named.py resnet50 --batch 128 --half float16", needs="torchvision"),
    Program("attention by hand", "attention.py --width 1024 --heads 16 --tokens 4096 --batch 4 --depth 6"),
    Program("Adam one by one", "mlp.py --train Adam --one-by-one --width 256 --depth 120 --batch 2048"),
    Program("pointwise", "pointwise.py --rows 65536"),
    Program("DDP, one rank", "ddp.py --width 2048 --depth 12 --batch 512"),
    Program("compiled training", "compiled.py --width 1024 --depth 12 --batch 512", needs=COMPILER),
    Program("GPT training", "named.py gpt --layers 12 --hidden 768 --size 512 --batch 8 --train", needs="transformers"),
    Program("ResNet-50 training", "named.py resnet50 --train --batch 64", needs="torchvision"),
    Program("hooks that wait", "mlp.py --hooks --depth 80 --width 512"),
    Program("loader with copies", "loader.py --workers 2 --batch 128 --size 96"),
    Program("tiny inference", "mlp.py --width 256 --depth 6"),
)
QUICK_ON_DEVICE = ("half convolutions", "compiled training")


def _parser() -> argparse.ArgumentParser:
    parser = turns.parser(__doc__, rounds=6)
    names = sorted({program.name for program in (*ON_PROCESSOR, *ON_DEVICE)})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="programs: " + ", ".join(names))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--of-seconds", type=float, metavar="S", help="time of a loop (default: 4, quick: 1.5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="start no pair that may end later")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append pairs to FILE, and report all in it")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(_parser(), arguments)
    selected = _selected(options)
    report = turns.Report("bare", "Programs under xsp run compared with themselves in another process [95 %]", COLUMNS)
    stored = turns.stored_rows(options.out)
    pairs: dict[str, list[Pair]] = {program.name: [] for program in selected}
    for row in stored.values():
        if row["program"] in pairs:
            pairs[row["program"]].append(Pair.from_stored(row))
    seconds = options.of_seconds or (1.5 if options.quick else 4.0)
    runner = Runner(seconds, options.threads, options.device, options.seed)
    runner.counts.update({name: known[0].bare.iterations for name, known in pairs.items() if known})
    with report.until_interrupted():
        for program in _visits(selected, pairs, options, report):
            known = pairs[program.name]
            with report.trying(program.name):
                known.append(runner.pair(program, len(known)))
                row = {"program": program.name, **known[-1].as_stored()}
                turns.store_row(options.out, f"{program.name} {len(known)}", row)
                turns.say(f"  {program.name}: {_brief(known[-1])}")
    for program in selected:
        if pairs[program.name]:
            _add(report, program, pairs[program.name])
    report.notes += _summary([known for known in pairs.values() if known])
    if options.device != "cpu":
        from parts.gpu_workloads import device_line

        report.notes.append(device_line())
    report.finish(options)


def _selected(options: argparse.Namespace) -> list[Program]:
    """Return the programs to run; those for a device only where there is one."""
    on_device = options.device != "cpu"
    if on_device:
        import torch

        if not torch.cuda.is_available():
            turns.skip(f"--device {options.device}: there is no such device here")
    programs = ON_DEVICE if on_device else ON_PROCESSOR
    quick = QUICK_ON_DEVICE if on_device else QUICK
    wanted = options.only or (quick if options.quick else [program.name for program in programs])
    selected = [program for program in programs if program.name in wanted]
    if not selected:
        turns.skip(f"there is none of {', '.join(wanted)} for {options.device}")
    return selected


def _visits(
    programs: Sequence[Program], pairs: Mapping[str, Sequence[Pair]], options: argparse.Namespace, report: turns.Report
) -> Iterator[Program]:
    """Yield the program to run next: all of them once, in a random order, then again; noting those that cannot run."""
    able = []
    for program in programs:
        if lacking := program.missing():
            report.notes.append(f"{program.name}: left out, it needs {lacking}.")
        else:
            able.append(program)
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    draw, patience = random.Random(options.seed), Patience(options.patience)
    for number in range(QUICK_PAIRS if options.quick else options.rounds):
        for program in draw.sample(able, k=len(able)):
            known = pairs[program.name]
            if len(known) != number:  # it failed, or it was stored
                continue
            expected_s = known[-1].bare.wall_s + known[-1].profiled.said.wall_s if known else EXPECTED_S
            if time.monotonic() + expected_s > end:
                report.notes.append(f"{program.name}: no pair {number + 1}, which would not have ended in time.")
                continue
            patience.wait()
            yield program


def _brief(pair: Pair) -> str:
    """Return one line on a pair, for progress."""
    kinds = ", ".join(
        f"{kind} {1e3 * pair.bare.own_s(kind):.4g} ms, stated / own {_number(pair.ratio(kind), 3)}"
        for kind in pair.bare.kinds
    )
    whole = f"whole process {pair.whole():.2f} ×, {pair.added_s():+.1f} s"
    return f"{kinds}; {whole}; others used {pair.bare.others:.1f} and {pair.profiled.said.others:.1f} cores"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _add(report: turns.Report, program: Program, pairs: Sequence[Pair]) -> None:
    """Add a row for each kind of iteration; what is of the whole process is in the first one."""
    stored = [pair.as_stored() for pair in pairs]
    for index, kind in enumerate(pairs[0].bare.kinds):
        own_s = statistics.median(pair.bare.own_s(kind) for pair in pairs)
        stated = [figure[0] for pair in pairs if (figure := pair.stated(kind)) is not None]
        ratio = apart.ratios(pairs, kind)
        row = [
            program.name if len(pairs[0].bare.kinds) == 1 else f"{program.name}: {kind}", str(len(pairs)),
            f"{1e3 * own_s:.4g}", f"{1e3 * statistics.median(stated):.4g}" if stated else "–", ratio.text(3),
            apart.verdict(ratio, own_s), f"{sum(pair.covers(kind) for pair in pairs)} of {len(pairs)}",
        ]  # fmt: skip
        whole = _of_process(pairs) if index == 0 else [""] * 6
        report.add([*row, whole[0], _number(apart.spread_percent(pairs, kind), 1), *whole[1:]], ratio=ratio, kind=kind)
    report.data[report.rows[-len(pairs[0].bare.kinds)][0]]["pairs"] = stored


def _of_process(pairs: Sequence[Pair]) -> list[str]:
    """Return the cells on the whole process."""
    loops = [value for value in (pair.loop_ratio() for pair in pairs) if value is not None]
    said = [1 + percent / 100 for pair in pairs if (percent := pair.profiled.cost_percent) is not None]
    before, after = (
        [statistics.median(getattr(bare, name) for bare in side) for side in _sides(pairs)]
        for name in ("before_s", "after_s")
    )
    return [
        apart.middle(loops).text(3), apart.middle([pair.whole() for pair in pairs]).text(2),
        f"{statistics.median(pair.added_s() for pair in pairs):+.2f}",
        f"{statistics.median(said):.2f}" if said else "–",
        f"{before[0]:.1f} → {before[1]:.1f}", f"{after[0]:.2f} → {after[1]:.2f}",
    ]  # fmt: skip


def _sides(pairs: Sequence[Pair]) -> tuple[list[Bare], list[Bare]]:
    """Return what the processes without xsp and those with it said."""
    return [pair.bare for pair in pairs], [pair.profiled.said for pair in pairs]


def _summary(programs: Sequence[Sequence[Pair]]) -> list[str]:
    """Return the notes on the goals; a kind of iteration of a program counts as one."""
    if not programs:
        return ["No program ran."]
    notes = []
    kinds = [(pairs, kind) for pairs in programs for kind in pairs[0].bare.kinds]
    for is_long, allowed in enumerate(apart.GOALS):
        ratios = [
            apart.ratios(pairs, kind).value
            for pairs, kind in kinds
            if (statistics.median(pair.bare.own_s(kind) for pair in pairs) * 1e3 >= apart.SHORT_MS) == bool(is_long)
        ]
        within = sum(abs(ratio - 1) <= allowed for ratio in ratios)
        side = f"of {apart.SHORT_MS:g} ms and more" if is_long else f"below {apart.SHORT_MS:g} ms"
        notes.append(f"Iterations {side}: stated within {100 * allowed:g} % in {within} of {len(ratios)}.")
    covered = sum(pair.covers(kind) for pairs, kind in kinds for pair in pairs)
    total = sum(len(pairs) for pairs, _ in kinds)
    notes.append(f"The interval covers the program's own iteration in {covered} of {total} pairs (goal 9 of 10).")
    kept = sum(
        statistics.median(pair.added_s() - BUDGET_PERCENT / 100 * pair.bare.wall_s for pair in pairs) <= BUDGET_S
        for pairs in programs
    )
    notes.append(
        f"The whole process took at most {BUDGET_PERCENT:g} % plus {BUDGET_S:g} s longer in {kept} of {len(programs)} "
        "programs."
    )
    said = [
        statistics.median((1 + (pair.profiled.cost_percent or 0.0) / 100) / pair.whole() for pair in pairs)
        for pairs in programs
    ]
    right = sum(abs(ratio - 1) <= SAID_SHARE for ratio in said)
    notes.append(f"What xsp says of that is within {100 * SAID_SHARE:g} % in {right} of {len(programs)} programs.")
    others = [bare.others for pairs in programs for side in _sides(pairs) for bare in side]
    notes.append(
        f"Other processes used {statistics.median(others):.2f} cores in the median of the processes, at most "
        f"{max(others):.2f}."
    )
    return notes


if __name__ == "__main__":
    main()
