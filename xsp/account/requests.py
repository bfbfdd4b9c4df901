"""Requests that engines served: what the time of each went to, figures of all, and why some were slow.

- Time to the first token (TTFT): from the arrival of a request to the end of the step that computed its first token.
- Time between tokens (inter-token latency, ITL): between successive steps that computed tokens of a request.
- Time per output token (TPOT): a request's time from its first to its last token ÷ its further tokens.
- Goodput: requests a second that keep every stated limit on TTFT, TPOT and latency.

A token counts when its step ends; what the engine does with it afterwards is `host`. Times are without what recording
added, rates as measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xsp import stats
from xsp.account.served import Request, ServedStep, removed, requests, steps
from xsp.errors import AnalysisError
from xsp.serving import DECODE, PARTS
from xsp.store.trace import Limits, Trace

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

SLOW_SHARE = 0.1
"""Share of the requests that count as slow: those with the longest latencies."""

WAITING = tuple(name for name in PARTS if not name.startswith("own_"))
"""Parts that do not compute tokens of the request itself."""


# --- figures ----------------------------------------------------------------------------------------------------------


class RequestFigure(NamedTuple):
    """A figure of all requests with its 95 % interval; an end is None if there are too few values to bound it."""

    name: str
    unit: str
    value: float
    low: float | None
    high: float | None
    observations: int
    """Number of values."""


def token_gaps(trace: Trace) -> list[int]:
    """Return the times between successive tokens of each request in nanoseconds, in the order of time."""
    return [gap for _, gap in sorted((at, gap) for gaps in _gaps_of(trace).values() for at, gap in gaps)]


def _gaps_of(trace: Trace) -> dict[tuple[int, str, str], list[tuple[int, int]]]:
    """Return when a token came, and the time since the one before, by rank, engine and id of the request."""
    latest: dict[tuple[int, str, str], int] = {}
    gaps: dict[tuple[int, str, str], list[tuple[int, int]]] = defaultdict(list)
    taken = removed(trace)
    for step in steps(trace):
        end_ns, timeline = step.end_ns, taken[step.rank, step.engine]
        for request, phase, _, new in step.parts:
            key = (step.rank, step.engine, request)
            # a prompt may be read in several steps, of which only the last one adds a token
            if phase == DECODE and key in latest and (new is None or new > 0):
                gaps[key].append((end_ns, end_ns - latest[key] - timeline.between(latest[key], end_ns)))
            if new is None or new > 0:
                latest[key] = end_ns
    return gaps


def figures(trace: Trace) -> list[RequestFigure]:
    """Return percentiles of TTFT, ITL, TPOT and latency in milliseconds, and rates, of requests that ended well."""
    import numpy as np

    ended = [each for each in requests(trace) if each.status == "ok"]
    ended.sort(key=lambda each: each.end_ns)
    series: dict[str, Iterable[float]] = {
        "time to first token": [each.ttft_ns for each in ended if each.ttft_ns is not None and each.has_arrival],
        "time between tokens": token_gaps(trace),
        "time per output token": [tpot for each in ended if (tpot := each.tpot_ns) is not None],
        "latency": [each.latency_ns for each in ended],
        "queue": [each.parts["queue"] for each in ended if each.has_arrival],
    }
    found = _within(trace, trace.limits) if trace.limits is not None else []
    for name, times in series.items():
        values = np.array(list(times), float)
        for label, share in SHARES.items() if len(values) else ():
            low, value, high = (None if end is None else end / 1e6 for end in stats.percentile_interval(values, share))
            found.append(RequestFigure(f"{name} {label}", "ms", value or 0.0, low, high, len(values)))
    if (seconds := _seconds(ended)) > 0:
        output = sum(each.output_tokens for each in ended)
        prompts = sum(each.prompt_tokens for each in ended)
        rates = {"requests": len(ended), "output tokens": output, "prompt tokens": prompts}
        found += [RequestFigure(name, "/s", count / seconds, None, None, count) for name, count in rates.items()]
    return found


class KindOfStep(NamedTuple):
    """Steps of one kind of an engine; times in nanoseconds."""

    rank: int
    engine: str
    kind: str
    steps: int
    share: float
    """Share of the time of all steps of the engine."""

    mean: stats.Interval | None
    """Mean time of a step with its 95 % interval; None for fewer than three steps."""

    median_ns: float
    gap_ns: float | None
    """Median time from the end of the step before; None if no step before is known."""

    requests: float
    """Mean number of requests of a step, and of tokens of prompts and added tokens."""

    prefill_tokens: float
    decode_tokens: float
    tokens_per_s: float
    """Tokens of both sorts a second, in steps of this kind."""


def gaps(trace: Trace) -> list[int | None]:
    """Return for each of `steps` the time since the end of its engine's step before; None if that is not known."""
    ends: dict[tuple[int, str, int], int] = {}
    found = []
    for each in steps(trace):
        end_ns = ends.get((each.rank, each.engine, each.number - 1))
        ends[each.rank, each.engine, each.number] = each.end_ns + each.after_ns
        found.append(each.start_ns - end_ns if end_ns is not None else None)
    return found


def kinds(trace: Trace) -> list[KindOfStep]:
    """Return the kinds of steps of each engine, the largest share of its time first."""
    groups: dict[tuple[int, str], dict[str, list[tuple[ServedStep, int | None]]]] = defaultdict(dict)
    for each, gap in zip(steps(trace), gaps(trace), strict=True):
        groups[each.rank, each.engine].setdefault(each.kind, []).append((each, gap))
    found = []
    for (rank, engine), by_kind in groups.items():
        total_ns = sum(each.dur_ns for members in by_kind.values() for each, _ in members)
        for kind, members in by_kind.items():
            times = [each.dur_ns for each, _ in members]
            known = [gap for _, gap in members if gap is not None]
            prefill, decode = (
                statistics.fmean(tokens)
                for tokens in zip(*((each.prefill_tokens, each.decode_tokens) for each, _ in members), strict=True)
            )
            found.append(
                KindOfStep(
                    rank, engine, kind, len(members), sum(times) / total_ns if total_ns else 0.0,
                    stats.mean_interval(times), statistics.median(times),
                    statistics.median(known) if known else None,
                    statistics.fmean(each.requests for each, _ in members), prefill, decode,
                    (prefill + decode) * len(times) * 1e9 / sum(times) if sum(times) else 0.0,
                )
            )  # fmt: skip
    return sorted(found, key=lambda each: (each.rank, each.engine, -each.share))


def _seconds(served: Sequence[Request]) -> float:
    if not served:
        return 0.0
    end_ns = max(each.end_ns for each in served)
    return (end_ns - min(each.start_ns for each in served)) / 1e9


class Goodput(NamedTuple):
    """The requests that keep all limits."""

    per_s: float
    share: stats.Interval
    """Their share of all requests that ended, also cancelled and failed ones, which keep none."""


def _within(trace: Trace, limits: Limits) -> list[RequestFigure]:
    """Return goodput at limits, and the share of requests that keep them in percent."""
    found = goodput(trace, *limits)
    count = sum(each.status != "unclosed" for each in requests(trace))
    low, high = (100 * end for end in found.share.ends)
    return [
        RequestFigure("goodput", "/s", found.per_s, None, None, count),
        RequestFigure("requests within the limits", "%", 100 * found.share.value, low, high, count),
    ]


def goodput(
    trace: Trace,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    latency_ms: float | None = None,
    itl_ms: float | None = None,
) -> Goodput:
    """Return how many requests a second keep every limit that is given, and their share with its 95 % interval.

    Args:
        trace: a trace with requests of an engine.
        ttft_ms: limit on the time to the first token.
        tpot_ms: limit on the time per output token; a request with one token keeps it.
        latency_ms: limit on the latency.
        itl_ms: limit on each time between two tokens of a request.

    Raises:
        AnalysisError: no request has ended.
    """
    ended = [each for each in requests(trace) if each.status != "unclosed"]
    if not ended:
        raise AnalysisError(f"{trace.name!r} has no request of an engine that ended")
    limits = Limits(ttft_ms, tpot_ms, latency_ms, itl_ms)
    gaps = _gaps_of(trace) if itl_ms is not None else {}
    kept = sum(each.status == "ok" and _keeps(each, limits, _longest(gaps, each)) for each in ended)
    seconds = _seconds(ended)
    return Goodput(kept / seconds if seconds else 0.0, stats.share_interval(kept / len(ended), len(ended)))


def _longest(gaps: Mapping[tuple[int, str, str], Sequence[tuple[int, int]]], each: Request) -> int:
    """Return the longest time between two tokens of a request; 0 with fewer than two."""
    of_id = gaps.get((each.rank, each.engine, each.request), ())
    return max((gap for at, gap in of_id if each.start_ns < at <= each.end_ns), default=0)


def _keeps(each: Request, limits: Limits, longest_ns: int) -> bool:
    times = (each.ttft_ns, each.tpot_ns or 0.0, each.latency_ns, longest_ns)
    return all(limit is None or (ns is not None and ns <= 1e6 * limit) for limit, ns in zip(limits, times, strict=True))


# --- why a request was slow -------------------------------------------------------------------------------------------


def reasons(trace: Trace) -> dict[tuple[int, str, str, int], str]:
    """Return why requests were slow, by rank, engine, id and start: of the tenth with the longest latencies.

    The reason is the part of the latency that exceeds its median over the requests of the engine by most; time for its
    own tokens counts as one part.
    """
    by_engine: dict[tuple[int, str], list[Request]] = defaultdict(list)
    for each in requests(trace):
        by_engine[each.rank, each.engine].append(each)
    found = {}
    for members in by_engine.values():
        usual = {name: statistics.median(each.parts[name] for each in members) for name in PARTS}
        count = max(1, round(SLOW_SHARE * len(members)))
        for each in sorted(members, key=lambda each: -each.latency_ns)[:count]:
            found[each.rank, each.engine, each.request, each.start_ns] = _reason(each, usual)
    return found


def _reason(each: Request, usual: dict[str, float]) -> str:
    excess = {name: each.parts[name] - usual[name] for name in WAITING}
    excess["own"] = sum(each.parts[name] - usual[name] for name in PARTS if name not in WAITING)
    name = max(excess, key=lambda part: excess[part])
    if excess[name] <= 0:
        return ""
    if name == "others_prefill" and each.neighbour is not None:
        return f"prefill of {each.neighbour}" if each.neighbour_ns * 2 > each.parts[name] else "prefill of others"
    return {
        "queue": "queue", "own": "its own tokens", "others_prefill": "prefill of others",
        "others_decode": "decoding of others", "compiling": "compilation", "host": "host between steps",
        "preempted": "preempted",
    }[name]  # fmt: skip
