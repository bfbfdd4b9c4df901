"""The host's calls of a step as trees with their times, and the spread of a figure over repeats of the step.

Calls (phases of the step, modules, operators) nest by their times on a thread. Durations are true times where a trace
has them; gaps between the calls inside another call are as recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xsp import account, stats
from xsp.account import entries as names
from xsp.account.entries import Side
from xsp.advise import steptime
from xsp.advise.advice import MOST_SPANS, AdviceContext, CoveredElsewhere, Place
from xsp.device import devices
from xsp.errors import AnalysisError
from xsp.schema import INPUT_TENSORS, SCALARS, Kind, Level
from xsp.stats import Interval
from xsp.store.selftimes import BOOKKEEPING, NS
from xsp.store.trace import Trace
from xsp.store.views import has_shapes

MOST_CALLS = 500_000
"""Maximum number of calls in a step for which a tree is built."""

LEAST_MS = 0.05
"""Milliseconds per step below which a gain is in the noise of any step."""

DESCRIBED_OPS = ("aten::batch_norm", "aten::dropout", "aten::slice", "aten::select")
"""Operators whose arguments are read from the trace."""

_PHASES = {
    Kind.FORWARD.value: names.FORWARD, Kind.BACKWARD.value: names.BACKWARD, Kind.OPTIMIZER.value: names.OPTIMIZER,
}  # fmt: skip
_DESCRIBED_SQL = ", ".join(f"'{name}'" for name in DESCRIBED_OPS)
_HINT = "record again with --levels M/L/G, which has operators"


@dataclass(eq=False)
class HostCall:
    """A call on the host, with the calls inside it."""

    span_id: str
    key: str | None
    level: int
    kind: str
    name: str
    type: str | None
    phase: str | None
    dtype: str | None
    sequence_nr: int | None
    start_ns: int
    end_ns: int
    ns: float
    """True duration, else the recorded duration scaled to the true step."""

    raw_ns: float
    """Duration as recorded at the deepest rung."""

    attributes: str | None
    """JSON, for modules and `DESCRIBED_OPS` only."""

    input_shapes: str | None
    """JSON of the shapes of the inputs."""

    parent: HostCall | None = None
    children: list[HostCall] = field(default_factory=list)
    is_op: bool = field(init=False)
    """Whether this is the call of an operator."""

    def __post_init__(self) -> None:
        self.is_op = self.level == Level.OP  # not when it is asked for: that takes ten times as long, for each call

    @cached_property
    def shapes(self) -> list[object]:
        """The shapes of the inputs; empty if not recorded."""
        try:
            shapes = json.loads(self.input_shapes or "null")
        except ValueError:
            return []
        return shapes if isinstance(shapes, list) else []

    @property
    def is_outer_op(self) -> bool:
        """Whether this is an operator that the program calls, and not another operator."""
        return self.is_op and (self.parent is None or not self.parent.is_op)

    @property
    def computes(self) -> bool:
        """Whether the call does more than an operator that only views or allocates memory."""
        return not self.is_op or self.name.removeprefix("aten::") not in BOOKKEEPING

    @property
    def stem(self) -> str:
        """The name of an operator without its namespace and without the mark of in-place operators."""
        return self.name.removeprefix("aten::").removesuffix("_")

    @property
    def module(self) -> str | None:
        """The name of the innermost module around the call, or of the call itself if it is a module's."""
        call: HostCall | None = self
        while call is not None and call.level != Level.LAYER:
            call = call.parent
        return call.name if call is not None else None

    @property
    def first_shape(self) -> tuple[int, ...] | None:
        """The shape of the first input; None if it is not a tensor or unknown."""
        return self.shape(0)

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return the shape of an input; None if it is not a tensor or unknown."""
        return tensor_shape(self.shapes[index]) if index < len(self.shapes) else None

    def has_input(self, shape: Sequence[int]) -> bool:
        """Return whether an input is a tensor of that shape, or a list that contains one."""
        sizes = [*shape]
        return any(isinstance(argument, list) and (argument == sizes or sizes in argument) for argument in self.shapes)

    @cached_property
    def input_ids(self) -> tuple[int, ...]:
        """The numbers of a module's input tensors, see `xsp.schema.INPUT_TENSORS`; empty if not recorded."""
        numbers = self._attribute(INPUT_TENSORS)
        return tuple(number for number in numbers if type(number) is int)

    @cached_property
    def scalars(self) -> list[object]:
        """The arguments of an operator that are not tensors, at their positions; empty if not recorded."""
        return self._attribute(SCALARS)

    def _attribute(self, name: str) -> list[object]:
        try:
            values = json.loads(self.attributes or "{}").get(name)
        except (ValueError, AttributeError):
            return []
        return values if isinstance(values, list) else []

    @property
    def tensor_count(self) -> int:
        """The number of inputs that are known to be tensors."""
        return sum(isinstance(shape, list) and bool(shape) for shape in self.shapes)

    def walk(self) -> Iterator[HostCall]:
        """Yield this call and all calls inside it."""
        pending = [self]
        while pending:
            call = pending.pop()
            yield call
            pending += reversed(call.children)


def tensor_shape(value: object) -> tuple[int, ...] | None:
    """Return a recorded shape; None if it is empty, not that of a tensor, or unknown."""
    if not isinstance(value, list) or not value or not all(type(size) is int for size in value):
        return None
    return tuple(value)


def missing_shapes(context: AdviceContext) -> str | None:
    """Return that no operator of the trace has the shapes of its inputs, with the remedy; None if any has."""
    trace = context.trace
    if trace is None:
        return None
    if context.cached("has_shapes", lambda: has_shapes(trace)):
        return None
    if trace.run.imported is not None:
        return "the trace has no shapes: record with record_shapes=True"
    return "no recorded step has shapes: let the program run longer, or give a larger --budget"


def roots(context: AdviceContext, with_device: bool = False) -> list[HostCall]:
    """Return the outermost calls of the merged step on the host, in order; computed once.

    Args:
        context: the subject.
        with_device: whether the question also applies to the host of a program with a device.

    Raises:
        AnalysisError: the trace contains no operators, or contains device work, which other questions cover.
    """
    if not with_device and context.required_trace.has(Level.KERNEL):
        raise CoveredElsewhere("the trace has device work: see `device-idle` for time on the host")
    return context.cached("calls", lambda: _trees(context))


def walk(context: AdviceContext, with_device: bool = False) -> Iterator[HostCall]:
    """Return an iterator over all calls of the merged step, in order; raises the errors of `roots`."""
    outermost = roots(context, with_device)  # dozens of questions walk: the calls are put in order once
    return iter(context.cached("calls in order", lambda: [call for root in outermost for call in root.walk()]))


def outer_ops(context: AdviceContext) -> list[HostCall]:
    """Return the operators that the program calls, in order; raises the errors of `roots`."""
    return [call for call in walk(context) if call.is_outer_op]


def are_worth_a_walk(context: AdviceContext, condition: str, least: int = 1) -> bool:
    """Return whether a question should walk through the calls of a step.

    With device work few questions do, and making the calls takes 10 µs for each: where too few of them meet an SQL
    condition on `merged`, that is left out. Without device work all questions share the calls.
    """
    trace = context.required_trace
    if not trace.has(Level.KERNEL) or not trace.has(Level.OP):
        return True
    ((count,),) = trace.con.execute(f"SELECT count(*) FROM merged WHERE device IS NULL AND {condition}").fetchall()
    return bool(count >= least)


def gradients(context: AdviceContext, forward_calls: Sequence[HostCall]) -> list[HostCall]:
    """Return the backward nodes that compute the gradients of calls, matched by autograd's sequence numbers."""
    numbers = {call.sequence_nr for root in forward_calls for call in root.walk()} - {None}
    passes = (call for call in walk(context) if call.kind == Kind.BACKWARD)
    return [node for backward in passes for node in backward.children if numbers and node.sequence_nr in numbers]


def with_gradients(context: AdviceContext, forward_calls: Sequence[HostCall]) -> list[HostCall]:
    """Return calls and the backward nodes of their gradients: all that goes away if these calls are not made."""
    return [*forward_calls, *gradients(context, forward_calls)]


def gradients_text(forward_calls: Sequence[HostCall], all_calls: Sequence[HostCall]) -> str:
    """Return ` and their gradients` if `with_gradients` found some for these calls, else nothing."""
    return " and their gradients" * (len(all_calls) > len(forward_calls))


def between_ns(group: Iterable[HostCall]) -> float:
    """Return the nanoseconds between the first and the last call of a group in no call: Python, or autograd's engine.

    The calls of each outer call count by themselves; of its time outside the calls inside it, they have the share that
    was recorded between them.
    """
    by_parent: dict[int, list[HostCall]] = {}
    for call in group:
        if call.parent is not None:
            by_parent.setdefault(id(call.parent), []).append(call)
    total = 0.0
    for members in by_parent.values():
        parent = members[0].parent
        assert parent is not None
        begin, end = min(call.start_ns for call in members), max(call.end_ns for call in members)
        starts = [child.start_ns for child in parent.children] + [parent.end_ns]
        ends = [parent.start_ns] + [child.end_ns for child in parent.children]
        gaps = [(last, max(0, first - last)) for last, first in zip(ends, starts, strict=True)]
        recorded = sum(gap for _, gap in gaps)
        inside = sum(gap for last, gap in gaps if begin <= last < end)
        own_ns = max(0.0, parent.ns - sum(child.ns for child in parent.children))
        total += own_ns * inside / recorded if recorded else 0.0
    return total


def _trees(context: AdviceContext) -> list[HostCall]:
    trace = context.required_trace
    if not trace.has(Level.OP):
        raise AnalysisError(f"{trace.name!r} has no operators: {_HINT}")
    rows = trace.con.execute(
        f"""
        SELECT span_id, key, level, kind, name, type, phase, dtype, sequence_nr, start_ns,
               start_ns + coalesce(dur_ns, 0), coalesce(true_ns, {_time_factor(trace)} * {NS}, 0)::DOUBLE,
               coalesce(raw_ns, dur_ns, 0)::DOUBLE,
               CASE WHEN level = {int(Level.LAYER)} OR name IN ({_DESCRIBED_SQL}) THEN attributes END,
               input_shapes, process, thread
        FROM merged WHERE device IS NULL AND level <= {int(Level.OP)} AND kind NOT IN ('{Kind.RUN}', '{Kind.ALLOC}')
        ORDER BY process, thread, start_ns, dur_ns DESC, level, depth LIMIT {MOST_CALLS + 1}
        """
    ).fetchall()
    if len(rows) > MOST_CALLS:
        raise AnalysisError(f"more than {MOST_CALLS:,} calls in a step: record fewer steps")
    roots: list[HostCall] = []
    stack: list[HostCall] = []
    thread: tuple[object, object] | None = None
    threads: dict[object, list[HostCall]] = {}
    for row in rows:
        *values, process, thread_id = row
        call = HostCall(*values)
        middle = (call.start_ns + call.end_ns) // 2
        while stack and (thread != (process, thread_id) or stack[-1].end_ns <= middle):
            stack.pop()
        thread = (process, thread_id)
        if stack:
            call.parent = stack[-1]
            stack[-1].children.append(call)
        else:
            roots.append(call)
            threads.setdefault(thread_id, []).append(call)
        stack.append(call)
    trees = _with_steps(roots, threads)
    bare_step = steptime.latency(context.answers)
    main = account.of(trace).main
    for root in trees:
        if root.kind == Kind.STEP:
            step_ns = root.ns if bare_step is None else min(root.ns, 1e6 * bare_step.ms.value)
            if main is not None and main.kind == trace.kind and main.unit != "window":
                is_bare = main.count > main.recorded  # else the account's time is that of recorded steps, too
                step_ns = _scale_phases(root, None if is_bare else step_ns, main.host) or step_ns
            _limit_own_times(root)
            _limit_to_step(root, step_ns)
    return trees


def _scale_phases(step: HostCall, step_ns: float | None, host: Side) -> float | None:
    """Scale the phases of a step, with all that is in them, to what the account states for them; return the step's ns.

    The account's come from steps that were not recorded, or recorded at fewer levels: on a busy machine they differ.
    Phases inside other phases, as of an optimizer that calls the model, stay as they are: then this returns None.

    Args:
        step: the step.
        step_ns: the time of the step, of which the account states shares; None for the account's own.
        host: the host's side of the account.
    """
    in_step_ns = 1e6 * (host.total_ms - host.ms(names.BETWEEN) - host.ms(names.DATA))
    phases = _phases(step)
    if in_step_ns <= 0 or any(inner.kind in _PHASES for call in phases for inner in call.walk() if inner is not call):
        return None
    share = min(1.0, step_ns / in_step_ns) if step_ns is not None else 1.0
    groups = {name: [call for call in phases if _PHASES[call.kind] == name] for name in _PHASES.values()}
    for name, group in groups.items():
        recorded_ns, stated_ns = sum(call.ns for call in group), 1e6 * host.ms(name) * share
        if recorded_ns > 0 and stated_ns > 0 and not math.isclose(recorded_ns, stated_ns):
            for call in group:
                _scale(call, stated_ns / recorded_ns)
    if step_ns is None:
        step.ns = max(step.ns, in_step_ns)
    return in_step_ns * share


def _phases(step: HostCall) -> list[HostCall]:
    """Return the outermost phases inside a step."""
    found: list[HostCall] = []
    pending = [*step.children]
    while pending:
        call = pending.pop()
        if call.kind in _PHASES:
            found.append(call)
        elif not call.is_op:
            pending += call.children
    return found


def _scale(call: HostCall, factor: float) -> None:
    for inner in call.walk():
        inner.ns *= factor


def _limit_own_times(step: HostCall) -> None:
    """Scale the calls inside a phase up where it would have more time in none of them than was recorded there.

    True times of different depths come from different steps: on a busy machine those of operators were seen to be half
    of the optimizer's around them. What passes between calls is never shorter in a recorded step.
    """
    for phase in _phases(step):
        inside_ns = sum(call.ns for call in phase.children)
        own_raw_ns = max(0.0, phase.raw_ns - sum(call.raw_ns for call in phase.children))
        if 0 < inside_ns < phase.ns - own_raw_ns:
            for call in phase.children:
                _scale(call, (phase.ns - own_raw_ns) / inside_ns)


def _limit_to_step(step: HostCall, step_ns: float) -> None:
    """Scale the times of a step's calls down to the bare step, and to the call around them, where they exceed these.

    Recorded steps are disturbed by more than the cost of spans: memory returned to the system after a recorded step was
    seen to make calls three times as long as in bare steps. The times of outer calls also come from shallower
    recordings, which are disturbed less.
    """
    share = step_ns / step.ns if 0 < step_ns < step.ns else 1.0
    step.ns *= share
    pending = [(step, share)]
    while pending:
        parent, share = pending.pop()
        inside_ns = share * sum(child.ns for child in parent.children)
        if 0 < parent.ns < inside_ns:
            share *= parent.ns / inside_ns
        for child in parent.children:
            child.ns *= share
            pending.append((child, share))


def _time_factor(trace: Trace) -> float:
    """Return the factor for recorded times without a true time: the true step time divided by the recorded one.

    Recorded steps give the shares of calls, bare steps the step time: on a busy machine recorded steps were seen to
    take seven times as long.
    """
    ((share,),) = trace.con.execute(
        f"SELECT min(true_ns / raw_ns) FROM merged WHERE kind = '{Kind.STEP}' AND raw_ns > 0"
    ).fetchall()
    return 1.0 if share is None else min(1.0, float(share))


def _with_steps(roots: list[HostCall], threads: Mapping[object, list[HostCall]]) -> list[HostCall]:
    """Return the outermost calls, with the busiest thread's calls moved into the steps that belong to no thread."""
    steps = [root for root in threads.get(None, ()) if root.kind == Kind.STEP and not root.children]
    by_thread = [calls for number, calls in threads.items() if number is not None]
    if not steps or not by_thread:
        return roots
    for root in max(by_thread, key=lambda calls: sum(call.ns for call in calls)):
        step = next((outer for outer in steps if outer.start_ns <= root.start_ns and root.end_ns <= outer.end_ns), None)
        if step is not None:
            root.parent = step
            step.children.append(root)
    return [root for root in roots if root.parent is None]


def times_per_step(
    context: AdviceContext, plus: Sequence[HostCall], minus: Sequence[HostCall] = ()
) -> list[tuple[float, float]]:
    """Return for each recorded step with operators the time of `plus` minus that of `minus`, and the step time, in ns.

    One OpenTelemetry trace may contain several steps, for example those of a job whose launcher started the trace.
    """
    keys = [call.key for call in plus if call.key], [call.key for call in minus if call.key]
    return context.required_trace.con.execute(
        f"""
        WITH selected AS (
            SELECT unnest(?::VARCHAR[]) AS key, 1 AS sign UNION ALL SELECT unnest(?::VARCHAR[]), -1
        )
        SELECT sum(sign * spans.dur_ns)::DOUBLE, max(alike.dur_ns)::DOUBLE
        FROM spans JOIN selected USING (key) JOIN alike USING (trace_id, step, rung, rank)
        WHERE spans.timed AND coalesce(rung, {int(Level.OP)}) >= {int(Level.OP)}
        GROUP BY trace_id, step, rung ORDER BY trace_id, step
        """,
        list(keys),
    ).fetchall()


def interval_factors(context: AdviceContext, group: Sequence[HostCall]) -> tuple[float, float] | None:
    """Return the factors from the mean time of calls to the lower and upper ends of its confidence interval.

    The calls of each recorded step with operators are taken relative to the time of their step, so that a slow step
    does not widen the interval. Times are positive: the interval is that of the mean of their logarithms.

    Returns:
        None for fewer than three steps, or if a step has no time or no time in these calls.
    """
    rows = times_per_step(context, group)
    ratios = [ns / step_ns for ns, step_ns in rows if step_ns and ns > 0]
    if len(ratios) < 3 or len(ratios) < len(rows):
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean_interval = stats.mean_interval(logs)
    if mean_interval is None:
        return None
    mean = mean_interval.value
    return math.exp(max(-3.0, mean_interval.low - mean)), math.exp(min(3.0, mean_interval.high - mean))


def interval(ms: float, factors: tuple[float, float] | None) -> Interval:
    """Return a figure with its interval from `interval_factors`; without factors both ends are the figure."""
    low, high = factors or (1.0, 1.0)
    return Interval(ms * low, ms, ms * high)


def places(calls: Sequence[HostCall], op: str | None = None) -> tuple[Place, ...]:
    """Return the places of calls by module, the module with the most time first."""
    by_module: dict[str | None, list[HostCall]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    groups = sorted(by_module.items(), key=lambda item: -sum(call.ns for call in item[1]))
    return tuple(
        Place(module or None, op or _name(group), tuple(call.span_id for call in group[:MOST_SPANS]), len(group))
        for module, group in groups
    )


def _name(calls: Sequence[HostCall]) -> str | None:
    """Return the name that all calls share; None if they have several names."""
    return calls[0].name if len({call.name for call in calls}) == 1 else None


def step_ms(context: AdviceContext) -> float:
    """Return the time, in milliseconds, that gains are shares of.

    Raises:
        AnalysisError: no step was timed.
    """
    step = context.step
    if step is None or not step.ms.value:
        if context.trace is None:
            product = context.settings.get("device")
            is_elsewhere = product is not None and not devices.is_id(product)
            how = devices.timed_elsewhere("xsp bench MODEL", str(product)) if is_elsewhere else "--fill 60s"
            raise AnalysisError(f"too few of its calls are timed here: take them first, {how}")
        raise AnalysisError("no step was timed: record more steps")
    return step.ms.value
