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
    parser = turns.parser(__doc__, rounds=5)
    parser.add_argument("--out", type=Path, help="keep measurements here, and continue from them")
    parser.add_argument("--seconds", type=float, help="end after this time (default: 3600)")
    options = turns.parse(parser)
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    with turns.working_folder(options.out) as folder:
        measure(options, folder)


def measure(options: Any, out: Path) -> None:
    """Measure what is missing, and report the results so far."""
    deadline = time.monotonic() + options.seconds
    timings = Timings.open(out / "timings")
    plan = links.plan_transfers(timings, transfers.COLLECTIVES, ddp_cases.FAMILIES, (2,))
    links.fill(plan, timings, max(10.0, options.seconds / 3), lambda *told: None)
    rows, failed, remaining = [], [], 0
    cases = QUICK if options.quick else CASES
    steps, rounds = (10, 3) if options.quick else (20, options.rounds)
    try:
        for name, batch in cases:
            path, run = out / f"buckets-{name}-{batch}.json", out / f"run-{name}-{batch}"
            case = turns.stored(path)
            if case is None and (rows or failed) and time.monotonic() > deadline:
                remaining += 1
                continue
            try:
                if case is None:
                    case = ddp_cases.measure_case(name, batch, steps, rounds, run, 2, SIZES)
                    path.write_text(json.dumps(case))
                rows.append(evaluate(timings, name, batch, case, run))
            except (ddp_cases.CaseError, XspError) as error:
                failed.append(f"{name}, {batch}: {error}.")
    except KeyboardInterrupt:
        remaining = len(cases) - len(rows) - len(failed)
    report(options, rows, remaining, failed)


def evaluate(timings: Timings, name: str, batch: int, case: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return predicted and measured steps by size, the number of pairs that differ, and the sum of their agreement."""
    step = recorded.of(xsp.load(run))
    job = Job(2, measured.of(timings, 1))
    sizes = {
        size: scaling.of(step, replace(job, bucket=int(size * (1 << 20))), (2,)).points[-1].predicted.step
        for size in SIZES
    }
    agreement, significant = 0, 0
    for a, b in itertools.combinations(SIZES, 2):
        difference = turns.middle(
            [round_steps[f"ddp {a:g}"] - round_steps[f"ddp {b:g}"] for round_steps in case["all"]]
        )
        if difference.lo <= 0 <= difference.hi:
            continue
        significant += 1
        agreement += 1 if (sizes[a] - sizes[b]) * difference.value > 0 else -1
    return {
        "model": name, "batch": batch, "predicted_s": list(sizes.values()),
        "measured_s": [case[f"ddp {size:g}"]["step"] for size in SIZES], "agree": agreement, "known": significant,
    }  # fmt: skip


def report(options: Any, rows: list[dict[str, Any]], remaining: int, failed: Sequence[str] = ()) -> None:
    summary = turns.Report(
        "predict_buckets",
        "Steps of two ranks by bucket size: predicted, measured, ms",
        ("model, batch", *(f"{size:g} MiB" for size in SIZES), "tau", "pairs"),
    )
    summary.notes += failed
    taus = []
    for row in rows:
        tau = row["agree"] / row["known"] if row["known"] else None
        taus += [] if tau is None else [tau]
        pairs = zip(row["predicted_s"], row["measured_s"], strict=True)
        cells = [f"{1e3 * predicted_s:.1f}, {1e3 * measured_s:.1f}" for predicted_s, measured_s in pairs]
        tau_text = "–" if tau is None else f"{tau:.2f}"
        summary.add([f"{row['model']}, {row['batch']}", *cells, tau_text, f"{row['known']} of 10"], **row, tau=tau)
    if taus:
        mean = statistics.fmean(taus)
        goal = "not all measured" if remaining or failed else "met" if mean >= GOAL else "missed"
        summary.notes.append(
            f"Kendall's tau over pairs whose difference exceeds its interval: {mean:.2f} on average; the "
            f"goal is {GOAL}: {goal}."
        )
    elif rows:
        summary.notes.append("No two sizes differ by more than the interval: there is no order to predict.")
    else:
        summary.mark_partial("No case was measured.")
    if remaining:
        summary.notes.append(f"{remaining} cases are left: run it again.")
    summary.finish(options)


if __name__ == "__main__":
    main()
