"""Does xsp predict the order of bucket sizes by step time that two processes on this machine have?

Models with many parameters train on two gloo ranks with five bucket sizes, in turns in the same processes; xsp predicts
each step from the run of one process. Kendall's tau is over the pairs of sizes whose measured difference is
significant: its interval excludes zero. Results are kept in `--out`, so that a run can be resumed; `--seconds` limits
its time.

    python benchmarks/predict_buckets.py --out DIR --seconds 540 --save      repeat until nothing is left
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parts import ddp_cases, turns

import xsp
from xsp.bench import links, transfers
from xsp.bench.timings import Timings
from xsp.errors import XspError
from xsp.predict import measured, recorded, scaling
from xsp.predict.training import Job

GOAL = 0.6
SIZES = (0.25, 1.0, 4.0, 12.0, 48.0)
"""Bucket sizes in MiB."""

CASES = (("resnet18", 8), ("transformer", 8), ("mlp-deep", 32))
QUICK = (("mlp-deep", 8),)


def main() -> None:
    made = turns.parser(__doc__, rounds=5)
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
    """Measure what is missing, and report the results so far."""
    until = time.monotonic() + options.seconds
    timings = Timings.open(out / "timings")
    asked = links.plan_transfers(timings, transfers.COLLECTIVES, ddp_cases.FAMILIES, (2,))
    links.fill(asked, timings, max(10.0, options.seconds / 3), lambda *told: None)
    rows, failed, left = [], [], 0
    cases = QUICK if options.quick else CASES
    steps, rounds = (10, 3) if options.quick else (20, options.rounds)
    try:
        for name, batch in cases:
            place, run = out / f"buckets-{name}-{batch}.json", out / f"run-{name}-{batch}"
            found = turns.stored(place)
            if found is None and (rows or failed) and time.monotonic() > until:
                left += 1
                continue
            try:
                if found is None:
                    found = ddp_cases.one(name, batch, steps, rounds, run, 2, SIZES)
                    place.write_text(json.dumps(found))
                rows.append(of(timings, name, batch, found, run))
            except (ddp_cases.Failed, XspError) as error:
                failed.append(f"{name}, {batch}: {error}.")
    except KeyboardInterrupt:
        left = len(cases) - len(rows) - len(failed)
    report(options, rows, left, failed)


def of(timings: Timings, name: str, batch: int, found: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return predicted and measured steps by size, the number of pairs that differ, and the sum of their agreement."""
    step = recorded.of(xsp.load(run))
    job = Job(2, measured.of(timings, 1))
    sizes = {
        size: scaling.of(step, replace(job, bucket=int(size * (1 << 20))), (2,)).points[-1].predicted.step
        for size in SIZES
    }
    agree, known = 0, 0
    for one, other in itertools.combinations(SIZES, 2):
        apart = turns.middle([each[f"ddp {one:g}"] - each[f"ddp {other:g}"] for each in found["all"]])
        if apart.lo <= 0 <= apart.hi:
            continue
        known += 1
        agree += 1 if (sizes[one] - sizes[other]) * apart.value > 0 else -1
    return {
        "model": name, "batch": batch, "predicted_s": list(sizes.values()),
        "measured_s": [found[f"ddp {size:g}"]["step"] for size in SIZES], "agree": agree, "known": known,
    }  # fmt: skip


def report(options: Any, rows: list[dict[str, Any]], left: int, failed: Sequence[str] = ()) -> None:
    found = turns.Report(
        "predict_buckets",
        "Steps of two ranks by bucket size: predicted, measured, ms",
        ("model, batch", *(f"{size:g} MiB" for size in SIZES), "tau", "pairs"),
    )
    found.notes += failed
    taus = []
    for each in rows:
        tau = each["agree"] / each["known"] if each["known"] else None
        taus += [] if tau is None else [tau]
        both = zip(each["predicted_s"], each["measured_s"], strict=True)
        cells = [f"{1e3 * one:.1f}, {1e3 * other:.1f}" for one, other in both]
        shown = "–" if tau is None else f"{tau:.2f}"
        found.add([f"{each['model']}, {each['batch']}", *cells, shown, f"{each['known']} of 10"], **each, tau=tau)
    if taus:
        mean = statistics.fmean(taus)
        goal = "not all measured" if left or failed else "met" if mean >= GOAL else "missed"
        found.notes.append(
            f"Kendall's tau over pairs whose difference exceeds its interval: {mean:.2f} on average; the "
            f"goal is {GOAL}: {goal}."
        )
    elif rows:
        found.notes.append("No two sizes differ by more than the interval: there is no order to predict.")
    else:
        found.part("No case was measured.")
    if left:
        found.notes.append(f"{left} cases are left: run it again.")
    found.finish(options)


if __name__ == "__main__":
    main()
