"""Stalls: time in which a module, or the step around the modules, runs no operator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from xsp import account, stats
from xsp.account import places
from xsp.account.entries import BACKWARD, FORWARD, OF_COLLECTIVES, OUTSIDE
from xsp.advise import calls, faults
from xsp.advise.advice import Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.loops import LEAST_CALLS, READS
from xsp.advise.registry import question
from xsp.schema import Kind, Level
from xsp.stats import Interval

USUAL_MS = 0.04
"""Maximum overhead of Python, a framework's dispatch and the recording around a call, in milliseconds; a longer gap is
other work of the host. A call of a module takes some 10 to 30 µs beside its operators, an operator 2 to 10 µs."""

LEAST_REPEATS = 3
"""Minimum number of recorded steps for the gain to be an expectation and not a bound."""

LEAST_PERCENT = 5.0
"""Minimum percentage of the step for a stall to be worth a line: up to 3 % were seen around single calls of short
steps without a stall."""

_CONTAINERS = (str(Kind.STEP), str(Kind.FORWARD), str(Kind.MODULE))
_PHASES = (str(Kind.FORWARD), str(Kind.BACKWARD), str(Kind.OPTIMIZER), str(Kind.DATA))


@question("stall", "Does the host spend time outside operators?", number="Q4")
def stall(context: AdviceContext) -> Iterator[Advice]:
    """Time inside a module, or inside the step, that no operator, module or phase inside it covers.

    `USUAL_MS` of each gap between calls is subtracted, since Python and the recording itself need it, and so are the
    time to return memory, see the question `page-faults`, and collectives, which ranks wait for or transfer in. The
    Python code of a loop that reads single values is left to the question `synchronisations`. Modules of one class
    are one piece, and so are the passes of a function of autograd that is written in Python. Time that is missing
    from any recorded step is not a stall, and one recorded step of many tells nothing: the machine may have done
    something else.
    """
    step_ms = calls.step_ms(context)
    job = account.of(context.required_trace).job
    is_one_of_many = job is not None and job.count > job.recorded
    by_type: dict[str, list[HostCall]] = {}
    for call in calls.walk(context):
        if (
            (call.kind in _CONTAINERS or _is_function(call))
            and _excess_ms(call) >= calls.LEAST_MS
            and _is_innermost(call)
        ):
            by_type.setdefault(_type(call), []).append(call)
    freeing_ms = _freeing_ms(context)
    total_gap = sum(_gap_ms(call) for group in by_type.values() for call in group)
    for name, group in by_type.items():
        freed_ms = freeing_ms * sum(_gap_ms(call) for call in group) / total_gap
        usual_ms = sum(_usual_gap_ms(call) for call in group) + freed_ms + _collectives_ms(context, group)
        gap_interval, repeats = _gap_over_steps(context, group)
        is_step = group[0].kind == Kind.STEP
        has_model = any(inner.kind in _PHASES for call in group for inner in call.children)
        entry = FORWARD if group[0].kind in (Kind.FORWARD, Kind.MODULE) else OUTSIDE if is_step and has_model else None
        gain = Interval(gap_interval.low - usual_ms, gap_interval.value - usual_ms, gap_interval.high - usual_ms).limit(
            min(step_ms, _entry_ms(context, entry))
        )
        is_small = 100 * gain.low / step_ms < LEAST_PERCENT or gain.value < calls.LEAST_MS
        if is_small or (repeats < 2 and is_one_of_many):
            continue
        where = tuple(_place(call) for call in sorted(group, key=lambda call: -_gap_ms(call)))
        subject = f"{len(group)} calls of {name}" if len(group) > 1 else f"a call of {name}"
        if is_step:
            subject = "the step, outside the model and its phases," if has_model else "the step"
        yield Advice(
            "stall",
            f"{subject} spend{'s' * (len(group) == 1)} {gain.value:.3g} ms outside operators",
            where,
            gain,
            repeats < LEAST_REPEATS or group[0].is_op,  # operators in place of a function take time too
            100 * gain.value / step_ms,
            (
                f"{gap_interval.value:.3g} ms in which no operator, module or phase runs inside"
                + (
                    f"; {gap_interval.low:.3g} to {gap_interval.high:.3g} ms in {repeats} recorded steps"
                    if repeats > 1
                    else ""
                ),
                f"{usual_ms:.3g} ms are subtracted for Python code around "
                f"{sum(len(call.children) for call in group):,} calls"
                + (
                    f", {freed_ms:.3g} ms of them for returning memory to the system"
                    if freed_ms >= calls.LEAST_MS
                    else ""
                ),
            ),
            _remedy(context, group, gap_interval.value),
            entry=entry,
        )


_FUNCTION = re.compile(r"(?!Compiled)[^\W\d]\w*")
_NODE_OF_TORCH = re.compile(r"\w*Backward\d+")


def _is_function(call: HostCall) -> bool:
    """Return whether a call is of a function of autograd that is written in Python: nodes of torch have numbers."""
    is_name = call.is_op and _FUNCTION.fullmatch(call.name) is not None
    return is_name and _NODE_OF_TORCH.fullmatch(call.name) is None


MOST_OF_GAP = 1.5
"""Longest time of a line of Python in a phase, as a multiple of the time outside operators: in a longer one, operators
take most. Lines were traced in other steps."""

LEAST_OF_GAP = 0.3
"""Shortest time of such a line."""


def _remedy(context: AdviceContext, group: Sequence[HostCall], gap_ms: float) -> str:
    """Return what to look for, with the lines of the program in the phases of the calls that can take so long."""
    main = account.of(context.required_trace).main
    if main is not None and main.threads > 1:
        return (
            f"see what the {main.threads} threads do outside torch: while one computes in Python, the others wait for "
            "Python's lock (GIL); several processes, or less work in Python (tokenizers, NumPy on whole arrays), do not"
        )
    places_found = [_line_of(context, phase, gap_ms) for phase in _phases_of(group)]
    found = [place for place in places_found if place is not None]
    if not found:
        return (
            "look for sleeping, locks, files, printing, NumPy or Python loops there; `xsp report` shows the gap on the "
            "timeline"
        )
    return f"see {'; '.join(found)}: operators on whole tensors in place of NumPy and loops of Python; files, locks?"


def _phases_of(group: Sequence[HostCall]) -> list[str]:
    """Return the phases of calls, each once."""
    phases = [OUTSIDE if call.kind == Kind.STEP else BACKWARD if _is_in_backward(call) else FORWARD for call in group]
    return list(dict.fromkeys(phases))


def _collectives_ms(context: AdviceContext, group: Sequence[HostCall]) -> float:
    """Return the milliseconds of the phases of calls in which the host transfers, or waits for other ranks."""
    job = account.of(context.required_trace).job
    entries = [job.host[phase] for phase in _phases_of(group)] if job is not None else []
    return sum(entry.part(name) for entry in entries if entry is not None for name in OF_COLLECTIVES)


def _line_of(context: AdviceContext, phase: str, gap_ms: float) -> str | None:
    """Return the line with what it calls that takes most of the time outside operators in a phase; None if unknown.

    A long loop of Python contains no more than small operators; other lines may be all operators.
    """
    main = account.of(context.required_trace).main
    if main is None:
        return None
    if phase == OUTSIDE:
        lines = places.lines_of(context.required_trace, main, phase)
        return None if lines is None else ", ".join(filter(None, (lines.place, lines.calls)))
    phase_ms = main.host.ms(phase)
    fitting = [
        (is_loop, share, line)
        for line, share, is_loop in places.inner_lines_of(context.required_trace, main, phase)
        if share * phase_ms >= LEAST_OF_GAP * gap_ms and (is_loop or share * phase_ms <= MOST_OF_GAP * gap_ms)
    ]
    return max(fitting)[2] if fitting else None


def _is_in_backward(call: HostCall) -> bool:
    outer: HostCall | None = call
    while outer is not None and outer.kind != Kind.BACKWARD:
        outer = outer.parent
    return outer is not None


def _entry_ms(context: AdviceContext, name: str | None) -> float:
    """Return the milliseconds of an entry of the host's account; infinite if there is no such entry, or no time."""
    job = account.of(context.trace).job if context.trace is not None and name is not None else None
    entry = job.host[name] if job is not None and name is not None else None
    return entry.ms if entry is not None and entry.ms is not None else float("inf")


def _freeing_ms(context: AdviceContext) -> float:
    """Return the milliseconds that freeing the memory which a step gets again takes, outside operators."""
    usage = faults.usage_of(context)
    return 0.0 if usage is None else min(usage.system_ms, usage.faults * faults.FREEING_US / 1e3)


def _gap_over_steps(context: AdviceContext, group: Sequence[HostCall]) -> tuple[Interval, int]:
    """Return the minimum, median and maximum over recorded steps of the ms that nothing inside the calls covers, and
    the number of steps.

    The minimum excludes what happened in one step only, because the machine did something else.
    """
    rows = calls.times_per_step(context, group, [inner for call in group for inner in call.children])
    gaps = [max(0.0, ns / 1e6) for ns, _ in rows] or [sum(_gap_ms(call) for call in group)]
    return Interval(min(gaps), stats.percentile(gaps, 0.5), max(gaps)), len(rows)


def _gaps(call: HostCall) -> list[float]:
    """Return the milliseconds of each gap in a call that no call inside it covers, as recorded."""
    gaps, end = [], call.start_ns
    for inner in sorted(call.children, key=lambda child: child.start_ns):
        gaps.append(inner.start_ns - end)
        end = max(end, inner.end_ns)
    return [max(0, ns) / 1e6 for ns in (*gaps, call.end_ns - end)]


def _gap_ms(call: HostCall) -> float:
    return sum(_gaps(call))


def _usual_gap_ms(call: HostCall) -> float:
    """Return the part of the gaps that Python and the recording need: at most `USUAL_MS` of each."""
    return sum(min(gap, USUAL_MS) for gap in _gaps(call))


def _excess_ms(call: HostCall) -> float:
    """Return the milliseconds of gaps beyond the usual ones, without those inside a loop that reads single values."""
    if not call.children and call.level != Level.LAYER and not call.is_op:
        return 0.0
    gaps = _gaps(call)
    if sum(inner.name in READS for inner in call.children) >= LEAST_CALLS:
        ordered = sorted(call.children, key=lambda child: child.start_ns)
        gaps = [
            gap for gap, inner in zip(gaps, [*ordered, None], strict=True)
            if inner is None or (inner.computes and inner.name not in READS)
        ]  # fmt: skip
    return sum(gap - min(gap, USUAL_MS) for gap in gaps)


def _is_innermost(call: HostCall) -> bool:
    """Return False for a forward phase around modules, since a gap inside is also one of its outermost module."""
    return not (call.kind == Kind.FORWARD and any(child.level == Level.LAYER for child in call.children))


def _type(call: HostCall) -> str:
    return call.type or (call.name.removesuffix("Backward") if call.is_op else call.name)


def _place(call: HostCall) -> Place:
    return Place(None if call.kind == Kind.STEP else call.name, None, (call.span_id,), 1)
