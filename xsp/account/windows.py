"""The recorded iterations of each rank: from when to when each of them lasted on the host.

An iteration lasts from the end of one step to the end of the next one. In a trace of another profiler the steps follow
each other. In a run of xsp recorded steps are apart (other steps ran between them, or a service waited for requests),
and a recorded iteration begins where its collectors were on: at the end of the step before, whose spans are in the
table `before`, or with the step. A trace without steps is one window.

Steps of a trace of another profiler that are of several kinds (prefill and decode of a serving engine) overlap on the
device: while it still works on one, the host launches the next one. Then an iteration lasts until host and device are
done with it, and the next one begins: the iterations of all kinds together fill the recording.
"""

from __future__ import annotations

from typing import NamedTuple

from xsp.schema import STEP_KIND, WINDOW, Kind, Level
from xsp.store.before import IN_BOTH
from xsp.store.devicework import Tables, launches, tables_of
from xsp.store.trace import Trace


class IterationWindow(NamedTuple):
    """A recorded iteration on the host of a rank; times in nanoseconds."""

    rank: int
    step: int | None
    start_ns: int
    """End of the step before, where it was recorded too; else where the recording of this iteration begins."""

    step_ns: int
    """Start of the step itself."""

    end_ns: int
    rung: int
    process: int | None
    thread: int | None
    block: int
    """Number of the recording that the iteration belongs to: iterations that follow each other have the same one."""

    before_end_ns: int | None = None
    """End of what was recorded from `start_ns` on before the step, after which xsp prepared it; None without that."""

    kind: int | None = None
    """Kind of its step as an importer gave it; None if it gave none."""

    on_host: tuple[int, int] | None = None
    """From when to when the host worked on it, if it lasts until the device has done its work; else None."""

    is_whole: bool = False
    """Whether it is all of a recording without steps: then all device work in it is its own."""

    @property
    def has_before(self) -> bool:
        """Whether what the program did between the step before and this one was recorded."""
        return self.before_end_ns is not None


ITERATION_SPANS = "iteration_spans"
"""Name of the view of the spans of whole iterations, of steps and before them."""


def tables(trace: Trace) -> Tables:
    """Return the names of the tables of whole iterations, and make them: of spans, device work, calls and launches."""

    def make() -> Tables:
        if not trace.con.execute("SELECT 1 FROM before LIMIT 1").fetchall():
            launches(trace)
            return tables_of()
        trace.con.execute(
            f"CREATE OR REPLACE TEMP VIEW {ITERATION_SPANS} AS "
            f"FROM spans UNION ALL BY NAME SELECT * FROM before WHERE NOT {IN_BOTH}"
        )
        launches(trace, ITERATION_SPANS)
        return tables_of(ITERATION_SPANS)

    return trace.cached("tables of whole iterations", make)


def windows(trace: Trace, kind: int | None = None) -> list[IterationWindow]:
    """Return the timed recorded iterations of a kind on each rank, in order; one window each without steps.

    Steps of threads other than the one with most steps are left out.

    Args:
        trace: the trace.
        kind: number of the kind, in a trace of another profiler; default: that of the trace.
    """
    found = trace.cached("windows of all kinds", lambda: _of_all_kinds(trace))
    if all(window.kind is None for window in found):
        return found
    kind = trace.kind if kind is None else kind
    chosen: list[IterationWindow] = []
    for place, window in enumerate(found):
        if window.kind == kind:
            before = found[place - 1] if place else window
            follows = (before.rank, before.kind, before.block) == (window.rank, kind, window.block)
            last = chosen[-1] if chosen and chosen[-1].rank == window.rank else None
            block = 0 if last is None else last.block + (not follows)
            chosen.append(window._replace(block=block))
    return chosen


def step_kinds(trace: Trace) -> list[int]:
    """Return the kinds that an importer gave to the steps of the trace; empty if it gave none, or a single one."""
    kinds = {window.kind for window in trace.cached("windows of all kinds", lambda: _of_all_kinds(trace))}
    return sorted(kind for kind in kinds if kind is not None) if len(kinds) > 1 else []


def _of_all_kinds(trace: Trace) -> list[IterationWindow]:
    """Return the windows of the trace's kind, as in `windows`; of all kinds, if an importer gave them."""
    # without a loop, kinds of steps are unknown, and other ranks number kinds on their own: all their steps count
    of_kind = "(trace_id, step, rung) IN (SELECT (trace_id, step, rung) FROM alike)" if trace.has_loop else "true"
    rows = trace.con.execute(
        f"""
        WITH steps AS (
            SELECT rank, step, trace_id, process, thread, start_ns, start_ns + dur_ns AS end_ns,
                   {STEP_KIND} AS step_kind, coalesce(rung, 0) AS rung,
                   name = '{WINDOW}' AND thread IS NULL AS is_whole,
                   count(*) OVER (PARTITION BY rank, process, thread) AS on_thread
            FROM spans WHERE kind = '{Kind.STEP}' AND timed IS NOT false AND status = 'ok' AND dur_ns > 0
              AND (rank <> (SELECT any_value(rank) FROM alike) OR {of_kind})
        ), most AS (
            SELECT * FROM steps QUALIFY dense_rank() OVER (
                PARTITION BY rank ORDER BY on_thread DESC, process, thread) = 1
        ), recorded AS (
            SELECT rank, trace_id, step, min(start_ns) AS first_ns FROM spans
            WHERE timed IS NOT false AND device IS NULL AND step IS NOT NULL AND level > {int(Level.APPLICATION)}
            GROUP BY ALL
        ), opened AS (
            SELECT rank, trace_id, step, min(start_ns) AS opened_ns, max(start_ns + dur_ns) AS before_end_ns
            FROM before WHERE kind = '{Kind.BEFORE}' GROUP BY ALL
        )
        SELECT rank, step, start_ns, end_ns, rung, process, thread,
               least(start_ns, coalesce(opened_ns, first_ns)), before_end_ns, step_kind, is_whole
        FROM most LEFT JOIN recorded USING (rank, trace_id, step) LEFT JOIN opened USING (rank, trace_id, step)
        ORDER BY rank, start_ns
        """
    ).fetchall()
    is_apart = trace.run.imported is None
    found: list[IterationWindow] = []
    for rank, step, start_ns, end_ns, rung, process, thread, first_ns, before_end_ns, kind, is_whole in rows:
        last = found[-1] if found and found[-1].rank == rank else None
        follows = last is not None and not is_apart and (step is None or last.step is None or step == last.step + 1)
        if last is not None and start_ns < last.end_ns:
            continue  # a step inside another one
        begin_ns = start_ns if first_ns is None else first_ns
        if last is not None:
            begin_ns = last.end_ns if follows else max(begin_ns, last.end_ns)
        block = (last.block + (not follows)) if last is not None else 0
        window = IterationWindow(
            rank, step, begin_ns, start_ns, end_ns, rung, process, thread, block, before_end_ns, kind
        )
        found.append(window._replace(is_whole=is_whole))
    if len({window.kind for window in found}) > 1:
        return _until_done(trace, found)
    if found or (trace.has_loop and _has_timed_steps(trace)):  # else the steps of other kinds would stand for this one
        return found
    return _whole(trace)


def _until_done(trace: Trace, found: list[IterationWindow]) -> list[IterationWindow]:
    """Return iterations that last until the device has done the work that their host launched, one after another."""
    import numpy as np  # tables do not load it before they are asked for

    made = tables(trace)
    columns = trace.con.execute(
        f"""
        SELECT w.rank, begin_ns, w.end_ns FROM {made.device_work} w
        JOIN {made.launches} USING (rank, on_process, correlation_id) WHERE begin_ns IS NOT NULL
        """
    ).fetchnumpy()
    ranks, launched, ended = (np.asarray(column, np.int64) for column in columns.values())
    begins = np.array([window.start_ns for window in found], np.int64)
    done = np.array([window.end_ns for window in found], np.int64)
    for rank in {window.rank for window in found}:
        own = np.array([place for place, window in enumerate(found) if window.rank == rank])
        work = np.flatnonzero(ranks == rank)
        place = np.searchsorted(begins[own], launched[work], "right") - 1
        owner = own[np.maximum(place, 0)]
        inside = (place >= 0) & (launched[work] < np.array([found[index].end_ns for index in owner], np.int64))
        np.maximum.at(done, owner[inside], ended[work][inside])
    result: list[IterationWindow] = []
    for window, done_ns in zip(found, done.tolist(), strict=True):
        last = result[-1] if result else None
        follows = last is not None and (last.rank, last.block) == (window.rank, window.block)
        start_ns = last.end_ns if last is not None and follows else window.start_ns
        end_ns = max(start_ns, done_ns)
        result.append(
            window._replace(
                start_ns=start_ns,
                step_ns=min(max(window.step_ns, start_ns), end_ns),
                end_ns=end_ns,
                on_host=(window.start_ns, window.end_ns),
            )
        )
    return result


def _has_timed_steps(trace: Trace) -> bool:
    timed = f"SELECT 1 FROM spans WHERE kind = '{Kind.STEP}' AND timed IS NOT false LIMIT 1"
    return bool(trace.con.execute(timed).fetchall())


def _whole(trace: Trace) -> list[IterationWindow]:
    rows = trace.con.execute(
        f"""
        WITH busiest AS (
            SELECT rank, process, thread FROM spans WHERE device IS NULL AND thread IS NOT NULL
            GROUP BY rank, process, thread
            QUALIFY row_number() OVER (PARTITION BY rank ORDER BY count(*) DESC, process, thread) = 1
        )
        SELECT spans.rank, min(start_ns), max(start_ns + dur_ns), any_value(busiest.process), any_value(busiest.thread)
        FROM spans LEFT JOIN busiest USING (rank)
        WHERE timed IS NOT false AND kind NOT IN ('{Kind.RUN}', '{Kind.ALLOC}', '{Kind.OVERHEAD}')
        GROUP BY spans.rank ORDER BY spans.rank
        """
    ).fetchall()
    return [
        IterationWindow(rank, None, start_ns, start_ns, end_ns, int(Level.KERNEL), process, thread, 0, is_whole=True)
        for rank, start_ns, end_ns, process, thread in rows
        if end_ns > start_ns
    ]
