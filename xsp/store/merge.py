"""Merge leveled steps into one true step, and estimate the time that each level of profiling added.

XSP, section III-C: a level's profiler measures its own level accurately and inflates the levels above. So the time
of a span comes from the **own rung** of its level, in which that level was the deepest one on; the time that deeper
levels added to it is the difference between the rungs. Two things extend the paper's method:

- spans of one level nest (modules in modules, operators in operators), so even at its own rung a span includes
  the cost of the spans of its level inside it. The cost of one span follows from whole steps: the time that a
  rung added to the step, divided by the number of spans that it added. This cost times the number of spans
  inside is subtracted.
- every figure is a trimmed mean over the steps of its rung, with a bootstrap interval.

The time of the step itself comes from the steps that ran bare and steady, if the run has them (`loop`): no collector
was on during these, and nothing had been stored just before. A device continues to work after the host's part of a bare
step, so with a device the step time comes from the outermost rung, whose steps end when the device is done.

Only steps of one kind that do the same at the model level (forward, backward and optimizer calls) are merged; they are
called **alike**. Unless a kind is requested, it is the kind that takes most of the program's time, recorded or not.
Their spans are matched by key, the place in the structure. The merged trace is a real step of the deepest rung: the
step of median duration among those with the most common structure.
Steps that are not alike, and spans without a counterpart in the merged step, are not averaged in;
`xsp.health` counts and shows them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from xsp import stats, table
from xsp.device import occupancy
from xsp.run import Run
from xsp.schema import (
    COLUMNS,
    DESCRIPTION_KEYS,
    LOOP_COLUMNS,
    MAX_NESTING,
    MERGED_COLUMNS,
    STEP_KIND,
    Kind,
    Level,
    Rule,
    Span,
)  # fmt: skip
from xsp.store import iterations, reference
from xsp.store.figures import NO_RUNG_OUTSIDE, UNMEASURED, DurationStats, figures_of, on_cold_caches, own_rung
from xsp.store.loop import BARE
from xsp.store.trace import Rung, Trace

DESCRIBED_COLUMNS = (
    "input_shapes", "dtype", "param_bytes", "activation_bytes", "alloc_bytes", "flops", "flops_source",
    "dram_read_bytes", "dram_write_bytes", "bytes_source", "attributes",
)  # fmt: skip
"""Columns that timed steps leave out and that the describing step supplies."""

_BATCH = 256
"""Number of keys whose durations over all steps are held in memory at a time."""


class _Description(NamedTuple):
    """The columns that a describing step supplies, by key."""

    columns_by_key: Mapping[str | None, Mapping[str, Any]]
    has_other_inputs: bool = False
    """Whether the inputs of the describing step differ from the inputs of the template."""


@dataclass
class _Template:
    """The step that the merged trace is based on: its rows, and for each the number of spans inside it by rung."""

    rows: list[Span]
    inner_counts: list[dict[int, int]] = field(default_factory=list)


def true_trace(
    con: duckdb.DuckDBPyConnection, run: Mapping[str, Any], path: Path | None = None, kind: int | None = None
) -> Trace:
    """Return the trace of recorded spans, merged into one step with true times.

    Args:
        con: holds `spans`, and `loop` if there is one; `merged` is made if it is missing.
        run: content of `run.json`; may be empty.
        path: file or directory that the spans were loaded from.
        kind: kind of step to compute figures for, a number in `loop`; default: the kind that takes most time.
    """
    run = Run.of(run)
    if table.has_table(con, "merged"):
        find_alike(con, run, kind)
    else:
        merge(con, run, kind)
    return Trace(con, run, rungs_of(con, run), path)


def merge(con: duckdb.DuckDBPyConnection, run: Run, kind: int | None = None) -> None:
    """Make the table `merged` from the view `spans`.

    Args:
        con: holds `spans`, all recorded spans of a run, columns as in `COLUMNS`; and `loop` if there is one.
        kind: kind of step, see `find_alike`.
        run: content of `run.json`; its devices serve to estimate the occupancy of kernels without a measured one.

    The new table has one row per span of the merged step, with the columns of `COLUMNS` and of
    `MERGED_COLUMNS`. It is empty if no step was recorded.
    """
    table.create(con, "merged", (*COLUMNS, *MERGED_COLUMNS))
    find_alike(con, run, kind)
    template_step = _choose_template(con)
    if template_step is None:
        return
    # whether all steps were recorded at a single rung below the model level, so that no cost can be derived
    rows = con.execute("SELECT count(DISTINCT rung), max(rung), bool_and(timed), count(*) FROM alike").fetchall()
    rungs, rung, timed, steps = rows[0]
    if rungs == 1 and rung > Level.MODEL and timed:
        if steps == 1 and _has_unique_keys(con, template_step):
            _take_single_step(con, template_step)
        else:
            _merge_single_rung(con, template_step)
    else:
        _merge_leveled(con, template_step, run)
    occupancy.fill(con, run)


def _merge_leveled(con: duckdb.DuckDBPyConnection, template_step: tuple[Any, ...], run: Run) -> None:
    """Make `merged` from steps that alternated between the rungs: averages, and true times."""
    template = _template(con, template_step)
    rungs = rungs_of(con, run)
    _count_inside(template, rungs)
    duration_stats = _duration_stats(con, template, rungs, run)
    cold = reference.coldness(con) if rungs and rungs[0].level == BARE else None
    description = _describe(con, template)
    rows = []
    min_ns: dict[str | None, float] = defaultdict(float)  # time of the spans inside: no span is shorter
    for span, inner_counts in reversed(list(zip(template.rows, template.inner_counts, strict=True))):
        if description is not None and span.key in description.columns_by_key:
            span = _with_description(span, description.columns_by_key[span.key], description.has_other_inputs)
        figures = figures_of(span, inner_counts, duration_stats[span.key or ""], rungs, min_ns[span.span_id])
        if span.kind != Kind.STEP and cold is not None:
            figures = on_cold_caches(figures, cold)
        if span.parent_rule == Rule.CONTAINMENT and figures.true_ns is not None and span.thread is not None:
            min_ns[span.parent_id] += figures.true_ns
        rows.append((*span, *figures))
    table.insert(con, "merged", reversed(rows), (*COLUMNS, *MERGED_COLUMNS))


TIMED_FACTOR = 2
"""How many times as much time as one with timed recordings a kind must take to be chosen, if it has none."""


def find_alike(con: duckdb.DuckDBPyConnection, run: Run, kind: int | None = None) -> None:
    """Make the table `alike` of the steps that do the same at the model level, and the view `alike_spans` of
    their spans.

    A step is identified by trace_id, step, rung and rank. In a trace of several ranks the steps of the lowest rank are
    taken; the work of the other ranks is in `spans`. In addition, `alike` holds whether the step was `timed`, the
    `dur_ns` and the `status` of its own span, a hash of its `structure` over all keys, and `on_host`, a map from level
    to the number of spans on the host. So later queries about whole steps need not read the spans again, which may be
    in thousands of files. `step_kind` is the kind of the steps in `loop`; without a loop, that which an importer gave
    them; null if it gave none.

    Args:
        con: holds `spans`, and `loop` if there is one.
        run: content of `run.json`.
        kind: kind of step; default: the recorded kind whose steps took most of the program's time, and do not only
            begin it; see `TIMED_FACTOR`.
    """
    if not table.has_table(con, "loop"):
        table.create(con, "loop", LOOP_COLUMNS)
    beginning = ", ".join(f"({rank}, {number})" for rank, number in iterations.beginning_kinds(con, run))
    beginning_last = f"(min(rank), step_kind) IN ({beginning})," if beginning else ""
    requested = "NULL::INTEGER" if kind is None else str(int(kind))
    con.execute(
        f"""
        CREATE OR REPLACE TABLE alike AS
        WITH steps AS (
            SELECT trace_id, step, rung, rank, any_value(timed) AS timed,
                   bit_xor(hash(key)) FILTER (level = {int(Level.MODEL)} AND kind <> '{Kind.DATA}') AS kind,
                   bit_xor(hash(key)) AS structure,
                   max(dur_ns) FILTER (kind = '{Kind.STEP}') AS dur_ns,
                   max(status) FILTER (kind = '{Kind.STEP}') AS status,
                   histogram(level) FILTER (device IS NULL) AS on_host
            FROM spans WHERE step IS NOT NULL GROUP BY trace_id, step, rung, rank
        ), loop_kinds AS (
            SELECT rank, step, rung, any_value(kind) AS step_kind FROM loop WHERE rung <> {BARE} GROUP BY ALL
            UNION ALL
            SELECT rank, step, rung, any_value({STEP_KIND}) FROM spans
            WHERE kind = '{Kind.STEP}' AND step IS NOT NULL AND NOT EXISTS (FROM loop) GROUP BY ALL
        ), rank_steps AS (
            SELECT steps.*, step_kind FROM steps LEFT JOIN loop_kinds USING (rank, step, rung)
            WHERE rank = (SELECT min(rank) FROM steps)
        ), heaviest AS (
            SELECT step_kind FROM rank_steps
            LEFT JOIN (SELECT kind AS step_kind, sum(steps * dur_ns) AS ns FROM loop
                       WHERE rank = (SELECT min(rank) FROM steps) GROUP BY kind) USING (step_kind)
            GROUP BY step_kind
            ORDER BY {beginning_last}
                     max(ns) * if(bool_or(timed AND status = 'ok'), {TIMED_FACTOR}, 1) DESC NULLS LAST,
                     bool_or(timed AND status = 'ok') DESC,
                     CASE WHEN NOT EXISTS (FROM loop) THEN sum(dur_ns) END DESC NULLS LAST, step_kind LIMIT 1
        ), kind_steps AS (
            SELECT * FROM rank_steps
            WHERE step_kind IS NOT DISTINCT FROM coalesce({requested}, (SELECT step_kind FROM heaviest))
        ), main_work AS (
            SELECT kind FROM kind_steps GROUP BY kind
            -- without a loop (a service): the kind of request that was recorded most deeply
            ORDER BY CASE WHEN NOT EXISTS (SELECT 1 FROM loop) THEN max(rung) END DESC NULLS LAST,
                     coalesce(sum(dur_ns) FILTER (timed AND status = 'ok'), 0) DESC, count(*) DESC,
                     min(step), min(trace_id) LIMIT 1
        )
        SELECT * EXCLUDE (kind) FROM kind_steps WHERE kind IS NOT DISTINCT FROM (SELECT kind FROM main_work)
        """
    )
    con.execute(
        "CREATE OR REPLACE VIEW alike_spans AS SELECT * FROM spans SEMI JOIN alike USING (trace_id, step, rung, rank)"
    )


def rungs_of(con: duckdb.DuckDBPyConnection, run: Run) -> list[Rung]:
    """Return the rungs that have timed steps, outermost first; the first is the rung of bare steps if there are enough.

    Args:
        con: holds `alike` and `loop`.
        run: content of `run.json`.
    """
    steps: dict[int, list[tuple[int, float]]] = {
        rung: list(zip(numbers, durations, strict=True))
        for rung, numbers, durations in con.execute(
            "SELECT rung, list(step ORDER BY step), list(dur_ns::DOUBLE ORDER BY step) FROM alike "
            "WHERE dur_ns IS NOT NULL AND timed AND status = 'ok' GROUP BY rung ORDER BY rung"
        ).fetchall()
    }
    rungs: list[Rung] = []
    bare = iterations.steady_steps(con, run) if steps else []
    if bare:
        rungs.append(Rung(BARE, iterations.step_count(bare), iterations.mean_ns(bare), None, None, 0))
    outer_rung: int | None = None
    for level, recorded in steps.items():
        durations = [dur_ns for _, dur_ns in recorded]
        step_ns = stats.trimmed_mean(durations)
        added = added_interval = None
        pairs: list[float] = []
        if outer_rung is not None:
            # The k-th steps of two rungs ran in the same block, so drift between blocks cancels out.
            outer_ns = [dur_ns for _, dur_ns in steps[outer_rung]]
            pairs = [deep - shallow for deep, shallow in zip(durations, outer_ns, strict=False)]
        elif bare:
            baseline = iterations.nearby_medians(bare, recorded)
            pairs = [deep - shallow for deep, shallow in zip(durations, baseline, strict=True)]
        if pairs:
            added, added_interval = stats.trimmed_mean(pairs), stats.interval(pairs)
        outer = outer_rung if outer_rung is not None else BARE
        # The median number of host spans in a step of a rung, of levels that the next outer rung lacks.
        rows = con.execute(
            "SELECT coalesce(median(spans), 0) FROM (SELECT coalesce(list_sum(list_transform("
            "map_entries(on_host), lambda entry: CASE WHEN entry.key > ? AND entry.key <= ? THEN entry.value END)), 0) "
            "AS spans FROM alike WHERE timed AND rung = ?)",
            [outer, level, level],
        ).fetchall()
        spans = int(rows[0][0])
        # the cost of a span by the calibration: the mean over the collectors that a rung adds; None without any
        costs = [
            cost.ns_per_span for cost in run.costs.values() if outer < cost.level <= level and cost.ns_per_span > 0
        ]
        calibrated_ns = statistics.fmean(costs) if costs else None
        rungs.append(Rung(level, len(durations), step_ns, added, added_interval, spans, calibrated_ns))
        outer_rung = level
    return rungs


def _choose_template(con: duckdb.DuckDBPyConnection) -> tuple[Any, ...] | None:
    """Choose the template step from `alike`: deepest rung, most common structure, median duration; None if it is empty.

    The steps of all equally common structures are pooled: if every step differs from all others, the step of median
    duration is chosen.
    """
    candidates = con.execute(
        """
        WITH deepest AS (
            SELECT * FROM alike
            QUALIFY rank() OVER (ORDER BY status = 'ok' DESC, timed DESC, rung DESC) = 1
        ), common AS (
            SELECT *, count(*) OVER (PARTITION BY structure) AS steps FROM deepest
        )
        SELECT trace_id, step, rung, rank FROM common
        QUALIFY rank() OVER (ORDER BY steps DESC) = 1
        ORDER BY dur_ns, step, trace_id
        """
    ).fetchall()
    return candidates[len(candidates) // 2] if candidates else None


_STEP = "(trace_id, step, rung, rank) = (?, ?, ?, ?)"


def _template(con: duckdb.DuckDBPyConnection, template_step: tuple[Any, ...]) -> _Template:
    names = ", ".join(column.name for column in COLUMNS)
    rows = con.execute(f"SELECT {names} FROM spans WHERE {_STEP}", template_step).fetchall()
    return _Template([Span._make(row) for row in rows])


def _has_unique_keys(con: duckdb.DuckDBPyConnection, template_step: tuple[Any, ...]) -> bool:
    query = f"SELECT count(DISTINCT key) = count(key) FROM spans WHERE {_STEP}"
    return bool(con.execute(query, template_step).fetchall()[0][0])


def _take_single_step(con: duckdb.DuckDBPyConnection, template_step: tuple[Any, ...]) -> None:
    """Make `merged` from the only step, as `_merge_single_rung` does: each average is the time of the span itself."""
    names = ", ".join(column.name for column in COLUMNS)
    con.execute(
        f"""
        INSERT INTO merged
        SELECT {names}, (ns IS NOT NULL)::INTEGER, ns, NULL, NULL, NULL, ns, ns, ns, NULL,
               CASE WHEN ns IS NULL THEN '{UNMEASURED}' ELSE '{NO_RUNG_OUTSIDE}' END
        FROM (SELECT *, CASE WHEN status = 'ok' AND key IS NOT NULL THEN dur_ns::DOUBLE END AS ns
              FROM spans WHERE {_STEP})
        """,
        template_step,
    )


def _merge_single_rung(con: duckdb.DuckDBPyConnection, template_step: tuple[Any, ...]) -> None:
    """Make `merged` from steps of one rung, with any number of spans: averages, and no true times."""
    names = ", ".join(f"spans.{column.name}" for column in COLUMNS)

    def of_several(average: str) -> str:
        """Return the SQL of an average, which of a single value is that value, in less time."""
        return f"CASE WHEN steps = 1 THEN sorted[1] ELSE {average} END"

    con.execute(
        f"""
        INSERT INTO merged
        WITH measured AS (
            SELECT key, list_sort(list(dur_ns::DOUBLE)) AS sorted, len(sorted) AS steps,
                   CASE WHEN steps = 3 THEN 1 ELSE floor({stats.TRIM} * steps)::BIGINT END AS dropped
            FROM alike_spans WHERE status = 'ok' AND key IN (SELECT key FROM spans WHERE {_STEP}) GROUP BY key
        ), averaged AS (
            SELECT key, steps, {of_several("list_avg(sorted[dropped + 1 : steps - dropped])")} AS raw_ns,
                   {of_several("list_aggregate(sorted, 'quantile_cont', 0.5)")} AS median_ns,
                   {of_several("list_aggregate(sorted, 'quantile_cont', 0.9)")} AS p90_ns,
                   {of_several("list_aggregate(sorted, 'quantile_cont', 0.99)")} AS p99_ns
            FROM measured
        )
        SELECT {names}, coalesce(steps, 0), raw_ns, NULL, NULL, NULL, median_ns, p90_ns, p99_ns, NULL,
               CASE WHEN steps IS NULL THEN '{UNMEASURED}' ELSE '{NO_RUNG_OUTSIDE}' END
        FROM spans LEFT JOIN averaged USING (key) WHERE {_STEP}
        """,
        [*template_step, *template_step],
    )


def _count_inside(template: _Template, rungs: Sequence[Rung]) -> None:
    """Count, for each span, the spans of each rung that ran between its start and its end.

    Children that belong to a span by evidence other than time (a backward op to its layer, a kernel to its
    launch) did not run inside it and add no cost to it.
    """
    rows = template.rows
    indices = {row.span_id: index for index, row in enumerate(rows)}
    template.inner_counts = [defaultdict(int) for _ in rows]
    own_rungs = {level: own_rung(level, rungs) for level in {row.level for row in rows}}
    for row in rows:
        rung = own_rungs[row.level]
        if rung is None or row.device is not None:
            continue
        outer = row
        for _ in range(MAX_NESTING):
            if outer.parent_id not in indices or outer.parent_rule in (Rule.SEQUENCE, Rule.CORRELATION):
                break
            index = indices[outer.parent_id]
            template.inner_counts[index][rung.level] += 1
            outer = rows[index]


def _duration_stats(
    con: duckdb.DuckDBPyConnection, template: _Template, rungs: Sequence[Rung], run: Run
) -> dict[str, DurationStats]:
    """Return the statistics of the timed steps for each key of the template."""
    own_rungs = {level: own_rung(level, rungs) for level in {row.level for row in template.rows}}
    rungs_by_key = {row.key: own_rungs[row.level] for row in template.rows}
    step_key = next((row.key for row in template.rows if row.kind == Kind.STEP), None)
    result: dict[str, DurationStats] = defaultdict(DurationStats)
    cursor = con.execute(
        "SELECT key, rung, list(dur_ns::DOUBLE) FROM alike_spans "
        "WHERE timed AND status = 'ok' AND key IN (SELECT unnest(?::VARCHAR[])) GROUP BY key, rung",
        [list(rungs_by_key)],
    )
    while batch := cursor.fetchmany(_BATCH):
        at_own_rung: list[tuple[str, list[float]]] = []
        for key, rung, durations in batch:
            rung_of_key = rungs_by_key[key]
            if rung_of_key is not None and rung == rung_of_key.level:
                at_own_rung.append((key, durations))
            if rungs and rung == rungs[-1].level:  # without rungs, calls in steps that raised
                result[key].raw = stats.trimmed_mean(durations)
        intervals = stats.intervals([durations for _, durations in at_own_rung])
        for (key, durations), interval in zip(at_own_rung, intervals, strict=True):
            result[key].set_from_own_rung(durations, interval)
    if step_key is not None and rungs and rungs[0].level == BARE:
        result[step_key].set_from_bare_steps(iterations.steady_steps(con, run))
    return result


def _describe(con: duckdb.DuckDBPyConnection, template: _Template) -> _Description | None:
    """Return the description of the template from a describing step; None if no describing step had its inputs.

    If steps of the kind have different inputs (text that grows, sequences of many lengths), hardly any step has the
    lengths of a describing step, and times are means over all of them. Then one describing step of the kind describes
    the template with its own shapes, from the model down.
    """
    names = ", ".join(DESCRIBED_COLUMNS)
    rows = con.execute(
        f"""
        SELECT trace_id, step, rung, rank, alike.structure IS NOT NULL, key, {names}
        FROM spans LEFT JOIN alike USING (trace_id, step, rung, rank) WHERE NOT spans.timed
        """
    ).fetchall()
    steps: dict[tuple[Any, ...], dict[str | None, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        steps[tuple(row[:5])][row[5]] = dict(zip(DESCRIBED_COLUMNS, row[6:], strict=True))
    calls = [span for span in template.rows if span.kind == Kind.FORWARD and span.timed]
    ordered = sorted(steps.items(), key=lambda entry: (not entry[0][4], str(entry[0])))
    for _, descriptions in ordered:
        if all(
            span.key in descriptions and descriptions[span.key]["input_shapes"] == span.input_shapes for span in calls
        ):
            return _Description(descriptions)
    if _has_varying_inputs(con, [span.key for span in calls]):
        for (*_, alike), descriptions in ordered:
            if alike and all(span.key in descriptions for span in calls):
                return _Description(descriptions, has_other_inputs=True)
    return None


def _has_varying_inputs(con: duckdb.DuckDBPyConnection, calls: Sequence[str | None]) -> bool:
    """Return whether timed steps of the kind called a model with different inputs."""
    rows = con.execute(
        "SELECT max(inputs) FROM (SELECT count(DISTINCT input_shapes) AS inputs FROM alike_spans "
        "WHERE timed AND key IN (SELECT unnest(?::VARCHAR[])) GROUP BY key)",
        [list(calls)],
    ).fetchall()
    return bool((rows[0][0] or 0) > 1)


def _with_description(span: Span, description: Mapping[str, Any], has_other_inputs: bool) -> Span:
    """Return a span of a timed step with its empty columns filled in from the describing step.

    Args:
        span: span of the template.
        description: the columns `DESCRIBED_COLUMNS`.
        has_other_inputs: whether the described input shapes replace those of the span.
    """
    values = list(span)
    for name, place in _DESCRIBED_PLACES:
        if values[place] is None:
            values[place] = description[name]
    if has_other_inputs and description["input_shapes"] is not None:
        values[_INPUT_SHAPES] = description["input_shapes"]
    own, text = span.attributes, description["attributes"]
    if own is not None and text is not None and text != own:
        values[_ATTRIBUTES] = _with_described_keys(own, text)
    return Span._make(values)


_DESCRIBED_PLACES = tuple((name, Span._fields.index(name)) for name in DESCRIBED_COLUMNS)
_INPUT_SHAPES, _ATTRIBUTES = Span._fields.index("input_shapes"), Span._fields.index("attributes")


@lru_cache(maxsize=4096)
def _with_described_keys(text: str, description: str) -> str:
    """Return the attributes of a span with those of its description that describe and that it lacks."""
    with contextlib.suppress(ValueError, AttributeError):  # a third party's collector may write no JSON object
        attributes = json.loads(text)
        added = {
            name: value
            for name, value in json.loads(description).items()
            if name in DESCRIPTION_KEYS and name not in attributes
        }
        if added:
            return json.dumps({**attributes, **added}, separators=(",", ":"))
    return text
