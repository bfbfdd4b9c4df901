"""Language models: padding, text computed again for each token, scores that are not read, requests that wait."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xsp.account import served, serving
from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere, Place
from xsp.advise.registry import question
from xsp.schema import PADDING, Kind, Level
from xsp.stats import Interval

LEAST_CALLS = 6
"""Minimum number of recorded calls to conclude from their lengths that a text grows."""

LEAST_SHARE = 0.8
"""Minimum share of pairs of consecutive recorded calls whose length grows by one token per call. The other pairs start
a new text."""

LEAST_TOKENS = 8
"""Minimum mean length for which caching the text before a token is worth it."""


@dataclass(frozen=True)
class _Call:
    """A call of a model with tokens, in a step."""

    step: int
    length: int


@question("prefix", "Is the whole text computed again for each token?", number="Q4")
def prefix(context: AdviceContext) -> Iterator[Advice]:
    """A language model that is called with one more token each time, in one step or from step to step.

    If the keys and values of the earlier tokens are cached, a call computes one token. It still reads all weights, so
    the gain is at most all of the time except the share of one token.
    """
    step_ms = calls.step_ms(context)
    has_embedding = any(call.name == "aten::embedding" for call in calls.walk(context))
    for model in calls.walk(context):
        if model.kind != Kind.FORWARD or model.key is None or not has_embedding:
            continue
        token_calls = _calls_of(context, model.name)
        if not _grows(token_calls):
            continue
        mean_length = sum(call.length for call in token_calls) / len(token_calls)
        gain = min(step_ms, model.ns / 1e6) * (1 - 1 / mean_length)
        if mean_length < LEAST_TOKENS or gain < calls.LEAST_MS:
            continue
        lengths = [call.length for call in token_calls]
        yield Advice(
            "prefix",
            f"{model.name} computes the whole text again for each token",
            (Place(model.name, None, (model.span_id,), 1),),
            Interval(gain, gain, gain),
            True,
            100 * gain / step_ms,
            (
                f"{len(token_calls):,} recorded calls with {min(lengths):,} to {max(lengths):,} tokens, "
                "one more per call",
                f"a call computes {mean_length:,.0f} tokens on average, only one of which is new",
            ),
            "keep keys and values of earlier tokens: generate(use_cache=True), or pass the cache of the last "
            "output (cache, or past_key_values) to the next call with only the new token",
        )
        return


def _calls_of(context: AdviceContext, name: str) -> list[_Call]:
    """Return the recorded calls of a model whose first input is a tensor of tokens, batch × length, in order."""
    rows = context.required_trace.con.execute(
        f"""
        SELECT step, input_shapes FROM spans
        WHERE kind = '{Kind.FORWARD}' AND level = {int(Level.MODEL)} AND name = ? AND step IS NOT NULL
        AND rank IS NOT DISTINCT FROM (SELECT min(rank) FROM spans) ORDER BY step, start_ns
        """,
        [name],
    ).fetchall()
    token_calls = []
    for step, shapes in rows:
        try:
            first_input = json.loads(shapes or "[]")[:1]
        except ValueError:
            continue
        if (
            first_input
            and isinstance(first_input[0], list)
            and len(first_input[0]) == 2
            and isinstance(first_input[0][1], int)
        ):
            token_calls.append(_Call(int(step), first_input[0][1]))
    return token_calls


def _grows(token_calls: Sequence[_Call]) -> bool:
    """Return whether consecutive calls grow by one token per call within a step, else by one token per step."""
    if len(token_calls) < LEAST_CALLS:
        return False
    by_step: dict[int, list[int]] = defaultdict(list)
    for call in token_calls:
        by_step[call.step].append(call.length)
    if any(len(lengths) > 1 for lengths in by_step.values()):
        pairs = [(1, b - a) for lengths in by_step.values() for a, b in pairwise(lengths)]
    else:
        steps = sorted(by_step.items())
        pairs = [(b - a, second[0] - first[0]) for (a, first), (b, second) in pairwise(steps)]
    return sum(gap == growth for gap, growth in pairs) >= max(LEAST_CALLS - 1, LEAST_SHARE * len(pairs))


LEAST_UNUSED = 0.1
"""Minimum share of columns that no row uses for which shorter batches are worth it."""


@question("padding", "Are batches padded to more than their longest row?", number="Q4", shapes=True)
def padding(context: AdviceContext) -> Iterator[Advice]:
    """Batches of tokens whose last, or first, columns no row uses, because they are padded to a fixed length.

    What a model computes for each token takes in proportion to the columns, what it computes for each pair of tokens
    (attention) to their square. All of the model's time is taken for such, so the gain is an upper bound.
    """
    step_ms = calls.step_ms(context)
    for model in calls.walk(context):
        found = _paddings(context, model.name) if model.kind == Kind.FORWARD and model.level == Level.MODEL else []
        rows, columns, used, tokens = (sum(values) for values in zip(*found, strict=True)) if found else (0, 0, 0, 0)
        if used >= (1 - LEAST_UNUSED) * columns:
            continue
        share, everything = used / columns, calls.with_gradients(context, [model])
        pairs_ns = sum(op.ns for call in everything for op in call.walk() if op.is_outer_op and _is_of_pairs(op))
        model_ms = sum(call.ns for call in everything) / 1e6
        gain = min(step_ms, model_ms * (1 - share) + pairs_ns / 1e6 * (share - share**2))
        if gain < calls.LEAST_MS:
            continue
        length, longest = columns / len(found), used / len(found)
        yield Advice(
            "padding",
            f"{model.name} computes batches of {length:,.0f} columns of tokens; their longest rows use {longest:,.0f}",
            calls.places([model]),
            calls.interval(gain, calls.interval_factors(context, [model])).limit(step_ms),
            True,
            100 * gain / step_ms,
            (
                f"the value that pads is all that {columns - used:,} of {columns:,} columns hold in "
                f"{len(found):,} recorded calls; rows have {tokens / max(1, rows):,.0f} tokens on average",
                f"the model{calls.gradients_text([model], everything)} takes {model_ms:.3g} ms",
            ),
            "pad each batch to its longest row only: tokenizer(padding='longest'), DataCollatorWithPadding; batches of "
            "rows of similar length (group_by_length=True) have less padding yet",
        )


def _paddings(context: AdviceContext, name: str) -> list[tuple[int, int, int, int]]:
    """Return rows, columns, used columns and tokens of the recorded calls of a model that have `xsp.schema.PADDING`."""
    found = context.required_trace.con.execute(
        f"SELECT attributes FROM spans WHERE kind = '{Kind.FORWARD}' AND name = ? AND contains(attributes, ?)",
        [name, f'"{PADDING}"'],
    ).fetchall()
    values = [json.loads(attributes).get(PADDING) for (attributes,) in found]
    return [
        (each[0], each[1], each[2], each[3])
        for each in values
        if isinstance(each, list) and len(each) == 4 and all(type(number) is int and number >= 0 for number in each)
    ]


def _is_of_pairs(op: calls.HostCall) -> bool:
    """Return whether an operator computes something for each pair of tokens: attention, or an input of such scores."""
    shapes = [shape for index in range(len(op.shapes)) if (shape := op.shape(index)) is not None]
    return "attention" in op.name or any(len(shape) >= 3 and shape[-1] == shape[-2] for shape in shapes)


LEAST_SCORES = 1_000
"""Minimum number of outputs for a layer's outputs to be taken as scores of a vocabulary."""

SLICES = ("aten::slice", "aten::select")


@question("last-scores", "Are scores computed for tokens that are not read?", number="Q4", shapes=True)
def last_scores(context: AdviceContext) -> Iterator[Advice]:
    """The last layer of a language model, applied to all tokens where the program reads only the scores of one.

    Shapes identify it: the result of the layer, batch × tokens × vocabulary, is only sliced.
    """
    step_ms = calls.step_ms(context)
    outer_ops = calls.outer_ops(context)
    for layer in (op for op in outer_ops if op.name == "aten::linear"):
        weight = layer.shapes[1] if len(layer.shapes) > 1 else None
        if layer.first_shape is None or len(layer.first_shape) != 3 or not isinstance(weight, list) or not weight:
            continue
        scores = (*layer.first_shape[:2], weight[0])
        readers = [op for op in outer_ops if op.start_ns >= layer.end_ns and op.first_shape == scores]
        gain = layer.ns / 1e6 * (1 - 1 / scores[1])
        has_select = any(op.name == "aten::select" for op in readers)
        is_scores = isinstance(weight[0], int) and weight[0] >= LEAST_SCORES
        if not is_scores or not has_select or any(op.name not in SLICES for op in readers) or gain < calls.LEAST_MS:
            continue
        yield Advice(
            "last-scores",
            f"scores of {scores[2]:,} words are computed for {scores[1]:,} tokens per text; only those of one are read",
            calls.places([layer]),
            calls.interval(gain, calls.interval_factors(context, [layer])).limit(step_ms),
            True,
            100 * gain / step_ms,
            (f"the last layer takes {layer.ns / 1e6:.3g} ms for all tokens; its result is only sliced",),
            "apply the last layer to hidden[:, -1]; in transformers: logits_to_keep=1",
        )


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
