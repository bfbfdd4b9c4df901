"""Does a curve over the number of tokens predict prefill and decode at a length that was not timed?

Calls of both steps are timed at four lengths up to 512 tokens, and whole steps are measured at these and at 1,024, in
turns. The curve through the timings of calls, with the framework's time added, and the curve through the measured steps
each predict the time for 1,024 tokens. Timings and steps are kept in `--out`, so that a run can be resumed.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import turns

from xsp import bench
from xsp.bound import language, polynomials, steps
from xsp.bound.language import DECODE, PREFILL
from xsp.models import Settings

GOAL_ERROR = 0.15
TIMED_LENGTHS, UNSEEN_LENGTH = (64, 128, 256, 512), 1024
QUICK_LENGTHS, QUICK_UNSEEN_LENGTH = (8, 16, 32, 48), 64
MODELS = (
    "transformers:llama?num_hidden_layers=2&hidden_size=256&intermediate_size=688&num_attention_heads=8"
    "&num_key_value_heads=8&head_dim=32&vocab_size=4096",
    "transformers:gpt2?n_layer=12&n_embd=384&n_head=6&vocab_size=8192",
)
QUICK = ("transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64",)
FILE = "language_steps.jsonl"

Rounds = Mapping[tuple[str, int], Sequence[int]]


@dataclass(frozen=True)
class StoredRounds:
    """The stored rounds of the steps of each model, in a folder."""

    folder: Path

    def rounds(self, model: str, threads: int) -> Rounds | None:
        """Return the rounds that were stored last; None if there are none."""
        rounds = None
        path = self.folder / FILE
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line was cut off when a run was interrupted
            if (row["model"], row["threads"]) == (model, threads):
                rounds = {(phase, int(n)): tuple(times) for phase, n, times in row["steps"]}
        return rounds

    def add(self, model: str, threads: int, rounds: Rounds, disturbed: int) -> Rounds:
        """Store rounds, and return them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [[phase, n, list(times)] for (phase, n), times in rounds.items()]
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            line = {"model": model, "threads": threads, "disturbed": disturbed, "steps": rows}
            file.write(json.dumps(line) + "\n")
        return rounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__)
    parser.add_argument("--models", nargs="+", help="names (default: one of two layers and one of twelve)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--budget", type=float, help="seconds per model for its calls (default: 120, quick: 20)")
    parser.add_argument("--seconds", type=float, help="start no further model after this time (default: no limit)")
    parser.add_argument("--out", type=Path, help="keep timings and measurements here, and continue from them")
    options = turns.parse(parser, arguments)
    report = turns.Report(
        "language_lengths",
        f"Language models at {QUICK_UNSEEN_LENGTH if options.quick else UNSEEN_LENGTH:,} tokens, "
        "predicted from shorter steps",
        ("step", "tokens", "measured, ms", "from calls, ms", "error", "goal", "from steps, ms", "error", "goal"),
    )
    with report.until_interrupted(), tempfile.TemporaryDirectory() as folder:
        stored = StoredRounds(options.out or Path(folder))
        timings = bench.Timings.open(stored.folder / "timings")
        deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds
        for model in options.models or (QUICK if options.quick else MODELS):
            if time.monotonic() > deadline and stored.rounds(model, options.threads) is None:
                report.notes.append(f"Not done: {model}; run it again with the same --out.")
                continue
            turns.say(model)
            with report.trying(model):
                _rows(report, model, stored, timings, options)
    report.notes.append(
        f"The goal is an error of at most {GOAL_ERROR:.0%}. From calls: the sum of calls timed one by one, and of "
        "empty calls of modules and views, as a curve. From steps: a curve through the measured "
        "steps at the lengths whose "
        "calls are timed. The longest length is used by neither."
    )
    report.finish(options)


def _rows(report: turns.Report, model: str, stored: StoredRounds, timings: bench.Timings, options: Any) -> None:
    timed, unseen = (QUICK_LENGTHS, QUICK_UNSEEN_LENGTH) if options.quick else (TIMED_LENGTHS, UNSEEN_LENGTH)
    budget = options.budget or (20 if options.quick else 120)
    prediction = language.of(model, timed, threads=options.threads, timings=timings, fill=budget, seed=options.seed)
    rounds = stored.rounds(model, options.threads) or _measure(model, (*timed, unseen), stored, options)
    short = model.partition(":")[2].partition("?")[0]
    for curve in prediction.curves:
        step = turns.middle(rounds[curve.phase, unseen])
        polynomial = curve.total
        calls = None if polynomial is None else polynomial.at(unseen)
        figures = {n: turns.middle(rounds[curve.phase, n]) for n in timed}
        values = [figure.value for figure in figures.values()]
        halves = [(figure.hi - figure.lo) / 2 for figure in figures.values()]
        straight = polynomials.fit(timed, values, halves, 1 if curve.phase == DECODE else 2).at(unseen)
        report.add(
            [
                f"{short} {curve.phase}",
                f"{unseen:,}",
                step.text(2, 1e-6),
                "–" if calls is None else f"{calls / 1e6:.2f}",
                *_verdict(calls, step.value),
                f"{straight / 1e6:.2f}",
                *_verdict(straight, step.value),
            ],
            model=model,
            reason=curve.reason,
            coefficients=None if polynomial is None else polynomial.coefficients,
            measured={n: figure.value for n, figure in figures.items()},
            from_calls={point.tokens: point.ns for point in curve.points},
        )


def _verdict(predicted: float | None, actual: float) -> tuple[str, str]:
    if predicted is None:
        return "–", "–"
    error = predicted / actual - 1
    return f"{error:+.1%}", "met" if abs(error) <= GOAL_ERROR else "missed"


def _measure(model: str, lengths: Sequence[int], stored: StoredRounds, options: Any) -> Rounds:
    """Measure the steps in turns."""
    import torch

    torch.set_num_threads(options.threads)
    phase_steps = steps.build_steps(model, (DECODE, PREFILL), lengths, Settings(seed=options.seed))
    conditions = [turns.Condition(f"{phase} {n}", step) for (phase, n), step in phase_steps.items()]
    turn = turns.turns_of(options)
    rounds = options.rounds or (5 if options.quick else 30)
    turns_taken = turn.take([turns.Group(conditions)], rounds)
    by_step = {key: tuple(round_times[f"{key[0]} {key[1]}"] for round_times in turns_taken) for key in phase_steps}
    return stored.add(model, options.threads, by_step, turn.disturbed)


if __name__ == "__main__":
    main()
