"""How well do curves of transfers and collectives predict sizes that were not timed, and does a second run agree?

All families of the host and of two ranks are timed into one table and then into another. For each curve: the median
error at every other size, predicted from a fit of the rest; the median difference of equal sizes in both tables; and
for copies the memory traffic at the largest size relative to the best rate of loops in C (STREAM's copy and triad,
McCalpin), which are compiled and run here if there is a compiler. Tables are kept in `--out`, so that a run can be
resumed.

    python benchmarks/predict_curves.py --out DIR --seconds 540 --save      repeat until all sizes are timed
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import turns

from xsp.bench import links
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, TRANSFERS, TransferCurve

GOAL_HELD_OUT, GOAL_REPEAT, GOAL_CEILING = 0.10, 0.05, 0.90
QUICK = "copy,pipe,read-cached"
COPIES = ("copy", "memcpy")

STREAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define N (8 << 20)
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int main(void) {
  double *a = aligned_alloc(64, 8l * N), *b = aligned_alloc(64, 8l * N), *c = aligned_alloc(64, 8l * N);
  double best[2] = {0, 0};
  for (long i = 0; i < N; i++) { a[i] = 1; b[i] = 2; c[i] = 0; }
  for (int k = 0; k < 20; k++) {
    double t = now();
    for (long i = 0; i < N; i++) c[i] = a[i];
    t = now() - t; if (16.0 * N / t > best[0]) best[0] = 16.0 * N / t;
    __asm__ volatile("" : : "r"(c) : "memory");
    t = now();
    for (long i = 0; i < N; i++) a[i] = b[i] + 3.0 * c[i];
    t = now() - t; if (24.0 * N / t > best[1]) best[1] = 24.0 * N / t;
    __asm__ volatile("" : : "r"(a) : "memory");
  }
  printf("[%.0f, %.0f]\n", best[0], best[1]);
  return (int)(a[7] + c[9]) == -1;
}
"""


def main() -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--out", type=Path, help="keep measurements here, and continue from them")
    parser.add_argument("--seconds", type=float, help="end after this time (default: 3600)")
    options = turns.parse(parser)
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    with turns.working_folder(options.out) as folder:
        measure(options, folder)


def measure(options: Any, out: Path) -> None:
    """Measure missing sizes, and report those that are there."""
    deadline = time.monotonic() + options.seconds
    tables, missing = [], 0
    for name in ("first", "second"):
        timings = Timings.open(out / name)
        all_curves: list[TransferCurve] = []
        for source, families in ((TRANSFERS, QUICK if options.quick else None), (COLLECTIVES, None)):
            if options.quick and source == COLLECTIVES:
                continue
            plan = links.plan_transfers(timings, source, families, (2,))
            seconds_left = deadline - time.monotonic()
            if seconds_left > 1:
                links.fill(plan, timings, seconds_left, lambda *told: None)
            curves, lacking = links.existing_curves(plan, timings)
            all_curves += curves
            missing += lacking
        tables.append(all_curves)
        rates = out / f"stream-{name}.json"
        if not rates.exists() and (stream_rates := stream()):
            rates.write_text(json.dumps(stream_rates))
    ceilings = [json.loads(path.read_text()) for path in out.glob("stream-*.json")]
    summary = report(tables, max((max(pair) for pair in ceilings), default=None))
    if missing:
        summary.mark_partial(f"{missing} sizes are not timed yet: call it again with the same --out.")
    summary.finish(options)


def stream() -> list[float] | None:
    """Return the rates of STREAM's copy and triad on one core, in bytes per second; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "stream.c", Path(folder) / "stream"
        source.write_text(STREAM)
        try:
            subprocess.run([compiler, "-O3", "-march=native", "-o", program, source], check=True, timeout=60)
            printed = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    rates: list[float] = json.loads(printed)
    return rates


def report(tables: Sequence[Sequence[TransferCurve]], ceiling: float | None) -> turns.Report:
    summary = turns.Report(
        "predict_curves",
        "Curves of transfers and of collectives: sizes held out, and a second run",
        ("curve", "pieces", "held out", "second run", "GB/s of traffic", "of STREAM"),
    )
    repeated = {curve.name: curve for curve in tables[1]}
    held_out_errors, repeat_errors, shares = [], [], []
    for curve in tables[0]:
        repeat_ns = (
            {size: timing.trimmed_ns for size, timing in repeated[curve.name].timings} if curve.name in repeated else {}
        )
        differences = [
            abs((repeat_ns[size] or 0) / timing.trimmed_ns - 1)
            for size, timing in curve.timings
            if timing.trimmed_ns and repeat_ns.get(size)
        ]
        error = curve.shape.held_out if curve.shape is not None else None
        repeat_error = statistics.median(differences) if differences else None
        size, timing = curve.timings[-1] if curve.timings else (0, None)
        traffic = curve.family.traffic * curve.rate(size, timing) if timing is not None and size else None
        share = None
        if ceiling and traffic and curve.threads == 1 and curve.family.name in COPIES:
            share = traffic / ceiling
            shares.append(share)
        held_out_errors += [] if error is None else [error]
        repeat_errors += [] if repeat_error is None else [repeat_error]
        summary.add(
            [curve.name, "–" if curve.shape is None else f"{len(curve.shape.pieces)}",
             *("–" if value is None else f"{value:.1%}" for value in (error, repeat_error)),
             "–" if traffic is None else f"{traffic / 1e9:.1f}", "–" if share is None else f"{share:.0%}"],
            curve=curve.name, held_out=error, second=repeat_error, traffic=traffic, share=share,
        )  # fmt: skip
    above_goal = sum(value > GOAL_HELD_OUT for value in held_out_errors)
    summary.notes.append(
        f"Held out: {above_goal} of {len(held_out_errors)} curves are off by more than "
        f"{GOAL_HELD_OUT:.0%} in the median of their sizes."
    )
    if repeat_errors:
        summary.notes.append(
            f"A second run differs by {statistics.median(repeat_errors):.1%} in the median of curves; "
            f"the goal is {GOAL_REPEAT:.0%}."
        )
    if ceiling is None:
        summary.notes.append("There is no compiler here, so nothing is compared with STREAM's loops.")
    elif shares:
        summary.notes.append(
            f"STREAM's loops reach {ceiling / 1e9:.1f} GB/s on one core; the best copy has {max(shares):.0%} of it, "
            f"the goal is {GOAL_CEILING:.0%}."
        )
    return summary


if __name__ == "__main__":
    main()
