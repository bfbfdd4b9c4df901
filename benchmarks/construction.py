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
BEST, LAYERS, CROSS, SAVED, OVER = 0.05, 0.11, 0.03, 4.4, 100
RATIO, LEAST, CLOSER = (0.85, 1.05), 0.7, 2 / 3
"""Goals for timed calls over the measured step: range of the geometric mean, minimum, and share of models for which
adding the framework's time brings the ratio closer to 1."""

FOUND = 0.9
"""Minimum share of the expected time that other models' timings must cover for a cross-model error."""

DRIFT = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    made = steps.add_options(turns.parser(__doc__))
    made.add_argument("--sizes", type=int, nargs="+", help="calls of a block (default: 1 2 4 8, quick: 1 2)")
    made.add_argument("--budget", type=float, help="seconds a model for its blocks (default: 60, quick: 20)")
    made.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    made.add_argument("--batch", type=int, default=1, help="samples in a step (default: 1)")
    made.add_argument("--saved", action="store_true", help="measure nothing: goals of the figures that are saved")
    made.add_argument("--only-report", action="store_true", help="measure nothing: figures of what is in --out")
    options = turns.parse(made, arguments)
    if options.saved:
        _saved(options)
        return
    sizes = options.sizes or (SIZES[:2] if options.quick else SIZES)
    conditions = construct.Conditions(CacheState.CHAIN, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        kept = steps.Kept(options.out or Path(folder))
        timings = bench.Timings.open(kept.folder / "timings")
        wanted, until = steps.chosen(options), steps.until(options)
        graphs: dict[str, Graph] = {}
        lacking = turns.Report("", "", ())  # what is noted while models are measured
        with lacking.until_interrupted():
            for text in wanted:
                if (options.only_report or time.monotonic() > until) and (
                    text, options.batch, options.threads
                ) not in kept.steps:  # fmt: skip
                    continue
                with lacking.trying(text):
                    spec, settings = steps.settings_of(text, options.batch, options.seed)
                    captured = graph.of(spec, batch=options.batch, sequence=settings.sequence)
                    graphs[text] = replace(captured, name=text)
                    if not options.only_report and time.monotonic() < until:
                        turns.say(f"{len(graphs)}/{len(wanted)} {text}")
                        _measure(text, graphs[text], kept, timings, sizes, options)
        report = _report(graphs, kept, timings, sizes, conditions, options.batch)
        report.notes += lacking.notes
        report.whole = lacking.whole and bool(graphs)
        report.notes.append(f"Measured: {len(graphs)} of {len(wanted)} models.")
    report.finish(options)


def _measure(
    text: str,
    found: Graph,
    kept: steps.Kept,
    timings: bench.Timings,
    sizes: Sequence[int],
    options: argparse.Namespace,
) -> None:
    """Measure the step, time the blocks, and measure the step again, unless all of these are stored."""
    wanted = [(spec, 1) for spec in overheads(options.threads)]
    for size in sizes:
        wanted += bench.specs(found, granularity=size, threads=options.threads)
    left = [pair for pair in wanted if timings.get(pair[0].key) is None]
    done = (text, options.batch, options.threads) in kept.steps
    if done and not left:
        return
    before = None
    if not done:
        ((before, _),) = steps.each([text], (options.batch,), (options.threads,), kept, options)
    if left:
        turns.say(f"  {text}: {len(left)} of {len(wanted)} blocks have no timing")
        bench.fill(left, timings, options.budget or (20 if options.quick else 60))
    if before is not None:
        del kept.steps[text, options.batch, options.threads]
        ((after, _),) = steps.each([text], (options.batch,), (options.threads,), kept, options)
        drift = after.ns / before.ns - 1
        if abs(drift) > DRIFT:
            turns.say(f"  {text}: the step is {drift:+.0%} after its blocks were timed")
        whole = replace(after, rounds=(*before.rounds, *after.rounds), disturbed=before.disturbed + after.disturbed)
        kept.add(whole)


def _report(
    graphs: Mapping[str, Graph],
    kept: steps.Kept,
    timings: bench.Timings,
    sizes: Sequence[int],
    conditions: construct.Conditions,
    batch: int,
) -> turns.Report:
    report = turns.Report(
        _name(batch, conditions.threads, len(graphs)),
        f"Models from their blocks of G calls, {len(graphs)} models, {conditions.threads} threads, batch {batch}",
        (
            "G", "models", "error, mean abs.", "with glue", "constructed/step", "from others: models", "error of those",
            "blocks", "different", "step time saved",
        ),
    )  # fmt: skip
    glue = {
        text: figure.ns
        for text, found in graphs.items()
        if (figure := timed.framework(found, timings, conditions.threads)[0]) is not None
    }
    steps_of = {
        text: step for text in graphs if (step := kept.steps.get((text, batch, conditions.threads))) is not None
    }
    measured = {text: step.ns for text, step in steps_of.items()}
    for size in sizes:
        points = {
            text: curves.curve(found, timings, measured[text], [size], conditions=conditions)[0]
            for text, found in graphs.items()
            if text in measured
        }
        signed = {text: point.error for text, point in points.items() if point.error is not None}
        glued = {
            text: point.error
            for text in signed
            if (
                point := curves.curve(
                    graphs[text], timings, measured[text], [size], conditions=conditions, glue_ns=glue.get(text)
                )[0]
            ).error
            is not None
        }
        cross = _from_others(graphs, timings, measured, size, conditions)
        paid = curves.cost([graphs[text] for text in signed], timings, measured, size, conditions=conditions)
        report.add(
            [
                str(size),
                str(len(signed)),
                _mean_abs(list(signed.values())).shown(1, 100) + " %" if signed else "–",
                _mean_abs(list(glued.values())).shown(1, 100) + " %" if glue and glued else "–",
                f"{statistics.geometric_mean(1 + each for each in signed.values()):.3f}" if signed else "–",
                str(len(cross)),
                _mean_abs([each for each, _ in cross.values()]).shown(1, 100) + " %" if cross else "–",
                f"{paid.blocks:,}",
                f"{paid.unique:,}",
                f"{paid.saved:.1f} ×" if paid.saved else "–",
            ],
            errors=signed,
            saved=paid.saved,
            with_glue=glued,
            cross={text: {"error": error, "found": share} for text, (error, share) in cross.items()},
            holes={
                text: [(each.op, each.count, each.status.value) for each in point.construction.holes][:5]
                for text, point in points.items()
                if point.construction.holes
            },
        )
    report.notes += goals(report.data)
    report.data["steps"] = {text: step.rounds for text, step in steps_of.items()}
    return report


def _name(batch: int, threads: int, models: int) -> str:
    """Return the name of the saved figures."""
    if models > len(steps.MANY):
        return "construction_hundred"
    return "construction" if (batch, threads) == (1, 1) else f"construction_batch{batch}_threads{threads}"


def _from_others(
    graphs: Mapping[str, Graph],
    timings: bench.Timings,
    measured: Mapping[str, float],
    size: int,
    conditions: construct.Conditions,
) -> dict[str, tuple[float, float]]:
    """Return the error of each model when constructed from other models' timings, and the share of its time covered.

    The missing part is assumed to have the same error as the covered part: the sum is divided by the share.
    """
    keys = {text: construct.spec_keys([found], size, conditions=conditions) for text, found in graphs.items()}
    found: dict[str, tuple[float, float]] = {}
    for text, own in graphs.items():
        others = frozenset().union(*(each for name, each in keys.items() if name != text))
        full = construct.construct(own, timings, size, conditions=conditions, partial=True)
        some = construct.construct(own, timings, size, conditions=conditions, only=others, partial=True)
        if text in measured and full.ns and not full.is_lower_limit and some.ns is not None:
            share = some.ns / full.ns
            if share >= FOUND:
                found[text] = some.ns / share / measured[text] - 1, share
    return found


def _mean_abs(errors: Sequence[float]) -> turns.Figure:
    if not errors:
        return turns.Figure(float("nan"), float("nan"), float("nan"))
    return turns.bootstrap([abs(each) for each in errors], statistics.fmean)


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
    limits = {best: BEST} | ({1: LAYERS} if 1 in errors else {})
    notes = [
        f"Goals: at the best G ({best}) at most {BEST:.0%}, {turns.verdict(errors[best], BEST)}"
        + (f"; at G = 1 at most {LAYERS:.0%}, {turns.verdict(errors[1], LAYERS)}" if 1 in errors else "")
        + _saving(rows.get(1, {}))
    ]
    for size, limit in sorted(limits.items()):
        others = [each["error"] for each in rows[size]["cross"].values()]
        found = _mean_abs(others)
        said = f"{found.shown(1, 100)} %, {turns.verdict(found, limit + CROSS)}" if others else "none"
        notes.append(
            f"With timings of other models alone, if these cover {FOUND:.0%} of the time, the goal is {CROSS:.0%} "
            f"higher; G = {size}, at most {limit + CROSS:.0%}: {said} ({len(others)} models)."
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
    met = f"of {models} models" if models < OVER else "met" if saved >= SAVED else "missed"
    return (
        f"; one run of each different block takes {saved:.1f} times less time than one step of each model, at G = 1 "
        f"(goal {SAVED} over {OVER} models: {met})."
    )


def _ratios(row: Mapping[str, Any]) -> list[str]:
    """Return notes on the ratio of timed calls to the measured step, without and with the framework's time."""
    alone = {text: 1 + error for text, error in row["errors"].items()}
    mean = turns.bootstrap(list(alone.values()), statistics.geometric_mean)
    least = min(alone, key=lambda text: alone[text])
    low, high = RATIO
    notes = [
        f"Timed calls over the measured step: {mean.shown(2)} (geometric mean, {len(alone)} models; goal {low} to "
        f"{high}, {'met' if low <= mean.value <= high else 'missed'}), least {alone[least]:.2f} ({least}; goal "
        f"{LEAST}, {'met' if alone[least] >= LEAST else 'missed'})."
    ]
    with_glue = {text: 1 + error for text, error in row["with_glue"].items()}
    if with_glue:
        nearer = sum(abs(math.log(each)) < abs(math.log(alone[text])) for text, each in with_glue.items())
        kept = "met" if nearer >= CLOSER * len(with_glue) else "missed"
        notes.append(f"With glue it is closer to 1 for {nearer} of {len(with_glue)} models (goal two thirds, {kept}).")
    return notes


def _saved(options: argparse.Namespace) -> None:
    """Print the saved figures compared with the goals; with `--save` also store these notes with the figures."""
    path = page.RESULTS / "construction.json"
    saved = turns.stored(path)
    if saved is None:
        turns.say(f"{path}: no figures are saved there")
        return
    notes = goals(saved["data"])
    print("\n".join(notes))
    if options.save:
        saved["notes"] = [*notes, *(each for each in saved["notes"] if each.startswith("Measured: "))]
        path.write_text(json.dumps(saved, ensure_ascii=False) + "\n", encoding="utf-8")
        page.update()


if __name__ == "__main__":
    main()
