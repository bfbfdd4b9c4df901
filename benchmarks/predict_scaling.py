"""How large are the errors at many ranks of fits to few, with and without the simulated step as a factor?

Jobs are fabricated. The truth is a simulation that no fit sees: a step of random layers over a random link on which a
message costs more the more ranks there are, cores that collectives slow down, and 3 % of noise. The fits learn from 1
to 8 ranks and predict 16 to 64. The simulated step that they get as a factor is less accurate: the link's constants are
25 % off, and there is no slowdown. Nothing is measured, so the figures are the same on any machine, without rounds.

    python benchmarks/predict_scaling.py --out DIR --seconds 540      repeat until all jobs are done
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parts import turns

from xsp.predict import configurations, crossvalidation, prediction
from xsp.predict.collectives import Algorithm, Link
from xsp.predict.training import Job, Layer, Work

JOBS, JOBS_QUICK = 12, 2
LEARNED_RANKS, PREDICTED_RANKS = (1, 2, 4, 8), (16, 32, 64)
BATCHES, BUCKETS = (8, 16, 32, 64), (4 << 20, 25 << 20)
NOISE = 0.03
LINK_ERROR = 1.25
"""Ratio between the link's constants given to the simulated step and the true ones."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--out", type=Path, help="where finished jobs are kept (default: nowhere)")
    parser.add_argument("--seconds", type=float, default=3000, help="time limit of this run (default: 3000)")
    options = turns.parse(parser, arguments)
    end = time.monotonic() + options.seconds
    jobs: list[dict[str, dict[str, float]]] = []
    count = JOBS_QUICK if options.quick else JOBS
    try:
        for number in range(count):
            path = None if options.out is None else options.out / f"job-{options.seed}-{number}.json"
            if path is not None and (stored := turns.stored(path)) is not None:
                jobs.append(stored)
                continue
            if jobs and time.monotonic() > end:
                break
            jobs.append(job_errors(random.Random(1000 * options.seed + number)))
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(jobs[-1]))
    except KeyboardInterrupt:
        turns.say("interrupted")
    answer = report(jobs)
    if len(jobs) < count:
        answer.mark_partial(f"{count - len(jobs)} of {count} jobs are left: call it again with the same --out.")
    answer.finish(options)


def job_errors(draw: random.Random) -> dict[str, dict[str, float]]:
    """Return the mean error at many ranks, with and without the simulated step as a factor, by model."""
    layers = [
        (draw.uniform(2e-5, 4e-4), draw.choice((1, 2, 4)) * draw.randrange(20_000, 2_000_000))
        for _ in range(draw.randrange(6, 25))
    ]
    link = Link("true", draw.uniform(1e-5, 6e-5), 1e-9 / draw.uniform(1, 12))
    slowdown, growth = draw.uniform(0.05, 0.3), draw.uniform(0.02, 0.1)
    rows = []
    for batch in BATCHES:
        work = Work(tuple(Layer(f"{n}", t * batch / 8, 2 * t * batch / 8, (s,)) for n, (t, s) in enumerate(layers)),
                    update=sum(s for _, s in layers) * 2e-10, other=5e-4)  # fmt: skip
        for bucket in BUCKETS:
            for ranks in (*LEARNED_RANKS, *PREDICTED_RANKS):
                worse = 1 + growth * math.log2(ranks)
                true_link = replace(link, alpha=link.alpha * worse**2, beta=link.beta * worse)
                slowed = work.scaled(computing=1 + slowdown * (1 - 1 / ranks))
                step_s = prediction.predict(slowed, Job(ranks, true_link, Algorithm.RING, bucket)).step
                assumed = replace(link, alpha=link.alpha * LINK_ERROR, beta=link.beta / LINK_ERROR)
                dag = prediction.predict(work, Job(ranks, assumed, Algorithm.RING, bucket)).step
                rows.append({"batch": batch, "bucket": bucket, "ranks": ranks, "dag_s": dag,
                             "step_s": step_s * math.exp(draw.gauss(0, NOISE))})  # fmt: skip
    bare = ("batch", "bucket", "ranks")
    return {"without": errors(rows, bare), "with": errors(rows, (*bare, "dag_s"))}


def errors(rows: list[dict[str, Any]], factors: Sequence[str]) -> dict[str, float]:
    """Return the mean error of each model at many ranks after learning from few."""
    table = configurations.of_rows([row for row in rows if row["ranks"] in LEARNED_RANKS], "step_s", None, factors)
    split = crossvalidation.split_of(table, (), factors, None)
    predicted_rows = [row for row in rows if row["ranks"] in PREDICTED_RANKS]
    values = configurations.of_rows(predicted_rows, "step_s", None, factors).values
    models = crossvalidation.train_models(table, split, 0)
    return {
        name: statistics.fmean(
            abs(float(value) / row["step_s"] - 1) for value, row in zip(model(values), predicted_rows, strict=True)
        )
        for name, model in models.items()
    }


def report(jobs: Sequence[dict[str, dict[str, float]]]) -> turns.Report:
    names = sorted({name for job in jobs for values in job.values() for name in values})
    summary = turns.Report(
        "predict_scaling",
        f"Steps of {PREDICTED_RANKS[0]} to {PREDICTED_RANKS[-1]} ranks from those of "
        f"{LEARNED_RANKS[0]} to {LEARNED_RANKS[-1]}, "
        "synthetic: mean error",
        ("model", "without the simulated step", "with it", "better in"),
    )
    for name in names:
        pairs = [(job["without"].get(name), job["with"].get(name)) for job in jobs]
        bare, with_step = ([pair[side] for pair in pairs if pair[side] is not None] for side in (0, 1))
        complete = [
            (without_error, with_error)
            for without_error, with_error in pairs
            if without_error is not None and with_error is not None
        ]
        better = sum(with_error < without_error for without_error, with_error in complete)
        means = [statistics.fmean(values) if values else None for values in (bare, with_step)]
        summary.add(
            [name, *("–" if mean is None else f"{mean:.1%}" for mean in means),
             f"{better} of {len(complete)}" if complete else "–"],
            model=name, without=means[0], given=means[1],
        )  # fmt: skip
    summary.notes.append(
        f"{len(jobs)} jobs; the simulation gets {LINK_ERROR:g} times the true latency and 1/{LINK_ERROR:g} times the "
        "true seconds per byte, and models neither slower cores nor messages that cost more with more ranks."
    )
    return summary


if __name__ == "__main__":
    main()
