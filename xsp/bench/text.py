"""Timings as documents, and as plain values for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xsp.bench.plan import coverage, overheads
from xsp.bench.repeatability import Check
from xsp.bench.spec import AS_RUN, Spec, Status, Timing, slowdown_text, slowed, spec_of
from xsp.bench.timings import Timings
from xsp.scrub import plain
from xsp.sections import Part, Section, Table, Text
from xsp.texts import cut

WIDTH = 25
MOST_REASONS = 5
FIGURES = (
    "key", "op", "variant", "state", "threads", "runtime", "status", "reason", "samples", "trimmed_ns", "low_ns",
    "high_ns", "least_ns", "host_ns", "device_ns", "error_max", "canary_ratio", "taken_ns", "cold_ns",
    "workspace_bytes", "kernels", "joules",
)  # fmt: skip

Pairs = Sequence[tuple[Spec, int]]


def fill_document(
    name: str, pairs: Pairs, timings: Timings, new_timings: Sequence[Timing], seconds: float, startup_s: float = 0.0
) -> Section:
    """Return a graph's blocks as a document: coverage, the most expensive blocks, and missing timings with reasons.

    Args:
        name: name of the graph.
        pairs: blocks of the graph, and the number of occurrences of each.
        timings: the existing timings.
        new_timings: the timings made by this command.
        seconds: seconds that making them took.
        startup_s: part of `seconds` until the worker process was ready.
    """
    entries = [(timings.of([spec])[spec.key], count) for spec, count in pairs]
    calls, expected = coverage(pairs, timings)
    states = Counter(timing.status for timing, _ in entries)
    timed = sorted(
        (pair for pair in entries if pair[0].is_timed), key=lambda pair: -(pair[0].trimmed_ns or 0) * pair[1]
    )
    starting = f" ({startup_s:.1f} to start)" if startup_s else ""
    texts = [
        timings.environment.name,
        timings.environment.processor_note,
        f"{len(timed):,} of {len(pairs):,} distinct blocks are timed, {len(new_timings):,} taken now, "
        f"in {seconds:.1f} s{starting}; in all {sum(count for _, count in pairs):,} blocks.",
        f"Coverage: {100 * expected:.1f}% of the expected time, {100 * calls:.1f}% of the blocks.",
        *(f"{status.value}: {states[status]:,}, {text}" for status, text in _STATUS_TEXTS.items() if states[status]),
        *_overheads(timings, pairs),
    ]
    parts: list[Part] = [Text(text) for text in texts if text]
    if timed:
        on_device = timings.environment.device is not None
        rows = tuple(
            (_label(timing), count, timing.trimmed_ns,
             100 * (timing.half_ns or 0.0) / timing.trimmed_ns if timing.trimmed_ns else None,
             (timing.trimmed_ns or 0.0) * count,
             *((timing.cold_ns, timing.host_ns) if on_device else ()),
             f"{'' if timing.variant == AS_RUN else f'{timing.variant} '}{timing.state.value} {timing.threads}")
            for timing, count in timed
        )  # fmt: skip
        sides = ("cold_ns", "issue_ns") if on_device else ()
        columns = ("operators, shapes", "count", "time_ns", "±_percent", "all_ns", *sides, "conditions")
        parts.append(Table(columns, rows))
    parts += map(Text, _reasons((timing, count) for timing, count in entries if not timing.is_timed))
    parts += [Text(f"{text}; repeat with --again") for text in slowed(timing for timing, _ in timed)]
    drift = max((timing.canary_ratio or 1 for timing in new_timings), default=1)
    if drift >= 1.05:
        parts.append(Text(f"disturbed: fixed work took {slowdown_text(drift)} meanwhile; repeat with --again"))
    return Section(name, (*parts, *problems(timings)))


_STATUS_TEXTS = {
    Status.UNSTABLE: "timed; the interval is wider than ±5% of the mean",
    Status.QUICK: "timed; not longer than an empty call",
    Status.MISSING: "the budget was too short: run it again",
    Status.FAILED: "cannot be run in isolation",
    Status.TIMED_OUT: "one batch takes too long",
    Status.TOO_LARGE: "need more memory than is allowed",
    Status.DIFFERENT: "variants with different results",
}


_CALLS = {"overhead/module_call": "per module call", "overhead/op_call": "per operator call"}


def _label(timing: Timing) -> str:
    """Return the operators; for a single call also the shapes of its inputs, as far as the width allows."""
    block = spec_of(timing).block
    if len(block.calls) != 1 or not block.calls[0].inputs:
        return short(timing.op)
    shapes = ["x".join(map(str, tensor.shape or ())) for tensor in block.calls[0].inputs]
    return cut(" ".join([short(timing.op), *filter(None, shapes)]), WIDTH)


def short(op: str, width: int = WIDTH) -> str:
    """Return operators in at most `width` characters: `aten::` is omitted, and the middle if necessary."""
    op = plain(op).replace("aten::", "")
    return op if len(op) <= width else f"{op[: width - 12]}…{op[-11:]}"


def _overheads(timings: Timings, pairs: Pairs) -> list[str]:
    lines: list[str] = []
    if timings.environment.device is not None:
        return lines
    for threads in sorted({spec.threads for spec, _ in pairs}):
        measured = timings.of(overheads(threads)).values()
        parts = [
            f"{timing.trimmed_ns / 1e3:.2f} µs {_CALLS[timing.variant]}" for timing in measured if timing.trimmed_ns
        ]
        if parts:
            lines.append(f"overhead: {', '.join(parts)}; threads {threads}")
    return lines


def _reasons(holes: Iterable[tuple[Timing, int]]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for timing, count in holes:
        if timing.status is not Status.MISSING:
            counts[timing.status.value, f"{short(timing.op)}: {timing.reason.removeprefix(f'{timing.op} ')}"] += count
    lines = [
        plain(f"{status} {count}×  {reason}")[:158] for (status, reason), count in counts.most_common(MOST_REASONS)
    ]
    remaining = len(counts) - MOST_REASONS
    return [*lines, *([f"more reasons: {remaining}; --format json has all"] if remaining > 0 else [])]


def list_document(timings: Timings) -> Section:
    """Return the environments in a folder, with the number of timings of each by status, as a document."""
    rows = []
    for hash_, environment in timings.environments().items():
        states = Counter(timing.status.value for timing in timings.all_of(hash_))
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(states.items()))
        here = " (here)" if hash_ == timings.environment.hash else ""
        rows.append((hash_, states.total(), f"{environment.name}{here}: {counts}"))
    if not rows:
        return Section(f"{timings.folder}: no timings yet; take some: xsp bench SOURCE", problems(timings))
    return Section(str(timings.folder), (Table(("environment", "timings", "what"), tuple(rows)), *problems(timings)))


def check_document(check: Check) -> Section:
    """Return a table of repeated timings, largest difference first, as a document."""
    ordered = sorted(zip(check.pairs, check.differences, strict=True), key=lambda pair: -abs(pair[1]))
    rows = tuple(
        (_label(stored), stored.trimmed_ns, repeated.trimmed_ns, f"{100 * difference:+.1f}%")
        for (stored, repeated), difference in ordered
    )
    parts: list[Part] = [Table(("operators", "kept_ns", "now_ns", "difference"), rows)]
    if check.median is not None and check.ninetieth is not None:
        median, ninetieth = 100 * check.median, 100 * check.ninetieth
        parts.append(Text(f"median difference {median:.1f}%, 90th percentile {ninetieth:.1f}%, of {len(rows)} timings"))
    if check.failures:
        parts.append(Text(f"{len(check.failures)} more could not be timed now"))
    return Section("Timings and their repetition", tuple(parts))


def problems(timings: Timings) -> tuple[Part, ...]:
    """Return what was not timed, and the problems of a folder."""
    kinds = (("not timed", timings.untimed), (f"{len(timings.problems)} left out", timings.problems))
    return tuple(Table((title,), tuple((line,) for line in lines)) for title, lines in kinds if lines)


# --- plain values ---------------------------------------------------------------------------------------


def fill_as_json(
    name: str, pairs: Pairs, timings: Timings, new_timings: Sequence[Timing], seconds: float, startup_s: float = 0.0
) -> dict[str, Any]:
    """Return all data that `fill_document` summarizes, as plain values."""
    calls, expected = coverage(pairs, timings)
    entries = [(timings.of([spec])[spec.key], count) for spec, count in pairs]
    return {
        "source": name,
        "environment": timings.environment.hash,
        "device": timings.environment.device_name,
        "folder": str(timings.folder),
        "blocks": sum(count for _, count in pairs),
        "unique": len(pairs),
        "timed": sum(timing.is_timed for timing, _ in entries),
        "timed_now": sum(timing.is_timed for timing in new_timings),
        "seconds": round(seconds, 3),
        "seconds_starting": round(startup_s, 3),
        "coverage_percent_of_blocks": round(100 * calls, 2),
        "coverage_percent_of_expected_time": round(100 * expected, 2),
        "timings": [{**figures(timing), "count": count} for timing, count in entries],
        "overheads": [figures(timing) for timing in timings.of(_all_overheads(pairs, timings)).values()],
        "processor_note": timings.environment.processor_note,
        "problems": timings.remarks,
    }


def _all_overheads(pairs: Pairs, timings: Timings) -> list[Spec]:
    if timings.environment.device is not None:  # there the host's time is that of issuing the whole step
        return []
    return [overhead for threads in sorted({spec.threads for spec, _ in pairs}) for overhead in overheads(threads)]


def figures(timing: Timing) -> dict[str, Any]:
    """Return the figures of a timing as plain values; None for a missing one."""
    values = {name: getattr(timing, name) for name in FIGURES}
    return {**values, "state": timing.state.value, "status": timing.status.value}


def list_as_json(timings: Timings) -> list[dict[str, Any]]:
    """Return the environments of a folder with all their timings, as plain values."""
    return [
        {
            "environment": hash_,
            "here": hash_ == timings.environment.hash,
            "equal": dict(environment.properties),
            "noted": dict(environment.circumstances),
            "timings": [figures(timing) for timing in timings.all_of(hash_)],
        }
        for hash_, environment in timings.environments().items()
    ]


def check_as_json(check: Check) -> dict[str, Any]:
    """Return the data that `check_document` shows, as plain values."""
    return {
        "median_percent_of_kept": None if check.median is None else round(100 * check.median, 3),
        "ninetieth_percent_of_kept": None if check.ninetieth is None else round(100 * check.ninetieth, 3),
        "timings": [{"kept": figures(stored), "now": figures(repeated)} for stored, repeated in check.pairs],
        "not_timed_now": [figures(timing) for timing in check.failures],
    }
