"""Advice: what to change, as far as the trace shows it, with an upper bound of the gain.

Advice is given only if it is specific. What the program does already (graphs, compiled code, workers) is read from the
trace and not advised again. The bound of the gain is all of the time concerned, in percent of the window of the device:
the time from the start of its first kernel to the end of its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xsp.analyses.answers import Answers
from xsp.analyses.fusing import BATCHED, BETWEEN, EAGER, SOFTMAX
from xsp.device.kernelnames import MATRIX
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

WORTH = 5.0
"""Minimum percentage of the window for a loss, or for the bound of a gain, to be listed."""

RUNNING = 40.0
"""Minimum percentage of the window that the device is busy for advice on kernels."""

HELD = 0.5
"""Minimum share of the idle time of a cause for one call, or one gap, to be named."""

AT_BEGIN = 0.01
"""A gap is at the start of the trace if less than this multiple of its length was recorded before it."""

NAMED = 0.5
"""Minimum percentage of GPU time for an operator to be named."""

MOST = 4
"""Maximum number of pieces of advice."""

COMMUNICATION, COPIES, IDLE = "exposed communication", "exposed copies", "idle, "

Row = Mapping[str, Any]


class Loss(NamedTuple):
    """Time of the window that is lost to something."""

    name: str
    percent: float
    ms: float


class Done(NamedTuple):
    """What the program does already, as its trace shows."""

    graphs: bool
    compiled: bool
    workers: bool


class Piece(NamedTuple):
    """A piece of advice, and the percent of the window that it could gain at most."""

    text: str
    percent: float


def done(trace: Trace) -> Done:
    """Return what a trace shows of graphs, compiled code and workers of the data loader."""
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
    return Done(bool(graphs), bool(compiled), bool(workers))


def advice(answers: Answers, whole: Row, losses: Sequence[Loss]) -> list[str]:
    """Return what helps, what could gain most first.

    Args:
        answers: of the trace.
        whole: the row of `device-activity` of all devices.
        losses: of the window, the largest first.
    """
    already = done(answers.trace)
    pieces = [piece for loss in losses if loss.percent >= WORTH for piece in _for_loss(answers, whole, loss, already)]
    if whole["busy_percent"] >= RUNNING:
        pieces += _for_kernels(answers, whole, already)
    best = sorted((piece for piece in pieces if piece.percent >= WORTH), key=lambda piece: -piece.percent)
    return [f"{piece.text} (at most {piece.percent:.0f} % of the time)" for piece in best[:MOST]]


def _for_loss(answers: Answers, whole: Row, loss: Loss, already: Done) -> Iterator[Piece]:
    if loss.name.startswith(IDLE):
        cause = loss.name.removeprefix(IDLE)
        text = _IDLE[cause](answers, already, cause) if cause in _IDLE else None
    else:
        hidden = whole["computation_ms"] >= loss.ms  # what computes for less time cannot hide it
        text = _communication(answers, hidden) if loss.name == COMMUNICATION else _copies(answers, hidden)
    if text is not None:
        yield Piece(f"{loss.name}: {text}", loss.percent)


class Held(NamedTuple):
    """What the idle time of a cause consists of."""

    gaps: int
    ms: float
    call: str | None
    call_ms: float
    longest: Row | None
    """The part of a gap that is half of it or more, of `idle-gaps`."""


def held(answers: Answers, cause: str) -> Held:
    """Return what the idle time of a cause consists of, over all devices."""
    rows = [row for row in answers["idle-causes"].dicts() if row["cause"] == cause]
    ms = sum(row["idle_ms"] for row in rows)
    calls: dict[str, float] = {}
    for row in rows:
        if row["call"] is not None:
            calls[row["call"]] = calls.get(row["call"], 0.0) + row["call_ms"]
    call = max(calls, key=lambda name: calls[name], default=None)
    longest = next((row for row in answers["idle-gaps"].dicts() if row["cause"] == cause), None)
    if longest is not None and longest["idle_us"] < HELD * ms * 1e3:
        longest = None
    return Held(sum(row["gaps"] for row in rows), ms, call, calls.get(call or "", 0.0), longest)


def one_gap(gap: Row) -> str:
    """Return in words where a gap lies, and which call the host was in."""
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
    (("Malloc", "Free", "HostAlloc", "HostRegister"), "memory is taken from the driver or given back (the first such "
     "call makes the context): keep it in the caching allocator, pin buffers once, warm up before what is measured"),
    (("Module", "Library", "GetFunction"), "code is loaded: warm up before what is measured"),
    (("GraphInstantiate", "StreamEndCapture", "StreamBeginCapture"), "a graph is made: capture it once, and replay it"),
    (("EventQuery", "StreamQuery"), "the host asks again and again whether the device is done: wait less often"),
)  # fmt: skip


def _host(answers: Answers, already: Done, cause: str) -> str | None:
    """Return what helps where launches come late: what one call took, else fewer launches."""
    what = held(answers, cause)
    if what.longest is not None:
        return f"{one_gap(what.longest)} is {100 * what.longest['idle_us'] / 1e3 / what.ms:.0f} % of it; " + (
            _of_call(what.longest["call"]) or f"{_short(what.longest['next_work'])} came next"
        )
    if what.call is not None and what.call_ms >= HELD * what.ms and (text := _of_call(what.call)):
        return f"{what.call} is {100 * what.call_ms / what.ms:.0f} % of it: {text}"
    launches = answers["launches"].dicts()
    count = sum(row["launches"] or 0 for row in launches)
    ways = [
        *([] if already.graphs else ["CUDA graphs"]),
        *([] if already.compiled else ["torch.compile"]),
        "a larger batch",
    ]
    cost = sum(row["launch_ms"] or 0.0 for row in launches)
    text = f"{what.gaps:,} gaps, {count:,} launches whose calls take {duration(cost)}: fewer launches ("
    text += f"{', '.join(ways)}), or less Python between them; `launch-bound` names the layers"
    here = [word for word, is_so in (("graphs are replayed", already.graphs), ("code is compiled", already.compiled))
            if is_so]  # fmt: skip
    return text + (f" ({' and '.join(here)} already)" if here else "")


def _of_call(call: str | None) -> str | None:
    return next((text for words, text in _CALLS if call is not None and any(word in call for word in words)), None)


def _sync(answers: Answers, already: Done, cause: str) -> str:
    what = held(answers, cause)
    if what.longest is not None:
        where = f"{one_gap(what.longest)} is {100 * what.longest['idle_us'] / 1e3 / what.ms:.0f} % of it"
    elif what.call is not None:
        where = f"{100 * what.call_ms / what.ms:.0f} % of it in {what.call}"
    else:
        where = f"{what.gaps:,} gaps"
    call = (what.longest or {}).get("call") or what.call or ""
    if "Memcpy" in call:
        return f"{where}: read results later or less often (.item(), .cpu(), prints), and pin what is copied"
    return f"{where}: find what waits for the device (.item(), boolean masks, synchronize()); `idle-gaps` names it"


def _data(answers: Answers, already: Done, cause: str) -> str:
    what = held(answers, cause)
    where = one_gap(what.longest) if what.longest is not None else f"{what.gaps:,} waits"
    if what.call is not None and what.longest is None:
        where += f" in {what.call}"
    if already.workers:
        return f"{where}: it has workers; more of them, or less work for each sample"
    if what.call is not None and "DataLoader" in what.call:
        return f"{where}: it has no workers; num_workers and prefetching load beside the step"
    return f"{where}: load and prepare beside the step"


def _wait(answers: Answers, already: Done, cause: str) -> str:
    what = held(answers, cause)
    if what.longest is not None:
        gap = what.longest
        begins = gap["begins_at_ms"] * 1e3 < AT_BEGIN * gap["idle_us"]
        return (
            f"{one_gap(gap)}; {_short(gap['next_work'])} was launched before it and waited, and nothing in the trace "
            "ran on the device: another device, process or rank, or the profiler, kept it"
            + ("; it stands at the trace's begin: record longer, and see whether it comes again" if begins else "")
        )
    median = max((row["median_us"] for row in answers["idle-causes"].dicts() if row["cause"] == cause), default=0.0)
    fewer = "fewer and longer kernels" + ("" if already.compiled else " (torch.compile)")
    return f"{what.gaps:,} gaps, {median:.3g} µs at the median: streams that wait for each other, or {fewer}"


_IDLE: dict[str, Callable[[Answers, Done, str], str | None]] = {
    "host-bound": _host, "sync": _sync, "data loading": _data, "kernel wait": _wait,
}  # fmt: skip


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _communication(answers: Answers, can_hide: bool) -> str | None:
    """Return which collective is exposed most; one rank alone does not tell waiting for others from transfer."""
    rows = sorted(answers["communication"].dicts(), key=lambda row: -(row["exposed_ms"] or 0))
    if not rows or not rows[0]["exposed_ms"]:
        return None
    first = rows[0]
    size = f" of {first['bytes'] / 1e6:.3g} MB" if first["bytes"] else ""
    text = f"{first['calls']} × {first['collective']}{size}, {duration(first['exposed_ms'])} of it: "
    text += "start it earlier, beside computation, or send less" if can_hide else _TOO_MUCH + "send less, or less often"
    if (first.get("ranks") or 1) == 1:
        text += "; load all ranks to tell transfer from waiting for another rank (`collective-skew`)"
    return text


_TOO_MUCH = "computation is too short to hide it: "


def _copies(answers: Answers, can_hide: bool) -> str | None:
    rows = answers.trace.con.execute(
        "SELECT name, count(*), sum(dur_ns) / 1e6 AS ms FROM device_work WHERE kind = "
        f"'{Kind.COPY}' GROUP BY name ORDER BY ms DESC, name LIMIT 1"
    ).fetchall()
    if not rows:
        return None
    name, count, ms = rows[0]
    where = f"{count} × {name}, {duration(ms)}"
    if "ageable" in name:
        way = "hide it behind computation" if can_hide else "make it faster; computation is too short to hide it"
        return f"{where}: pinned memory and non_blocking=True {way}"
    if "DtoD" in name:
        return f"{where}: copies on the device itself, of .clone(), .contiguous() or slices that are written"
    way = "a stream of its own hides it behind computation; " if can_hide else _TOO_MUCH
    return f"{where}: {way}what can stay on the device need not be copied"


def _for_kernels(answers: Answers, whole: Row, already: Done) -> Iterator[Piece]:
    """Yield what helps the kernels themselves."""

    def share(ms: float) -> float:
        return min(100.0 * float(ms) / float(whole["window_ms"]), float(whole["busy_percent"]))

    attention = [row for row in answers["attention"].dicts() if row["form"] == EAGER]
    if attention:
        of = sum(row["percent_of_device_time"] for row in attention)
        saved = sum(row["device_ms"] for row in attention if row["part"] in (SOFTMAX, BETWEEN))
        text = (
            f"eager attention, {of:.0f} % of GPU time, {duration(saved)} of it softmax and what stands between the "
            "products: scaled_dot_product_attention or FlashAttention does not write the scores"
        )
        yield Piece(text, share(saved))
    fusible = answers["fusible"].dicts()
    ms = sum(row["device_ms"] for row in fusible)
    if fusible and ms:
        of = sum(row["percent_of_device_time"] for row in fusible)
        most = ", ".join(
            f"{_short(row['op'] or row['class'], 30)} {row['percent_of_device_time']:.0f} %"
            for row in _by_op(fusible)[:3]
            if row["percent_of_device_time"] >= NAMED
        )
        way = "it is compiled already: look for what is not (graph breaks)" if already.compiled else "torch.compile"
        yield Piece(
            f"elementwise kernels, copies and norms, {of:.0f} % of GPU time ({most}): fuse them; {way}", share(ms)
        )
    for row in answers.classes():
        slow = row["without_tensor_cores_ms"] or 0.0
        if row["class"] in MATRIX and slow > (row["with_tensor_cores_ms"] or 0.0):
            text = (
                f"{row['class']}, {row['percent_of_device_time']:.0f} % of GPU time, {duration(slow)} of it without "
                "tensor cores: lower precision (TF32, BF16), sizes in multiples of 8; `tensor-cores` names the layers"
            )
            yield Piece(text, share(slow))

    yield from _below_the_roof(answers, share, BATCHED if attention else ())


def _below_the_roof(answers: Answers, share: Callable[[float], float], without: Sequence[str] = ()) -> Iterator[Piece]:
    """Yield the operator that could gain most if its kernels ran as fast as the device can at their intensity."""
    rows = [
        row
        for row in answers["ops"].dicts()
        if row["device_ms"] and row["tflop_per_s"] and row["percent_of_device_time"] is not None
        if row["roof_percent"] is not None and row["roof_percent"] < 100 and row["name"] not in without
        if row["device"] is None
    ]
    if not rows:
        return
    whole = float(sum(row["device_ms"] for row in answers.classes()))

    def lost(row: Row) -> float:
        return float(row["percent_of_device_time"]) / 100 * whole * (1 - float(row["roof_percent"]) / 100)

    row = max(rows, key=lost)
    shapes = f" {_short(str(row['shapes']))}" if row["shapes"] else ""
    text = (
        f"{row['name']}{shapes}, {row['percent_of_device_time']:.0f} % of GPU time, runs at "
        f"{row['roof_percent']:.0f} % of what the device can do there: sizes, layout or another kernel; `ops` has the "
        "rates"
    )
    yield Piece(text, share(lost(row)))


def _by_op(rows: Sequence[Row]) -> list[Row]:
    """Return rows of `fusible` with those of one operator together, the most first."""
    sums: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for row in rows:
        kept = sums.setdefault((row["op"], None if row["op"] else row["class"]), {**row, "percent_of_device_time": 0.0})
        kept["percent_of_device_time"] += row["percent_of_device_time"]
    return sorted(sums.values(), key=lambda row: -row["percent_of_device_time"])
