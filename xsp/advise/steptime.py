"""The time of a step that gains are a part of, from the tables of a trace."""

from __future__ import annotations

from xsp.advise.advice import Interval, Step
from xsp.analyses.answers import Answers

ALIKE = 0.25
"""By so much, as a share, the window of the devices may differ from the steps for these to be what it is made of."""

AROUND = 0.05
"""From this share on that lies between steps, gains are a part of the iteration and not of the step."""


def of(answers: Answers) -> Step | None:
    """Return the time of a step with its interval; None where nothing tells it.

    Where devices worked, a loss is a share of their window. Where that is as long as the steps together, it is a share
    of a step; else gains are those of the window.
    """
    found = _iteration(answers) or latency(answers)
    activity = answers["device-activity"].dicts()
    if not activity or not activity[-1]["window_ms"]:
        return found
    devices = {(row["rank"], row["device"]) for row in activity[:-1]} or {(0, 0)}
    window = float(activity[-1]["window_ms"]) / len(devices)
    if found is not None and found.steps:
        together = found.ms.value * found.steps
        if abs(window - together) <= ALIKE * together:
            return found
    return Step(Interval(window, window, window), "window")


def _iteration(answers: Answers) -> Step | None:
    """Return the time from step to step, where the loop tells it and more than the step is in it."""
    trace = answers.trace
    for row in answers["loop"].dicts():
        if row["kind"] == trace.kind and not row["scope"].startswith("job") and row["iteration_ms"] is not None:
            mean, low, high = (row[name] for name in ("iteration_ms", "low_ms", "high_ms"))
            if low is None or (row["data_ms"] or 0.0) + (row["between_ms"] or 0.0) < AROUND * mean:
                return None
            return Step(Interval(low, mean, high), "iteration", row["steps"] - row["recorded"])
    return None


def latency(answers: Answers) -> Step | None:
    """Return the time of a step by itself; None where nothing tells it."""
    rows = answers["A1"].dicts()
    if not rows or rows[0]["latency_ms"] is None:
        return None
    mean, low, high = (rows[0][name] for name in ("latency_ms", "low_ms", "high_ms"))
    return Step(Interval(low if low is not None else mean, mean, high if high is not None else mean), "step",
                rows[0]["steps"])  # fmt: skip
