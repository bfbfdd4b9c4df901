"""What the program does between two steps, in recorded iterations whose collectors were on since the step before.

The time is divided by the outermost operators, named blocks and calls of the device's runtime in it. Operators that
move data to or from a device are named by that, and those with which Python reads a value by that. The rest is Python
and what it calls outside operators, for instance a checkpoint that is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp.account import entries as names
from xsp.account.entries import BARE, RECORDED, Entry
from xsp.account.onhost import HostTimes
from xsp.account.sweep import Times, Union, covered, intersection, length, union, without
from xsp.account.windows import IterationWindow, tables
from xsp.run import LOOP_LINES, MIN_LOOP_SHARE, Between, Line, PhaseLines, Run
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""Operators with which Python reads a value."""

MOST_PARTS = 5
"""Most parts that are told apart."""

MOST_SPANS = 20
"""Maximum number of spans of a part that are named."""


class Lines(NamedTuple):
    """The line of the program, or neighbouring lines such as those of one loop, with most of the time between steps."""

    place: str
    """`train.py:12`, of several lines `train.py:12-13`."""

    calls: str
    """Names that they call."""

    ns: int
    all_ns: int
    """Time of all lines, which was traced as well."""

    is_loop: bool
    """Whether they are those of a loop: each runs `LEAST_PASSES` times or more in a gap."""

    outer_calls: str = ""
    """Names that the calling line calls, if the place is inside a function of the program that it calls."""

    is_inside: bool = False
    """Whether it is."""

    place_share: float = 1.0
    """Share of `ns` in the place itself."""


LEAST_PASSES = 4
"""Least times that each of several lines runs between two steps to be one of a loop; a call over several lines comes
back to its first one, too."""


def of_phase(run: Run, kind: int | None, phase: str) -> PhaseLines | None:
    """Return the lines that ran in a phase of steps of a kind; None if none were traced.

    Args:
        run: the run of a rank.
        kind: number of the kind; None if there are no kinds.
        phase: the name of an entry of the account.
    """
    name = "outside" if phase == names.OUTSIDE else phase
    return next((each for each in run.lines if each.phase == name and each.kind == (kind or 0)), None)


def of_slow_gaps(run: Run) -> PhaseLines | None:
    """Return the lines that ran in gaps between steps far longer than others; None if none were traced."""
    return next((each for each in run.lines if each.phase == names.SLOW_GAPS), None)


def main_lines(between: Between | None) -> Lines | None:
    """Return the line with most time, with its neighbours if only together they have half of it; None if unknown.

    A loop of Python alternates between its lines, so that none of them has most of its time; so do calls in a row.

    Args:
        between: what was traced between the steps of a rank, or in a phase of them.
    """
    all_ns = between.ns + between.unknown_ns if between is not None else 0
    if between is None or not between.gaps or not between.lines or not all_ns:
        return None
    first, *others = sorted(between.lines, key=lambda each: -each.ns)
    chosen = [first]
    if 2 * first.ns < all_ns:
        for each in others:
            is_near = any(abs(each.line - line.line) <= LOOP_LINES for line in chosen)
            is_same = (each.file, each.function) == (first.file, first.function)
            if is_near and is_same and each.ns >= MIN_LOOP_SHARE * all_ns:
                chosen.append(each)
    if len(chosen) == 1:
        place, names_called = place_of(first)
        is_inside = place != f"{first.file}:{first.line}"
        inner = first.within if is_inside else None
        share = inner.ns / inner.of_ns if inner is not None and inner.of_ns else 1.0
        return Lines(place, names_called, first.ns, all_ns, False, first.calls, is_inside, min(1.0, share))
    numbers = sorted(each.line for each in chosen)
    place = f"{first.file}:{'-'.join(map(str, sorted({numbers[0], numbers[-1]})))}"
    names_called = ", ".join(dict.fromkeys(name for each in chosen for name in each.calls.split(", ") if name))
    is_loop = all(each.passes >= LEAST_PASSES * max(1, each.gaps) for each in chosen)
    return Lines(place, names_called, sum(each.ns for each in chosen), all_ns, is_loop)


MIN_INNER_SHARE = 0.1
"""Least share of a line's time that the line inside its functions must have been seen in to be named for it."""


def place_of(line: Line) -> tuple[str, str]:
    """Return the place of a line and what it calls: the line inside the program's functions that takes most of it.

    Its time may be known in part only, see `xsp.record.between`. A line of a package that calls it is not named.
    """
    inner = line.within
    if inner is None or inner.ns < MIN_INNER_SHARE * line.ns or (inner.file, inner.line) == (line.file, line.line):
        return f"{line.file}:{line.line}", line.calls
    outer = f"line {line.line}" if inner.file == line.file else f"{line.file}:{line.line}"
    last = f"-{inner.last}" if inner.last else ""
    return f"{inner.file}:{inner.line}{last}{'' if line.package else f' (called in {outer})'}", inner.calls


def inner_lines(phase: PhaseLines | None) -> Iterator[tuple[str, float, bool]]:
    """Yield the lines of a phase inside functions of the program with what they call, their share of the phase, and
    whether they are a long loop of Python.

    Args:
        phase: what was traced in a phase of the steps of a rank.
    """
    all_ns = phase.ns + phase.unknown_ns if phase is not None else 0
    for line in phase.lines if phase is not None and all_ns else ():
        for inner in line.inner or ((line.within,) if line.within is not None else ()):
            place, calls = place_of(replace(line, within=inner))
            if inner.of_ns and place != f"{line.file}:{line.line}":
                share = line.ns / all_ns * inner.ns / inner.of_ns
                yield ", ".join(filter(None, (place, calls))), share, inner.is_loop


class BetweenPart(NamedTuple):
    """A part of the time between steps."""

    name: str
    times: Union
    calls: int
    spans: tuple[str, ...]


def parts(trace: Trace, rank: int, recorded: Sequence[IterationWindow], between: Union | None) -> list[BetweenPart]:
    """Return the parts of the time between steps, the largest first; together they cover all of it.

    Args:
        trace: the trace.
        rank: the rank.
        recorded: its recorded iterations.
        between: the time between steps, without waits for data; other time is left out. None for none.

    Returns:
        Nothing if no recorded iteration was recorded from the end of the step before, with operators.
    """
    whole = [window for window in recorded if window.has_before and window.rung >= Level.OP]
    if not whole or between is None:
        return []
    between = intersection(
        between,
        union(
            np.array([window.start_ns for window in whole], np.int64),
            np.array([window.before_end_ns for window in whole], np.int64),
        ),
    )
    calls = _outermost_calls(trace, rank, whole)
    labels = _labels(trace, rank, calls)
    found, taken = [], union(np.zeros(0, np.int64), np.zeros(0, np.int64))
    inside = covered(between, calls["start_ns"], calls["end_ns"]) > 0
    for label in sorted(set(labels.tolist())):
        chosen = labels == label
        times = intersection(union(calls["start_ns"][chosen], calls["end_ns"][chosen]), between)
        times = without(times, taken)  # calls of several threads overlap
        taken = union(np.r_[taken[0], times[0]], np.r_[taken[1], times[1]])
        spans = tuple(map(str, calls["span_id"][chosen & inside][:MOST_SPANS]))
        found.append(BetweenPart(str(label), times, int((chosen & inside).sum()), spans))
    found = _largest([part for part in found if length(part.times)])
    rest = without(between, taken)
    if length(rest):
        found.append(BetweenPart(names.OUTSIDE_OPERATORS, rest, 0, ()))
    return sorted(found, key=lambda part: -length(part.times))


def _largest(found: Sequence[BetweenPart]) -> list[BetweenPart]:
    """Return the largest parts, and the others as one."""
    ordered = sorted(found, key=lambda part: -length(part.times))
    kept, others = ordered[:MOST_PARTS], ordered[MOST_PARTS:]
    if not others:
        return list(kept)
    times = union(*(np.concatenate([part.times[place] for part in others]) for place in (0, 1)))
    return [*kept, BetweenPart(names.OTHER_OPERATORS, times, sum(part.calls for part in others), ())]


def _outermost_calls(trace: Trace, rank: int, whole: Sequence[IterationWindow]) -> dict[str, Any]:
    """Return the outermost operators, blocks and runtime calls before steps on the threads of the steps."""
    pairs = {(window.process or -1, window.thread or -1) for window in whole}
    steps = ", ".join(str(window.step) for window in whole)
    table = trace.con.execute(
        f"""
        WITH roots AS (
            SELECT rank, step, max(start_ns + dur_ns) AS until_ns FROM before WHERE kind = '{Kind.BEFORE}' GROUP BY ALL
        )
        SELECT name, kind, start_ns, start_ns + dur_ns AS end_ns, span_id FROM before JOIN roots USING (rank, step)
        WHERE rank = ? AND step IN ({steps}) AND (level = {int(Level.OP)} AND kind = '{Kind.OP}'
              OR level = {int(Level.RUNTIME)} AND kind <> '{Kind.OVERHEAD}'
              OR kind = '{Kind.USER}' AND start_ns + dur_ns <= until_ns)
          AND (coalesce(process, -1), coalesce(thread, -1)) IN ({", ".join(map(str, sorted(pairs)))})
        QUALIFY end_ns > coalesce(max(end_ns) OVER (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC, level
                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
        ORDER BY start_ns
        """,
        [rank],
    ).fetchnumpy()
    calls = {name: np.asarray(column) for name, column in table.items()}
    return {**calls, "start_ns": calls["start_ns"].astype(np.int64), "end_ns": calls["end_ns"].astype(np.int64)}


def _labels(trace: Trace, rank: int, calls: dict[str, Any]) -> NDArray[Any]:
    """Return the name of the part that each call belongs to."""
    labels = np.array([names.READING if name in READS else str(name) for name in calls["name"]], dtype=object)
    begins: Times = calls["start_ns"]
    if not len(begins):
        return labels
    work = tables(trace)
    copies = trace.con.execute(
        f"""
        SELECT begin_ns, contains(w.name, 'HtoD') OR contains(w.name, 'HostToDevice') AS is_to_device
        FROM {work.device_work} w JOIN {work.launches} USING (rank, on_process, correlation_id)
        WHERE w.rank = ? AND w.kind = '{Kind.COPY}' AND (
            contains(w.name, 'HtoD') OR contains(w.name, 'HostToDevice') OR contains(w.name, 'DtoH')
            OR contains(w.name, 'DeviceToHost'))
        """,
        [rank],
    ).fetchall()
    for begin_ns, is_to_device in copies:
        place = int(np.searchsorted(begins, begin_ns, "right")) - 1
        is_inside = place >= 0 and begin_ns < calls["end_ns"][place]
        if is_inside and labels[place] != names.READING and calls["kind"][place] != Kind.USER:
            labels[place] = names.TO_DEVICE if is_to_device else names.FROM_DEVICE
    return labels


NEARLY = 0.8
"""Share of the time between steps from which what was recorded stands for all of it."""


def entry(
    between_ns: float,
    found: Sequence[BetweenPart],
    times: HostTimes,
    recorded: Sequence[IterationWindow],
    weights: Mapping[int, float],
    drained_ns: float,
    slow_gaps: str | None = None,
    asleep: float = 0.0,
) -> Entry:
    """Return the time between steps as an entry, with its parts.

    Args:
        between_ns: the time, from iterations that were not recorded, without waits for data.
        found: what recorded iterations show, from `parts`; without them, the entry has no parts.
        times: what the host did in the recorded iterations.
        recorded: the recorded iterations.
        weights: how many iterations each of them stands for, by the number of its step.
        drained_ns: time that recorded steps waited at their ends for the device. Others do not: their program waits
            later, if it reads a result.
        slow_gaps: long times between steps that were not recorded, in words.
        asleep: share of the time between steps in which the thread sleeps.
    """
    ms = between_ns / 1e6
    seen = _with_sleep(_seen(found, times, recorded, weights), asleep)
    seen_ms = sum(part.ms or 0.0 for part in seen)
    waiting_ms = min(max(0.0, ms - seen_ms), drained_ns / 1e6)
    if not seen or ms - waiting_ms <= 0:
        return Entry(names.BETWEEN, ms, BARE)
    rest_ms = ms - waiting_ms
    children = list(seen)
    if seen_ms >= NEARLY * rest_ms:
        children = list(names.scaled(seen, rest_ms / seen_ms))
    else:
        missing_ms = rest_ms - seen_ms
        children.append(
            Entry(names.NOT_RECORDED, missing_ms, BARE, place=slow_gaps, place_ms=missing_ms if slow_gaps else None)
        )
    if waiting_ms:
        children.append(Entry(names.WAITING, waiting_ms, RECORDED))
    return Entry(names.BETWEEN, ms, BARE, children=tuple(sorted(children, key=lambda child: -(child.ms or 0.0))))


MIN_ASLEEP_SHARE = 0.25
"""Least share of the time between steps in which the thread sleeps for this to be a part of it."""


def asleep_share(run: Run) -> float:
    """Return the share of the time between the steps of a rank in which its thread slept; 0 if that is unknown."""
    traced = run.between
    all_ns = traced.ns + traced.unknown_ns if traced is not None else 0
    return min(1.0, (traced.asleep_ns or 0) / all_ns) if traced is not None and all_ns else 0.0


def _with_sleep(seen: Sequence[Entry], asleep: float) -> list[Entry]:
    """Return the parts with the sleep of the thread as one of its own; no operator and no call of a device sleeps."""
    if asleep < MIN_ASLEEP_SHARE:
        return list(seen)
    found, asleep_ms = [], asleep * sum(part.ms or 0.0 for part in seen)
    for part in seen:
        if part.name == names.OUTSIDE_OPERATORS and not part.children and part.ms:
            ms = min(part.ms, asleep_ms)
            found.append(Entry(names.ASLEEP, ms, RECORDED))
            part = replace(part, ms=part.ms - ms)
        found.append(part)
    return [part for part in found if part.ms]


def _seen(
    found: Sequence[BetweenPart], times: HostTimes, recorded: Sequence[IterationWindow], weights: Mapping[int, float]
) -> list[Entry]:
    """Return the parts as entries, in milliseconds of a recorded iteration."""
    whole = [window for window in recorded if window.has_before and window.rung >= Level.OP]
    begins = np.array([window.start_ns for window in whole], np.int64)
    ends = np.array([window.step_ns for window in whole], np.int64)
    counts = np.array([weights.get(window.step or 0, 1.0) for window in whole])

    def mean_ms(part: Union) -> float:
        return float(np.average(covered(part, begins, ends), weights=counts)) / 1e6

    seen = []
    for part in found:
        part_ms = mean_ms(part.times)
        states = {name: mean_ms(intersection(part.times, state)) for name, state in times.states.items()}
        running_ms = max(0.0, part_ms - sum(states.values()))
        children = [Entry(name, state_ms, RECORDED) for name, state_ms in states.items() if state_ms]
        if children:
            children = list(names.scaled([Entry(names.RUNNING, running_ms, RECORDED), *children],
                            part_ms / (running_ms + sum(states.values()))))  # fmt: skip
        seen.append(
            Entry(
                part.name,
                part_ms,
                RECORDED,
                children=tuple(child for child in children if child.ms),
                spans=part.spans,
                calls=part.calls / len(whole) if part.calls else None,
            )
        )
    return seen
