"""Whether the figures of the recorded steps describe the program: findings from its loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from xsp import account, stats
from xsp.account import entries as names
from xsp.health.finding import Finding, Severity
from xsp.levels import depth
from xsp.run import Run
from xsp.schema import Level
from xsp.store import iterations, reference
from xsp.store.iterations import IS_ALIKE
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.texts import ms_text, ns_text

MIN_OUTSIDE_SHARE = 0.2
"""Minimum share of the loop outside steps for a warning that the throughput of steps is not the program's."""

MIN_MIXED_SHARE = 0.2
"""Minimum share of the loop in steps of other kinds for a warning that one kind does not describe the program."""

MIN_COLD_SLOWDOWN = 0.05
"""Minimum slowdown of steps next to recorded ones, as a share, for doubt about figures inside a step."""

MIN_SLOWDOWN_SINCE_RECORDING = 0.05
"""Minimum slowdown of unrecorded steps since the first deep recording, as a share, that is reported."""

MIN_DRIFT = 0.1
"""Minimum change of step time from start to end of a run, as a share, to be called a drift."""

GRADE_OF_RATIO = ((4.0, "D"), (2.0, "C"), (1.5, "B"))
"""Ratio of the ends of the interval of a time, and the best grade if it is larger."""

MIN_EXCESS = 0.25
"""Minimum share by which a recorded step must exceed unrecorded ones for a warning."""

MAX_STRETCHES = 9
"""Parts into which a long run is cut to find a drift: the first third is compared with the last."""

MIN_DRIFT_ROWS = 12
"""Minimum rows to distinguish a drift from scatter."""

MAX_WARM_UP_STEPS = 20
"""Maximum number of steps at the beginning of a program that may be warm-up: later changes are a drift."""

MIN_AGREEMENT = 0.9
"""Share of pairs, of one stretch in the first third and one in the last, that must agree for a drift: three and three
must not overlap; five and five reach it by chance in 3 % of runs (Mann and Whitney)."""


def findings(trace: Trace) -> Iterator[Finding]:
    """Yield reasons why a trace's figures may differ from the program's; nothing for a trace without a loop."""
    if not trace.has_loop:
        return
    yield from _program(trace.run)
    yield from _outside_step(trace)
    yield from _step_kinds(trace)
    kind = next((entry for entry in trace.run.kinds if entry.kind == trace.kind), None)
    if kind is not None and kind.get("batch_source") == "guess":
        shapes = [call["shape"] for call in kind.calls if call.get("shape")]
        hint = (
            ", whose inputs have one dimension and may be one sample"
            if all(len(shape) == 1 for shape in shapes)
            else ""
        )
        text = (
            f"the samples per step are guessed from its calls ({kind['batch_size']}){hint}: "
            "set --batch-size N, batch_size=N or prof.step(batch_size=N)"
        )
        yield Finding(Severity.WARNING, "samples", text, "B")
    yield from _cold_steps(trace)
    yield from _slower_since_recording(trace)
    yield from _drifts(trace)
    yield from _uncertain_times(trace)
    yield from _slowed_steps(trace)


def _program(run: Run) -> Iterator[Finding]:
    """Yield a finding on the slowdown of the whole program by profiling, with the option that reduces it."""
    budget = run.budget
    if budget is None or budget.program_percent is None:
        return
    percent, asked_percent = budget.program_percent, budget.asked_percent
    spent = {"recording steps": budget.spent_ns, "starting": budget.start_ns, "ending": budget.end_ns}
    if budget.idle_ns > 0:
        spent["idle collectors"] = budget.idle_ns
    parts = ", ".join(f"{name} {max(0, ns) / 1e9:.2g} s" for name, ns in spent.items())
    text = f"profiling made the program take {1 + percent / 100:.3g} times as long ({parts})"
    is_expensive = percent > 20 and budget.spent_ns > budget.start_ns + budget.end_ns
    if is_expensive and (asked_percent is None or asked_percent > 2):
        text += "; `--budget 2%` (budget='2%') records less often"
    yield Finding(Severity.NOTE, "profiling", text)


def _own_iterations(trace: Trace) -> list[iterations.Iteration]:
    return [iteration for iteration in iterations.iterations(trace) if iteration.rank == trace.rank]


def _outside_step(trace: Trace) -> Iterator[Finding]:
    """Yield findings on the share of an iteration outside the step, and on how much of it is waiting for data."""
    iteration = next((candidate for candidate in _own_iterations(trace) if candidate.kind == trace.kind), None)
    if iteration is None or iteration.mean_ns is None or not iteration.step_ns or iteration.data_ns is None:
        text = "all steps were recorded: the time of an iteration without recording is unknown"
        yield Finding(Severity.WARNING, "loop", text, "B")
        return
    if iteration.disturbed:
        place = "right after recorded ones" if iteration.disturbed == 2 else "soon after recorded ones"
        text = f"few undisturbed steps: the loop's figures are from steps {place}, which may be slow; run more steps"
        if not iteration.is_known:
            text = (
                f"all unrecorded steps are short and ran {place}, so they may take up to "
                f"{ns_text(iteration.excess_ns)} of {ns_text(iteration.mean_ns)} longer than without recording, "
                "and A1's latency may be up to twice that of the step; run more steps"
            )
        is_note = iteration.disturbed == 1 and iteration.is_known
        yield Finding(Severity.NOTE if is_note else Severity.WARNING, "loop", text, "B")
    main = account.of(trace).main
    if main is None or not main.time.ms:
        return
    waiting, between = (main.host.ms(name) / main.time.ms for name in (names.DATA, names.BETWEEN))
    if waiting + between < MIN_OUTSIDE_SHARE:
        return
    other = "other work between steps" if main.threads <= 1 else "no step on any thread"
    text = (
        f"an iteration takes {main.time.ms:.4g} ms: step {100 * (1 - waiting - between):.0f} %, waiting for data "
        f"{100 * waiting:.0f} %, {other} {100 * between:.0f} %; "
        "the throughput of the program is that of the loop, not of the step"
    )
    yield Finding(Severity.WARNING, "data" if waiting > between else "loop", text, "B")


def _step_kinds(trace: Trace) -> Iterator[Finding]:
    """Yield findings on the kinds of steps that the figures do not cover."""
    own_iterations = _own_iterations(trace)
    other_kinds = [each for each in own_iterations if each.kind != trace.kind and not each.is_beginning]
    share = sum(iteration.share for iteration in other_kinds)
    names = {kind.kind: kind.name for kind in trace.run.kinds}
    missing = [iteration for iteration in other_kinds if not iteration.recorded and iteration.share > MIN_COLD_SLOWDOWN]
    if share >= MIN_MIXED_SHARE:
        listing = ", ".join(
            f"{names.get(iteration.kind, iteration.kind)} ({100 * iteration.share:.0f} %)"
            for iteration in other_kinds[:3]
        )
        more = f" and {len(other_kinds) - 3} more" if len(other_kinds) > 3 else ""
        text = f"steps of other kinds take {100 * share:.0f} % of the loop's time: {listing}{more}; --kind shows them"
        yield Finding(Severity.WARNING, "kinds", text, "B")
    elif other_kinds:
        count = sum(iteration.steps for iteration in other_kinds)
        kinds = "another kind" if len(other_kinds) == 1 else f"{len(other_kinds)} other kinds"
        subject = f"1 step of {kinds} takes" if count == 1 else f"{count} steps of {kinds} take"
        text = f"{subject} {100 * share:.2g} % of the loop's time"
        yield Finding(Severity.NOTE, "kinds", text)
    untimed = [iteration for iteration in other_kinds if not iteration.is_known and iteration.share > MIN_COLD_SLOWDOWN]
    if untimed:
        listing = ", ".join(str(names.get(iteration.kind, iteration.kind)) for iteration in untimed[:3])
        more = f" and {len(untimed) - 3} more" if len(untimed) > 3 else ""
        text = f"the time of the loop is unknown for {listing}{more}: too few of these short steps ran undisturbed"
        yield Finding(Severity.NOTE, "loop", f"{text}; run more steps")
    for iteration in missing:
        text = f"no step of kind {names.get(iteration.kind, iteration.kind)} was recorded; {iteration.steps} ran"
        yield Finding(Severity.WARNING, "kinds", text, "B")


def _cold_steps(trace: Trace) -> Iterator[Finding]:
    """Yield a finding on the slowdown of steps next to recorded ones, because storing evicts caches."""
    cold = reference.coldness(trace.con)
    if cold is None or cold.ratio <= 1 + MIN_COLD_SLOWDOWN:
        return
    text = f"steps next to recorded steps take {cold.ratio:.2f} times as long, because storing leaves caches cold; "
    if cold.ratio > 1 + reference.MAX_COLD_SHARE:
        text += "so times inside a step are as recorded, not true times"
    else:
        text += "the confidence intervals of times inside a step are wider"
    yield Finding(Severity.WARNING, "short steps", text, "C" if cold.ratio > 1 + reference.MAX_COLD_SHARE else "B")


def _slower_since_recording(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if unrecorded steps take longer since operators or device work were recorded first."""
    change = reference.change(trace.con)
    if change is None or change.ratio.low <= 1 + MIN_SLOWDOWN_SINCE_RECORDING or _grows_later(trace):
        return
    percent = 100 * (change.after_ns / change.before_ns - 1)
    low, high = (100 * (bound - 1) for bound in change.ratio.ends)
    text = (
        f"unrecorded iterations take {change.after_ns / 1e6:.4g} ms since operators or device work were first "
        f"recorded, {change.before_ns / 1e6:.4g} ms before (+{percent:.0f} % [{low:.0f}, {high:.0f}]): either "
        "something stays on between recordings, and the iteration is that much shorter without xsp, or the program "
        "itself became slower; `--levels M/layer` records neither, and shows which"
    )
    yield Finding(Severity.WARNING, "loop", text, "C")


def _grows_later(trace: Trace) -> bool:
    """Return whether unrecorded steps still become longer after operators were first recorded: the program's growth."""
    rows = trace.con.execute(
        f"SELECT dur_ns FROM undisturbed u WHERE {IS_ALIKE} AND step > (SELECT min(step) FROM loop "
        f"WHERE rung >= {int(Level.OP)} AND rank = u.rank) ORDER BY step"
    ).fetchall()
    change = _change([dur_ns for (dur_ns,) in rows]) if len(rows) >= MIN_DRIFT_ROWS else None
    return change is not None and change > 0


def _drifts(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if steps take longer, or less long, at the end of the run than at its beginning.

    Where a device limits, the host's steps end before its work does, and their times say when the host waits.
    """
    main = account.of(trace).main
    if main is not None and main.devices and (main.limit is None or main.limit.side != "host"):
        return
    rows = trace.con.execute(f"SELECT step, dur_ns, steps FROM undisturbed WHERE {IS_ALIKE} ORDER BY step").fetchall()
    if len(rows) < MIN_DRIFT_ROWS:
        return
    steps, durations, counts = zip(*rows, strict=True)
    change = _change(durations)
    if change is None:
        return
    warm_up = _warm_up_steps(steps, durations) if change < 0 else 0
    if warm_up:
        ratio = stats.percentile(durations[:warm_up], 0.5) / stats.percentile(durations[warm_up:], 0.5)
        text = (
            f"the first {sum(counts[:warm_up])} of the {sum(counts)} unrecorded steps take {ratio:.2g} times as long "
        )
        text += "as the others: the program warms up, and the loop's figures include that; run more steps"
        yield Finding(Severity.NOTE, "warm-up", text)
        return
    direction = "longer" if change > 0 else "shorter"
    text = f"steps take {100 * abs(change):.0f} % {direction} at the run's end than at its beginning; "
    text += "see `phases-over-time`"
    yield Finding(Severity.WARNING, "drift", text, "B")


def _change(durations: Sequence[float]) -> float | None:
    """Return by which share the last third of the steps takes longer than the first; None if this is not certain."""
    count = len(durations)
    stretches = MAX_STRETCHES if count >= 3 * MAX_STRETCHES else count
    bounds = [round(count * place / stretches) for place in range(stretches + 1)]
    medians = [stats.percentile(durations[start:end], 0.5) for start, end in itertools.pairwise(bounds)]
    first_medians, last_medians = medians[: stretches // 3], medians[-(stretches // 3) :]
    change = stats.percentile(last_medians, 0.5) / stats.percentile(first_medians, 0.5) - 1
    longer = sum(later > earlier for later in last_medians for earlier in first_medians) / (
        len(first_medians) * len(last_medians)
    )
    return change if max(longer, 1 - longer) >= MIN_AGREEMENT and abs(change) > MIN_DRIFT else None


def _warm_up_steps(steps: Sequence[int], durations: Sequence[float]) -> int:
    """Return the number of first steps after which steps no longer become shorter; 0 if there is no such warm-up."""
    cuts = range(1, len(steps) - MIN_DRIFT_ROWS // 2 + 1)
    count = next((cut for cut in cuts if _change(durations[cut:]) is None), 0)
    usual = stats.percentile(durations[-(len(durations) // 3) :], 0.5)
    while count and count < len(steps) and durations[count] > (1 + MIN_DRIFT) * usual:
        count += 1
    return count if count and steps[count - 1] < MAX_WARM_UP_STEPS else 0


def _uncertain_times(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if the time of an iteration or of a step is uncertain; the grade follows from the interval."""
    candidates: list[tuple[str, int, float, float]] = []
    job = account.of(trace).job
    if job is not None and job.time.low_ms is not None and job.time.high_ms is not None:
        candidates.append(("an iteration", max(job.recorded, job.count), job.time.low_ms, job.time.high_ms))
    steps = iterations.steady_steps(trace.con, trace.run)
    interval = iterations.spread_interval(steps)
    if interval is not None:
        candidates.append(("a step", iterations.step_count(steps), interval.low / 1e6, interval.high / 1e6))
    ratios = [high / low if low > 0 else math.inf for *_, low, high in candidates]
    if not ratios or max(ratios) <= GRADE_OF_RATIO[-1][0]:
        return
    subject, count, low, high = candidates[ratios.index(max(ratios))]
    grade = next(letter for ratio, letter in GRADE_OF_RATIO if max(ratios) > ratio)
    text = (
        f"from {count} iterations the time of {subject} is only known to be between {ms_text(low)} and "
        f"{ms_text(high)}: "
    )
    growth = job.course.growth if job is not None and job.course is not None else None
    if growth is not None:
        text += f"it grows, from {ms_text(growth.first_ms)} to {ms_text(growth.last_ms)}"
    else:
        text += "they vary too much for so short a run; run more steps, on an otherwise idle machine"
    yield Finding(Severity.WARNING, "latency", text, grade)


def _slowed_steps(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if even the lowest recorded level changes the step."""
    if len(trace.rungs) < 2 or trace.rungs[0].level != BARE:
        return
    bare, recorded = trace.rungs[:2]
    if recorded.added_interval is not None and recorded.added_interval.low > MIN_EXCESS * bare.step_ns:
        text = (
            f"a step with {depth(recorded.level)} recorded takes {recorded.step_ns / bare.step_ns:.2f} times as "
            "long as an unrecorded step: times inside it are not those of the program without profiling"
        )
        yield Finding(Severity.WARNING, "short steps", text, "B")
