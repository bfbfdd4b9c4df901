"""The comparison itself: series of both sides, aligned, tested, and combined into one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import duckdb

from xsp import table
from xsp.comparison import evidence, parts, series
from xsp.comparison.align import Align, MatchedPair, align, by_name, merge_runs
from xsp.comparison.comparable import SettingDifference, differences, have_same_work
from xsp.comparison.evidence import FASTER, FASTER_HERE, NEGLIGIBLE, SLOWER, Evidence, Repeats
from xsp.comparison.parts import memory
from xsp.comparison.series import RowTimes
from xsp.errors import AnalysisError, UsageError
from xsp.schema import Column
from xsp.store.trace import Trace
from xsp.texts import percent_of

OTHER_WORK = "cannot tell (the steps do different work)"
ONLY_A, ONLY_B = "only in A", "only in B"

_PARTS: tuple[tuple[str, Callable[[Trace], list[RowTimes]]], ...] = (
    ("phase", parts.phases),
    ("idle", parts.idle),
    ("launch", parts.launches),
)
_SECTIONS: tuple[tuple[str, Callable[[Trace], list[RowTimes]], Align], ...] = (
    ("kernel class", series.kernel_classes, by_name),
    ("operator on device", series.operators_on_device, by_name),
    ("call", series.phases, align),
    ("layer", series.layers, align),
    ("layer on device", series.layers_on_device, align),
    ("kernel", series.kernels, by_name),
    ("operator", series.operators, by_name),
)

_ALIGNED = ("layer", "layer on device", "kernel", "operator")
"""Sections in which two programs must have something in common to be comparable."""


@dataclass(frozen=True)
class ComparedRow:
    """One row of a comparison; times in milliseconds per step, A first. Values that were not measured are None."""

    section: str
    name: str
    type: str | None
    aligned: str | None
    """The evidence that the two are the same: key, name, type; None if one side has no counterpart."""
    a_ms: float | None = None
    b_ms: float | None = None
    change_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    change_percent: float | None = None
    low_percent: float | None = None
    high_percent: float | None = None
    detectable_percent: float | None = None
    p_adjusted: float | None = None
    test: str | None = None
    """The test behind the interval and p: Yuen's test, ranks or pairs."""
    a_steps: int | None = None
    b_steps: int | None = None
    a_calls: float | None = None
    b_calls: float | None = None
    a_mib: float | None = None
    b_mib: float | None = None
    change_mib: float | None = None
    verdict: str = ""
    a_runs: int | None = None
    b_runs: int | None = None
    a_between_percent: float | None = None
    """Standard deviation of the side's runs in percent of their mean; None for a single run."""
    b_between_percent: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A comparison of two runs, or of several runs per side."""

    a: str
    """The name of the run, or the distinct names of several runs."""
    b: str
    a_runs: int
    b_runs: int
    repeats: Repeats
    """The kind of repeats, which determines what the verdicts refer to."""
    differences: list[SettingDifference]
    """Differences between the runs other than their times."""
    rows: list[ComparedRow] = field(repr=False)
    """Rows of the sections step, loop, phase, idle, launch, kernel class, operator on device, call, layer, layer on
    device, kernel, operator and memory, in this order."""
    has_same_work: bool
    """Whether the steps of both sides do the same work; otherwise no verdict on them is possible."""

    @property
    def step(self) -> ComparedRow:
        """The row of the whole step."""
        return self.rows[0]

    def section(self, name: str) -> list[ComparedRow]:
        """Return the rows of a section."""
        return [row for row in self.rows if row.section == name]

    def slower_by(self, percent: float) -> bool:
        """Return whether the step is slower by `percent` or more at the lower end of its interval.

        With one run per side, the possible difference between two starts is subtracted first.
        """
        low = self.step.low_percent
        return self.step.verdict == SLOWER and low is not None and low - 100 * self.repeats.start_spread >= percent

    def not_slower_by(self, percent: float) -> bool:
        """Return whether the step is known not to be slower by `percent`: the upper end of its interval is below it.

        With one run per side, the possible difference between two starts is added first. The result is also true if B
        was faster. Changes below 1 % do not count. If neither this nor `slower_by` holds, the answer is unknown.
        """
        step = self.step
        if step.high_percent is None or not self.has_same_work:
            return False
        upper_percent = (100 + step.high_percent) * (1 + self.repeats.start_spread) - 100
        return upper_percent < max(percent, 100 * NEGLIGIBLE) or step.verdict in (FASTER, FASTER_HERE)

    def relation(self, section: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows of one section or of all as a relation: `.df()`, `.pl()`, `.show()`."""
        return self.in_engine(section)[1]

    def in_engine(self, section: str | None = None) -> tuple[duckdb.DuckDBPyConnection, duckdb.DuckDBPyRelation]:
        """Return the rows of one section or of all as a relation, with the engine that holds it."""
        con = table.connect()
        columns = [Column(column.name, _TYPES.get(column.name, "DOUBLE"), "") for column in fields(ComparedRow)]
        table.create(con, "comparison", columns)
        rows = self.rows if section is None else self.section(section)
        table.insert(con, "comparison", [tuple(vars(row).values()) for row in rows], columns)
        return con, con.sql("SELECT * FROM comparison")


_TYPES = {
    **dict.fromkeys(("section", "name", "type", "aligned", "test", "verdict"), "VARCHAR"),
    **dict.fromkeys(("a_steps", "b_steps", "a_runs", "b_runs"), "INTEGER"),
}


def compare(a: Trace | Sequence[Trace], b: Trace | Sequence[Trace], *, turns: int | None = None) -> Comparison:
    """Compare two programs by their runs: how much slower or faster B is than A, with confidence intervals.

    Layers are aligned by their place in the structure, then by name, then by type and order; kernels and operators by
    name. With several runs per side each run counts once, and the intervals contain the differences between starts of
    the same program. With one run per side they do not, and the verdicts are about these two runs only: see
    `Comparison.repeats`.

    Args:
        a: the run before, or several of the same program.
        b: the run after, or several.
        turns: maximal number of turns, if the runs were compared after each turn; None if their number was fixed.

    Raises:
        AnalysisError: a run has no step, or the sides have no layer, kernel or operator in common.
        UsageError: a side has no run, or the number of turns is invalid.
    """
    runs_a, runs_b = ([side] if isinstance(side, Trace) else list(side) for side in (a, b))
    if not runs_a or not runs_b:
        raise UsageError("compare: each side needs a run")
    has_several = max(len(runs_a), len(runs_b)) > 1
    repeats = evidence.turn_repeats(turns) if turns is not None else evidence.RUNS if has_several else evidence.STEPS
    changes = differences(runs_a, runs_b)
    is_comparable = have_same_work([*runs_a, *runs_b])
    steps, loops = series.best_common_steps([series.steps(run) for run in (*runs_a, *runs_b)])
    rows = _section("step", steps[: len(runs_a)], steps[len(runs_a) :], align, repeats, is_comparable)
    if all(loops):
        rows += _section("loop", loops[: len(runs_a)], loops[len(runs_a) :], align, repeats, is_comparable)
    for section, figures in _PARTS:
        rows += _section(
            section, [figures(run) for run in runs_a], [figures(run) for run in runs_b], by_name, repeats, is_comparable
        )
    for section, figures, pairing in _SECTIONS:
        rows += _section(
            section, [figures(run) for run in runs_a], [figures(run) for run in runs_b], pairing, repeats, True
        )
    aligned = [row for row in rows if row.section in _ALIGNED]
    if aligned and not any(row.aligned for row in aligned) and {ONLY_A, ONLY_B} <= {row.verdict for row in aligned}:
        raise AnalysisError(
            f"{runs_a[0].name!r} and {runs_b[0].name!r} have no layer, kernel or operator in common: nothing to compare"
        )
    rows += [
        ComparedRow("memory", name, kind, "name" if None not in (old, new) else None, a_mib=old, b_mib=new,
            change_mib=new - old if old is not None and new is not None else None, verdict=_size_verdict(old, new))
        for name, kind, old, new in memory(runs_a, runs_b)
    ]  # fmt: skip
    return Comparison(_names(runs_a), _names(runs_b), len(runs_a), len(runs_b), repeats, changes, rows, is_comparable)


def _names(runs: Sequence[Trace]) -> str:
    return ", ".join(dict.fromkeys(run.name for run in runs))


def _section(
    section: str,
    a: list[list[RowTimes]],
    b: list[list[RowTimes]],
    pairing: Align,
    repeats: Repeats,
    is_comparable: bool,
) -> list[ComparedRow]:
    """Return the rows of a section.

    Args:
        section: name of the section.
        a: the rows of each run of side A.
        b: likewise, of side B.
        pairing: function that pairs the rows of two runs.
        repeats: how changes are judged.
        is_comparable: whether the rows get a verdict: False if the steps do different work.
    """
    if repeats.unit == "step":
        return _rows(section, pairing(a[0], b[0]), repeats, is_comparable)
    rows_a, rows_b = (merge_runs(runs, pairing, absent_is_zero=pairing is by_name) for runs in (a, b))
    return _rows(section, pairing(rows_a, rows_b), repeats, is_comparable)


def _rows(section: str, pairs: Sequence[MatchedPair], repeats: Repeats, is_comparable: bool) -> list[ComparedRow]:
    """Return the rows of a section; their p-values are adjusted for each other."""
    results = [repeats.evidence(pair.a.values, pair.b.values) if pair.a and pair.b else None for pair in pairs]
    p_values = repeats.adjusted([result.p if result is not None else None for result in results])
    return [
        _common_row(section, pair.a, pair.b, pair.evidence, result, p, repeats, is_comparable)
        if pair.a is not None and pair.b is not None and result is not None
        else _unmatched_row(section, pair, repeats)
        for pair, result, p in zip(pairs, results, p_values, strict=True)
    ]


def _common_row(
    section: str,
    a: RowTimes,
    b: RowTimes,
    alignment: str | None,
    result: Evidence,
    p: float | None,
    repeats: Repeats,
    is_comparable: bool,
) -> ComparedRow:
    return ComparedRow(
        section=section,
        name=_change_text(a.name, b.name) or "",
        type=_change_text(a.type, b.type),
        aligned=alignment,
        a_ms=result.a / 1e6,
        b_ms=result.b / 1e6,
        change_ms=result.change / 1e6,
        low_ms=_scaled(result.low, 1e6),
        high_ms=_scaled(result.high, 1e6),
        change_percent=percent_of(result.change, result.a),
        low_percent=percent_of(result.low, result.a),
        high_percent=percent_of(result.high, result.a),
        detectable_percent=percent_of(result.detectable, result.a),
        p_adjusted=p,
        test=result.test,
        a_steps=_steps(a),
        b_steps=_steps(b),
        a_calls=a.calls,
        b_calls=b.calls,
        verdict=_verdict(section, result, p, min(len(a.values), len(b.values)), repeats)
        if is_comparable
        else OTHER_WORK,
        a_runs=_runs(a),
        b_runs=_runs(b),
        a_between_percent=_spread_percent(a),
        b_between_percent=_spread_percent(b),
    )


def _verdict(section: str, result: Evidence, p: float | None, count: int, repeats: Repeats) -> str:
    if result.p is None and section in dict(_PARTS):  # one figure per run, so one run per side cannot be tested
        return _size_verdict(result.a, result.b)
    return repeats.verdict(result, p, count)


def _unmatched_row(section: str, pair: MatchedPair, repeats: Repeats) -> ComparedRow:
    """Return the row of a pair that only one side has."""
    row = pair.a or pair.b
    assert row is not None
    time_ms = repeats.figure(row.values) / 1e6
    if pair.a is not None:
        return ComparedRow(
            section, row.name, row.type, None, a_ms=time_ms, a_steps=_steps(row), a_calls=row.calls, verdict=ONLY_A,
            a_runs=_runs(row), a_between_percent=_spread_percent(row),
        )  # fmt: skip
    return ComparedRow(
        section, row.name, row.type, None, b_ms=time_ms, b_steps=_steps(row), b_calls=row.calls, verdict=ONLY_B,
        b_runs=_runs(row), b_between_percent=_spread_percent(row),
    )  # fmt: skip


def _steps(row: RowTimes) -> int:
    return row.repeats if row.steps is None else row.steps


def _runs(row: RowTimes) -> int:
    return 1 if row.steps is None else len(row.values)


def _spread_percent(row: RowTimes) -> float | None:
    """Return the standard deviation of a side's runs in percent of their mean; None for a single run."""
    if _runs(row) < 2 or not (mean := statistics.fmean(row.values)):
        return None
    return 100 * statistics.stdev(row.values) / mean


def _change_text(a: str | None, b: str | None) -> str | None:
    return b if a == b else f"{a} → {b}"


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _size_verdict(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ONLY_B if a is None else ONLY_A
    return "same" if a == b else "more" if b > a else "less"
