"""What devices lose time to (idle time, communication, copies) and what helps, where a trace shows it.

Advice is given only if it is specific. What the program does already (graphs, compiled code, workers) is read from the
trace and not advised again. The bound of the gain is all of the time concerned, in percent of the window of the device:
the time from the start of its first kernel to the end of its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xsp.advise.advice import MOST_SPANS, Advice, Place, Step
from xsp.analyses.answers import Answers
from xsp.analyses.idle import MAX_GAPS
from xsp.device.kernelnames import COMMUNICATION as OF_COMMUNICATION
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

WORTH = 5.0
"""Minimum percentage of the window for a loss, or for the bound of a gain, to be listed."""

RUNNING = 40.0
"""Minimum percentage of the window that the device is busy for advice on kernels."""

DOMINANT_SHARE = 0.5
"""Minimum share of a cause's idle time for one call, or one gap, to be named."""

AT_BEGIN = 0.01
"""A gap is at the start of the trace if less than this multiple of its length was recorded before it."""

NAMED = 0.5
"""Minimum percentage of GPU time for an operator to be named."""

MOST = 4
"""Maximum number of pieces of advice shown with a verdict."""

COMMUNICATION, COPIES, IDLE = "exposed communication", "exposed copies", "idle, "

Row = Mapping[str, Any]


class Loss(NamedTuple):
    """Time of the window that is lost to one cause."""

    name: str
    percent: float
    ms: float


class Features(NamedTuple):
    """What the program does already, according to its trace."""

    graphs: bool
    compiled: bool
    workers: bool


class Piece(NamedTuple):
    """A change that helps a device, and the maximum gain in percent of the window."""

    question: str
    what: str
    do: str
    percent: float
    where: tuple[Place, ...] = ()
    changes: str | None = None

    @property
    def text(self) -> str:
        """The piece in a sentence, with its bound."""
        return f"{self.what}: {self.do} (at most {self.percent:.0f} % of the time)"

    def advice(self, step: Step) -> Advice:
        """Return the piece as advice, with its gain as a share of a step."""
        gain = step.ms.times(self.percent / 100)
        return Advice(self.question, self.what, self.where, gain, True, self.percent, (), self.do, self.changes)


def features_in_use(trace: Trace) -> Features:
    """Return whether a trace shows graphs, compiled code and workers of the data loader."""
    ((graphs, compiled, workers),) = trace.con.execute(
        f"""
        SELECT bool_or(level = {int(Level.RUNTIME)} AND contains(name, 'GraphLaunch')),
               bool_or(level = {int(Level.KERNEL)} AND starts_with(name, 'triton_')
                       OR level <= {int(Level.OP)} AND (contains(name, 'CompiledFxGraph')
                                                        OR contains(name, 'Torch-Compiled Region'))),
               bool_or(kind = '{Kind.DATA}' AND contains(name, 'MultiProcessing'))
        FROM spans
        """
    ).fetchall()
    return Features(bool(graphs), bool(compiled), bool(workers))


def pieces(answers: Answers, whole: Row, losses: Sequence[Loss]) -> list[Piece]:
    """Return the changes that help, the largest possible gain first.

    Args:
        answers: tables of the trace.
        whole: the row of `device-activity` for all devices.
        losses: losses of the window, the largest first.
    """
    from xsp.advise import kernels

    already = features_in_use(answers.trace)
    candidates = [
        piece for loss in losses if loss.percent >= WORTH for piece in _for_loss(answers, whole, loss, already)
    ]
    if whole["busy_percent"] >= RUNNING:
        candidates += kernels.pieces(answers, whole, already)
    return sorted((piece for piece in candidates if piece.percent >= WORTH), key=lambda piece: -piece.percent)


def _for_loss(answers: Answers, total: Row, loss: Loss, already: Features) -> Iterator[Piece]:
    if loss.name.startswith(IDLE):
        cause = loss.name.removeprefix(IDLE)
        suggestion = _IDLE[cause](answers, already, cause) if cause in _IDLE else None
        name, where = "device-idle", _gaps(answers, cause)
    else:
        hidden = total["computation_ms"] >= loss.ms  # computation that takes less time than the loss cannot hide it
        kind = "communication" if loss.name == COMMUNICATION else "copies"
        suggestion = (_communication if loss.name == COMMUNICATION else _copies)(answers, hidden)
        name, where = f"device-{kind}", _work(answers, kind)
    if suggestion is not None:
        what, do = suggestion
        yield Piece(name, f"{loss.name}: {what}", do, loss.percent, where)


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
        for (layer, call), group in groups[:_PLACES]
        if layer or call
    )


_PLACES = 3


def _work(answers: Answers, purpose: str) -> tuple[Place, ...]:
    """Return the places of the device work of a purpose, the longest first."""
    condition = f"w.kind = '{Kind.COPY}'" if purpose == "copies" else f"w.purpose = '{OF_COMMUNICATION}'"
    return places(answers.trace, condition)


def places(trace: Trace, which: str) -> tuple[Place, ...]:
    """Return the layers and operators of the device work that meets a condition on `device_work` (alias w)."""
    rows = trace.con.execute(
        f"""
        SELECT layer.name, coalesce(op.name, w.name) AS op, count(*), list(w.span_id ORDER BY w.start_ns)[:{MOST_SPANS}]
        FROM device_work w
        LEFT JOIN spans layer ON layer.rank = w.rank AND layer.trace_id = w.trace_id AND layer.span_id = w.layer_id
        LEFT JOIN spans op ON op.rank = w.rank AND op.trace_id = w.trace_id AND op.span_id = w.op_id
            AND op.kind = '{Kind.OP}'
        WHERE {which} GROUP BY 1, 2 ORDER BY sum(w.dur_ns) DESC, 1, 2 LIMIT {_PLACES}
        """
    ).fetchall()
    return tuple(Place(layer, op, tuple(spans), count) for layer, op, count, spans in rows)


class IdleTime(NamedTuple):
    """The composition of a cause's idle time."""

    gaps: int
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


def one_gap(gap: Row) -> str:
    """Return a description of a gap: its time, and the call that the host was in."""
    text = f"one gap of {duration(gap['idle_us'] / 1e3)} at {duration(gap['begins_at_ms'])}"
    if gap["call"] is None:
        return text
    copied = f" of {gap['call_bytes']:,} bytes" if gap["call_bytes"] else ""
    return f"{text}, the host in {gap['call']}{copied} ({duration(gap['call_us'] / 1e3)})"


def duration(value: float) -> str:
    """Return milliseconds with a unit that fits."""
    if value >= 1e4:
        return f"{value / 1e3:.4g} s"
    return f"{value:.4g} ms" if value >= 0.1 else f"{value * 1e3:.3g} µs"


_CALLS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Malloc", "Free", "HostAlloc", "HostRegister"), "memory is requested from the driver or returned (the first such "
     "call creates the context): keep it in the caching allocator, pin buffers once, warm up before measuring"),
    (("Module", "Library", "GetFunction"), "code is loaded: warm up before measuring"),
    (("GraphInstantiate", "StreamEndCapture", "StreamBeginCapture"), "a graph is made: capture it once and replay it"),
    (("EventQuery", "StreamQuery"), "the host polls the device: wait less often"),
)  # fmt: skip


Said = tuple[str, str]
"""An observation, and what to do about it."""


def _host(answers: Answers, already: Features, cause: str) -> Said | None:
    """Return what helps if launches come late: advice on the call that took most of the time, else fewer launches."""
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        where = f"{one_gap(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
        call = idle.longest["call"]
        return where, _of_call(call) or (
            f"see what the host did {'in ' + call if call else 'there'}; {short(idle.longest['next_work'])} came next"
        )
    if idle.call is not None and idle.call_ms >= DOMINANT_SHARE * idle.ms and (text := _of_call(idle.call)):
        return f"{idle.call} is {100 * idle.call_ms / idle.ms:.0f} % of it", text
    launches = answers["launches"].dicts()
    count = sum(row["launches"] or 0 for row in launches)
    options = [
        *([] if already.graphs else ["CUDA graphs"]),
        *([] if already.compiled else ["torch.compile"]),
        "a larger batch",
    ]
    cost = sum(row["launch_ms"] or 0.0 for row in launches)
    text = f"fewer launches ({', '.join(options)}), or less Python between them; `launch-bound` names the layers"
    present = [word for word, is_so in (("graphs are replayed", already.graphs), ("code is compiled", already.compiled))
            if is_so]  # fmt: skip
    return (
        f"{idle.gaps:,} gaps, {count:,} launches whose calls take {duration(cost)}",
        text + (f" ({' and '.join(present)} already)" if present else ""),
    )


def _of_call(call: str | None) -> str | None:
    return next((text for words, text in _CALLS if call is not None and any(word in call for word in words)), None)


def _sync(answers: Answers, already: Features, cause: str) -> Said:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        where = f"{one_gap(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
    elif idle.call is not None:
        where = f"{100 * idle.call_ms / idle.ms:.0f} % of it in {idle.call}"
    else:
        where = f"{idle.gaps:,} gaps"
    call = (idle.longest or {}).get("call") or idle.call or ""
    if "Memcpy" in call:
        return where, "read results later or less often (.item(), .cpu(), prints), and pin the copied memory"
    return where, "find what waits for the device (.item(), boolean masks, synchronize()); `idle-gaps` names it"


def _data(answers: Answers, already: Features, cause: str) -> Said:
    idle = idle_time(answers, cause)
    where = one_gap(idle.longest) if idle.longest is not None else f"{idle.gaps:,} waits"
    if idle.call is not None and idle.longest is None:
        where += f" in {idle.call}"
    if already.workers:
        return where, "it has workers; use more of them, or do less work per sample"
    if idle.call is not None and "DataLoader" in idle.call:
        return where, "it has no workers; num_workers and prefetching load in the background"
    return where, "load and prepare data in the background"


def _wait(answers: Answers, already: Features, cause: str) -> Said:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        gap = idle.longest
        begins = gap["begins_at_ms"] * 1e3 < AT_BEGIN * gap["idle_us"]
        return one_gap(gap), (
            f"{short(gap['next_work'])} was launched before it and waited, and nothing in the trace "
            "ran on the device: another device, process or rank, or the profiler, delayed it"
            + ("; it is at the beginning of the trace: record longer, and see whether it recurs" if begins else "")
        )
    median = max((row["median_us"] for row in answers["idle-causes"].dicts() if row["cause"] == cause), default=0.0)
    fewer = "fewer and longer kernels" + ("" if already.compiled else " (torch.compile)")
    return f"{idle.gaps:,} gaps, {median:.3g} µs at the median", f"streams that wait for each other, or {fewer}"


_IDLE: dict[str, Callable[[Answers, Features, str], Said | None]] = {
    "host-bound": _host, "sync": _sync, "data loading": _data, "kernel wait": _wait,
}  # fmt: skip


def short(name: str, most: int = 40) -> str:
    """Return a name, truncated to `most` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _communication(answers: Answers, can_hide: bool) -> Said | None:
    """Return the most exposed collective and what helps; one rank alone cannot separate waiting from transfer."""
    rows = sorted(answers["communication"].dicts(), key=lambda row: -(row["exposed_ms"] or 0))
    if not rows or not rows[0]["exposed_ms"]:
        return None
    first = rows[0]
    size = f" of {first['bytes'] / 1e6:.3g} MB" if first["bytes"] else ""
    what = f"{first['calls']} × {first['collective']}{size}, {duration(first['exposed_ms'])} of it"
    do = "overlap it with computation, or send less" if can_hide else _TOO_MUCH + "send less, or less often"
    if (first.get("ranks") or 1) == 1:
        do += "; load all ranks to tell transfer from waiting for another rank (`collective-skew`)"
    return what, do


_TOO_MUCH = "computation is too short to hide it: "


def _copies(answers: Answers, can_hide: bool) -> Said | None:
    rows = answers.trace.con.execute(
        "SELECT name, count(*), sum(dur_ns) / 1e6 AS ms FROM device_work WHERE kind = "
        f"'{Kind.COPY}' GROUP BY name ORDER BY ms DESC, name LIMIT 1"
    ).fetchall()
    if not rows:
        return None
    name, count, ms = rows[0]
    where = f"{count} × {name}, {duration(ms)}"
    if "ageable" in name:
        hint = "hide it behind computation" if can_hide else "make it faster; computation is too short to hide it"
        return where, f"pinned memory and non_blocking=True {hint}"
    if "DtoD" in name:
        return where, "copies within the device, from .clone(), .contiguous() or slices that are written"
    hint = "a separate stream hides it behind computation; " if can_hide else _TOO_MUCH
    return where, f"{hint}keep data on the device where possible"
