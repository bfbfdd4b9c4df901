"""Rows of the span table for requests that engines served, and for the steps of these engines."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from typing import Any

from xsp.schema import Kind, Level, Span
from xsp.serving import (
    COLLECTOR,
    DECODE,
    IDLE,
    KINDS,
    MIXED,
    PARTS,
    PREFILL,
    Engine,
    EngineStep,
    Part,
    RequestAccount,
)  # fmt: skip


def kind_of(parts: Iterable[Part]) -> str:
    """Return the kind of a step that computes these parts."""
    phases = {part.phase for part in parts}
    return MIXED if len(phases) > 1 else phases.pop() if phases else IDLE


def step_row(engine: Engine, number: int, step: EngineStep, offset_ns: int) -> Span:
    """Return the row of an engine step, without ids.

    Args:
        engine: its engine.
        number: its number among the steps of the engine.
        step: the step.
        offset_ns: nanoseconds from the monotonic clock to the epoch.
    """
    kind, parts = kind_of(step.parts), step.parts
    attributes: dict[str, Any] = {
        "step_kind": KINDS.index(kind),
        "prefill_tokens": sum(part.tokens for part in parts if part.phase == PREFILL),
        "decode_tokens": sum(part.tokens for part in parts if part.phase == DECODE),
        "xsp.serving.engine": engine.name,
        "xsp.serving.number": number,
        "xsp.serving.parts": json.dumps([[text_of(part.request), *part[1:]] for part in parts]),
    }
    if step.compiling_ns:
        attributes["xsp.serving.compiling_ns"] = step.compiling_ns
    if isinstance(step.computed, int):
        attributes["xsp.serving.computed_tokens"] = step.computed
    return Span(
        level=Level.MODEL,
        kind=Kind.STEP.value,
        name=kind,
        start_ns=step.start_ns + offset_ns,
        dur_ns=step.end_ns - step.start_ns,
        thread=step.thread,
        status=step.status,
        batch_size=len(parts),
        collector=COLLECTOR,
        attributes=json.dumps(attributes),
    )


def request_row(engine: Engine, account: RequestAccount, offset_ns: int) -> Span:
    """Return the row of a request that has ended, without ids; arguments as for `step_row`."""
    since_ns = account.arrival_ns
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.request.model": engine.model_name,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.output_tokens,
        "xsp.serving.engine": engine.name,
        "xsp.serving.request": text_of(account.request),
        "xsp.serving.steps": account.steps,
        "xsp.serving.arrival_stated": account.has_arrival,
        **{f"xsp.serving.{name}_ns": ns for name, ns in zip(PARTS, account.parts, strict=True)},
    }
    if account.first_token_ns is not None and account.first_parts is not None:
        attributes["xsp.serving.first_token_ns"] = account.first_token_ns - since_ns
        attributes["xsp.serving.last_token_ns"] = (account.last_token_ns or 0) - since_ns
        attributes |= {
            f"xsp.serving.first_token.{name}_ns": ns for name, ns in zip(PARTS, account.first_parts, strict=True)
        }
    if account.largest_prefill is not None:
        attributes["xsp.serving.largest_prefill"] = text_of(account.largest_prefill[0])
        attributes["xsp.serving.largest_prefill_ns"] = account.largest_prefill[1]
    return Span(
        level=Level.APPLICATION,
        kind=Kind.REQUEST.value,
        name=f"{OPERATION} {engine.model_name}",
        start_ns=since_ns + offset_ns,
        dur_ns=account.latency_ns,
        status=account.status,
        collector=COLLECTOR,
        attributes=json.dumps(attributes),
    )


OPERATION = "text_completion"
"""`gen_ai.operation.name` of requests."""

MOST_NAME_CHARACTERS = 200


def text_of(request: Hashable) -> str:
    """Return the id of a request as text."""
    return str(request)[:MOST_NAME_CHARACTERS]
