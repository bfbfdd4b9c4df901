"""The energy of a step of the program, from the device's own counter and steps that ran without recording.

The counter (`gpu.energy`) is an integral, so nothing between two of its updates is missed, unlike with readings of the
power. It is updated far less often than a step ends: on an H200 every 100 ms, in mJ. So it gives the mean power over
several steps, and power times the time of an iteration is the energy of one.

Energy by layer is not derived. A layer takes microseconds to milliseconds, each update covers many layers, and all
steps have the same layers in the same order, so that the updates cannot be solved for the layers. A share by time would
assume that all layers draw the same power.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xsp import stats
from xsp.analyses.contract import Table, analysis, values
from xsp.analyses.loop import STEP_SOURCES, kinds_of, reason_without_loop, scope_names
from xsp.samples.nvml import NEEDS, REASONS_SQL
from xsp.store.iterations import Iteration, iterations
from xsp.store.loop import BARE
from xsp.store.trace import Trace

ENERGY = "gpu.energy"

MIN_STRETCHES = 3
"""Minimum number of stretches for an interval, and so for a figure."""

MAX_DEVIATION = 0.1
"""Maximum distance of the time of a step in a stretch from that of an iteration, as a share. Steps of other stretches
were slowed, for example while the program warmed up or steps were stored, and the device drew less power in them."""

MIN_PERIOD_RATIO = 1.5
"""Minimum ratio of the time between two changes of the counter to that between two readings at which the changes show
the period of the counter. A faster counter changes with every reading."""


class CounterChange(NamedTuple):
    """A change of a counter."""

    after_ns: int
    """Time of the last reading with the value before."""

    at_ns: int
    """Time of the first reading with the new value."""

    joules: float


class Counter(NamedTuple):
    """The changes of the energy counter of a device, and how often it is updated."""

    changes: Sequence[CounterChange]
    period_ns: float
    """Time between two updates; if the counter is faster than the readings, the median time between two readings."""

    relative_error: float | None
    """Error of the period as a share of it; None if the counter is faster than the readings."""

    def in_stretch(self, stretch: Stretch) -> list[CounterChange]:
        """Return the changes that are certainly in a stretch, and at least a period after its start.

        The first period is left out because the device starts late in it and its power rises. None is left out at the
        end, where the device still works.
        """
        start_index = bisect_left(self.changes, stretch.start_ns + self.period_ns, key=lambda change: change.after_ns)
        return list(
            self.changes[start_index : bisect_right(self.changes, stretch.end_ns, key=lambda change: change.at_ns)]
        )

    def between_ns(self, first: CounterChange, last: CounterChange) -> tuple[float, int]:
        """Return the time between two changes in nanoseconds, and the weight of a power that is measured over it.

        A reading shows a change late by up to the time between two readings, which is long compared with a stretch. The
        counter is regular, so the time is rounded to whole periods, and the weight is their number. For a counter
        without a known period it is the time between the readings, and the weight are milliseconds.
        """
        if self.relative_error is None:
            ns = last.at_ns - first.at_ns
            return float(ns), round(ns / 1e6)
        periods = round((_middle(last, self.period_ns) - _middle(first, self.period_ns)) / self.period_ns)
        return periods * self.period_ns, periods


class Stretch(NamedTuple):
    """Steps of one kind that ran one after the other without recording, after a recorded one."""

    kind: int
    steps: int
    start_ns: int
    end_ns: int
    """Start of xsp's work before the next recorded step, which waits for the device; the device works until then, even
    if the host runs ahead of it. After the last recorded step: the end of the last step on the host."""


class Power(NamedTuple):
    """The mean power of a device while steps of a kind ran."""

    watts: float
    interval: stats.Interval | None
    windows: Sequence[tuple[int, int]]
    """Times of the first and the last change of the counter, for each stretch."""

    updates: int
    """Number of times that the counter changed in these windows, after the change that begins each."""


class DevicePower(NamedTuple):
    """The power of a device while steps of a kind ran; None if there are too few stretches."""

    iteration: Iteration
    device: int
    counter: Counter
    stretches: int
    power: Power | None


_COLUMNS = {
    "scope": "VARCHAR",
    "kind": "INTEGER",
    "name": "VARCHAR",
    "device": "INTEGER",
    **dict.fromkeys(("joules", "low_joules", "high_joules", "watts", "low_watts", "high_watts"), "DOUBLE"),
    **dict.fromkeys(("lowest_watts", "percent_of_limit", "samples_per_joule"), "DOUBLE"),
    "stretches": "BIGINT",
    "updates": "BIGINT",
    "update_ms": "DOUBLE",
    "throttled": "VARCHAR",
    "other_processes": "INTEGER",
    "figures_from": "VARCHAR",
}


def _reason_without_energy(trace: Trace) -> str | None:
    """Return why the energy of a step is unknown, or None if it is known."""
    reason = reason_without_loop(trace) or _reason_without_counter(trace)
    if reason is not None:
        return reason
    if not any(iteration.is_known for iteration in iterations(trace)):
        return "the time of an iteration is unknown, because too few steps ran undisturbed by recording: run more steps"
    measurements = list(_device_powers(trace))
    if not measurements:
        return "the device's energy counter did not change while the program ran"
    if any(device_power.power is not None for device_power in measurements):
        return None
    best = max(measurements, key=lambda device_power: device_power.stretches)
    period_ms = best.counter.period_ns / 1e6
    return (
        f"the energy counter of device {best.device} changes every {period_ms:.0f} ms; "
        f"{best.stretches} of the {MIN_STRETCHES} necessary bursts of usual steps without recording were long "
        "enough for two changes. Run more steps, and record fewer of them (--budget 1%), or use a larger batch"
    )


def _reason_without_counter(trace: Trace) -> str | None:
    """Return why a trace has no readings of the energy counter, or None if it has some."""
    if trace.con.execute(f"SELECT 1 FROM samples WHERE name = '{ENERGY}' LIMIT 1").fetchall():
        return None
    samples = [run.samples for run in trace.run.rank_runs if run.samples is not None]
    reasons = [record.absent["nvml"] for record in samples if "nvml" in record.absent]
    reasons += [note for record in samples for note in record.notes if ENERGY in note]
    text = "; ".join(dict.fromkeys(reasons)) or f"it needs {NEEDS}"
    return f"the device's energy counter was not sampled while {trace.name!r} ran: {text}"


@analysis("energy", "Energy of a step", unless=_reason_without_energy)
def energy_of_steps(trace: Trace) -> Table:
    """The energy of each device in an iteration of the program, from the device's counter while no step was recorded.

    `watts` is the mean power between the first and the last change of the counter in bursts of steps that ran
    without recording; `joules` is this power times `iteration_ms` of `loop`. The intervals contain the differences
    between bursts and the error of the counter's period, those of `joules` also the interval of the iteration. They
    do not contain the error of the device's sensor. A device uses energy even when it waits: `lowest_watts` is the
    lowest reading of its power in the whole run. `updates` is the number of changes of the counter that the figures
    come from, `update_ms` the time between two changes. `throttled` names the reasons for lower clocks in this time,
    `other_processes` is the largest number of other processes on the device then; both are null if they were not
    sampled. Figures of a device are null if it has fewer than three such bursts. If a rank has several devices, the
    row with a null `device` is their sum, its interval the sum of theirs.

    Energy by layer is refused: an update of the counter (every 100 ms on an H200) covers many layers, and all steps
    have the same layers, so the counter cannot tell them apart. A share by time would be a guess.
    """
    measurements = list(_device_powers(trace))
    has_several = len({device_power.iteration.rank for device_power in measurements}) > 1
    surroundings = _Surroundings(trace)
    rows: list[tuple[Any, ...]] = []
    for iteration, group in itertools.groupby(measurements, key=lambda device_power: device_power.iteration):
        devices = list(group)
        step_kind = kinds_of(trace, iteration.rank).get(iteration.kind)
        identity = (
            scope_names(iteration.rank)[has_several],
            iteration.kind,
            step_kind.name if step_kind is not None else None,
        )
        powers = [(device_power, device_power.power) for device_power in devices if device_power.power is not None]
        if len(devices) > 1 and len(powers) == len(devices):
            rows.append((*identity, *_device_sum(iteration, powers)))
        rows += [(*identity, *_row(iteration, device_power, surroundings)) for device_power in devices]
    return values(trace, "energy_of_steps", _COLUMNS, rows)


def _row(iteration: Iteration, device_power: DevicePower, surroundings: _Surroundings) -> tuple[Any, ...]:
    key, power = (iteration.rank, device_power.device), device_power.power
    watts, watts_interval = (power.watts, power.interval) if power is not None else (None, None)
    joules, joules_interval = _joules(iteration, watts, watts_interval)
    limit = surroundings.limits.get(key)
    return (
        device_power.device, joules, *_ends(joules_interval), watts, *_ends(watts_interval),
        surroundings.lowest.get(key),
        100 * watts / limit if watts is not None and limit else None, _samples_per_joule(iteration.samples, joules),
        device_power.stretches, power.updates if power is not None else 0, device_power.counter.period_ns / 1e6,
        surroundings.throttled(key, power.windows) if power is not None else None,
        surroundings.other_processes(key, power.windows) if power is not None else None,
        STEP_SOURCES[iteration.disturbed],
    )  # fmt: skip


def _device_sum(iteration: Iteration, devices: Sequence[tuple[DevicePower, Power]]) -> tuple[Any, ...]:
    """Return the row of the sum of devices; ends are added as if the devices' errors were the same."""
    watts = sum(power.watts for _, power in devices)
    intervals = [power.interval for _, power in devices if power.interval is not None]
    watts_interval = None
    if len(intervals) == len(devices):
        watts_interval = stats.Interval(
            sum(interval.low for interval in intervals), watts, sum(interval.high for interval in intervals)
        )
    joules, joules_interval = _joules(iteration, watts, watts_interval)
    stretches, updates = (
        min(device_power.stretches for device_power, _ in devices),
        min(power.updates for _, power in devices),
    )
    return (
        None, joules, *_ends(joules_interval), watts, *_ends(watts_interval), None, None,
        _samples_per_joule(iteration.samples, joules), stretches, updates, None, None, None,
        STEP_SOURCES[iteration.disturbed],
    )  # fmt: skip


def _joules(
    iteration: Iteration, watts: float | None, watts_interval: stats.Interval | None
) -> tuple[float | None, stats.Interval | None]:
    """Return the energy of an iteration and its interval, in joules."""
    if watts is None or iteration.mean_ns is None:
        return None, None
    joules = watts * iteration.mean_ns / 1e9
    if watts_interval is None or iteration.interval is None:
        return joules, None
    return joules, stats.product_interval(watts_interval, iteration.interval.scale(1e-9))


def _ends(bounds: stats.Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if bounds is None else bounds.ends


def _samples_per_joule(samples: float | None, joules: float | None) -> float | None:
    return samples / joules if samples and joules else None


# --- the counter, the stretches, and the power from both -------------------------------------------------------


def _device_powers(trace: Trace) -> Iterator[DevicePower]:
    """Yield the devices of each kind of iteration whose time is known; the kind that takes most time first."""
    counters = _counters(trace)
    stretches_by_rank = _stretches(trace)
    for iteration in iterations(trace):
        if not iteration.is_known or iteration.mean_ns is None:
            continue
        stretches = [
            stretch
            for stretch in stretches_by_rank[iteration.rank]
            if stretch.kind == iteration.kind and _is_usual(stretch, iteration.mean_ns)
        ]
        for (rank, device), counter in counters.items():
            if rank == iteration.rank:
                usable, power = _power(counter, stretches)
                yield DevicePower(iteration, device, counter, usable, power)


def _counters(trace: Trace) -> Mapping[tuple[int, int], Counter]:
    """Return the counters by rank and device, without those that never change twice."""
    readings: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    query = f"""
        SELECT rank, device, time_ns, value FROM samples WHERE name = '{ENERGY}' AND device IS NOT NULL
        ORDER BY rank, device, time_ns
    """
    for rank, device, time_ns, value in trace.con.execute(query).fetchall():
        readings[rank, device].append((time_ns, value))
    counters = {key: _counter(points) for key, points in readings.items()}
    return {key: counter for key, counter in counters.items() if counter is not None}


def _counter(readings: Sequence[tuple[int, float]]) -> Counter | None:
    changes = [
        CounterChange(before_ns, at_ns, value)
        for (before_ns, before), (at_ns, value) in itertools.pairwise(readings)
        if value != before
    ]
    if len(changes) < 2:
        return None
    reading_ns = statistics.median(after - before for (before, _), (after, _) in itertools.pairwise(readings))
    usual_ns = statistics.median(after.at_ns - before.at_ns for before, after in itertools.pairwise(changes))
    if usual_ns < MIN_PERIOD_RATIO * reading_ns:
        return Counter(changes, usual_ns, None)
    periods, length_ns, error_ns = 0, 0.0, 0.0
    for part in _rising_parts(changes):
        middles = [_middle(change, usual_ns) for change in part]
        periods += sum(round((after - before) / usual_ns) for before, after in itertools.pairwise(middles))
        length_ns += middles[-1] - middles[0]
        # the first and the last change are known to half of the time between their readings
        error_ns += sum(min(change.at_ns - change.after_ns, usual_ns) / 2 for change in (part[0], part[-1]))
    if not periods:
        return Counter(changes, usual_ns, None)
    return Counter(changes, length_ns / periods, error_ns / length_ns)


def _rising_parts(changes: Sequence[CounterChange]) -> Iterator[Sequence[CounterChange]]:
    """Yield the parts with several changes in which a counter rises, without the changes at which it goes down.

    It goes down when the driver is loaded anew, which happens at any time, not only at an update.
    """
    drops = [
        index + 1 for index, (before, after) in enumerate(itertools.pairwise(changes)) if after.joules < before.joules
    ]
    for start, end in itertools.pairwise([-1, *drops, len(changes)]):
        if end - start > 2:
            yield changes[start + 1 : end]


def _middle(change: CounterChange, period_ns: float) -> float:
    """Return the middle of the time in which a change happened: between two readings, and in the last period."""
    return change.at_ns - min(change.at_ns - change.after_ns, period_ns) / 2


def _stretches(trace: Trace) -> Mapping[int, list[Stretch]]:
    """Return the stretches of each rank in their order, without those with failed steps or several kinds of steps."""
    stretches: dict[int, list[Stretch]] = defaultdict(list)
    query = """
        SELECT rank, kind, steps, rung, status, start_ns, dur_ns, coalesce(before_ns, 0), coalesce(own_ns, 0)
        FROM loop ORDER BY rank, step
    """
    for rank, rows in itertools.groupby(trace.con.execute(query).fetchall(), key=lambda row: row[0]):
        groups = [(bare, list(group)) for bare, group in itertools.groupby(rows, key=lambda row: row[3] == BARE)]
        for index, (bare, group) in enumerate(groups):
            kinds = {kind for _, kind, *_ in group}
            if not bare or index == 0 or len(kinds) > 1 or any(row[4] != "ok" for row in group):
                continue
            _, _, steps, _, _, last_ns, dur_ns, before_ns, _ = group[-1]
            end_ns = last_ns + steps * dur_ns + (steps - 1) * before_ns
            if index + 1 < len(groups):
                *_, next_ns, _, _, own_ns = groups[index + 1][1][0]
                end_ns = next_ns - own_ns
            stretches[rank].append(Stretch(kinds.pop(), sum(row[2] for row in group), group[0][5], round(end_ns)))
    return stretches


def _is_usual(stretch: Stretch, iteration_ns: float) -> bool:
    """Return whether the steps of a stretch took about as long as an iteration."""
    step_ns = (stretch.end_ns - stretch.start_ns) / stretch.steps
    return abs(step_ns - iteration_ns) <= MAX_DEVIATION * iteration_ns


def _power(counter: Counter, stretches: Sequence[Stretch]) -> tuple[int, Power | None]:
    """Return the number of stretches with two changes of the counter, and the power in them if there are enough."""
    joules, seconds, weights = [], [], []
    windows: list[tuple[int, int]] = []
    updates = 0
    for stretch in stretches:
        changes = counter.in_stretch(stretch)
        if len(changes) < 2 or list(_rising_parts(changes)) != [changes]:
            continue
        ns, weight = counter.between_ns(changes[0], changes[-1])
        if weight < 1:
            continue
        joules.append(changes[-1].joules - changes[0].joules)
        seconds.append(ns / 1e9)
        weights.append(weight)
        windows.append((changes[0].after_ns, changes[-1].at_ns))
        updates += len(changes) - 1
    if len(windows) < MIN_STRETCHES:
        return len(windows), None
    watts = sum(joules) / sum(seconds)
    watts_interval = stats.mean_interval([energy / time for energy, time in zip(joules, seconds, strict=True)], weights)
    if watts_interval is not None and counter.relative_error is not None:
        period_interval = stats.Interval(1 - counter.relative_error, 1.0, 1 + counter.relative_error)
        watts_interval = stats.product_interval(watts_interval.at(watts), period_interval)
    return len(windows), Power(watts, watts_interval, windows, updates)


# --- what else happened on the device --------------------------------------------------------------------------


class _Surroundings:
    """Limits, lowest power, throttling and other processes of the devices of a trace, by rank and device."""

    def __init__(self, trace: Trace) -> None:
        self.limits = _by_device(trace, "gpu.power.limit", "avg")
        self.lowest = _by_device(trace, "gpu.power", "min")
        self._sampled: set[tuple[int, int]] = set()
        self._reasons: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        self._other_processes: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for rank, device, from_ns, to_ns, reason in trace.con.execute(
            f"""
            WITH {REASONS_SQL}
            SELECT readings.rank, readings.device, readings.from_ns, readings.to_ns, reasons.reason
            FROM readings LEFT JOIN reasons ON throttles AND (readings.rank, readings.device, readings.from_ns)
                = (reasons.rank, reasons.device, reasons.from_ns)
            WHERE readings.to_ns IS NOT NULL
            """
        ).fetchall():
            self._sampled.add((rank, device))
            if reason is not None:
                self._reasons[rank, device].append((from_ns, to_ns, reason))
        for rank, device, from_ns, to_ns, count in trace.con.execute(
            """
            SELECT rank, device, time_ns, lead(time_ns, 1, time_ns + 1) OVER (
                PARTITION BY rank, device ORDER BY time_ns
            ), value::INTEGER FROM samples WHERE name = 'gpu.processes.others'
            """
        ).fetchall():
            self._other_processes[rank, device].append((from_ns, to_ns, count))

    def throttled(self, key: tuple[int, int], windows: Sequence[tuple[int, int]]) -> str | None:
        """Return the reasons for which clocks were reduced in these windows; "" if there were none, None if unknown."""
        if key not in self._sampled:
            return None
        return ", ".join(
            sorted({reason for start, end, reason in self._reasons[key] if _overlaps(windows, start, end)})
        )

    def other_processes(self, key: tuple[int, int], windows: Sequence[tuple[int, int]]) -> int | None:
        """Return the largest number of other processes on the device in these windows, or None if it is unknown."""
        return max(
            (count for start, end, count in self._other_processes[key] if _overlaps(windows, start, end)), default=None
        )


def _by_device(trace: Trace, name: str, aggregate: str) -> dict[tuple[int, int], float]:
    rows = trace.con.execute(
        f"SELECT rank, device, {aggregate}(value) FROM samples WHERE name = '{name}' GROUP BY rank, device"
    ).fetchall()
    return {(rank, device): value for rank, device, value in rows}


def _overlaps(windows: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Return whether a time overlaps one of these windows, which are in their order and do not overlap."""
    index = bisect_right(windows, start_ns, key=lambda window: window[1])
    return index < len(windows) and windows[index][0] < end_ns
