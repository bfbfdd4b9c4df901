"""First figures of a run while it is recorded, read only from its directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import duckdb
from rich.text import Text

from xsp import rundir, stats, table
from xsp.errors import TraceError
from xsp.fields import is_count
from xsp.levels import depth, rung_name
from xsp.record import progress as underway
from xsp.record.progress import overhead
from xsp.run import Budget, Run
from xsp.schema import Kind, Level
from xsp.scrub import plain

LAST_STEPS = 40
"""Number of the last stored steps that the figures cover."""

MOST_LAYERS = 5
"""Number of the slowest layers that are shown."""


@dataclass
class WatchFigures:
    """The figures of a run at one moment."""

    name: str
    is_finished: bool
    steps_stored: int
    steps_seen: int | None
    budget: Budget
    steps_ms: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Per rung: number of the last steps, and their trimmed mean in milliseconds."""

    layers: list[tuple[str, float, float]] = field(default_factory=list)
    """The slowest layers of the last steps, slowest first: name, milliseconds, share of the step in percent."""


def read_figures(run: Path) -> WatchFigures:
    """Return the figures of a run.

    Raises:
        TraceError: it is not a run, or holds several runs.
    """
    content = rundir.read_run(run)
    if content.parts or content.is_job:
        parts = content.parts or [part.name for part in rundir.rank_parts(run)]
        raise TraceError(f"{run}: holds several runs; watch one of them: {', '.join(parts)}")
    progress, segments = underway.read(run), rundir.segments(run)
    finished = bool(content.finished)
    steps_seen = content.steps.seen if finished and content.steps is not None else _count(progress.get("seen"))
    budget = content.budget if finished else Run.of(progress).budget
    figures = WatchFigures(content.name or run.name, finished, len(segments), steps_seen, budget or Budget.of({}))
    if segments:
        _read_steps(figures, segments[-LAST_STEPS:])
    return figures


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and is_count(value) else None


def _read_steps(figures: WatchFigures, segments: list[Path]) -> None:
    """Fill in the figures of the last steps; an existing segment is always complete."""
    con = table.connect(1)  # the run needs the others
    try:
        con.execute(f"CREATE VIEW spans AS SELECT * FROM {table.parquet(segments, same_columns=True)}")
        rows = con.execute(
            f"SELECT rung, list(dur_ns::DOUBLE) FROM spans WHERE kind = '{Kind.STEP}' AND timed AND status = 'ok' "
            "GROUP BY rung ORDER BY rung"
        ).fetchall()
        figures.steps_ms = {rung_name(rung): (len(ns), stats.trimmed_mean(ns) / 1e6) for rung, ns in rows}
        figures.layers = _layers(con)
    except RuntimeError as interrupt:
        raise KeyboardInterrupt from interrupt  # the engine turns Ctrl-C within a query into it
    except duckdb.Error as error:
        raise TraceError(f"{segments[0].parent}: cannot be read ({str(error).splitlines()[0]})") from error


def _layers(con: duckdb.DuckDBPyConnection) -> list[tuple[str, float, float]]:
    """Return the slowest layers without layers inside, by their time in a step of the first rung with layers."""
    rows = con.execute(
        f"""
        WITH rung AS (SELECT min(rung) AS lowest FROM spans WHERE timed AND rung >= {int(Level.LAYER)}),
        steps AS (SELECT dur_ns, step FROM spans, rung WHERE kind = '{Kind.STEP}' AND timed AND rung = lowest),
        modules AS (SELECT spans.* FROM spans, rung WHERE level = {int(Level.LAYER)} AND timed AND rung = lowest)
        SELECT name, sum(dur_ns) / 1e6 / (SELECT count(*) FROM steps) AS ms,
               100.0 * sum(dur_ns) / (SELECT sum(dur_ns) FROM steps)
        FROM modules WHERE span_id NOT IN (SELECT parent_id FROM modules WHERE parent_id IS NOT NULL)
        GROUP BY name ORDER BY ms DESC, name LIMIT {MOST_LAYERS}
        """
    ).fetchall()
    return [(name, ms, share) for name, ms, share in rows]


# --- watched -----------------------------------------------------------------------------------------------------
# The output of `xsp watch`: a few lines of text on a run while it is recorded.


def figures_text(figures: WatchFigures) -> Text:
    """Return the lines of `xsp watch`."""
    state = "finished" if figures.is_finished else "running"
    step_text = f"step {figures.steps_seen:,}, " if figures.steps_seen is not None else ""
    lines = [f"{plain(figures.name)}: {state}, {step_text}{figures.steps_stored:,} steps stored"]
    if figures.budget:
        lines.append(overhead(figures.budget))
    for rung, steps in figures.budget.left_out.items():
        rare = f", one step in {steps:,}" if steps else ""
        lines.append(f"  recording {plain(depth(rung))} is left out: too expensive{rare}")
    lines += _rungs(figures)
    if figures.layers:
        lines.append("slowest layers, ms a step:")
    lines += [f"  {ms:10.3f} {share:5.1f} %  {plain(name)}" for name, ms, share in figures.layers]
    return Text("\n".join(lines) + "\n")


def _rungs(figures: WatchFigures) -> list[str]:
    """Return a line for each rung: its number of steps, and the duration of the last ones."""
    counts = figures.budget.taken
    names = dict.fromkeys([*counts, *figures.steps_ms])
    if not names:
        return []
    lines = [f"{'recorded':<18} {'steps':>9} {'the last ones, ms':>18}"]
    for rung in names:
        last_count, ms = figures.steps_ms.get(rung, (None, None))
        number = counts.get(rung, last_count)
        count_text = "–" if number is None else f"{number:,}"
        lines.append(f"  {plain(depth(rung)):<16} {count_text:>9} {'–' if ms is None else f'{ms:.3f}':>18}")
    return lines
