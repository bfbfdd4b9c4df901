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

import statistics
from collections.abc import Mapping, Sequence

from parts import pairs, turns
from parts.apart import COMPILER, Bare, Program, Runner
from parts.pairs import Pair

BUDGET_PERCENT, BUDGET_S = 10.0, 1.0
"""Goal: the process takes at most this percentage plus these seconds longer."""

SAID_SHARE = 0.1
"""Goal: the factor that xsp states for the whole program is at most this share from the one that pairs show."""

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
    Program("pageable copies", "named.py resnet18 --train --batch 256 --half bfloat16 --from-host", (), "torchvision"),
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = pairs.parse(parser, arguments)
    on_device = options.device != "cpu"
    title = "Programs under xsp run compared with themselves in another process [95 %]"
    report = turns.Report("bare_device" if on_device else "bare", title, COLUMNS)
    if on_device:
        _require_device(options.device)
        programs = pairs.selected(ON_DEVICE, options, QUICK_ON_DEVICE)
    else:
        programs = pairs.selected(ON_PROCESSOR, options, QUICK)
    measured = pairs.measure(programs, options, report, Runner(device=options.device))
    for name, known in measured.items():
        _add(report, name, known)
    report.notes += _summary(measured)
    if on_device:
        from parts.gpu_workloads import device_line

        report.notes.append(device_line())
    report.finish(options)


def _require_device(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        turns.skip(f"--device {name}: there is no such device here")


def _add(report: turns.Report, name: str, known: Sequence[Pair]) -> None:
    """Add a row for each kind of iteration; what is of the whole process is in the first one."""
    kinds = list(known[0].bare.kinds)
    for index, kind in enumerate(kinds):
        own_s = pairs.own_s(known, kind)
        stated = [figure[0] for pair in known if (figure := pair.stated(kind)) is not None]
        ratio = pairs.ratios(known, kind)
        row = [
            name if len(kinds) == 1 else f"{name}: {kind}", str(len(known)),
            f"{1e3 * own_s:.4g}", f"{1e3 * statistics.median(stated):.4g}" if stated else "–", ratio.text(3),
            pairs.verdict(ratio, own_s), f"{sum(pair.covers(kind) for pair in known)} of {len(known)}",
        ]  # fmt: skip
        whole = [""] * 6 if index else _of_process(known)
        data = {} if index else {"pairs": [pair.as_stored() for pair in known]}
        row += [whole[0], pairs.number(pairs.spread_percent(known, kind), 1), *whole[1:]]
        report.add(row, ratio=ratio, kind=kind, **data)


def _of_process(known: Sequence[Pair]) -> list[str]:
    """Return the cells on the whole process."""
    loops = [value for value in (pair.loop_ratio() for pair in known) if value is not None]
    said = [1 + percent / 100 for pair in known if (percent := pair.profiled.cost_percent) is not None]
    before, after = (
        [statistics.median(getattr(process, name) for process in side) for side in _sides(known)]
        for name in ("before_s", "after_s")
    )
    return [
        pairs.middle(loops).text(3), pairs.middle([pair.whole() for pair in known]).text(2),
        f"{statistics.median(pair.added_s() for pair in known):+.2f}",
        f"{statistics.median(said):.2f}" if said else "–",
        f"{before[0]:.1f} → {before[1]:.1f}", f"{after[0]:.2f} → {after[1]:.2f}",
    ]  # fmt: skip


def _sides(known: Sequence[Pair]) -> tuple[list[Bare], list[Bare]]:
    """Return what the processes without xsp said, and those with it."""
    return [pair.bare for pair in known], [pair.profiled.said for pair in known]


def _summary(measured: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Return the notes on the goals."""
    if not measured:
        return ["No program ran."]
    kept = sum(
        statistics.median(pair.added_s() - BUDGET_PERCENT / 100 * pair.bare.wall_s for pair in known) <= BUDGET_S
        for known in measured.values()
    )
    said = [
        statistics.median((1 + (pair.profiled.cost_percent or 0.0) / 100) / pair.whole() for pair in known)
        for known in measured.values()
    ]
    right = sum(abs(ratio - 1) <= SAID_SHARE for ratio in said)
    count = len(measured)
    return [
        *pairs.within(measured),
        f"Profiling added at most {BUDGET_PERCENT:g} % plus {BUDGET_S:g} s in {kept} of {count} programs.",
        f"What xsp says of that is within {100 * SAID_SHARE:g} % in {right} of {count} programs.",
    ]


if __name__ == "__main__":
    main()
