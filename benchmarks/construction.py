"""How well does the sum of a model's blocks of G calls predict its step, and what does timing the blocks cost?

For each model, rounds of its step are measured, then its blocks without a timing, then rounds of its step again; the
difference shows drift of the machine, and the step time is that of both halves together. Every model is also
constructed from the timings of the other models alone. Timings are kept in `--out`, so that a run of hours can be
resumed. `--saved` measures nothing, and compares the saved figures with the goals again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parts import page, steps, turns

from xsp import bench, graph
from xsp.bench.plan import overheads
from xsp.bench.spec import CacheState
from xsp.bound import construct, curves, timed
from xsp.graph.node import Graph

SIZES = (1, 2, 4, 8)
GOAL_BEST, GOAL_LAYERS, CROSS_MARGIN, GOAL_SAVED, SAVED_MODELS = 0.05, 0.11, 0.03, 4.4, 100
GOAL_RATIO, GOAL_LOWEST, GOAL_CLOSER = (0.85, 1.05), 0.7, 2 / 3
"""Goals for timed calls over the measured step: range of the geometric mean, minimum, and share of models for which
adding the framework's time brings the ratio closer to 1."""

COVERED_SHARE = 0.9
"""Minimum share of the expected time that other models' timings must cover for a cross-model error."""

NOTED_DRIFT = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    parser = steps.add_options(turns.parser(__doc__))
    parser.add_argument("--sizes", type=int, nargs="+", help="calls of a block (default: 1 2 4 8, quick: 1 2)")
    parser.add_argument("--budget", type=float, help="seconds a model for its blocks (default: 60, quick: 20)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--batch", type=int, default=1, help="samples in a step (default: 1)")
    parser.add_argument("--saved", action="store_true", help="measure nothing: goals of the figures that are saved")
    parser.add_argument("--only-report", action="store_true", help="measure nothing: figures of what is in --out")
    options = turns.parse(parser, arguments)
    if options.saved:
        _report_saved(options)
        return
    sizes = options.sizes or (SIZES[:2] if options.quick else SIZES)
    method = construct.Conditions(CacheState.CHAIN, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        stored_steps = steps.StoredSteps(options.out or Path(folder))
        timings = bench.Timings.open(stored_steps.folder / "timings")
        selection, deadline = steps.selected_models(options), steps.deadline(options)
        graphs: dict[str, Graph] = {}
        problems = turns.Report("", "", ())  # what is noted while models are measured
        with problems.until_interrupted():
            for text in selection:
                if (options.only_report or time.monotonic() > deadline) and (
                    text, options.batch, options.threads
                ) not in stored_steps.steps:  # fmt: skip
                    continue
                with problems.trying(text):
                    spec, settings = steps.settings_of(text, options.batch, options.seed)
                    captured = graph.of(spec, batch=options.batch, sequence=settings.sequence)
                    graphs[text] = replace(captured, name=text)
                    if not options.only_report and time.monotonic() < deadline:
                        turns.say(f"{len(graphs)}/{len(selection)} {text}")
                        _measure(text, graphs[text], stored_steps, timings, sizes, options)
        report = _report(graphs, stored_steps, timings, sizes, method, options.batch)
        report.notes += problems.notes
        report.is_complete = problems.is_complete and bool(graphs)
        report.notes.append(f"Measured: {len(graphs)} of {len(selection)} models.")
    report.finish(options)


def _measure(
    text: str,
    captured: Graph,
    stored_steps: steps.StoredSteps,
    timings: bench.Timings,
    sizes: Sequence[int],
    options: argparse.Namespace,
) -> None:
    """Measure the step, time the blocks, and measure the step again, unless all of these are stored."""
    pairs = [(spec, 1) for spec in overheads(options.threads)]
    for size in sizes:
        pairs += bench.specs(captured, granularity=size, threads=options.threads)
    untimed = [pair for pair in pairs if timings.get(pair[0].key) is None]
    is_measured = (text, options.batch, options.threads) in stored_steps.steps
    if is_measured and not untimed:
        return
    before = None
    if not is_measured:
        ((before, _),) = steps.measure_steps([text], (options.batch,), (options.threads,), stored_steps, options)
    if untimed:
        turns.say(f"  {text}: {len(untimed)} of {len(pairs)} blocks have no timing")
        bench.fill(untimed, timings, options.budget or (20 if options.quick else 60))
    if before is not None:
        del stored_steps.steps[text, options.batch, options.threads]
        ((after, _),) = steps.measure_steps([text], (options.batch,), (options.threads,), stored_steps, options)
        drift = after.ns / before.ns - 1
        if abs(drift) > NOTED_DRIFT:
            turns.say(f"  {text}: the step is {drift:+.0%} after its blocks were timed")
        combined = replace(after, rounds=(*before.rounds, *after.rounds), disturbed=before.disturbed + after.disturbed)
        stored_steps.add(combined)


def _report(
    graphs: Mapping[str, Graph],
    stored_steps: steps.StoredSteps,
    timings: bench.Timings,
    sizes: Sequence[int],
    method: construct.Conditions,
    batch: int,
) -> turns.Report:
    report = turns.Report(
        _name(batch, method.threads, len(graphs)),
        f"Models from their blocks of G calls, {len(graphs)} models, {method.threads} threads, batch {batch}",
        (
            "G", "models", "error, mean abs.", "with glue", "constructed/step", "from others: models", "error of those",
            "blocks", "different", "step time saved",
        ),
    )  # fmt: skip
    glue = {
        text: figure.ns
        for text, captured in graphs.items()
        if (figure := timed.framework(captured, timings, method.threads)[0]) is not None
    }
    steps_of = {
        text: step for text in graphs if (step := stored_steps.steps.get((text, batch, method.threads))) is not None
    }
    measured_ns = {text: step.ns for text, step in steps_of.items()}
    for size in sizes:
        points = {
            text: curves.curve(captured, timings, measured_ns[text], [size], conditions=method)[0]
            for text, captured in graphs.items()
            if text in measured_ns
        }
        signed = {text: point.error for text, point in points.items() if point.error is not None}
        glued = {
            text: point.error
            for text in signed
            if (
                point := curves.curve(
                    graphs[text], timings, measured_ns[text], [size], conditions=method, glue_ns=glue.get(text)
                )[0]
            ).error
            is not None
        }
        cross = _cross_model_errors(graphs, timings, measured_ns, size, method)
        cost = curves.cost([graphs[text] for text in signed], timings, measured_ns, size, conditions=method)
        report.add(
            [
                str(size),
                str(len(signed)),
                _mean_abs(list(signed.values())).text(1, 100) + " %" if signed else "–",
                _mean_abs(list(glued.values())).text(1, 100) + " %" if glue and glued else "–",
                f"{statistics.geometric_mean(1 + error for error in signed.values()):.3f}" if signed else "–",
                str(len(cross)),
                _mean_abs([error for error, _ in cross.values()]).text(1, 100) + " %" if cross else "–",
                f"{cost.blocks:,}",
                f"{cost.unique:,}",
                f"{cost.saved:.1f} ×" if cost.saved else "–",
            ],
            errors=signed,
            saved=cost.saved,
            with_glue=glued,
            cross={text: {"error": error, "found": share} for text, (error, share) in cross.items()},
            holes={
                text: [(hole.op, hole.count, hole.status.value) for hole in point.construction.holes][:5]
                for text, point in points.items()
                if point.construction.holes
            },
        )
    report.notes += goals(report.data)
    report.data["steps"] = {text: step.rounds for text, step in steps_of.items()}
    return report


def _name(batch: int, threads: int, models: int) -> str:
    """Return the name of the saved figures."""
    if models > len(steps.MANY_MODELS):
        return "construction_hundred"
    return "construction" if (batch, threads) == (1, 1) else f"construction_batch{batch}_threads{threads}"


def _cross_model_errors(
    graphs: Mapping[str, Graph],
    timings: bench.Timings,
    measured_ns: Mapping[str, float],
    size: int,
    method: construct.Conditions,
) -> dict[str, tuple[float, float]]:
    """Return the error of each model when constructed from other models' timings, and the share of its time covered.

    The missing part is assumed to have the same error as the covered part: the sum is divided by the share.
    """
    keys = {text: construct.spec_keys([captured], size, conditions=method) for text, captured in graphs.items()}
    errors: dict[str, tuple[float, float]] = {}
    for text, captured in graphs.items():
        other_keys = frozenset().union(*(model_keys for name, model_keys in keys.items() if name != text))
        total = construct.construct(captured, timings, size, conditions=method, partial=True)
        covered = construct.construct(captured, timings, size, conditions=method, only=other_keys, partial=True)
        if text in measured_ns and total.ns and not total.is_lower_limit and covered.ns is not None:
            share = covered.ns / total.ns
            if share >= COVERED_SHARE:
                errors[text] = covered.ns / share / measured_ns[text] - 1, share
    return errors


def _mean_abs(errors: Sequence[float]) -> turns.Figure:
    if not errors:
        return turns.Figure(float("nan"), float("nan"), float("nan"))
    return turns.bootstrap([abs(error) for error in errors], statistics.fmean)


def goals(data: Mapping[str, Any]) -> list[str]:
    """Return notes that compare the figures with the goals.

    Args:
        data: G as text → `errors`, `with_glue` and `cross` of each model; other keys are ignored.
    """
    rows = {int(size): row for size, row in data.items() if size.isdecimal() and row["errors"]}
    if not rows:
        return ["No model has a step and all its blocks."]
    errors = {size: _mean_abs(list(row["errors"].values())) for size, row in rows.items()}
    best = min(errors, key=lambda size: errors[size].value)
    limits = {best: GOAL_BEST} | ({1: GOAL_LAYERS} if 1 in errors else {})
    notes = [
        f"Goals: at the best G ({best}) at most {GOAL_BEST:.0%}, {turns.verdict(errors[best], GOAL_BEST)}"
        + (f"; at G = 1 at most {GOAL_LAYERS:.0%}, {turns.verdict(errors[1], GOAL_LAYERS)}" if 1 in errors else "")
        + _saving(rows.get(1, {}))
    ]
    for size, limit in sorted(limits.items()):
        cross_errors = [entry["error"] for entry in rows[size]["cross"].values()]
        mean_error = _mean_abs(cross_errors)
        verdict = (
            f"{mean_error.text(1, 100)} %, {turns.verdict(mean_error, limit + CROSS_MARGIN)}"
            if cross_errors
            else "none"
        )
        notes.append(
            f"With timings of other models alone, if these cover {COVERED_SHARE:.0%} of the time, the goal is "
            f"{CROSS_MARGIN:.0%} higher; G = {size}, at most {limit + CROSS_MARGIN:.0%}: {verdict} "
            f"({len(cross_errors)} models)."
        )
    if 1 in rows:
        notes += _ratios(rows[1])
    glued = any(row["with_glue"] for row in rows.values())
    notes.append(
        "Glue, the framework's own time for calls of modules and of views, is "
        + ("only in the column `with glue`." if glued else "not timed.")
    )
    return notes


def _saving(row: Mapping[str, Any]) -> str:
    """Return a clause on how much less time one run of each different block takes than one step of each model."""
    saved, models = row.get("saved"), len(row.get("errors", ()))
    if not saved:
        return "."
    verdict = f"of {models} models" if models < SAVED_MODELS else "met" if saved >= GOAL_SAVED else "missed"
    return (
        f"; one run of each different block takes {saved:.1f} times less time than one step of each model, at G = 1 "
        f"(goal {GOAL_SAVED} over {SAVED_MODELS} models: {verdict})."
    )


def _ratios(row: Mapping[str, Any]) -> list[str]:
    """Return notes on the ratio of timed calls to the measured step, without and with the framework's time."""
    ratios = {text: 1 + error for text, error in row["errors"].items()}
    mean = turns.bootstrap(list(ratios.values()), statistics.geometric_mean)
    lowest = min(ratios, key=lambda text: ratios[text])
    low, high = GOAL_RATIO
    notes = [
        f"Timed calls over the measured step: {mean.text(2)} (geometric mean, {len(ratios)} models; goal {low} to "
        f"{high}, {'met' if low <= mean.value <= high else 'missed'}), least {ratios[lowest]:.2f} ({lowest}; goal "
        f"{GOAL_LOWEST}, {'met' if ratios[lowest] >= GOAL_LOWEST else 'missed'})."
    ]
    with_glue = {text: 1 + error for text, error in row["with_glue"].items()}
    if with_glue:
        nearer = sum(abs(math.log(ratio)) < abs(math.log(ratios[text])) for text, ratio in with_glue.items())
        verdict = "met" if nearer >= GOAL_CLOSER * len(with_glue) else "missed"
        notes.append(
            f"With glue it is closer to 1 for {nearer} of {len(with_glue)} models (goal two thirds, {verdict})."
        )
    return notes


def _report_saved(options: argparse.Namespace) -> None:
    """Print the saved figures compared with the goals; with `--save` also store these notes with the figures."""
    path = page.RESULTS / "construction.json"
    saved = turns.stored(path)
    if saved is None:
        turns.say(f"{path}: no figures are saved there")
        return
    notes = goals(saved["data"])
    print("\n".join(notes))
    if options.save:
        saved["notes"] = [*notes, *(note for note in saved["notes"] if note.startswith("Measured: "))]
        path.write_text(json.dumps(saved, ensure_ascii=False) + "\n", encoding="utf-8")
        page.update()


if __name__ == "__main__":
    main()
