"""Findings on the device work of a trace: missing launches and layers, clocks, the overhead of the profiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from xsp import account, frameworks
from xsp.device.kernelnames import MATRIX
from xsp.health.finding import Finding, Severity
from xsp.importers.contract import CPU_SAMPLES, CUDA_BACKTRACES, OS_BACKTRACES, PYTHON_FRAMES
from xsp.schema import Grade, Kind, Level
from xsp.scrub import plain
from xsp.store.trace import Trace
from xsp.store.views import kernel_names

MIN_DOUBTFUL_SHARE = 0.10
"""Minimum share of device work without evidence for figures by layer or by operator to be of little use."""

MIN_USELESS_SHARE = 0.50
"""Minimum share of device work without evidence for such figures to be of no use."""

MAX_OVERHEAD = 0.05
"""Minimum share of the profiler's own work in the recorded time for a warning."""

MIN_STACK_WAIT, MIN_DECISIVE_WAIT = 0.05, 0.20
"""Shares of the device's window spent waiting for launches, from which recorded stacks lower the grade: stacks make
this time longer, and from the second share on it determines the verdict."""


class _Stacks(NamedTuple):
    """Stacks that a profiler recorded, and their effect on the host."""

    description: str
    option: str
    """The option that requests them."""

    effect: str
    best_grade: str
    """The best grade if the verdict is about the host."""


_LONGER = "longer, by an unknown amount"

STACKS = {
    PYTHON_FRAMES: _Stacks("Python's stack was", "with_stack", "the host takes a fifth to a third longer", "C"),
    CUDA_BACKTRACES: _Stacks(
        "backtraces of CUDA's calls were", "--cudabacktrace", f"launch calls take {_LONGER}", "C"
    ),
    OS_BACKTRACES: _Stacks(
        "backtraces of the operating system's calls were", "--trace=osrt", f"the host takes {_LONGER}", "B"
    ),
    CPU_SAMPLES: _Stacks("samples of the CPU were", "--sample", f"the host takes {_LONGER}", "B"),
}  # fmt: skip
"""Importers' names → stacks, in order of their effect, largest first."""

MIN_EARLY_NS = 1_000
"""Nanoseconds before its launch from which the start of a kernel shows that clocks disagree."""


def findings(trace: Trace) -> Iterator[Finding]:
    """Yield the findings on device work; nothing for a run without devices."""
    devices = trace.run.machine.devices
    rows = trace.con.execute(
        f"SELECT count(*), coalesce(sum(dur_ns), 0)::BIGINT FROM spans WHERE level = {int(Level.KERNEL)}"
    ).fetchall()
    work = _Work(*rows[0])
    yield from _doubts(trace)
    if not work.spans:
        if trace.run.counters is not None:
            text = "kernels were replayed for counters, not timed: for the GPU see only `counters` and `op-counters`"
            yield Finding(Severity.WARNING, "device", text, "D")
        elif devices:
            text = f"no device work was recorded, on a machine with {len(devices)} ({devices[0]})"
            yield Finding(Severity.WARNING, "device", text, "D")
        return
    yield from _launches(trace, work)
    yield from _layers(trace, work)
    yield from _operations(trace, work)
    ((ops,),) = trace.con.execute(f"SELECT count(*) FILTER (level = {int(Level.OP)}) FROM spans").fetchall()
    if not ops:
        yield Finding(Severity.WARNING, "operators", "none was recorded: the operator of each kernel is unknown", "C")
    yield from _clocks(trace)
    yield from _overhead(trace)
    yield from _stacks(trace)


MIN_NAMED_SHARE = 0.05
"""Minimum share of device work in products of an operator for it to be named if their number is unknown."""


def _operations(trace: Trace, work: _Work) -> Iterator[Finding]:
    """Yield a note on the operators that multiply matrices and whose shapes do not tell how much, if others' do."""
    kernel_names(trace)
    rows = trace.con.execute(
        f"""
        WITH products AS (
        SELECT op.name, sum(work.dur_ns)::DOUBLE AS ns, op.flops IS NULL AS is_unknown
        FROM spans work JOIN kernel_names USING (name)
        JOIN spans op ON op.rank = work.rank AND op.trace_id = work.trace_id AND op.span_id = work.parent_id
        WHERE work.level = {int(Level.KERNEL)} AND class IN {MATRIX} AND op.kind = '{Kind.OP}'
        GROUP BY op.name, op.flops IS NULL
        )
        SELECT name, ns, EXISTS (FROM products WHERE NOT is_unknown) FROM products
        WHERE is_unknown ORDER BY ns DESC, name
        """
    ).fetchall()
    named = [(name, ns / max(1, work.ns)) for name, ns, others in rows if others]
    large = ", ".join(f"{plain(name)[:60]} ({100 * share:.0f} %)" for name, share in named if share >= MIN_NAMED_SHARE)
    if large:
        text = f"how many operations they do is unknown, because their shapes do not tell: {large} of device time"
        yield Finding(Severity.NOTE, "operations", text)


def _doubts(trace: Trace) -> Iterator[Finding]:
    """Yield what is impossible or missing in the trace, and what does not add up in its account."""
    accounted = account.of(trace)
    for doubt in accounted.doubts:
        yield Finding(Severity.WARNING, doubt.subject, doubt.text, doubt.best_grade)
    for text in accounted.violations:
        yield Finding(Severity.WARNING, "account", text, "B")


class _Work(NamedTuple):
    """Device work of all steps."""

    spans: int
    ns: int


_IS_LAUNCH = f"device IS NULL AND kind IN ('{Kind.LAUNCH}', '{Kind.CALL}') AND correlation_id IS NOT NULL"
_LAUNCHES = f"""
    launches AS (
        SELECT rank, process, correlation_id, min(start_ns) AS start_ns FROM spans WHERE {_IS_LAUNCH} GROUP BY ALL
    )
"""
_LAUNCH_CONDITION = (
    "launches.rank = spans.rank AND launches.correlation_id = spans.correlation_id "
    "AND coalesce(spans.process = launches.process, true)"
)
"""Join condition of a span and its launch; an unknown process matches every process."""

_BY_PROFILER = f"kind = '{Kind.OVERHEAD}' AND coalesce(attributes ->> '$.by', '') <> 'cuda'"


def _launches(trace: Trace, work: _Work) -> Iterator[Finding]:
    """Yield a finding on device work without a launch in the trace, and on how much of it is at the start."""
    ((missing, ns, early),) = trace.con.execute(
        f"""
        WITH {_LAUNCHES}, first_launches AS (SELECT rank, min(start_ns) AS start_ns FROM launches GROUP BY rank)
        SELECT count(*), coalesce(sum(dur_ns), 0)::BIGINT,
               count(*) FILTER (first_launches.start_ns IS NULL OR spans.start_ns < first_launches.start_ns)
        FROM spans ANTI JOIN launches ON {_LAUNCH_CONDITION}
        LEFT JOIN first_launches ON first_launches.rank = spans.rank
        WHERE level = {int(Level.KERNEL)}
        """
    ).fetchall()
    if missing == work.spans and not trace.con.execute(f"SELECT 1 FROM spans WHERE {_IS_LAUNCH} LIMIT 1").fetchall():
        return  # there is no launch at all: that is a doubt of its own
    if not missing:
        yield Finding(Severity.GOOD, "launches", f"all {work.spans} kernels and copies have a launch")
        return
    share = ns / max(work.ns, 1)
    text = (
        f"{missing} of {work.spans} kernels and copies ({100 * share:.3g} % of their time) have no launch in the trace"
    )
    if early:
        text += f"; {early} of them began before its first launch: they were launched before the recording began"
    yield Finding(
        Severity.WARNING,
        "launches",
        text,
        "D" if share > MIN_USELESS_SHARE else "C" if share > MIN_DOUBTFUL_SHARE else "B",
    )


def _layers(trace: Trace, work: _Work) -> Iterator[Finding]:
    """State the share of device time whose layer is known exactly, by inference, or not at all."""
    rows = trace.con.execute(
        f"SELECT coalesce(grade, '{Grade.UNKNOWN}'), sum(dur_ns)::BIGINT FROM spans "
        f"WHERE level = {int(Level.KERNEL)} GROUP BY 1"
    ).fetchall()
    ns_by_grade: Mapping[str, int] = dict(rows)
    if not trace.con.execute(f"SELECT 1 FROM spans WHERE level = {int(Level.LAYER)} LIMIT 1").fetchall():
        text = "no layer was recorded: device work is known by operator only (torch.profiler: with_modules, with_stack)"
        yield Finding(
            Severity.NOTE, "layers", frameworks.in_words_of(trace.run.framework, text) or text.partition(" (")[0], "B"
        )
        return
    shares = {grade: ns_by_grade.get(grade.value, 0) / max(work.ns, 1) for grade in Grade}
    text = "device time by layer: " + ", ".join(f"{100 * share:.3g} % {grade}" for grade, share in shares.items())
    unknown = shares[Grade.UNKNOWN]
    best_grade = "C" if unknown > MIN_USELESS_SHARE else "B" if unknown > MIN_DOUBTFUL_SHARE else "A"
    yield Finding(Severity.WARNING if best_grade != "A" else Severity.GOOD, "layers", text, best_grade)


def _clocks(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if device work begins before its launch: host and device were not on one clock."""
    ((early, worst),) = trace.con.execute(
        f"""
        WITH {_LAUNCHES}
        SELECT count(*), max(launches.start_ns - spans.start_ns) FROM spans JOIN launches ON {_LAUNCH_CONDITION}
        WHERE level = {int(Level.KERNEL)} AND spans.start_ns + {MIN_EARLY_NS} < launches.start_ns
        """
    ).fetchall()
    if early:
        text = f"{early} kernels and copies begin before their launch, by up to {worst / 1e3:.4g} µs: clocks disagree"
        yield Finding(Severity.WARNING, "clocks", text, "C")


def _overhead(trace: Trace) -> Iterator[Finding]:
    """Yield a finding on the profiler's own work, as recorded by the profiler."""
    ((count, ns, window),) = trace.con.execute(
        f"SELECT count(*) FILTER ({_BY_PROFILER}), coalesce(sum(dur_ns) FILTER ({_BY_PROFILER}), 0)::BIGINT, "
        "max(start_ns + dur_ns) - min(start_ns) FROM spans"
    ).fetchall()
    if count:
        share = ns / max(window, 1)
        text = (
            f"{count} records of the profiler's own work, {ns / 1e6:.4g} ms ({100 * share:.3g} % of the recorded time)"
        )
        is_heavy = share > MAX_OVERHEAD
        yield Finding(Severity.WARNING if is_heavy else Severity.NOTE, "overhead", text, "C" if is_heavy else "A")


def _stacks(trace: Trace) -> Iterator[Finding]:
    """Yield a finding if stacks were recorded, which slows the host; its weight is how long the device waited for it.

    The device waits for the host from the end of its last work to the launch of the next.
    """
    sources = [
        source for run in (trace.run, *trace.run.ranks) if run.imported is not None for source in run.imported.sources
    ]
    counts = {name: max((source.skipped.get(name, 0) for source in sources), default=0) for name in STACKS}
    recorded = [name for name, count in counts.items() if count]
    if not recorded:
        return
    ((idle,),) = trace.con.execute(
        f"""
        WITH {_LAUNCHES}, work AS (
            SELECT spans.rank, device, spans.start_ns, spans.start_ns + dur_ns AS end_ns,
                   launches.start_ns AS launch_ns,
                   max(spans.start_ns + dur_ns) OVER (PARTITION BY spans.rank, device ORDER BY spans.start_ns
                                                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
            FROM spans LEFT JOIN launches ON {_LAUNCH_CONDITION}
            WHERE level = {int(Level.KERNEL)} AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}')
        ),
        windows AS (
            SELECT max(end_ns) - min(start_ns) AS ns,
                   sum(greatest(0, least(start_ns, launch_ns) - until_ns)) FILTER (launch_ns IS NOT NULL) AS idle_ns
            FROM work GROUP BY rank, device
        )
        SELECT coalesce(sum(idle_ns) / nullif(sum(ns), 0), 0)::DOUBLE FROM windows
        """
    ).fetchall()
    stacks = STACKS[recorded[0]]
    best_grade = stacks.best_grade if idle >= MIN_DECISIVE_WAIT else "B" if idle >= MIN_STACK_WAIT else "A"
    text = (
        f"{stacks.description} recorded ({counts[recorded[0]]} frames, {stacks.option}): {stacks.effect}, and for "
        f"{100 * idle:.0f} % of the time the device waited for a launch; record without stacks before acting on that"
    )
    yield Finding(Severity.NOTE if best_grade == "A" else Severity.WARNING, "stacks", text, best_grade)
