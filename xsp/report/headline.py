"""The figures at the top of the page: the loop as the program ran it, then a step, devices, and profiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xsp import account
from xsp.account import entries as names
from xsp.analyses.answers import Answers
from xsp.analyses.loop import STEP_SOURCES as FIGURE_SOURCES
from xsp.levels import depth
from xsp.report.loop import BASES
from xsp.report.words import used_devices
from xsp.run import Budget
from xsp.schema import Grade
from xsp.texts import ms_text, number

Row = Mapping[str, Any]

Figure = tuple[str, str, str]
"""Name, value, and a note: its confidence interval, or what it refers to."""

CHEAPER = 2
"""Budget in percent that is suggested if profiling cost the program more than five times as much."""


def headline(answers: Answers, attributed: Sequence[tuple[str, int, float]]) -> list[Figure]:
    """Return the figures at the top of the page.

    Args:
        answers: answers of the trace.
        attributed: grade, spans and milliseconds of device work, see `xsp.report.words`.
    """
    run, latency, ledger = answers.trace.run, answers.latency(), answers["ledger"].dicts()
    models = sorted(answers["A1"].dicts(), key=lambda row: row != latency)
    figures = [*_program_overhead(run.budget), *([recording_cost(ledger)] if len(ledger) > 1 else [])]
    if len(models) > 1:
        sizes = ", ".join(str(model["batch_size"]) for model in models[1:])
        figures.append(("also measured", f"{len(models) - 1} more", f"batch size {sizes}: see the first table"))
    return [
        *_loop(answers, models),
        *_latency(models),
        *_device(answers, attributed),
        *figures,
    ]


def _loop(answers: Answers, models: Sequence[Row]) -> list[Figure]:
    """Return wall time per iteration and samples per second; of the whole job if possible."""
    rows = [row for row in answers["loop"].dicts() if row["kind"] == answers.trace.kind]
    row = next(iter(sorted(rows, key=lambda row: not row["scope"].startswith("job"))), None)
    if row is None or row["iteration_ms"] is None:
        return []
    if models and all(model.get("loop_ms") is None for model in models):
        return [
            (
                "an iteration of the loop",
                "–",
                "all unrecorded steps are short and ran soon after recorded ones; run more steps",
            )
        ]
    iteration_ms, basis = row["iteration_ms"], BASES[FIGURE_SOURCES.index(row["figures_from"])]
    scope = "" if row["scope"] == "program" else f" of the {row['scope']}"
    figures = [
        (
            "an iteration of the loop",
            ms_text(iteration_ms),
            f"wall time from step to step; {_interval_text(row)}; {basis}",
        )
    ]
    if row["samples_per_s"] is not None:
        note = f"as the program ran, {row['samples']:g} samples a step{_guess_note(row)}{scope}"
        figures.append(("the loop's throughput", f"{number(row['samples_per_s'])} samples/s", note))
    return figures


def _guess_note(row: Row) -> str:
    return ", a guess" if row.get("samples_from") == "guess" else ""


def _latency(models: Sequence[Row]) -> list[Figure]:
    if not models:
        return [("latency of a step", "–", "no timed step")]
    row = models[0]
    several = row["steps"] > 1
    figures = [("latency of a step", ms_text(row["latency_ms"]), _interval_text(row) if several else "one step")]
    if row.get("samples_per_s") is not None:
        note = f"batch size {row['batch_size']}{_guess_note(row)}, steps back to back"
        figures.append(("a step's throughput", f"{number(row['samples_per_s'])} samples/s", note))
    if several:
        note = f"90 % of the steps are faster; median {ms_text(row['median_ms'])}, {row['steps']} steps"
        figures.append(("90th percentile", ms_text(row["p90_ms"]), note))
    return figures


def _device(answers: Answers, attributed: Sequence[tuple[str, int, float]]) -> list[Figure]:
    """Return how busy the device is in an iteration, and the share of device time with a known layer."""
    accounted = account.of(answers.trace)
    main = accounted.job
    if main is None or main.device is None or not main.time.ms or accounted.forbids("busy"):
        return []
    busy_ms = main.device.ms(names.BUSY)
    suffix = f"; the busiest of {len(used_devices(answers.trace))} GPUs" if len(used_devices(answers.trace)) > 1 else ""
    figures = [
        (
            "device busy",
            f"{100 * busy_ms / main.time.ms:.1f} %",
            f"{ms_text(busy_ms)} of an iteration of {ms_text(main.time.ms)}{suffix}",
        )
    ]
    total_ms = sum(ms for _, _, ms in attributed)
    if total_ms:
        known_ms = sum(ms for grade, _, ms in attributed if grade != Grade.UNKNOWN)
        figures.append(
            ("device time with a layer", f"{100 * known_ms / total_ms:.1f} %", "of GPU time; its certainty is below")
        )
    return figures


def _program_overhead(budget: Budget | None) -> list[Figure]:
    """Return the overhead of profiling on the whole program, and the option that lowers it if it is large."""
    if budget is None or budget.program_percent is None:
        return []
    percent, limit = budget.program_percent, budget.asked_percent
    if percent > 5 * CHEAPER and (limit is None or limit > CHEAPER):
        note = f"--budget {CHEAPER}% would cost less"
    else:
        note = f"the budget was {limit:g} %" if limit is not None else "the whole program"
    factor = f"{1 + percent / 100:.3g} times as long" if percent >= 10 else f"{percent:.2g} % longer"
    return [("profiling made the program", factor, note)]


def recording_cost(ledger: Sequence[Row]) -> Figure:
    """Return the overhead of full recording on a step, or that it cannot be distinguished from noise."""
    bare_ms, full_ms, rung = ledger[0]["step_ms"], ledger[-1]["step_ms"], ledger[-1]["rung"]
    added = f"{full_ms - bare_ms:+.3g} ms"
    is_significant = any(row.get("low_ms") is None or not row["low_ms"] <= 0 <= row["high_ms"] for row in ledger[1:])
    share = f"{100 * (full_ms / bare_ms - 1):+.1f} % of its latency, with all down to {depth(rung)} recorded"
    label = "recording adds to a step"
    if is_significant:
        return label, added, share
    return label, "not measurable", f"less than steps vary, with all down to {depth(rung)} recorded"


def _interval_text(row: Row) -> str:
    if row.get("low_ms") is None or row.get("high_ms") is None:
        return "too few steps for an interval"
    return f"95 % interval {ms_text(row['low_ms'])} to {ms_text(row['high_ms'])}"
