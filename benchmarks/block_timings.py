"""How long does it take to time a model's calls, and do the timings repeat?

The calls of each model are timed into an empty folder, for as long as they need; then 20 of them are timed again, as
`xsp bench --check` does. A column shows the drift of the machine from canary timings: on a busy machine no goal can be
met.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from parts import turns

from xsp import bench, graph
from xsp.bench import repeatability
from xsp.bench.spec import Timing
from xsp.bench.timings import Timings

GOAL_S = 60.0
GOAL_MEDIAN, GOAL_NINETIETH = 0.03, 0.10
MODELS, QUICK = (
    ("torchvision:resnet50", "torchvision:mobilenet_v2", "timm:vit_tiny_patch16_224"),
    ("torchvision:resnet18",),
)
LONGEST_S = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__)
    parser.add_argument("--models", nargs="+", help=f"(default: {' '.join(MODELS)}, quick: {' '.join(QUICK)})")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    options = turns.parse(parser, arguments)
    report = turns.Report(
        "block_timings",
        "Timing the calls of models, and repeating 20 timings",
        ("model", "threads", "different", "timed", "s", "within 60 s", "again, median", "90th", "goal", "drift"),
    )
    with report.until_interrupted():
        for name in options.models or (QUICK if options.quick else MODELS):
            for threads in options.threads:
                turns.say(f"{name}, {threads} threads")
                with report.trying(f"{name}, {threads} threads"):
                    report.add(_row(name, threads, options.seed))
    report.notes.append(
        f"Again: absolute difference of the trimmed means; the goal is {GOAL_MEDIAN:.0%} at the median and "
        f"{GOAL_NINETIETH:.0%} at the 90th percentile. Drift: how much slower fixed work was than in its best round."
    )
    report.finish(options)


def _row(name: str, threads: int, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        timings = Timings.open(Path(folder) / "t")
        start = time.monotonic()
        specs = bench.specs(graph.of(name), threads=threads)
        new_timings = bench.fill(specs, timings, LONGEST_S)
        elapsed_s = time.monotonic() - start
        checked = repeatability.check(timings, LONGEST_S, seed=seed)
    median, ninetieth = checked.median, checked.ninetieth
    is_met = median is not None and ninetieth is not None and median <= GOAL_MEDIAN and ninetieth <= GOAL_NINETIETH
    return [
        name,
        str(threads),
        str(len(specs)),
        str(sum(timings.of([spec])[spec.key].is_timed for spec, _ in specs)),
        f"{elapsed_s:.1f}",
        "met" if elapsed_s <= GOAL_S else "missed",
        "" if median is None else f"{median:.1%}",
        "" if ninetieth is None else f"{ninetieth:.1%}",
        "met" if is_met else "missed",
        f"{max(map(_drift, new_timings), default=1.0) - 1:.0%}",
    ]


def _drift(timing: Timing) -> float:
    return timing.canary_ratio or 1.0


if __name__ == "__main__":
    main()
