"""The step time that gains are shares of, from the tables of a trace."""

from __future__ import annotations

from xsp.advise.advice import Interval, Step
from xsp.analyses.answers import Answers
from xsp.analyses.loop import scope_names

MOST_DIFFERENCE = 0.25
"""Maximum relative difference between the devices' window and the sum of the steps for both to be taken as equal."""

LEAST_SHARE = 0.05
"""Minimum share of an iteration between steps for gains to be shares of the iteration and not of the step."""


def of(answers: Answers) -> Step | None:
    """Return the step time with its interval; None if it is unknown.

    Where devices worked, a loss is a share of their window. If the window is as long as the steps together, the loss is
    the same share of a step; else gains are shares of the window.
    """
    step = _iteration(answers) or latency(answers)
    activity = answers["device-activity"].dicts()
    if not activity or not activity[-1]["window_ms"]:
        return step
    devices = {(row["rank"], row["device"]) for row in activity[:-1]} or {(0, 0)}
    window = float(activity[-1]["window_ms"]) / len(devices)
    if step is not None and step.steps:
        total_ms = step.ms.value * step.steps
        if abs(window - total_ms) <= MOST_DIFFERENCE * total_ms:
            return step
    return Step(Interval(window, window, window), "window")


def _iteration(answers: Answers) -> Step | None:
    """Return the time of an iteration if the loop records it and enough of it is outside the step, else None."""
    trace = answers.trace
    for row in answers["loop"].dicts():
        if row["kind"] == trace.kind and row["scope"] in scope_names(trace.rank) and row["iteration_ms"] is not None:
            mean, low, high = (row[name] for name in ("iteration_ms", "low_ms", "high_ms"))
            if low is None or (row["data_ms"] or 0.0) + (row["between_ms"] or 0.0) < LEAST_SHARE * mean:
                return None
            return Step(Interval(low, mean, high), "iteration", row["steps"] - row["recorded"])
    return None


def latency(answers: Answers) -> Step | None:
    """Return the time of a step alone, with the batch size of most steps; None if it is unknown."""
    row = answers.latency()
    if row is None or row["latency_ms"] is None:
        return None
    mean, low, high = (row[name] for name in ("latency_ms", "low_ms", "high_ms"))
    return Step(Interval(low if low is not None else mean, mean, high if high is not None else mean), "step",
                row["steps"])  # fmt: skip
