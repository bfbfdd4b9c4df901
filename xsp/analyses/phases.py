"""Where a step's time goes, the first question: forward, backward, optimizer, waiting for data, and the rest.

Phases nest (the closure of an optimizer runs forward and backward), and calls on several threads run at the same time.
Each instant counts once: for the running call that began last.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xsp import stats
from xsp.analyses.contract import Table, analysis, values
from xsp.schema import Kind, Level
from xsp.store import selftimes
from xsp.store.figures import own_rung
from xsp.store.iterations import IS_ALIKE, UNDISTURBED, iterations
from xsp.store.trace import Trace
from xsp.store.views import NS
from xsp.texts import milliseconds, percent_of

FORWARD, BACKWARD, OPTIMIZER, DATA = (str(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.DATA))
REST, BETWEEN, ITERATION = "rest of the step", "between steps", "the iteration"
ROWS = (FORWARD, BACKWARD, OPTIMIZER, DATA, REST, BETWEEN, ITERATION)

CALLS, LAYERS, OPERATORS, LOOP, RECORDED = "calls", "layers", "operators", "loop", "recorded steps"
"""Sources of a phase: calls of the model level; if there are none, the outermost layers or operators; the loop."""

PARTS = 10
"""Parts into which `phases-over-time` divides a run."""


class PhaseCall(NamedTuple):
    """A call that is a phase of its step."""

    phase: str
    thread: int | None
    start_ns: int
    end_ns: int
    ns: float
    """Its true duration if known, else the recorded one."""


def exclusive_times(intervals: Iterable[PhaseCall]) -> dict[str, float]:
    """Return the time of each phase in nanoseconds; each instant counts for the innermost call only.

    Calls on one thread nest, so the true durations of inner calls are subtracted from that of the outer call. Among
    calls that run at once on several threads, the time counts for the call that began last.
    """
    ordered = sorted(intervals, key=lambda interval: (interval.start_ns, -interval.end_ns))
    own_ns = [interval.ns for interval in ordered]
    thread_ns: list[int] = [0] * len(ordered)
    threads: dict[int | None, list[int]] = defaultdict(list)
    for index, interval in enumerate(ordered):
        threads[interval.thread].append(index)
    for indices in threads.values():
        stack: list[int] = []
        for index in indices:
            while stack and ordered[stack[-1]].end_ns <= ordered[index].start_ns:
                stack.pop()
            if stack:
                own_ns[stack[-1]] -= ordered[index].ns
            stack.append(index)
        for index, ns in _innermost_ns([ordered[index] for index in indices]).items():
            thread_ns[indices[index]] = ns
    overall_ns = _innermost_ns(ordered) if len(threads) > 1 else None
    totals: dict[str, float] = defaultdict(float)
    for index, interval in enumerate(ordered):
        share = 1.0
        if overall_ns is not None and thread_ns[index]:
            share = overall_ns.get(index, 0) / thread_ns[index]
        totals[interval.phase] += max(0.0, own_ns[index]) * share
    return dict(totals)


def _innermost_ns(ordered: Sequence[PhaseCall]) -> dict[int, int]:
    """Return, by place, the nanoseconds in which an interval is the running one that began last."""
    marks = sorted(
        [(interval.start_ns, 1, index) for index, interval in enumerate(ordered)]
        + [(interval.end_ns, 0, index) for index, interval in enumerate(ordered) if interval.end_ns > interval.start_ns]
    )
    innermost_ns: dict[int, int] = defaultdict(int)
    running: list[int] = []
    previous_ns = 0
    for time_ns, is_start, index in marks:
        if running:
            innermost_ns[running[-1]] += time_ns - previous_ns
        previous_ns = time_ns
        if is_start and ordered[index].end_ns > ordered[index].start_ns:
            running.append(index)
        elif not is_start:
            running.remove(index)
    return innermost_ns


_COLUMNS = {
    "phase": "VARCHAR",
    "calls": "BIGINT",
    **dict.fromkeys(("ms", "percent_of_iteration", "device_busy_ms"), "DOUBLE"),
    "source": "VARCHAR",
}


@analysis("phases", "Phases of a step", Level.MODEL)
def phases(trace: Trace) -> Table:
    """Where the time goes: forward, backward, optimizer, waiting for data, the rest of the step, and between steps.

    Each instant counts once, for the innermost call: forward and backward inside an optimizer's closure do not count as
    optimizer. Several calls in a step (gradient accumulation) are summed. `rest of the step` is the time in no phase:
    Python, moving data, losses outside the model, waiting for a device. `data` is waiting for the data loader, before
    the step or in it.

    `percent_of_iteration` is a percentage of the last row: a step and the time before it, as the program runs when
    nothing is recorded. If the trace has no loop, that is the step and the waits for its data, and `between steps` is
    null. The shares of the phases in a step come from recorded steps, the duration of the step from the loop. If the
    recorded phases took longer than a recorded step, as in ranks that wait for each other, they share the step.
    `device_busy_ms` is the time in which a device ran work that the phase launched. `source` is the source of a
    phase: calls of the model level, or, in traces of other profilers, the outermost layers or operators.
    """
    start_ns, end_ns, step_ns = _step(trace)
    intervals, sources = _merged_phases(trace)
    in_step = [interval for interval in intervals if interval.end_ns > start_ns and interval.start_ns < end_ns]
    phase_ns: dict[str, float | None] = {**exclusive_times(in_step)}
    rest_ns = max(0.0, step_ns - sum(filter(None, phase_ns.values())))
    before_ns = sum(interval.ns for interval in intervals) - sum(interval.ns for interval in in_step)
    if DATA in sources:
        phase_ns[DATA] = (phase_ns.get(DATA) or 0.0) + before_ns
    phase_ns |= {REST: rest_ns, BETWEEN: None, ITERATION: step_ns + before_ns}
    sources[ITERATION] = RECORDED
    loop = next((row for row in iterations(trace.con) if (row.rank, row.kind) == (trace.rank, trace.kind)), None)
    if loop is not None and loop.mean_ns is not None:
        phase_ns |= {BETWEEN: loop.between_ns, ITERATION: loop.mean_ns}
        recorded_ns = next((rung.step_ns for rung in trace.rungs if rung.level >= Level.MODEL), None)
        computing = {phase: phase_ns.get(phase) or 0.0 for phase in (FORWARD, BACKWARD, OPTIMIZER) if phase in phase_ns}
        # the phases are true times of the merged step, which differ from the time of a step at one rung: ranks that
        # wait for each other wait in backward while the slowest one records
        total_ns = max(recorded_ns or step_ns, sum(computing.values()))
        if total_ns and loop.step_ns:  # the shares come from recorded steps, the duration of a step from bare ones
            phase_ns |= {phase: ns * loop.step_ns / total_ns for phase, ns in computing.items()}
        if loop.data_ns or DATA in sources:  # without a data loader, waits for data are unknown
            phase_ns[DATA], sources[DATA] = loop.data_ns, LOOP
        remaining_ns = loop.mean_ns - sum(phase_ns.get(phase) or 0.0 for phase in (*_PHASES_MS, BETWEEN))
        phase_ns[REST] = remaining_ns if remaining_ns >= 0.5 else 0.0  # drop rounding errors
        sources |= {BETWEEN: LOOP, ITERATION: LOOP}
    calls, busy = Counter(interval.phase for interval in intervals), _busy_ns(trace, sources)
    rows = [
        (
            phase,
            calls.get(phase),
            milliseconds(ns),
            percent_of(ns, phase_ns[ITERATION]),
            milliseconds(busy.get(phase)),
            sources.get(phase),
        )
        for phase, ns in ((phase, phase_ns[phase]) for phase in ROWS if phase in phase_ns)
    ]
    return values(trace, "phases_of_step", _COLUMNS, rows)


def _step(trace: Trace) -> tuple[int, int, float]:
    """Return the start, the end and the true duration of the merged step, in nanoseconds."""
    rows = trace.sql(
        f"SELECT start_ns, start_ns + dur_ns, {NS}::DOUBLE FROM merged WHERE kind = '{Kind.STEP}' ORDER BY start_ns"
    ).fetchall()
    if not rows:  # a trace of another profiler, without steps
        rows = trace.sql(
            f"SELECT min(start_ns), max(start_ns + dur_ns), (max(start_ns + dur_ns) - min(start_ns))::DOUBLE "
            f"FROM merged WHERE device IS NULL AND level >= {int(Level.MODEL)}"
        ).fetchall()
    start_ns, end_ns, ns = rows[0]
    return start_ns, end_ns, ns


def _merged_phases(trace: Trace) -> tuple[list[PhaseCall], dict[str, str]]:
    """Return the phases of the merged step, and the source of each phase."""
    kinds = ", ".join(f"'{kind}'" for kind in (FORWARD, BACKWARD, OPTIMIZER, DATA))
    intervals = _intervals(trace, f"SELECT kind, thread, {_TIMES} FROM merged WHERE kind IN ({kinds})")
    sources = {interval.phase: CALLS for interval in intervals}
    sides = {FORWARD: "phase IS NULL OR phase = 'forward'", BACKWARD: "phase = 'backward'"}
    if FORWARD not in sources:
        intervals += _outermost_spans(
            trace,
            sources,
            (FORWARD, LAYERS),
            f"SELECT '{FORWARD}', thread, {_TIMES} FROM merged WHERE level = {int(Level.LAYER)} AND "
            f"coalesce(depth, 0) = 0 AND ({sides[FORWARD]})",
        )
    for phase, condition in sides.items():
        if phase not in sources:
            selftimes.create_table(trace)
            intervals += _outermost_spans(
                trace,
                sources,
                (phase, OPERATORS),
                f"SELECT '{phase}', thread, {_TIMES} FROM own_times JOIN merged USING (span_id) "
                f"WHERE outer_id IS NULL AND ({condition})",
            )
    return intervals, sources


_TIMES = f"start_ns, start_ns + dur_ns, {NS}::DOUBLE"


def _outermost_spans(trace: Trace, sources: dict[str, str], entry: tuple[str, str], query: str) -> list[PhaseCall]:
    """Return the intervals of a query, and note their source in `sources` if there are any.

    Intervals in a call of the data loader (operators that make a batch without workers) are `data`, and left out here.
    """
    data = f"FROM merged loader WHERE loader.kind = '{DATA}' AND loader.thread IS NOT DISTINCT FROM candidate.thread"
    intervals = _intervals(
        trace,
        f"FROM ({query}) candidate(phase, thread, start_ns, end_ns, ns) WHERE NOT EXISTS (SELECT 1 {data} "
        "AND loader.start_ns <= candidate.start_ns AND candidate.end_ns <= loader.start_ns + loader.dur_ns)",
    )
    if intervals:
        phase, source = entry
        sources[phase] = source
    return intervals


def _intervals(trace: Trace, query: str) -> list[PhaseCall]:
    return [PhaseCall._make(row) for row in trace.sql(query).fetchall()]


def _busy_ns(trace: Trace, sources: dict[str, str]) -> dict[str, float]:
    """Return, by phase, the time in which at least one kernel or copy of the phase ran; empty without a device."""
    if not trace.has(Level.KERNEL):
        return {}
    default_phase = FORWARD if sources.get(FORWARD) not in (None, CALLS) else REST
    rows = trace.sql(
        f"""
        WITH work AS (
            SELECT unnest([coalesce(phase, '{default_phase}'), '{ITERATION}']) AS phase, start_ns,
                   start_ns + dur_ns AS end_ns, span_id FROM merged WHERE level = {int(Level.KERNEL)}
        ), runs AS (
            SELECT *, max(end_ns) OVER (PARTITION BY phase ORDER BY start_ns, span_id
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns FROM work
        )
        SELECT phase, sum(greatest(end_ns - greatest(start_ns, coalesce(until_ns, start_ns)), 0))::DOUBLE
        FROM runs GROUP BY phase
        """
    ).fetchall()
    return dict(rows)


# --- over the run ---------------------------------------------------------------------------------------------

_PHASES_MS = {phase: f"{phase}_ms" for phase in (FORWARD, BACKWARD, OPTIMIZER, DATA)}
_PART_COLUMNS = {
    "part": "INTEGER",
    **dict.fromkeys(("first_step", "last_step"), "BIGINT"),
    "at_s": "DOUBLE",
    **dict.fromkeys(("steps", "recorded"), "INTEGER"),
    **dict.fromkeys(("iteration_ms", "step_ms", *_PHASES_MS.values(), "rest_ms", "between_ms"), "DOUBLE"),
}


@analysis("phases-over-time", "Phases over the run", Level.MODEL)
def phases_over_time(trace: Trace) -> Table:
    """The phases of the steps in each tenth of the run, to show a drift.

    `iteration_ms`, `data_ms` and `between_ms` are means over the steps of the part that were not recorded, if the run
    has a loop. The others are means over its recorded steps with the model level only, as recorded; they are null if a
    part has none. A phase without a call of the model level is null, and its time is in the rest. `at_s` is the start
    of the part relative to the first step.
    """
    steps = _recorded_steps(trace)
    present = {phase for step in steps for phase in step.phases}
    parts = _parts_of_loop(trace) or _parts_of_steps(steps)
    rows: list[tuple[Any, ...]] = []
    for part in parts:
        recorded = [step for step in steps if part.first_step <= step.step <= part.last_step]
        means = {
            phase: _mean(step.phase_ns[phase] for step in recorded)
            for phase in (*_PHASES_MS, REST)
            if phase in present | {REST}
        }
        if part.data_ms is not None and (part.data_ms or DATA in present):
            means[DATA] = part.data_ms
        rows.append(
            (
                len(rows) + 1,
                part.first_step,
                part.last_step,
                (part.start_ns - parts[0].start_ns) / 1e9,
                part.steps,
                len(recorded),
                part.iteration_ms,
                _mean(step.ns for step in recorded),
                *(means.get(phase) for phase in (*_PHASES_MS, REST)),
                part.between_ms,
            )
        )
    return values(trace, "phases_over_time", _PART_COLUMNS, rows)


class _Part(NamedTuple):
    """A part of the run: its first and last step, start, number of steps, and the means of its loop."""

    first_step: int
    last_step: int
    start_ns: int
    steps: int
    iteration_ms: float | None = None
    data_ms: float | None = None
    between_ms: float | None = None


def _parts_of_loop(trace: Trace) -> list[_Part]:
    """Return the parts of a run that has a loop; empty for other runs."""
    rows = trace.con.execute(
        f"""
        WITH {UNDISTURBED}, cut AS (
            -- by steps, of which a row may have many: a row belongs to the part of its middle
            SELECT step, steps, start_ns,
                   floor({PARTS} * (sum(steps) OVER (ORDER BY step) - steps / 2) / sum(steps) OVER ()) AS part
            FROM loop WHERE {IS_ALIKE}
        ), means AS (
            SELECT part, sum(u.steps * iteration_ns) / sum(u.steps) AS iteration_ns,
                   sum(u.steps * data_ns) / sum(u.steps) AS data_ns,
                   sum(u.steps * greatest(coalesce(before_ns, 0) - data_ns, 0)) / sum(u.steps) AS between_ns
            FROM (SELECT * FROM undisturbed WHERE {IS_ALIKE}) u JOIN cut USING (step) GROUP BY part
        ), bounds AS (
            SELECT part, min(step) AS first, max(step + steps - 1) AS last, min(start_ns) AS start_ns,
                   sum(steps) AS steps
            FROM cut GROUP BY part
        )
        SELECT first, last, start_ns, steps, iteration_ns / 1e6, data_ns / 1e6, between_ns / 1e6
        FROM bounds LEFT JOIN means USING (part) ORDER BY part
        """
    ).fetchall()
    return [_Part._make(row) for row in rows]


def _parts_of_steps(steps: Sequence[_RecordedStep]) -> list[_Part]:
    """Return the parts of a run without a loop, from its recorded steps alone."""
    count = min(PARTS, len(steps))
    groups = [steps[part * len(steps) // count : (part + 1) * len(steps) // count] for part in range(count)]
    return [_Part(group[0].step, group[-1].step, group[0].start_ns, len(group)) for group in groups]


def _mean(nanoseconds: Iterable[float]) -> float | None:
    """Return the trimmed mean in milliseconds; None without values."""
    durations = list(nanoseconds)
    return stats.trimmed_mean(durations) / 1e6 if durations else None


class _RecordedStep(NamedTuple):
    """A recorded step: its number, start, duration, and the time of each phase, in nanoseconds."""

    step: int
    start_ns: int
    ns: float
    phase_ns: dict[str, float]
    phases: set[str]


def _recorded_steps(trace: Trace) -> list[_RecordedStep]:
    """Return the timed steps that recorded nothing deeper than the model level, in order."""
    rung = own_rung(Level.MODEL, trace.rungs)
    rows = trace.sql(
        f"""
        SELECT trace_id, step, kind, thread, start_ns, start_ns + dur_ns, dur_ns::DOUBLE FROM alike_spans
        WHERE level = {int(Level.MODEL)} AND timed AND status = 'ok' AND rung = {rung.level if rung else -1}
        ORDER BY step, trace_id
        """
    ).fetchall()
    recorded = []
    for (_, number), group in itertools.groupby(rows, key=lambda row: row[:2]):
        spans = [PhaseCall._make(row[2:]) for row in group]
        step = next((span for span in spans if span.phase == Kind.STEP), None)
        if step is None:
            continue
        parts = [span for span in spans if span.phase in _PHASES_MS]
        in_step = [span for span in parts if span.end_ns > step.start_ns and span.start_ns < step.end_ns]
        phase_ns = defaultdict(float, exclusive_times(in_step))
        phase_ns[REST] = max(0.0, step.ns - sum(phase_ns.values()))
        phase_ns[DATA] += sum(span.ns for span in parts) - sum(span.ns for span in in_step)
        recorded.append(_RecordedStep(number, step.start_ns, step.ns, phase_ns, {span.phase for span in parts}))
    return recorded
