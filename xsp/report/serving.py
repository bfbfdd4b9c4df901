"""Engine steps and the lives of requests over time, as data of the page: `serving.js` draws them."""

from __future__ import annotations

from typing import Any

from xsp.account import served
from xsp.account.requests import reasons as reasons_of
from xsp.account.serving import lives
from xsp.store.trace import Trace

MOST_STEPS, MOST_REQUESTS = 5_000, 40
"""Maximum numbers of steps and of requests that are drawn; of more, the longest ones."""


def serving(trace: Trace) -> dict[str, Any] | None:
    """Return steps of engines, and what happened to the longest requests, in seconds since the first; None without."""
    steps, requests = served.steps(trace), served.requests(trace)
    if not steps and not requests:
        return None
    start_ns = min([each.start_ns for each in steps[:1]] + [each.start_ns for each in requests[:1]])
    drawn = sorted(sorted(steps, key=lambda step: -step.dur_ns)[:MOST_STEPS], key=lambda step: step.start_ns)
    reasons = reasons_of(trace)

    def seconds(ns: int) -> float:
        return round((ns - start_ns) / 1e9, 7)

    return {
        "steps": [
            {
                "kind": step.kind, "start": seconds(step.start_ns), "end": seconds(step.end_ns),
                "requests": step.requests, "prefill": step.prefill_tokens, "decode": step.decode_tokens,
                "number": step.number, "engine": step.engine,
            }
            for step in drawn
        ],
        "requests": [
            {
                "name": each.request, "status": each.status, "ms": each.latency_ns / 1e6,
                "prompt": each.prompt_tokens, "output": each.output_tokens,
                "slow_by": reasons.get((each.rank, each.engine, each.request, each.start_ns), ""),
                "life": [(part.name, seconds(part.start_ns), seconds(part.end_ns), part.steps, part.tokens)
                         for part in parts],
            }
            for each, parts in lives(trace, MOST_REQUESTS)
        ],
        "left_out": [len(steps) - len(drawn), max(0, len(requests) - MOST_REQUESTS)],
    }  # fmt: skip
