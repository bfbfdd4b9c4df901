"""Requests that engines served, and the steps of these engines, as stored; without what recording added.

A step in which xsp recorded a call of the model takes longer than others, and so do the requests that it serves, and
those that wait for it. All times here are without that:

- The time of a recorded step is at most that of the steps next to it that are alike and were not recorded: of the same
  kind, with as many tokens of prompts and of answers (within 10 %). Where there are too few, it is the step's own time
  without what recording added to the other recorded steps of the engine in the median. So it is for the first step of
  a kind, which is slow by itself: memory is allocated, libraries are loaded. Compilation stays.
- The time after a recorded step is at most the median of that after others of its kind, if requests wait for the next
  one: it decodes.
- What a request lost between its arrival and its end is taken from the part in which it was lost, and a step's from its
  shares by tokens; so the parts still add up. Arrivals stay, so what a request waited because of recordings before its
  arrival stays in its queue.

Each says how much was taken (`recording_ns`). Starts are as measured, and so is `end_ns`.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import log1p
from typing import Any, NamedTuple

from xsp.schema import Kind
from xsp.serving import COLLECTOR, KINDS, PARTS, PREFILL
from xsp.store.trace import Trace

EngineKey = tuple[int, str]
"""Rank and name of an engine."""


class Request(NamedTuple):
    """A request that an engine served; times in nanoseconds."""

    rank: int
    engine: str
    request: str
    status: str
    start_ns: int
    latency_ns: int
    parts: dict[str, int]
    """What its latency went to, by the names of `xsp.serving.PARTS`; they add up to it."""

    ttft_ns: int | None
    first_parts: dict[str, int] | None
    """The same of the time to its first token."""

    last_token_ns: int | None
    """From its arrival to its last token."""

    prompt_tokens: int
    output_tokens: int
    steps: int
    has_arrival: bool
    """Whether its arrival is known; else its time in the queue is not."""

    neighbour: str | None
    """The other request whose prefill took most of its time, and `neighbour_ns`."""

    neighbour_ns: int
    recording_ns: int = 0
    """What recording added to its latency, and was taken from it."""

    is_corrected: bool = True
    """False if a recorded step served it, and nothing tells what recording added to that."""

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first; None of a request with fewer than two."""
        if self.ttft_ns is None or self.last_token_ns is None or self.output_tokens < 2:
            return None
        return (self.last_token_ns - self.ttft_ns) / (self.output_tokens - 1)

    @property
    def end_ns(self) -> int:
        """When it ended, as measured."""
        return self.start_ns + self.latency_ns + self.recording_ns


class ServedStep(NamedTuple):
    """A step of an engine; times in nanoseconds."""

    rank: int
    engine: str
    number: int
    kind: str
    start_ns: int
    dur_ns: int
    requests: int
    prefill_tokens: int
    decode_tokens: int
    parts: Sequence[tuple[str, str, int, int | None]]
    """For each request its id, phase and tokens, and the tokens that the step generated for it, if stated."""

    computed: int | None = None
    """Tokens that the model was called with, with padding, if stated."""

    compiling_ns: int = 0
    is_recorded: bool = False
    recording_ns: int = 0
    """What recording added to it, and was taken from it."""

    after_ns: int = 0
    """What recording added to the time after it."""

    is_corrected: bool = True
    """False if it was recorded, and no recorded step of the engine has steps alike that were not."""

    @property
    def end_ns(self) -> int:
        """When it ended, as measured."""
        return self.start_ns + self.dur_ns + self.recording_ns


def requests(trace: Trace) -> list[Request]:
    """Return the requests that ended while the trace was recorded, by arrival; empty without engines."""
    return trace.cached("served requests", lambda: _without_recording(trace))


def as_measured(trace: Trace) -> list[Request]:
    """Return the same requests with what recording added, as clients saw them."""
    return [_request(*row) for row in _rows(trace, "xsp.serving.request")]


def steps(trace: Trace) -> list[ServedStep]:
    """Return all steps of engines, by start; empty without engines."""
    return trace.cached("served steps", lambda: _steps(trace))


def _rows(trace: Trace, key: str) -> list[tuple[Any, ...]]:
    """Return the rows of `serving` whose attributes have a key. Their kind may be that of a trace's root instead."""
    return trace.con.execute(
        "SELECT coalesce(rank, 0), status, start_ns, dur_ns, attributes FROM serving "
        f"WHERE json_valid(attributes) AND json_exists(attributes, '$.\"{key}\"') ORDER BY start_ns, span_id"
    ).fetchall()


def _request(rank: int, status: str, start_ns: int, dur_ns: int, text: str) -> Request:
    values = json.loads(text)

    def parts(prefix: str) -> dict[str, int]:
        return {name: int(values.get(f"{prefix}{name}_ns", 0)) for name in PARTS}

    ttft_ns = values.get("xsp.serving.first_token_ns")
    return Request(
        rank, values.get("xsp.serving.engine", ""), values["xsp.serving.request"], status, start_ns, dur_ns,
        parts("xsp.serving."), ttft_ns, parts("xsp.serving.first_token.") if ttft_ns is not None else None,
        values.get("xsp.serving.last_token_ns"), values.get("gen_ai.usage.input_tokens", 0),
        values.get("gen_ai.usage.output_tokens", 0), values.get("xsp.serving.steps", 0),
        bool(values.get("xsp.serving.arrival_stated")), values.get("xsp.serving.largest_prefill"),
        values.get("xsp.serving.largest_prefill_ns", 0),
    )  # fmt: skip


def _step(rank: int, status: str, start_ns: int, dur_ns: int, text: str) -> ServedStep:
    values = json.loads(text)
    parts = [tuple(part) for part in json.loads(values["xsp.serving.parts"])]
    return ServedStep(
        rank, values.get("xsp.serving.engine", ""), values.get("xsp.serving.number", 0),
        KINDS[values.get("step_kind", 0)], start_ns, dur_ns, len(parts), values.get("prefill_tokens", 0),
        values.get("decode_tokens", 0), parts, values.get("xsp.serving.computed_tokens"),
        values.get("xsp.serving.compiling_ns", 0),
    )  # fmt: skip


class Served(NamedTuple):
    """A request, with the steps of its engine, and the places of those that served it, in order."""

    request: Request
    engine: Sequence[ServedStep]
    places: Sequence[int]
    parts: Sequence[tuple[str, str, int, int | None]]
    """What each of these steps computed for it, see `ServedStep.parts`."""


def with_steps(trace: Trace) -> list[Served]:
    """Return the requests with the places of their steps."""
    return _with_steps(requests(trace), steps(trace))


def _with_steps(ended: Sequence[Request], ran: Sequence[ServedStep]) -> list[Served]:
    """Return requests with the places of their steps; an id may come again after its end."""
    engines: dict[EngineKey, list[ServedStep]] = defaultdict(list)
    for step in ran:
        engines[step.rank, step.engine].append(step)
    by_id: dict[tuple[int, str, str], list[tuple[int, tuple[str, str, int, int | None]]]] = defaultdict(list)
    for (rank, engine), own in engines.items():
        for place, step in enumerate(own):
            for part in step.parts:
                by_id[rank, engine, part[0]].append((place, part))
    found = []
    for each in ended:
        own, mine = engines[each.rank, each.engine], by_id[each.rank, each.engine, each.request]
        starts = [own[place].start_ns for place, _ in mine]
        ends = [own[place].end_ns for place, _ in mine]
        first, last = bisect_right(ends, each.start_ns), bisect_right(starts, each.end_ns)
        found.append(
            Served(each, own, [place for place, _ in mine[first:last]], [part for _, part in mine[first:last]])
        )
    return found


# --- steps without what recording added -------------------------------------------------------------------------------

LEAST_STEPS = 3
"""Least number of steps for a usual duration."""

MOST_ALIKE = 25
"""Number of the nearest steps alike whose median is the usual duration: later ones have longer texts to read."""


def _steps(trace: Trace) -> list[ServedStep]:
    ran = [_step(*row) for row in _rows(trace, "xsp.serving.parts")]
    if not ran:
        return []
    marks = _recorded(trace, ran)
    if not any(marks):
        return ran
    ran = [step._replace(is_recorded=mark) for step, mark in zip(ran, marks, strict=True)]
    engines: dict[EngineKey, list[int]] = defaultdict(list)
    for place, step in enumerate(ran):
        engines[step.rank, step.engine].append(place)
    for places in engines.values():
        for place, step in zip(places, _of_engine([ran[place] for place in places]), strict=True):
            ran[place] = step
    return ran


def _recorded(trace: Trace, ran: Sequence[ServedStep]) -> list[bool]:
    """Return for each step whether xsp recorded a call of the model in it."""
    rows = trace.con.execute(
        f"SELECT coalesce(rank, 0), start_ns, start_ns + dur_ns FROM spans WHERE kind = '{Kind.STEP}' "
        f"AND collector IS DISTINCT FROM '{COLLECTOR}' ORDER BY 1, 2"
    ).fetchall()
    starts, ends = [(rank, start_ns) for rank, start_ns, _ in rows], [end_ns for _, _, end_ns in rows]
    found = []
    for step in ran:
        place = bisect_right(starts, (step.rank, step.end_ns)) - 1
        found.append(place >= 0 and starts[place][0] == step.rank and ends[place] > step.start_ns)
    return found


def _of_engine(ran: Sequence[ServedStep]) -> list[ServedStep]:
    """Return the steps of an engine without what recording added to them."""
    alike: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)  # start and time
    after: dict[str, list[int]] = defaultdict(list)
    for step, following in pairwise([*ran, None]):
        if step is not None and not step.is_recorded:
            alike[_form(step)].append((step.start_ns, step.dur_ns - step.compiling_ns))
            if following is not None and _waits(step, following):
                after[step.kind].append(following.start_ns - step.end_ns)
    usual_after_ns = {kind: statistics.median(times) for kind, times in after.items() if len(times) >= LEAST_STEPS}
    firsts = {step.kind: place for place, step in reversed([*enumerate(ran)])}
    added = [
        _added(step, alike[_form(step)]) if step.is_recorded and firsts[step.kind] != place else None
        for place, step in enumerate(ran)
    ]
    known = [ns for step, ns in zip(ran, added, strict=True) if step.is_recorded and ns is not None]
    usual_ns = statistics.median(known) if known else 0.0
    found = []
    for place, (step, ns) in enumerate(zip(ran, added, strict=True)):
        own_ns = round(min(usual_ns if ns is None else ns, step.dur_ns - step.compiling_ns)) if step.is_recorded else 0
        after_ns, following = 0, ran[place + 1] if place + 1 < len(ran) else None
        if step.is_recorded and following is not None and step.kind in usual_after_ns and _waits(step, following):
            after_ns = round(max(0.0, following.start_ns - step.end_ns - usual_after_ns[step.kind]))
        is_corrected = not step.is_recorded or bool(known)
        dur_ns = step.dur_ns - own_ns
        found.append(step._replace(dur_ns=dur_ns, recording_ns=own_ns, after_ns=after_ns, is_corrected=is_corrected))
    return found


def _form(step: ServedStep) -> tuple[str, int, int]:
    """Return what steps that are alike have in common."""
    return step.kind, round(10 * log1p(step.prefill_tokens)), round(10 * log1p(step.decode_tokens))


def _waits(step: ServedStep, following: ServedStep) -> bool:
    """Return whether requests wait for the next step of an engine."""
    return following.number == step.number + 1 and following.decode_tokens > 0


def _added(step: ServedStep, alike: Sequence[tuple[int, int]]) -> float | None:
    """Return how much longer a recorded step took than those that are alike; None if there are too few."""
    if len(alike) < LEAST_STEPS:
        return None
    first = max(0, min(bisect_left(alike, (step.start_ns,)) - MOST_ALIKE // 2, len(alike) - MOST_ALIKE))
    usual_ns = statistics.median(ns for _, ns in alike[first : first + MOST_ALIKE])
    return max(0.0, step.dur_ns - step.compiling_ns - usual_ns)


# --- requests without it ----------------------------------------------------------------------------------------------


class Removed:
    """How much of an engine's time was taken out, up to a moment."""

    def __init__(self, ran: Sequence[ServedStep]) -> None:
        """Take what recording added to steps, and after them; in both it is spread evenly."""
        self._starts: list[int] = []
        self._spans: list[tuple[int, int, int]] = []  # end, ns, and ns before it
        total = 0
        for step, following in pairwise([*ran, None]):
            if step is None:
                break
            end_ns = following.start_ns if following is not None else step.end_ns
            for start, end, ns in (
                (step.start_ns, step.end_ns, step.recording_ns), (step.end_ns, end_ns, step.after_ns),
            ):  # fmt: skip
                if ns and end > start:
                    self._starts.append(start)
                    self._spans.append((end, ns, total))
                    total += ns

    def until(self, at_ns: int) -> int:
        """Return the nanoseconds that were taken out before a moment."""
        place = bisect_right(self._starts, at_ns) - 1
        if place < 0:
            return 0
        start, (end, ns, before) = self._starts[place], self._spans[place]
        return before + (ns if at_ns >= end else ns * (at_ns - start) // (end - start))

    def between(self, start_ns: int, end_ns: int) -> int:
        """Return the nanoseconds that were taken out of a time."""
        return self.until(end_ns) - self.until(start_ns)


def removed(trace: Trace) -> dict[EngineKey, Removed]:
    """Return what was taken out of the time of each engine."""
    engines: dict[EngineKey, list[ServedStep]] = defaultdict(list)
    for step in steps(trace):
        engines[step.rank, step.engine].append(step)
    return {key: Removed(ran) for key, ran in engines.items()}


def _without_recording(trace: Trace) -> list[Request]:
    stored = as_measured(trace)
    if not any(step.is_recorded for step in steps(trace)):
        return stored
    taken, nothing = removed(trace), Removed(())
    return [
        _corrected(each, taken.get((each.request.rank, each.request.engine), nothing))
        for each in _with_steps(stored, steps(trace))
    ]


class _Taken:
    """What is taken from the parts of a request, up to where its life has been read."""

    def __init__(self, request: Request) -> None:
        self.parts = dict.fromkeys(PARTS, 0)
        self.of_neighbour = 0
        self._request = request

    def take(self, name: str, ns: int) -> None:
        """Take time from a part, at most all of it: the clocks of requests and steps differ a little."""
        self.parts[name] += min(ns, self._request.parts[name] - self.parts[name])

    def take_work(self, step: ServedStep, part: tuple[str, str, int, int | None], work_ns: int, ns: int) -> None:
        """Take time from the shares of a step, as `xsp.serving.Requests` made them."""
        _, phase, tokens, _ = part
        total = max(1, step.prefill_tokens + step.decode_tokens)
        others = step.prefill_tokens - (tokens if phase == PREFILL else 0)
        own_ns, prefill_ns = (work_ns * count // total - (work_ns - ns) * count // total for count in (tokens, others))
        self.take("own_prefill" if phase == PREFILL else "own_decode", own_ns)
        self.take("others_prefill", prefill_ns)
        self.take("others_decode", ns - own_ns - prefill_ns)
        for other, other_phase, count, _ in step.parts if self._request.neighbour is not None else ():
            if other == self._request.neighbour and other_phase == PREFILL:
                self.of_neighbour += ns * count // total


def _corrected(served: Served, timeline: Removed) -> Request:
    """Return a request without what recording added to its life, in the parts in which it was added."""
    request, ran, mine, parts = served
    first_place, last_place = (_nearest(served, since_ns) for since_ns in (request.ttft_ns, request.last_token_ns))
    taken, at, last = _Taken(request), request.start_ns, -1
    first, until_last = dict.fromkeys(PARTS, 0), 0
    for place, part in zip(mine, parts, strict=True):
        step = ran[place]
        start = max(at, step.start_ns)
        end = max(start, step.end_ns)
        name = "queue" if last < 0 else "host" if step.number == ran[last].number + 1 else "preempted"
        taken.take(name, timeline.between(at, start))
        work_ns = max(0, end - start - step.compiling_ns)
        taken.take_work(step, part, work_ns, min(work_ns, timeline.between(start, end)))
        if place == first_place:
            first = dict(taken.parts)
        if place == last_place:
            until_last = sum(taken.parts.values())
        at, last = end, place
    others_ran = last >= 0 and last + 1 < len(ran) and ran[last + 1].end_ns <= request.end_ns
    rest = "queue" if last < 0 else "preempted" if others_ran else "host"
    taken.take(rest, timeline.between(at, max(at, request.end_ns)))
    total, first_parts = sum(taken.parts.values()), request.first_parts
    if first_parts is not None:
        first = {name: min(ns, first_parts[name]) for name, ns in first.items()}
        first_parts = {name: ns - first[name] for name, ns in first_parts.items()}
    return request._replace(
        latency_ns=request.latency_ns - total,
        parts={name: ns - taken.parts[name] for name, ns in request.parts.items()},
        ttft_ns=request.ttft_ns - sum(first.values()) if request.ttft_ns is not None else None,
        first_parts=first_parts,
        last_token_ns=request.last_token_ns - until_last if request.last_token_ns is not None else None,
        neighbour_ns=max(0, request.neighbour_ns - taken.of_neighbour),
        recording_ns=total,
        is_corrected=all(ran[place].is_corrected for place in mine),
    )


def _nearest(served: Served, since_ns: int | None) -> int | None:
    """Return the place of the step of a request that ends nearest to a time since its arrival."""
    if since_ns is None or not served.places:
        return None
    at_ns = served.request.start_ns + since_ns
    return min(served.places, key=lambda place: abs(served.engine[place].end_ns - at_ns))
