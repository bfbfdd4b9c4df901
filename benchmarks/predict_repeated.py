"""Does the interval of `xsp predict --link measured` contain the measured step in nine of ten repetitions?

Each repetition times the collectives of two gloo ranks of this machine again (the mean of all is used, and their
differences are part of the interval), records a process without communication, predicts the step on two ranks, and
measures it on two real ranks without xsp, for two models in turns. `--out DIR --seconds N` continues what is there.
Timings of collectives that other processes disturb are taken again, as always; the recorded and the measured steps are
not, so the share of the cores that others used is printed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import predict_ddp
from parts import ddp_cases, quiet, turns

import xsp
from xsp.bench import links, transfers
from xsp.bench.timings import Timings
from xsp.predict import measured, recorded, scaling
from xsp.predict.training import Job

CASES = (("mlp-narrow", 32), ("autoencoder", 32))
GOAL = 0.9
CALIBRATION_S = 20.0
COLUMNS = (
    "model, batch", "repetitions", "within the interval", "above it", "half width", "error, mean abs.",
    "cores used by others",
)  # fmt: skip


def repeat(folder: Path, timings: Timings, number: int, steps: int) -> dict[str, object]:
    """Return the prediction with its interval, and the measured step, in seconds."""
    name, batch = CASES[number % len(CASES)]
    plan = links.plan_transfers(timings, transfers.COLLECTIVES, ddp_cases.FAMILIES, (2,))
    links.fill(plan, timings, CALIBRATION_S, lambda *told: None, again=True)
    run = folder / f"run-{number}"
    begin_s, others_s = time.perf_counter(), quiet.other_cpu_s()
    case = ddp_cases.measure_case(name, batch, steps, 1, run)
    others = (quiet.other_cpu_s() - others_s) / (time.perf_counter() - begin_s) / (os.cpu_count() or 1)
    link = measured.of(timings, 1)
    (point,) = scaling.of(recorded.of(xsp.load(run)), Job(1, link), (2,)).points
    return {
        **predict_ddp.evaluate(timings, 2, name, batch, case, run), "model": f"{name}, {batch}",
        "low_s": point.low, "high_s": point.high, "calibrations": measured.drift_of(timings, 1).calibrations,
        "others": others,
    }  # fmt: skip


def main() -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=20)
    parser.add_argument("--out", type=Path, help="keep runs and timings here, and continue from them")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further repetition after this time")
    options = turns.parse(parser)
    report = turns.Report("predict_repeated", "Repetitions of a predicted step on two ranks of this machine", COLUMNS)
    count, steps = (2, 8) if options.quick else (options.rounds, 30)
    end_s = time.monotonic() + options.seconds
    rows = []
    with turns.working_folder(options.out) as folder, report.until_interrupted():
        timings = Timings.open(folder / "timings")
        for number in range(count):
            path = folder / f"repetition-{number}.json"
            row = turns.stored(path)
            if row is None and rows and time.monotonic() > end_s:
                report.mark_partial(f"{count - number} repetitions are left: run it again.")
                break
            if row is None:
                with report.trying(f"repetition {number + 1}"):
                    row = repeat(folder, timings, number, steps)
                    path.write_text(json.dumps(row))
            if row is not None:
                rows.append(row)
                turns.say(f"  {number + 1} of {count}: {json.dumps(row)}")
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        report.add([name, *_cells(mine)], rows=mine)
    if rows:
        report.add(["all", *_cells(rows)])
        share = sum(_is_within(row) for row in rows) / len(rows)
        report.notes.append(
            f"Within the interval: {sum(map(_is_within, rows))} of {len(rows)}; the goal is nine of ten: "
            f"{'met' if share >= GOAL else 'missed'}."
        )
    report.finish(options)


def _is_within(row: dict[str, float]) -> bool:
    return row["low_s"] <= row["measured_s"] <= row["high_s"]


def _cells(rows: list[dict[str, float]]) -> list[str]:
    halves = [(row["high_s"] - row["low_s"]) / 2 / row["predicted_s"] for row in rows]
    others = [row["others"] for row in rows if "others" in row]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    return [
        str(len(rows)), str(sum(map(_is_within, rows))), str(sum(row["measured_s"] > row["high_s"] for row in rows)),
        f"{turns.median(halves):.0%}", f"{sum(errors) / len(errors):.1%}",
        f"{turns.median(others):.0%}" if others else "–",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
