"""The time that gains are shares of: an iteration of the account, and the latency of a step alone."""

from __future__ import annotations

from xsp import account
from xsp.advise.advice import Step
from xsp.analyses.answers import Answers
from xsp.stats import Interval


def of(answers: Answers) -> Step | None:
    """Return the time of an iteration with its interval, else the latency of a step; None if both are unknown."""
    main = account.of(answers.trace).job
    if main is None or main.time.ms is None:
        return latency(answers)
    time = main.time
    assert time.ms is not None
    low, high = (time.ms if end is None else end for end in (time.low_ms, time.high_ms))
    count = main.count - main.recorded if main.count > main.recorded else main.recorded
    return Step(Interval(low, time.ms, high), main.unit, count if main.unit != "window" else None)


def latency(answers: Answers) -> Step | None:
    """Return the time of a step alone, with the batch size of most steps; None if it is unknown."""
    row = answers.latency()
    if row is None or row["latency_ms"] is None:
        return None
    mean, low, high = (row[name] for name in ("latency_ms", "low_ms", "high_ms"))
    return Step(Interval(low if low is not None else mean, mean, high if high is not None else mean), "step",
                row["steps"])  # fmt: skip
