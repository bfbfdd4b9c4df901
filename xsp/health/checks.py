"""Checks for missing or doubtful data in a trace, before any figure is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from xsp import account
from xsp.health import device as devicehealth
from xsp.health import headline
from xsp.health import samples as samplehealth
from xsp.health.finding import Finding, Severity
from xsp.levels import depth, recording, rung_name
from xsp.run import MISSING, Budget, Steps
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import TOTAL_NS, has_shapes, kernels
from xsp.texts import share_text


class Grade(NamedTuple):
    """How reliable a trace is, from A to F, and the findings that lower the grade."""

    letter: str
    reasons: list[str]


MIN_P90_EXCESS = 0.25
"""Minimum distance of the 90th percentile from the median, as a share of it, for a warning."""

MIN_KERNEL_GAP = 0.03
"""Minimum difference between the time of kernels without a device and that of operators, as a share, for a note."""

MAX_RANKS_NAMED = 20
"""Maximum number of missing ranks that are named."""

ENOUGH_STEPS = 5
"""Minimum number of timed steps at a rung for a useful interval."""


def health(trace: Trace) -> list[Finding]:
    """Return all findings on a trace, the most important first; computed once. Never empty."""
    return list(trace.cached("findings", lambda: _findings(trace)))


def _findings(trace: Trace) -> list[Finding]:
    notes = trace.run.notes
    findings = [
        *_run(trace),
        *_ranks(trace),
        *_deliveries(trace),
        *headline.findings(trace),
        *_budget(trace),
        *_rungs(trace),
        *_parents(trace),
        *_structure(trace),
        *_library(trace),
        *devicehealth.findings(trace),
        *samplehealth.findings(trace),
        *(Finding(Severity.WARNING, note.source, note.text, "C") for note in notes if note.source == MISSING),
        *(Finding(Severity.NOTE, note.source, note.text) for note in notes if note.source != MISSING),
        *(Finding(Severity.NOTE, name, f"was not collected: {reason}") for name, reason in trace.run.absent.items()),
    ]
    order = [Severity.WARNING, Severity.NOTE, Severity.GOOD]
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def grade(findings: Sequence[Finding]) -> Grade:
    """Return the grade of a trace with these findings: the worst of their best grades, with the texts behind it."""
    letter = max((finding.best_grade for finding in findings), default="A")
    return Grade(letter, [finding.text for finding in findings if finding.best_grade == letter != "A"])


def _run(trace: Trace) -> list[Finding]:
    findings = []
    steps = trace.run.steps or Steps.of({})
    if trace.run.finished is False:
        stored = _count(trace, f"SELECT count(*) FROM spans WHERE kind = '{Kind.STEP}'")
        text = f"was interrupted; {stored} steps were stored and are shown"
        findings.append(Finding(Severity.WARNING, "run", text, "B"))
    if steps.lost:
        is_single = steps.lost == 1
        text = f"{steps.lost} {'step was' if is_single else 'steps were'} recorded but not stored"
        findings.append(Finding(Severity.WARNING, "run", text, "C"))
    if steps.skipped:
        text = f"{steps.skipped} steps ran inside other steps and were not recorded"
        findings.append(Finding(Severity.NOTE, "run", text))
    failed = _count(trace, f"SELECT count(*) FROM spans WHERE kind = '{Kind.STEP}' AND status <> 'ok'")
    if failed:
        findings.append(
            Finding(Severity.NOTE, "run", f"{failed} steps raised or were not closed; their times do not count")
        )
    return findings


def _ranks(trace: Trace) -> list[Finding]:
    """Return findings on the rank of the figures, and on missing ranks of a distributed program."""
    ranks = trace.run.ranks
    if not ranks:
        return []
    findings = []
    present_ranks, size = {rank.rank or 0 for rank in ranks}, ranks[0].world_size or 1
    absent_ranks = (rank for rank in range(size) if rank not in present_ranks)  # an imported run may claim any size
    missing = list(islice(absent_ranks, MAX_RANKS_NAMED))
    if missing:
        ellipsis = ", …" if next(absent_ranks, None) is not None else ""
        text = f"missing {size - len(present_ranks)} of {size} ranks: {', '.join(map(str, missing))}{ellipsis}"
        findings.append(Finding(Severity.WARNING, "ranks", text, "B"))
    if len(ranks) > 1:
        rank = min(present_ranks)
        text = f"{len(ranks)} ranks are in this trace; the merged step and its figures are those of rank {rank}"
        findings.append(Finding(Severity.NOTE, "ranks", text))
    return findings


def _deliveries(trace: Trace) -> list[Finding]:
    """Return findings on the delivery of the run's traces."""
    findings = []
    for delivery in trace.run.delivery:
        messages = "; ".join(delivery.messages)
        if delivery.left:
            text = f"{delivery.left} traces were not delivered ({messages}); `xsp export --resume` sends them"
            findings.append(Finding(Severity.WARNING, "delivery", text))
        if delivery.rejected:
            text = f"{delivery.rejected} spans were rejected ({messages})"
            findings.append(Finding(Severity.WARNING, "delivery", text))
        if not delivery.left and not delivery.rejected:
            text = f"{delivery.spans} spans of {delivery.steps} steps are at {delivery.endpoint}"
            findings.append(Finding(Severity.GOOD, "delivery", text))
    return findings


def _budget(trace: Trace) -> Iterator[Finding]:
    """Yield whether each run of a trace kept its budget; nothing for runs without one."""
    for run in trace.run.rank_runs:
        budget = run.budget
        if run.finished and budget is not None and budget.asked_percent is not None:
            yield _budget_kept(budget, budget.asked_percent)
            for rung, steps in budget.left_out.items():
                reason = f"it allows one in {steps} steps" if steps else "shallower levels already exceed the budget"
                yield Finding(Severity.NOTE, recording(rung), f"was left out because of the budget: {reason}")


def _budget_kept(budget: Budget, asked_percent: float) -> Finding:
    spent, low, high = budget.overhead_percent, budget.low_percent, budget.high_percent
    if spent is None or low is None or high is None:
        return Finding(Severity.NOTE, "budget", "too few steps ran to measure the overhead of profiling")
    if budget.given_ns:
        text = (
            f"recording added {spent:.2f} % to the loop's own time [{low:.2f}, {high:.2f}]: the budget of "
            f"{asked_percent:g} %, and {budget.given_ns / 1e9:.2g} s for the first steps, from the second that "
            f"profiling may take beyond it; --budget {asked_percent:g}% omits them"
        )
        return Finding(Severity.NOTE, "budget", text)
    text = f"profiling added {spent:.2f} % to the loop's own time [{low:.2f}, {high:.2f}], "
    text += f"the budget is {asked_percent:g} %"
    if spent <= asked_percent:
        return Finding(Severity.GOOD, "budget", text)
    text += (
        ": the first steps of each level set cost more than the budget allowed so far; run more steps or fewer levels"
    )
    return Finding(Severity.WARNING if low > asked_percent else Severity.NOTE, "budget", text)


def _rungs(trace: Trace) -> list[Finding]:
    if trace.run.empty is not None and not trace.rungs:  # else it does not load: it has requests
        text = f"none was recorded: only requests and steps of engines are known; {trace.run.empty}"
        return [Finding(Severity.WARNING, "steps", text, "B")]
    findings = []
    rungs = trace.rungs
    measured = {rung_name(rung.level) for rung in rungs}
    for name in trace.run.rungs:
        if name not in measured:
            text = f"no step with {depth(name)} was recorded: run longer, or with a larger --budget"
            # the kernels of a processor only name what its operators call
            best = "B" if name == rung_name(Level.KERNEL) and not trace.run.machine.devices else "C"
            findings.append(Finding(Severity.WARNING, recording(name), text, best))
    if rung_name(Level.OP) in measured and trace.run.imported is None and not has_shapes(trace):
        text = "no recorded step has shapes, which some of it needs: run longer, or with a larger --budget"
        findings.append(Finding(Severity.WARNING, "advice", text, "B"))
    few = [f"{depth(rung.level)} ({rung.steps})" for rung in rungs if rung.steps < ENOUGH_STEPS]
    if few:
        findings.append(Finding(Severity.NOTE, "repeats", f"few steps, so wide intervals, for {', '.join(few)}"))
    findings += _spread(trace)
    for rung in rungs[1:]:
        if not rung.spans:
            text = "steps with them recorded contain no additional spans"
            findings.append(Finding(Severity.NOTE, recording(rung.level), text))
        elif rung.added_interval is not None and rung.added_interval.low < 0 < rung.added_interval.high:
            text = "their overhead cannot be distinguished from the noise between steps"
            findings.append(Finding(Severity.NOTE, recording(rung.level), text))
    return findings


def _spread(trace: Trace) -> list[Finding]:
    """Return a finding if the 90th percentile of steps is far above the median, and not by what the program does."""
    main = account.of(trace).job
    if (
        main is not None
        and main.course is not None
        and any(slow.period or slow.cost.place for slow in main.course.slow)
    ):
        return []
    rows = trace.con.execute(
        f"SELECT median_ns, p90_ns FROM merged WHERE kind = '{Kind.STEP}' AND p90_ns > {1 + MIN_P90_EXCESS} * median_ns"
    ).fetchall()
    return [
        Finding(
            Severity.WARNING,
            "noise",
            f"one step in ten takes {p90 / median:.1f} times the median or more: did other programs use the machine?",
            "B",
        )
        for median, p90 in rows
    ]


def _parents(trace: Trace) -> list[Finding]:
    """Count host spans without a parent by reason; `xsp.health.device` checks device work."""
    hosts = f"FROM merged WHERE device IS NULL AND kind <> '{Kind.OVERHEAD}'"
    total = _count(trace, f"SELECT count(*) {hosts}")
    rows = trace.con.execute(
        f"""
        WITH orphans AS (SELECT *, CASE
                WHEN json_exists(attributes, '$.candidates') THEN 'ambiguous'
                WHEN thread IS NULL THEN 'threadless'
                WHEN EXISTS (FROM merged AS model WHERE model.level <= {Level.MODEL} AND model.rank = span.rank
                    AND model.process IS NOT DISTINCT FROM span.process AND model.thread = span.thread) THEN 'outside'
                ELSE 'elsewhere' END AS reason
            {hosts.replace("merged", "merged AS span")} AND parent_id IS NULL AND kind <> '{Kind.STEP}'),
        groups AS (SELECT reason, kind, name, count(*) AS spans FROM orphans GROUP BY ALL),
        examples AS (SELECT reason, list(DISTINCT kind ORDER BY kind) AS kinds,
                list(name ORDER BY spans DESC, name)[:3] AS names, count(DISTINCT name) AS names_in_all
            FROM groups GROUP BY reason)
        SELECT reason, count(*), count(DISTINCT (rank, coalesce(process, 0), thread)), any_value(kinds),
            any_value(names), any_value(names_in_all)
        FROM orphans JOIN examples USING (reason) GROUP BY reason ORDER BY count(*) DESC, reason
        """
    ).fetchall()
    orphans = sum(row[1] for row in rows)
    if not total:
        return []
    if not orphans:
        return [Finding(Severity.GOOD, "parents", f"all {total} spans of the merged step found their parent")]
    texts = [_orphan_text(*row) for row in rows]
    text = f"{orphans} of {total} spans have no parent: {'; '.join(texts)}"
    return [Finding(Severity.WARNING, "parents", text, "B" if orphans < total / 10 else "C")]


def _orphan_text(
    reason: str, spans: int, threads: int, kinds: Sequence[str], names: Sequence[str], names_in_all: int
) -> str:
    """Return the text for spans without a parent for one reason: their number, kinds, names, and the reason."""
    listing = ", ".join(names) + (", …" if names_in_all > len(names) else "")
    place = "1 thread" if threads == 1 else f"{threads} threads"
    explanation = {
        "ambiguous": "ran in parallel with others and could have several parents: `xsp run --resolve` runs the "
        "program once more, serialised",
        "threadless": "have no thread, and no span on any thread contains them",
        "outside": f"ran on {place} of the program outside of all other spans there",
        "elsewhere": f"ran on {place} without a step or a call of a model: what started them is unknown",
    }[reason]
    return f"{spans} ({'/'.join(kinds)}: {listing}) {explanation}"


def _structure(trace: Trace) -> list[Finding]:
    """Return findings on spans without a counterpart in the merged step, on shapes, and on true times."""
    findings = []
    differing = _count(
        trace,
        "SELECT count(*) FROM spans ANTI JOIN alike USING (trace_id, step, rung, rank) "
        f"WHERE kind = '{Kind.STEP}' AND timed AND rank = (SELECT min(rank) FROM alike)",
    )
    if differing:
        alike = _count(trace, f"SELECT count(*) FROM alike_spans WHERE kind = '{Kind.STEP}' AND timed")
        text = f"{differing} timed steps differ in structure from the {alike} that the figures come from"
        findings.append(Finding(Severity.NOTE, "steps", text))
    rows = trace.con.execute(
        """
        SELECT rung, count(*), count(DISTINCT step), sum(dur_ns) / 1e6
        FROM alike_spans
        WHERE timed AND key NOT IN (SELECT key FROM merged WHERE key IS NOT NULL) GROUP BY rung ORDER BY rung
        """
    ).fetchall()
    for rung, spans, steps, milliseconds in rows:
        text = (
            f"{spans} spans in {steps} steps ({milliseconds:.3g} ms) have no counterpart in the merged step "
            "and are not averaged in: the steps of the program differ"
        )
        findings.append(Finding(Severity.WARNING, recording(rung), text, "B"))
    described = _count(
        trace, f"SELECT count(*) FROM merged WHERE level = {int(Level.LAYER)} AND input_shapes IS NOT NULL"
    )
    is_single = len(trace.rungs) == 1 and trace.rungs[0].level > Level.MODEL
    if trace.has(Level.LAYER) and not described and trace.run and not (is_single and trace.run.imported):
        text = "no step with these inputs was described: shapes, memory and operations are unknown"
        findings.append(Finding(Severity.NOTE, "shapes", text))
    elif described:
        findings += _varying_inputs(trace)
    unmeasured = _count(trace, "SELECT count(*) FROM merged WHERE true_ns IS NULL")
    if is_single:
        text = "all steps were recorded with the same levels: times are as recorded, their overhead is unknown"
        findings.append(Finding(Severity.NOTE, "true times", text))
    elif unmeasured and trace.rungs:
        text = f"{unmeasured} spans have no true time: no step has them with their level as the deepest one"
        findings.append(Finding(Severity.NOTE, "true times", text))
    return findings


def _varying_inputs(trace: Trace) -> list[Finding]:
    """Return a finding if shapes are those of one step, while times are means over steps with different inputs."""
    rows = trace.con.execute(
        f"""
        SELECT any_value(merged.name), any_value(merged.input_shapes), count(DISTINCT described.input_shapes) AS inputs
        FROM merged JOIN alike_spans described USING (key)
        WHERE merged.kind = '{Kind.FORWARD}' AND merged.input_shapes IS NOT NULL AND described.timed
        GROUP BY key HAVING inputs > 1 ORDER BY inputs DESC, any_value(merged.start_ns) LIMIT 1
        """
    ).fetchall()
    return [
        Finding(
            Severity.NOTE,
            "shapes",
            f"times are means over steps with {inputs} different inputs of {name}; shapes, memory and operations are "
            f"those of one step, with {shapes}",
        )
        for name, shapes, inputs in rows
    ]


def _library(trace: Trace) -> list[Finding]:
    """Return the share of operator time in libraries that report no spans, and whether any time is not covered."""
    if not trace.has(Level.LIBRARY) or trace.has(Level.KERNEL):
        return []
    rows = trace.sql(
        f"WITH {kernels(trace)} SELECT sum(ns), sum(ns) FILTER (library = 'unknown'), sum(ns) FILTER (NOT computes), "
        f"{TOTAL_NS} FROM kernels"
    ).fetchall()
    total, unknown, dispatched, operators = (value or 0 for value in rows[0])
    unknown_share, dispatched_share = (part / total if total else 0.0 for part in (unknown, dispatched))
    text = (
        f"{share_text(unknown_share)} of kernel time is in operators that name no library (MKL, PyTorch's own code), "
        f"{share_text(dispatched_share)} in operators that only call others"
    )
    findings = [Finding(Severity.NOTE, "library", text)]
    if abs(total - operators) > MIN_KERNEL_GAP * operators:
        text = f"kernels add up to {share_text(total / operators if operators else 0.0)} of the operators' time"
        if total >= operators:
            text += ": primitives ran in parallel"
        findings.append(Finding(Severity.NOTE, "kernels", text))
    return findings


def _count(trace: Trace, query: str) -> int:
    return int(trace.con.execute(query).fetchall()[0][0])
