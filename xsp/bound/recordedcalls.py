"""The recorded calls of a step in a trace: operators, modules, time of each call in place, and time of the whole step.

The time of a call is its operator's true time on the host. In a trace with device work it is the time of the kernels,
copies and fills that the call launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from xsp.account import pagefaults
from xsp.analyses.model import model_information
from xsp.analyses.roofline import kernels_by_model
from xsp.bound.totals import Figure
from xsp.device import machine
from xsp.device.kernelnames import NAMES
from xsp.errors import AnalysisError
from xsp.graph import spans
from xsp.schema import Kind, Level
from xsp.store.iterations import iterations
from xsp.store.selftimes import BOOKKEEPING, NS
from xsp.store.trace import Trace

COMPILED = ("CompiledFunction", "Torch-Compiled Region", "CompiledFxGraph", "triton_")
"""Parts of the names of operators in compiled code."""


@dataclass
class RecordedCall:
    """A call in a trace."""

    op: str
    module: str
    """Path of the module as in a graph; empty for the outermost module."""

    phase: str
    ns: float
    """On the host, the time of the call with all calls inside; on a device, the sum of the launched work."""

    half_ns: float = 0.0
    kernels: int = 0
    """Number of launched kernels, copies and fills on a device."""

    tensor_cores: bool = False
    shape: tuple[int, ...] | None = None
    """Shape of the first input; None if unknown."""

    computes: bool = True
    """Whether the call computes: it launched device work or, without a device, is more than bookkeeping."""

    span: str = ""
    """Id of its span; empty for a call that is not from a trace."""

    inner_operators: frozenset[str] = frozenset()
    """Names of the operators inside the call."""


class _SpanRow(NamedTuple):
    span_id: str
    parent_id: str | None
    name: str
    phase: str | None
    ns: float
    half_ns: float
    layer_id: str | None
    layer: str | None
    shapes: str | None


_ROWS = f"""
    SELECT op.span_id, op.parent_id, op.name, op.phase, coalesce(op.true_ns, op.raw_ns, op.dur_ns)::DOUBLE,
        coalesce(op.true_hi_ns - op.true_lo_ns, 0)::DOUBLE / 2, op.layer_id, layer.name,
        op.input_shapes
    FROM merged op LEFT JOIN merged layer ON layer.span_id = op.layer_id AND layer.level = {int(Level.LAYER)}
    WHERE op.level = {int(Level.OP)} AND op.kind = '{Kind.OP}'
    ORDER BY op.start_ns, op.dur_ns DESC, op.span_id
"""
"""Query of the operators, in the order of `xsp.graph.spans`."""


@dataclass
class _Span:
    row: _SpanRow
    children: list[_Span] = field(default_factory=list)
    kernels: int = 0
    device_ns: float = 0.0
    tensor_cores: bool = False


def calls_of_nodes(trace: Trace) -> list[RecordedCall]:
    """Return the calls of the nodes of `xsp.graph.spans.of(trace)`, in their order."""
    ids = spans.span_ids(trace)
    id_set = set(ids)
    by_id = dict(_calls(trace, lambda span: span.row.span_id in id_set))
    return [by_id[span_id] for span_id in ids]


def of(trace: Trace, operators: Set[str]) -> list[RecordedCall]:
    """Return the outermost calls of operators that a graph may have, by start time.

    An operator that is not in the graph is replaced by the operators inside it, because with gradients composite
    operators decompose. If none of those is in the graph either, the operator is a recorded call that was not planned.
    """
    return [
        call for _, call in _calls(trace, lambda span: span.row.name in operators or not _contains(span, operators))
    ]


def step_time(trace: Trace) -> Figure | None:
    """Return the time of a step with its interval: the true time if the trace is leveled, else the recorded one.

    A step on a device lasts until the last kernel has ended. If the steps have several batch sizes, those of the size
    of the merged step count. None if the time is unknown.
    """
    try:
        if trace.has(Level.KERNEL):
            rows = kernels_by_model(trace).project("batch_size, latency_ms, NULL, NULL, 1").fetchall()
        else:
            rows = model_information(trace).project("batch_size, latency_ms, low_ms, high_ms, steps").fetchall()
    except AnalysisError:
        return None
    timed_rows = [row for row in rows if row[1] is not None]
    if not timed_rows:
        return None
    ((batch,),) = trace.con.execute(f"SELECT max(batch_size) FROM merged WHERE kind = '{Kind.STEP}'").fetchall()
    _, mean, low, high, _ = max(timed_rows, key=lambda row: (row[0] == batch, row[4]))
    half = 0.0 if low is None or high is None else (high - low) / 2
    return Figure(mean * 1e6, half * 1e6, "step")


def is_compiled(trace: Trace) -> bool:
    """Return whether compiled code ran in the step."""
    condition = " OR ".join(f"contains(name, '{part}')" for part in COMPILED)
    return bool(trace.con.execute(f"SELECT 1 FROM merged WHERE {condition} LIMIT 1").fetchall())


def _calls(trace: Trace, is_call: Callable[[_Span], bool]) -> Iterator[tuple[str, RecordedCall]]:
    """Yield the id and the call of each outermost span that is a call; other spans are searched for inner calls."""
    on_device = trace.has(Level.KERNEL)
    roots = _trees(trace)
    if on_device:
        _add_device_work(trace, roots)
    outer = _outer_module(trace)
    modules: dict[str, list[str]] = {}
    pending = roots[::-1]
    while pending:
        span = pending.pop()
        if not is_call(span):
            pending += span.children[::-1]
            continue
        path = spans.module_path(modules, span.row.layer, span.row.layer_id)
        yield span.row.span_id, _recorded_call(span, "" if path == outer else path, on_device)


def _recorded_call(span: _Span, module: str, on_device: bool) -> RecordedCall:
    row = span.row
    members = list(_subtree(span))
    kernels = sum(member.kernels for member in members)
    works = kernels > 0 if on_device else any(_is_busy(member.row.name) for member in members)
    return RecordedCall(
        row.name,
        module,
        row.phase or "",
        sum(member.device_ns for member in members) if on_device else row.ns,
        0.0 if on_device else row.half_ns,
        kernels,
        any(member.tensor_cores for member in members),
        _first_shape(row.shapes),
        works,
        row.span_id,
        frozenset(member.row.name for member in members if member is not span),
    )


def _first_shape(shapes: str | None) -> tuple[int, ...] | None:
    """Return the shape of the first input, from the JSON of all shapes; None if it is no tensor, or unknown."""
    try:
        parsed = json.loads(shapes or "null")
    except ValueError:
        return None
    shape = parsed[0] if isinstance(parsed, list) and parsed else None
    if not isinstance(shape, list) or not shape or any(type(size) is not int for size in shape):
        return None
    return tuple(shape)


def _is_busy(name: str) -> bool:
    """Return whether an operator is more than bookkeeping, such as allocation and views."""
    frame = name.startswith(("autograd::", "torch::autograd::"))
    return "::" in name and not frame and name.partition("::")[2] not in BOOKKEEPING


def _subtree(span: _Span) -> Iterator[_Span]:
    pending = [span]
    while pending:
        current = pending.pop()
        yield current
        pending += current.children


def _contains(span: _Span, operators: Set[str]) -> bool:
    return any(inner.row.name in operators for inner in _subtree(span) if inner is not span)


def _trees(trace: Trace) -> list[_Span]:
    """Return the trees of operators, from the outermost ones."""
    roots: list[_Span] = []
    by_id: dict[str, _Span] = {}
    for row in map(_SpanRow._make, trace.con.execute(_ROWS).fetchall()):
        span = _Span(row)
        parent = by_id.get(row.parent_id or "")
        if parent is not None:
            parent.children.append(span)
        elif spans.is_call(row.name):
            roots.append(span)
        else:
            continue
        by_id[row.span_id] = span
    return roots


def _add_device_work(trace: Trace, roots: list[_Span]) -> None:
    """Add to each operator the device work that it launched directly."""
    by_id = {span.row.span_id: span for root in roots for span in _subtree(root)}
    parents = dict(trace.con.execute("SELECT span_id, parent_id FROM merged WHERE device IS NULL").fetchall())
    rows = trace.con.execute(
        f"""
        WITH {NAMES}
        SELECT parent_id, {NS}, tensor_cores = 'yes' AND kind = '{Kind.KERNEL}'
        FROM merged LEFT JOIN names USING (name) WHERE level = {int(Level.KERNEL)}
        """
    ).fetchall()
    for parent, ns, tensor_cores in rows:
        ancestor, steps = parent, 0
        while ancestor is not None and ancestor not in by_id and steps < 1000:
            ancestor, steps = parents.get(ancestor), steps + 1
        if ancestor in by_id:
            span = by_id[ancestor]
            span.kernels += 1
            span.device_ns += float(ns or 0)
            span.tensor_cores |= bool(tensor_cores)


MIN_SYSTEM_SHARE = 0.05
"""Minimum system time per thread, as a share of an iteration, for a line on page faults."""


def page_faults(trace: Trace) -> tuple[str, Figure] | None:
    """Return a text on the page faults of a step and the time that they take; None if it is short or unknown."""
    for row in iterations(trace):
        if (row.rank, row.kind) != (trace.rank, trace.kind) or row.faults is None or not row.mean_ns:
            continue
        system_ns = row.system_ns or 0.0
        cost = pagefaults.cost(row.faults, system_ns / 1e6, pagefaults.threads(trace.run.machine))
        if cost.low * 1e6 < MIN_SYSTEM_SHARE * row.mean_ns:
            return None
        text = (
            f"page faults: {row.faults:,.0f} in a step, {system_ns / 1e6:.3g} ms in the system for all threads; calls "
            "timed in isolation have other counts: xsp advise says how to keep memory"
        )
        return text, Figure(cost.value * 1e6, cost.half * 1e6)
    return None


def _outer_module(trace: Trace) -> str | None:
    """Return the name of the only outermost module, which has an empty path in a graph; None if there are several."""
    rows = trace.con.execute(
        f"""
        SELECT layer.name FROM merged layer LEFT JOIN merged parent ON parent.span_id = layer.parent_id
        WHERE layer.level = {int(Level.LAYER)} AND coalesce(parent.level, 0) < {int(Level.LAYER)}
        """
    ).fetchall()
    names = {name for (name,) in rows}
    return next(iter(names)) if len(names) == 1 else None


def device_ns(trace: Trace) -> float:
    """Return the total time of all kernels, copies and fills of a step in nanoseconds."""
    ((total,),) = trace.con.execute(f"SELECT sum({NS}) FROM merged WHERE level = {int(Level.KERNEL)}").fetchall()
    return float(total or 0)


def has_device_work(trace: Trace) -> bool:
    """Return whether a trace has device work."""
    return trace.has(Level.KERNEL)


def no_shapes(trace: Trace | None) -> str:
    """Return a text that a trace has no shapes, and the remedy: in runs of xsp, a step that describes its calls."""
    if trace is None or trace.run.imported is not None:
        return "the trace has no shapes, so its calls have no bound; record with record_shapes=True"
    return (
        "no step of the run describes its calls, so they have no bound; record more steps of this kind, "
        "or name the model beside the run: xsp bound file.py:function --run RUN"
    )


def is_of_device(trace: Trace | None) -> bool:
    """Return whether the calls of a trace did their work on a device."""
    return trace is not None and has_device_work(trace)


def is_foreign(trace: Trace | None) -> bool:
    """Return whether a trace is from a device or another processor, for which there are no timings here."""
    if trace is None:
        return False
    return has_device_work(trace) or trace.run.machine.cpu != machine.cpu_model()
