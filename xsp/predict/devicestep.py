"""The step in a device trace: each gap is counted with the work after it, and exposed communication is excluded.

A device works through a step in order. So the time from the end of the previous work to the end of a kernel is the time
that the step spends on that kernel, whether the kernel ran or waited for its launch. Time in which only a collective
ran is excluded, because it changes with the number of ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xsp import clock
from xsp.analyses.answers import Answers
from xsp.device.kernelnames import COMMUNICATION
from xsp.errors import AnalysisError
from xsp.predict.hoststep import Lane, RecordedModule, layers_in_order
from xsp.predict.training import Buckets, Layer
from xsp.schema import Kind, Level
from xsp.store.collectives import COLLECTIVES, reason_without_collectives
from xsp.store.devicework import SKEW_NS, prepare
from xsp.store.trace import Trace
from xsp.store.views import FULL_NAME

END_NS = 1 << 62
"""A time after the end of any trace, and an index after any layer."""

PIECES = 20
"""Number of pieces of a backward pass whose modules and collectives are unknown."""


class DeviceStep(NamedTuple):
    """The work of a device in a step; durations are seconds."""

    layers: tuple[Layer, ...]
    update: float
    copy: float
    exposed_reductions: float
    """Reductions of gradients with no work beside them, which no other field includes."""

    exposed_other: float
    """Other collectives with no work beside them."""

    step: float
    """All work, gaps and exposed communication, divided by the number of steps."""

    plan: Buckets | None
    collective_seconds: tuple[float, ...]
    """Duration of the collective of each bucket of the plan on the device; empty without a plan."""

    lanes: Mapping[str, Lane]
    sources: list[str]
    unknown: list[str]


class _Work(NamedTuple):
    """A kernel or a copy; `took` is its seconds with the gap before it."""

    step: int | None
    phase: str
    layer: str | None
    order: int | None
    end_ns: int
    seconds: float


def largest_group(trace: Trace) -> int | None:
    """Return the largest group size of the collectives in a trace; None if no collective reports one."""
    if reason_without_collectives(trace) is not None:
        return None
    prepare(trace)
    rows = trace.sql(f"WITH {COLLECTIVES} SELECT max(group_size) FROM collectives").fetchall()
    return int(rows[0][0]) if rows and rows[0][0] is not None else None


def slow_rank_sentence(trace: Trace) -> str | None:
    """Return a sentence on the rank that the others wait for; None if there is no such rank, or only one rank.

    That rank comes last to most collectives, by more than the uncertainty of the clocks. Its slowdown is the time of
    the work on its device, without communication, over that of the median of the other ranks.
    """
    if reason_without_collectives(trace) is not None:
        return None
    try:
        rows = Answers(trace)["stragglers"].dicts()
    except AnalysisError:
        return None
    candidate = rows[0] if len(rows) > 1 else None
    if candidate is None or 2 * candidate["last_for_certain"] <= candidate["collectives"]:
        return None
    prepare(trace)
    busy_ns = dict(
        trace.sql(
            f"SELECT rank, sum(end_ns - start_ns) FROM device_work WHERE purpose <> '{COMMUNICATION}' GROUP BY rank"
        ).fetchall()
    )
    other_busy_ns = sorted(float(time) for rank, time in busy_ns.items() if rank != candidate["rank"])
    if candidate["rank"] not in busy_ns or not other_busy_ns or not other_busy_ns[len(other_busy_ns) // 2]:
        return None
    factor = float(busy_ns[candidate["rank"]]) / other_busy_ns[len(other_busy_ns) // 2]
    suffix = (
        "; the figures are for it" if candidate["rank"] == trace.rank else f": --straggler {factor:.3g} includes it"
    )
    return (
        f"slow rank: rank {candidate['rank']} came last to {candidate['last_for_certain']} of "
        f"{candidate['collectives']} collectives, and its device is busy {factor:.3g} times as long as that of the "
        f"median rank{suffix}"
    )


def of(trace: Trace) -> DeviceStep:
    """Return the mean of the recorded steps on the lowest device of the trace's rank.

    Raises:
        AnalysisError: no device work is known to belong to a backward pass.
    """
    prepare(trace)
    rows, devices = _rows(trace)
    steps = len({row["step"] for row in rows if row["step"] is not None}) or 1
    collectives, other_collectives = _reductions(trace, rows)
    work, lanes, exposed, other_exposed, idle = _walk(rows)
    if not any(entry.phase == "backward" for entry in work):
        raise AnalysisError(
            f"{trace.name!r} has no device work of a backward pass: it is not a training step, or the profiler did "
            "not record its operators"
        )
    notes = [
        f"forward, backward, update: {len(work):,} kernels and copies of one device in {steps} "
        f"step{'s' * (steps > 1)}, each with the gap before it; the gap before a copy is other work"
    ]
    if exposed:
        notes.append(f"removed: {exposed / steps * 1e3:.3g} ms of a step, gradient collectives that nothing overlaps")
    slow_rank_note = slow_rank_sentence(trace)
    if slow_rank_note is not None:
        notes.append(slow_rank_note)
    unknown = ["how much collectives slowed down computation beside them"] if collectives else []
    if other_collectives:
        unknown.append(
            f"other collectives ({other_collectives}): the {other_exposed / steps * 1e3:.3g} ms of a step that they "
            "take with nothing overlapping stay as recorded, on any number of ranks"
        )
    if devices > 1:
        unknown.append(f"{devices - 1} of {devices} devices: the step is that of the first one")
    layers, plan, durations = _layers(work, collectives, steps, unknown)
    if plan is None and not any(entry.layer for entry in work):
        unknown.append(f"modules: the backward pass is divided into {PIECES} pieces of equal time")
    update, copy = (
        sum(entry.seconds for entry in work if entry.phase == phase) / steps for phase in ("update", "copy")
    )
    step = (sum(entry.seconds for entry in work) + idle + exposed + other_exposed) / steps
    return DeviceStep(
        layers, update, copy, exposed / steps, other_exposed / steps, step, plan, durations, lanes, notes, unknown
    )


def _rows(trace: Trace) -> tuple[list[dict[str, Any]], int]:
    """Return the work of the lowest device by start time, and the number of devices of the rank."""
    relation = trace.sql(
        f"""
        WITH rank_work AS (
            SELECT *, min(device) OVER () AS lowest_device FROM device_work WHERE rank = {trace.rank}
        ), layers AS (
            SELECT rank, trace_id, span_id, {FULL_NAME.format("spans")} AS name, layer_index
            FROM spans WHERE level = {int(Level.LAYER)}
        ), kernels AS (
            SELECT rank, trace_id, span_id, phase FROM spans WHERE level = {int(Level.KERNEL)}
        )
        SELECT work.span_id AS span_id, work.start_ns AS start_ns, work.end_ns AS end_ns, work.step AS step,
               work.recording AS recording, kernels.phase AS phase, layers.name AS layer,
               layers.layer_index AS layer_position,
               work.kind = '{Kind.COPY}' AND (contains(work.name, 'HtoD') OR contains(work.name, 'HostToDevice'))
                   AS is_copy, work.purpose = '{COMMUNICATION}' AS is_collective, is_collective AS is_reduction
        FROM rank_work work
        LEFT JOIN kernels ON kernels.rank = work.rank AND kernels.span_id = work.span_id
                          AND kernels.trace_id IS NOT DISTINCT FROM work.trace_id
        LEFT JOIN layers ON layers.rank = work.rank AND layers.span_id = work.layer_id
                         AND layers.trace_id IS NOT DISTINCT FROM work.trace_id
        WHERE work.device IS NOT DISTINCT FROM work.lowest_device ORDER BY work.start_ns, work.span_id
        """
    )
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    ((devices,),) = trace.sql(f"SELECT count(DISTINCT device) FROM device_work WHERE rank = {trace.rank}").fetchall()
    return rows, int(devices)


def _walk(rows: Sequence[Mapping[str, Any]]) -> tuple[list[_Work], dict[str, Lane], float, float, float]:
    """Return the work with its times, the lanes of the first step, and three times in seconds that belong to no work.

    These are exposed reductions of gradients, other exposed collectives, and gaps before copies, in which the host
    had no batch yet.
    """
    work: list[_Work] = []
    lanes: dict[str, list[tuple[float, float]]] = {}
    backward: dict[Any, list[int]] = {}
    for row in rows:
        if row["phase"] == "backward" and not row["is_collective"]:
            backward.setdefault(row["step"], []).append(row["start_ns"])
    busy_end, recording, first_step, input_wait_ns = 0, None, None, 0
    exposed_ns = [0, 0]
    running_collectives: list[_Collective] = []
    for row in rows:
        start, end = row["start_ns"], row["end_ns"]
        if recording is None or row["recording"] != recording:
            _add_exposed(running_collectives, busy_end, END_NS, exposed_ns)
            busy_end, recording, running_collectives = start, row["recording"], []
        starts = backward.get(row["step"])
        phase = _phase(row, *((min(starts), max(starts)) if starts else (None, None)))
        first_step = first_step or (row["step"], start)
        if row["step"] == first_step[0]:
            name = "communication" if row["is_collective"] else phase
            lanes.setdefault(name, []).append(((start - first_step[1]) / 1e9, (end - first_step[1]) / 1e9))
        if row["is_collective"]:
            running_collectives.append(_Collective(start, end, row["is_reduction"]))
            continue
        gap = max(0, start - busy_end)
        # work did not wait for a collective that still runs
        ended_collectives = [collective for collective in running_collectives if collective.end_ns <= start + SKEW_NS]
        covered_ns = _add_exposed(ended_collectives, busy_end, start, exposed_ns) if gap else 0
        input_wait_ns += gap - covered_ns if phase == "copy" else 0
        duration = max(0, end - max(start, busy_end)) + (0 if phase == "copy" else gap - covered_ns)
        work.append(_Work(row["step"], phase, row["layer"], row["layer_position"], end, duration / 1e9))
        busy_end = max(busy_end, end)
        running_collectives = [collective for collective in running_collectives if collective.end_ns > busy_end]
    # collectives after the last work: no later work waits for them
    _add_exposed(running_collectives, busy_end, END_NS, exposed_ns)
    return (
        work,
        {name: tuple(intervals) for name, intervals in lanes.items()},
        exposed_ns[0] / 1e9,
        exposed_ns[1] / 1e9,
        input_wait_ns / 1e9,
    )


class _Collective(NamedTuple):
    """A collective, and whether it reduces gradients."""

    start_ns: int
    end_ns: int
    is_reduction: bool


def _add_exposed(running_collectives: Sequence[_Collective], start: int, end: int, totals: list[int]) -> int:
    """Return the nanoseconds of an interval that collectives cover; add them to `totals`, as [reductions, others]."""
    covered_ns = clock.covered_ns([collective[:2] for collective in running_collectives], start, end)
    reduction_ns = clock.covered_ns(
        [collective[:2] for collective in running_collectives if collective.is_reduction], start, end
    )
    totals[0] += reduction_ns
    totals[1] += covered_ns - reduction_ns
    return covered_ns


def _phase(row: Mapping[str, Any], first_backward: int | None, last_backward: int | None) -> str:
    """Return the part of the step that work belongs to; without a phase, its start relative to backward decides."""
    if row["is_copy"]:
        return "copy"
    if row["phase"] == "backward":
        return "backward"
    if row["phase"] == "optimizer":
        return "update"
    if (
        row["phase"] == "forward"
        or row["layer"] is not None
        or first_backward is None
        or row["start_ns"] < first_backward
    ):
        return "forward"
    return "update" if last_backward is not None and row["start_ns"] > last_backward else "backward"


class _Reduction(NamedTuple):
    """A collective of gradients: its step, start, duration and bytes."""

    step: int | None
    start_ns: int
    duration_ns: int
    size: int


def _reductions(trace: Trace, rows: Sequence[dict[str, Any]]) -> tuple[list[_Reduction], str]:
    """Return the collectives that reduce, by start time, and the others as text; set `is_reduction` in the rows of all.

    The list is empty if the size of one of its collectives is unknown.
    """
    if reason_without_collectives(trace) is not None:
        return [], ""
    rows_by_span = {row["span_id"]: row for row in rows if row["is_collective"]}
    collectives = trace.sql(
        f"WITH {COLLECTIVES} SELECT span_id, collective, bytes FROM collectives WHERE rank = {trace.rank} "
        "ORDER BY start_ns, span_id"
    ).fetchall()
    device_collectives = [row for row in collectives if row[0] in rows_by_span]
    other_counts = Counter(kind for _, kind, _ in device_collectives if kind not in _REDUCTION_KINDS)
    description = ", ".join(f"{count} of {kind}" for kind, count in sorted(other_counts.items()))
    for span_id, kind, _ in device_collectives:
        rows_by_span[span_id]["is_reduction"] = kind in _REDUCTION_KINDS
    reductions_with_sizes = [
        (rows_by_span[span_id], size) for span_id, kind, size in device_collectives if kind in _REDUCTION_KINDS
    ]
    if any(size is None for _, size in reductions_with_sizes):
        return [], description
    return [
        _Reduction(row["step"], row["start_ns"], row["end_ns"] - row["start_ns"], int(size))
        for row, size in reductions_with_sizes
    ], description


_REDUCTION_KINDS = ("all_reduce", "reduce_scatter")


def _layers(
    work: Sequence[_Work], reductions: Sequence[_Reduction], steps: int, unknown: list[str]
) -> tuple[tuple[Layer, ...], Buckets | None, tuple[float, ...]]:
    """Return the layers of the step: by buckets of gradients, else by module, else in equal pieces.

    In the first case the buckets and the seconds of each bucket's collective are returned too.
    """
    forward = sum(entry.seconds for entry in work if entry.phase == "forward") / steps
    backward = [entry for entry in work if entry.phase == "backward"]
    bucket_layers = _layers_by_bucket(forward, backward, reductions, steps, unknown)
    if bucket_layers is not None:
        return bucket_layers
    if any(entry.layer for entry in work):
        return _layers_by_module(work, steps), None, ()
    total = sum(entry.seconds for entry in backward)
    pieces = [0.0] * PIECES
    elapsed = 0.0
    for entry in backward:
        pieces[min(PIECES - 1, int(PIECES * elapsed / total)) if total else 0] += entry.seconds / steps
        elapsed += entry.seconds
    layers = (Layer(f"piece {PIECES - index}", forward / PIECES, pieces[index]) for index in range(PIECES))
    return tuple(layers)[::-1], None, ()


def _layers_by_bucket(
    forward: float, backward: Sequence[_Work], reductions: Sequence[_Reduction], steps: int, unknown: list[str]
) -> tuple[tuple[Layer, ...], Buckets, tuple[float, ...]] | None:
    """Return a layer for each collective of gradients: the work of the backward pass since the previous collective.

    Only the steps with the most frequent buckets are used, since in its first step PyTorch has other buckets. If at
    most half of the steps have the same, collectives may be missing, which is added to `unknown`.
    """
    pieces_by_sizes: dict[tuple[int, ...], list[list[float]]] = {}
    durations_by_sizes: dict[tuple[int, ...], list[list[int]]] = {}
    for step in dict.fromkeys(entry.step for entry in backward):
        step_work = [entry for entry in backward if entry.step == step]
        step_collectives = [
            collective
            for collective in reductions
            if collective.step == step and collective.start_ns + SKEW_NS >= step_work[0].end_ns
        ]
        if not step_collectives:
            continue
        pieces, index = [0.0] * len(step_collectives), 0
        for entry in step_work:
            while index < len(step_collectives) - 1 and entry.end_ns > step_collectives[index].start_ns + SKEW_NS:
                index += 1
            pieces[index] += entry.seconds
        pieces_by_sizes.setdefault(tuple(collective.size for collective in step_collectives), []).append(pieces)
        durations_by_sizes.setdefault(tuple(collective.size for collective in step_collectives), []).append(
            [collective.duration_ns for collective in step_collectives]
        )
    if not pieces_by_sizes:
        return None
    sizes = max(reversed(pieces_by_sizes), key=lambda key: len(pieces_by_sizes[key]))
    step_count = sum(map(len, pieces_by_sizes.values()))
    if len(pieces_by_sizes) > 1 and 2 * len(pieces_by_sizes[sizes]) <= step_count:
        totals_mb = sorted(sum(key) / 1e6 for key in pieces_by_sizes)
        unknown.append(
            f"bytes of the gradients: {step_count} steps sent {len(pieces_by_sizes)} different sets, of "
            f"{totals_mb[0]:.4g} to {totals_mb[-1]:.4g} MB, so the trace may be incomplete; a set of "
            f"{sum(sizes) / 1e6:.4g} MB is used"
        )
    total = sum(entry.seconds for entry in backward) / steps
    means = [sum(pieces) / len(pieces_by_sizes[sizes]) for pieces in zip(*pieces_by_sizes[sizes], strict=True)]
    scale = total / sum(means) if sum(means) else 0.0
    layers = [
        Layer(f"bucket {number}", forward / len(sizes), means[number] * scale, (size,))
        for number, size in enumerate(sizes)
    ]
    mean_durations = tuple(
        statistics.fmean(durations) / 1e9 for durations in zip(*durations_by_sizes[sizes], strict=True)
    )
    return tuple(reversed(layers)), tuple((number,) for number in range(len(sizes))), mean_durations


def _layers_by_module(work: Sequence[_Work], steps: int) -> tuple[Layer, ...]:
    """Return the calls of modules, with the backward pass in device order; work outside modules is one more call.

    Times are means over the steps. Each module is placed as in the step with the most modules among those that have it.
    """
    forward: dict[tuple[int, str], float] = {}
    backward: dict[Any, dict[tuple[int, str], list[tuple[float, float]]]] = {}
    last_key: dict[Any, tuple[int, str]] = {}
    for position, entry in enumerate(work):
        key = (
            (entry.order, entry.layer) if entry.layer is not None and entry.order is not None else (END_NS, "no module")
        )
        if entry.phase == "forward":
            forward[key] = forward.get(key, 0.0) + entry.seconds / steps
        elif entry.phase == "backward":
            occurrences = backward.setdefault(entry.step, {}).setdefault(key, [])
            if occurrences and last_key[entry.step] == key:
                occurrences[-1] = occurrences[-1][0], occurrences[-1][1] + entry.seconds
            else:
                occurrences.append((position, entry.seconds))
            last_key[entry.step] = key
    first_places = {
        step: min(position for pairs in by_key.values() for position, _ in pairs) for step, by_key in backward.items()
    }
    order = sorted(backward, key=lambda step: -len(backward[step]))
    calls = []
    for key in sorted({*forward, *(key for by_key in backward.values() for key in by_key)}):
        module_steps = [step for step in order if key in backward[step]]
        total = sum(seconds for step in module_steps for _, seconds in backward[step][key]) / steps
        reference = backward[module_steps[0]][key] if module_steps else []
        reference_total = sum(seconds for _, seconds in reference)
        scale = total / reference_total if reference_total else 0.0
        calls.append(
            RecordedModule(
                key[1],
                forward.get(key, 0.0),
                [(position - first_places[module_steps[0]], seconds * scale) for position, seconds in reference],
            )
        )
    return tuple(layers_in_order(calls))
