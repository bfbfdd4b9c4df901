"""The account of a trace: iterations of each rank and kind, with both sides, what limits, and what is doubtful."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp import clock, stats
from xsp.account import between, ondevice, onhost, places, plausibility, ranks
from xsp.account import entries as names
from xsp.account.check import violations
from xsp.account.course import course as of_course
from xsp.account.entries import BARE, RECORDED, Account, Entry, Iterations, Limit, Side
from xsp.account.onhost import HostTimes
from xsp.account.ranks import Collectives
from xsp.account.windows import IterationWindow, step_kinds, windows
from xsp.run import StepKind
from xsp.schema import Kind, Level
from xsp.store import overlap, strata
from xsp.store.iterations import SHORT_NS, WARM_UP_STEPS, Iteration, iterations
from xsp.store.loop import BARE as UNRECORDED
from xsp.store.trace import Trace

NEARLY_ALL = 0.85
"""Share of an iteration from which the side that takes it is the only one that limits."""

MIN_UNSEEN_SHARE = 0.05
"""Least share of the steps' time in slow steps that were not recorded to be an entry."""

FEWEST_UNSEEN = 2
"""Fewest iterations of a stratum, none of which was recorded, that are no accident."""

MIN_SEEN_SHARE = 0.5
"""Least share of the time between steps that recorded iterations must contain to tell what it consists of."""


def of(trace: Trace) -> Account:
    """Return the account of a trace, computed anew; see `xsp.account.of`."""
    loop = iterations(trace)
    by_rank = _by_rank(windows(trace))
    doubts = tuple(plausibility.doubts(trace))
    believes_devices = not any("busy" in doubt.forbids for doubt in doubts)
    in_collectives = ranks.collectives(trace)
    found: list[Iterations] = []
    for rank, recorded in sorted(by_rank.items()):
        own = rank == trace.rank or recorded[0].kind is not None
        kind = trace.kind if own else next((each.kind for each in loop if each.rank == rank), None)
        measured = next((each for each in loop if (each.rank, each.kind) == (rank, kind)), None)
        found.append(_of_rank(trace, rank, kind, recorded, measured, believes_devices, in_collectives.get(rank)))
    # The accounts of the kinds that an importer gave to steps, without that of the trace's figures.
    found += [
        _of_rank(trace, rank, kind, recorded, None, believes_devices, in_collectives.get(rank))
        for kind in step_kinds(trace)
        if kind != trace.kind
        for rank, recorded in sorted(_by_rank(windows(trace, kind)).items())
    ]
    found = _with_shares(found) if step_kinds(trace) else found
    known = {(each.rank, each.kind) for each in found}
    found += [_unrecorded(trace, each) for each in loop if (each.rank, each.kind) not in known]
    on_threads = overlap.threads(trace.con)
    found = [
        replace(_with_course(trace, each), threads=on_threads.get((each.rank, each.kind or 0), 1)) for each in found
    ]
    found.sort(key=lambda each: (each.rank != trace.rank, each.kind != trace.kind, each.rank, -each.share))
    wall_ms, outside_ms = _wall(trace)
    account = Account(
        tuple(found),
        wall_ms,
        outside_ms,
        _program(trace, found, wall_ms, outside_ms),
        doubts,
        ranks.late_rank(trace, found) if believes_devices else None,
        all(run.steps is None or run.steps.found for run in trace.run.rank_runs),
    )
    return replace(account, violations=tuple(violations(account)))


def _by_rank(recorded: Sequence[IterationWindow]) -> dict[int, list[IterationWindow]]:
    found: dict[int, list[IterationWindow]] = {}
    for window in recorded:
        found.setdefault(window.rank, []).append(window)
    return found


def _with_shares(found: Sequence[Iterations]) -> list[Iterations]:
    """Return accounts with the share of each kind in the recorded time of its rank."""
    whole: dict[int, float] = {}
    for each in found:
        whole[each.rank] = whole.get(each.rank, 0.0) + each.count * (each.time.ms or 0.0)
    return [
        replace(each, share=each.count * (each.time.ms or 0.0) / whole[each.rank] if whole[each.rank] else 0.0)
        for each in found
    ]


def _with_course(trace: Trace, each: Iterations) -> Iterations:
    """Return an account with the course of its iterations, and its time divided into usual and slow ones."""
    is_device_bound = bool(each.devices) and (each.limit is None or each.limit.side != "host")
    course = of_course(trace, each.rank, each.kind, each.time, is_device_bound)
    costs = [slow.cost for slow in course.slow] if course is not None else []
    rest_ms = (each.time.ms or 0.0) - sum(cost.ms or 0.0 for cost in costs)
    if costs and rest_ms > 0:
        usual = Entry(names.USUAL, rest_ms, each.time.source)
        each = replace(each, time=replace(each.time, children=(usual, *costs)))
    return replace(each, course=course)


def _program(
    trace: Trace, found: Sequence[Iterations], wall_ms: float | None, outside_ms: float | None
) -> tuple[Entry, ...]:
    """Return the wall time of the loop: iterations of each kind, first ones, time in no step, and what remains."""
    own = [each for each in found if each.rank == trace.rank and each.time.ms is not None]
    if wall_ms is None or not own or any(each.at_once > 1 for each in own):
        return ()
    entries = [
        Entry(each.name or names.ITERATION, each.count * (each.time.ms or 0.0), each.time.source, calls=each.count)
        for each in own
        if not each.is_beginning
    ]
    compiling = _compiling(trace)
    entries += compiling
    courses = [each.course for each in own if not each.is_beginning and each.course is not None]
    first = [course.first for course in courses if course.first is not None]
    beginning = [each for each in own if each.is_beginning]
    if first or beginning:
        is_compiling = not compiling and any(each.is_compiling for each in first)
        name = names.COMPILING if is_compiling else names.FIRST
        count = sum(each.count for each in first) + sum(each.count for each in beginning)
        ms = sum(each.ms for each in first) + sum(each.count * (each.time.ms or 0.0) for each in beginning)
        entries.append(Entry(name, ms, "steps that were not recorded", calls=count))
    if outside_ms:
        entries.append(Entry(names.OUTSIDE_STEPS, outside_ms, "loop"))
    rest_ms = wall_ms - sum(entry.ms or 0.0 for entry in entries)
    entries.append(Entry(names.UNEXPLAINED, rest_ms, "difference: recorded iterations take longer than others"))
    return tuple(entries)


def _compiling(trace: Trace) -> list[Entry]:
    """Return the entry of the time in which `torch.compile` compiled in steps; empty if it did not.

    Its calls are the compilations. Its part is that of code that was compiled anew, with the most frequent reason.
    """
    run = trace.run.of_rank(trace.rank)
    ((began_ns, ended_ns),) = trace.con.execute(
        "SELECT min(start_ns - coalesce(before_ns, 0)), max(start_ns + steps * (dur_ns + coalesce(before_ns, 0))) "
        "FROM loop WHERE rank = ?",
        [trace.rank],
    ).fetchall()
    if began_ns is None or ended_ns is None:
        return []
    inside = sorted(
        (max(began_ns, each.start_ns), min(ended_ns, each.start_ns + each.dur_ns), each.reason or "")
        for each in run.compilations
        if began_ns < each.start_ns + each.dur_ns and each.start_ns < ended_ns
    )
    reasons = Counter(reason for *_, reason in inside if reason)
    if not inside:
        return []
    anew = tuple(
        Entry(
            names.ANEW,
            clock.covered_ns([each[:2] for each in inside if each[2]], began_ns, ended_ns) / 1e6,
            names.COMPILER,
            place=reason,
            calls=sum(reasons.values()),
        )
        for reason, _ in reasons.most_common(1)
    )
    ns = clock.covered_ns([each[:2] for each in inside], began_ns, ended_ns)
    return [Entry(names.COMPILING, ns / 1e6, names.COMPILER, children=anew, calls=len(inside))]


def _kind_of(trace: Trace, rank: int, kind: int | None) -> StepKind | None:
    run = trace.run.of_rank(rank)
    return next((each for each in run.kinds if each.kind == kind), None)


def _kind_name(trace: Trace, rank: int, kind: int | None) -> str:
    found = _kind_of(trace, rank, kind)
    return (found.name or "") if found is not None else ""


def _trains(trace: Trace, rank: int, kind: int | None) -> bool | None:
    found = _kind_of(trace, rank, kind)
    return found.training if found is not None else None


def _unrecorded(trace: Trace, measured: Iteration) -> Iterations:
    """Return the account of a kind of which the trace's figures describe no step: what the loop tells."""
    time = _time(measured, ())
    outside = _outside_steps(measured) if time.ms is not None else []
    step_ms = (time.ms or 0.0) - sum(entry.ms or 0.0 for entry in outside)
    in_step = [Entry(names.STEP, step_ms, BARE)] if step_ms > 0 else []
    if in_step and not trace.has(Level.KERNEL):  # a host ahead of its device waits in any phase
        in_step = _phases_alone(measured, step_ms) or in_step
    host = Side("host", _ordered((*outside, *in_step)))
    return Iterations(
        measured.rank, measured.kind, _kind_name(trace, measured.rank, measured.kind), names.ITERATION, measured.steps,
        measured.recorded, 0, time, host, share=measured.share, is_beginning=measured.is_beginning,
        samples_per_s=measured.samples_per_s,
        at_once=measured.at_once or 1.0,
        trains=_trains(trace, measured.rank, measured.kind),
    )  # fmt: skip


def _phases_alone(measured: Iteration, step_ms: float) -> list[Entry]:
    """Return the phases of a step, all as timed without recording; empty if they were not timed."""
    shares = {name: measured.phases[name].share for name in names.PHASES if name in measured.phases}
    rest = 1.0 - sum(shares.values())
    if not any(shares.values()) or rest < 0:
        return []
    shares[names.OUTSIDE] = rest
    return [Entry(name, share * step_ms, BARE) for name, share in shares.items() if share]


def _time(measured: Iteration | None, recorded_ns: Sequence[float]) -> Entry:
    """Return the time of an iteration: as measured without recording, else of recorded iterations."""
    if measured is not None and measured.mean_ns is not None:
        bounds = measured.interval
        low_ns = max(0.0, bounds.low - measured.excess_ns) if bounds is not None else 0.0
        ends = (low_ns / 1e6, bounds.high / 1e6) if bounds is not None else (None, None)
        return Entry(names.ITERATION, measured.mean_ns / 1e6, BARE, *ends)
    if not recorded_ns:
        return Entry(names.ITERATION, None, "no iteration of this kind was recorded, or ran undisturbed")
    bounds = stats.mean_interval([ns / 1e6 for ns in recorded_ns])
    ends = (max(0.0, bounds.low), bounds.high) if bounds is not None else (None, None)
    return Entry(names.ITERATION, sum(recorded_ns) / len(recorded_ns) / 1e6, RECORDED, *ends)


def _at_least(time: Entry, busy_ns: Sequence[float]) -> Entry:
    """Return the time of an iteration, which is no shorter than a device works on it.

    Steps that were not recorded end on the host before the device has done their work.
    """
    busy_ms = max(busy_ns, default=0.0) / 1e6
    if time.ms is None or busy_ms <= time.ms:
        return time
    return replace(
        time,
        ms=busy_ms,
        source="device work of recorded iterations",
        low_ms=min(time.ms, time.low_ms if time.low_ms is not None else time.ms),
        high_ms=max(busy_ms, time.high_ms or 0.0),
    )


def _outside_steps(measured: Iteration) -> list[Entry]:
    """Return the parts of an iteration that the loop tells without any recording: waits for data, and other gaps."""
    parts = (
        (names.DATA, measured.data_ns, measured.data_interval),
        (names.BETWEEN, measured.between_ns, measured.between_interval),
    )
    return [
        Entry(
            name, ns / 1e6, BARE, *((max(0.0, ends.low) / 1e6, ends.high / 1e6) if ends is not None else (None, None))
        )
        for name, ns, ends in parts
        if ns
    ]


class _Recordings(NamedTuple):
    """What the recorded iterations of a kind on a rank show."""

    deep: Sequence[IterationWindow]
    """Those with most detail."""

    shallow: Sequence[IterationWindow]
    """Those with least detail, which are slowed least, and those of which no others are alike."""

    detailed: HostTimes
    """What the host did in `deep`."""

    outer: HostTimes
    """What it did in `shallow`."""

    devices: Sequence[ondevice.DeviceTimes]
    """What the devices did in `deep`; empty if there is none, or its records are not believed."""

    wall_ns: int
    """Duration of `deep`, to the ends of the devices' work if it is known."""


def _of_rank(
    trace: Trace,
    rank: int,
    kind: int | None,
    recorded: Sequence[IterationWindow],
    measured: Iteration | None,
    believes_devices: bool,
    collectives: Collectives | None,
) -> Iterations:
    seen = _recordings(trace, rank, recorded, measured, believes_devices, collectives)
    if measured is not None and measured.mean_ns is not None:
        time, host, devices = _sides_of_loop(trace, measured, seen)
    else:
        time, host, devices = _sides_as_recorded(seen)
    unit = "window" if all(window.is_whole for window in seen.deep) else names.ITERATION
    account = Iterations(
        rank,
        kind,
        _kind_name(trace, rank, kind),
        unit,
        measured.steps if measured is not None else len(recorded),
        measured.recorded if measured is not None else len(recorded),
        len(seen.deep),
        time,
        host,
        tuple(devices),
        share=measured.share if measured is not None else 1.0,
        is_beginning=measured is not None and measured.is_beginning,
        samples_per_s=measured.samples_per_s if measured is not None else None,
        at_once=(measured is not None and measured.at_once) or 1.0,
        trains=_trains(trace, rank, kind),
    )
    # whether the trace holds calls of the runtime of a rank, which show when its host waited for a device
    query = f"SELECT 1 FROM spans WHERE level = {int(Level.RUNTIME)} AND rank = ? AND kind <> '{Kind.OVERHEAD}' LIMIT 1"
    limit = _limit(
        account, believes_devices, bool(trace.con.execute(query, [rank]).fetchall()), _least_host_ms(trace, rank, kind)
    )
    earlier = next((side[names.EARLIER] for side in devices if side[names.EARLIER] is not None), None)
    account = replace(account, limit=limit, earlier=earlier)
    gaps = [(each.device, each.gaps) for each in seen.devices]
    return places.with_places(trace, account, seen.deep, seen.detailed.phases, gaps)


def _recordings(
    trace: Trace,
    rank: int,
    recorded: Sequence[IterationWindow],
    measured: Iteration | None,
    believes_devices: bool,
    collectives: Collectives | None,
) -> _Recordings:
    deepest = max(window.rung for window in recorded)
    # without a loop the levels did not take turns: a step that holds less did less
    deep = [window for window in recorded if window.rung == deepest or measured is None]
    shallow = deep
    if measured is not None:
        shallow_rung = min((window.rung for window in recorded if window.rung >= Level.MODEL), default=deepest)
        shallow = [window for window in recorded if window.rung == shallow_rung]
        shallow = _with_other_strata(trace, measured, shallow, recorded)
    devices: Sequence[ondevice.DeviceTimes] = ()
    wall_ns, ends = sum(window.end_ns - window.start_ns for window in deep), [0] * len(deep)
    if believes_devices and _has_device_work(trace, rank):
        work = ondevice.work_of(trace, rank, deep)
        bounds = ondevice.block_ends(work, deep)
        devices = ondevice.device_times(
            work, ondevice.host_waits(trace, rank), deep, bounds, collectives.waiting if collectives else None
        )
        if bounds:
            wall_ns = sum(stop - start for start, stop in bounds.values())
        if measured is not None:
            ends = [int(max(work.end[work.owner == index], default=0)) for index in range(len(deep))]
    detailed = outer = onhost.host_times(trace, rank, deep, ends, collectives)
    if {window.step for window in shallow} != {window.step for window in deep}:
        outer = onhost.host_times(trace, rank, shallow, [0] * len(shallow))
    return _Recordings(deep, shallow, detailed, outer, devices, wall_ns)


def _has_device_work(trace: Trace, rank: int) -> bool:
    query = (
        f"SELECT 1 FROM spans WHERE level = {int(Level.KERNEL)} AND rank = ? AND timed IS NOT false "
        f"AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}') LIMIT 1"
    )
    return bool(trace.con.execute(query, [rank]).fetchall())


def _sides_of_loop(trace: Trace, measured: Iteration, seen: _Recordings) -> tuple[Entry, Side, list[Side]]:
    """Return the time of an iteration that ran without recording, and the sides of host and devices."""
    count = len(seen.deep)
    time = _at_least(_time(measured, ()), [sum(each.per_iteration_busy_ns) / count for each in seen.devices])
    host = _host_of_loop(trace, measured, time, seen)
    represented = Representation(trace, measured, strata.StratifiedTime.ITERATION, seen.deep)
    are_whole = all(window.has_before for window in seen.deep)
    return time, host, [
        _device_of_loop(each, count, time, host, seen.wall_ns, represented, are_whole) for each in seen.devices
    ]  # fmt: skip


def _sides_as_recorded(seen: _Recordings) -> tuple[Entry, Side, list[Side]]:
    """Return the time of recorded iterations, and the sides of host and devices."""
    count = len(seen.deep)
    each_ns = [float(window.end_ns - window.start_ns) for window in seen.deep]
    # the host, ahead of a device, also waits for work that was launched before: that is no iteration's time
    tail_ns = seen.wall_ns - sum(each_ns)
    before_ns = min(
        max(0, int(tail_ns)),
        max((each.earlier_ns for each in seen.devices), default=0),
        *(each.wall_ns - each.busy_ns for each in seen.devices),
    )
    tail_ns = (tail_ns - before_ns) / count
    time = _time(None, [ns + tail_ns for ns in each_ns])
    detailed = seen.detailed
    times = dict(detailed.phase_ns)
    if detailed.beside_ns is not None:
        times[names.OTHER_THREADS] = times[names.OTHER_THREADS] + detailed.beside_ns
    entries = [
        _phase_entry(name, values.tolist(), 1.0, detailed, RECORDED)
        for name, values in times.items()
        if values.any() and name not in detailed.of_models
    ]
    if tail_ns > 0:
        entries.append(Entry(names.DRAINING, tail_ns / 1e6, RECORDED))
    host = Side("host", _ordered(entries))
    return time, host, [_closed(ondevice.side(each, count, RECORDED, before_ns), time) for each in seen.devices]


def _children(detailed: HostTimes, phase: str, ms: float, source: str, drained_ns: float = 0.0) -> tuple[Entry, ...]:
    """Return the states of a phase, in the shares of the most detailed recordings.

    Args:
        detailed: these recordings.
        phase: the phase.
        ms: its time.
        source: the measurement, for the entries.
        drained_ns: waiting of each recorded iteration that is not part of the phase.
    """
    if phase not in detailed.phase_ns or phase == names.DATA:
        return ()
    less_ns = drained_ns * len(detailed.phase_ns[phase])
    whole = float(detailed.phase_ns[phase].sum()) - less_ns
    if whole <= 0:
        return ()
    models = detailed.models.get(phase, ())
    if models:
        own = {name: float(detailed.phase_ns[name].sum()) for name in models if name in detailed.phase_ns}
        factor = ms / (sum(own.values()) or 1.0)
        return tuple(
            Entry(name, ns * factor, source, children=_children(detailed, name, ns * factor, source))
            for name, ns in own.items()
        )
    shares = {
        state: min(
            1.0, max(0.0, float(detailed.state_ns[phase, state].sum()) - less_ns * (state == names.WAITING)) / whole
        )
        for state in names.STATES
        if (phase, state) in detailed.state_ns
    }
    if not any(shares.values()):
        return ()
    shares = {names.RUNNING: max(0.0, 1.0 - sum(shares.values())), **shares}
    return tuple(Entry(state, ms * share, source) for state, share in shares.items() if share)


def _phase_entry(name: str, values_ns: Sequence[float], scale: float, detailed: HostTimes, source: str) -> Entry:
    ms = float(np.mean(values_ns)) * scale / 1e6
    bounds = stats.mean_interval([float(value) * scale / 1e6 for value in values_ns])
    low, high = (max(0.0, bounds.low), bounds.high) if bounds is not None else (None, None)
    return Entry(name, ms, source, low, high, _children(detailed, name, ms, RECORDED))


def _ordered(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: -(entry.ms or 0.0)))


def _host_of_loop(trace: Trace, measured: Iteration, time: Entry, seen: _Recordings) -> Side:
    """Return the host side of an iteration that was timed without recording; recordings give the shares of its parts.

    Args:
        trace: the trace.
        measured: the iteration, from the loop.
        time: its time.
        seen: what recorded iterations show.
    """
    step_ns, data_ns, between_ns = measured.step_ns or 0.0, measured.data_ns or 0.0, measured.between_ns or 0.0
    represented = Representation(trace, measured, strata.StratifiedTime.STEP, seen.shallow)
    data_in_step_ns = _data_in_step_ns(seen, represented, data_ns, step_ns)
    if not seen.devices and measured.mean_ns is not None:
        # the loop subtracts waits in the step from the time before it
        between_ns = max(0.0, measured.mean_ns - step_ns - (data_ns - data_in_step_ns))
    timed = _timed_phases(measured, seen, step_ns, step_ns - data_in_step_ns)
    entries, drained_ns = timed or _in_step(seen, represented, step_ns, step_ns - data_in_step_ns)
    entries += [entry for entry in _outside_steps(measured) if entry.name == names.DATA]
    if between_ns:
        entry = _between(trace, measured, between_ns, seen.detailed, seen.deep, drained_ns)
        ends = measured.between_interval
        if ends is not None and measured.between_ns:
            ends = ends.scale(between_ns / measured.between_ns / 1e6)
            entry = replace(entry, low_ms=max(0.0, ends.low), high_ms=ends.high)
        entries.append(entry)
    rest_ms = (time.ms or 0.0) - sum(entry.ms or 0.0 for entry in entries)
    if rest_ms < 0 and time.ms:  # the time comes from other iterations than the parts: the parts share it
        entries = list(names.scaled(entries, time.ms / (time.ms - rest_ms)))
    if rest_ms > 1e-6:  # the device's backlog, which the host waits for when it is full
        entries.append(Entry(names.DRAINING, rest_ms, BARE))
    return _closed(Side("host", _ordered(entries)), time)


def _data_in_step_ns(seen: _Recordings, represented: Representation, data_ns: float, step_ns: float) -> float:
    """Return the wait for data in a step, which the loop's figures of the step and of the wait both contain."""
    if names.DATA not in seen.outer.phase_ns or not data_ns:
        return 0.0
    before_ns = sum(_before_step(seen.outer, seen.shallow)) / max(1, len(seen.shallow))
    return min(data_ns, step_ns, max(0.0, represented.mean(seen.outer.phase_ns[names.DATA]) - before_ns))


def _timed_phases(
    measured: Iteration, seen: _Recordings, step_ns: float, own_ns: float
) -> tuple[list[Entry], float] | None:
    """Return the phases of a step as timed without recording, and 0; None if they were not, or recordings show others.

    A host ahead of its device waits in other phases than in a recorded step, which begins with an idle device; then the
    phases come from recordings, whose states are known.

    Args:
        measured: the iteration, from the loop.
        seen: what recorded iterations show.
        step_ns: time of the step.
        own_ns: the same without waiting for data.
    """
    recorded = {name for name, ns in seen.outer.phase_ns.items() if ns.any() and name not in seen.outer.of_models}
    timed = {name for name in names.PHASES if name in measured.phases and measured.phases[name].share > 0}
    if not timed or seen.devices or recorded - {names.OUTSIDE, names.BETWEEN, names.DATA} != timed:
        return None
    phases_ns = step_ns * sum(measured.phases[name].share for name in timed)
    scale = step_ns / 1e6 * min(1.0, own_ns / phases_ns)
    rest_ms = max(0.0, own_ns - phases_ns) / 1e6
    entries = []
    for name in [*timed, names.OUTSIDE]:
        share, bounds = measured.phases["" if name == names.OUTSIDE else name]
        ms = rest_ms if name == names.OUTSIDE else share * scale
        low, high = (None, None)
        if bounds is not None:  # without waiting for data, which is part of the rest
            low, high = (max(0.0, ms + (end - share) * scale) for end in bounds.ends)
        if ms:
            entries.append(Entry(name, ms, BARE, low, high, _children(seen.detailed, name, ms, RECORDED)))
    return entries, 0.0


def _in_step(
    seen: _Recordings, represented: Representation, step_ns: float, own_ns: float
) -> tuple[list[Entry], float]:
    """Return the phases of a step that was timed without recording, and the waiting at its end to leave out.

    Recorded steps wait at their ends for the device; others wait there only as long as their time shows.

    Args:
        seen: what recorded iterations show.
        represented: how many steps each of `seen.shallow` stands for.
        step_ns: time of the step.
        own_ns: the same without waiting for data.
    """
    in_step = {
        name: represented.mean(values)
        for name, values in seen.outer.phase_ns.items()
        if name not in (names.BETWEEN, names.DATA) and name not in seen.outer.of_models
    }
    drained_ns = min(float(seen.detailed.drained_ns.mean()), in_step.get(names.OUTSIDE, 0.0))
    drained_ns -= min(drained_ns, max(0.0, own_ns - (sum(in_step.values()) - drained_ns)))
    if drained_ns:
        in_step[names.OUTSIDE] -= drained_ns
    whole_ns = sum(in_step.values())
    if not whole_ns:
        return ([Entry(names.OUTSIDE, own_ns / 1e6, BARE)] if step_ns else []), drained_ns
    # a host ahead of its device waits in some steps for a full queue; short steps are slow after recorded ones
    knows_slow = not seen.devices and step_ns >= SHORT_NS and represented.unseen >= MIN_UNSEEN_SHARE
    unseen_ns = represented.unseen * step_ns if knows_slow else 0.0
    scale = max(0.0, own_ns - unseen_ns) / whole_ns
    entries = []
    for name, ns in in_step.items():
        if not ns:
            continue
        ms, less_ns = ns * scale / 1e6, drained_ns if name == names.OUTSIDE else 0.0
        bounds = represented.interval(
            [max(0.0, value - less_ns) * scale / 1e6 for value in seen.outer.phase_ns[name].tolist()]
        )
        low, high = (max(0.0, bounds.low), bounds.high + unseen_ns / 1e6) if bounds is not None else (None, None)
        entries.append(Entry(name, ms, BARE, low, high, _children(seen.detailed, name, ms, RECORDED, less_ns)))
    if unseen_ns:
        unseen_ms = own_ns / 1e6 - whole_ns * scale / 1e6
        entries.append(Entry(names.UNLIKE, unseen_ms, BARE, place=represented.slow_steps, place_ms=unseen_ms))
    return entries, drained_ns


def _between(
    trace: Trace,
    measured: Iteration,
    between_ns: float,
    detailed: HostTimes,
    deep: Sequence[IterationWindow],
    drained_ns: float,
) -> Entry:
    """Return the time between steps, divided as iterations show that were recorded from the end of the step before."""
    found = between.parts(trace, measured.rank, deep, detailed.phases.unions.get(names.BETWEEN))
    if found:
        whole = [window for window in deep if window.has_before]
        represented = Representation(trace, measured, strata.StratifiedTime.BEFORE, whole)
        run = trace.run.of_rank(measured.rank)
        asleep = 0.0 if trace.has(Level.KERNEL) else between.asleep_share(run)  # it may sleep in waits for a device
        return between.entry(
            between_ns, found, detailed, deep, represented.weights, drained_ns, represented.slow_steps, asleep
        )
    seen_ns = float(detailed.phase_ns[names.BETWEEN].mean()) if names.BETWEEN in detailed.phase_ns else 0.0
    ms, is_seen = between_ns / 1e6, seen_ns >= MIN_SEEN_SHARE * between_ns
    children = _children(detailed, names.BETWEEN, ms, RECORDED) if is_seen else ()
    return Entry(names.BETWEEN, ms, BARE, children=children)


def _before_step(outer: HostTimes, recorded: Sequence[IterationWindow]) -> list[float]:
    """Return the time before each recorded step that its recording contains and that is waiting for data."""
    between_ns = outer.phase_ns.get(names.BETWEEN)
    return [
        max(
            0.0,
            (window.before_end_ns or window.step_ns)
            - window.start_ns
            - (float(between_ns[index]) if between_ns is not None else 0.0),
        )
        for index, window in enumerate(recorded)
    ]


class Representation:
    """How many iterations each recorded one stands for, by the time of one part of an iteration.

    Iterations of a kind are not alike, and few of them are recorded: each counts as often as those that take about as
    long occur (see `xsp.store.strata`).
    """

    def __init__(
        self, trace: Trace, measured: Iteration, part: strata.StratifiedTime, recorded: Sequence[IterationWindow]
    ) -> None:
        """Take the strata of a kind on a rank, and weigh its recorded iterations."""
        self._strata = _strata_of(trace, measured, part)
        self._steps = [window.step for window in recorded]
        chosen = {(measured.rank, step) for step in self._steps if step is not None}
        by_step = strata.weights(self._strata, chosen)
        self.weights = {step: by_step.get((measured.rank, step), 1.0) for step in self._steps if step is not None}
        covered = [each for each in self._strata if any((each.rank, step) in chosen for step in each.recorded)]
        others = [each for each in self._strata if each not in covered and each.iterations >= FEWEST_UNSEEN]
        self.slow_steps = (
            _in_words(max(others, key=lambda each: each.iterations * each.mean_ns), part) if others else None
        )
        """The slow iterations that were not recorded, in words; None without any."""

        self.unseen = 0.0
        """Share of the time that is in iterations slower than any recorded one, beyond what these take."""

        if covered and others:
            mean_ns, seen_ns = _mean_ns([*covered, *others]), _mean_ns(covered)
            self.unseen = max(0.0, 1 - seen_ns / mean_ns) if mean_ns else 0.0

    def mean(self, values: Sequence[float] | NDArray[Any]) -> float:
        """Return the mean over all iterations of values of the recorded ones."""
        counts = [self.weights.get(step, 1.0) if step is not None else 1.0 for step in self._steps]
        return float(np.average(values, weights=counts)) if len(values) else 0.0

    def interval(self, values: Sequence[float]) -> stats.Interval | None:
        """Return the 95 % interval of `mean`; wide if few iterations of a stratum were recorded."""
        if not self._strata:
            return stats.mean_interval(values)
        by_step = {step: value for step, value in zip(self._steps, values, strict=True) if step is not None}
        return strata.mean_interval(self._strata, by_step)


def _with_other_strata(
    trace: Trace, measured: Iteration, chosen: Sequence[IterationWindow], recorded: Sequence[IterationWindow]
) -> list[IterationWindow]:
    """Return the chosen iterations, and the recorded ones of strata of which none was chosen."""
    steps, others = {window.step for window in chosen}, set()
    for each in _strata_of(trace, measured, strata.StratifiedTime.STEP):
        if not steps & set(each.recorded):
            others |= set(each.recorded)
    return [window for window in recorded if window.step in steps | others]


def _strata_of(trace: Trace, measured: Iteration, part: strata.StratifiedTime) -> list[strata.Stratum]:
    found = trace.cached(f"strata by {part.name}", lambda: strata.strata(trace.con, part, WARM_UP_STEPS))
    return [each for each in found if (each.rank, each.kind) == (measured.rank, measured.kind)]


def _in_words(stratum: strata.Stratum, part: strata.StratifiedTime) -> str:
    """Return how long iterations of a stratum take in a part, and how often they occur."""
    what = "gaps" if part is strata.StratifiedTime.BEFORE else "steps"
    times = f"{stratum.iterations} {what} of about {stratum.mean_ns / 1e6:.3g} ms"
    return f"{times}, one in {stratum.period} steps" if stratum.period is not None else times


def _mean_ns(found: Sequence[strata.Stratum]) -> float:
    count = sum(each.iterations for each in found)
    return sum(each.iterations * each.mean_ns for each in found) / count if count else 0.0


def _device_of_loop(
    times: ondevice.DeviceTimes, count: int, time: Entry, host: Side, wall_ns: int, represented: Representation,
    are_whole: bool,
) -> Side:  # fmt: skip
    """Return a device's side of an iteration that was timed without recording.

    Busy times are as recorded. What remains of the iteration is idle; recordings give the shares of its causes, and
    the time between steps that they do not contain counts as not recorded.

    Args:
        times: what the device did in the recorded iterations.
        count: their number.
        time: the time of the iteration.
        host: the host's side of it.
        wall_ns: duration of the recordings.
        represented: how many iterations each recorded one stands for.
        are_whole: whether recordings begin at the end of the step before.
    """
    side = ondevice.side(times, count, RECORDED)
    if times.busy_ns:
        factor = represented.mean(times.per_iteration_busy_ns) * count / sum(times.per_iteration_busy_ns)
        busy = names.scaled([entry for entry in side.entries if entry.name == names.BUSY], factor)
        side = replace(side, entries=(*busy, *(entry for entry in side.entries if entry.name != names.BUSY)))
    iteration_ms, busy_ms = time.ms or 0.0, side.ms(names.BUSY)
    idle_ms = iteration_ms - busy_ms - side.ms(names.EARLIER)
    recorded_idle = side[names.IDLE]
    between_steps = host[names.BETWEEN]
    unseen_ms = 0.0
    if between_steps is not None and not between_steps.children:
        unseen_ms = (between_steps.ms or 0.0) + host.ms(names.DATA) * (wall_ns / count / 1e6 < iteration_ms)
    elif between_steps is not None and are_whole:
        unseen_ms = between_steps.part(names.NOT_RECORDED)
    unseen_ms = min(max(0.0, idle_ms), unseen_ms, max(0.0, iteration_ms - wall_ns / count / 1e6))
    rest_ms = max(0.0, idle_ms) - unseen_ms
    causes: list[Entry] = []
    if recorded_idle is not None and recorded_idle.ms:
        factor = rest_ms / recorded_idle.ms
        causes = list(names.scaled(recorded_idle.children, factor))
    elif rest_ms:
        causes = [Entry(names.NO_LAUNCH, rest_ms, RECORDED)]
    if unseen_ms:
        causes.append(Entry(names.NOT_RECORDED, unseen_ms, BARE))
    entries = [entry for entry in side.entries if entry.name != names.IDLE]
    if idle_ms > 0:
        entries.insert(1, Entry(names.IDLE, idle_ms, BARE, children=_ordered(causes)))
    return _closed(replace(side, entries=tuple(entries)), time)


def _closed(side: Side, time: Entry) -> Side:
    """Return a side with what is missing from the iteration, or exceeds it, as an entry of its own."""
    rest_ms = (time.ms or 0.0) - side.total_ms
    if time.ms is None or abs(rest_ms) < 1e-6 * max(1.0, time.ms):
        return side
    return replace(side, entries=(*side.entries, Entry(names.UNEXPLAINED, rest_ms, "difference")))


FAST_SHARE = 0.25
"""Share of iterations that count as fast ones."""


def _least_host_ms(trace: Trace, rank: int, kind: int | None) -> float | None:
    """Return the milliseconds of the host in a fast iteration of a kind on a rank; None if none was unrecorded."""
    ((least_ns,),) = trace.con.execute(
        f"SELECT quantile_cont(dur_ns + coalesce(before_ns, 0), {FAST_SHARE}) FROM loop WHERE rank = ? "
        f"AND kind IS NOT DISTINCT FROM ? AND rung = {UNRECORDED} AND status = 'ok'",
        [rank, kind],
    ).fetchall()
    return None if least_ns is None else float(least_ns) / 1e6


def _limit(account: Iterations, believes_devices: bool, knows_waits: bool, least_host_ms: float | None) -> Limit | None:
    if account.time.ms is None or not believes_devices:
        return None
    device = account.device
    waiting_ms = sum(
        entry.ms or 0.0
        for top in account.host.entries
        for entry in top.walk()
        if entry.name in (names.WAITING, names.DRAINING)
    )
    host_ms = max(0.0, account.time.ms - waiting_ms)
    if device is None:
        return Limit("host", host_ms, 0.0)
    device_ms = device.ms(names.BUSY)
    if not knows_waits:
        return Limit("device" if device_ms >= NEARLY_ALL * account.time.ms else "unknown", 0.0, device_ms)
    return Limit("device" if device_ms >= host_ms else "host", host_ms, device_ms, least_host_ms)


def _wall(trace: Trace) -> tuple[float | None, float | None]:
    """Return the wall time of the loop of the figures' rank in milliseconds, and the part in no iteration."""
    rows = trace.con.execute(
        """
        SELECT min(start_ns - coalesce(before_ns, 0)),
               max(start_ns + dur_ns * steps + coalesce(before_ns, 0) * (steps - 1)),
               sum(steps * (dur_ns + coalesce(before_ns, 0) + coalesce(own_ns, 0))) FROM loop WHERE rank = ?
        """,
        [trace.rank],
    ).fetchall()
    start, end, inside = rows[0]
    if start is None:
        return None, None
    wall_ns = float(end - start)
    return wall_ns / 1e6, max(0.0, wall_ns - float(inside)) / 1e6


def by_rank(account: Account) -> Mapping[int, Iterations]:
    """Return the account of the main kind of each rank."""
    return {each.rank: each for each in account.ranks}
