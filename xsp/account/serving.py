"""What would shorten the latencies of requests that an engine served, by what its steps did meanwhile.

Each flaw has an upper bound: the mean time of a request that is gone if the flaw is, and nothing else changes. Times of
a request are cut as in `xsp.serving`, and cut further by what the engine's other steps were:

- **Stalled by prompts**: a step in which the request decodes, and that also reads prompts, lasts longer than a step
  that only decodes; or steps that only read prompts of others run between two steps of the request; or most of the step
  in which its own prompt is read is one long prompt.
- **Left out**: other steps run between two steps of the request, because the cache was full. What is read again after
  that is part of it.
- **Handed over late**: steps run after the last one of the request, and before its end.
- **Padding**: the model is called with more tokens than the step has: as stated, else by shapes of recorded calls.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from xsp.account.requests import reasons
from xsp.account.served import LEAST_STEPS, Request, Served, ServedStep, requests, steps, with_steps
from xsp.schema import Kind, Level
from xsp.serving import DECODE, PREFILL
from xsp.store.trace import Trace
from xsp.texts import ms_text, ns_text


class Flaw(NamedTuple):
    """What makes requests wait, longer than they need to."""

    name: str
    mean_ns: float
    """At most so much of the mean latency, in nanoseconds, would be gone without it."""

    share: float
    """The same as a share of all latencies."""

    what: str
    do: str
    why: tuple[str, ...]


LEAST_SHARES = {
    "queue": 0.2, "stalled": 0.15, "left out": 0.05, "late": 0.1, "host": 0.1, "compiling": 0.1, "padding": 0.1,
}  # fmt: skip
"""Least share of all latencies for a flaw, by name. What a batch shares in decoding is the purpose of a batch."""

STALL_FACTOR = 3.0
"""Least duration of a step that stalls decoding, in usual decode steps."""

LONG_SHARE = 0.5
"""Least share of a step's tokens of one prompt that makes others wait for their first token."""

FULL_SHARE = 0.5
"""Least share of the time in which requests waited that steps ran, and that these were full: served as many requests as
any step did."""

LEAST_CHUNK = 16
"""Least number of tokens of a step that is advised."""


def flaws(trace: Trace) -> list[Flaw]:
    """Return what would shorten the latencies of requests that ended well, the most certain gain first."""
    return trace.cached("flaws of serving", lambda: _flaws(trace))


def _flaws(trace: Trace) -> list[Flaw]:
    served = [each for each in with_steps(trace) if each.request.status == "ok"]
    total_ns = sum(each.request.latency_ns for each in served)
    if not total_ns:
        return []
    found = [_queue(trace, served), *_stalled_and_left_out(served), _late(served), _host(served),
             _compiling(served), _padding(trace, served)]  # fmt: skip
    flawed = []
    for flaw in found:
        if flaw is not None:
            share = flaw.mean_ns * len(served) / total_ns
            if share >= LEAST_SHARES[flaw.name]:
                flawed.append(flaw._replace(share=share))
    return sorted(flawed, key=lambda flaw: -flaw.share / LEAST_SHARES[flaw.name])


def _mean(values: Sequence[float], served: Sequence[Served]) -> float:
    return sum(values) / len(served)


class Stretch(NamedTuple):
    """A part of a request's life: its queue, steps in a row that compute for it, or none."""

    name: str
    """`queue`, `prefill`, `decode`, `left out` (other steps ran), or `waiting` (none ran that served it)."""

    start_ns: int
    end_ns: int
    steps: int
    tokens: int


def lives(trace: Trace, most: int) -> list[tuple[Request, list[Stretch]]]:
    """Return the requests with the longest latencies, by arrival, and what happened to each, without gaps."""
    longest = sorted(with_steps(trace), key=lambda each: -each.request.latency_ns)[:most]
    return [(each.request, _life(each)) for each in sorted(longest, key=lambda each: each.request.start_ns)]


def _life(served: Served) -> list[Stretch]:
    request, ran, mine, parts = served
    at, end_ns, found = request.start_ns, request.end_ns, list[Stretch]()
    for order, place in enumerate(mine):
        step = ran[place]
        start, end = max(at, step.start_ns), min(max(at, step.end_ns), end_ns)
        follows = order > 0 and place == mine[order - 1] + 1
        _, phase, tokens, _ = parts[order]
        last = found[-1] if found else None
        if last is not None and follows and last.name == phase:
            found[-1] = last._replace(end_ns=end, steps=last.steps + 1, tokens=last.tokens + tokens)
        else:
            if start > at:
                found.append(Stretch("queue" if not order else "waiting" if follows else "left out", at, start, 0, 0))
            found.append(Stretch(phase, start, end, 1, tokens))
        at = end
    if end_ns > at:
        found.append(Stretch("waiting" if mine else "queue", at, end_ns, 0, 0))
    return found


# --- prompts of others, and a full cache ------------------------------------------------------------------------------


def _stalled_and_left_out(served: Sequence[Served]) -> Iterator[Flaw | None]:
    """Yield the flaw of decoding that prompts of others stall, and that of requests that were left out."""
    usual = _usual_decode_ns(served)
    stalls: list[tuple[float, int]] = []  # of a request in a step: how much longer, and tokens of prompts
    outside_ns, read_again_ns, read_again, out = 0.0, 0.0, 0, 0
    for request, ran, mine, parts in served:
        decode_ns = usual.get((request.rank, request.engine))
        has_decoded = False
        for place, following, own in zip(mine, [*mine[1:], None], parts, strict=True):
            step = ran[place]
            if own[1] == PREFILL and has_decoded:
                read_again += own[2]
                read_again_ns += step.dur_ns * own[2] / max(1, step.prefill_tokens + step.decode_tokens)
            elif own[1] == DECODE and decode_ns and step.prefill_tokens and step.dur_ns > STALL_FACTOR * decode_ns:
                stalls.append((step.dur_ns - decode_ns, step.prefill_tokens))
            elif own[1] == PREFILL and decode_ns and step.dur_ns > STALL_FACTOR * decode_ns:
                # The most tokens of a prompt that a step reads for another request.
                longest, tokens = (
                    max(
                        (part[2] for part in step.parts if part[1] == PREFILL and part[0] != request.request), default=0
                    ),
                    step.prefill_tokens + step.decode_tokens,
                )
                if longest > LONG_SHARE * tokens:
                    stalls.append((step.dur_ns * longest / tokens, longest))
            has_decoded |= own[1] == DECODE
            between = ran[place + 1 : following] if following is not None else ()
            if not between:
                continue
            if has_decoded and all(other.kind == PREFILL for other in between):
                stalls += [(other.dur_ns, other.prefill_tokens) for other in between]
            elif has_decoded:
                out += 1
                outside_ns += ran[following or 0].start_ns - step.end_ns - step.after_ns
    yield _stalled(served, stalls, usual)
    if out:
        again = (f"{read_again:,} tokens were read again after that",) if read_again else ()
        do = "give the cache more memory, or serve fewer requests at once: it ran full"
        if not read_again:
            do = f"serve all of them in each step; if the cache was full, {do.partition(':')[0]}"
        yield Flaw(
            "left out", _mean([outside_ns, read_again_ns], served), 0.0,
            "the engine leaves out requests that it has begun to answer",
            do,
            (f"{out:,} times other steps ran between two steps of a request, {ns_text(outside_ns / out)} each", *again),
        )  # fmt: skip


def _usual_decode_ns(served: Sequence[Served]) -> dict[tuple[int, str], float]:
    """Return the median duration of the steps of each engine that only decode."""
    engines = {(each.request.rank, each.request.engine): each.engine for each in served}
    found = {}
    for name, ran in engines.items():
        times = [step.dur_ns for step in ran if step.kind == DECODE]
        if len(times) >= LEAST_STEPS:
            found[name] = statistics.median(times)
    return found


def _stalled(
    served: Sequence[Served], stalls: Sequence[tuple[float, int]], usual: Mapping[tuple[int, str], float]
) -> Flaw | None:
    if not stalls:
        return None
    times, tokens = [ns for ns, _ in stalls], [count for _, count in stalls]
    decode_ns = statistics.median(usual.values()) if usual else 0.0
    do = "read prompts in chunks (a limit on the tokens of a step): those of others stall decoding"
    token_ns = statistics.median(ns / max(1, count) for ns, count in stalls)
    chunk = 1 << max(LEAST_CHUNK, int(decode_ns / token_ns)).bit_length() - 1 if token_ns else 0
    if decode_ns and chunk < max(tokens):
        do += f"; with {chunk:,} tokens of prompts a step takes about twice as long as one that only decodes"
    return Flaw(
        "stalled", _mean(times, served), 0.0,
        "long prompts stall the other requests of their steps",
        do,
        (
            f"{len(stalls):,} times a request waited for a step with prompts of {statistics.median(tokens):,.0f} "
            f"tokens, {ns_text(statistics.median(times))} longer than for one that only decodes"
            f"{f' ({ns_text(decode_ns)})' if decode_ns else ''}; at most {ns_text(max(times))}",
            "the sum of the work stays: times between tokens become even, and long prompts take longer",
        ),
    )  # fmt: skip


# --- the host ---------------------------------------------------------------------------------------------------------


def _late(served: Sequence[Served]) -> Flaw | None:
    """Return the flaw of requests that end only after further steps of their engine."""
    late = []
    for request, ran, mine, _ in served:
        if mine and mine[-1] + 1 < len(ran) and ran[mine[-1] + 1].end_ns <= request.end_ns:
            late.append(request.end_ns - ran[mine[-1]].end_ns)
    if not late:
        return None
    return Flaw(
        "late", _mean(late, served), 0.0,
        "requests end long after their last token, when others of their batch have theirs",
        "end each request with its last token, and take in the next one in the following step (continuous batching)",
        (f"{len(late):,} of {len(served):,} requests, {ns_text(statistics.median(late))} in the median",),
    )  # fmt: skip


def _host(served: Sequence[Served]) -> Flaw | None:
    """Return the flaw of time between steps; what runs beside a step saves at most the shorter one of both."""
    saved_ns, gaps, durations = 0.0, [], []
    for request, ran, mine, _ in served:
        own = []
        for place, following in pairwise(mine):
            if following == place + 1:
                own.append(max(0, ran[following].start_ns - ran[place].end_ns - ran[place].after_ns))
                durations.append(ran[following].dur_ns)
                saved_ns += min(own[-1], durations[-1])
        gaps += own
        saved_ns += max(0, request.parts["host"] - sum(own))  # after the last step
    if not gaps:
        return None
    between, step = (ns_text(statistics.median(times)) for times in (gaps, durations))
    return Flaw(
        "host", saved_ns / len(served), 0.0,
        "the engine's loop takes time between steps",
        "schedule the next step while one runs, and replay captured steps: the host takes the time between steps",
        (f"{between} between two steps in the median, beside {step} for a step",),
    )  # fmt: skip


def _compiling(served: Sequence[Served]) -> Flaw:
    compiled = [each.request.parts["compiling"] for each in served]
    return Flaw(
        "compiling", _mean(compiled, served), 0.0,
        "code is compiled while requests wait",
        "compile all sizes of steps before requests come",
        (f"{sum(ns > 0 for ns in compiled):,} of {len(served):,} requests waited for it",),
    )  # fmt: skip


# --- padding ----------------------------------------------------------------------------------------------------------

MOST_CALLS = 10_000


def _padding(trace: Trace, served: Sequence[Served]) -> Flaw | None:
    """Return the flaw of calls with more tokens than their step has, by kind of step."""
    called: dict[str, list[tuple[int, int]]] = defaultdict(list)
    stated = [(step, step.computed) for step in steps(trace) if step.computed is not None]
    for step, count in stated or _called_tokens(trace):
        tokens = step.prefill_tokens + step.decode_tokens
        if count >= tokens:  # else the step has further calls, or another form of input
            called[step.kind].append((tokens, count))
    padded = {kind: 1 - sum(own for own, _ in pairs) / sum(count for _, count in pairs)
              for kind, pairs in called.items()}  # fmt: skip
    by_kind: dict[str, float] = defaultdict(float)
    for _, ran, mine, _ in served:
        for place in mine:
            by_kind[ran[place].kind] += ran[place].dur_ns
    saved = {kind: share * by_kind[kind] for kind, share in padded.items()}
    if not any(saved.values()):
        return None
    kind = max(saved, key=lambda each: saved[each])
    own, count = map(sum, zip(*called[kind], strict=True))
    do = {
        DECODE: "take out requests that have ended, and take in waiting ones in each step (continuous batching)",
        PREFILL: "batch prompts of like lengths, or pass them one after the other without padding (packed, with "
        "positions)",
    }.get(kind, "pass tokens of all requests one after the other without padding (packed, with positions)")
    return Flaw(
        "padding", _mean(list(saved.values()), served), 0.0,
        f"{100 * padded[kind]:.0f} % of the tokens that {kind} steps compute are padding",
        do,
        (
            f"{count:,} tokens in {len(called[kind]):,} {'' if stated else 'recorded '}{kind} steps, "
            f"{own:,} of them of requests",
        ),
    )  # fmt: skip


def _called_tokens(trace: Trace) -> Iterator[tuple[ServedStep, int]]:
    """Yield engine steps with the tokens of the recorded calls of a model in them: batch × length of the first input.

    Steps of engines that serve none in the meantime are found by time; those of a second thread are left out.
    """
    ran = sorted(steps(trace), key=lambda step: (step.rank, step.start_ns))
    starts = [(step.rank, step.start_ns) for step in ran]
    rows = trace.con.execute(
        f"""
        SELECT coalesce(rank, 0), start_ns, dur_ns, input_shapes FROM spans
        WHERE kind = '{Kind.FORWARD}' AND level = {int(Level.MODEL)} AND input_shapes IS NOT NULL
        ORDER BY start_ns LIMIT {MOST_CALLS}
        """
    ).fetchall()
    sums: dict[int, int] = defaultdict(int)
    for rank, start_ns, dur_ns, text in rows:
        place = bisect_right(starts, (rank, start_ns)) - 1
        if place < 0 or ran[place].rank != rank or start_ns + dur_ns > ran[place].end_ns:
            continue
        try:
            first = json.loads(text)[0]
            sums[place] += int(first[0]) * int(first[1])
        except (ValueError, IndexError, TypeError, KeyError):
            continue
    for place, count in sums.items():
        yield ran[place], count


# --- requests that wait -----------------------------------------------------------------------------------------------


def _queue(trace: Trace, served: Sequence[Served]) -> Flaw | None:
    waited = [each.request for each in served if each.request.has_arrival]
    waits_ns = [each.parts["queue"] for each in waited]
    if not sum(waits_ns):
        return None
    what, do, why = _remedy_of_queue(steps(trace), waited)
    return Flaw(
        "queue", _mean(waits_ns, served), 0.0, what, do,
        (f"{ns_text(statistics.median(waits_ns))} in the queue in the median of {len(waited):,} requests", *why),
    )  # fmt: skip


def _remedy_of_queue(served: Sequence[ServedStep], waited: Sequence[Request]) -> tuple[str, str, tuple[str, ...]]:
    """Return why requests queue, what would shorten that, and figures, by what engines did while requests waited."""
    waits: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted((each.start_ns, each.start_ns + each.parts["queue"]) for each in waited):
        if waits and start_ns <= waits[-1][1]:
            waits[-1] = waits[-1][0], max(waits[-1][1], end_ns)
        else:
            waits.append((start_ns, end_ns))
    starts = [start_ns for start_ns, _ in waits]
    beside: list[tuple[int, int]] = []  # requests of each step, and how long it ran while others waited
    for step in served:
        place = max(0, bisect_right(starts, step.start_ns) - 1)
        ns = 0
        while place < len(waits) and waits[place][0] < step.end_ns:
            ns += max(0, min(waits[place][1], step.end_ns) - max(waits[place][0], step.start_ns))
            place += 1
        beside += [(step.requests, ns)] if ns else []
    waited_ns, ran_ns = sum(end_ns - start_ns for start_ns, end_ns in waits), sum(ns for _, ns in beside)
    if ran_ns < FULL_SHARE * waited_ns:
        share = 100 * (1 - ran_ns / waited_ns)
        return (
            "requests wait while the engine runs no step",
            f"in {share:.0f} % of the time in which requests waited, no step ran: see what the engine's loop does then",
            (),
        )
    most = max(step.requests for step in served)
    full = sum(ns for count, ns in beside if count == most) / ran_ns
    if full < FULL_SHARE:
        return (
            "requests wait while steps have room for more",
            "admit requests earlier: steps were not full while others waited (a limit on tokens, or the cache)",
            (f"steps served fewer than {most:,} requests in {100 * (1 - full):.0f} % of that time",),
        )
    growth = _growth(served)
    if growth is None:
        do, why = f"serve more than {most} requests at once, or with another engine", tuple[str, ...]()
    else:
        each, fixed = growth
        gain = (fixed + each * most) * 2 / (fixed + 2 * each * most) - 1
        why = (
            f"a decode step takes {ms_text(fixed / 1e6)}, and {ms_text(each / 1e6)} for each request in it: twice as "
            f"many at once are served {100 * gain:.0f} % faster",
        )
        do = f"serve more than {most} requests at once, or with another engine"
        if gain < LEAST_GROWTH:
            do = f"serve with another engine, or a faster model: more than {most} requests at once gain little"
    return "requests wait because steps are full", f"{do}: while others waited, steps were full", why


LEAST_GROWTH = 0.2
"""Least share by which a batch of twice the size must be faster for it to be advised."""


def _growth(served: Sequence[ServedStep]) -> tuple[float, float] | None:
    """Return nanoseconds of a decode step for each request, and without any; None if batches hardly differ in size.

    A line through the median times of each number of requests (Theil and Sen's: the median of all slopes).
    """
    by_count: dict[int, list[int]] = defaultdict(list)
    for step in served:
        if step.kind == DECODE:
            by_count[step.requests].append(step.dur_ns)
    medians = sorted(
        (count, statistics.median(times)) for count, times in by_count.items() if len(times) >= LEAST_STEPS
    )
    if len(medians) < 2 or medians[-1][0] < 2 * medians[0][0]:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for place, a in enumerate(medians) for b in medians[place + 1 :]]
    each = max(0.0, statistics.median(slopes))
    return each, max(0.0, statistics.median(ns - each * count for count, ns in medians))


# --- in words ---------------------------------------------------------------------------------------------------------

_GROUPS = {
    "queue": ("queue",), "own tokens": ("own_prefill", "own_decode"),
    "tokens of other requests": ("others_prefill", "others_decode"), "compilation": ("compiling",),
    "host between steps": ("host",), "preempted": ("preempted",),
}  # fmt: skip

MOST_GROUPS, LEAST_SHARE = 3, 0.03
"""Groups of parts that the sentence names, and their least share."""


def remedy(trace: Trace) -> str:
    """Return what would shorten the latencies of requests that ended well most; empty if they mostly compute."""
    return next((flaw.do for flaw in flaws(trace)), "")


def sentence(trace: Trace) -> str:
    """Return a sentence on requests that ended well: their median times, what these went to, and the slowest one."""
    ended = [each for each in requests(trace) if each.status == "ok"]
    total_ns = sum(each.latency_ns for each in ended)
    if not total_ns:
        return ""
    shares = {
        group: sum(each.parts[name] for each in ended for name in names) / total_ns for group, names in _GROUPS.items()
    }
    largest = [(group, share) for group, share in shares.items() if share >= LEAST_SHARE]
    largest = sorted(largest, key=lambda item: -item[1])[:MOST_GROUPS]
    firsts = [each.ttft_ns for each in ended if each.ttft_ns is not None]
    first = f", first token after {ns_text(statistics.median(firsts))}" if firsts else ""
    latency = ns_text(statistics.median(each.latency_ns for each in ended))
    text = (
        f"Requests: {len(ended):,} ended, median latency {latency}{first}"
        f"; of all latencies {', '.join(f'{100 * share:.0f} % {group}' for group, share in largest)}."
    )
    added_ns = sum(each.recording_ns for each in ended)
    measured_ns = total_ns + added_ns
    if added_ns >= LEAST_SHARE * measured_ns:
        text += f" What recorded steps took longer, about {100 * added_ns / measured_ns:.0f} %, is left out."
    text += f" To shorten them: {do}." if (do := remedy(trace)) else ""
    slowest = max(ended, key=lambda each: each.latency_ns)
    reason = reasons(trace).get((slowest.rank, slowest.engine, slowest.request, slowest.start_ns))
    return f"{text} Slowest: {slowest.request}, {ns_text(slowest.latency_ns)} ({reason})." if reason else text
