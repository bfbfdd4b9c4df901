"""State of the delivery of a run: what was sent, what remains to be sent, and the counts.

The run directory is the queue: a step that is on the disk and not listed in `delivery.json` is still to be delivered.
A step is listed when the receiver has accepted its last request. So an interrupted step is sent again as a whole; its
spans have the same bytes as before, so a receiver that stores spans by id keeps each span once.

A run's own span is sent last, when the content of `run.json` is final, together with its loop; the root of each step
links to it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from xsp import atomic, inside, rundir, semconv, table
from xsp.errors import TraceError
from xsp.otlp import encode
from xsp.otlp.endpoint import OtlpEndpoint
from xsp.otlp.send import Exporter
from xsp.run import Run
from xsp.schema import COLUMNS, Kind, Level, Span
from xsp.store import loop

TRACE_SPANS = 10_000
"""Default maximum number of spans of a trace; a larger trace is folded, see `xsp.otlp.zoom`."""

MEMORY = "512MB"
"""Memory limit of the table engine; the rest goes to temporary files."""

MIN_STEP_SPANS = 10
"""Budget in spans of a step in a trace whose budget earlier steps have used up."""

_SAVE_EVERY_S = 0.2


class DeliveryState:
    """The entry of one endpoint in the `delivery.json` of a run."""

    def __init__(self, run: Path, endpoint: OtlpEndpoint, fresh: bool = False) -> None:
        """Read the entry; if the endpoint is a file, nothing is read or written.

        Args:
            run: the run directory.
            endpoint: the endpoint.
            fresh: ignore an existing entry.
        """
        self._path = run / rundir.DELIVERY_FILE
        self._endpoint = endpoint
        entry = {} if fresh or endpoint.is_file else read_entries(run).get(endpoint.name, {})
        self.steps: dict[int, int] = {int(step): int(spans) for step, spans in entry.get("steps", {}).items()}
        """Number of delivered spans, by step."""

        self.run_end_ns = entry.get("run_end_ns")
        """End of the run's own span as delivered; if the run continues, the span is delivered again."""

        self.rejected = int(entry.get("rejected", 0))
        """Number of spans that the receiver rejected while it accepted the rest of their request."""

        self.messages: list[str] = [str(message) for message in entry.get("messages", ())]
        self._saved_s = 0.0

    def save(self, force: bool = True) -> None:
        """Write the entry atomically; unless `force`, only if `_SAVE_EVERY_S` has passed since the last time."""
        if self._endpoint.is_file or not (force or time.monotonic() - self._saved_s > _SAVE_EVERY_S):
            return
        content = {
            "steps": {str(step): spans for step, spans in sorted(self.steps.copy().items())},
            "run_end_ns": self.run_end_ns,
            "rejected": self.rejected,
            "messages": self.messages,
        }
        endpoints = {**read_entries(self._path.parent), self._endpoint.name: content}
        text = json.dumps({"format": rundir.FORMAT, "endpoints": endpoints}, indent=1)
        rundir.write_atomically(self._path, text.encode())
        self._saved_s = time.monotonic()


def read_entries(run: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of `delivery.json`, by endpoint. A damaged file counts as empty: spans are sent again."""
    try:
        entries = inside.read_json(run, run / rundir.DELIVERY_FILE, rundir.MAX_RUN_BYTES)["endpoints"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {str(name): entry for name, entry in entries.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    """Return whether a value is an entry that `DeliveryState.save` wrote."""
    try:
        steps = entry.get("steps", {})
        counts = [*map(int, steps), *steps.values(), entry.get("rejected", 0), entry.get("run_end_ns") or 0]
    except (AttributeError, TypeError, ValueError):
        return False
    return all(isinstance(count, int) for count in counts) and isinstance(entry.get("messages", []), list)


class Delivery:
    """The delivery of one run to one endpoint."""

    def __init__(
        self,
        run: Path,
        exporter: Exporter,
        *,
        fresh: bool = False,
        trace_spans: int = TRACE_SPANS,
        threads: int | None = None,
    ) -> None:
        """Read `run.json` and `delivery.json`; nothing is sent yet.

        Args:
            run: directory of one run, not of several.
            exporter: delivers the requests.
            fresh: send everything again.
            trace_spans: maximum number of spans of a trace; larger traces are folded; 0 for no limit.
            threads: number of threads of the table engine.

        Raises:
            TraceError: the run cannot be read.
        """
        self.run = run
        self.exporter = exporter
        self.content = rundir.read_run(run)
        self.delivered = DeliveryState(run, exporter.endpoint, fresh)
        self._trace_spans = trace_spans
        self._earlier_spans: Counter[str] = Counter()
        """Number of spans in earlier steps, by trace."""

        self.sends_requests = True
        """Whether requests of engines are delivered with the run's own span, each in the trace in which it arrived."""

        self._last_counted = -1
        self._selected_steps: dict[int, list[int]] = {}
        """The chosen steps of segments that hold other steps too."""

        self._partial_segments: set[int] = set()
        """Segments whose chosen steps were delivered."""

        self._spill = atomic.temporary_folder()
        self._con = table.connect_spilling(Path(self._spill.name), MEMORY, threads)

    def close(self) -> None:
        """Close the table engine, and remove its temporary files."""
        self._con.close()
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Remove the temporary files, even if the table engine still uses them."""
        self._spill.cleanup()

    def pending_steps(self) -> list[int]:
        """Return the stored steps that are not delivered, in order."""
        return [step for step in map(number_of, rundir.segments(self.run)) if step not in self.delivered.steps]

    def select_segments(self, steps: Collection[int] | None, timed: bool) -> list[int]:
        """Return the undelivered segments that hold some of these steps; only these steps of them are delivered.

        Args:
            steps: numbers of steps; None for all.
            timed: whether only timed steps are wanted.
        """
        undelivered = self.pending_steps()
        if steps is None and not timed:
            return undelivered
        if _has_step_per_segment(self.content):
            undelivered = [step for step in undelivered if steps is None or step in steps]
            return self.timed_steps(undelivered) if timed else undelivered
        segments = []
        for segment in undelivered:
            timed_by_step = self._steps_of(segment)
            selected = [step for step, is_timed in timed_by_step.items()
                        if (steps is None or step in steps) and (is_timed or not timed)]  # fmt: skip
            if selected:
                segments.append(segment)
            if len(selected) < len(timed_by_step):
                self._selected_steps[segment] = selected
        return segments

    def _steps_of(self, segment: int) -> dict[int, bool]:
        """Return the steps in a segment, and whether each is timed."""
        source = table.parquet(rundir.segment(self.run, segment))
        try:
            rows = self._con.execute(
                f"SELECT step, coalesce(bool_or(timed), false) FROM {source} WHERE step IS NOT NULL GROUP BY step"
            ).fetchall()
        except duckdb.Error:  # damaged, which sending the step reports
            return {segment: True}
        return dict(rows)

    def is_delivered(self, segment: int) -> bool:
        """Return whether the chosen steps of a segment are delivered."""
        return segment in self.delivered.steps or segment in self._partial_segments

    def timed_steps(self, steps: Collection[int]) -> list[int]:
        """Return the timed steps among some steps."""
        files = [rundir.segment(self.run, step) for step in steps]
        rows = self._con.execute(f"SELECT DISTINCT step FROM {table.parquet(files)} WHERE timed") if files else None
        timed_steps = {row[0] for row in rows.fetchall()} if rows is not None else set()
        return [step for step in steps if step in timed_steps]

    def deliver_step(self, number: int) -> bool:
        """Deliver one step, or the chosen steps of a segment that holds several. A part of a segment is not listed.

        Returns:
            Whether the receiver accepted it, possibly except for spans that it rejected.

        Raises:
            TraceError: its segment is damaged.
            DeliveryError: see `Exporter.deliver`.
        """
        self._create_step_view(number)
        accepted = [self._send(name) for name in self._tables_of_step(number)]
        if None in accepted:
            return False
        if number in self._selected_steps:
            self._partial_segments.add(number)
        else:
            self.delivered.steps[number] = sum(filter(None, accepted))
        self.exporter.counts.steps += len(self._selected_steps.get(number, [number]))
        self.delivered.save(force=False)
        if self.exporter.counts.trace_id is None:
            self.exporter.counts.trace_id = self._con.execute("SELECT min(trace_id) FROM step").fetchall()[0][0]
        return True

    def is_run_pending(self) -> bool:
        """Return whether the run's own span is still to be delivered; traces of other tools have none."""
        span = self._run_span()
        return span is not None and span.end_ns != self.delivered.run_end_ns

    def finish(self) -> None:
        """Deliver the run's own span, if it has one, and the requests and steps of engines.

        Raises:
            DeliveryError: see `Exporter.deliver`.
        """
        span, otel = self._run_span(), self.content.otel
        if span is None or otel is None:
            return
        table.create(self._con, "run_spans")
        loop.create_table(self._con, [self.run])
        table.insert(self._con, "run_spans", [span, *loop.spans(self._con, otel)])
        is_whole = self._send("run_spans") is not None
        served = rundir.numbered_tables(self.run / rundir.SERVING) if self.sends_requests else []
        if served:
            _create_served_view(self._con, served, (otel.trace_id, otel.span_id))
            is_whole = self._send("served_spans") is not None and is_whole
        if is_whole:
            self.delivered.run_end_ns = span.end_ns
        self.delivered.save()

    def reload_run(self) -> None:
        """Read `run.json` again, when it has its final content."""
        self.content = rundir.read_run(self.run)

    def summary(self) -> dict[str, Any]:
        """Return the entry of this delivery for `run.json`."""
        return {
            "endpoint": self.exporter.endpoint.name,
            "steps": len(self.delivered.steps),
            "spans": sum(self.delivered.steps.copy().values()) + (self.delivered.run_end_ns is not None),
            "rejected": self.delivered.rejected,
            "left": len(self.pending_steps()) + self.is_run_pending(),
            "messages": self.delivered.messages,
        }

    def record_result(self, messages: list[str]) -> None:
        """Write the state of the delivery into `delivery.json` and `run.json`, replacing earlier entries.

        The `run.json` of an unfinished run is left to the process that writes it.

        Args:
            messages: reasons why spans are undelivered or were rejected.
        """
        if self.exporter.endpoint.is_file:
            return
        self.delivered.messages = messages
        self.delivered.save()
        content = rundir.read_run(self.run)
        if not content.finished:
            return
        other_entries = [entry for entry in content.delivery if entry.endpoint != self.exporter.endpoint.name]
        rundir.write_run(self.run, content | {"delivery": [*other_entries, self.summary()]})

    def _send(self, name: str) -> int | None:
        """Send the spans of a table; return the number of accepted spans, None if a request was refused."""
        rejected_before, sent = self.exporter.counts.rejected, 0
        complete = True
        resources = partial(_resource, self.content, self.exporter.endpoint.service)
        for request in encode.requests(self._con, name, resources, max_bytes=self.exporter.max_bytes):
            complete = self.exporter.deliver(request) and complete
            sent += request.spans
        if not complete:
            return None
        rejected = self.exporter.counts.rejected - rejected_before
        self.delivered.rejected += rejected
        return sent - rejected

    def _tables_of_step(self, number: int) -> list[str]:
        """Return the tables to send for a step: the view `step`, or overview and details if its trace is too large."""
        if not self._trace_spans:
            return ["step"]
        query = f"SELECT count(*), min(trace_id), any_value(parent_id) FILTER (kind = '{Kind.STEP}') FROM step"
        spans, trace_id, outer_span = self._con.execute(query).fetchall()[0]
        budget = self._trace_spans
        if outer_span is not None:  # the caller's trace contains all steps of all ranks
            share = budget // max(1, self.content.world_size or 1)
            budget = max(MIN_STEP_SPANS, share - self._spans_before(trace_id, number))
        if spans <= budget:
            return ["step"]
        from xsp.otlp import zoom

        return zoom.split(self._con, "step", budget, self._trace_spans)

    def _spans_before(self, trace_id: str, number: int) -> int:
        """Return the number of spans of earlier steps in a trace.

        The spans of the run directory are counted, not those sent, so that a repeated step is folded as before.
        """
        files = [rundir.segment(self.run, step) for step in range(self._last_counted + 1, number)]
        existing = [file for file in files if file.exists()]
        if existing:
            query = f"SELECT trace_id, count(*) FROM {table.parquet(existing)} GROUP BY trace_id"
            self._earlier_spans.update(dict(self._con.execute(query).fetchall()))
        self._last_counted = max(self._last_counted, number - 1)
        return self._earlier_spans[trace_id]

    def _create_step_view(self, number: int) -> None:
        """Make the view `step` of the chosen spans of a segment, with a link from the root to the run's own span."""
        segment, steps = rundir.segment(self.run, number), self._selected_steps.get(number)
        condition = f" WHERE step IN ({', '.join(map(str, steps))})" if steps is not None else ""
        columns = set(table.check_parquet(self._con, segment, COLUMNS))
        otel = self.content.otel
        link = json.dumps([[otel.trace_id, otel.span_id]]) if otel is not None else None
        links = f"CASE WHEN kind = '{Kind.STEP}' THEN {table.literal(link)} END" if link else "NULL"
        self._con.execute(
            f"CREATE OR REPLACE VIEW step AS SELECT {table.select_list(COLUMNS, columns)}, {links}::VARCHAR AS links "
            f"FROM {table.parquet(segment)}{condition}"
        )

    def _run_span(self) -> Span | None:
        """Return the run's own span. An interrupted run ends with its last stored span."""
        if self.content.otel is None or self.content.start_ns is None:
            return None
        return run_span(self.content, 0 if self.content.finished else self._last_end_ns())

    def _last_end_ns(self) -> int:
        """Return the end of the last span of the last step, in nanoseconds; 0 if unknown."""
        segments = rundir.segments(self.run)[-1:]
        try:
            query = f"SELECT max(start_ns + dur_ns) FROM {table.parquet(segments)}"
            return int(self._con.execute(query).fetchall()[0][0]) if segments else 0
        except (duckdb.Error, TypeError):  # damaged or empty, which sending the step reports
            return 0


MOST_LINKS = 1024
"""Limit on the links of a request or an engine step."""


def _create_served_view(con: duckdb.DuckDBPyConnection, files: Sequence[Path], run: tuple[str, str]) -> None:
    """Make the table `served_spans` of requests and engine steps, linked to each other and to the run's own span.

    A request that arrived in a trace is part of it, below the span in which it arrived; any other, and each step, is a
    trace of its own.
    """
    columns = set(table.check_parquet(con, files[0], COLUMNS))
    con.execute(
        f"""
        CREATE OR REPLACE TABLE served_spans AS
        WITH rows AS (
            SELECT {table.select_list(COLUMNS, columns)} FROM {table.parquet(files)}
        ), own AS (
            SELECT * REPLACE (CASE WHEN parent_id IS NULL THEN span_id || span_id ELSE trace_id END AS trace_id),
                attributes->>'$."xsp.serving.engine"' AS engine, attributes->>'$."xsp.serving.request"' AS request
            FROM rows
        ), served AS (
            SELECT span_id AS step_id, trace_id AS step_trace, rank, engine, start_ns, start_ns + dur_ns AS end_ns,
                unnest(list_distinct(
                    json_extract_string(attributes->>'$."xsp.serving.parts"', '$[*][0]'))) AS request
            FROM own WHERE kind = '{Kind.STEP}'
        ), pairs AS (
            SELECT step_id, step_trace, own.span_id AS request_id, own.trace_id AS request_trace, served.start_ns
            FROM served JOIN own ON own.request = served.request AND own.engine = served.engine
                AND own.rank IS NOT DISTINCT FROM served.rank
                AND served.end_ns > own.start_ns AND served.start_ns <= own.start_ns + own.dur_ns
        ), linked AS (
            SELECT step_id AS span_id, list([request_trace, request_id] ORDER BY request_id)[:{MOST_LINKS}] AS targets
            FROM pairs GROUP BY step_id
            UNION ALL
            SELECT request_id, list([step_trace, step_id] ORDER BY start_ns)[:{MOST_LINKS}]
            FROM pairs GROUP BY request_id
        )
        SELECT own.* EXCLUDE (engine, request),
            to_json(list_concat([[{table.literal(run[0])}, {table.literal(run[1])}]],
                coalesce(targets, [])))::VARCHAR AS links
        FROM own LEFT JOIN linked USING (span_id)
        """
    )


def run_span(run: Run, last_end_ns: int = 0) -> Span:
    """Return the span of a run itself, which contains `run.json` without its deliveries.

    Args:
        run: a run with a span of its own, `otel`, and a start.
        last_end_ns: end of the last span of an interrupted run.
    """
    otel, start = run.otel, run.start_ns
    if otel is None or start is None:
        raise ValueError("the run has no span of its own")
    content = {name: value for name, value in run.items() if name != "delivery"}
    return Span(
        trace_id=otel.trace_id,
        span_id=otel.span_id,
        parent_id=otel.parent_id,
        level=Level.APPLICATION,
        kind=Kind.RUN.value,
        name=semconv.run_span_name(run),
        start_ns=start,
        dur_ns=max(run.end_ns or start, last_end_ns) - start,
        process=run.process,
        rank=run.rank or 0,
        collector="session",
        attributes=json.dumps({semconv.RUN: json.dumps(content, ensure_ascii=False)}, ensure_ascii=False),
    )


def _resource(run: Run, service: str, level: int, rank: int, process: int | None) -> dict[str, str | int]:
    return semconv.resource(run, level, rank, process, service)


def steps_in(run: Path) -> set[int]:
    """Return the numbers of the stored steps of a run.

    Raises:
        TraceError: the run cannot be read.
    """
    segments = rundir.segments(run)
    if not segments or _has_step_per_segment(rundir.read_run(run)):
        return set(map(number_of, segments))
    try:
        with table.connect() as con:
            rows = con.execute(f"SELECT DISTINCT step FROM {table.parquet(segments)} WHERE step IS NOT NULL").fetchall()
    except duckdb.Error as error:
        raise TraceError(f"{run / rundir.STEPS}: damaged ({str(error).splitlines()[0]})") from error
    return {step for (step,) in rows}


def _has_step_per_segment(run: Run) -> bool:
    """Return whether each segment is one step: imported and received runs may have several in a segment."""
    return run.imported is None and run.received is None


def number_of(segment: Path) -> int:
    """Return the step number of a segment."""
    return int(segment.stem)
