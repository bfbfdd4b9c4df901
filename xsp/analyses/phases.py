"""Where a step's time goes, the first question: forward, backward, optimizer, waiting for data, and the rest.

The times are entries of the account: each instant counts once, for the running call that began last, also if phases
nest (the closure of an optimizer runs forward and backward) or run on several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xsp import account
from xsp.account import entries as names
from xsp.account.sentences import parts
from xsp.account.windows import windows
from xsp.analyses.contract import Table, analysis, values
from xsp.schema import Kind, Level
from xsp.store.figures import own_rung
from xsp.store.iterations import IS_ALIKE
from xsp.store.trace import Trace

FORWARD, BACKWARD, OPTIMIZER, DATA = names.FORWARD, names.BACKWARD, names.OPTIMIZER, names.DATA
REST, BETWEEN, ITERATION = names.OUTSIDE, names.BETWEEN, names.ITERATION

PHASE_OF_KIND = {
    Kind.FORWARD.value: FORWARD, Kind.BACKWARD.value: BACKWARD, Kind.OPTIMIZER.value: OPTIMIZER, Kind.DATA.value: DATA,
}  # fmt: skip
"""Kind of a call that is a phase of its step → the phase."""

PARTS = 10
"""Parts into which `phases-over-time` divides a run."""

_COLUMNS = {
    "phase": "VARCHAR", "calls": "BIGINT", **dict.fromkeys(("ms", "percent_of_iteration", "waiting_ms"), "DOUBLE"),
    "place": "VARCHAR", "place_ms": "DOUBLE", "source": "VARCHAR",
}  # fmt: skip


@analysis("phases", "Phases of a step", Level.MODEL)
def phases(trace: Trace) -> Table:
    """Where the host's time of an iteration goes: forward, backward, optimizer, waiting for data, and the rest.

    The rows are the host's side of the account (see `account`), largest first, and add up to the last one, the
    iteration; of several ranks, to that of the slowest. `waiting for the device` is the time in calls that wait for a
    device and the time after the step until it has finished; `waiting_ms` says how much of it is in each phase, beside
    its `ms`. `outside the phases` is the time of the step in no phase: Python, moving data, losses outside the model.
    `waiting for data` is waiting for the data loader, before the step or in it. `between steps` is absent where it is
    unknown. `calls` is the number of calls in a step (gradient accumulation has several), null for phases without calls
    of the model level, which come from modules or operators. `place` takes most of the phase, `place_ms` is its time.
    `source` says which iterations the time was measured in.
    """
    main = account.of(trace).job
    if main is None or main.time.ms is None:
        return values(trace, "phases_of_step", _COLUMNS, [])
    kinds = ", ".join(f"'{kind}'" for kind in PHASE_OF_KIND)
    counts = trace.sql(f"SELECT kind, count(*) FROM merged WHERE kind IN ({kinds}) GROUP BY kind").fetchall()
    calls = {PHASE_OF_KIND[kind]: count for kind, count in counts}
    rows: list[tuple[Any, ...]] = []
    for name, ms in parts(main.host).items():
        entry = next((entry for entry in main.host.entries if entry.name == name), None)
        details = (None, None, None) if entry is None else (entry.place, entry.place_ms, entry.source)
        waiting_ms = entry.part(names.WAITING) if entry is not None and main.device is not None else None
        rows.append((name, calls.get(name), ms, main.percent(ms), waiting_ms, *details))
    rows.append((ITERATION, None, main.time.ms, 100.0, None, None, None, main.time.source))
    return values(trace, "phases_of_step", _COLUMNS, rows)


# --- over the run ---------------------------------------------------------------------------------------------

_PHASES_MS = {FORWARD: "forward_ms", BACKWARD: "backward_ms", OPTIMIZER: "optimizer_ms", DATA: "data_ms"}
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
    has a loop; on a processor the others are, too, if phases were timed. Else these are means over its recorded steps
    with the model level only, null without any. A phase without a call of the model level is null, and its time is in
    the rest. `at_s` is the start of the part relative to the first step.
    """
    steps = _recorded_steps(trace)
    present = [phase for phase in _PHASES_MS if steps and phase in steps[0].phase_ns]
    main = account.of(trace).main
    are_timed = main is not None and not main.devices and bool(present) and set(present) <= set(_PHASES_MS)
    stretches = _parts_of_loop(trace) or _parts_of_steps(steps)
    rows: list[tuple[Any, ...]] = []
    for part in stretches:
        recorded = [step for step in steps if part.first_step <= step.number <= part.last_step]
        means = {phase: _mean_ms(step.phase_ns[phase] for step in recorded) for phase in present}
        step_ms = _mean_ms(step.ns for step in recorded)
        rest_ms = _mean_ms(step.phase_ns[REST] for step in recorded)
        if are_timed and part.timed_ms is not None:
            step_ms, *timed_ms, data_ms = part.timed_ms
            means |= {phase: ms for phase, ms in zip(names.PHASES, timed_ms, strict=True) if phase in present}
            rest_ms = max(0.0, step_ms - sum(timed_ms) - data_ms)
        if part.data_ms is not None and (part.data_ms or DATA in means):
            means[DATA] = part.data_ms
        rows.append(
            (
                len(rows) + 1,
                part.first_step,
                part.last_step,
                (part.start_ns - stretches[0].start_ns) / 1e9,
                part.steps,
                len(recorded),
                part.iteration_ms,
                step_ms,
                *(means.get(phase) for phase in _PHASES_MS),
                rest_ms,
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
    timed_ms: Sequence[float] | None = None
    """Means of steps that were not recorded: of the step, its phases, and the wait for data in it; None if unknown."""


def _parts_of_loop(trace: Trace) -> list[_Part]:
    """Return the parts of a run that has a loop; empty for other runs."""
    own = "FILTER (forward_ns IS NOT NULL)"
    columns = ("dur_ns", "forward_ns", "backward_ns", "optimizer_ns", "greatest(0, data_ns - coalesce(before_ns, 0))")
    timed = ", ".join(f"sum(u.steps * {column}) {own} / sum(u.steps) {own} / 1e6" for column in columns)
    rows = trace.con.execute(
        f"""
        WITH cut AS (
            -- by steps, of which a row may have many: a row belongs to the part of its middle
            SELECT step, steps, start_ns,
                   floor({PARTS} * (sum(steps) OVER (ORDER BY step) - steps / 2) / sum(steps) OVER ()) AS part
            FROM loop WHERE {IS_ALIKE}
        ), means AS (
            SELECT part, sum(u.steps * iteration_ns) / sum(u.steps) AS iteration_ns,
                   sum(u.steps * data_ns) / sum(u.steps) AS data_ns,
                   sum(u.steps * greatest(coalesce(before_ns, 0) - data_ns, 0)) / sum(u.steps) AS between_ns,
                   CASE WHEN count(forward_ns) > 0 THEN [{timed}] END AS timed_ms
            FROM (SELECT * FROM undisturbed WHERE {IS_ALIKE}) u JOIN cut USING (step) GROUP BY part
        ), bounds AS (
            SELECT part, min(step) AS first, max(step + steps - 1) AS last, min(start_ns) AS start_ns,
                   sum(steps) AS steps
            FROM cut GROUP BY part
        )
        SELECT first, last, start_ns, steps, iteration_ns / 1e6, data_ns / 1e6, between_ns / 1e6, timed_ms
        FROM bounds LEFT JOIN means USING (part) ORDER BY part
        """
    ).fetchall()
    return [_Part._make(row) for row in rows]


def _parts_of_steps(steps: Sequence[_RecordedStep]) -> list[_Part]:
    """Return the parts of a run without a loop, from its recorded steps alone."""
    count = min(PARTS, len(steps))
    groups = [steps[part * len(steps) // count : (part + 1) * len(steps) // count] for part in range(count)]
    return [_Part(group[0].number, group[-1].number, group[0].start_ns, len(group)) for group in groups]


def _mean_ms(nanoseconds: Iterable[int]) -> float | None:
    """Return the mean in milliseconds; None without values."""
    values_ns = list(nanoseconds)
    return sum(values_ns) / len(values_ns) / 1e6 if values_ns else None


class _RecordedStep(NamedTuple):
    """A recorded step: its number, start, duration, and the time of each phase and of none, in nanoseconds."""

    number: int
    start_ns: int
    ns: int
    phase_ns: dict[str, int]


def _recorded_steps(trace: Trace) -> list[_RecordedStep]:
    """Return the timed steps that recorded nothing deeper than the model level, in order."""
    from xsp.account.onhost import host_times  # it needs NumPy, which tables do not load before they are asked for

    rung = own_rung(Level.MODEL, trace.rungs)
    found = [
        window for window in windows(trace)
        if window.step is not None and window.rank == trace.rank and window.rung == (rung.level if rung else -1)
    ]  # fmt: skip
    phase_ns = host_times(trace, trace.rank, found, [0] * len(found)).phase_ns if found else {}
    return [
        _RecordedStep(
            window.step or 0, window.step_ns, window.end_ns - window.step_ns,
            {phase: int(ns[index]) for phase, ns in phase_ns.items()},
        )
        for index, window in enumerate(found)
    ]  # fmt: skip
