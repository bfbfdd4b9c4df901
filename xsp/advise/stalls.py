"""Stalls: time in which a module, or the step around the modules, runs no operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xsp import summary
from xsp.advise import calls, faults
from xsp.advise.advice import Advice, Asked, Interval, Place
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Kind, Level

USUAL_MS = 0.04
"""Maximum overhead of Python, a framework's dispatch and the recording around a call, in milliseconds; a longer gap is
other work of the host. A call of a module takes some 10 to 30 µs beside its operators, an operator 2 to 10 µs."""

LEAST_REPEATS = 2
"""Minimum number of recorded steps for the gain to be an expectation and not a bound."""

LEAST_PERCENT = 5.0
"""Minimum percentage of the step for a stall to be worth a line: up to 3 % were seen around single calls of short
steps without a stall."""

_HOLD = (str(Kind.STEP), str(Kind.FORWARD), str(Kind.MODULE))
_OUTSIDE = (str(Kind.FORWARD), str(Kind.BACKWARD), str(Kind.OPTIMIZER), str(Kind.DATA))


@question("stall", "Does the host spend time outside operators?", number="Q4")
def stall(asked: Asked) -> Iterator[Advice]:
    """Time inside a module, or inside the step, that no operator, module or phase inside it covers.

    `USUAL_MS` of each gap between calls is subtracted, since Python and the recording itself need it, and so is the
    time to return memory, see the question `page-faults`. Modules of one class are one piece. Time that is missing from
    any recorded step is not a stall.
    """
    whole = calls.step_ms(asked)
    by_type: dict[str, list[Call]] = {}
    for each in calls.every(asked):
        if each.kind in _HOLD and _beyond(each) >= calls.LEAST_MS and _is_innermost(each):
            by_type.setdefault(_type(each), []).append(each)
    freeing_ms = _freeing_ms(asked)
    of_all = sum(_gap(each) for those in by_type.values() for each in those)
    for name, those in by_type.items():
        freed = freeing_ms * sum(_gap(each) for each in those) / of_all
        usual = sum(_usual(each) for each in those) + freed
        gap, repeats = _over_steps(asked, those)
        gain = Interval(gap.low - usual, gap.value - usual, gap.high - usual).within(whole)
        if 100 * gain.low / whole < LEAST_PERCENT or gain.value < calls.LEAST_MS:
            continue
        where = tuple(_place(each) for each in sorted(those, key=lambda each: -_gap(each)))
        several = f"{len(those)} calls of {name}" if len(those) > 1 else f"a call of {name}"
        if those[0].kind == Kind.STEP:
            has_model = any(inner.kind in _OUTSIDE for each in those for inner in each.inside)
            several = "the step, outside the model and its phases," if has_model else "the step"
        yield Advice(
            "stall",
            f"{several} spend{'s' * (len(those) == 1)} {gain.value:.3g} ms outside operators",
            where,
            gain,
            repeats < LEAST_REPEATS,
            100 * gain.value / whole,
            (
                f"{gap.value:.3g} ms in which no operator, module or phase runs inside"
                + (f"; {gap.low:.3g} to {gap.high:.3g} ms in {repeats} recorded steps" if repeats > 1 else ""),
                f"{usual:.3g} ms are subtracted for Python code around "
                f"{sum(len(each.inside) for each in those):,} calls"
                + (f", {freed:.3g} ms of them for returning memory to the system" if freed >= calls.LEAST_MS else ""),
            ),
            "look for sleeping, locks, files, printing, NumPy or Python loops there; `xsp report` shows the gap on the "
            "timeline",
        )


def _freeing_ms(asked: Asked) -> float:
    """Return the milliseconds that freeing the memory which a step gets again takes, outside operators."""
    usage = faults.of(asked)
    return 0.0 if usage is None else min(usage.system_ms, usage.faults * faults.FREEING_US / 1e3)


def _over_steps(asked: Asked, those: Sequence[Call]) -> tuple[Interval, int]:
    """Return the minimum, median and maximum over recorded steps of the ms that nothing inside the calls covers, and
    the number of steps.

    The minimum excludes what happened in one step only, because the machine did something else.
    """
    found = calls.per_step(asked, those, [inner for each in those for inner in each.inside])
    gaps = [max(0.0, ns / 1e6) for ns, _ in found] or [sum(_gap(each) for each in those)]
    return Interval(min(gaps), summary.percentile(gaps, 0.5), max(gaps)), len(found)


def _gaps(call: Call) -> list[float]:
    """Return the milliseconds of each gap in a call that no call inside it covers, as recorded."""
    found, until = [], call.start_ns
    for inner in sorted(call.inside, key=lambda each: each.start_ns):
        found.append(inner.start_ns - until)
        until = max(until, inner.end_ns)
    return [max(0, ns) / 1e6 for ns in (*found, call.end_ns - until)]


def _gap(call: Call) -> float:
    return sum(_gaps(call))


def _usual(call: Call) -> float:
    """Return the part of the gaps that Python and the recording need: at most `USUAL_MS` of each."""
    return sum(min(each, USUAL_MS) for each in _gaps(call))


def _beyond(call: Call) -> float:
    return _gap(call) - _usual(call) if call.inside or call.level == Level.LAYER else 0.0


def _is_innermost(call: Call) -> bool:
    """Return False for a forward phase around modules, since a gap inside is also one of its outermost module."""
    return not (call.kind == Kind.FORWARD and any(each.level == Level.LAYER for each in call.inside))


def _type(call: Call) -> str:
    return call.type or call.name


def _place(call: Call) -> Place:
    return Place(None if call.kind == Kind.STEP else call.name, None, (call.span_id,), 1)
