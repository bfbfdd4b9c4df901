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
from xsp.bench.transfers import COLLECTIVES, TRANSFERS, Curve

HELD_OUT, SECOND, OF_CEILING = 0.10, 0.05, 0.90
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
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--out", type=Path, help="keep measurements here, and continue from them")
    made.add_argument("--seconds", type=float, help="end after this time (default: 3600)")
    options = turns.parse(made)
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options, options.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder))


def measure(options: Any, out: Path) -> None:
    """Measure missing sizes, and report those that are there."""
    until = time.monotonic() + options.seconds
    tables, missing = [], 0
    for name in ("first", "second"):
        timings = Timings.open(out / name)
        found: list[Curve] = []
        for what, families in ((TRANSFERS, QUICK if options.quick else None), (COLLECTIVES, None)):
            if options.quick and what == COLLECTIVES:
                continue
            asked = links.plan_transfers(timings, what, families, (2,))
            left = until - time.monotonic()
            if left > 1:
                links.fill(asked, timings, left, lambda *told: None)
            curves, lacks = links.existing_curves(asked, timings)
            found += curves
            missing += lacks
        tables.append(found)
        rates = out / f"stream-{name}.json"
        if not rates.exists() and (said := stream()):
            rates.write_text(json.dumps(said))
    ceilings = [json.loads(each.read_text()) for each in out.glob("stream-*.json")]
    made = report(tables, max((max(each) for each in ceilings), default=None))
    if missing:
        made.part(f"{missing} sizes are not timed yet: call it again with the same --out.")
    made.finish(options)


def stream() -> list[float] | None:
    """Return the rates of STREAM's copy and triad on one core, in bytes per second; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "stream.c", Path(folder) / "stream"
        source.write_text(STREAM)
        try:
            subprocess.run([compiler, "-O3", "-march=native", "-o", made, source], check=True, timeout=60)
            said = subprocess.run([made], check=True, timeout=60, capture_output=True, text=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    found: list[float] = json.loads(said)
    return found


def report(tables: Sequence[Sequence[Curve]], ceiling: float | None) -> turns.Report:
    found = turns.Report(
        "predict_curves",
        "Curves of transfers and of collectives: sizes held out, and a second run",
        ("curve", "pieces", "held out", "second run", "GB/s of traffic", "of STREAM"),
    )
    second = {each.name: each for each in tables[1]}
    held, again, shares = [], [], []
    for curve in tables[0]:
        other = {size: timing.trimmed_ns for size, timing in second[curve.name].timings} if curve.name in second else {}
        apart = [
            abs((other[size] or 0) / timing.trimmed_ns - 1)
            for size, timing in curve.timings
            if timing.trimmed_ns and other.get(size)
        ]
        error = curve.shape.held_out if curve.shape is not None else None
        twice = statistics.median(apart) if apart else None
        size, timing = curve.timings[-1] if curve.timings else (0, None)
        traffic = curve.family.traffic * curve.rate(size, timing) if timing is not None and size else None
        share = None
        if ceiling and traffic and curve.threads == 1 and curve.family.name in COPIES:
            share = traffic / ceiling
            shares.append(share)
        held += [] if error is None else [error]
        again += [] if twice is None else [twice]
        found.add(
            [curve.name, "–" if curve.shape is None else f"{len(curve.shape.pieces)}",
             *("–" if each is None else f"{each:.1%}" for each in (error, twice)),
             "–" if traffic is None else f"{traffic / 1e9:.1f}", "–" if share is None else f"{share:.0%}"],
            curve=curve.name, held_out=error, second=twice, traffic=traffic, share=share,
        )  # fmt: skip
    over = sum(each > HELD_OUT for each in held)
    found.notes.append(
        f"Held out: {over} of {len(held)} curves are off by more than {HELD_OUT:.0%} in the median of their sizes."
    )
    if again:
        found.notes.append(
            f"A second run differs by {statistics.median(again):.1%} in the median of curves; the goal is {SECOND:.0%}."
        )
    if ceiling is None:
        found.notes.append("There is no compiler here, so nothing is compared with STREAM's loops.")
    elif shares:
        found.notes.append(
            f"STREAM's loops reach {ceiling / 1e9:.1f} GB/s on one core; the best copy has {max(shares):.0%} of it, "
            f"the goal is {OF_CEILING:.0%}."
        )
    return found


if __name__ == "__main__":
    main()
