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
import tempfile
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

OVERLAP = 10.0
"""Goal: maximum mean error of the overlap, as torch defines it, in percentage points."""

OF_MORE = 0.25
"""Goal: maximum mean relative error with more than two ranks."""

BATCHES = (8, 32, 128)
QUICK = (("mlp-narrow", 8), ("cnn", 8))


def main() -> None:
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--out", type=Path, help="keep runs and timings here, and continue from them")
    made.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    made.add_argument("--only", help="models, with commas (default: all)")
    made.add_argument("--seconds", type=float, help="end after this time; run it again to continue")
    options = turns.parse(made)
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options, options.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder))


def measure(options: Any, out: Path) -> None:
    until = time.monotonic() + options.seconds
    timings = Timings.open(out / "timings")
    asked = links.plan_transfers(timings, transfers.COLLECTIVES, ddp_cases.FAMILIES, (options.ranks,))
    links.fill(asked, timings, max(10.0, (until - time.monotonic()) / 3), lambda *told: None)
    names = options.only.split(",") if options.only else [name for name in MODELS if name != "mlp-deep"]
    cases = QUICK if options.quick else [(name, batch) for name in names for batch in BATCHES]
    of = "" if options.ranks == 2 else f"-{options.ranks}"
    steps = 8 if options.quick else 30
    rows, failed, left = [], [], 0
    try:
        for name, batch in cases:
            place, run = out / f"{name}-{batch}{of}.json", out / f"run-{name}-{batch}"
            found = turns.stored(place)
            if found is None and (rows or failed) and time.monotonic() > until:
                left += 1
                continue
            try:
                if found is None:
                    rounds = 1 if options.quick else options.rounds
                    found = ddp_cases.one(name, batch, steps, rounds, run, options.ranks)
                    place.write_text(json.dumps(found))
                rows.append(predicted(timings, options.ranks, name, batch, found, run))
            except (ddp_cases.Failed, XspError) as error:
                failed.append(f"{name}, {batch}: {error}.")
    except KeyboardInterrupt:
        left = len(cases) - len(rows) - len(failed)
    report(options, rows, left, failed)


def predicted(timings: Timings, ranks: int, name: str, batch: int, found: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return the prediction and the measured step, with their parts and the relative error."""
    step = recorded.of(xsp.load(run))
    link = measured.of(timings, 1)
    answer = scaling.of(step, Job(1, link), (1, ranks))
    many = answer.points[-1].predicted
    assert link.curves is not None
    parts = many.parts
    backward = sum(parts[each] for each in (str(Cause.BACKWARD), str(Cause.SERVING), EXPOSED))
    own = {"step": many.step, "forward": parts[str(Cause.FORWARD)], "backward": backward,
           "update": parts[str(Cause.UPDATE)]}  # fmt: skip
    took = found["ddp"]
    return {
        "model": name, "batch": batch, "alone_s": step.step, "alone_bare_s": found["alone"]["step"],
        "beside_s": found["beside"]["step"], "predicted_s": many.step, "measured_s": took["step"],
        "error": many.step / took["step"] - 1, "exposed_s": parts[EXPOSED],
        "hidden": many.hidden / many.communication if many.communication else None,
        "overlap_predicted": many.overlap, "overlap": found["overlap"],
        "slower": link.curves.sharing_at(ranks).compute_factor,
        "slower_here": found["beside"]["step"] / found["alone"]["step"],
        "parts": {part: {"predicted_s": own[part], "measured_s": took[part]} for part in took},
        "notes": [each for each in link.curves.notes([ranks], 0) if "ranks" in each],
    }  # fmt: skip


def report(options: Any, rows: list[dict[str, Any]], left: int, failed: Sequence[str] = ()) -> None:
    found = turns.Report(
        "predict_ddp" if options.ranks == 2 else f"predict_ddp_{options.ranks}",
        f"A step of DistributedDataParallel on {options.ranks} ranks of this machine, predicted from one",
        ("model, batch", "alone", "by xsp", "beside", "DDP", "predicted", "error", "forward", "backward", "update",
         "overlap", "torch's"),
    )  # fmt: skip
    found.notes += failed
    if not rows:
        found.part(f"No case was measured, {left} are left: call it again.")
        found.finish(options)
        return
    mean = statistics.fmean(abs(each["error"]) for each in rows)
    limit = GOAL if options.ranks == 2 else OF_MORE
    goal = "not all measured" if left or failed else "met" if mean <= limit else "missed"
    for each in rows:
        shares = ["–" if each[name] is None else f"{each[name]:.0%}" for name in ("overlap_predicted", "overlap")]
        times = [
            f"{1e3 * each[name]:.2f}" for name in ("alone_bare_s", "alone_s", "beside_s", "measured_s", "predicted_s")
        ]
        whole = each["measured_s"]
        parts = [
            f"{(each['parts'][part]['predicted_s'] - each['parts'][part]['measured_s']) / whole:+.0%}"
            for part in ("forward", "backward", "update")
        ]
        found.add([f"{each['model']}, {each['batch']}", *times, f"{each['error']:+.1%}", *parts, *shares], **each)
    apart = [
        100 * abs(each["overlap_predicted"] - each["overlap"])
        for each in rows
        if None not in (each["overlap_predicted"], each["overlap"])
    ]
    more = f"; {left} cases are left: run it again" if left else ""
    found.notes.append(f"Mean error {mean:.1%} of {len(rows)} cases; the goal is {limit:.0%}: {goal}{more}.")
    found.notes.append(
        "In ms: one rank alone, bare and as recorded by xsp; all ranks without communication, with it, and predicted; "
        "forward, backward (with communication), update: predicted minus measured, as a share of the measured step."
    )
    if apart:
        found.notes.append(
            "Overlap: from the first launch of a bucket to the end of the backward pass, as a share of the time until "
            "all gradients are back, as defined by torch (the hidden share of collectives differs: `hidden` in the "
            f"file); it differs from torch's by {statistics.fmean(apart):.0f} points on average, the goal is "
            f"{OVERLAP:.0f}."
        )
    here = statistics.median(each["slower_here"] for each in rows)
    found.notes.append(
        f"Ranks that compute at once take {rows[0]['slower']:.2f} times as long as one according to the timings, "
        f"{here:.2f} times in the median of these cases. {' '.join(rows[0]['notes'])}"
    )
    found.finish(options)


if __name__ == "__main__":
    main()
