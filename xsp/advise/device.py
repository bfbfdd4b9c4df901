"""Causes of lost device time (idle time, communication, copies) and remedies, if a trace shows them.

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

LEAST_PERCENT = 5.0
"""Minimum percentage of the window for a loss, or for the bound of a gain, to be listed."""

LEAST_BUSY_PERCENT = 40.0
"""Minimum percentage of the window that the device is busy for advice on kernels."""

DOMINANT_SHARE = 0.5
"""Minimum share of a cause's idle time for one call, or one gap, to be named."""

START_SHARE = 0.01
"""A gap is at the start of the trace if less than this multiple of its length was recorded before it."""

LEAST_OP_PERCENT = 0.5
"""Minimum percentage of GPU time for an operator to be named."""

MOST_PIECES = 4
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

    has_graphs: bool
    is_compiled: bool
    has_workers: bool


class Piece(NamedTuple):
    """A change that helps a device, and the maximum gain in percent of the window."""

    question: str
    what: str
    do: str
    percent: float
    where: tuple[Place, ...] = ()
    changes_numbers: str | None = None

    @property
    def text(self) -> str:
        """The piece in a sentence, with its bound."""
        return f"{self.what}: {self.do} (at most {self.percent:.0f} % of the time)"

    def advice(self, step: Step) -> Advice:
        """Return the piece as advice, with its gain as a share of a step."""
        gain = step.ms.scale(self.percent / 100)
        return Advice(self.question, self.what, self.where, gain, True, self.percent, (), self.do, self.changes_numbers)


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


def pieces(answers: Answers, total: Row, losses: Sequence[Loss]) -> list[Piece]:
    """Return the changes that help, the largest possible gain first.

    Args:
        answers: tables of the trace.
        total: the row of `device-activity` for all devices.
        losses: losses of the window, the largest first.
    """
    from xsp.advise import kernels

    features = features_in_use(answers.trace)
    candidates = [
        piece for loss in losses if loss.percent >= LEAST_PERCENT for piece in _for_loss(answers, total, loss, features)
    ]
    if total["busy_percent"] >= LEAST_BUSY_PERCENT:
        candidates += kernels.pieces(answers, total, features)
    return sorted((piece for piece in candidates if piece.percent >= LEAST_PERCENT), key=lambda piece: -piece.percent)


def _for_loss(answers: Answers, total: Row, loss: Loss, features: Features) -> Iterator[Piece]:
    if loss.name.startswith(IDLE):
        cause = loss.name.removeprefix(IDLE)
        suggestion = _ADVICE_BY_CAUSE[cause](answers, features, cause) if cause in _ADVICE_BY_CAUSE else None
        name, where = "device-idle", _gaps(answers, cause)
    else:
        can_hide = total["computation_ms"] >= loss.ms  # computation that takes less time than the loss cannot hide it
        kind = "communication" if loss.name == COMMUNICATION else "copies"
        suggestion = (_communication if loss.name == COMMUNICATION else _copies)(answers, can_hide)
        name, where = f"device-{kind}", _work(answers, kind)
    if suggestion is not None:
        observation, remedy = suggestion
        yield Piece(name, f"{loss.name}: {observation}", remedy, loss.percent, where)


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
    text = f"one gap of {duration(gap['idle_us'] / 1e3)} at {duration(gap['begins_at_ms'])}"
    if gap["call"] is None:
        return text
    size_text = f" of {gap['call_bytes']:,} bytes" if gap["call_bytes"] else ""
    return f"{text}, the host in {gap['call']}{size_text} ({duration(gap['call_us'] / 1e3)})"


def duration(value: float) -> str:
    """Return milliseconds with a unit that fits."""
    if value >= 1e4:
        return f"{value / 1e3:.4g} s"
    return f"{value:.4g} ms" if value >= 0.1 else f"{value * 1e3:.3g} µs"


_CALL_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Malloc", "Free", "HostAlloc", "HostRegister"), "memory is requested from the driver or returned (the first such "
     "call creates the context): keep it in the caching allocator, pin buffers once, warm up before measuring"),
    (("Module", "Library", "GetFunction"), "code is loaded: warm up before measuring"),
    (("GraphInstantiate", "StreamEndCapture", "StreamBeginCapture"), "a graph is made: capture it once and replay it"),
    (("EventQuery", "StreamQuery"), "the host polls the device: wait less often"),
)  # fmt: skip


Suggestion = tuple[str, str]
"""An observation, and what to do about it."""


def _host(answers: Answers, features: Features, cause: str) -> Suggestion | None:
    """Return what helps if launches come late: advice on the call that took most of the time, else fewer launches."""
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        observation = f"{gap_text(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
        call = idle.longest["call"]
        return observation, _call_advice(call) or (
            f"see what the host did {'in ' + call if call else 'there'}; {shorten(idle.longest['next_work'])} came next"
        )
    if idle.call is not None and idle.call_ms >= DOMINANT_SHARE * idle.ms and (text := _call_advice(idle.call)):
        return f"{idle.call} is {100 * idle.call_ms / idle.ms:.0f} % of it", text
    launches = answers["launches"].dicts()
    count = sum(row["launches"] or 0 for row in launches)
    options = [
        *([] if features.has_graphs else ["CUDA graphs"]),
        *([] if features.is_compiled else ["torch.compile"]),
        "a larger batch",
    ]
    cost = sum(row["launch_ms"] or 0.0 for row in launches)
    text = f"fewer launches ({', '.join(options)}), or less Python between them; `launch-bound` names the layers"
    states = [
        *(["graphs are replayed"] if features.has_graphs else []),
        *(["code is compiled"] if features.is_compiled else []),
    ]
    return (
        f"{idle.gap_count:,} gaps, {count:,} launches whose calls take {duration(cost)}",
        text + (f" ({' and '.join(states)} already)" if states else ""),
    )


def _call_advice(call: str | None) -> str | None:
    return next(
        (text for words, text in _CALL_ADVICE if call is not None and any(word in call for word in words)), None
    )


def _sync(answers: Answers, features: Features, cause: str) -> Suggestion:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        observation = f"{gap_text(idle.longest)} is {100 * idle.longest['idle_us'] / 1e3 / idle.ms:.0f} % of it"
    elif idle.call is not None:
        observation = f"{100 * idle.call_ms / idle.ms:.0f} % of it in {idle.call}"
    else:
        observation = f"{idle.gap_count:,} gaps"
    call = (idle.longest or {}).get("call") or idle.call or ""
    if "Memcpy" in call:
        return observation, "read results later or less often (.item(), .cpu(), prints), and pin the copied memory"
    return observation, "find what waits for the device (.item(), boolean masks, synchronize()); `idle-gaps` names it"


def _data(answers: Answers, features: Features, cause: str) -> Suggestion:
    idle = idle_time(answers, cause)
    observation = gap_text(idle.longest) if idle.longest is not None else f"{idle.gap_count:,} waits"
    if idle.call is not None and idle.longest is None:
        observation += f" in {idle.call}"
    if features.has_workers:
        return observation, "it has workers; use more of them, or do less work per sample"
    if idle.call is not None and "DataLoader" in idle.call:
        return observation, "it has no workers; num_workers and prefetching load in the background"
    return observation, "load and prepare data in the background"


def _wait(answers: Answers, features: Features, cause: str) -> Suggestion:
    idle = idle_time(answers, cause)
    if idle.longest is not None:
        gap = idle.longest
        is_at_start = gap["begins_at_ms"] * 1e3 < START_SHARE * gap["idle_us"]
        return gap_text(gap), (
            f"{shorten(gap['next_work'])} was launched before it and waited, and nothing in the trace "
            "ran on the device: another device, process or rank, or the profiler, delayed it"
            + ("; it is at the beginning of the trace: record longer, and see whether it recurs" if is_at_start else "")
        )
    median = max((row["median_us"] for row in answers["idle-causes"].dicts() if row["cause"] == cause), default=0.0)
    hint = "fewer and longer kernels" + ("" if features.is_compiled else " (torch.compile)")
    return f"{idle.gap_count:,} gaps, {median:.3g} µs at the median", f"streams that wait for each other, or {hint}"


_ADVICE_BY_CAUSE: dict[str, Callable[[Answers, Features, str], Suggestion | None]] = {
    "host-bound": _host, "sync": _sync, "data loading": _data, "kernel wait": _wait,
}  # fmt: skip


def shorten(name: str, limit: int = 40) -> str:
    """Return a name, truncated to `limit` characters."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _communication(answers: Answers, can_hide: bool) -> Suggestion | None:
    """Return the most exposed collective and what helps; one rank alone cannot separate waiting from transfer."""
    rows = sorted(answers["communication"].dicts(), key=lambda row: -(row["exposed_ms"] or 0))
    if not rows or not rows[0]["exposed_ms"]:
        return None
    largest = rows[0]
    size = f" of {largest['bytes'] / 1e6:.3g} MB" if largest["bytes"] else ""
    observation = f"{largest['calls']} × {largest['collective']}{size}, {duration(largest['exposed_ms'])} of it"
    remedy = "overlap it with computation, or send less" if can_hide else _TOO_SHORT + "send less, or less often"
    if (largest.get("ranks") or 1) == 1:
        remedy += "; load all ranks to tell transfer from waiting for another rank (`collective-skew`)"
    return observation, remedy


_TOO_SHORT = "computation is too short to hide it: "


def _copies(answers: Answers, can_hide: bool) -> Suggestion | None:
    rows = answers.trace.con.execute(
        "SELECT name, count(*), sum(dur_ns) / 1e6 AS ms FROM device_work WHERE kind = "
        f"'{Kind.COPY}' GROUP BY name ORDER BY ms DESC, name LIMIT 1"
    ).fetchall()
    if not rows:
        return None
    name, count, ms = rows[0]
    observation = f"{count} × {name}, {duration(ms)}"
    if "ageable" in name:
        hint = "hide it behind computation" if can_hide else "make it faster; computation is too short to hide it"
        return observation, f"pinned memory and non_blocking=True {hint}"
    if "DtoD" in name:
        return observation, "copies within the device, from .clone(), .contiguous() or slices that are written"
    hint = "a separate stream hides it behind computation; " if can_hide else _TOO_SHORT
    return observation, f"{hint}keep data on the device where possible"
