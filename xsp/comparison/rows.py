"""The comparison itself: series of both runs, aligned, tested, and put into one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import duckdb

from xsp import table
from xsp.comparison import series
from xsp.comparison.align import Pair, align, by_name
from xsp.comparison.comparable import Difference, differences, same_work
from xsp.comparison.evidence import SLOWER, Evidence, adjusted, evidence, verdict
from xsp.comparison.series import Series
from xsp.comparison.taken import memory
from xsp.errors import AnalysisError
from xsp.span import Column
from xsp.summary import trimmed_mean
from xsp.trace import Trace

OTHER_WORK = "cannot tell (the steps do different work)"
ONLY_A, ONLY_B = "only in A", "only in B"

Align = Callable[[Sequence[Series], Sequence[Series]], list[Pair]]
_SECTIONS: tuple[tuple[str, Callable[[Trace], list[Series]], Align], ...] = (
    ("step", series.steps, align),
    ("call", series.phases, align),
    ("layer", series.layers, align),
    ("layer on device", series.layers_on_device, align),
    ("kernel", series.kernels, by_name),
    ("operator", series.operators, by_name),
)


@dataclass(frozen=True)
class Row:
    """One line of a comparison; times in milliseconds per step, A first. What was not measured is None."""

    section: str
    name: str
    type: str | None
    aligned: str | None
    """The evidence that the two are the same: key, name, type; None where one run has no counterpart."""
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
    a_steps: int | None = None
    b_steps: int | None = None
    a_calls: float | None = None
    b_calls: float | None = None
    a_mib: float | None = None
    b_mib: float | None = None
    change_mib: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    a: str
    b: str
    differences: list[Difference]
    """In what the runs differ beside their times."""
    rows: list[Row] = field(repr=False)
    """Of the sections step, call, layer, layer on device, kernel, operator and memory, in this order."""

    @property
    def step(self) -> Row:
        """The row of the whole step."""
        return self.rows[0]

    def section(self, name: str) -> list[Row]:
        """Return the rows of a section."""
        return [row for row in self.rows if row.section == name]

    def slower_by(self, percent: float) -> bool:
        """Return whether the step is slower, by that much or more at the lower end of its interval."""
        step = self.step
        return step.verdict == SLOWER and step.low_percent is not None and step.low_percent >= percent

    def relation(self, section: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows as a relation, of one section or all: `.df()`, `.pl()`, `.show()`."""
        con = table.connect()
        columns = [Column(each.name, _TYPES.get(each.name, "DOUBLE"), "") for each in fields(Row)]
        table.create(con, "comparison", columns)
        rows = self.rows if section is None else self.section(section)
        table.insert(con, "comparison", [tuple(vars(row).values()) for row in rows], columns)
        return con.sql("SELECT * FROM comparison")


_TYPES = {
    **dict.fromkeys(("section", "name", "type", "aligned", "verdict"), "VARCHAR"),
    **dict.fromkeys(("a_steps", "b_steps"), "INTEGER"),
}


def compare(a: Trace, b: Trace) -> Comparison:
    """Compare two runs: what B takes more or less than A, and how surely.

    Steps are those of the kind that takes most of a run's time; layers are aligned by their place in the structure,
    then by name, then by type and order; kernels and operators by name. For the verdicts see `RULE`.

    Raises:
        AnalysisError: a run holds no step, or the two have nothing in common.
    """
    found = differences(a, b)
    alike = same_work(a, b)
    rows: list[Row] = []
    for section, of, paired in _SECTIONS:
        rows += _rows(section, paired(of(a), of(b)), alike or section != "step")
    inside = [row for row in rows if row.section not in ("step", "call")]
    if inside and not any(row.aligned for row in inside) and {ONLY_A, ONLY_B} <= {row.verdict for row in inside}:
        raise AnalysisError(
            f"{a.name!r} and {b.name!r} have no layer, kernel or operator in common: nothing to compare"
        )
    rows += [
        Row("memory", name, kind, "name" if None not in (one, other) else None, a_mib=one, b_mib=other,
            change_mib=other - one if one is not None and other is not None else None, verdict=_more(one, other))
        for name, kind, one, other in memory(a, b)
    ]  # fmt: skip
    return Comparison(a.name, b.name, found, rows)


def _rows(section: str, pairs: Sequence[Pair], judged: bool) -> list[Row]:
    """Return the rows of a section; their p-values are adjusted for each other."""
    tested = [evidence(pair.a.values, pair.b.values) if pair.a and pair.b else None for pair in pairs]
    p_values = adjusted([each.p if each is not None else None for each in tested])
    return [
        _both(section, pair.a, pair.b, pair.by, found, p, judged)
        if pair.a is not None and pair.b is not None and found is not None
        else _alone(section, pair)
        for pair, found, p in zip(pairs, tested, p_values, strict=True)
    ]


def _both(section: str, a: Series, b: Series, by: str | None, found: Evidence, p: float | None, judged: bool) -> Row:
    repeats = min(len(a.values), len(b.values))
    return Row(
        section=section,
        name=_changed(a.name, b.name) or "",
        type=_changed(a.type, b.type),
        aligned=by,
        a_ms=found.a / 1e6,
        b_ms=found.b / 1e6,
        change_ms=found.change / 1e6,
        low_ms=_scaled(found.low, 1e6),
        high_ms=_scaled(found.high, 1e6),
        change_percent=_percent(found.change, found.a),
        low_percent=_percent(found.low, found.a),
        high_percent=_percent(found.high, found.a),
        detectable_percent=_percent(found.detectable, found.a),
        p_adjusted=p,
        a_steps=len(a.values),
        b_steps=len(b.values),
        a_calls=a.calls,
        b_calls=b.calls,
        verdict=verdict(found, p, repeats) if judged else OTHER_WORK,
    )


def _alone(section: str, pair: Pair) -> Row:
    """Return the row of what only one run has."""
    row = pair.a or pair.b
    assert row is not None
    took = trimmed_mean(row.values) / 1e6
    if pair.a is not None:
        return Row(
            section, row.name, row.type, None, a_ms=took, a_steps=len(row.values), a_calls=row.calls, verdict=ONLY_A
        )
    return Row(section, row.name, row.type, None, b_ms=took, b_steps=len(row.values), b_calls=row.calls, verdict=ONLY_B)


def _changed(a: str | None, b: str | None) -> str | None:
    return b if a == b else f"{a} → {b}"


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _percent(value: float | None, of: float) -> float | None:
    return None if value is None or not of else 100 * value / of


def _more(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ONLY_B if a is None else ONLY_A
    return "same" if a == b else "more" if b > a else "less"
