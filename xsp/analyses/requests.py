"""Requests that engines served, the steps of these engines, and the figures of both."""

from __future__ import annotations

from xsp.account import requests as figures
from xsp.account import served
from xsp.analyses.contract import Table, analysis, values
from xsp.serving import PARTS
from xsp.store.trace import Trace


def _reason_without_requests(trace: Trace) -> str | None:
    """Return why a trace has no requests, or None if it has some."""
    if served.requests(trace) or served.steps(trace):
        return None
    return (
        "no requests of an engine are known; `traced.engine(…)` or `xsp.serving.Engine` states them, and spans of vLLM "
        "or SGLang have them, imported together with a trace of their steps"
    )


_REQUEST_COLUMNS = {
    "request": "VARCHAR", "status": "VARCHAR", "latency_ms": "DOUBLE", "ttft_ms": "DOUBLE", "tpot_ms": "DOUBLE",
    "slow_by": "VARCHAR", "prompt_tokens": "BIGINT", "output_tokens": "BIGINT",
    **{f"{name}_ms": "DOUBLE" for name in PARTS},
    "recording_ms": "DOUBLE", "steps": "BIGINT", "arrival_s": "DOUBLE", "engine": "VARCHAR", "rank": "INTEGER",
}  # fmt: skip


@analysis("requests", "Requests of engines", unless=_reason_without_requests)
def requests(trace: Trace) -> Table:
    """What the latency of each request went to, the longest first; the parts add up to it.

    `queue_ms` ends with the first step that serves the request; null if its arrival was not stated. These steps are
    shared by tokens: `own_…` is its share, `others_…` the rest, `compiling_ms` compilation. `host_ms` is between such
    steps in a row and after the last one, `preempted_ms` while others ran. `ttft_ms` is the time to the first token,
    `tpot_ms` per further token. `slow_by` names, for the slowest tenth, the part that exceeds its median by most.
    `recording_ms` is what recorded steps added, by comparable ones, and is not in the other times; null without such.
    """
    found = sorted(served.requests(trace), key=lambda each: -each.latency_ns)
    reasons = figures.reasons(trace)
    first_ns = min((each.start_ns for each in found), default=0)
    rows = [
        (
            each.request, each.status, each.latency_ns / 1e6, _ms(each.ttft_ns), _ms(each.tpot_ns),
            reasons.get((each.rank, each.engine, each.request, each.start_ns)), each.prompt_tokens, each.output_tokens,
            *(None if name == "queue" and not each.has_arrival else each.parts[name] / 1e6 for name in PARTS),
            _recording_ms(each), each.steps, (each.start_ns - first_ns) / 1e9, each.engine, each.rank,
        )
        for each in found
    ]  # fmt: skip
    return values(trace, "served_requests", _REQUEST_COLUMNS, rows)


@analysis("request-figures", "Figures of requests", unless=_reason_without_requests)
def request_figures(trace: Trace) -> Table:
    """Percentiles of the times of requests that ended well, with 95 % intervals, and rates.

    An end of an interval is null if too few values bound it. `--ttft`, `--itl`, `--tpot` and `--latency` add goodput.
    Times are without what recording added, rates as measured.
    """
    columns = {"figure": "VARCHAR", "value": "DOUBLE", "unit": "VARCHAR", "low": "DOUBLE", "high": "DOUBLE"}
    rows = [
        (each.name, each.value, each.unit, each.low, each.high, each.observations) for each in figures.figures(trace)
    ]
    added = [each.recording_ns for each in served.requests(trace)]
    if any(added):
        rows.append(("recording, mean", sum(added) / len(added) / 1e6, "ms", None, None, len(added)))
    return values(trace, "request_figures", columns | {"count": "BIGINT"}, rows)


_STEP_COLUMNS = {
    "number": "BIGINT", "kind": "VARCHAR", "ms": "DOUBLE", "gap_ms": "DOUBLE", "requests": "BIGINT",
    "prefill_tokens": "BIGINT", "decode_tokens": "BIGINT", "recorded": "BOOLEAN", "recording_ms": "DOUBLE",
    "start_s": "DOUBLE", "engine": "VARCHAR", "rank": "INTEGER",
}  # fmt: skip


@analysis("engine-steps", "Steps of engines", unless=_reason_without_requests)
def engine_steps(trace: Trace) -> Table:
    """Every step of an engine: prefill, decode, mixed or idle; `gap_ms` is the time since the step before.

    Of recorded steps both are without what recording added, `recording_ms`, by comparable steps.
    """
    found = served.steps(trace)
    rows = [
        (
            each.number, each.kind, each.dur_ns / 1e6, _ms(gap_ns), each.requests, each.prefill_tokens,
            each.decode_tokens, each.is_recorded, _recording_ms(each), (each.start_ns - found[0].start_ns) / 1e9,
            each.engine, each.rank,
        )
        for each, gap_ns in zip(found, figures.gaps(trace), strict=True)
    ]  # fmt: skip
    return values(trace, "engine_steps_table", _STEP_COLUMNS, rows)


_KIND_COLUMNS = {
    "kind": "VARCHAR", "steps": "BIGINT",
    **dict.fromkeys(
        ("percent_of_time", "median_ms", "mean_ms", "low_ms", "high_ms", "gap_ms", "requests", "prefill_tokens",
         "decode_tokens", "tokens_per_s"), "DOUBLE",
    ),
    "engine": "VARCHAR", "rank": "INTEGER",
}  # fmt: skip


@analysis("engine-kinds", "Kinds of steps of engines", unless=_reason_without_requests)
def engine_kinds(trace: Trace) -> Table:
    """Time and tokens of each kind of step of an engine; means of a step, but for `gap_ms`, a median."""
    rows = [
        (
            each.kind, each.steps, 100 * each.share, _ms(each.median_ns),
            *(_ms(end) for end in ((each.mean.value, *each.mean.ends) if each.mean is not None else (None,) * 3)),
            _ms(each.gap_ns), each.requests, each.prefill_tokens, each.decode_tokens, each.tokens_per_s, each.engine,
            each.rank,
        )
        for each in figures.kinds(trace)
    ]  # fmt: skip
    return values(trace, "engine_kinds_table", _KIND_COLUMNS, rows)


def _recording_ms(each: served.Request | served.ServedStep) -> float | None:
    return each.recording_ns / 1e6 if each.is_corrected else None


def _ms(ns: float | None) -> float | None:
    return ns / 1e6 if ns is not None else None
