"""Figures of each kind of step: time, device, and tokens where an engine that serves language models stated them."""

from __future__ import annotations

from typing import NamedTuple

from xsp import stats
from xsp.account import entries as names
from xsp.account.entries import Account, Entry
from xsp.account.windows import windows
from xsp.schema import Kind
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.texts import ms_text, number, shortened


class KindFigures(NamedTuple):
    """A kind of step on a rank; times in milliseconds, None for what is unknown."""

    rank: int
    kind: int | None
    name: str
    iterations: int
    share: float
    """Share of the time of all kinds."""

    time: Entry
    """Time of an iteration, a mean with its interval."""

    median_ms: float | None
    busy_ms: float | None
    """Time in which the busiest device works, of an iteration."""

    requests: float | None
    """Mean number of requests in a step."""

    prefill_tokens: float | None
    """Mean number of tokens of prompts in a step."""

    decode_tokens: float | None
    """Mean number of tokens that a step adds to requests."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of both sorts a second, in steps of this kind."""
        if None in (self.prefill_tokens, self.decode_tokens) or not self.time.ms:
            return None
        return ((self.prefill_tokens or 0.0) + (self.decode_tokens or 0.0)) / self.time.ms * 1e3


def kinds(trace: Trace, account: Account) -> list[KindFigures]:
    """Return the figures of each kind of step on each rank; those of a rank by time, the largest share first."""
    tokens = _tokens(trace)
    found = []
    for each in account.iterations:
        busy_ms = each.device.ms(names.BUSY) if each.device is not None else None
        found.append(
            KindFigures(
                each.rank, each.kind, each.name, each.count, each.share, each.time,
                _median_ms(trace, each.rank, each.kind), busy_ms, *tokens.get((each.rank, each.kind), (None,) * 3),
            )
        )  # fmt: skip
    return sorted(found, key=lambda figures: (figures.rank, -figures.share))


def _median_ms(trace: Trace, rank: int, kind: int | None) -> float | None:
    """Return the median time of an iteration: of those that were not recorded, else of recorded ones."""
    rows = trace.con.execute(
        f"SELECT dur_ns + coalesce(before_ns, 0), steps FROM loop WHERE rank = ? AND kind IS NOT DISTINCT FROM ? "
        f"AND rung = {BARE} AND status = 'ok'",
        [rank, kind],
    ).fetchall()
    if not rows and not trace.has_loop:
        own = [window for window in windows(trace, kind) if window.rank == rank]
        rows = [(window.end_ns - window.start_ns, 1) for window in own]
    times, weights = [ns for ns, _ in rows], [count for _, count in rows]
    return stats.percentile(times, 0.5, weights) / 1e6 if rows else None


def _tokens(trace: Trace) -> dict[tuple[int, int | None], tuple[float | None, float | None, float | None]]:
    """Return the mean requests, tokens of prompts and added tokens of a step by rank and kind; None if one lacks it."""

    def mean(value: str) -> str:
        return f"CASE WHEN count({value}) = count(*) THEN avg({value}) END"

    attributes = [f"TRY_CAST(attributes ->> '$.{name}' AS BIGINT)" for name in ("prefill_tokens", "decode_tokens")]
    rows = trace.con.execute(
        f"""
        SELECT rank, TRY_CAST(attributes ->> '$.step_kind' AS INTEGER) AS step_kind, {mean("batch_size")},
               {", ".join(map(mean, attributes))}
        FROM (SELECT rank, batch_size, CASE WHEN json_valid(attributes) THEN attributes END AS attributes FROM spans
              WHERE kind = '{Kind.STEP}' AND timed IS NOT false)
        WHERE step_kind IS NOT NULL GROUP BY rank, step_kind
        """
    ).fetchall()
    return {(rank, kind): (requests, prefill, decode) for rank, kind, requests, prefill, decode in rows}


def sentence(trace: Trace, account: Account) -> str:
    """Return a sentence on each kind of step of the rank that stands for the program.

    It is empty if none has a name. Of a run it is on those that train as the main one does, as another sentence is on
    steps that train nothing, and empty if the main one takes nearly all of the time.
    """
    main = account.job
    if main is None:
        return ""
    named = [each for each in account.iterations if each.rank == main.rank and each.name and not each.is_beginning]
    if trace.run.imported is None:
        named = [each for each in named if each.trains == main.trains]
        if len(named) < 2 or max(each.share for each in named) > 1 - MIN_OTHERS_SHARE:
            return ""
    if not named:
        return ""
    own = [each for each in kinds(trace, account) if any((each.rank, each.kind) == (of.rank, of.kind) for of in named)]
    more = f"; and {len(own) - MOST_KINDS} more" if len(own) > MOST_KINDS else ""
    return f"By kind of step: {'; '.join(map(_in_words, own[:MOST_KINDS]))}{more}."


MOST_KINDS = 4

MIN_OTHERS_SHARE = 0.1
"""Least share of a run's time in other kinds of steps than the one with most for all to be named."""

MAX_NAME = 40
"""Most characters of the name of a kind."""


def _in_words(each: KindFigures) -> str:
    name = shortened(each.name, MAX_NAME)
    if each.time.ms is None:
        return f"{name}: {each.iterations:,} steps of unknown time"
    details = [f"{100 * each.share:.0f} % of the time"]
    if each.busy_ms is not None:
        details.append(f"device {100 * each.busy_ms / each.time.ms:.0f} %")
    if each.tokens_per_s:
        details.append(f"{number(each.tokens_per_s)} tokens/s")
    return f"{name}: {each.iterations:,} × {ms_text(each.time.ms)} ({', '.join(details)})"
