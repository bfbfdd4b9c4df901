"""Language models that generate without a cache: each token is computed with the whole text before it, again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import Advice, Asked, Interval, Place
from xsp.advise.registry import question
from xsp.schema import Kind, Level

LEAST_CALLS = 6
"""Recorded calls from which on lengths tell that a text grows."""

LEAST_SHARE = 0.8
"""Of neighbouring recorded calls whose lengths grow by a token a call. The others begin another text."""

LEAST_TOKENS = 8
"""Mean length from which on the text before a token is worth keeping."""


@dataclass(frozen=True)
class _Call:
    """A call of a model with tokens."""

    step: int
    length: int


@question("prefix", "Is a text computed again for each of its tokens?", number="Q4")
def prefix(asked: Asked) -> Iterator[Advice]:
    """A model of tokens that is called with one token more each time, in one step or from step to step.

    With the keys and values of the tokens before kept, a call computes one token. It still reads all weights, so the
    gain is at most all but the share of one token.
    """
    whole = calls.step_ms(asked)
    embeds = any(each.name == "aten::embedding" for each in calls.every(asked))
    for each in calls.every(asked):
        if each.kind != Kind.FORWARD or each.key is None or not embeds:
            continue
        found = _calls_of(asked, each.name)
        if not _grows(found):
            continue
        mean = sum(call.length for call in found) / len(found)
        gain = min(whole, each.ns / 1e6) * (1 - 1 / mean)
        if mean < LEAST_TOKENS or gain < calls.LEAST_MS:
            continue
        lengths = [call.length for call in found]
        yield Advice(
            "prefix",
            f"{each.name} computes the whole text again for each token",
            (Place(each.name, None, (each.span_id,), 1),),
            Interval(gain, gain, gain),
            True,
            100 * gain / whole,
            (
                f"{len(found):,} recorded calls with {min(lengths):,} to {max(lengths):,} tokens, one more each call",
                f"a call computes {mean:,.0f} tokens on average, of which one is new",
            ),
            "keep keys and values of the tokens before: generate(use_cache=True), or hand past_key_values of the last "
            "output to the next call with the new token alone",
        )
        return


def _calls_of(asked: Asked, name: str) -> list[_Call]:
    """Return the recorded calls of a model with one tensor of tokens, batch × length, in order."""
    rows = asked.traced.con.execute(
        f"""
        SELECT step, input_shapes FROM spans
        WHERE kind = '{Kind.FORWARD}' AND level = {int(Level.MODEL)} AND name = ? AND step IS NOT NULL
        AND rank IS NOT DISTINCT FROM (SELECT min(rank) FROM spans) ORDER BY step, start_ns
        """,
        [name],
    ).fetchall()
    found = []
    for step, shapes in rows:
        try:
            first = json.loads(shapes or "[]")[:1]
        except ValueError:
            continue
        if first and isinstance(first[0], list) and len(first[0]) == 2 and isinstance(first[0][1], int):
            found.append(_Call(int(step), first[0][1]))
    return found


def _grows(found: Sequence[_Call]) -> bool:
    """Return whether neighbouring calls differ by a token each: within a step, else by one for each step between."""
    if len(found) < LEAST_CALLS:
        return False
    by_step: dict[int, list[int]] = defaultdict(list)
    for call in found:
        by_step[call.step].append(call.length)
    if any(len(each) > 1 for each in by_step.values()):
        pairs = [(1, b - a) for each in by_step.values() for a, b in pairwise(each)]
    else:
        steps = sorted(by_step.items())
        pairs = [(b - a, other[0] - one[0]) for (a, one), (b, other) in pairwise(steps)]
    return sum(between == more for between, more in pairs) >= max(LEAST_CALLS - 1, LEAST_SHARE * len(pairs))
