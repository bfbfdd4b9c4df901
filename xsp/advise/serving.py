"""Engines that serve language models: what makes requests wait longer than their tokens take."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.account import requests as served
from xsp.account import serving
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere
from xsp.advise.registry import question
from xsp.stats import Interval


@question("serving", "What makes requests of an engine wait?", number="Q4")
def requests(context: AdviceContext) -> Iterator[Advice]:
    """Queues, prompts that stall decoding, a full cache, static batches, time between steps, compilation, padding.

    The gain is the mean time of a request that is gone without the flaw, if nothing else changes: an upper bound.
    """
    found = serving.flaws(context.required_trace)
    if not found and not served.requests(context.required_trace):
        raise CoveredElsewhere("the trace has no requests of an engine")
    for flaw in found:
        ms = flaw.mean_ns / 1e6
        yield Advice(
            "serving", flaw.what, (), Interval(ms, ms, ms), True, 100 * flaw.share, flaw.why, flaw.do, of="a request"
        )
