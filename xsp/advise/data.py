"""Time of the loop outside its steps: waiting for the data loader, unless a device's idle time covers it, and other
work."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from xsp import account
from xsp.account import Entry, Iterations, places
from xsp.account import entries as names
from xsp.account.between import Lines, main_lines, of_slow_gaps
from xsp.account.entries import (
    ASLEEP,
    BARE,
    BETWEEN,
    DATA,
    FROM_DEVICE,
    NOT_RECORDED,
    OF_COLLECTIVES,
    OTHER_OPERATORS,
    OUTSIDE,
    OUTSIDE_OPERATORS,
    READING,
    RECORDED,
    RUNNING,
    TO_DEVICE,
    SlowIterations,
)
from xsp.account.sentences import ordinal, sleeps
from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext, Place
from xsp.advise.handwritten import loss_ops
from xsp.advise.registry import question
from xsp.errors import AnalysisError
from xsp.schema import HAS_WORKERS, PERSISTENT, Kind, Level
from xsp.stats import Interval
from xsp.store.selftimes import BOOKKEEPING
from xsp.texts import ms_text


def _part(context: AdviceContext, name: str) -> tuple[Entry, Iterations] | None:
    """Return a part of the host's side that iterations without recording tell, with its account; None without it."""
    job = account.of(context.required_trace).job
    entry = job.host[name] if job is not None else None
    return (entry, job) if job is not None and entry is not None and entry.ms and entry.source == BARE else None


def _gain(entry: Entry) -> Interval:
    """Return the whole time of an entry as a gain, with its interval."""
    ms = entry.ms or 0.0
    return Interval(ms if entry.low_ms is None else entry.low_ms, ms, ms if entry.high_ms is None else entry.high_ms)


@question("data", "Does the loop wait for data?", number="Q4")
def data(context: AdviceContext) -> Iterator[Advice]:
    """Time per iteration of waiting for the data loader, in iterations that were not recorded.

    All of it can be gained if loading in the background keeps up with the steps.
    """
    trace = context.required_trace
    main = account.of(trace).job
    if main is None or main.time.source == RECORDED:
        if trace.has(Level.KERNEL):
            return  # `device-idle` covers the time that devices wait for data
        if trace.run.imported is not None:
            raise AnalysisError("the trace does not have waits between steps: a run of `xsp run` does")
        raise AnalysisError("no step ran without recording, so waiting between steps is unknown; run more steps")
    part = _part(context, DATA)
    if part is None or part[0].low_ms is None:
        return
    entry, main = part
    share = main.percent(entry.ms) or 0.0
    ((batches,),) = trace.con.execute(f"SELECT count(*) FROM merged WHERE kind = '{Kind.DATA}'").fetchall()
    is_short = (entry.ms or 0.0) < HANDING_OVER_MS * max(1, batches)
    ((has_workers, start_anew),) = trace.con.execute(
        f"SELECT bool_or({HAS_WORKERS}), bool_or({HAS_WORKERS} AND attributes ->> '$.{PERSISTENT}' = 'false') "
        "FROM spans"
    ).fetchall()
    slow = exception(context, DATA)
    spans = [
        (name, span)
        for name, span in trace.con.execute(
            f"SELECT name, span_id FROM merged WHERE kind = '{Kind.DATA}' ORDER BY start_ns"
        ).fetchall()
    ]
    yield Advice(
        "data",
        f"the loop waits for data: {ms_text(entry.ms)} of an iteration of {ms_text(main.time.ms)}" + slow,
        (Place(None, spans[0][0] if spans else None, tuple(span for _, span in spans[:20]), len(spans) or None),),
        _gain(entry),
        True,
        share,
        (f"{main.count - main.recorded} iterations that ran without recording", f"{share:.0f} % of an iteration"),
        _MAKING if is_short and not has_workers else _loading(main, bool(slow), bool(has_workers), bool(start_anew)),
        None,
        None if has_workers or is_short else "num_workers=2",
        entry=DATA,
    )


HANDING_OVER_MS = 0.5
"""Milliseconds below which a batch is not sooner there if a worker process of a data loader makes it: to hand a batch
of 50 small samples over took 0.8 to 1.1 ms on two busy cores, whoever made it."""

_MAKING = (
    "make a whole batch at once, not sample by sample: DataLoader(data, sampler=BatchSampler(RandomSampler(data), N, "
    "False), batch_size=None) indexes a TensorDataset by lists; worker processes would take longer to hand a batch over"
)


def _loading(main: Iterations, is_mostly_slow: bool, has_workers: bool, start_anew: bool) -> str:
    """Return what to do about waits for data: of few slow iterations, of all of them, or of both."""
    if not has_workers:
        return "DataLoader(..., num_workers=2, persistent_workers=True): load in the background"
    more = "more workers, or less work for each sample"
    slow_ms = next((each.cost.ms for each in main.course.slow if each.part == DATA), None) if main.course else None
    if not start_anew or slow_ms is None:
        return f"give the loader {more}"
    if is_mostly_slow:
        return (
            "persistent_workers=True, if these are the first batches of epochs: each of them starts all workers anew; "
            f"else {more}"
        )
    return (
        f"give the loader {more}; persistent_workers=True, if the {ms_text(slow_ms)} of slow iterations are the first "
        "batches of epochs: each of them starts all workers anew"
    )


BETWEEN_PERCENT = 15.0
"""Minimum percentage of an iteration for work between steps to be worth a line; logging and clearing gradients take
less."""

SLOW_BETWEEN_PERCENT = 8.0
"""The same if slow iterations are most of it and the line in them is known: most iterations do without that line."""


@question("between", "What does the loop do between its steps?", number="Q4")
def between(context: AdviceContext) -> Iterator[Advice]:
    """Time of an iteration that is neither in a step nor waiting for data: checkpoints, statistics, copies.

    Threads that run steps at the same time, as those of a service, may wait for work between them. No other time is
    known to be work than what recordings show, and where they do not show most of it, what can be saved is unknown.
    """
    part = _part(context, BETWEEN)
    if part is None or part[0].low_ms is None:
        return
    entry, main = part
    ms, share = entry.ms or 0.0, main.percent(entry.ms) or 0.0
    slow = _slow(context, BETWEEN)
    least_percent = SLOW_BETWEEN_PERCENT if slow is not None and slow.cost.place else BETWEEN_PERCENT
    if ms < calls.LEAST_MS or share < least_percent:
        return
    whole = ms_text(main.time.ms)
    text = f"{ms_text(ms)} of an iteration of {whole} pass between steps, not counting waits for data"
    if main.threads > 1:
        text = f"in {ms_text(ms)} of an iteration of {whole} none of {main.threads} threads runs a step"
    text += exception(context, BETWEEN)
    largest = _largest_part(entry)
    if largest is not None:
        text += f"; {ms_text(largest.ms)} of them are {largest.name}"
    lines, *evidence = _main_lines(context, main.rank, ms, slow) or (None,)
    if largest is None and lines is None and entry.place is not None and main.threads <= 1:  # as the first screen does
        text += f"; {ms_text(entry.place_ms)} of them in {entry.place}"
    do = (
        "do it less often, or in another thread: checkpoints, statistics, copies of the state, printing, what a "
        "framework does at the end of each batch; a DataLoader with workers prepares batches in the background"
    )
    may_serve = not main.trains and sleeps(entry) and not _is_sparable(lines)  # training waits for no requests
    is_unknown = largest is None and (main.threads > 1 or may_serve)
    if is_unknown and main.threads <= 1:
        text += f"; the thread sleeps in {ms_text(entry.part(ASLEEP))} of them"
        do = (
            f"see what it waits for{f' at {lines.place}' if lines is not None else ''}: if for work, such as requests, "
            "nothing is lost, and more of it at once makes larger batches; else ask for it earlier, in another thread, "
            "or for several at once"
        )
    elif is_unknown:
        do = (
            "see what the threads do then: if they wait for work, nothing is lost; work outside the model, such as "
            "preparing inputs and reading results, can run for several inputs at once"
        )
    elif largest is not None and largest.name in _REMEDIES:
        do = _REMEDIES[largest.name] + _for_the_batch(largest)
    elif (tensors := _one_by_one(context, main)) is not None:
        text += f"; {tensors}"
        where = f" at {lines.place}" if lines is not None else ""
        do = (
            f"one call for all tensors{where}: torch._foreach_lerp_, _foreach_copy_ take lists (state_dict() once, "
            "outside of the loop); an average of weights is torch.optim.swa_utils.AveragedModel(model, "
            "multi_avg_fn=get_ema_multi_avg_fn(decay)); or do it less often"
        )
    elif lines is not None and sleeps(entry) and not _is_sparable(lines):
        do = f"let another thread wait at {lines.place} while this one computes, or do it less often"
    elif lines is not None:
        in_python = entry.part(OUTSIDE_OPERATORS) >= MIN_LINE_SHARE * ms
        do = _remedy(lines, context.required_trace.has(Level.KERNEL), in_python)
        do += _for_the_batch(largest) if largest is not None else ""
    elif largest is None and context.required_trace.has(Level.KERNEL):
        do = (
            "see what it is: copies to and from the device wait for the host unless memory is pinned "
            "(pin_memory=True, non_blocking=True), and so do metrics that are read; " + do
        )
    # whether a step has a backward pass, but no step of a `torch.optim` optimizer
    kinds = {kind for (kind,) in context.required_trace.con.execute("SELECT DISTINCT kind FROM merged").fetchall()}
    if Kind.BACKWARD in kinds and Kind.OPTIMIZER not in kinds:
        text += "; no torch optimizer was called, so the update is part of it"
        do = (
            "torch.optim with fused=True, or torch._foreach_add_ and the like, update all parameters in one call; else "
            + do
        )
    gain = _gain(entry) if slow is None or not slow.cost.place else _gain(entry).limit(slow.cost.ms or 0.0)
    is_place = lines is not None and do.endswith(lines.place) and (entry.place or "").startswith(lines.place)
    if is_place and entry.place_ms:
        gain = gain.limit(entry.place_ms)  # what is advised is about that line only
    yield Advice(
        "between",
        text,
        (),
        gain,
        True,
        main.percent(gain.value) or 0.0,
        (f"{main.count - main.recorded} iterations that ran without recording", *evidence),
        do,
        entry=BETWEEN,
        gain_known=not is_unknown,
    )


_ON_TENSORS = "add|sub|mul|div|lerp|copy|addcmul|addcdiv|sqrt|pow|abs|neg|norm|linalg_vector_norm|clamp|zero|fill|clone"
"""Operators that compute with each element of a tensor, or copy it, by the names of their overloads."""

LEAST_TENSORS = 32
"""Least number of calls of one operator between two steps that are a loop over tensors."""

MOST_TENSOR_US = 100.0
"""Most mean microseconds of such an operator: of a longer one, most of the time is not that of the call."""


def _one_by_one(context: AdviceContext, main: Iterations) -> str | None:
    """Return that the program computes with many small tensors one by one between its steps; None if it does not.

    Operators on tensors make up most of those that compute there, and one that writes to a tensor is called for each.
    """
    counts = context.required_trace.con.execute(
        f"""
        WITH roots AS (SELECT rank, step FROM before WHERE kind = '{Kind.BEFORE}' AND rank = ?),
        calls AS (
            SELECT step, regexp_replace(name, '^aten::', '') AS name, dur_ns, start_ns, start_ns + dur_ns AS end_ns
            FROM before JOIN roots USING (rank, step) WHERE level = {int(Level.OP)} AND kind = '{Kind.OP}'
            QUALIFY end_ns > coalesce(max(end_ns) OVER (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC
                                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
        )
        SELECT name, count(*) / (SELECT count(DISTINCT step) FROM calls), avg(dur_ns) / 1e3,
               regexp_full_match(name, '({_ON_TENSORS})_?')
        FROM calls WHERE NOT list_contains(?, name) GROUP BY name ORDER BY 2 DESC
        """,
        [main.rank, [*BOOKKEEPING]],
    ).fetchall()
    loop = [(name, count) for name, count, us, is_on_tensors in counts if is_on_tensors and us <= MOST_TENSOR_US]
    number = sum(count for _, count in loop)
    writes = max((count for name, count in loop if name.endswith("_")), default=0)
    if writes < LEAST_TENSORS or 2 * number < sum(count for _, count, *_ in counts):
        return None
    names = ", ".join(f"{name} {count:.0f}" for name, count in loop[:3])
    return f"{number:,.0f} operators compute with {writes:.0f} tensors one by one ({names} calls)"


_REMEDIES = {
    TO_DEVICE: "pin_memory=True in the DataLoader and .to(device, non_blocking=True): the host does not wait for it",
    FROM_DEVICE: "copy results less often or fewer of them, reduce them on the device first, or copy to pinned memory "
    "with non_blocking=True",
    READING: "read values less often, and together: each read waits for the device",
    **dict.fromkeys(
        ("aten::sort", "aten::argsort"),
        "torch.topk(values, k) finds the largest few and sorts no others, torch.max one",
    ),
}

FEWEST_FOR_BATCH = 4
"""Fewest calls of an operator between two steps that may be one for each sample."""


def _for_the_batch(part: Entry) -> str:
    """Return the clause on calls of an operator between steps that may be one for each sample of a batch."""
    if not part.name.startswith("aten::") or (part.calls or 0) < FEWEST_FOR_BATCH:
        return ""
    return f"; if each of its {part.calls:.0f} calls is for one sample, one call for the whole batch"


def _largest_part(entry: Entry) -> Entry | None:
    """Return the part of the time between steps that takes most of it, if recordings show it."""
    part = max(entry.children, key=lambda each: each.ms or 0.0, default=None)
    if part is None or part.name in (OUTSIDE_OPERATORS, OTHER_OPERATORS, NOT_RECORDED, RUNNING, ASLEEP):
        return None
    return part if (part.ms or 0.0) >= MIN_LINE_SHARE * (entry.ms or 0.0) else None


MIN_LINE_SHARE = 0.5
"""Minimum share of the time between steps that a line of code must explain to be cited."""

MIN_SEEN_SHARE = 0.3
"""Minimum time of all lines between steps where they were seen, as a share of the mean time, for one to be cited."""


def _main_lines(
    context: AdviceContext, rank: int, between_ms: float, slow: SlowIterations | None
) -> tuple[Lines, str] | None:
    """Return the lines with most of the time between steps, and the evidence; None if none has most, or none is known.

    Lines are seen after recorded steps. Where the time between steps grows, all of them took less then than on average.
    If slow iterations are most of that time, their lines count, if any of these gaps was traced.
    """
    run = next((each for each in context.required_trace.run.rank_runs if (each.rank or 0) == rank), None)
    if run is None:
        return None
    of_slow = of_slow_gaps(run) if slow is not None else None
    traced, when = (run.between, "after a recorded step") if of_slow is None else (of_slow, "in a slow gap")
    lines = main_lines(traced)
    if lines is None or traced is None:
        return None
    gaps = traced.gaps
    ms, seen_ms = lines.ns / gaps / 1e6, lines.all_ns / gaps / 1e6
    if ms < MIN_LINE_SHARE * seen_ms or seen_ms < MIN_SEEN_SHARE * between_ms:
        return None
    place = ", ".join(filter(None, (lines.place, lines.calls)))
    # a part is never more than its whole: on a busy machine these few gaps may be longer than the mean
    of_ms = max(seen_ms, between_ms) if ms >= MIN_LINE_SHARE * between_ms else seen_ms
    return lines, f"{ms:.3g} of {of_ms:.3g} ms at {place}, {when}, mean of {gaps}"


_REMEDIES_OF_CALLS = (
    (
        r"(save|dump|write|flush|fsync)(_\w+)?|\w*checkpoint\w*",
        "write it less often, or a copy of it in another thread",
    ),
    (
        r"print|log(_(metrics?|dict|\w*scalars?))?|info|debug|warning|add_(scalars?|image|histogram|text)|set_(postfix|description)\w*"
        r"|savefig|plot",
        "report less often, and several values at once",
    ),
    (r"item|tolist|cpu|numpy|synchronize", "read values less often, and together"),
    (
        r"deepcopy|\w*state_dict|clone",
        "copy the state less often, or change the copy in place (torch._foreach_copy_, for an average _foreach_lerp_)",
    ),
    (r"collect|empty_cache", "leave it out: memory is reused without it"),
    (
        r"(rand|randn|randint|randperm)(_like)?|\w*(collate|tokeni[sz]|encod|transform|augment|batch)\w*|stack|from_numpy"
        r"|tensor|load\w*|open|imread|decode\w*|pad\w*|next|read\w*",
        "prepare the next batch in the background (a DataLoader with workers) while this one is computed",
    ),
    (
        r"(arg)?sort(ed)?",
        "the largest few need no sort of all: np.argpartition or torch.topk of arrays, heapq.nlargest of a list",
    ),
)
"""What to do about a line by the functions that it calls, by patterns of their names; the first that fits counts."""

OUTSIDE_PERCENT = 8.0
"""Minimum percentage of an iteration for what a step reads and reports outside its phases to be worth a line."""


@question("outside", "What does the program do in its steps, outside the model and its phases?", number="Q4")
def outside(context: AdviceContext) -> Iterator[Advice]:
    """Lines of the program in its steps, outside forward, backward and optimizer, that read values, report or save, or
    that take their time in Python or NumPy.

    Other lines there, such as a loss that is written in operators, may be what the program is for; the question `loss`
    has these.
    """
    part = _part(context, OUTSIDE)
    if part is None:
        return
    entry, main = part
    lines = places.lines_of(context.required_trace, main, OUTSIDE)
    ms, share = entry.place_ms or 0.0, main.percent(entry.place_ms) or 0.0
    if lines is None or lines.place not in (entry.place or "") or share < OUTSIDE_PERCENT or ms < calls.LEAST_MS:
        return
    known = [place for place in _places_of_calls(lines.calls) if place is not None and place <= MOST_SPARABLE]
    in_collectives_ms = sum(map(entry.part, OF_COLLECTIVES))
    in_python = (entry.ms or 0.0) - _operators_outside_ms(context) - in_collectives_ms >= ms
    if not (known or in_python) or _is_loss(context):
        return
    yield Advice(
        "outside",
        f"{ms_text(ms)} of an iteration of {ms_text(main.time.ms)} pass in {lines.place}, {lines.calls}: in the step, "
        "outside the model and its phases",
        (),
        Interval(ms / 2, ms, ms),
        True,
        share,
        (f"{100 * lines.ns / lines.all_ns:.0f} % of the lines that were traced there",),
        f"{_REMEDIES_OF_CALLS[min(known)][1]}; of many tensors, torch._foreach_norm and torch.stack first"
        if known
        else _remedy(lines, context.required_trace.has(Level.KERNEL), in_python, in_step=True),
        entry=OUTSIDE,
    )


def _is_loss(context: AdviceContext) -> bool:
    """Return whether operators with gradients take most of the time of operators outside the phases: no step can do
    without them, whatever their lines call (`torch.log` logs nothing)."""
    outer_ms = _operators_outside_ms(context)
    if outer_ms == math.inf:
        return False
    loss_ms = sum(op.ns for op in loss_ops(context) if op.module is None) / 1e6
    return loss_ms > 0 and loss_ms >= MIN_LINE_SHARE * outer_ms


def _operators_outside_ms(context: AdviceContext) -> float:
    """Return the time of a step in operators outside its phases; infinity if unknown, and on a device."""
    trace = context.required_trace
    if trace.has(Level.KERNEL) or not trace.has(Level.OP):
        return math.inf
    outer = (
        op
        for op in calls.outer_ops(context)
        if op.module is None and op.phase is None and (op.parent is None or op.parent.kind != Kind.BACKWARD)
    )
    return sum(op.ns for op in outer) / 1e6


_HELPERS = "len|range|seek|float|int|str|list|dict|append|extend|enumerate|zip|format|join|items|values|keys|copy|time"
"""Functions that say nothing about the purpose of a line."""


MOST_SPARABLE = 3
"""Place of the last of these remedies that is for work which a step can do without, now and then."""


def _places_of_calls(called: str) -> list[int | None]:
    """Return the place of the remedy for each function that a line calls, except helpers; None for others."""
    names = [name.rpartition(".")[2] for name in called.lower().split(", ")]
    return [
        next((place for place, (pattern, _) in enumerate(_REMEDIES_OF_CALLS) if re.fullmatch(pattern, name)), None)
        for name in names
        if not re.fullmatch(_HELPERS, name)
    ]


def _is_sparable(lines: Lines | None) -> bool:
    """Return whether lines call something that a program can do less often, such as saving."""
    known = _places_of_calls(lines.calls) if lines is not None else []
    return any(place is not None and place <= MOST_SPARABLE for place in known)


def _remedy(lines: Lines, on_device: bool, in_python: bool, in_step: bool = False) -> str:
    """Return what can be done about lines of the program, which may use a device, or compute outside operators; what
    the step needs cannot wait for another thread."""
    if lines.is_loop and in_python:
        return (
            f"compute with operators on whole tensors or arrays instead of the loop at {lines.place}, do it less often "
            "or in another thread"
        )
    for called in (lines.calls, lines.outer_calls):
        known = _places_of_calls(called)
        found = [place for place in known if place is not None]
        if found and len(found) == len(known):  # a line that also calls something else may take its time there
            return f"{_REMEDIES_OF_CALLS[min(found)][1]}: {lines.place}"
    if in_step:
        return f"make {lines.place} take less time, or do it less often"
    copies = "if it copies the batch to the device, pin_memory=True and non_blocking=True (pageable copies wait); "
    return (
        f"make {lines.place} take less time, or do it less often or in another thread; {copies * on_device}"
        "if it prepares the batch, a DataLoader with workers does so in the background"
    )


# --- iterations that are slower than the others -----------------------------------------------------------------------
# Iterations that differ: a few that take far longer than the others, and iterations that grow.

LEAST_PERCENT = 4.0
"""Least percentage of the mean iteration that slow iterations add."""


@question("uneven", "Do some iterations take far longer than the others?", number="Q4")
def uneven(context: AdviceContext) -> Iterator[Advice]:
    """What steps take longer in slow iterations than in the others, on the mean of all; at most that can be saved.

    Slow waits for data, and slow work between steps, are stated by the questions `data` and `between`.
    """
    main = account.of(context.required_trace).job
    if main is None or main.course is None or not main.time.ms:
        return
    for slow in main.course.slow:
        ms = slow.cost.ms or 0.0
        if 100 * ms < LEAST_PERCENT * main.time.ms or slow.part in (names.DATA, names.BETWEEN):
            continue
        part = {names.STEP: "its step", names.OPTIMIZER: "the optimizer"}.get(slow.part, slow.part)
        where = f"{part}{f', in {slow.cost.place}' if slow.cost.place else ''}"
        # other programs of the machine delay steps, too; they have no period, and no place in the program
        is_programs = slow.period is not None or slow.cost.place is not None
        yield Advice(
            "uneven",
            f"{_times(slow)}, in {where}",
            (Place(slow.cost.place or slow.part, None, (), slow.count),),
            Interval(ms / 2, ms, ms) if is_programs else Interval(ms / 10, ms / 2, ms),
            True,
            100 * ms / main.time.ms,
            (f"iterations {', '.join(map(str, slow.steps[:5]))}{' …' * (len(slow.steps) > 5)}",),
            f"{slow.cost.place} runs in them only: do it less often, or with less work"
            if slow.is_line
            else ("" if is_programs else "run it again on an otherwise idle machine; if they stay, ")
            + f"see what differs in {where}: longer inputs (sort them by length), a cache that fills, "
            "code compiled anew",
        )


def exception(context: AdviceContext, part: str) -> str:
    """Return the clause that slow iterations are most of a part of an iteration, with their period; empty if not."""
    slow = _slow(context, part)
    return "" if slow is None else f": {_times(slow)}{f' ({slow.cost.place})' if slow.cost.place else ''}"


def _slow(context: AdviceContext, part: str) -> SlowIterations | None:
    """Return the slow iterations that are most of a part of an iteration; None if none are."""
    main = account.of(context.required_trace).job
    slow = next((each for each in main.course.slow if each.part == part), None) if main and main.course else None
    entry = main.host[part] if main is not None else None
    return None if slow is None or entry is None or (slow.cost.ms or 0.0) < (entry.ms or 0.0) / 2 else slow


def _times(slow: SlowIterations) -> str:
    which = f"{slow.count:,} of {slow.of:,} iterations take"
    if slow.period:
        which = f"each {ordinal(slow.period)} iteration takes"
    return f"{which} {ms_text(slow.slow_ms)} instead of {ms_text(slow.usual_ms)}"
