"""An account in words: what limits, and the lines of both sides that add up to the iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from xsp.account import entries as names
from xsp.account.entries import Account, Course, Entry, Iterations, Side, SlowIterations
from xsp.account.passes import WITHOUT_GRADIENTS
from xsp.texts import ms_text

MOST_LINES = 8
"""Most lines of a side."""

MIN_LINE_PERCENT = 0.5
"""Least percentage of the iteration for a part to have a line of its own."""

NEARLY_ALL = 0.85
"""Share of an iteration from which the side that takes it is the only one that limits."""

MIN_DATA_SHARE = 0.2
"""Least share of an iteration that is waiting for data for this to be what limits."""


CLOSE = 0.2
"""Share of an iteration up to which the difference of both sides leaves open which one limits."""


SHORT = {
    f"{names.OF_IDLE}{name}": f"{names.OF_IDLE}{short}"
    for name, short in (
        (names.HOST_LATE, "launched late"),
        (names.HOST_DATA, "waits for data"),
        (names.DRAINED, "host had waited"),
        (names.COPYING, "copy is prepared"),
        (names.QUEUED, "work waits"),
        (names.BEFORE_FIRST, "step not begun"),
        (names.AFTER_LAST, "after last work"),
        (names.NO_LAUNCH, "cause unknown"),
        (names.NOT_RECORDED, "not recorded"),
    )
} | {
    names.WAITING: "waits for device",
    names.EARLIER: "launched earlier",
    names.OTHER_RANKS: "waits for ranks",
    f"{names.BETWEEN}: {names.READING}": f"{names.BETWEEN}: values are read",
}
"""Names of lines as a table of two columns has room for them; docs/understand/account.md has both."""


class Line(NamedTuple):
    """A part of an iteration in one line."""

    name: str
    ms: float
    percent: float


def parts(side: Side) -> dict[str, float]:
    """Return the parts of a side in milliseconds, which add up to the iteration.

    Waits for the device are one part of the host's side, wherever the program waits. Parts of the device are its
    purposes and the causes of idle time.
    """
    found: dict[str, float] = {}
    for entry in _with_parts_between(side):
        waits = {name: entry.part(name) for name in _WAITS} if side.device is None else {}
        if entry.name == names.DRAINING:
            found[names.WAITING] = found.get(names.WAITING, 0.0) + (entry.ms or 0.0)
        elif entry.name in (names.BUSY, names.IDLE) and entry.children:
            prefix = names.OF_IDLE if entry.name == names.IDLE else ""
            for child in entry.children:
                found[prefix + child.name] = child.ms or 0.0
        else:
            models = [child for child in entry.children if child.name.startswith(names.of_model(entry.name, ""))]
            for part in models or [entry]:
                own_ms = (part.ms or 0.0) - (sum(map(part.part, _WAITS)) if side.device is None else 0.0)
                found[part.name] = found.get(part.name, 0.0) + own_ms
            for name, ms in waits.items():
                if ms:
                    found[name] = found.get(name, 0.0) + ms
    return dict(sorted(found.items(), key=lambda part: -abs(part[1])))


def lines(account: Iterations, side: Side, most: int = MOST_LINES) -> list[Line]:
    """Return the largest `parts` of a side, and the others as one line."""
    total_ms = account.time.ms or 0.0
    ordered = list(parts(side).items())
    large = [part for part in ordered if total_ms and 100 * abs(part[1]) >= MIN_LINE_PERCENT * total_ms]
    shown = large[: most - 1] if len(large) > most else large
    rest = sum(ms for _, ms in ordered) - sum(ms for _, ms in shown)
    if total_ms and abs(rest) >= 1e-3 * total_ms:
        shown.append(("other", rest))
    return [Line(name, ms, 100 * ms / total_ms if total_ms else 0.0) for name, ms in shown]


def _with_parts_between(side: Side) -> Iterator[Entry]:
    """Yield the entries of a side, with the parts of the time between steps as entries of their own.

    Copies to and from a device are not split further: the host that waits for one is busy with it.
    """
    for entry in side.entries:
        if entry.name != names.BETWEEN or {child.name for child in entry.children} <= {names.RUNNING, *names.STATES}:
            yield entry
            continue
        for child in entry.children:
            is_copy = child.name in (names.TO_DEVICE, names.FROM_DEVICE)
            has_name = child.name in (names.WAITING, names.NOT_RECORDED)
            name = child.name if has_name else f"{names.BETWEEN}: {child.name}"
            yield replace(child, name=name, children=() if is_copy else child.children)


_WAITS = (names.WAITING, *names.OF_COLLECTIVES)
"""States of the host that are lines of their own, in whatever phase they are."""


LEAST_SHOWN_PERCENT = 0.01
"""Percentage below which only this bound is stated."""


def percent_text(percent: float) -> str:
    """Return a percentage without decimals, below 1 with two digits, near 0 as a bound."""
    if 0 < abs(percent) < LEAST_SHOWN_PERCENT:
        return f"under {LEAST_SHOWN_PERCENT:g} %"
    return f"{percent:.2g} %" if abs(percent) < 1 else f"{percent:.0f} %"


def _of(part_ms: float, whole_ms: float) -> str:
    """Return two times and their share: `12.1 of 20.0 ms (60 %)`."""
    part, whole = ms_text(part_ms), ms_text(whole_ms)
    if part.split()[1] == whole.split()[1]:
        part = part.split()[0]
    return f"{part} of {whole} ({percent_text(100 * part_ms / whole_ms if whole_ms else 0.0)})"


STEPS_NOT_FOUND = (
    "Steps could not be found: modules are called in turn in no order that repeats, so the time of an iteration is "
    "unknown; name the function that makes one step: xsp run --step NAME …"
)


def limit(account: Account, attention_ms: float = 0.0) -> str:
    """Return one sentence: what limits, with its share of an iteration, and the place that takes most of it.

    Args:
        account: the account.
        attention_ms: time of attention that is written out, of an iteration; it is no class of kernels.
    """
    main = account.job
    if not account.steps_found:
        return STEPS_NOT_FOUND
    if main is None or main.time.ms is None:
        return "The time of an iteration is unknown: no step ran undisturbed; run more steps."
    blocking = next((doubt for doubt in account.doubts if "busy" in doubt.forbids), None)
    if blocking is not None:
        return f"What limits is unknown: {blocking.text}."
    if account.late_rank is not None:
        late = account.late_rank
        first = "first " if late.is_first else ""
        return (
            f"Rank {late.rank} is late by {ms_text(late.late_ms)} at the {first}{late.collective}: "
            f"{_of(late.waited_ms, late.exposed_ms)} of exposed communication on {late.ranks} ranks wait for it"
            + (
                f"; its {_TIME_OF.get(late.part, late.part)} takes {ms_text(late.part_ms)} longer than theirs."
                if late.part
                else "."
            )
        )
    if main.device is None:
        return _on_host_alone(main)
    return _with_device(account, main, main.device, attention_ms)


MIN_COMPILING_SHARE, MIN_FIRST_SHARE = 0.1, 0.25
"""Least share of the program's loop that its first iterations take longer, for a sentence: with code that a compiler
made, and without."""

MIN_SLOW_SHARE = 0.05
"""Least share of an iteration that slow iterations add, for a sentence."""


MIN_UNTRAINED_SHARE = 0.15
"""Least share of the loop of a program that trains in steps that train nothing, for a sentence."""


class Remark(NamedTuple):
    """A sentence on the program as a whole, and the share of its time that it is about."""

    text: str
    share: float


def remarks(account: Account) -> list[Remark]:
    """Return sentences on what differs between iterations, most time first: the first ones, slow ones, growth, and
    steps that train nothing in a program that trains."""
    main = account.job
    if main is None or not main.time.ms or not account.steps_found:
        return []
    course = main.course or Course()
    found = [
        Remark(_slow(slow, main), (slow.cost.ms or 0.0) / main.time.ms)
        for slow in course.slow
        if (slow.cost.ms or 0.0) >= MIN_SLOW_SHARE * main.time.ms
    ]
    found += _untrained(account, main)
    found += _second_passes(main)
    first = next((entry for entry in account.program if entry.name in (names.COMPILING, names.FIRST)), None)
    least_share = MIN_COMPILING_SHARE if first is not None and first.name == names.COMPILING else MIN_FIRST_SHARE
    if first is not None and account.wall_ms and (first.ms or 0.0) >= least_share * account.wall_ms:
        found.append(Remark(_first(first, account.wall_ms), (first.ms or 0.0) / account.wall_ms))
    growth = course.growth
    if growth is not None:
        share = growth.last_ms / growth.first_ms - 1
        text = (
            f"An iteration takes {100 * share:.0f} % longer at the end than at the beginning: "
            f"{ms_text(growth.first_ms)}, then {ms_text(growth.last_ms)}{', ' + growth.where if growth.where else ''}."
        )
        found.append(Remark(text, (growth.last_ms - growth.first_ms) / growth.last_ms))
    return sorted(found, key=lambda remark: -remark.share)


def _untrained(account: Account, main: Iterations) -> Iterator[Remark]:
    """Yield the sentence on steps that train nothing, as of a validation, in a program that trains."""
    kinds = [each for each in account.iterations if each.rank == main.rank]
    others = sorted((each for each in kinds if each.trains is False), key=lambda each: -each.share)
    share = sum(each.share for each in others)
    if share < MIN_UNTRAINED_SHARE or not any(each.trains for each in kinds) or others[0].count < 2:
        return
    first = others[0]
    trained = ""
    if main.trains is False:  # then nothing else on the screen is about training
        most = max((each for each in kinds if each.trains), key=lambda each: each.share)
        trained_ms = f", {ms_text(most.time.ms)} each" if most.time.ms else ""
        trained = f", training takes {percent_text(100 * most.share)} ({most.count:,} steps{trained_ms})"
    each_ms = f", {ms_text(first.time.ms)} each" if first.time.ms else ""
    more = f", and {len(others) - 1} other kinds" if len(others) > 2 else ", and another kind" * (len(others) == 2)
    yield Remark(
        f"Steps that train nothing take {percent_text(100 * share)} of the loop{trained}: {first.count:,} of "
        f"{first.name or 'one kind'}{each_ms}{more}; if they evaluate the model, do so less often or on fewer samples.",
        share,
    )


def second_passes(main: Iterations) -> list[Entry]:
    """Return the parts of forward that are passes without gradients through a model that the step also trains."""
    forward = main.host[names.FORWARD]
    parts = forward.children if forward is not None else ()
    return [part for part in parts if part.name.endswith(WITHOUT_GRADIENTS)]


def model_of(part: Entry) -> str:
    """Return the name of the model of such a pass."""
    return part.name.removeprefix(names.of_model(names.FORWARD, "")).removesuffix(WITHOUT_GRADIENTS)


def _second_passes(main: Iterations) -> Iterator[Remark]:
    total_ms = main.time.ms or 0.0
    for part in second_passes(main):
        ms = part.ms or 0.0
        if ms >= MIN_SLOW_SHARE * total_ms:
            yield Remark(
                f"{model_of(part)} is called in each training step also without gradients: {_of(ms, total_ms)}.",
                ms / total_ms,
            )


def _slow(slow: SlowIterations, main: Iterations) -> str:
    which = (
        f"Each {ordinal(slow.period)} iteration takes"
        if slow.period
        else f"{slow.count:,} of {slow.of:,} iterations take"
    )
    place = f", in {slow.cost.place}" if slow.cost.place else ""
    part = {names.BETWEEN: "between steps", names.STEP: "in its step", names.DATA: names.DATA}.get(
        slow.part, f"in {_THE.get(slow.part, slow.part)}"
    )
    return (
        f"{which} {ms_text(slow.slow_ms)} instead of {ms_text(slow.usual_ms)}, {part}{place}: "
        f"{_of(slow.cost.ms or 0.0, main.time.ms or 0.0)} of the mean iteration."
    )


def _first(first: Entry, wall_ms: float) -> str:
    if first.source == names.COMPILER:
        return _compiling(first, wall_ms)
    count = f"{first.calls:.0f} iterations" if first.calls and first.calls > 1 else "iteration"
    if first.name == names.COMPILING:
        return f"Compiling took {_of(first.ms or 0.0, wall_ms)} of the program's loop, in the first {count}."
    return (
        f"The first {count} took {_of(first.ms or 0.0, wall_ms)} of the program's loop longer than others: code is "
        "loaded, memory allocated, kernels are chosen."
    )


def _compiling(compiling: Entry, wall_ms: float) -> str:
    count = compiling.calls or 0
    text = f"Compiling took {_of(compiling.ms or 0.0, wall_ms)} of the program's loop"
    anew = next((entry for entry in compiling.children if entry.name == names.ANEW), None)
    if anew is None or not anew.calls:
        return f"{text}."
    times = "once" if anew.calls == 1 else f"{anew.calls:.0f} of {count:.0f} times"
    text += f", {times} anew, since {anew.place}"
    if "size mismatch" in (anew.place or "") or "stride mismatch" in (anew.place or ""):
        return f"{text}: fewer sizes of inputs, or torch.compile(dynamic=True), avoid that."
    return f"{text}."


def ordinal(number: int) -> str:
    """Return a number as an ordinal: `2nd`, `15th`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def _on_host_alone(main: Iterations) -> str:
    total_ms = main.time.ms or 0.0
    data_ms = main.host.ms(names.DATA)
    largest = max(main.host.entries, key=lambda entry: entry.ms or 0.0, default=None)
    if largest is None:
        return f"{main.subject.capitalize()} takes {ms_text(total_ms)}; nothing in it was recorded."
    if data_ms >= MIN_DATA_SHARE * total_ms and data_ms >= (largest.ms or 0.0):
        return f"The loop waits for data: {_of(data_ms, total_ms)}."
    ranks_ms, transfer_ms = (sum(top.part(name) for top in main.host.entries) for name in names.OF_COLLECTIVES)
    if ranks_ms + transfer_ms >= total_ms / 4:
        return (
            f"Ranks communicate while they compute nothing: {_of(ranks_ms + transfer_ms, total_ms)}, "
            f"{ms_text(ranks_ms)} of it waiting for other ranks, {ms_text(transfer_ms)} transfer."
        )
    return f"{_largest(main, largest)}{_beside(main, largest)}."


MIN_BESIDE_SHARE = 0.1
"""Least share of an iteration that the program spends beside its phases, in a known place, to be in the sentence."""


def _beside(main: Iterations, largest: Entry) -> str:
    """Return a clause on time of the program in none of its phases, or between its steps, if that is not the largest
    part, but much."""
    found = [
        entry
        for entry in main.host.entries
        if entry.name in _TIME_OF and entry is not largest and entry.place and main.threads == 1
        and (entry.ms or 0.0) >= MIN_BESIDE_SHARE * (main.time.ms or 0.0)
    ]  # fmt: skip
    if not found:
        return ""
    entry = max(found, key=lambda each: each.ms or 0.0)
    where = "between its steps" if entry.name == names.BETWEEN else "outside the model and its phases"
    return f"; {_of(entry.ms or 0.0, main.time.ms or 0.0)} pass {where}{_place(entry)}"


_TIME_OF = {names.BETWEEN: "time between steps", names.OUTSIDE: "time outside the phases"}


def _largest(main: Iterations, entry: Entry) -> str:
    """Return a clause on the largest part of an iteration and its place."""
    total_ms = main.time.ms or 0.0
    if entry.name == names.BETWEEN and main.threads > 1:
        return f"No thread runs a step in {_of(entry.ms or 0.0, total_ms)} of {main.subject}{_place(entry)}"
    verbs = {
        names.BETWEEN: f"Most of {main.subject} passes between steps",
        names.OUTSIDE: f"Most of {main.subject} passes outside the model and its phases",
        names.DATA: "The loop waits for data",
    }
    share = (entry.ms or 0.0) / total_ms if total_ms else 0.0
    subject = verbs.get(entry.name) if share >= 0.5 or entry.name == names.DATA else None
    if subject is None:
        subject = f"The largest part of {main.subject} is {_THE.get(entry.name, entry.name)}"
    return f"{subject}, {_of(entry.ms or 0.0, total_ms)}{_place(entry)}".replace("steps, ", "steps: ").replace(
        "phases, ", "phases: "
    )


_THE = {
    names.OTHER_THREADS: "steps of other threads",
    names.OPTIMIZER: "the optimizer",
    names.BETWEEN: "between its steps",
    names.OUTSIDE: "outside its phases",
}


def _place(entry: Entry) -> str:
    """Return the place that takes most of an entry, in words."""
    if entry.place is None or not entry.place_ms:
        return _sleep(entry)
    calls = f", {entry.calls:.0f} calls" if entry.calls and entry.calls >= 1.5 else ""
    return f", {ms_text(entry.place_ms)} of it in {entry.place}{calls}{_sleep(entry)}"


def sleeps(entry: Entry) -> bool:
    """Return whether the thread sleeps in most of the time between steps."""
    return entry.name == names.BETWEEN and 2 * entry.part(names.ASLEEP) >= (entry.ms or 0.0) > 0


def _sleep(entry: Entry) -> str:
    """Return the clause that the thread sleeps in most of the time between steps."""
    if not sleeps(entry):
        return ""
    ms = ms_text(entry.part(names.ASLEEP))
    return f"; the thread sleeps in {ms}: it waits for work, the network, files or other threads"


def _with_device(account: Account, main: Iterations, device: Side, attention_ms: float) -> str:
    total_ms, busy_ms = main.time.ms or 0.0, device.ms(names.BUSY)
    subject = "device" if len(account.ranks) <= 1 and len(main.devices) <= 1 else f"busiest device of rank {main.rank}"
    works = f"the {subject} works {_of(busy_ms, total_ms)}"
    knows_causes = not account.forbids("cause")
    is_device = main.limit is not None and main.limit.side == "device"
    queued_ms = device.ms(names.QUEUED)
    if is_device and knows_causes and queued_ms > busy_ms:
        idle = f"Launched work waits, {_of(queued_ms, total_ms)}, while the {subject} runs nothing in the trace"
        return f"{idle}; it works {_of(busy_ms, total_ms)}{_work(device, total_ms, attention_ms)}."
    if busy_ms >= NEARLY_ALL * total_ms or (is_device and knows_causes):
        return f"The device limits: {works}{_work(device, total_ms, attention_ms)}."
    if not knows_causes:
        reason = next(doubt.text for doubt in account.doubts if "cause" in doubt.forbids)
        return f"{works[:1].upper()}{works[1:]}; why it is idle the rest is unknown: {reason}."
    data_ms = main.host.ms(names.DATA)
    if data_ms >= MIN_DATA_SHARE * total_ms and device.ms(names.HOST_DATA) >= device.ms(names.IDLE) / 2:
        return f"The loop waits for data, {_of(data_ms, total_ms)}; {works}."
    first = device[names.BEFORE_FIRST]
    if first is not None and (first.ms or 0.0) >= total_ms / 4:
        where = f", the host in {first.place}" if first.place else ""
        of = "the recording" if main.unit == "window" else "a step"
        return f"The host limits: {works} and is idle the first {ms_text(first.ms or 0.0)} of {of}{where}."
    if main.limit is not None and main.limit.lead_ms < CLOSE * total_ms:
        largest = _largest(main, _own_largest(main))
        host = ms_text(main.limit.host_ms)
        return f"Host and device take nearly the same time: the host takes {host}, {works}. {largest}."
    own = _own_largest(main)
    return f"The host limits: {works}. {_largest(main, own)}{_beside(main, own)}."


def _own_largest(main: Iterations) -> Entry:
    """Return the entry of the host with most time that is not waiting for the device."""
    return max(main.host.entries, key=lambda entry: (entry.ms or 0.0) - sum(map(entry.part, _WAITS))
               - (entry.ms or 0.0) * (entry.name == names.DRAINING))  # fmt: skip


def _work(device: Side, total_ms: float, attention_ms: float) -> str:
    """Return what the device mainly works on."""
    communication = device.ms(names.COMMUNICATION)
    busy = device[names.BUSY]
    if communication >= (busy.ms or 0.0) / 3 if busy is not None else False:
        return f", {_of(communication, total_ms)} of it communication that no computation hides"
    copies = device[names.COPIES]
    computation = device[names.COMPUTATION]
    classes: Sequence[Entry] = computation.children if computation is not None else ()
    longest_ms = max((entry.ms or 0.0 for entry in classes), default=0.0)
    if copies is not None and (copies.ms or 0.0) > max(longest_ms, attention_ms):
        kind = f", {copies.children[0].name}" if copies.children else ""
        return f", {_of(copies.ms or 0.0, total_ms)} of it copies that no computation hides{kind}"
    if not classes:
        return ""
    largest = classes[0]
    if attention_ms > (largest.ms or 0.0):
        return f", most on attention that is written out, {_of(attention_ms, total_ms)}"
    text = f", most on {largest.name}, {ms_text(largest.ms or 0.0)} ({100 * (largest.ms or 0.0) / total_ms:.0f} %)"
    if busy is not None and busy.place:
        text += f"; by module most in {busy.place}, {ms_text(busy.place_ms or 0.0)}"
    return text
