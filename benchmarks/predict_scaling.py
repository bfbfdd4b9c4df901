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
LEARNED, ASKED = (1, 2, 4, 8), (16, 32, 64)
BATCHES, BUCKETS = (8, 16, 32, 64), (4 << 20, 25 << 20)
NOISE = 0.03
OFF = 1.25
"""Ratio between the link's constants given to the simulated step and the true ones."""


def main(arguments: Sequence[str] | None = None) -> None:
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--out", type=Path, help="where finished jobs are kept (default: nowhere)")
    made.add_argument("--seconds", type=float, default=3000, help="time limit of this run (default: 3000)")
    options = turns.parse(made, arguments)
    end = time.monotonic() + options.seconds
    found: list[dict[str, dict[str, float]]] = []
    count = JOBS_QUICK if options.quick else JOBS
    try:
        for number in range(count):
            place = None if options.out is None else options.out / f"job-{options.seed}-{number}.json"
            if place is not None and (kept := turns.stored(place)) is not None:
                found.append(kept)
                continue
            if found and time.monotonic() > end:
                break
            found.append(of_job(random.Random(1000 * options.seed + number)))
            if place is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(found[-1]))
    except KeyboardInterrupt:
        turns.say("interrupted")
    answer = report(found)
    if len(found) < count:
        answer.part(f"{count - len(found)} of {count} jobs are left: call it again with the same --out.")
    answer.finish(options)


def of_job(chance: random.Random) -> dict[str, dict[str, float]]:
    """Return the mean error at many ranks, with and without the simulated step as a factor, by model."""
    layers = [
        (chance.uniform(2e-5, 4e-4), chance.choice((1, 2, 4)) * chance.randrange(20_000, 2_000_000))
        for _ in range(chance.randrange(6, 25))
    ]
    link = Link("true", chance.uniform(1e-5, 6e-5), 1e-9 / chance.uniform(1, 12))
    slows, grows = chance.uniform(0.05, 0.3), chance.uniform(0.02, 0.1)
    rows = []
    for batch in BATCHES:
        work = Work(tuple(Layer(f"{n}", t * batch / 8, 2 * t * batch / 8, (s,)) for n, (t, s) in enumerate(layers)),
                    update=sum(s for _, s in layers) * 2e-10, other=5e-4)  # fmt: skip
        for bucket in BUCKETS:
            for ranks in (*LEARNED, *ASKED):
                worse = 1 + grows * math.log2(ranks)
                over = replace(link, alpha=link.alpha * worse**2, beta=link.beta * worse)
                slowed = work.scaled(computing=1 + slows * (1 - 1 / ranks))
                took = prediction.predict(slowed, Job(ranks, over, Algorithm.RING, bucket)).step
                known = replace(link, alpha=link.alpha * OFF, beta=link.beta / OFF)
                dag = prediction.predict(work, Job(ranks, known, Algorithm.RING, bucket)).step
                rows.append({"batch": batch, "bucket": bucket, "ranks": ranks, "dag_s": dag,
                             "step_s": took * math.exp(chance.gauss(0, NOISE))})  # fmt: skip
    bare = ("batch", "bucket", "ranks")
    return {"without": errors(rows, bare), "with": errors(rows, (*bare, "dag_s"))}


def errors(rows: list[dict[str, Any]], factors: Sequence[str]) -> dict[str, float]:
    """Return the mean error of each model at many ranks after learning from few."""
    table = configurations.of_rows([each for each in rows if each["ranks"] in LEARNED], "step_s", None, factors)
    split = crossvalidation.split_of(table, (), factors, None)
    asked = [each for each in rows if each["ranks"] in ASKED]
    values = configurations.of_rows(asked, "step_s", None, factors).values
    models = crossvalidation.train_models(table, split, 0)
    return {
        name: statistics.fmean(
            abs(float(one) / each["step_s"] - 1) for one, each in zip(model(values), asked, strict=True)
        )
        for name, model in models.items()
    }


def report(found: Sequence[dict[str, dict[str, float]]]) -> turns.Report:
    names = sorted({name for each in found for those in each.values() for name in those})
    made = turns.Report(
        "predict_scaling",
        f"Steps of {ASKED[0]} to {ASKED[-1]} ranks from those of {LEARNED[0]} to {LEARNED[-1]}, synthetic: mean error",
        ("model", "without the simulated step", "with it", "better in"),
    )
    for name in names:
        pairs = [(each["without"].get(name), each["with"].get(name)) for each in found]
        bare, given = ([pair[side] for pair in pairs if pair[side] is not None] for side in (0, 1))
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        better = sum(other < one for one, other in both)
        means = [statistics.fmean(those) if those else None for those in (bare, given)]
        made.add(
            [name, *("–" if mean is None else f"{mean:.1%}" for mean in means),
             f"{better} of {len(both)}" if both else "–"],
            model=name, without=means[0], given=means[1],
        )  # fmt: skip
    made.notes.append(
        f"{len(found)} jobs; the simulation gets {OFF:g} times the true latency and 1/{OFF:g} times the true seconds "
        "per byte, and models neither slower cores nor messages that cost more with more ranks."
    )
    return made


if __name__ == "__main__":
    main()
