"""The device side of iterations: busy by purpose and class, and idle by cause, of each device.

Device work belongs to the iteration whose host launched it, whenever it runs. Work that was launched before the
recording belongs to none: on its stream it ran before the first work with a launch in the trace. Each moment of a
recording is counted once for each device: computation, else communication, else copies, else earlier work, else idle.

A gap between device work is split at the launch of the work that ends it. Before the launch has reached the device, the
device waits for the host: while the host waits for data; as long as the host had waited for the device in its last
wait, because without it the launch would have been that much earlier; else because the host issues too late. After the
launch the work waits, or its copy is prepared. If the launch is the first one of a step, the device waits for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xsp.account import entries as names
from xsp.account.entries import Entry, Side
from xsp.account.sweep import Times, Union, clipped, coded, complement, covered, intersection, length, union, without
from xsp.account.windows import IterationWindow, tables
from xsp.device.kernelnames import COMMUNICATION
from xsp.schema import Kind
from xsp.store.devicework import COPY
from xsp.store.trace import Trace

LAUNCH_NS = 10_000
"""Nanoseconds in which a launch reaches an idle device: some 3 to 10 µs on today's machines."""

NONE, EARLIER = -1, -2
"""In place of the number of an iteration: work outside all of them, and work that was launched before the recording."""


class DeviceWork(NamedTuple):
    """Device work of a rank, in order of its start."""

    start: Times
    end: Times
    device: Times
    stream: Times
    purpose: Times
    kind: Any
    """Class of each kernel, from its name; the name of a copy."""

    owner: Times
    """Index of the iteration that launched it, or `NONE` or `EARLIER`."""

    launch: Times
    """Start of its launch; -1 if it is not in the trace."""

    returned: Times
    thread: Times
    blocks: Any
    """Whether the call of the launch waits for the work."""

    span: Any


def work_of(trace: Trace, rank: int, iterations: Sequence[IterationWindow]) -> DeviceWork:
    """Return the device work of a rank with the iterations that launched it."""
    made = tables(trace)
    table = trace.con.execute(
        f"""
        SELECT w.start_ns, w.end_ns, coalesce(w.device, 0) AS device, coalesce(w.stream, -1) AS stream,
               CASE purpose WHEN '{COMMUNICATION}' THEN 1 WHEN '{COPY}' THEN 2 ELSE 0 END AS purpose,
               CASE WHEN w.kind = '{Kind.COPY}' THEN w.name ELSE w.class END AS class,
               coalesce(begin_ns, -1) AS launch_ns,
               coalesce(returned_ns, 0) AS returned_ns, coalesce(on_thread, -1) AS thread,
               coalesce(blocks, false) AS blocks, w.span_id
        FROM {made.device_work} w LEFT JOIN {made.launches} USING (rank, on_process, correlation_id)
        WHERE w.rank = ? ORDER BY w.start_ns, w.span_id
        """,
        [rank],
    ).fetchnumpy()
    columns = [np.asarray(table[name]) for name in table]
    start, end, device, stream, purpose, kind, launch, returned, thread, blocks, span = columns
    owner = _owners(start, device, stream, launch, iterations)
    return DeviceWork(
        start.astype(np.int64), end.astype(np.int64), device.astype(np.int64), stream.astype(np.int64),
        purpose.astype(np.int64), kind, owner, launch.astype(np.int64), returned.astype(np.int64),
        thread.astype(np.int64), blocks.astype(bool), span,
    )  # fmt: skip


def _owners(start: Times, device: Times, stream: Times, launch: Times, iterations: Sequence[IterationWindow]) -> Times:
    """Return the iteration of each piece of work: that of its launch, else of its neighbours on its stream."""
    if all(window.is_whole for window in iterations):
        return np.zeros(len(start), np.int64)
    on_host = [window.on_host or (window.start_ns, window.end_ns) for window in iterations]
    begins, ends = np.array(on_host, np.int64).reshape(-1, 2).T

    def index_of(times: Times) -> Times:
        index = np.searchsorted(begins, times, "right") - 1
        inside = (index >= 0) & (times < ends[np.maximum(index, 0)])
        return np.where(inside, index, NONE)

    has_launch = launch >= 0
    owner = np.where(has_launch, index_of(launch), NONE)
    if not has_launch.any():  # the trace has no calls: all that is known is when the work ran
        return index_of(start)
    for lane in {(int(d), int(s)) for d, s in zip(device, stream, strict=True)}:
        on_lane = np.flatnonzero((device == lane[0]) & (stream == lane[1]))
        missing = ~has_launch[on_lane]
        if not missing.any():
            continue
        places = np.arange(len(on_lane))
        last_known = np.maximum.accumulate(np.where(missing, -1, places))
        inherited = np.where(last_known >= 0, owner[on_lane[np.maximum(last_known, 0)]], NONE)
        # work of a stream runs in the order of its launches
        first_ns = launch[has_launch].min() if missing.all() else start[on_lane[np.argmax(~missing)]]
        before = start[on_lane] < first_ns
        guessed = np.where(before, EARLIER, np.where(last_known >= 0, inherited, index_of(start[on_lane])))
        owner[on_lane] = np.where(missing, guessed, owner[on_lane])
    return owner


class HostWaits(NamedTuple):
    """What the host waited for: unions of waits for data, and each wait for a device in order of its start."""

    data: Union
    starts: Times
    ends: Times
    thread: Times


def host_waits(trace: Trace, rank: int) -> HostWaits:
    """Return the waits of a rank's host for data and for devices."""
    data = trace.con.execute(
        f"SELECT start_ns, start_ns + dur_ns AS end_ns FROM spans WHERE kind = '{Kind.DATA}' AND rank = ?", [rank]
    ).fetchnumpy()
    calls = trace.con.execute(
        f"SELECT start_ns, end_ns, on_thread FROM {tables(trace).runtime_calls} "
        "WHERE rank = ? AND waits AND timed IS NOT false ORDER BY start_ns",
        [rank],
    ).fetchnumpy()
    return HostWaits(
        union(np.asarray(data["start_ns"], np.int64), np.asarray(data["end_ns"], np.int64)),
        *(np.asarray(calls[name], np.int64) for name in ("start_ns", "end_ns", "on_thread")),
    )


class Gap(NamedTuple):
    """A part of an idle gap, with its cause."""

    cause: str
    start_ns: int
    end_ns: int
    thread: int
    ends_with: int
    """Index of the work that ends the gap; -1 at the end of a recording."""


@dataclass(frozen=True)
class DeviceTimes:
    """The device side of all recorded iterations of a rank, in nanoseconds of all of them together."""

    device: int
    wall_ns: int
    purposes: dict[str, int]
    """Computation, exposed communication, exposed copies, and earlier work."""

    classes: dict[str, dict[str, float]]
    """Purpose → class → nanoseconds, which add up to the purpose."""

    hidden_communication_ns: int
    gaps: list[Gap]
    per_iteration_busy_ns: list[int]

    @property
    def busy_ns(self) -> int:
        """Time in which work of the iterations ran."""
        return sum(ns for name, ns in self.purposes.items() if name != names.EARLIER)

    @property
    def earlier_ns(self) -> int:
        """Time of work that was launched before the recording, with the gaps in it."""
        gaps_ns = sum(gap.end_ns - gap.start_ns for gap in self.gaps if gap.cause == names.EARLIER)
        return self.purposes[names.EARLIER] + gaps_ns


def block_ends(work: DeviceWork, iterations: Sequence[IterationWindow]) -> dict[int, tuple[int, int]]:
    """Return for each recording its start and its end: that of its last iteration or of the last work it launched."""
    bounds: dict[int, tuple[int, int]] = {}
    last_end = np.zeros(len(iterations), np.int64)
    owned = work.owner >= 0
    if owned.any():
        np.maximum.at(last_end, work.owner[owned], work.end[owned])
    for index, window in enumerate(iterations):
        start, end = bounds.get(window.block, (window.start_ns, 0))
        bounds[window.block] = start, max(end, window.end_ns, int(last_end[index]))
    return bounds


def device_times(
    work: DeviceWork,
    waits: HostWaits,
    iterations: Sequence[IterationWindow],
    bounds: dict[int, tuple[int, int]],
    for_ranks: Union | None = None,
) -> list[DeviceTimes]:
    """Return what each device of a rank did in the recordings of its iterations."""
    return [
        _of_device(work, np.flatnonzero(work.device == device), waits, iterations, bounds, device, for_ranks)
        for device in sorted({int(device) for device in work.device[work.owner >= 0]})
    ]


def _of_device(
    work: DeviceWork,
    rows: Any,
    waits: HostWaits,
    iterations: Sequence[IterationWindow],
    bounds: dict[int, tuple[int, int]],
    device: int,
    for_ranks: Union | None,
) -> DeviceTimes:
    purposes = dict.fromkeys((names.COMPUTATION, names.COMMUNICATION, names.COPIES, names.EARLIER), 0)
    own, purpose = work.owner[rows] >= 0, work.purpose[rows]
    start, end = work.start[rows], work.end[rows]

    def union_of(mask: Any) -> Union:
        return union(start[mask], end[mask])

    computing, kernels = union_of(own & (purpose == 0)), union_of(own & (purpose <= 1))
    all_own, everything = union_of(own), union(start, end)
    communicating = union_of(own & (purpose == 1))
    exposed = without(communicating, computing)
    waited_ns = 0
    gaps: list[Gap] = []
    wall_ns = hidden_ns = 0
    for begin, stop in bounds.values():
        inside = [length(clipped(part, begin, stop)) for part in (computing, kernels, all_own, everything)]
        purposes[names.COMPUTATION] += inside[0]
        purposes[names.COMMUNICATION] += inside[1] - inside[0]
        purposes[names.COPIES] += inside[2] - inside[1]
        purposes[names.EARLIER] += inside[3] - inside[2]
        hidden_ns += length(clipped(communicating, begin, stop)) - (inside[1] - inside[0])
        if for_ranks is not None:
            waited_ns += length(clipped(intersection(exposed, for_ranks), begin, stop))
        wall_ns += stop - begin
        gaps += _gaps(work, rows, complement(everything, begin, stop), waits, iterations)
    classes = {
        names.COMPUTATION: _classes(work, rows[own & (purpose == 0)], purposes[names.COMPUTATION]),
        names.COPIES: _classes(work, rows[own & (purpose == 2)], purposes[names.COPIES]),
    }
    if for_ranks is not None and length(for_ranks):
        classes[names.COMMUNICATION] = {
            names.OTHER_RANKS: float(min(waited_ns, purposes[names.COMMUNICATION])),
            names.TRANSFER: float(max(0, purposes[names.COMMUNICATION] - waited_ns)),
        }
    busy = [0] * len(iterations)
    for index in range(len(iterations)):
        mine = work.owner[rows] == index
        busy[index] = length(union(start[mine], end[mine]))
    return DeviceTimes(device, wall_ns, purposes, classes, max(0, hidden_ns), gaps, busy)


def _classes(work: DeviceWork, rows: Any, total_ns: int) -> dict[str, float]:
    """Return the time of each class; work of several streams that overlaps shares its time."""
    kinds, codes = coded(work.kind[rows])
    sums = np.bincount(codes, work.end[rows] - work.start[rows], len(kinds)) if len(rows) else np.zeros(0)
    whole = sums.sum()
    return {kind: float(total_ns * ns / whole) for kind, ns in zip(kinds, sums, strict=True) if whole}


def _gaps(
    work: DeviceWork, rows: Any, gaps: Union, waits: HostWaits, iterations: Sequence[IterationWindow]
) -> list[Gap]:
    """Return the parts of the gaps of a device in a recording, with their causes."""
    found: list[Gap] = []
    starts = work.start[rows]
    place = np.minimum(np.searchsorted(starts, gaps[1], "left"), len(rows) - 1)
    # the columns of the work that follows each gap, and what the host did before its launch, at once for all gaps
    row = rows[place]
    launch, blocks = work.launch[row], work.blocks[row]
    reached = np.maximum(np.maximum(launch + LAUNCH_NS, gaps[0]), np.where(blocks, 0, work.returned[row]))
    reached = np.where(launch >= gaps[0] - LAUNCH_NS, reached, gaps[0])
    reached = np.where((gaps[1] - reached <= LAUNCH_NS) & (reached > gaps[0]), gaps[1], reached)
    host_end = np.minimum(reached, gaps[1])
    data_ns = covered(waits.data, gaps[0], np.minimum(host_end, launch))
    late = np.where(reached > gaps[0], launch, -1)
    waited_ns = _waited_ns(waits, gaps[0], host_end, late, work.thread[row], data_ns)
    begins = np.array([(window.on_host or (window.start_ns, 0))[0] for window in iterations], np.int64)
    owner = work.owner[row]
    iteration = np.maximum(owner, 0)
    is_first = (owner >= 0) & (_first_launches(work, rows, len(iterations))[iteration] == launch)
    columns = (
        *gaps, starts[place] == gaps[1], row, launch, work.thread[row], owner, blocks, reached, data_ns, waited_ns,
        is_first & (begins[iteration] <= launch),
    )  # fmt: skip
    for begin, stop, has_next, index, launch_ns, thread, owned_by, is_blocking, until, data, waited, first in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if not has_next:
            found.append(Gap(names.AFTER_LAST, begin, stop, -1, -1))
            continue
        if owned_by == EARLIER:
            found.append(Gap(names.EARLIER, begin, stop, thread, index))
            continue
        if launch_ns < 0 or launch_ns > stop:
            found.append(Gap(names.NO_LAUNCH, begin, stop, thread, index))
            continue
        if until < stop:
            cause = names.COPYING if is_blocking and until > begin else names.QUEUED
            found.append(Gap(cause, max(begin, until), stop, thread, index))
        now = begin
        rest = names.BEFORE_FIRST if first else names.HOST_LATE
        parts = ((names.HOST_DATA, data), (names.DRAINED, waited), (rest, min(until, stop) - begin - data - waited))
        for cause, ns in parts if until > begin else ():
            if ns > 0:
                found.append(Gap(cause, now, now + ns, thread, index))
                now += ns
    return found


def _waited_ns(waits: HostWaits, begin: Times, end: Times, launch: Times, thread: Times, data_ns: Times) -> Times:
    """Return how much of the time before each launch the thread of the launch had waited for the device before it."""
    waited_ns = np.zeros(len(launch), np.int64)
    if not len(waits.starts):
        return waited_ns
    last = np.searchsorted(waits.starts, launch, "right") - 1
    starts, ends, threads = waits.starts.tolist(), waits.ends.tolist(), waits.thread.tolist()
    rows = zip(
        last.tolist(), begin.tolist(), end.tolist(), launch.tolist(), thread.tolist(), data_ns.tolist(), strict=True
    )
    for index, (place, begin_ns, end_ns, launch_ns, on_thread, of_data) in enumerate(rows):
        while place >= 0 and threads[place] != on_thread and launch_ns - starts[place] < _MOST_LOOKED_BACK_NS:
            place -= 1
        if place >= 0 and threads[place] == on_thread and ends[place] >= begin_ns:
            waited_ns[index] = max(0, min(min(ends[place], launch_ns) - starts[place], end_ns - begin_ns - of_data))
    return waited_ns


_MOST_LOOKED_BACK_NS = 1_000_000_000


def _first_launches(work: DeviceWork, rows: Any, count: int) -> Times:
    first = np.full(count, np.iinfo(np.int64).max, np.int64)
    launched = rows[(work.owner[rows] >= 0) & (work.launch[rows] >= 0)]
    np.minimum.at(first, work.owner[launched], work.launch[launched])
    return first


def side(times: DeviceTimes, count: int, source: str, before_ns: int = 0) -> Side:
    """Return the side of a device as means over its recorded iterations.

    Args:
        times: what the device did in all of them.
        count: number of iterations.
        source: the measurement, for the entries.
        before_ns: time of earlier work that is not in the iterations' time; of work on this device, else idle here.
    """
    scale = 1e-6 / count

    def entry(name: str, ns: float, children: Sequence[Entry] = ()) -> Entry:
        return Entry(name, ns * scale, source, children=tuple(children))

    busy = []
    for name in (names.COMPUTATION, names.COMMUNICATION, names.COPIES):
        ns = times.purposes[name]
        parts = sorted(times.classes.get(name, {}).items(), key=lambda item: -item[1])
        if ns:
            busy.append(entry(name, ns, [entry(kind, part) for kind, part in parts if part]))
    causes: dict[str, int] = {}
    for gap in times.gaps:
        if gap.cause != names.EARLIER:
            causes[gap.cause] = causes.get(gap.cause, 0) + gap.end_ns - gap.start_ns
    earlier_ns = max(0, times.earlier_ns - before_ns)
    rest_ns = before_ns - (times.earlier_ns - earlier_ns)
    for cause in sorted(causes, key=lambda name: (name != names.AFTER_LAST, -causes[name])):
        taken = min(causes[cause], rest_ns)
        causes[cause], rest_ns = causes[cause] - taken, rest_ns - taken
    idle = [entry(cause, ns) for cause, ns in sorted(causes.items(), key=lambda item: -item[1]) if ns]
    entries = [
        entry(names.BUSY, times.busy_ns, busy),
        entry(names.IDLE, sum(causes.values()), idle),
    ]
    if earlier_ns:
        entries.append(entry(names.EARLIER, earlier_ns))
    return Side(f"device {times.device}", tuple(entries), times.device, times.hidden_communication_ns * scale)
