"""Causes of lost device time (idle time, communication, copies) and remedies, if a trace shows them.

Advice is given only if it is specific. What the program does already (graphs, compiled code, workers) is read from the
trace and not advised again. Times are those of the account (`xsp.account`), per iteration; a gain is at most what the
other side, host or device, leaves of the iteration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from xsp.account import Account, Entry, Iterations, Side
from xsp.account import entries as names
from xsp.account.course import is_compiled
from xsp.advise.advice import MOST_SPANS, Advice, Place, Step
from xsp.analyses.answers import Answers
from xsp.analyses.idle import MAX_GAPS
from xsp.callnames import REQUESTS_MEMORY, RETURNS_MEMORY
from xsp.device.kernelnames import COMMUNICATION as OF_COMMUNICATION
from xsp.device.kernelnames import TO_HOST
from xsp.schema import HAS_WORKERS, Kind, Level
from xsp.stats import Interval
from xsp.store.trace import Trace
from xsp.texts import cut, ms_text

LEAST_PERCENT = 5.0
"""Minimum percentage of the iteration for a loss, or for the bound of a gain, to be listed."""

LEAST_BUSY_PERCENT = 40.0
"""Minimum percentage of the iteration that the device is busy for advice on kernels."""

LEAST_ITERATIONS = 2
"""Minimum number of recorded iterations for what each of them does to be told from a warm-up."""

DOMINANT_SHARE = 0.5
"""Minimum share of a cause's idle time for one call, or one gap, to be named."""

START_SHARE = 0.01
"""A gap is at the start of the trace if less than this multiple of its length was recorded before it."""

CERTAIN_SHARE = 0.5
"""Lower end of the interval of a gain that is certain, as a share of it: the kernels around may get slower."""

Row = Mapping[str, Any]


class Features(NamedTuple):
    """What the program does already, according to its trace."""

    has_graphs: bool
    is_compiled: bool
    has_workers: bool


class Piece(NamedTuple):
    """A change that helps a device or its host, and the most that it saves of its side, in milliseconds per iteration.

    `of` says on which side: `host` or `device`.
    """

    question: str
    what: str
    do: str
    ms: float
    of: str
    where: tuple[Place, ...] = ()
    changes_numbers: str | None = None
    general: bool = False
    is_certain: bool = False
    """Whether all of the time would be saved: the gain is an expectation and not a bound."""

    gain_known: bool = True
    trial: str | None = None
    """Name of the trial that applies the change from outside, see `xsp.trials.trial`."""

    def advice(self, step: Step, main: Iterations) -> Advice:
        """Return the piece as advice, its gain bounded by what the other side leaves."""
        bound_ms = main.bound_ms(self.of, self.ms)
        why: tuple[str, ...] = ()
        if bound_ms < 0.9 * self.ms and main.limit is not None:
            other = "host" if self.of == "device" else "device"
            why = (
                f"it takes {ms_text(self.ms)}, but the {other} needs "
                f"{ms_text(main.limit.host_ms if other == 'host' else main.limit.device_ms)} of {main.subject} of "
                f"{ms_text(main.time.ms or 0.0)}",
            )
        return Advice(
            self.question,
            self.what,
            self.where,
            Interval(bound_ms * (CERTAIN_SHARE if self.is_certain else 1.0), bound_ms, bound_ms),
            not self.is_certain,
            100 * bound_ms / step.ms.value,
            why,
            self.do,
            self.changes_numbers,
            self.trial,
            side=self.of,
            general=self.general,
            gain_known=self.gain_known,
        )


def features_in_use(trace: Trace) -> Features:
    """Return whether a trace shows graphs, compiled code and workers of the data loader."""
    ((graphs, workers),) = trace.con.execute(
        f"""
        SELECT bool_or(level = {int(Level.RUNTIME)} AND contains(name, 'GraphLaunch')),
               bool_or({HAS_WORKERS})
        FROM spans
        """
    ).fetchall()
    return Features(bool(graphs), is_compiled(trace), bool(workers))


def pieces(answers: Answers, account: Account, known_only: bool = False) -> list[Piece]:
    """Return the changes that help, the largest possible gain first; none where nothing is known of a device.

    Args:
        answers: tables of the trace.
        account: the account of the trace.
        known_only: leave out the changes whose gain is not known, with the tables that only they need.
    """
    from xsp.advise import kernels

    main = account.job
    device = main.device if main is not None else None
    if main is None or device is None or not main.time.ms or account.forbids("busy"):
        return []
    features = features_in_use(answers.trace)
    least_ms = LEAST_PERCENT / 100 * main.time.ms
    candidates: list[Piece] = list(_late_rank(account))
    losses = {cause: device.ms(cause) for cause in _ADVICE_BY_CAUSE} if not account.forbids("cause") else {}
    first = device[names.BEFORE_FIRST]
    is_apart = first is not None and first.place is not None and not _launches(answers.trace, first)
    if first is not None and losses and is_apart and (first.ms or 0.0) >= least_ms:
        candidates.append(_before_first(first))
    elif losses:  # late launches like the others of a step
        losses[names.HOST_LATE] += first.ms or 0.0 if first is not None else 0.0
    for cause, ms in losses.items():
        if ms >= least_ms:
            candidates += _for_idle(answers, cause, ms, features, iterations_in_all(account), main.subject)
    for name in (names.COMMUNICATION, names.COPIES):
        if device.ms(name) >= least_ms and not (name == names.COMMUNICATION and candidates and account.late_rank):
            candidates += _for_exposed(answers, account, name, device)
    if device.ms(names.BUSY) >= LEAST_BUSY_PERCENT / 100 * main.time.ms:
        candidates += kernels.pieces(answers, iterations_in_all(account), features, known_only, main.subject)
    candidates += _memory_returned(answers, iterations_in_all(account))
    return sorted((piece for piece in candidates if piece.ms >= least_ms), key=lambda piece: -piece.ms)


def _memory_returned(answers: Answers, iterations: int) -> Iterator[Piece]:
    """Yield advice on memory that each iteration returns to the driver and requests again."""
    ((frees, requests, ms, spans),) = answers.trace.con.execute(
        f"""
        SELECT count(*) FILTER (WHERE {RETURNS_MEMORY}), count(*) FILTER (WHERE {REQUESTS_MEMORY}),
               coalesce(sum(dur_ns), 0) / 1e6,
               list(span_id ORDER BY dur_ns DESC)[:{MOST_SPANS}]
        FROM spans WHERE level = {int(Level.RUNTIME)} AND ({RETURNS_MEMORY} OR {REQUESTS_MEMORY})
        """
    ).fetchall()
    if iterations >= LEAST_ITERATIONS and min(frees, requests) >= iterations:
        yield Piece(
            "device-memory",
            f"memory is returned to the driver and requested again in each iteration: {frees / iterations:.3g} × free, "
            f"{requests / iterations:.3g} × malloc, {ms_text(ms / iterations)} of the host",
            "omit torch.cuda.empty_cache(), and keep the caching allocator on (PYTORCH_NO_CUDA_MEMORY_CACHING)",
            ms / iterations,
            "host",
            (Place(None, "free and malloc", tuple(spans or ()), None),),
        )


def iterations_in_all(account: Account) -> int:
    """Return the number of recorded iterations of all devices together: work of all of them divided by it is the
    work of one device in one iteration."""
    return max(1, sum(each.detailed * max(1, len(each.devices)) for each in account.iterations))


def _late_rank(account: Account) -> Iterator[Piece]:
    late = account.late_rank
    if late is None:
        return
    first = "first " if late.is_first else ""
    yield Piece(
        "device-communication",
        f"rank {late.rank} is late by {ms_text(late.late_ms)} at the {first}{late.collective}: "
        f"{ms_text(late.waited_ms)} of {ms_text(late.exposed_ms)} of exposed communication on {late.ranks} ranks wait "
        "for it",
        f"see what rank {late.rank} does before it that others do not: its data, its share of the work, its host; "
        "`stragglers` and `collective-skew` have each collective",
        late.late_ms,
        "device",
    )


def _launches(trace: Trace, entry: Entry) -> bool:
    """Return whether the place of an entry launches work itself: the time in it is that of issuing this work late."""
    rows = trace.con.execute(
        f"""
        SELECT 1 FROM spans place JOIN spans launch ON launch.kind = '{Kind.LAUNCH}' AND launch.rank = place.rank
            AND launch.start_ns BETWEEN place.start_ns AND place.start_ns + place.dur_ns
        WHERE place.span_id IN (SELECT unnest(?::VARCHAR[])) AND launch.thread IS NOT DISTINCT FROM place.thread LIMIT 1
        """,
        [list(entry.spans)],
    ).fetchall()
    return bool(rows)


def _before_first(entry: Entry) -> Piece:
    """Return the advice on what the host does before the first launch of a step, in a call that is known."""
    return Piece(
        "device-idle",
        f"the device is idle for {ms_text(entry.ms or 0.0)} before the first launch of a step, the host in "
        f"{entry.place}",
        "do that for the next step while the device works on this one: in workers of the data loader, in another "
        "thread or process; or less of it",
        entry.ms or 0.0,
        "host",
        (Place(None, entry.place, entry.spans, 1),),
    )


def _for_idle(
    answers: Answers, cause: str, ms: float, features: Features, iterations: int, subject: str
) -> Iterator[Piece]:
    old_cause, remedy = _ADVICE_BY_CAUSE[cause]
    if cause == names.DRAINED and (found := list(_for_waits(answers, ms, iterations, subject))):
        yield from found
        return
    suggestion = remedy(answers, features, old_cause, iterations)
    if suggestion is not None:
        observation, do = suggestion
        what = f"the device is idle {ms_text(ms)} of {subject} because {_REASONS[cause]}: {observation}"
        is_general = cause == names.HOST_LATE and do.startswith("fewer launches")
        of = "host" if cause in (names.HOST_LATE, names.HOST_DATA, names.DRAINED) else "device"
        trial = _capture_trial(answers.trace, features) if is_general else None
        yield Piece("device-idle", what, do, ms, of, _gaps(answers, old_cause), general=is_general, trial=trial)


def _capture_trial(trace: Trace, features: Features) -> str | None:
    """Return the trial that captures what a program launches; None where it does so already."""
    if features.has_graphs:
        return None
    if is_training(trace):
        return None if features.is_compiled else "compile=reduce-overhead"
    return "capture"


def is_training(trace: Trace) -> bool:
    """Return whether steps of this kind train, according to the run."""
    kind = next((step_kind for step_kind in trace.run.kinds if step_kind.kind == trace.kind), None)
    return kind is not None and bool(kind.get("training"))


LEAST_WAIT_SHARE = 0.2
"""Minimum share of a cause in the time that the host waits, for the idle time after it to be its own."""


def _for_waits(answers: Answers, ms: float, iterations: int, subject: str) -> Iterator[Piece]:
    """Yield what made the host wait, each with its share of the idle time; nothing where one gap is most of it."""
    from xsp.advise import waits

    if idle_time(answers, _ADVICE_BY_CAUSE[names.DRAINED][0]).longest is not None:
        return
    found = waits.of(answers)
    total_ms = sum(wait.ms for wait in found)
    for wait in found:
        if wait.ms >= LEAST_WAIT_SHARE * total_ms:
            observation, do = waits.words(wait, iterations)
            share_ms = ms * wait.ms / total_ms
            what = f"the device is idle {ms_text(share_ms)} of {subject} because {_REASONS[names.DRAINED]}: "
            trial = "pin_memory" if wait.cause == "inputs" else None
            yield Piece("device-idle", what + observation, do, share_ms, "host", wait.places, trial=trial)


_REASONS = {
    names.HOST_LATE: "the host issues its work too late",
    names.HOST_DATA: "the host waits for data",
    names.DRAINED: "the host had waited for it before it issued more",
    names.QUEUED: "launched work waits",
}


def _for_exposed(answers: Answers, account: Account, name: str, device: Side) -> Iterator[Piece]:
    ms = device.ms(name)
    can_hide = device.ms(names.COMPUTATION) >= ms  # computation that takes less time than the loss cannot hide it
    kind = "communication" if name == names.COMMUNICATION else "copies"
    suggestion = (_communication if name == names.COMMUNICATION else _copies)(
        answers, can_hide, iterations_in_all(account)
    )
    if suggestion is not None:
        observation, do = suggestion
        trial = "pin_memory" if do.startswith("pin_memory") else None
        what = f"{name}, {ms_text(ms)}: {observation}"
        yield Piece(f"device-{kind}", what, do, ms, "device", _work(answers, kind), trial=trial)


def _gaps(answers: Answers, cause: str) -> tuple[Place, ...]:
    """Return the layers and calls at which the longest gaps of a cause end, with the spans of the calls."""
    gaps = answers["idle-gaps"].dicts()
    rows = [row for row in gaps if row["cause"] == cause]
    is_complete = len(gaps) < MAX_GAPS
    rows_by_place: dict[tuple[str | None, str | None], list[Row]] = {}
    for row in rows:
        rows_by_place.setdefault((row["next_layer"], row["call"] or row["next_op"]), []).append(row)
    groups = sorted(rows_by_place.items(), key=lambda item: -sum(row["idle_us"] for row in item[1]))
    return tuple(
        Place(
            layer,
            call,
            tuple(row["call_span_id"] for row in group if row["call_span_id"])[:MOST_SPANS],
            len(group) if is_complete else None,
        )
        for (layer, call), group in groups[:_MOST_PLACES]
        if layer or call
    )


_MOST_PLACES = 3


def _work(answers: Answers, purpose: str) -> tuple[Place, ...]:
    """Return the places of the device work of a purpose, the longest first."""
    condition = f"w.kind = '{Kind.COPY}'" if purpose == "copies" else f"w.purpose = '{OF_COMMUNICATION}'"
    return places(answers.trace, condition)


def places(trace: Trace, condition: str) -> tuple[Place, ...]:
    """Return the layers and operators of the device work that meets a condition on `device_work` (alias w)."""
    rows = trace.con.execute(
        f"""
        SELECT layer.name, coalesce(op.name, w.name) AS op, count(*), list(w.span_id ORDER BY w.start_ns)[:{MOST_SPANS}]
        FROM device_work w
        LEFT JOIN spans layer ON layer.rank = w.rank AND layer.trace_id = w.trace_id AND layer.span_id = w.layer_id
        LEFT JOIN spans op ON op.rank = w.rank AND op.trace_id = w.trace_id AND op.span_id = w.op_id
            AND op.kind = '{Kind.OP}'
        WHERE {condition} GROUP BY 1, 2 ORDER BY sum(w.dur_ns) DESC, 1, 2 LIMIT {_MOST_PLACES}
        """
    ).fetchall()
    return tuple(Place(layer, op, tuple(spans), count) for layer, op, count, spans in rows)


class IdleTime(NamedTuple):
    """The composition of a cause's idle time."""

    gap_count: int
    ms: float
    call: str | None
    call_ms: float
    longest: Row | None
    """The row of `idle-gaps` of the longest gap; None if it is less than `DOMINANT_SHARE` of the idle time."""


def idle_time(answers: Answers, cause: str) -> IdleTime:
    """Return the composition of a cause's idle time, over all devices."""
    rows = [row for row in answers["idle-causes"].dicts() if row["cause"] == cause]
    ms = sum(row["idle_ms"] for row in rows)
    calls: dict[str, float] = {}
    for row in rows:
        if row["call"] is not None:
            calls[row["call"]] = calls.get(row["call"], 0.0) + row["call_ms"]
    call = max(calls, key=lambda name: calls[name], default=None)
    longest = next((row for row in answers["idle-gaps"].dicts() if row["cause"] == cause), None)
    if longest is not None and longest["idle_us"] < DOMINANT_SHARE * ms * 1e3:
        longest = None
    return IdleTime(sum(row["gaps"] for row in rows), ms, call, calls.get(call or "", 0.0), longest)


def gap_text(gap: Row) -> str:
    """Return a description of a gap: its time, and the call that the host was in."""
    text = f"one gap of {ms_text(gap['idle_us'] / 1e3)} at {ms_text(gap['begins_at_ms'])}"
    if gap["call"] is None:
        return text
    size_text = f" of {gap['call_bytes']:,} bytes" if gap["call_bytes"] else ""
    return f"{text}, the host in {gap['call']}{size_text} ({ms_text(gap['call_us'] / 1e3)})"


_CALL_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Malloc", "Free", "HostAlloc", "HostRegister"), "memory is requested from the driver or returned (the first such "
     "call creates the context): keep it in the caching allocator, pin buffers once, warm up before measuring"),
    (("Module", "Library", "GetFunction"), "code is loaded: warm up before measuring"),
    (("GraphInstantiate", "StreamEndCapture", "StreamBeginCapture"), "a graph is made: capture it once and replay it"),
    (("EventQuery", "StreamQuery"), "the host polls the device: wait less often"),
)  # fmt: skip


Suggestion = tuple[str, str]
"""An observation, and what to do about it."""


def _host(answers: Answers, features: Features, cause: str, iterations: int) -> Suggestion | None:
    """Return what helps if launches come late: advice on the call that took most of the time, else fewer launches."""
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        observation = f"{gap_text(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
        call = idle.longest["call"]
        return observation, _call_advice(call) or (
            f"see what the host did {'in ' + call if call else 'there'}; {cut(idle.longest['next_work'], 40)} came next"
        )
    if idle.call is not None and idle.call_ms >= DOMINANT_SHARE * idle.ms and (text := _call_advice(idle.call)):
        return f"{idle.call} is {100 * idle.call_ms / idle.ms:.0f} % of it", text
    launches = answers["launches"].dicts()
    count = sum(row["launches"] or 0 for row in launches) / iterations
    options = [
        *([] if features.has_graphs else ["CUDA graphs"]),
        *([] if features.is_compiled else ["torch.compile"]),
        "a larger batch",
    ]
    cost = sum(row["launch_ms"] or 0.0 for row in launches) / iterations
    text = f"fewer launches ({', '.join(options)}), or less Python between them; `launch-bound` names the layers"
    states = [
        *(["graphs are replayed"] if features.has_graphs else []),
        *(["code is compiled"] if features.is_compiled else []),
    ]
    return (
        f"{idle.gap_count / iterations:,.0f} gaps, {count:,.0f} launches whose calls take {ms_text(cost)}",
        text + (f" ({' and '.join(states)} already)" if states else ""),
    )


def _call_advice(call: str | None) -> str | None:
    return next(
        (text for words, text in _CALL_ADVICE if call is not None and any(word in call for word in words)), None
    )


def _sync(answers: Answers, features: Features, cause: str, iterations: int) -> Suggestion:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        observation = f"{gap_text(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
    elif idle.call is not None:
        observation = f"{100 * idle.call_ms / idle.ms:.0f} % of it in {idle.call}"
    else:
        observation = f"{idle.gap_count / iterations:,.0f} gaps"
    call = (idle.longest or {}).get("call") or idle.call or ""
    if "Memcpy" in call:
        return observation, "read results later or less often (.item(), .cpu(), prints), and pin the copied memory"
    return observation, "find what waits for the device (.item(), boolean masks, synchronize()); `idle-gaps` names it"


def _data(answers: Answers, features: Features, cause: str, iterations: int) -> Suggestion:
    idle = idle_time(answers, cause)
    observation = (
        gap_text(idle.longest) if idle.longest is not None else f"{idle.gap_count / iterations:.3g} waits an iteration"
    )
    if idle.call is not None and idle.longest is None:
        observation += f" in {idle.call}"
    if features.has_workers:
        return observation, "it has workers; use more of them, or do less work per sample"
    if idle.call is not None and "DataLoader" in idle.call:
        return observation, "it has no workers; num_workers and prefetching load in the background"
    return observation, "load and prepare data in the background"


def _wait(answers: Answers, features: Features, cause: str, iterations: int) -> Suggestion:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        gap = idle.longest
        is_at_start = gap["begins_at_ms"] * 1e3 < START_SHARE * gap["idle_us"]
        return gap_text(gap), (
            f"{cut(gap['next_work'], 40)} was launched before it and waited, and nothing in the trace "
            "ran on the device: another device, process or rank, or the profiler, delayed it"
            + ("; it is at the beginning of the trace: record longer, and see whether it recurs" if is_at_start else "")
        )
    median = max((row["median_us"] for row in answers["idle-causes"].dicts() if row["cause"] == cause), default=0.0)
    hint = "fewer and longer kernels" + ("" if features.is_compiled else " (torch.compile)")
    return (
        f"{idle.gap_count / iterations:,.0f} gaps, {median:.3g} µs at the median",
        f"streams that wait for each other, or {hint}",
    )


_ADVICE_BY_CAUSE: dict[str, tuple[str, Callable[[Answers, Features, str, int], Suggestion | None]]] = {
    names.HOST_LATE: ("host-bound", _host),
    names.DRAINED: ("sync", _sync),
    names.HOST_DATA: ("data loading", _data),
    names.QUEUED: ("kernel wait", _wait),
}
"""Cause of idle time → its name in `idle-causes`, and what helps."""


def _communication(answers: Answers, can_hide: bool, iterations: int) -> Suggestion | None:
    """Return the most exposed collective and what helps; one rank alone cannot separate waiting from transfer."""
    rows = sorted(answers["communication"].dicts(), key=lambda row: -(row["exposed_ms"] or 0))
    if not rows or not rows[0]["exposed_ms"]:
        return None
    largest = rows[0]
    size = f" of {largest['bytes'] / 1e6:.3g} MB" if largest["bytes"] else ""
    exposed_ms = largest["exposed_ms"] / iterations
    observation = f"{largest['calls'] / iterations:.3g} × {largest['collective']}{size}, {ms_text(exposed_ms)} of it"
    remedy = "overlap it with computation, or send less" if can_hide else _TOO_SHORT + "send less, or less often"
    if (largest.get("ranks") or 1) == 1:
        remedy += "; load all ranks to tell transfer from waiting for another rank (`collective-skew`)"
    return observation, remedy


_TOO_SHORT = "computation is too short to hide it: "


def _copies(answers: Answers, can_hide: bool, iterations: int) -> Suggestion | None:
    rows = answers.trace.con.execute(
        "SELECT name, count(*), sum(dur_ns) / 1e6 AS ms FROM device_work WHERE kind = "
        f"'{Kind.COPY}' GROUP BY name ORDER BY ms DESC, name LIMIT 1"
    ).fetchall()
    if not rows:
        return None
    name, count, ms = rows[0]
    observation = f"{count / iterations:.3g} × {name}, {ms_text(ms / iterations)}"
    if "ageable" in name:
        hint = ", and hide it behind computation" if can_hide else "; computation is too short to hide it"
        return observation, f"pin_memory=True and non_blocking=True: the host does not wait, the copy is faster{hint}"
    if re.search(TO_HOST, name):
        return f"results are copied to the host: {observation}", (
            "keep them on the device, and copy what is needed once, into pinned memory with non_blocking=True"
        )
    if "DtoD" in name:
        return observation, "copies within the device, from .clone(), .contiguous() or slices that are written"
    hint = "a separate stream hides it behind computation; " if can_hide else _TOO_SHORT
    return observation, f"{hint}keep data on the device where possible"
