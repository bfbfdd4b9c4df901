"""How close are xsp's predictions for DistributedDataParallel on processes of this machine to measured steps?

For each of six models and three batches, one process is recorded (one thread), its step on two ranks is predicted with
`--link measured`, and two real gloo ranks run the same loop without xsp. In the processes of the ranks, steps of one
rank alone, and of all ranks without communication, alternate with the steps that count: they show which part of a
prediction is wrong. Results are kept in `--out`, so that a run can be resumed; `--seconds` limits its time.

    python benchmarks/predict_ddp.py --out DIR --seconds 540 --save      repeat until no case is left
    python benchmarks/predict_ddp.py --out DIR --ranks 4                 more ranks than cores: contention
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import ddp_cases, turns
from parts.ddp_worker import MODELS

import xsp
from xsp.bench import links, transfers
from xsp.bench.timings import Timings
from xsp.errors import XspError
from xsp.predict import measured, recorded, scaling
from xsp.predict.prediction import EXPOSED
from xsp.predict.schedule import Cause
from xsp.predict.training import Job

GOAL = 0.15
"""Goal: maximum mean relative error with two ranks."""

GOAL_OVERLAP = 10.0
"""Goal: maximum mean error of the overlap, as torch defines it, in percentage points."""

GOAL_MORE_RANKS = 0.25
"""Goal: maximum mean relative error with more than two ranks."""

BATCHES = (8, 32, 128)
QUICK = (("mlp-narrow", 8), ("cnn", 8))


def main() -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--out", type=Path, help="keep runs and timings here, and continue from them")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--only", help="models, with commas (default: all)")
    parser.add_argument("--seconds", type=float, help="end after this time; run it again to continue")
    options = turns.parse(parser)
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    with turns.working_folder(options.out) as folder:
        measure(options, folder)


def measure(options: Any, out: Path) -> None:
    deadline = time.monotonic() + options.seconds
    timings = Timings.open(out / "timings")
    plan = links.plan_transfers(timings, transfers.COLLECTIVES, ddp_cases.FAMILIES, (options.ranks,))
    links.fill(plan, timings, max(10.0, (deadline - time.monotonic()) / 3), lambda *told: None)
    names = options.only.split(",") if options.only else [name for name in MODELS if name != "mlp-deep"]
    cases = QUICK if options.quick else [(name, batch) for name in names for batch in BATCHES]
    suffix = "" if options.ranks == 2 else f"-{options.ranks}"
    steps = 8 if options.quick else 30
    rows, failed, remaining = [], [], 0
    try:
        for name, batch in cases:
            path, run = out / f"{name}-{batch}{suffix}.json", out / f"run-{name}-{batch}"
            case = turns.stored(path)
            if case is None and (rows or failed) and time.monotonic() > deadline:
                remaining += 1
                continue
            try:
                if case is None:
                    rounds = 1 if options.quick else options.rounds
                    case = ddp_cases.measure_case(name, batch, steps, rounds, run, options.ranks)
                    path.write_text(json.dumps(case))
                rows.append(evaluate(timings, options.ranks, name, batch, case, run))
            except (ddp_cases.CaseError, XspError) as error:
                failed.append(f"{name}, {batch}: {error}.")
    except KeyboardInterrupt:
        remaining = len(cases) - len(rows) - len(failed)
    report(options, rows, remaining, failed)


def evaluate(timings: Timings, ranks: int, name: str, batch: int, case: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return the prediction and the measured step, with their parts and the relative error."""
    step = recorded.of(xsp.load(run))
    link = measured.of(timings, 1)
    answer = scaling.of(step, Job(1, link), (1, ranks))
    prediction = answer.points[-1].predicted
    assert link.curves is not None
    parts = prediction.parts
    backward = sum(parts[cause] for cause in (str(Cause.BACKWARD), str(Cause.SERVING), EXPOSED))
    predicted_parts = {"step": prediction.step, "forward": parts[str(Cause.FORWARD)], "backward": backward,
           "update": parts[str(Cause.UPDATE)]}  # fmt: skip
    measured_parts = case["ddp"]
    return {
        "model": name, "batch": batch, "alone_s": step.step, "alone_bare_s": case["alone"]["step"],
        "beside_s": case["beside"]["step"], "predicted_s": prediction.step, "measured_s": measured_parts["step"],
        "error": prediction.step / measured_parts["step"] - 1, "exposed_s": parts[EXPOSED],
        "hidden": prediction.hidden / prediction.communication if prediction.communication else None,
        "overlap_predicted": prediction.overlap, "overlap": case["overlap"],
        "slower": link.curves.sharing_at(ranks).compute_factor,
        "slower_here": case["beside"]["step"] / case["alone"]["step"],
        "parts": {
            part: {"predicted_s": predicted_parts[part], "measured_s": measured_parts[part]} for part in measured_parts
        },
        "notes": [note for note in link.curves.notes([ranks], 0) if "ranks" in note],
    }  # fmt: skip


def report(options: Any, rows: list[dict[str, Any]], remaining: int, failed: Sequence[str] = ()) -> None:
    summary = turns.Report(
        "predict_ddp" if options.ranks == 2 else f"predict_ddp_{options.ranks}",
        f"A step of DistributedDataParallel on {options.ranks} ranks of this machine, predicted from one",
        ("model, batch", "alone", "by xsp", "beside", "DDP", "predicted", "error", "forward", "backward", "update",
         "overlap", "torch's"),
    )  # fmt: skip
    summary.notes += failed
    if not rows:
        summary.mark_partial(f"No case was measured, {remaining} are left: call it again.")
        summary.finish(options)
        return
    mean = statistics.fmean(abs(row["error"]) for row in rows)
    limit = GOAL if options.ranks == 2 else GOAL_MORE_RANKS
    goal = "not all measured" if remaining or failed else "met" if mean <= limit else "missed"
    for row in rows:
        shares = ["–" if row[name] is None else f"{row[name]:.0%}" for name in ("overlap_predicted", "overlap")]
        times = [
            f"{1e3 * row[name]:.2f}" for name in ("alone_bare_s", "alone_s", "beside_s", "measured_s", "predicted_s")
        ]
        measured_s = row["measured_s"]
        parts = [
            f"{(row['parts'][part]['predicted_s'] - row['parts'][part]['measured_s']) / measured_s:+.0%}"
            for part in ("forward", "backward", "update")
        ]
        summary.add([f"{row['model']}, {row['batch']}", *times, f"{row['error']:+.1%}", *parts, *shares], **row)
    overlap_errors = [
        100 * abs(row["overlap_predicted"] - row["overlap"])
        for row in rows
        if None not in (row["overlap_predicted"], row["overlap"])
    ]
    suffix = f"; {remaining} cases are left: run it again" if remaining else ""
    summary.notes.append(f"Mean error {mean:.1%} of {len(rows)} cases; the goal is {limit:.0%}: {goal}{suffix}.")
    summary.notes.append(
        "In ms: one rank alone, bare and as recorded by xsp; all ranks without communication, with it, and predicted; "
        "forward, backward (with communication), update: predicted minus measured, as a share of the measured step."
    )
    if overlap_errors:
        summary.notes.append(
            "Overlap: from the first launch of a bucket to the end of the backward pass, as a share of the time until "
            "all gradients are back, as defined by torch (the hidden share of collectives differs: `hidden` in the "
            f"file); it differs from torch's by {statistics.fmean(overlap_errors):.0f} points on average, the goal is "
            f"{GOAL_OVERLAP:.0f}."
        )
    measured_slowdown = statistics.median(row["slower_here"] for row in rows)
    summary.notes.append(
        f"Ranks that compute at once take {rows[0]['slower']:.2f} times as long as one according to the timings, "
        f"{measured_slowdown:.2f} times in the median of these cases. {' '.join(rows[0]['notes'])}"
    )
    summary.finish(options)


if __name__ == "__main__":
    main()
