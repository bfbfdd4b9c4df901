"""Verdict on a measurement: whether sharing pays, in one sentence with the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xsp import stats
from xsp.comparison import evidence
from xsp.sections import Cell, Part, Section, Table, Text
from xsp.share import estimate
from xsp.share.loadworker import ATTACH, MMAP, PICKLE, WAYS
from xsp.share.measuring import COLD, WARM, Measurement
from xsp.share.weights import StoredTensor
from xsp.texts import size_text

PAYS, PAYS_NOT, CANNOT_TELL = "pays", "does not pay", "cannot tell"

LEAST_GAIN = 0.05
"""Smallest gain that counts: in time, as a share of the time of `load_file`; in memory per process, as a share of the
weights."""

LOW_LARGE_SHARE = 0.5
"""If less than this share of the weights has large pages, the text reports it: it explains a slower first call."""


class SharingVerdict(NamedTuple):
    """The verdict on a measurement."""

    verdict: str
    """`PAYS`, `PAYS_NOT` or `CANNOT_TELL`, against `load_file`."""

    sentence: str
    from_load_file: int | None
    """Number of processes from which on `attach` takes less memory than `load_file`; None if never, or not measured."""

    from_torch_load: int | None


def break_even_processes(measurement: Measurement, other_way: str) -> int | None:
    """Return the number of processes from which on `attach` takes less memory than another way.

    Returns:
        None if there is no such number, by `LEAST_GAIN`, or if the system does not report memory.
    """
    if ATTACH not in measurement.memory or other_way not in measurement.memory:
        return None
    attach_memory, other_memory = measurement.memory[ATTACH], measurement.memory[other_way]
    gain = other_memory.further_bytes - attach_memory.further_bytes
    if gain < LEAST_GAIN * measurement.nbytes:
        return None
    return max(1, int((attach_memory.single_bytes - other_memory.single_bytes) // gain) + 2)


def difference(measurement: Measurement, state: str) -> tuple[evidence.Evidence, str]:
    """Return the difference of `attach` from `load_file`, in ns of loading and the first call, and its verdict."""
    method = evidence.turn_repeats(measurement.most_turns) if state == WARM else evidence.RUNS
    a, b = measurement.times[MMAP, state].total_ns, measurement.times[ATTACH, state].total_ns
    result = method.evidence(a, b)
    return result, method.verdict(result, method.adjusted([result.p])[0], min(len(a), len(b)))


def verdict_of(measurement: Measurement) -> SharingVerdict:
    """Return the verdict against `load_file` with a warm store, because `load_file` shares its pages as well."""
    result, time_verdict = difference(measurement, WARM)
    memory_from = break_even_processes(measurement, MMAP)
    gain = f"{_ms(-result.change)} ms [{_ms(-(result.high or 0))} … {_ms(-(result.low or 0))}] of {_ms(result.a)} ms"
    kind = CANNOT_TELL
    if time_verdict == evidence.FASTER and -result.change >= LEAST_GAIN * result.a:
        kind, sentence = PAYS, f"attach saves {gain}"
    elif memory_from is not None:
        kind, sentence = PAYS, f"in memory, from {_count(memory_from)} on; in time, attach saves over load_file {gain}"
    elif result.low is not None and -result.low < LEAST_GAIN * result.a:
        kind, sentence = PAYS_NOT, f"attach takes as long as load_file or longer: it saves {gain}"
        if time_verdict == evidence.SLOWER:
            sentence = f"attach takes longer than load_file: it saves {gain}"
        elif result.change < 0:
            sentence = f"attach saves less than {100 * LEAST_GAIN:.0f} % over load_file: {gain}"
    else:
        sentence = (
            f"cannot tell: {measurement.turns} turns do not show whether attach saves {100 * LEAST_GAIN:.0f} % or more "
            f"over load_file: it saves {gain}"
        )
    return SharingVerdict(
        kind,
        sentence if kind == CANNOT_TELL else f"{kind}: {sentence}",
        memory_from,
        break_even_processes(measurement, PICKLE),
    )


def document(measurement: Measurement) -> Section:
    """Return the measurement as a document."""
    size = f"{size_text(measurement.nbytes)}, {measurement.tensors} tensors"
    device = f", onto {measurement.device} ({measurement.device_name})" if measurement.device else ""
    module = f" in {measurement.module}" if measurement.module and measurement.module != measurement.source else ""
    turns = f"{measurement.turns} turns of at most {measurement.most_turns}, each in a new process"
    verdict = verdict_of(measurement)
    parts: list[Part] = [Text(verdict.sentence), *_memory(measurement, verdict)]
    columns = ("way", "load", "first call" if measurement.module else "one read", "both")
    rows = tuple(
        (f"{way}, {state}", *map(_figure, (times.load_ns, times.call_ns, times.total_ns)))
        for (way, state), times in measurement.times.items()
    )
    parts.append(Table(columns, rows, "Times in ms: trimmed means with 95 % intervals"))
    parts += _together(measurement)
    if (ATTACH, COLD) in measurement.times:
        result, time_verdict = difference(measurement, COLD)
        has_ends = result.low is not None and result.high is not None
        interval_text = f" [{_ms(-(result.high or 0))} … {_ms(-(result.low or 0))}]" if has_ends else ""
        parts.append(Text(f"cold, attach saves over load_file {_ms(-result.change)} ms{interval_text}: {time_verdict}"))
    obstacle = measurement.cold_obstacle
    cold = f"nothing was measured cold: {obstacle}" if obstacle else "the store copies it first."
    where = "in the store, on the device" if measurement.device else "in the store"
    parts.append(Text(f"Warm: the file is in memory and {where}. Cold: in neither; {cold}"))
    if (
        measurement.large_bytes is not None
        and not measurement.device
        and measurement.large_bytes < LOW_LARGE_SHARE * measurement.nbytes
    ):
        large = f"Of the weights {size_text(measurement.large_bytes)} have large pages in the store"
        parts.append(Text(
            f"{large}, the rest pages of 4 KiB, each touched by the first call; a file in the page cache may have "
            "larger ones. See docs/use/share.md."
        ))  # fmt: skip
    return Section(f"{measurement.source}{module}: {size}{device}; {turns}", tuple(parts))


def _together(measurement: Measurement) -> Iterator[Part]:
    """Yield the times of processes that load at once, each alone in its first column."""
    if not measurement.together:
        return
    counts = sorted({count for _, count in measurement.together})
    rows = tuple(
        (way, *(_at_once(measurement.together[way, count].total_ns) for count in counts)) for way in WAYS
    )  # fmt: skip
    columns = ("way", *(_count(count) for count in counts))
    yield Table(columns, rows, "Processes that load at once, load and first call in ms: median, slowest")


def _at_once(values: Sequence[float]) -> str:
    return f"{_ms(stats.percentile(values, 0.5))}, {_ms(max(values))}" if len(values) > 1 else _ms(values[0])


def _memory(measurement: Measurement, verdict: SharingVerdict) -> Iterator[Part]:
    if len(measurement.memory) < len(WAYS):
        if measurement.device:
            yield Text(f"memory: {measurement.device} does not say what a process holds")
        else:
            yield Text("memory: not reported by the system (no /proc/PID/smaps_rollup)")
        return
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (way, size_text(memory.single_bytes), size_text(round(max(0.0, memory.further_bytes))), size_text(memory.pss))
        for way, memory in measurement.memory.items()
    )
    columns: tuple[str, ...] = ("way", "1 process", "each further", f"PSS of one of {measurement.concurrent}")
    if measurement.device:
        rows, columns = tuple(row[:3] for row in rows), columns[:3]
        yield Table(columns, rows, f"Memory of {measurement.device}: tensors and store, without contexts")
    else:
        yield Table(columns, rows, "Memory, without libraries")
    for way, count in ((MMAP, verdict.from_load_file), (PICKLE, verdict.from_torch_load)):
        range_text = f"from {_count(count)} on" if count else "for no number of processes"
        yield Text(f"attach, with the store, takes less than {way} {range_text}.")


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return the measurement for JSON; times in nanoseconds, memory in bytes."""
    verdict = verdict_of(measurement)
    return {
        "source": measurement.source,
        "module": measurement.module or None,
        "device": measurement.device or None,
        "device_name": measurement.device_name or None,
        "nbytes": measurement.nbytes,
        "tensors": measurement.tensors,
        "turns": measurement.turns,
        "most_turns": measurement.most_turns,
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "less_memory_than_load_file_from": verdict.from_load_file,
        "less_memory_than_torch_load_from": verdict.from_torch_load,
        "times": [
            {"way": way, "state": state, "load_ns": way_times.load_ns, "call_ns": way_times.call_ns}
            for (way, state), way_times in measurement.times.items()
        ],
        "memory": [
            {"way": way, "one": memory.single_bytes, "each": memory.further_bytes, "pss": memory.pss}
            for way, memory in measurement.memory.items()
        ],
        "together": [
            {"way": way, "processes": count, "load_ns": way_times.load_ns, "call_ns": way_times.call_ns}
            for (way, count), way_times in measurement.together.items()
        ],
        "not_cold": measurement.cold_obstacle or None,
        "large_bytes": measurement.large_bytes,
    }


def _figure(values: list[float]) -> str:
    interval = stats.interval(values)
    interval_text = f" [{_ms(interval.low)} … {_ms(interval.high)}]" if interval is not None else ""
    return f"{_ms(stats.trimmed_mean(values))}{interval_text}"


def _count(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def _ms(ns: float) -> str:
    value = ns / 1e6
    text = f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return text.removeprefix("-") if float(text) == 0 else text


# --- estimates --------------------------------------------------------------------------------------------------------


def estimate_document(source: str, tensors: Sequence[StoredTensor], constants: estimate.Constants) -> Section:
    """Return an estimate as a document: over each way, and by parts of the model."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    rows = tuple(
        (f"{row.way}, {row.state}", _ms(row.other_ns), _ms(row.attach_ns), _ms(row.saved_ns),
         PAYS if row.is_saving else PAYS_NOT)
        for row in estimate.estimate_savings(nbytes, len(tensors), constants)
    )  # fmt: skip
    groups: tuple[tuple[Cell, ...], ...] = tuple(
        (name, size_text(size), count, *(_ms(saved) for saved in _savings_by_way(size, count, constants).values()))
        for name, (size, count) in estimate.groups(tensors).items()
    )
    fixed_ms = {way: cost.fixed_ns / 1e6 for way, cost in constants.costs.items()}
    tensor_us = {way: cost.tensor_ns / 1e3 for way, cost in constants.costs.items()}
    notes = (
        f"attach takes {fixed_ms[ATTACH]:.2f} ms and {tensor_us[ATTACH]:.1f} µs per tensor here; load_file "
        f"{fixed_ms[MMAP]:.2f} and {tensor_us[MMAP]:.1f}, torch.load {fixed_ms[PICKLE]:.2f} and "
        f"{tensor_us[PICKLE]:.1f}, plus the copy. Cold times do not include reading from the disk, which all ways do. "
        "For memory and the first call: xsp share measure."
    )
    title = "Saved, warm, in ms, by the first part of the names; without the request to the store"
    return Section(
        f"{source}: {size_text(nbytes)}, {len(tensors)} tensors; an estimate of loading, without a first call",
        (
            Table(("ms", "without a store", "attach", "saved", "verdict"), rows),
            Table(("part", "size", "tensors", "over load_file", "over torch.load"), groups, title),
            Text(notes),
        ),
    )


def _savings_by_way(nbytes: int, count: int, constants: estimate.Constants) -> dict[str, float]:
    """Return the saving for a part of the weights in nanoseconds, by way, warm, without the request to the store."""
    rows = [row for row in estimate.estimate_savings(nbytes, count, constants) if row.state == WARM]
    fixed = constants.costs[ATTACH].fixed_ns
    return {row.way: row.saved_ns - constants.costs[row.way].fixed_ns + fixed for row in rows}


def estimate_json(source: str, tensors: Sequence[StoredTensor], constants: estimate.Constants) -> dict[str, Any]:
    """Return an estimate for JSON; times in nanoseconds."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return {
        "source": source,
        "nbytes": nbytes,
        "tensors": len(tensors),
        "ways": [
            {
                "way": row.way,
                "state": row.state,
                "other_ns": row.other_ns,
                "attach_ns": row.attach_ns,
                "saved_ns": row.saved_ns,
                "pays": row.is_saving,
            }
            for row in estimate.estimate_savings(nbytes, len(tensors), constants)
        ],
        "groups": [
            {"name": name, "nbytes": size, "tensors": count, "saved_ns": _savings_by_way(size, count, constants)}
            for name, (size, count) in estimate.groups(tensors).items()
        ],
        "costs": {way: cost._asdict() for way, cost in constants.costs.items()},
    }
