"""Requests of vLLM and SGLang: their OpenTelemetry spans, joined with the steps that their profiler's trace has.

Both engines send a span per request with OpenTelemetry's attributes and times of their own (`gen_ai.latency.*`, in
seconds; `--otlp-traces-endpoint`), and annotate each step with its kind and its tokens (`xsp.importers.serving`). What
they do not state is which requests a step served. That follows from time, and is inferred:

- The first token came from the last step that read prompts and had ended by then.
- The prompt was read in this step, and in as many before it as its tokens need, none before the engine took the request
  in: the time to the first token less that in the model's prefill.
- Each step that decodes and ends between the first and the last token added a token to it, at most as many as it got.

The tokens of a step that no known request has belong to others, since engines may send only a sample of requests. From
there on accounts are made as those of a program that states its steps (`xsp.serving`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from xsp import rundir, table
from xsp.errors import TraceError
from xsp.importers.contract import Row
from xsp.importers.serving import KINDS
from xsp.run import Run
from xsp.schema import Kind, Level, Span
from xsp.serving import DECODE, PREFILL, Engine, EngineStep, Part, RequestAccount, Requests
from xsp.store.requestrows import request_row, step_row
from xsp.store.write import StepWriter
from xsp.texts import ns_text

LATENCY = "gen_ai.latency."
"""Prefix of the times that both engines state of a request, in seconds."""

OTHERS = {PREFILL: "(others' prompts)", DECODE: "(others' tokens)"}
"""Ids of requests without a span, by the phase of their tokens."""

SLACK_NS = 100_000
"""By how much the clock of the process that sends spans may differ from that of the steps."""

MOST_S = 1e9
"""Limit on a stated time: a request of more seconds is none."""

SOURCE = "requests"
"""Source of the notes of this module."""


class RequestSpan(NamedTuple):
    """A request as its span states it; times in nanoseconds since the epoch."""

    span: Span
    request: str
    model: str
    arrival_ns: int
    taken_in_ns: int
    """When the engine took it in at the earliest: its arrival, if the span does not say."""

    first_token_ns: int
    last_token_ns: int
    end_ns: int
    prompt_tokens: int
    output_tokens: int


class AnnotatedStep(NamedTuple):
    """A step of an engine as it was annotated; times in nanoseconds since the epoch."""

    start_ns: int
    end_ns: int
    """When its work on the host and on devices had ended."""

    kind: str
    prefill_tokens: int | None
    decode_tokens: int | None


def spans_of_requests(rows: Iterable[Row]) -> list[RequestSpan]:
    """Return the requests among imported spans, by arrival."""
    found = [request for row in rows if (request := _request_of(row.span)) is not None]
    return sorted(found, key=lambda each: (each.arrival_ns, each.request))


def _request_of(span: Span) -> RequestSpan | None:
    """Return the request of a span; None of another span, or of a request without tokens."""
    if LATENCY not in (span.attributes or ""):
        return None
    values = json.loads(span.attributes or "{}")
    first_s = _seconds(values, "time_to_first_token")
    if first_s is None:
        return None
    first_ns = span.start_ns + first_s
    end_s, decode_s = _seconds(values, "e2e"), _seconds(values, "time_in_model_decode")
    prefill_s = _seconds(values, "time_in_model_prefill")
    end_ns = span.start_ns + end_s if end_s is not None else span.start_ns + span.dur_ns
    return RequestSpan(
        span, str(values.get("gen_ai.request.id") or span.span_id),
        str(values.get("gen_ai.response.model") or values.get("service.name") or "engine"), span.start_ns,
        max(span.start_ns, first_ns - prefill_s) if prefill_s is not None else span.start_ns, first_ns,
        first_ns + decode_s if decode_s is not None else end_ns, max(end_ns, first_ns),
        _count(values, "input_tokens", "prompt_tokens"), _count(values, "output_tokens", "completion_tokens"),
    )  # fmt: skip


def _seconds(values: Mapping[str, Any], name: str) -> int | None:
    """Return a stated time in nanoseconds; None if it is not stated, or no time."""
    value = values.get(f"{LATENCY}{name}")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MOST_S:
        return round(value * 1e9)
    return None


def _count(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = values.get(f"gen_ai.usage.{name}")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


# --- which steps served which requests --------------------------------------------------------------------------------


def parts_of_steps(
    steps: Sequence[AnnotatedStep], requests: Sequence[RequestSpan]
) -> tuple[list[list[Part]], list[RequestSpan]]:
    """Return what each step computed for each request, and for others; and the requests of which a step is known.

    Args:
        steps: the steps of an engine, by start; each ends after the one before.
        requests: its requests.
    """
    ends = [step.end_ns for step in steps]
    parts: list[list[Part]] = [[] for _ in steps]
    served = []
    for each in requests:
        prompt = _prompt_steps(steps, ends, each)
        if not prompt:
            continue
        served.append(each)
        left = max(each.prompt_tokens, 1)
        for place in prompt:
            free = _free(steps[place].prefill_tokens, parts[place], PREFILL)
            tokens = max(1, min(left, free))
            left = max(1, left - tokens)
            parts[place].append(Part(each.request, PREFILL, tokens, int(place == prompt[-1])))
        added = 1
        for place in range(prompt[-1] + 1, bisect_right(ends, each.last_token_ns + SLACK_NS)):
            if steps[place].kind in (DECODE, "mixed") and added < max(each.output_tokens, 1):
                parts[place].append(Part(each.request, DECODE, 1))
                added += 1
    for step, own in zip(steps, parts, strict=True):
        for phase, stated in ((PREFILL, step.prefill_tokens), (DECODE, step.decode_tokens)):
            if stated is not None and (others := _free(stated, own, phase)) > 0:
                own.append(Part(OTHERS[phase], phase, others, 0))
    return parts, served


def _free(tokens: int | None, own: Sequence[Part], phase: str) -> int:
    """Return the tokens of a step that no request has yet; many if the step does not state them."""
    return (1 << 40 if tokens is None else tokens) - sum(part.tokens for part in own if part.phase == phase)


def _prompt_steps(steps: Sequence[AnnotatedStep], ends: Sequence[int], each: RequestSpan) -> list[int]:
    """Return the places of the steps that read the prompt of a request; empty if none is known."""
    place, found, tokens = bisect_right(ends, each.first_token_ns + SLACK_NS) - 1, list[int](), 0
    while place >= 0 and ends[place] > each.taken_in_ns:
        step = steps[place]
        is_early = step.start_ns < each.taken_in_ns - SLACK_NS
        if step.kind in (PREFILL, "mixed") and not (found and is_early):
            found.append(place)
            tokens += _free(step.prefill_tokens, (), PREFILL)
            if tokens >= each.prompt_tokens:
                break
        place -= 1
    return found[::-1]


def accounts(
    steps: Sequence[AnnotatedStep], requests: Sequence[RequestSpan], notes: list[str]
) -> tuple[list[EngineStep], list[RequestAccount]]:
    """Return the steps with what they computed for each request, and the accounts of the requests.

    Args:
        steps, requests: as for `parts_of_steps`.
        notes: gets sentences on what does not fit.
    """
    known = list(_told_apart(requests, notes))
    parts, served = parts_of_steps(steps, known)
    ran = [
        EngineStep(step.start_ns, step.end_ns, own, thread=None) for step, own in zip(steps, parts, strict=True)
    ]  # fmt: skip
    if left_out := len(known) - len(served):
        notes.append(
            f"{left_out:,} of {len(known):,} requests were left out: no step that read their prompts is in the trace"
        )
    taken = Requests(notes.append)
    statements: list[tuple[int, int, RequestSpan | EngineStep]] = [
        *((each.arrival_ns, 0, each) for each in served),
        *((each.end_ns, 2, each) for each in served),
        *((step.end_ns, 1, step) for step in ran),
    ]
    found: list[RequestAccount] = []
    for at_ns, order, what in sorted(statements, key=lambda statement: statement[:2]):
        if isinstance(what, EngineStep):
            found += taken.step(what)
        elif order == 0:
            found += taken.arrive(what.request, at_ns, what.prompt_tokens or None, context=what)
        else:
            taken.finish(what.request, at_ns, what.span.status)
            found += taken.settle()
    return ran, [
        account._replace(output_tokens=account.context.output_tokens or account.output_tokens)
        for account in found + taken.settle()
        if account.context is not None
    ]


def _told_apart(requests: Iterable[RequestSpan], notes: list[str]) -> Iterator[RequestSpan]:
    """Yield requests with ids that differ at any time: texts for one prompt (`n`) have the id of their request."""
    until: dict[str, int] = {}
    for each in requests:
        name, number = each.request, 1
        while each.arrival_ns < until.get(name, 0):
            number += 1
            name = f"{each.request} ({number})"
        if number == 2:
            notes.append(f"several requests had the id {each.request!r} at the same time, and are numbered")
        until[name] = each.end_ns
        yield each._replace(request=name)


# --- in run directories -----------------------------------------------------------------------------------------------


def join(runs: Mapping[Path, Run], requests: Sequence[RequestSpan], losses: Sequence[str] = ()) -> dict[Path, Run]:
    """Store the requests in the runs in which steps that served them are annotated, and return the runs with notes.

    Of the ranks of a job, which run the same steps, the first one gets them.

    Args:
        runs: the runs of the traces, by directory.
        requests: the requests, at least one.
        losses: sentences on spans that could not be read.

    Raises:
        TraceError: no step is annotated, or none served one of these requests.
    """
    joined, reasons = {}, []
    for folder, run in runs.items():
        own = next(iter(rundir.rank_parts(folder)), folder)
        steps, notes = list(_annotated(own)), list(losses)
        ran, found = accounts(steps, requests, notes) if steps else ([], [])
        if found:
            _store(own, ran, found, run.rank or 0)
            notes.append(
                f"{len(found):,} requests are from spans; which steps served them is inferred from time and tokens"
            )
            run = run.with_notes(SOURCE, notes)
            rundir.write_run(folder, rundir.read_run(folder).with_notes(SOURCE, notes))
        else:
            reasons.append(f"{run.name}: {_misfit(steps, requests)}")
        joined[folder] = run
    if len(reasons) == len(runs):
        raise TraceError(f"no step of the trace served one of the {len(requests):,} requests: {'; '.join(reasons)}")
    return joined


def _misfit(steps: Sequence[AnnotatedStep], requests: Sequence[RequestSpan]) -> str:
    """Return why steps and requests do not belong together."""
    if not steps:
        return "the engine annotated no step (vLLM and SGLang do in traces of their profiler)"
    first_ns, last_ns = steps[0].start_ns, steps[-1].end_ns
    came_ns, ended_ns = requests[0].arrival_ns, max(each.end_ns for each in requests)
    if ended_ns < first_ns:
        return f"the last request ended {ns_text(first_ns - ended_ns)} before the first step"
    if came_ns > last_ns:
        return f"the first request came {ns_text(came_ns - last_ns)} after the last step"
    return "none of them got its first token in the time of the trace"


def _annotated(folder: Path) -> Iterator[AnnotatedStep]:
    """Yield the annotated steps of a run by start; those that overlap begin when the one before has ended."""
    con = table.connect()
    try:
        con.execute(f"CREATE VIEW spans AS FROM {table.parquet(rundir.segments(folder))}")
        rows = con.execute(
            f"""
            SELECT start_ns, greatest(start_ns + dur_ns, coalesce(device_end_ns, 0)), attributes
            FROM spans LEFT JOIN (
                SELECT step, max(start_ns + dur_ns) AS device_end_ns FROM spans
                WHERE device IS NOT NULL AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}') GROUP BY step
            ) USING (step)
            WHERE kind = '{Kind.STEP}' AND level = {int(Level.MODEL)} AND json_valid(attributes)
                AND json_exists(attributes, '$.step_kind') ORDER BY start_ns
            """
        ).fetchall()
    finally:
        con.close()
    ends = accumulate((end_ns for _, end_ns, _ in rows), max)
    before_ns = 0
    for (start_ns, _, text), end_ns in zip(rows, ends, strict=True):
        values = json.loads(text)
        number = values["step_kind"]
        kind = KINDS[number] if number < len(KINDS) else ""
        yield AnnotatedStep(
            max(start_ns, before_ns), end_ns, kind, values.get("prefill_tokens"), values.get("decode_tokens")
        )
        before_ns = end_ns


def _store(folder: Path, ran: Sequence[EngineStep], found: Sequence[RequestAccount], rank: int) -> None:
    name = found[0].context.model
    engine = Engine(name)
    common = {"rank": rank, "trace_id": found[0].context.span.trace_id}
    rows = [
        step_row(engine, number, step, 0)._replace(span_id=f"{number + 1:016x}", **common)
        for number, step in enumerate(ran)
    ]  # fmt: skip
    for account in found:
        span = account.context.span
        row = request_row(Engine(name, model_name=account.context.model), account, 0)
        rows.append(row._replace(trace_id=span.trace_id, span_id=span.span_id, parent_id=span.parent_id, rank=rank))
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    level = Span._fields.index("level")
    columns[level] = list(map(int, columns[level]))
    StepWriter(folder).add_requests(columns)
