"""Kinds of steps: of a program that xsp profiled, or prefill and decode of an engine that serves language models."""

from __future__ import annotations

from xsp import account
from xsp.account.kinds import kinds
from xsp.analyses.contract import Table, analysis, values
from xsp.store.trace import Trace

_COLUMNS = {
    "name": "VARCHAR", "iterations": "BIGINT",
    **dict.fromkeys(
        ("iteration_ms", "median_ms", "percent_of_time", "device_percent", "tokens_per_s", "requests",
         "prefill_tokens", "decode_tokens", "low_ms", "high_ms", "device_ms"), "DOUBLE",
    ),
    "rank": "INTEGER", "kind": "INTEGER", "source": "VARCHAR",
}  # fmt: skip


def _reason_without_kinds(trace: Trace) -> str | None:
    """Return why a trace has no kinds of steps, or None if it has some."""
    if any(run.kinds for run in trace.run.rank_runs):
        return None
    return "no kinds of steps are known: xsp finds them in programs that it runs, or an engine annotates them"


@analysis("kinds", "Kinds of steps", unless=_reason_without_kinds)
def kinds_of_steps(trace: Trace) -> Table:
    """Time, device and tokens of each kind of step: training and evaluation, or prefill, decode and mixed steps.

    The kinds of a program that xsp ran are those that it found; those of a trace of vLLM, SGLang, ATOM or TensorRT-LLM
    are from the annotations of its steps. `iteration_ms` is the mean time of an iteration with its 95 % interval, from
    the account; in a trace of several annotated kinds it ends when host and device are done. `percent_of_time` is the
    share of all iterations, `device_ms` the time in which the busiest device works on one. `requests`, `prefill_tokens`
    (of prompts) and `decode_tokens` (that are added) are means of a step; `tokens_per_s` is of both together. They are
    null if an annotation does not state them. `--kind` gives other tables for a kind.
    """
    accounted = account.of(trace)
    rows = [
        (
            each.name, each.iterations, each.time.ms, each.median_ms, 100 * each.share,
            100 * each.busy_ms / each.time.ms if each.busy_ms is not None and each.time.ms else None,
            each.tokens_per_s, each.requests, each.prefill_tokens, each.decode_tokens, each.time.low_ms,
            each.time.high_ms, each.busy_ms, each.rank, each.kind, each.time.source,
        )
        for each in kinds(trace, accounted)
    ]  # fmt: skip
    return values(trace, "kinds_of_steps", _COLUMNS, rows)
