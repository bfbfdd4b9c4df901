"""Timings as text for a terminal of 80 columns, and as plain values for JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xsp.bench.environment import Environment
from xsp.bench.plan import coverage, overheads
from xsp.bench.repeatability import Check
from xsp.bench.spec import AS_RUN, Spec, Status, Timing, slowdown_text, spec_of
from xsp.bench.timings import Timings
from xsp.scrub import plain

MOST_ROWS = 12
WIDTH = 25
MOST_REASONS = 5
FIGURES = (
    "key", "op", "variant", "state", "threads", "runtime", "status", "reason", "samples", "trimmed_ns", "low_ns",
    "high_ns", "least_ns", "host_ns", "device_ns", "error_max", "canary_ratio", "taken_ns", "cold_ns",
    "workspace_bytes", "kernels",
)  # fmt: skip

Pairs = Sequence[tuple[Spec, int]]


def fill_page(
    name: str, pairs: Pairs, timings: Timings, new_timings: Sequence[Timing], seconds: float, startup_s: float = 0.0
) -> str:
    """Return a page on a graph's blocks: coverage, the most expensive blocks, and missing timings with their reasons.

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
    holes = [(timing, count) for timing, count in entries if not timing.is_timed]
    lines = [
        plain(name),
        plain(timings.environment.name),
        *textwrap.wrap(plain(timings.environment.processor_note), 79),
        "",
        f"blocks       {len(pairs):7,}  distinct blocks of {sum(count for _, count in pairs):,}",
        f"timed        {len(entries) - len(holes):7,}  {len(new_timings):,} taken now, in {seconds:.1f} s"
        + (f" ({startup_s:.1f} to start)" if startup_s else ""),
        f"coverage     {100 * expected:6.1f}%  of the expected time, {100 * calls:.1f}% of the blocks",
    ]
    lines += [
        f"{status.value:12} {states[status]:7,}  {_STATUS_TEXTS[status]}" for status in _STATUS_TEXTS if states[status]
    ]
    lines += _overheads(timings, pairs)
    timed = sorted(
        (pair for pair in entries if pair[0].is_timed), key=lambda pair: -(pair[0].trimmed_ns or 0) * pair[1]
    )
    if timed:
        conditions = "variant state threads" if timings.environment.device is None else "cold µs, issue µs"
        lines += ["", _row("operators, shapes", "count", "µs", "±%", "all ms", conditions)]
        lines += [_timing_row(*pair) for pair in timed[:MOST_ROWS]]
        lines += [f"{len(timed) - MOST_ROWS:,} more timed blocks"] if len(timed) > MOST_ROWS else []
    reasons = _reasons(holes)
    lines += ["", *reasons] if reasons else []
    drift = max((timing.canary_ratio or 1 for timing in new_timings), default=1)
    if drift >= 1.05:
        lines += [
            "",
            f"disturbed: fixed work took {slowdown_text(drift)} meanwhile; repeat with --again",
        ]
    return "\n".join([*lines, *problems(timings)])


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


def _row(op: str, count: str, figure: str, half: str, total: str, conditions: str) -> str:
    return f"{op:{WIDTH}} {count:>5} {figure:>9} {half:>4} {total:>8}  {conditions}".rstrip()


def _timing_row(timing: Timing, count: int) -> str:
    mean = timing.trimmed_ns or 0.0
    half = 100 * (timing.half_ns or 0.0) / mean if mean else 0.0
    variant = [] if timing.variant == AS_RUN else [timing.variant]
    if timing.device_ns is None:
        conditions = " ".join([*variant, timing.state.value, f"{timing.threads}"])
    else:
        sides = ("–" if ns is None else f"{ns / 1e3:.2f}" for ns in (timing.cold_ns, timing.host_ns))
        conditions = " ".join([*(f"{side:>8}" for side in sides), *variant])
    figures = f"{mean / 1e3:.2f}", f"{half:.0f}", f"{mean * count / 1e6:.3f}"
    return _row(_label(timing), f"{count:,}", *figures, conditions)


def _label(timing: Timing) -> str:
    """Return the operators; for a single call also the shapes of its inputs, as far as the width allows."""
    block = spec_of(timing).block
    if len(block.calls) != 1 or not block.calls[0].inputs:
        return short(timing.op)
    shapes = ["x".join(map(str, tensor.shape or ())) for tensor in block.calls[0].inputs]
    text = " ".join([short(timing.op), *filter(None, shapes)])
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


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
            lines.append(f"overhead     {', '.join(parts)}; threads {threads}")
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


def list_page(timings: Timings) -> str:
    """Return a list of the environments in a folder, with the number of timings of each by status."""
    environments = timings.environments()
    if not environments:
        return "\n".join([f"{timings.folder}: no timings yet; take some: xsp bench SOURCE", *problems(timings)])
    lines = [str(timings.folder), "", f"{'environment':18} {'timings':>8}  {'what'}"]
    for hash_, environment in environments.items():
        rows = timings.all_of(hash_)
        marker = " (here)" if hash_ == timings.environment.hash else ""
        states = Counter(timing.status.value for timing in rows)
        lines.append(f"{hash_:18} {len(rows):8,}  {plain(environment.name)}{marker}")
        lines.append(f"{'':28} {', '.join(f'{count:,} {name}' for name, count in sorted(states.items()))}")
    return "\n".join([*lines, *problems(timings)])


def check_page(check: Check) -> str:
    """Return a table of repeated timings, largest difference first."""
    ordered = sorted(zip(check.pairs, check.differences, strict=True), key=lambda pair: -abs(pair[1]))
    lines = [f"{'operators':{WIDTH}} {'kept µs':>10} {'now µs':>10} {'longer':>8}"]
    for (stored, repeated), difference in ordered:
        figures = (
            f"{(stored.trimmed_ns or 0) / 1e3:10.2f} {(repeated.trimmed_ns or 0) / 1e3:10.2f} {100 * difference:+7.1f}%"
        )
        lines.append(f"{_label(stored):{WIDTH}} {figures}")
    if check.median is not None and check.ninetieth is not None:
        median, ninetieth = 100 * check.median, 100 * check.ninetieth
        lines += [
            "",
            f"median difference {median:.1f}%, 90th percentile {ninetieth:.1f}%, of {len(check.pairs)} timings",
        ]
    if check.failures:
        lines.append(f"{len(check.failures)} more could not be timed now")
    return "\n".join(lines)


def problems(timings: Timings) -> list[str]:
    """Return the problems of a folder as lines."""
    lines = [plain(problem) for problem in timings.problems]
    remaining = len(lines) - MOST_REASONS
    if not lines:
        return []
    return ["", f"{len(lines)} left out:", *lines[:MOST_REASONS], *([f"{remaining} more"] if remaining > 0 else [])]


# --- plain values ---------------------------------------------------------------------------------------


def fill_as_json(
    name: str, pairs: Pairs, timings: Timings, new_timings: Sequence[Timing], seconds: float, startup_s: float = 0.0
) -> dict[str, Any]:
    """Return all data that `fill_page` summarizes, as plain values."""
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
        "problems": list(timings.problems),
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
    return [_environment(timings, hash_, environment) for hash_, environment in timings.environments().items()]


def _environment(timings: Timings, hash_: str, environment: Environment) -> dict[str, Any]:
    return {
        "environment": hash_,
        "here": hash_ == timings.environment.hash,
        "equal": dict(environment.properties),
        "noted": dict(environment.circumstances),
        "timings": [figures(timing) for timing in timings.all_of(hash_)],
    }


def check_as_json(check: Check) -> dict[str, Any]:
    """Return the data that `check_page` shows, as plain values."""
    return {
        "median_percent_of_kept": None if check.median is None else round(100 * check.median, 3),
        "ninetieth_percent_of_kept": None if check.ninetieth is None else round(100 * check.ninetieth, 3),
        "timings": [{"kept": figures(stored), "now": figures(repeated)} for stored, repeated in check.pairs],
        "not_timed_now": [figures(timing) for timing in check.failures],
    }
