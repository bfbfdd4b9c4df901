"""A second process that assigns parents to a service's spans, to take that work off the service's threads.

It gets the raw rows of some calls of models, and returns the spans of each call in the form that OpenTelemetry needs.
Or it sends them over OTLP itself, and returns only their number.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from xsp import identity, semconv, transport
from xsp.correlate.evidence import correlate
from xsp.errors import XspError
from xsp.schema import COLUMNS, Span

NICE = 10
"""Niceness of the second process, so that the service's processes have precedence."""

PATIENCE_S = 30.0
"""Seconds for which sending to a receiver is retried."""

_SIMPLE_TYPES = (str, bool, int, float)
_HOST_ATTRIBUTES = ("host.id", "host.ip", "host.name")


class CallRequest(NamedTuple):
    """A call of a model: the place of its spans in the trace, and which spans it gets."""

    row: int
    """Index of the call's own row among the recorded rows."""

    trace_id: str
    span_id: str
    """Id of the model's span, which the service's own tracer made."""

    rung: int
    """The deepest level that it gets, from the listed collectors."""

    collectors: list[str]
    otlp: str | None
    """Target to send its spans to, as in `xsp.otlp.endpoint`; None to return them."""

    resource: dict[str, Any]
    """The attributes of the service's resource."""


class RecordedCalls(NamedTuple):
    """The rows that were recorded during some calls."""

    process: int
    calls: list[CallRequest]
    rows: list[tuple[Any, ...]]


class FinishedSpan(NamedTuple):
    """A span with its parent, in OpenTelemetry's form."""

    name: str
    level: int
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: str
    """Status as in the table: `ok`, `error:<exception type>`, …"""

    attributes: dict[str, Any]
    trace_id: str = ""
    """Its trace; empty for that of the call."""

    links: tuple[Any, ...] = ()
    """Links of OpenTelemetry's API; none of spans that come from the second process."""


class CallOutcome(NamedTuple):
    """The outcome of one call's rows."""

    spans: list[FinishedSpan]
    """Spans for the service's own processors; empty if the second process sent them."""

    sent: int = 0
    strangers: int = 0
    """Spans that were recorded at the same time and could not be assigned to any of the calls; only the answer for the
    first call counts them."""

    ambiguous: int = 0
    """Strangers that may belong to this call as well as to another."""

    problem: str | None = None
    """Why spans are missing."""


class CorrelatorError(XspError):
    """The second process did not start, or ended."""


def pack(recorded: RecordedCalls) -> bytes:
    """Return calls serialized for the pipe, a tenth of the size of their rows."""
    return marshal.dumps((recorded.process, [tuple(call) for call in recorded.calls], recorded.rows))


# --- in the service -------------------------------------------------------------------------------------


class Correlator(transport.SecondProcess):
    """The service's side of the second process."""

    def __init__(self) -> None:
        """Start the second process.

        Raises:
            CorrelatorError: the process does not start.
        """
        super().__init__("xsp.instrumentation.worker", purpose="correlates")
        if self.process is None:
            raise CorrelatorError(self.failure)

    def correlate(self, packed: bytes) -> list[CallOutcome]:
        """Return the outcome of each call; waits for it.

        Args:
            packed: the calls, as returned by `pack`.

        Raises:
            CorrelatorError: the process is gone.
        """
        answers = self.ask(packed)
        if answers is None:
            raise CorrelatorError("the process that correlates has ended; the next call starts it again")
        return [CallOutcome([FinishedSpan(*span) for span in spans], *rest) for spans, *rest in answers]


# --- in the second process --------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the second process."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    transport.serve(contextlib.nullcontext(_Answers().answer))


class _Answers:
    """The processing of calls, each with its own target."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def answer(self, message: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the answers to packed calls. Never raises: the service must get an answer and continue."""
        process, calls, rows = message
        call_requests = [CallRequest(*call) for call in calls]
        try:
            results = spans_of(RecordedCalls(process, call_requests, rows))
        except Exception as error:
            problem = f"spans could not be correlated: {type(error).__name__}: {error}"
            return [([], 0, 0, 0, problem)] * len(call_requests)
        return [self._answer_call(call, call_spans) for call, call_spans in zip(call_requests, results, strict=True)]

    def _answer_call(self, call: CallRequest, result: CallSpans) -> tuple[Any, ...]:
        counts = result.strangers, result.ambiguous
        try:
            if call.otlp is None:
                return [tuple(to_finished_span(span)) for span in result.spans], 0, *counts, None
            target = json.dumps([call.otlp, call.resource], sort_keys=True, default=str)
            if target not in self._senders:
                self._senders[target] = _Sender(call.otlp, call.resource)
            sent, problem = self._senders[target](result.spans)
            return [], sent, *counts, problem
        except XspError as error:
            return [], 0, *counts, str(error)
        except Exception as error:
            return [], 0, *counts, f"spans could not be sent: {type(error).__name__}: {error}"


class _Sender:
    """Sending over OTLP; the table engine and the encoder are loaded here and never in the service."""

    def __init__(self, target: str, resource: Mapping[str, Any]) -> None:
        from xsp import table
        from xsp.otlp.endpoint import endpoint
        from xsp.otlp.send import Exporter

        self._resource = resource
        self._con = table.connect(1)
        self._exporter = Exporter(endpoint(target), PATIENCE_S)

    def __call__(self, spans: Iterable[Span]) -> tuple[int, str | None]:
        """Send the spans of a call; return how many were sent, and why some were not."""
        from xsp import table
        from xsp.otlp import zoom
        from xsp.otlp.encode import requests

        sent_before, problem = self._exporter.counts.spans, None
        table.create(self._con, "spans")
        table.insert(self._con, "spans", spans)
        for part in zoom.split(self._con, "spans"):
            for request in requests(self._con, part, self._resource_of, max_bytes=self._exporter.max_bytes):
                if not self._exporter.deliver(request):
                    problem = "; ".join(self._exporter.counts.messages)
        return self._exporter.counts.spans - sent_before, problem

    def _resource_of(self, level: int, rank: int, process: int | None) -> dict[str, Any]:
        return level_resource(self._resource, level)


def level_resource(resource: Mapping[str, Any], level: int) -> dict[str, Any]:
    """Return the resource of a deeper level: the service's resource, renamed to a separate service `name.level`.

    Viewers colour and filter by service. If the service's resource names no host, a pseudonym is added, because viewers
    distrust the clocks of spans whose hosts they do not know.
    """
    host = {} if any(name in resource for name in _HOST_ATTRIBUTES) else {"host.id": identity.host()}
    name = f"{resource.get('service.name', 'unknown_service')}.{semconv.level_name(level)}"
    return {**resource, **host, "service.name": name}


class CallSpans(NamedTuple):
    """The spans that belong to one call."""

    spans: list[Span]
    """The spans below the model's span, parents first."""

    strangers: int
    """As in `CallOutcome`."""

    ambiguous: int


def spans_of(recorded: RecordedCalls) -> list[CallSpans]:
    """Return the spans that belong to each call.

    All threads are recorded at the same time, including those of other requests. All rows are correlated together: work
    without a thread belongs to a call only if it cannot belong to another call.
    """
    rows = _rows(recorded)
    roots = {call.span_id: index for index, call in enumerate(recorded.calls)}
    owners: dict[str | None, int] = {}
    keys: dict[str | None, int] = {}
    candidate_texts: list[str] = []
    for span in correlate(rows):  # parents come first
        index = roots.get(span.span_id or "", owners.get(span.parent_id))
        if index is not None:
            owners[span.span_id], keys[span.key] = index, index
        elif span.attributes and '"candidates"' in span.attributes:
            candidate_texts.append(span.attributes)
    ambiguous: Counter[int] = Counter()  # for each call the spans that may belong to it or to another
    for text in candidate_texts:
        ambiguous.update({keys[key] for key in json.loads(text)["candidates"] if key in keys})
    results = []
    for index, call in enumerate(recorded.calls):
        call_rows = [row for row in rows if owners.get(row.span_id) == index]
        requested = [
            row._replace(trace_id=call.trace_id, rung=call.rung)
            for row in call_rows
            if row.level <= call.rung and row.collector in (None, *call.collectors)
        ]
        # correlated again without the other rows, which would change the numbers of layers and the keys
        spans = [span for span in correlate(requested) if span.span_id != call.span_id]
        results.append(CallSpans(spans, 0 if index else len(rows) - len(owners), ambiguous[index]))
    return results


def _rows(recorded: RecordedCalls) -> list[Span]:
    """Return the rows with ids; the models' rows get the ids of their OpenTelemetry spans."""
    models = {call.row: call for call in recorded.calls}
    rows = []
    for index, row in enumerate(map(Span._make, recorded.rows)):
        call = models.get(index)
        span_id = call.span_id if call is not None else row.span_id or os.urandom(8).hex()
        rows.append(row._replace(process=recorded.process, span_id=span_id, timed=True))
    return rows


def to_finished_span(span: Span) -> FinishedSpan:
    """Return a span in OpenTelemetry's form."""
    return FinishedSpan(
        name=span.name,
        level=span.level,
        span_id=span.span_id or "",
        parent_id=span.parent_id or "",
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=span.status,
        attributes=attributes(span),
    )


def attributes(span: Span) -> dict[str, Any]:
    """Return the attributes of a span; values that the SDK does not support become JSON."""
    result: dict[str, Any] = {}
    value: Any
    for column, value in zip(COLUMNS, span, strict=True):
        if value is None or column.attribute is None or column.attribute in semconv.RESOURCE_COLUMNS:
            continue
        if column.name == "attributes":
            result |= {name: _plain(entry) for name, entry in semconv.flat(value).items() if entry is not None}
        else:
            result[column.attribute] = semconv.level_name(value) if column.name == "level" else value
    if span.status.startswith("error:"):
        result["error.type"] = span.status.removeprefix("error:")
    return result


def _plain(value: Any) -> Any:
    is_simple = isinstance(value, _SIMPLE_TYPES)
    is_uniform = (
        isinstance(value, list) and value and {type(element) for element in value} in [{kind} for kind in _SIMPLE_TYPES]
    )
    return value if is_simple or is_uniform else json.dumps(value)
