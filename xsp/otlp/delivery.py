"""What of a run is sent, what of it is still to be sent, and the counts.

The run directory is the queue: a step that is on the disk and that `delivery.json` does not name is still to be
delivered. A step is named when the receiver has taken its last request; so a step that was broken off is sent
again as a whole, and as its spans are the same to the last byte, a receiver that stores spans by their ids keeps
one of each.

A run's own span leaves last, when all there is to say of the run is known, and its loop with it; each step's root links
to it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from xsp import rundir, semconv, table
from xsp.otlp import encode
from xsp.otlp.endpoint import Endpoint
from xsp.otlp.send import Exporter
from xsp.run import Run
from xsp.schema import COLUMNS, Kind, Level, Span
from xsp.store import loop

TRACE_SPANS = 10_000
"""Spans of a trace from which on it is folded, unless told otherwise: see `xsp.otlp.zoom`."""

MEMORY = "512MB"
"""Of the table engine; what is more goes to temporary files."""

FOLDED_STEP = 10
"""Spans with which a step stands in a trace whose budget earlier steps have used up."""

_SAVE_EVERY_S = 0.2


class Delivered:
    """What `delivery.json` of a run says about one endpoint."""

    def __init__(self, run: Path, to: Endpoint, anew: bool = False) -> None:
        """Read it; there is nothing to read or to write where the endpoint is a file.

        Args:
            run: the run directory.
            to: the endpoint.
            anew: forget what it says.
        """
        self._path = run / rundir.DELIVERY_FILE
        self._to = to
        known = {} if anew or to.is_file else read(run).get(to.name, {})
        self.steps: dict[int, int] = {int(step): int(spans) for step, spans in known.get("steps", {}).items()}
        """Spans that were delivered, by step."""

        self.run_end_ns = known.get("run_end_ns")
        """The end of the run's own span as it was delivered: that of a run that goes on is delivered again."""

        self.rejected = int(known.get("rejected", 0))
        """Spans that the receiver did not take when it took the rest of their request."""

        self.messages: list[str] = [str(message) for message in known.get("messages", ())]
        self._saved = 0.0

    def save(self, at_once: bool = True) -> None:
        """Write it in one piece; unless `at_once`, only if the last time is a while ago."""
        if self._to.is_file or not (at_once or time.monotonic() - self._saved > _SAVE_EVERY_S):
            return
        content = {
            "steps": {str(step): spans for step, spans in sorted(self.steps.copy().items())},
            "run_end_ns": self.run_end_ns,
            "rejected": self.rejected,
            "messages": self.messages,
        }
        endpoints = {**read(self._path.parent), self._to.name: content}
        text = json.dumps({"format": rundir.FORMAT, "endpoints": endpoints}, indent=1)
        rundir.write_whole(self._path, text.encode())
        self._saved = time.monotonic()


def read(run: Path) -> dict[str, dict[str, Any]]:
    """Return what is delivered of a run, by endpoint. A damaged file counts as none: spans are sent again."""
    try:
        found = json.loads((run / rundir.DELIVERY_FILE).read_text(encoding="utf-8"))["endpoints"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


class Delivery:
    """One run on its way to one endpoint."""

    def __init__(
        self,
        run: Path,
        exporter: Exporter,
        *,
        anew: bool = False,
        trace_spans: int = TRACE_SPANS,
        threads: int | None = None,
    ) -> None:
        """Read what is known of the run; nothing is sent yet.

        Args:
            run: directory of one run, not of several.
            exporter: that brings it.
            anew: send all again.
            trace_spans: of a trace, from which on it is folded; 0 for never.
            threads: of the table engine.

        Raises:
            TraceError: it cannot be read.
        """
        self.run = run
        self.exporter = exporter
        self.content = rundir.read_run(run)
        self.delivered = Delivered(run, exporter.to, anew)
        self._trace_spans = trace_spans
        self._earlier: Counter[str] = Counter()
        """Spans of earlier steps, by trace."""

        self._counted_to = -1
        self._spill = tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True)
        self._con = table.spilling(Path(self._spill.name), MEMORY)
        if threads is not None:
            self._con.execute(f"SET threads = {threads}")

    def close(self) -> None:
        """Close the table engine, and remove its temporary files."""
        self._con.close()
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Remove the temporary files, if need be under a table engine that is still busy."""
        self._spill.cleanup()

    def left(self) -> list[int]:
        """Return the steps that are on the disk and not delivered, in their order."""
        return [step for step in map(number_of, rundir.segments(self.run)) if step not in self.delivered.steps]

    def timed(self, steps: Collection[int]) -> list[int]:
        """Return those of some steps whose times count."""
        files = [rundir.segment(self.run, step) for step in steps]
        rows = self._con.execute(f"SELECT DISTINCT step FROM {table.parquet(files)} WHERE timed") if files else None
        found = {row[0] for row in rows.fetchall()} if rows is not None else set()
        return [step for step in steps if step in found]

    def step(self, number: int) -> bool:
        """Deliver one step.

        Returns:
            Whether the receiver took it, possibly but for spans that it rejected.

        Raises:
            TraceError: its segment is damaged.
            DeliveryError: see `Exporter.bring`.
        """
        self._view(rundir.segment(self.run, number))
        sent = [self._send(name) for name in self._folded("step", number)]
        if None in sent:
            return False
        self.delivered.steps[number] = sum(filter(None, sent))
        self.exporter.counts.steps += 1
        self.delivered.save(at_once=False)
        if self.exporter.counts.trace_id is None:
            self.exporter.counts.trace_id = self._con.execute("SELECT min(trace_id) FROM step").fetchall()[0][0]
        return True

    def run_is_left(self) -> bool:
        """Return whether the run's own span is still to be delivered; traces of others' have none."""
        span = self._run_span()
        return span is not None and span.end_ns != self.delivered.run_end_ns

    def finish(self) -> None:
        """Deliver the run's own span, if it has one.

        Raises:
            DeliveryError: see `Exporter.bring`.
        """
        span, own = self._run_span(), self.content.otel
        if span is None or own is None:
            return
        table.create(self._con, "own")
        loop.show(self._con, [self.run])
        table.insert(self._con, "own", [span, *loop.spans(self._con, own)])
        if self._send("own") is not None:
            self.delivered.run_end_ns = span.end_ns
        self.delivered.save()

    def read_again(self) -> None:
        """Read `run.json` again: it has its last content now."""
        self.content = rundir.read_run(self.run)

    def summary(self) -> dict[str, Any]:
        """Return what `run.json` says of this delivery."""
        return {
            "endpoint": self.exporter.to.name,
            "steps": len(self.delivered.steps),
            "spans": sum(self.delivered.steps.copy().values()) + (self.delivered.run_end_ns is not None),
            "rejected": self.delivered.rejected,
            "left": len(self.left()) + self.run_is_left(),
            "messages": self.delivered.messages,
        }

    def note(self, messages: list[str]) -> None:
        """Let `delivery.json` and `run.json` say what became of the run, in place of what they said before.

        The `run.json` of a run that is not finished is left to the process that writes it.

        Args:
            messages: why something is left or was rejected.
        """
        if self.exporter.to.is_file:
            return
        self.delivered.messages = messages
        self.delivered.save()
        content = rundir.read_run(self.run)
        if not content.finished:
            return
        others = [each for each in content.delivery if each.endpoint != self.exporter.to.name]
        rundir.write_run(self.run, content | {"delivery": [*others, self.summary()]})

    def _send(self, name: str) -> int | None:
        """Send a table's spans; return how many, None if a request was refused."""
        before, sent = self.exporter.counts.rejected, 0
        whole = True
        resources = partial(_resource, self.content, self.exporter.to.service)
        for request in encode.requests(self._con, name, resources, max_bytes=self.exporter.max_bytes):
            whole = self.exporter.bring(request) and whole
            sent += request.spans
        if not whole:
            return None
        rejected = self.exporter.counts.rejected - before
        self.delivered.rejected += rejected
        return sent - rejected

    def _folded(self, name: str, number: int) -> list[str]:
        """Return the tables that stand for a step: itself, or an overview and details if its trace is a large one."""
        if not self._trace_spans:
            return [name]
        query = f"SELECT count(*), min(trace_id), any_value(parent_id) FILTER (kind = '{Kind.STEP}') FROM {name}"
        spans, trace_id, caller = self._con.execute(query).fetchall()[0]
        room = self._trace_spans
        if caller is not None:  # all steps, of all ranks, are in the caller's trace
            share = room // max(1, self.content.world_size or 1)
            room = max(FOLDED_STEP, share - self._earlier_in(trace_id, number))
        if spans <= room:
            return [name]
        from xsp.otlp import zoom

        return zoom.split(self._con, name, room, self._trace_spans)

    def _earlier_in(self, trace_id: str, number: int) -> int:
        """Return how many spans the steps before this one have in a trace.

        The run directory is counted, not what was sent, so that a step that is sent again leaves as before.
        """
        files = [rundir.segment(self.run, step) for step in range(self._counted_to + 1, number)]
        held = [file for file in files if file.exists()]
        if held:
            query = f"SELECT trace_id, count(*) FROM {table.parquet(held)} GROUP BY trace_id"
            self._earlier.update(dict(self._con.execute(query).fetchall()))
        self._counted_to = max(self._counted_to, number - 1)
        return self._earlier[trace_id]

    def _view(self, segment: Path) -> None:
        """Show a segment as `step`, with the links of its root."""
        held = set(table.check_parquet(self._con, segment, COLUMNS))
        own = self.content.otel
        link = json.dumps([[own.trace_id, own.span_id]]) if own is not None else None
        links = f"CASE WHEN kind = '{Kind.STEP}' THEN {table.literal(link)} END" if link else "NULL"
        self._con.execute(
            f"CREATE OR REPLACE VIEW step AS SELECT {table.shown(COLUMNS, held)}, {links}::VARCHAR AS links "
            f"FROM {table.parquet(segment)}"
        )

    def _run_span(self) -> Span | None:
        """Return the run's own span. One that was broken off ends with the last span that it stored."""
        if self.content.otel is None or self.content.start_ns is None:
            return None
        return run_span(self.content, 0 if self.content.finished else self._last_end_ns())

    def _last_end_ns(self) -> int:
        """Return when the last span of the last step ended; 0 where that is not known."""
        segments = rundir.segments(self.run)[-1:]
        try:
            query = f"SELECT max(start_ns + dur_ns) FROM {table.parquet(segments)}"
            return int(self._con.execute(query).fetchall()[0][0]) if segments else 0
        except (duckdb.Error, TypeError):  # damaged, or empty: its step says so
            return 0


def run_span(run: Run, last_end_ns: int = 0) -> Span:
    """Return the span of a run itself, which holds all that `run.json` says but for its deliveries.

    Args:
        run: with a span of its own, `otel`, and a start.
        last_end_ns: when its last span ended, if it was broken off.
    """
    own, start = run.otel, run.start_ns
    if own is None or start is None:
        raise ValueError("the run has no span of its own")
    known = {name: value for name, value in run.items() if name != "delivery"}
    return Span(
        trace_id=own.trace_id,
        span_id=own.span_id,
        parent_id=own.parent_id,
        level=Level.APPLICATION,
        kind=Kind.RUN.value,
        name=semconv.run_span_name(run),
        start_ns=start,
        dur_ns=max(run.end_ns or start, last_end_ns) - start,
        process=run.process,
        rank=run.rank or 0,
        collector="session",
        attributes=json.dumps({semconv.RUN: json.dumps(known, ensure_ascii=False)}, ensure_ascii=False),
    )


def _resource(run: Run, service: str, level: int, rank: int, process: int | None) -> dict[str, str | int]:
    return semconv.resource(run, level, rank, process, service)


def number_of(segment: Path) -> int:
    """Return the number of the step that a segment holds."""
    return int(segment.stem)
