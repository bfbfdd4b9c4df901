"""The place of each entry that takes most of it: modules, operators, calls of Python, classes of modules on devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xsp.account import entries as names
from xsp.account.between import READS, Lines, inner_lines, main_lines, of_phase
from xsp.account.entries import Entry, Iterations
from xsp.account.ondevice import Gap
from xsp.account.onhost import PhaseTimes
from xsp.account.sweep import coded, covered, union, without
from xsp.account.windows import IterationWindow, tables
from xsp.schema import ANNOTATION, Kind, Level
from xsp.store import overlap
from xsp.store.trace import Trace

MIN_PLACE_SHARE = 0.25
"""Least share of an entry that a place must take to be named."""

MOST_SPANS = 20
"""Maximum number of spans of a place."""

MIN_FRAME_SHARE = 0.5
"""Least share of a gap that a call must cover to be its place, and largest multiple of the gap that it may take."""

MAX_FRAME_RATIO = 2.0

NEARLY = 0.95
"""Share of the largest cover of a gap from which a call further inside is preferred."""


MOST_LONGER = 10
"""Most times as long as without recording that a phase of recorded iterations may take to tell where its time goes:
recording takes several times as long as short operators, and more is of the machine, or of what runs once."""


@dataclass(frozen=True)
class _Place:
    name: str
    ms: float
    calls: float
    spans: tuple[str, ...] = ()


def with_places(
    trace: Trace,
    account: Iterations,
    recorded: Sequence[IterationWindow],
    phases: PhaseTimes,
    gaps: Sequence[tuple[int, Sequence[Gap]]],
) -> Iterations:
    """Return an account whose entries name what takes most of them.

    Args:
        trace: the trace.
        account: the account of a rank.
        recorded: the recorded iterations with most detail.
        phases: the times of the phases in them.
        gaps: the idle gaps of each device in them.
    """
    host = replace(account.host, entries=_on_host(trace, account, recorded, phases))
    devices = []
    for side in account.devices:
        device_gaps = next((each for device, each in gaps if device == side.device), ())
        work = _module_on_device(trace, account.rank, side.device or 0, recorded)
        if work is not None and work.ms < MIN_PLACE_SHARE * side.ms(names.BUSY):
            work = None  # most of the device's work is in no module that is known
        idle = {cause: _gap_place(trace, account.rank, recorded, device_gaps, cause) for cause in _HOST_CAUSES}
        devices.append(
            replace(side, entries=tuple(_named(entry, {names.BUSY: work, **idle}) for entry in side.entries))
        )
    return replace(account, host=host, devices=tuple(devices))


_HOST_CAUSES = (names.HOST_LATE, names.BEFORE_FIRST, names.HOST_DATA, names.DRAINED)


def _named(entry: Entry, places: dict[str, _Place | None]) -> Entry:
    """Return an entry, and the entries inside it, with the places of their names."""
    entry = replace(entry, children=tuple(_named(child, places) for child in entry.children))
    place = places.get(entry.name)
    if place is None:
        return entry
    place_ms = min(place.ms, entry.ms or 0.0)  # kernels of several streams run at the same time
    return replace(entry, place=place.name, place_ms=place_ms, calls=place.calls, spans=place.spans)


# --- host ---------------------------------------------------------------------------------------------------------


def _on_host(
    trace: Trace, account: Iterations, recorded: Sequence[IterationWindow], phases: PhaseTimes
) -> tuple[Entry, ...]:
    outermost = _outermost_calls(trace, account.rank, recorded)
    entries = []
    for entry in account.host.entries:
        if entry.name in (names.DRAINING, names.UNLIKE):
            entries.append(entry)
            continue
        models = [child for child in entry.children if child.name.startswith(names.of_model(entry.name, ""))]
        if models:
            model = max(models, key=lambda child: child.ms or 0.0)
            name = model.name.removeprefix(names.of_model(entry.name, ""))
            entries.append(replace(entry, place=name, place_ms=model.ms))
            continue
        whole_ms = phases.ms(entry.name, len(recorded))
        if entry.name in names.PHASES and whole_ms > MOST_LONGER * (entry.ms or 0.0):
            entries.append(entry)
            continue
        candidates = [_operators(outermost, phases, entry.name, len(recorded))]
        if entry.name in (names.FORWARD, names.BACKWARD):
            python = _python(trace, account, recorded, phases, entry.name)
            is_most = python is not None and 2 * python.ms >= whole_ms
            candidates = [python if is_most else None, _module_on_host(trace, account, entry, whole_ms), *candidates]
        if entry.name in (names.OUTSIDE, names.BETWEEN):
            candidates.insert(0, _frame(trace, account.rank, recorded, phases, entry.name))
        if entry.name == names.OUTSIDE:
            candidates.insert(1, _line_in_step(trace, account, whole_ms))
        if entry.name == names.BETWEEN:
            line = _line(trace, account.rank, min(whole_ms or math.inf, entry.ms or 0.0))
            longer = max(1.0, whole_ms / entry.ms) if entry.ms else 1.0
            as_recorded = replace(line, ms=line.ms * longer) if line is not None else None
            candidates = [*candidates[:1], _largest_part(entry, whole_ms), as_recorded]
            if (
                entry.part(names.NOT_RECORDED) > (entry.ms or 0.0) / 2
            ):  # then recordings do not tell where most of it is
                missing = entry.children[0]
                whole_ms = entry.ms or 0.0
                candidates = [_Place(missing.place, missing.ms or 0.0, 1.0) if missing.place else None]
            entry = replace(entry, children=tuple(_with_line(part, line) for part in entry.children))
        place = next((each for each in candidates if each is not None and _is_large(each, entry, whole_ms)), None)
        if place is None and entry.part(names.NOT_RECORDED) <= (entry.ms or 0.0) / 2:
            place = _many(outermost, phases, entry.name, len(recorded))
        if place is None:
            entries.append(entry)
            continue
        # places are as recorded, the entry is as long as without recording
        factor = (entry.ms or 0.0) / whole_ms if whole_ms else 1.0
        if entry.name not in names.PHASES or account.devices:  # then it may be longer by what recordings do not show
            factor = min(1.0, factor)
        ms = min(place.ms * factor, entry.ms or 0.0)
        entries.append(replace(entry, place=place.name, place_ms=ms, calls=place.calls, spans=place.spans))
    return tuple(entries)


def _is_large(place: _Place, entry: Entry, whole_ms: float) -> bool:
    return place.ms >= MIN_PLACE_SHARE * (whole_ms or entry.ms or 0.0) and place.ms > 0


def _outermost_calls(trace: Trace, rank: int, recorded: Sequence[IterationWindow]) -> dict[str, Any]:
    """Return the outermost operators of the steps' threads: start, end, span, and the place of their name in `names`,
    which are in order."""
    steps = [window.step for window in recorded if window.step is not None]
    rung = recorded[0].rung
    condition = f"AND step IN ({', '.join(map(str, steps))}) AND coalesce(rung, {rung}) = {rung}" if steps else ""
    table = trace.con.execute(
        f"""
        SELECT CASE WHEN name IN {READS} THEN '{names.READING}' ELSE replace(name, '{_NODE}', '') END AS name,
               start_ns, start_ns + dur_ns AS end_ns, span_id
        FROM {tables(trace).spans} WHERE rank = ? AND level = {int(Level.OP)} AND kind IN ('{Kind.OP}', '{Kind.USER}')
          AND timed IS NOT false {condition}
        QUALIFY end_ns > coalesce(max(end_ns) OVER (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC
                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
        """,
        [rank],
    ).fetchnumpy()
    calls: dict[str, Any] = {name: np.asarray(column) for name, column in table.items()}
    calls["names"], calls["code"] = coded(calls.pop("name"))
    return calls


_GRAPH = "autograd::engine::"
_NODE = f"{_GRAPH}evaluate_function: "


def _operators(calls: dict[str, Any], phases: PhaseTimes, phase: str, count: int) -> _Place | None:
    """Return the operator with most time in a phase."""
    if phase not in phases.unions or not len(calls["code"]):
        return None
    inside = covered(phases.unions[phase], calls["start_ns"], calls["end_ns"])
    chosen = inside > 0
    if not chosen.any():
        return None
    codes = calls["code"][chosen]
    ns, numbers = np.bincount(codes, inside[chosen]), np.bincount(codes)
    place = int(np.argmax(ns))
    spans = tuple(map(str, calls["span_id"][chosen][codes == place][:MOST_SPANS]))
    return _Place(calls["names"][place], float(ns[place]) / count / 1e6, float(numbers[place]) / count, spans)


LEAST_OPERATORS = 20
"""Least number of operators in an iteration to be the place of an entry of which no single one takes much."""


def _many(calls: dict[str, Any], phases: PhaseTimes, phase: str, count: int) -> _Place | None:
    """Return all operators of a phase together, if they are many and take most of it."""
    if phase not in phases.unions or phase == names.DATA or not len(calls["code"]):
        return None
    inside = covered(phases.unions[phase], calls["start_ns"], calls["end_ns"])
    number, ms = float((inside > 0).sum()) / count, float(inside.sum()) / count / 1e6
    if number < LEAST_OPERATORS or ms < phases.ms(phase, count) / 2:
        return None
    return _Place(f"{number:,.0f} operators", ms, 1.0)


def _module_on_host(trace: Trace, account: Iterations, entry: Entry, recorded_ms: float) -> _Place | None:
    """Return the module, or the class of modules, with most time of its own on the host in a phase.

    Its share of the modules' true times, or of the phase if that is longer, as a part of the phase's recorded time.
    """
    if (account.rank, account.kind) != (trace.rank, trace.kind):
        return None
    rows = trace.con.execute(
        f"""
        WITH calls AS (
            SELECT span_id, parent_id, name, coalesce(type, name) AS type,
                   coalesce(true_ns, raw_ns, dur_ns)::DOUBLE AS ns, start_ns
            FROM merged WHERE level = {int(Level.LAYER)} AND kind = '{Kind.MODULE}'
              AND coalesce(phase, '{names.FORWARD}') = ?
        ), inner_calls AS (SELECT parent_id AS outer_id, sum(ns) AS ns FROM calls GROUP BY 1),
        own AS (
            SELECT calls.*, greatest(0, calls.ns - coalesce(inner_calls.ns, 0)) AS own_ns
            FROM calls LEFT JOIN inner_calls ON outer_id = span_id
        )
        SELECT type, sum(own_ns) / 1e6, count(*), count(DISTINCT name), any_value(name),
               list(span_id ORDER BY own_ns DESC)[:{MOST_SPANS}], (SELECT sum(own_ns) / 1e6 FROM own),
               max(own_ns) / 1e6, arg_max(name, own_ns), arg_max(span_id, own_ns)
        FROM own GROUP BY type ORDER BY 2 DESC LIMIT 1
        """,
        [entry.name],
    ).fetchall()
    if not rows:
        return None
    type_name, ms, calls, modules, name, spans, whole_ms, longest_ms, longest, span = rows[0]
    factor = recorded_ms / max(whole_ms, entry.ms or 0.0) if whole_ms else 1.0
    if modules > 1 and longest_ms > ms / 2:
        return _Place(f"{longest} ({type_name})", longest_ms * factor, 1.0, (span,))
    label = f"{name} ({type_name})" if modules == 1 and name != type_name else type_name
    return _Place(label, ms * factor, float(calls), tuple(spans))


def lines_of(trace: Trace, account: Iterations, phase: str) -> Lines | None:
    """Return the lines with most time in a phase of the steps of an account; None if none were traced."""
    run = trace.run.of_rank(account.rank)
    return main_lines(of_phase(run, account.kind, phase))


def inner_lines_of(trace: Trace, account: Iterations, phase: str) -> Iterator[tuple[str, float, bool]]:
    """Yield the lines inside functions of the program in a phase of the steps of an account, see `inner_lines`."""
    run = trace.run.of_rank(account.rank)
    yield from inner_lines(of_phase(run, account.kind, phase))


def _line_in_step(trace: Trace, account: Iterations, whole_ms: float) -> _Place | None:
    """Return the lines of the program with most of the time of a step outside its phases, their part of `whole_ms`."""
    lines = lines_of(trace, account, names.OUTSIDE)
    if lines is None:
        return None
    return _Place(", ".join(filter(None, (lines.place, lines.calls))), whole_ms * _share(lines), 1.0)


def _share(lines: Lines) -> float:
    """Return the share of a place in the time of all lines."""
    return lines.place_share * lines.ns / lines.all_ns


WAITING_FOR_PYTHON = "Python outside operators, or waits for its lock (GIL), which other threads hold"

USUAL_NS = 40_000
"""Most nanoseconds from one operator to the next for Python, a framework's dispatch and the recording around a call."""


def _python(
    trace: Trace, account: Iterations, recorded: Sequence[IterationWindow], phases: PhaseTimes, phase: str
) -> _Place | None:
    """Return the line of the program inside a phase, and the time of the phase that no operator of torch covers.

    Where several threads run steps, others may hold Python's lock meanwhile, so that no line has this time.
    `USUAL_NS` of each gap between operators are not counted. A function of autograd that is written in Python, and a
    node of it, are operators that contain others: only these count. Code that `torch.compile` made has none.
    """
    run = trace.run.of_rank(account.rank)
    lines = lines_of(trace, account, phase)
    if lines is None or not lines.is_inside or phase not in phases.unions or run.compilations:
        return None
    steps = ", ".join(str(window.step) for window in recorded if window.step is not None)
    columns = trace.con.execute(
        f"""
        SELECT start_ns, start_ns + dur_ns AS end_ns FROM {tables(trace).spans}
        WHERE rank = ? AND device IS NULL AND step IN ({steps or "NULL"}) AND (
              level = {int(Level.OP)} AND kind = '{Kind.OP}' AND contains(name, '::')
                  AND NOT starts_with(name, '{_GRAPH}')
              OR level = {int(Level.RUNTIME)})
        """,
        [account.rank],
    ).fetchnumpy()
    begins, stops = (np.asarray(columns[name], np.int64) for name in ("start_ns", "end_ns"))
    if not covered(phases.unions[phase], begins, stops).any():
        return None
    starts, ends = without(phases.unions[phase], union(begins, stops))
    ns = float(np.maximum(0, ends - starts - USUAL_NS).sum())
    name = ", ".join(filter(None, (f"Python outside operators, {lines.place}", lines.calls)))
    if overlap.threads(trace.con).get((account.rank, account.kind or 0), 1) > 1:
        name = WAITING_FOR_PYTHON
    return _Place(name, ns / len(recorded) / 1e6, 1.0)


def _frame(
    trace: Trace, rank: int, recorded: Sequence[IterationWindow], phases: PhaseTimes, phase: str
) -> _Place | None:
    """Return the call of Python that covers most of the time in no phase, in traces that have long calls."""
    frames = _frames_of(trace, rank, recorded)
    if not frames or phase not in phases.unions:
        return None
    starts, ends = (np.array([frame[place] for frame in frames], np.int64) for place in (1, 2))
    inside = covered(phases.unions[phase], starts, ends)
    whole = max(1.0, float((phases.unions[phase][1] - phases.unions[phase][0]).sum()))
    candidates = [index for index in range(len(frames)) if inside[index] >= MIN_FRAME_SHARE * whole]
    if not candidates:
        return None
    best = min(candidates, key=lambda index: int(ends[index] - starts[index]))
    return _Place(frames[best][0], float(inside[best]) / len(recorded) / 1e6, 1.0)


def _frames_of(trace: Trace, rank: int, recorded: Sequence[IterationWindow]) -> list[tuple[str, int, int]]:
    """Return the long calls of Python on the threads of the steps: name, start and end."""
    run = trace.run.of_rank(rank)
    threads = {window.thread for window in recorded} | {(window.thread or 0) & 0xFFFFFFFF for window in recorded}
    return [
        (frame.name, frame.start_ns, frame.start_ns + frame.dur_ns)
        for frame in run.frames
        if frame.thread in threads or None in threads
    ]


_NO_PARTS = (names.OUTSIDE_OPERATORS, names.OTHER_OPERATORS, names.NOT_RECORDED, names.ASLEEP)
"""Parts of the time between steps that are no place: where the program is, its lines tell."""


def _largest_part(entry: Entry, whole_ms: float) -> _Place | None:
    """Return the part of the time between steps that takes most of it; as long as in recordings, see `_on_host`."""
    part = max(entry.children, key=lambda each: each.ms or 0.0, default=None)
    if part is None or part.name in _NO_PARTS or part.name in names.STATES or not entry.ms:
        return None
    factor = max(1.0, whole_ms / entry.ms)
    return _Place(part.name, (part.ms or 0.0) * factor, part.calls or 1.0, part.spans)


def _with_line(part: Entry, line: _Place | None) -> Entry:
    """Return a part of the time between steps that is outside operators with the line that takes most of it."""
    if (
        line is None
        or part.name not in (names.OUTSIDE_OPERATORS, names.ASLEEP)
        or not _is_large(line, part, part.ms or 0.0)
    ):
        return part
    return replace(part, place=line.name, place_ms=min(line.ms, part.ms or 0.0))


def _line(trace: Trace, rank: int, whole_ms: float) -> _Place | None:
    """Return the lines of the program with most of the time between steps, and their part of `whole_ms`."""
    run = trace.run.of_rank(rank)
    lines = main_lines(run.between)
    if lines is None or run.between is None:
        return None
    calls = f", {lines.calls}" if lines.calls else ""
    # tracing makes Python slower, and these gaps may be others than most
    ms = min(lines.place_share * lines.ns / run.between.gaps / 1e6, whole_ms * _share(lines))
    return _Place(f"{lines.place}{calls}", ms, 1.0)


# --- devices ------------------------------------------------------------------------------------------------------


def _module_on_device(trace: Trace, rank: int, device: int, recorded: Sequence[IterationWindow]) -> _Place | None:
    """Return the class of modules, the module, or the annotation, whose own kernels take most of a device's time."""
    count = len(recorded)
    steps = [str(window.step) for window in recorded if window.step is not None]
    of_steps = f"AND w.step IN ({', '.join(steps)})" if len(steps) == count else ""
    rows = trace.con.execute(
        f"""
        WITH work AS (
            SELECT coalesce(nullif(layer.type, '{ANNOTATION}'), layer.name) AS type, layer.name, w.dur_ns, w.span_id
            FROM {tables(trace).device_work} w JOIN spans layer ON layer.rank = w.rank AND layer.trace_id = w.trace_id
                 AND layer.span_id = w.layer_id AND layer.level = {int(Level.LAYER)}
            WHERE w.rank = ? AND coalesce(w.device, 0) = ? {of_steps}
        )
        SELECT type, sum(dur_ns)::DOUBLE / 1e6, count(*)::DOUBLE, count(DISTINCT name), any_value(name),
               list(span_id ORDER BY dur_ns DESC)[:{MOST_SPANS}] FROM work GROUP BY type ORDER BY 2 DESC LIMIT 1
        """,
        [rank, device],
    ).fetchall()
    if not rows:
        return None
    type_name, ms, calls, modules, name, spans = rows[0]
    label = f"{name} ({type_name})" if modules == 1 and name != type_name else type_name
    return _Place(label, ms / count, calls / count, tuple(spans))


def _gap_place(
    trace: Trace, rank: int, recorded: Sequence[IterationWindow], gaps: Sequence[Gap], cause: str
) -> _Place | None:
    """Return what the host was in during the longest gap of a cause, if that gap is a large part of the cause."""
    chosen = [gap for gap in gaps if gap.cause == cause]
    if not chosen:
        return None
    longest = max(chosen, key=lambda gap: gap.end_ns - gap.start_ns)
    length = longest.end_ns - longest.start_ns
    total = sum(gap.end_ns - gap.start_ns for gap in chosen)
    if length * len(recorded) < MIN_PLACE_SHARE * total:
        return None
    middle = (longest.start_ns + longest.end_ns) // 2
    rows = trace.con.execute(
        f"""
        SELECT name, start_ns, start_ns + dur_ns, span_id FROM {tables(trace).spans}
        WHERE rank = ? AND device IS NULL AND coalesce(thread, -1) = ? AND start_ns <= ? AND start_ns + dur_ns > ?
          AND kind NOT IN ('{Kind.RUN}', '{Kind.STEP}', '{Kind.BEFORE}', '{Kind.OVERHEAD}', '{Kind.ALLOC}')
        """,
        [rank, longest.thread, middle, middle],
    ).fetchall()
    rows += [(*frame, None) for frame in _frames_of(trace, rank, recorded) if frame[1] <= middle < frame[2]]
    fitting = [
        row
        for row in rows
        if min(row[2], longest.end_ns) - max(row[1], longest.start_ns) >= MIN_FRAME_SHARE * length
        and row[2] - row[1] <= MAX_FRAME_RATIO * length
    ]
    if not fitting:
        return None

    def covers(row: tuple[str, int, int, str | None]) -> int:
        return min(row[2], longest.end_ns) - max(row[1], longest.start_ns)

    # the innermost call among those that cover about as much as the one that covers most
    most = max(map(covers, fitting))
    best = min((row for row in fitting if covers(row) >= NEARLY * most), key=lambda row: (row[2] - row[1], row[1]))
    ns = min(best[2], longest.end_ns) - max(best[1], longest.start_ns)
    return _Place(str(best[0]), ns / 1e6, 1.0, (best[3],) if best[3] else ())
