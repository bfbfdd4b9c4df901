"""The step in a device trace: each gap is counted with the work after it, and exposed communication is left out.

A device works through a step in order. So the time from the end of the previous work to the end of a kernel is the time
that the step spends on that kernel, whether the kernel ran or waited for its launch. Time in which only a collective
ran is excluded, because it changes with the number of ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xsp.analyses.answers import Answers
from xsp.analyses.collectives import COLLECTIVES, why_none
from xsp.analyses.devicework import SKEW_NS, prepare
from xsp.device.kernelnames import COMMUNICATION
from xsp.errors import AnalysisError
from xsp.predict.buckets import Buckets
from xsp.predict.hoststep import Call, Lane, in_order
from xsp.predict.training import Layer
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import FULL_NAME

END_NS = 1 << 62
"""A time after the end of any trace, and an index after any layer."""

PIECES = 20
"""Number of pieces of a backward pass whose modules and collectives are unknown."""


class OnDevice(NamedTuple):
    """The work of a device in a step; durations are seconds."""

    layers: tuple[Layer, ...]
    update: float
    copy: float
    exposed: float
    """Reductions of gradients with no work beside them, which no other field includes."""

    others: float
    """Other collectives with no work beside them."""

    step: float
    """All work, gaps and exposed communication, divided by the number of steps."""

    plan: Buckets | None
    lasted: tuple[float, ...]
    """Duration of the collective of each bucket of the plan on the device; empty without a plan."""

    lanes: Mapping[str, Lane]
    told: list[str]
    unknown: list[str]


class _Work(NamedTuple):
    """A kernel or a copy; `took` is its seconds with the gap before it."""

    step: int | None
    phase: str
    layer: str | None
    order: int | None
    end_ns: int
    took: float


def group(trace: Trace) -> int | None:
    """Return the largest group size of the collectives in a trace; None if no collective reports one."""
    if why_none(trace) is not None:
        return None
    prepare(trace)
    found = trace.sql(f"WITH {COLLECTIVES} SELECT max(group_size) FROM collectives").fetchall()
    return int(found[0][0]) if found and found[0][0] is not None else None


def slow_rank(trace: Trace) -> str | None:
    """Return a sentence on the rank that the others wait for; None if there is no such rank, or only one rank.

    That rank comes last to most collectives, by more than the uncertainty of the clocks. Its slowdown is the time of
    the work on its device, without communication, over that of the median of the other ranks.
    """
    if why_none(trace) is not None:
        return None
    try:
        rows = Answers(trace)["stragglers"].dicts()
    except AnalysisError:
        return None
    first = rows[0] if len(rows) > 1 else None
    if first is None or 2 * first["last_for_certain"] <= first["collectives"]:
        return None
    prepare(trace)
    took = dict(
        trace.sql(
            f"SELECT rank, sum(end_ns - start_ns) FROM device_work WHERE purpose <> '{COMMUNICATION}' GROUP BY rank"
        ).fetchall()
    )
    others = sorted(float(each) for rank, each in took.items() if rank != first["rank"])
    if first["rank"] not in took or not others or not others[len(others) // 2]:
        return None
    factor = float(took[first["rank"]]) / others[len(others) // 2]
    own = "; the figures are for it" if first["rank"] == trace.rank else f": --straggler {factor:.3g} includes it"
    return (
        f"slow rank: rank {first['rank']} came last to {first['last_for_certain']} of {first['collectives']} "
        f"collectives, and its device is busy {factor:.3g} times as long as that of the median rank{own}"
    )


def of(trace: Trace) -> OnDevice:
    """Return the mean of the recorded steps on the lowest device of the trace's rank.

    Raises:
        AnalysisError: no device work is known to belong to a backward pass.
    """
    prepare(trace)
    rows, devices = _rows(trace)
    steps = len({row["step"] for row in rows if row["step"] is not None}) or 1
    sent, others = _reductions(trace, rows)
    work, lanes, exposed, of_others, waited = _walked(rows)
    if not any(each.phase == "backward" for each in work):
        raise AnalysisError(
            f"{trace.name!r} has no device work of a backward pass: it is not a training step, or the profiler did "
            "not record its operators"
        )
    told = [
        f"forward, backward, update: {len(work):,} kernels and copies of one device in {steps} "
        f"step{'s' * (steps > 1)}, each with the gap before it; the gap before a copy is other work"
    ]
    if exposed:
        told.append(f"removed: {exposed / steps * 1e3:.3g} ms of a step, gradient collectives that nothing overlaps")
    slow = slow_rank(trace)
    if slow is not None:
        told.append(slow)
    unknown = ["how much collectives slowed down computation beside them"] if sent else []
    if others:
        unknown.append(
            f"other collectives ({others}): the {of_others / steps * 1e3:.3g} ms of a step that they take with nothing "
            "overlapping stay as recorded, on any number of ranks"
        )
    if devices > 1:
        unknown.append(f"{devices - 1} of {devices} devices: the step is that of the first one")
    layers, plan, lasted = _layers(work, sent, steps, unknown)
    if plan is None and not any(each.layer for each in work):
        unknown.append(f"modules: the backward pass is divided into {PIECES} pieces of equal time")
    update, copy = (sum(each.took for each in work if each.phase == phase) / steps for phase in ("update", "copy"))
    step = (sum(each.took for each in work) + waited + exposed + of_others) / steps
    return OnDevice(layers, update, copy, exposed / steps, of_others / steps, step, plan, lasted, lanes, told, unknown)


def _rows(trace: Trace) -> tuple[list[dict[str, Any]], int]:
    """Return the work of the lowest device by start time, and the number of devices of the rank."""
    relation = trace.sql(
        f"""
        WITH mine AS (
            SELECT *, min(device) OVER () AS lowest FROM device_work WHERE rank = {trace.rank}
        ), layer AS (
            SELECT rank, trace_id, span_id, {FULL_NAME.format("spans")} AS name, layer_index
            FROM spans WHERE level = {int(Level.LAYER)}
        ), phased AS (
            SELECT rank, trace_id, span_id, phase FROM spans WHERE level = {int(Level.KERNEL)}
        )
        SELECT mine.span_id AS span_id, mine.start_ns AS start_ns, mine.end_ns AS end_ns, mine.step AS step,
               mine.recording AS recording, phased.phase AS phase, layer.name AS layer, layer.layer_index AS place,
               mine.kind = '{Kind.COPY}' AND (contains(mine.name, 'HtoD') OR contains(mine.name, 'HostToDevice'))
                   AS copies, mine.purpose = '{COMMUNICATION}' AS sends, sends AS sums
        FROM mine
        LEFT JOIN phased ON phased.rank = mine.rank AND phased.span_id = mine.span_id
                         AND phased.trace_id IS NOT DISTINCT FROM mine.trace_id
        LEFT JOIN layer ON layer.rank = mine.rank AND layer.span_id = mine.layer_id
                        AND layer.trace_id IS NOT DISTINCT FROM mine.trace_id
        WHERE mine.device IS NOT DISTINCT FROM mine.lowest ORDER BY mine.start_ns, mine.span_id
        """
    )
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    ((devices,),) = trace.sql(f"SELECT count(DISTINCT device) FROM device_work WHERE rank = {trace.rank}").fetchall()
    return rows, int(devices)


def _walked(rows: Sequence[Mapping[str, Any]]) -> tuple[list[_Work], dict[str, Lane], float, float, float]:
    """Return the work with its times, the lanes of the first step, and three times in seconds that belong to no work.

    These are exposed sums of gradients, other exposed collectives, and gaps before copies, in which the host had no
    batch yet.
    """
    work: list[_Work] = []
    drawn: dict[str, list[tuple[float, float]]] = {}
    backward: dict[Any, list[int]] = {}
    for row in rows:
        if row["phase"] == "backward" and not row["sends"]:
            backward.setdefault(row["step"], []).append(row["start_ns"])
    until, recording, shown, idle = 0, None, None, 0
    alone = [0, 0]
    sent: list[_Sending] = []
    for row in rows:
        start, end = row["start_ns"], row["end_ns"]
        if recording is None or row["recording"] != recording:
            _exposed(sent, until, END_NS, alone)
            until, recording, sent = start, row["recording"], []
        those = backward.get(row["step"])
        phase = _phase(row, *((min(those), max(those)) if those else (None, None)))
        shown = shown or (row["step"], start)
        if row["step"] == shown[0]:
            name = "communication" if row["sends"] else phase
            drawn.setdefault(name, []).append(((start - shown[1]) / 1e9, (end - shown[1]) / 1e9))
        if row["sends"]:
            sent.append(_Sending(start, end, row["sums"]))
            continue
        gap = max(0, start - until)
        ended = [each for each in sent if each.end_ns <= start + SKEW_NS]  # work did not wait for one that still runs
        exposed = _exposed(ended, until, start, alone) if gap else 0
        idle += gap - exposed if phase == "copy" else 0
        took = max(0, end - max(start, until)) + (0 if phase == "copy" else gap - exposed)
        work.append(_Work(row["step"], phase, row["layer"], row["place"], end, took / 1e9))
        until = max(until, end)
        sent = [each for each in sent if each.end_ns > until]
    _exposed(sent, until, END_NS, alone)  # collectives after the last work: no later work waits for them
    return work, {name: tuple(those) for name, those in drawn.items()}, alone[0] / 1e9, alone[1] / 1e9, idle / 1e9


class _Sending(NamedTuple):
    """A running collective, and whether it sums gradients."""

    start_ns: int
    end_ns: int
    sums: bool


def _exposed(sent: Sequence[_Sending], start: int, end: int, alone: list[int]) -> int:
    """Return the nanoseconds of an interval that collectives cover; add them to `alone`, as [sums, others]."""
    both = _covered([each[:2] for each in sent], start, end)
    sums = _covered([each[:2] for each in sent if each.sums], start, end)
    alone[0] += sums
    alone[1] += both - sums
    return both


def _phase(row: Mapping[str, Any], first: int | None, last: int | None) -> str:
    """Return the part of the step that work belongs to; without a phase, its start relative to backward decides."""
    if row["copies"]:
        return "copy"
    if row["phase"] == "backward":
        return "backward"
    if row["phase"] == "optimizer":
        return "update"
    if row["phase"] == "forward" or row["layer"] is not None or first is None or row["start_ns"] < first:
        return "forward"
    return "update" if last is not None and row["start_ns"] > last else "backward"


def _covered(intervals: Sequence[tuple[int, int]], start: int, end: int) -> int:
    """Return the length of an interval that other intervals, ordered by their start, cover."""
    covered, until = 0, start
    for begin, stop in intervals:
        begin, stop = max(begin, until), min(stop, end)
        if stop > begin:
            covered, until = covered + stop - begin, stop
    return covered


class _Sent(NamedTuple):
    """A collective of gradients: its step, start, duration and bytes."""

    step: int | None
    start_ns: int
    lasted_ns: int
    size: int


def _reductions(trace: Trace, rows: Sequence[dict[str, Any]]) -> tuple[list[_Sent], str]:
    """Return the collectives that reduce, by start time, and the others in words; set `sums` in the rows of all.

    The list is empty if the size of one of its collectives is unknown.
    """
    if why_none(trace) is not None:
        return [], ""
    mine = {row["span_id"]: row for row in rows if row["sends"]}
    found = trace.sql(
        f"WITH {COLLECTIVES} SELECT span_id, collective, bytes FROM collectives WHERE rank = {trace.rank} "
        "ORDER BY start_ns, span_id"
    ).fetchall()
    those = [each for each in found if each[0] in mine]
    other = Counter(kind for _, kind, _ in those if kind not in _SUMS)
    words = ", ".join(f"{count} of {kind}" for kind, count in sorted(other.items()))
    for span_id, kind, _ in those:
        mine[span_id]["sums"] = kind in _SUMS
    sums = [(mine[span_id], size) for span_id, kind, size in those if kind in _SUMS]
    if any(size is None for _, size in sums):
        return [], words
    return [
        _Sent(row["step"], row["start_ns"], row["end_ns"] - row["start_ns"], int(size)) for row, size in sums
    ], words


_SUMS = ("all_reduce", "reduce_scatter")


def _layers(
    work: Sequence[_Work], sent: Sequence[_Sent], steps: int, unknown: list[str]
) -> tuple[tuple[Layer, ...], Buckets | None, tuple[float, ...]]:
    """Return the layers of the step: cut where gradients were sent, else by module, else in equal pieces.

    In the first case the buckets and the seconds of each bucket's collective are returned too.
    """
    forward = sum(each.took for each in work if each.phase == "forward") / steps
    backward = [each for each in work if each.phase == "backward"]
    cut = _cut(forward, backward, sent, steps, unknown)
    if cut is not None:
        return cut
    if any(each.layer for each in work):
        return _by_module(work, steps), None, ()
    whole = sum(each.took for each in backward)
    pieces = [0.0] * PIECES
    done = 0.0
    for each in backward:
        pieces[min(PIECES - 1, int(PIECES * done / whole)) if whole else 0] += each.took / steps
        done += each.took
    layers = (Layer(f"piece {PIECES - place}", forward / PIECES, pieces[place]) for place in range(PIECES))
    return tuple(layers)[::-1], None, ()


def _cut(
    forward: float, backward: Sequence[_Work], sent: Sequence[_Sent], steps: int, unknown: list[str]
) -> tuple[tuple[Layer, ...], Buckets, tuple[float, ...]] | None:
    """Return a layer for each collective of gradients: the work of the backward pass since the previous collective.

    Only the steps with the most frequent buckets are used, since in its first step PyTorch has other buckets. If at
    most half of the steps have the same, collectives may be missing, which is added to `unknown`.
    """
    took: dict[tuple[int, ...], list[list[float]]] = {}
    lasted: dict[tuple[int, ...], list[list[int]]] = {}
    for step in dict.fromkeys(each.step for each in backward):
        those = [each for each in backward if each.step == step]
        mine = [each for each in sent if each.step == step and each.start_ns + SKEW_NS >= those[0].end_ns]
        if not mine:
            continue
        pieces, place = [0.0] * len(mine), 0
        for each in those:
            while place < len(mine) - 1 and each.end_ns > mine[place].start_ns + SKEW_NS:
                place += 1
            pieces[place] += each.took
        took.setdefault(tuple(each.size for each in mine), []).append(pieces)
        lasted.setdefault(tuple(each.size for each in mine), []).append([each.lasted_ns for each in mine])
    if not took:
        return None
    sizes = max(reversed(took), key=lambda each: len(took[each]))
    counted = sum(map(len, took.values()))
    if len(took) > 1 and 2 * len(took[sizes]) <= counted:
        whole_mb = sorted(sum(each) / 1e6 for each in took)
        unknown.append(
            f"bytes of the gradients: {counted} steps sent {len(took)} different sets, of {whole_mb[0]:.4g} to "
            f"{whole_mb[-1]:.4g} MB, so the trace may be incomplete; a set of {sum(sizes) / 1e6:.4g} MB is used"
        )
    whole = sum(each.took for each in backward) / steps
    means = [sum(pieces) / len(took[sizes]) for pieces in zip(*took[sizes], strict=True)]
    scale = whole / sum(means) if sum(means) else 0.0
    layers = [
        Layer(f"bucket {number}", forward / len(sizes), means[number] * scale, (size,))
        for number, size in enumerate(sizes)
    ]
    lasting = tuple(statistics.fmean(those) / 1e9 for those in zip(*lasted[sizes], strict=True))
    return tuple(reversed(layers)), tuple((number,) for number in range(len(sizes))), lasting


def _by_module(work: Sequence[_Work], steps: int) -> tuple[Layer, ...]:
    """Return the calls of modules, with the backward pass in device order; work outside modules is one more call.

    Times are means over the steps. Each module is placed as in the step with the most modules among those that have it.
    """
    forward: dict[tuple[int, str], float] = {}
    backward: dict[Any, dict[tuple[int, str], list[tuple[float, float]]]] = {}
    last: dict[Any, tuple[int, str]] = {}
    for place, each in enumerate(work):
        key = (each.order, each.layer) if each.layer is not None and each.order is not None else (END_NS, "no module")
        if each.phase == "forward":
            forward[key] = forward.get(key, 0.0) + each.took / steps
        elif each.phase == "backward":
            those = backward.setdefault(each.step, {}).setdefault(key, [])
            if those and last[each.step] == key:
                those[-1] = those[-1][0], those[-1][1] + each.took
            else:
                those.append((place, each.took))
            last[each.step] = key
    firsts = {step: min(at for those in found.values() for at, _ in those) for step, found in backward.items()}
    order = sorted(backward, key=lambda step: -len(backward[step]))
    calls = []
    for key in sorted({*forward, *(key for found in backward.values() for key in found)}):
        having = [step for step in order if key in backward[step]]
        whole = sum(took for step in having for _, took in backward[step][key]) / steps
        shown = backward[having[0]][key] if having else []
        own = sum(took for _, took in shown)
        scale = whole / own if own else 0.0
        calls.append(
            Call(key[1], forward.get(key, 0.0), [(at - firsts[having[0]], took * scale) for at, took in shown])
        )
    return tuple(in_order(calls))
