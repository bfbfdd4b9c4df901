"""How many spans per second become OTLP requests: in bulk by xsp, and one by one through OpenTelemetry's own SDK?

Both encode the same spans with the same attributes, up to the bytes to be sent. The SDK starts and ends each span, its
batch processor hands the spans to an exporter in its default batches, and the encoder of its OTLP exporter produces the
bytes; the queue is long enough that no span is dropped. There are two comparisons:

- from memory: the data of the spans is ready, for the SDK as Python objects (names, times, parents, attributes), for
  xsp as arrays and templates;
- from disk: both start from the segments of a run, and the SDK's objects have to be created from their rows.

The number of spans depends on the speed of each way, and the times per span are compared.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from parts import turns
from parts.turns import Condition, Group

from xsp import semconv, table
from xsp.otlp import encode
from xsp.otlp.ordered import Ordered
from xsp.run import Run

GOAL = 100
STEP = 10_000
"""Number of spans in a step, which is one trace and one segment."""

WIDTH, OPS = 100, 50
"""Number of spans of a layer, and the position in it at which its operators end and their kernels begin."""

RUN = {"id": "0123456789abcdef", "name": "bench", "host": "host-0", "rank": 0}

# --- the spans --------------------------------------------------------------------------------------------

_ROWS = f"""
    SELECT printf('%032x', i // {STEP} + 1) AS trace_id, printf('%016x', hash(i + 1)) AS span_id,
           CASE WHEN outer_i IS NOT NULL THEN printf('%016x', hash(outer_i + 1)) END AS parent_id,
           CASE WHEN what <> 'step' THEN 'containment' END AS parent_rule,
           CASE what WHEN 'step' THEN 20 WHEN 'module' THEN 30 WHEN 'op' THEN 40 ELSE 70 END AS level, what AS kind,
           CASE what WHEN 'step' THEN what WHEN 'module' THEN 'features.' || layer WHEN 'op' THEN 'aten::op_' || inside
                ELSE 'void elementwise_kernel<4, launch_' || inside || '<float>>(int, float*)' END AS name,
           'forward' AS phase, 1790000000000000000 + i * 1009 AS start_ns, 500 + i * 7919 % 100000 AS dur_ns,
           4242 AS process, i // {STEP} AS step, 0 AS rank, 70 AS rung, true AS timed, 'ok' AS status,
           printf('%016x', hash(i % {STEP})) AS key, 'bench' AS collector,
           CASE WHEN what = 'kernel' THEN 0 END AS device, CASE WHEN what = 'kernel' THEN 7 END AS stream,
           CASE WHEN what = 'kernel' THEN i END AS correlation_id, CASE WHEN what <> 'kernel' THEN 4243 END AS thread,
           CASE WHEN what = 'op' THEN i END AS sequence_nr, CASE WHEN what = 'module' THEN layer END AS layer_index,
           CASE WHEN what = 'op' THEN '[[8, ' || inside % 7 || ', 56, 56]]' END AS input_shapes,
           CASE WHEN what = 'op' THEN 'float32' END AS dtype, CASE WHEN what = 'op' THEN inside * 1000 END AS flops,
           CASE WHEN what = 'op' THEN 'shapes' END AS flops_source
    FROM (
        SELECT i, i % {STEP} // {WIDTH} AS layer, i % {WIDTH} AS inside,
               CASE WHEN i % {STEP} = 0 THEN 'step' WHEN inside = 0 THEN 'module' WHEN inside < {OPS} THEN 'op'
                    ELSE 'kernel' END AS what,
               CASE what WHEN 'module' THEN i - i % {STEP} WHEN 'op' THEN i - inside
                         WHEN 'kernel' THEN greatest(i - {OPS}, i - inside + 1) END AS outer_i
        FROM range({{first}}, {{last}}) AS _(i)
    )
"""


def write_segments(folder: Path, spans: int) -> list[Path]:
    """Write the segments of a run; return their paths."""
    folder.mkdir()
    con = table.connect()
    paths = []
    for start in range(0, spans, STEP):
        table.create(con, "segment")
        con.execute(f"INSERT INTO segment BY NAME {_ROWS.format(first=start, last=min(start + STEP, spans))}")
        paths.append(folder / f"{start // STEP:06d}.parquet")
        table.write_parquet(con, "segment", paths[-1])
    return paths


def resource_of(level: int, rank: int, process: int | None) -> Mapping[str, str | int]:
    return semconv.resource(Run.of(RUN), level, rank, process)


# --- xsp --------------------------------------------------------------------------------------------------


class Bulk(NamedTuple):
    """The spans of a run, read by one thread or by all cores."""

    con: duckdb.DuckDBPyConnection

    @classmethod
    def of(cls, segments: Sequence[Path], threads: int | None = None, storage: str = "VIEW") -> Bulk:
        con = table.connect()
        if threads:
            con.execute(f"SET threads = {threads}")
        con.execute(f"CREATE {storage} run AS SELECT * FROM {table.parquet(segments)}")
        return cls(con)

    def requests(self) -> Iterator[encode.EncodedRequest]:
        return encode.requests(self.con, "run", resource_of)

    def run(self) -> None:
        for _ in self.requests():
            pass


class Arrays:
    """The same spans with arrays and templates prepared, so that only the encoding of the bytes is timed."""

    def __init__(self, segments: Sequence[Path]) -> None:
        self._spans = Ordered(Bulk.of(segments).con, "run")
        templates = encode._Templates(self._spans)
        self._chunks = [(chunk, *templates.of(chunk)) for chunk in self._spans.chunks()]

    def run(self) -> None:
        header = functools.lru_cache(lambda owner: encode._resource(resource_of(*owner)))
        for chunk, chunk_templates, indices in self._chunks:
            encoded = encode._encode(self._spans, chunk, chunk_templates, indices)
            for _ in encode._split_requests(encoded, header, encode.MAX_BYTES, encode.MAX_SPANS):
                pass


# --- the SDK ----------------------------------------------------------------------------------------------


_COLUMN_OF = {
    name: column
    for name, column in semconv.COLUMN_OF.items()
    if name not in semconv.RESOURCE_COLUMNS and column != "attributes"
}


class SpanData(NamedTuple):
    """The data of a span that a program would pass to the SDK."""

    name: str
    start: int
    end: int
    parent: tuple[int, int]
    """Trace id and span id of the parent; root spans are left out."""

    attributes: dict[str, Any]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> SpanData:
        """Return the SDK's data for a row of the table."""
        attributes = {name: row[column] for name, column in _COLUMN_OF.items() if row[column] is not None}
        attributes["xsp.level"] = semconv.level_name(row["level"])
        parent = int(row["trace_id"], 16), int(row["parent_id"], 16)
        return cls(row["name"], row["start_ns"], row["start_ns"] + row["dur_ns"], parent, attributes)

    def context(self) -> Context:
        """Return the context that passes the parent to the SDK."""
        trace_id, span_id = self.parent
        return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, True, TraceFlags(1))))


class Encoder(SpanExporter):
    """The SDK's OTLP exporter without sending."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.bodies.append(encode_spans(spans).SerializeToString())
        self.spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def decoded_spans(bodies: Iterable[bytes]) -> Iterator[SpanData]:
    """Yield the SDK's data for the spans in encoded requests."""
    for body in bodies:
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for span in itertools.chain.from_iterable(scope.spans for scope in resource.scope_spans):
                values = {
                    attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
                    for attribute in span.attributes
                }
                parent = int.from_bytes(span.trace_id, "big"), int.from_bytes(span.parent_span_id, "big")
                yield SpanData(span.name, span.start_time_unix_nano, span.end_time_unix_nano, parent, values)


def rows(con: duckdb.DuckDBPyConnection) -> Iterator[tuple[SpanData, Context]]:
    """Yield the SDK's data for the rows of the table `run`, with their contexts; root spans are left out."""
    result = con.execute("SELECT * FROM run WHERE parent_id IS NOT NULL ORDER BY level, start_ns")
    names = [column[0] for column in result.description]
    while batch := result.fetchmany(encode.MAX_SPANS):
        for row in batch:
            data = SpanData.from_row(dict(zip(names, row, strict=True)))
            yield data, data.context()


def encode_with_sdk(spans: Iterable[tuple[SpanData, Context]], count: int) -> list[bytes]:
    """Return the requests that the SDK encodes from `count` spans with their contexts."""
    exporter = Encoder()
    provider = TracerProvider(resource=Resource(dict(resource_of(40, 0, 4242))))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=count + 1))
    tracer = provider.get_tracer("xsp")
    for data, context in spans:
        tracer.start_span(data.name, context, attributes=data.attributes, start_time=data.start).end(data.end)
    provider.shutdown()
    if exporter.spans != count:
        raise SystemExit(f"the SDK exported {exporter.spans} of {count} spans: nothing to compare")
    return exporter.bodies


def assert_same(sample: Bulk, pairs: Sequence[tuple[SpanData, Context]]) -> None:
    """End the script if the SDK's spans, decoded, are not those of xsp: they could not be compared."""

    def span_counts(bodies: Iterable[bytes]) -> Counter[str]:
        children = (data for data in decoded_spans(bodies) if data.parent[1])
        return Counter(repr(data._replace(attributes=dict(sorted(data.attributes.items())))) for data in children)

    if span_counts(request.body for request in sample.requests()) != span_counts(encode_with_sdk(pairs, len(pairs))):
        raise SystemExit("the SDK and xsp encode different spans: nothing to compare")


# --- the comparison ---------------------------------------------------------------------------------------

FROM_MEMORY, FROM_DISK = ("SDK, from objects", "xsp, from arrays"), ("SDK, from segments", "xsp, from segments")
ONE_THREAD, TABLE = "xsp, from segments, one thread", "xsp, from a table in memory"
PEER = {FROM_MEMORY[1]: FROM_MEMORY[0], **dict.fromkeys((FROM_DISK[1], ONE_THREAD, TABLE), FROM_DISK[0])}
"""Way → the way that it is compared with."""


def conditions(folder: Path, spans: int, sdk_spans: int) -> tuple[dict[str, Callable[[], object]], dict[str, int], str]:
    """Return the functions to measure, the number of spans that each encodes, and a sentence about the spans."""
    segments = write_segments(folder / "run", spans)
    all_spans, sample = Bulk.of(segments), Bulk.of(write_segments(folder / "few", sdk_spans))
    pairs = list(rows(sample.con))
    assert_same(sample, pairs)
    sizes = [(len(request.body), request.spans) for request in all_spans.requests()]
    attributes = sum(len(data.attributes) for data, _ in pairs) / len(pairs)
    about = (
        f"Spans have {attributes:.1f} attributes on average; xsp's {len(sizes)} requests hold "
        f"{sum(size for size, _ in sizes) / spans:.0f} bytes per span, the largest {max(sizes)[0]:,} bytes."
    )
    runs = {
        FROM_MEMORY[0]: lambda: encode_with_sdk(pairs, len(pairs)),
        FROM_MEMORY[1]: Arrays(segments).run,
        FROM_DISK[0]: lambda: encode_with_sdk(rows(sample.con), len(pairs)),
        FROM_DISK[1]: all_spans.run,
        ONE_THREAD: Bulk.of(segments, threads=1).run,
        TABLE: Bulk.of(segments, storage="TABLE").run,
    }
    return runs, {name: spans if name in PEER else len(pairs) for name in runs}, about


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=12)
    parser.add_argument("--spans", type=int, default=1_000_000, help="encoded at once by xsp (default: 1,000,000)")
    options = turns.parse(parser, arguments)
    if options.quick:
        options.spans = 50_000
    with tempfile.TemporaryDirectory() as folder:
        _report(options, Path(folder))


def _report(options: argparse.Namespace, folder: Path) -> None:
    runs, spans, about = conditions(folder, options.spans, min(options.spans, 2 * STEP))
    columns = ("spans → OTLP requests", "spans", "spans/s [95 %]", "times the SDK from the same [95 %]", f"≥ {GOAL}")
    report = turns.Report("otlp_encode", "Spans encoded per second, in turns", columns)
    method = turns.turns_of(options)
    rounds = method.take([Group([Condition(name, run) for name, run in runs.items()])], options.rounds)
    for name in runs:
        speeds = [spans[name] / round_times[name] * 1e9 for round_times in rounds]
        peer = PEER.get(name, name)
        times = [
            speed / (spans[peer] / round_times[peer] * 1e9) for speed, round_times in zip(speeds, rounds, strict=True)
        ]
        ratio = turns.middle(times)
        cells = [ratio.text(0), _verdict(ratio)] if name in PEER else ["", ""]
        report.add([name, f"{spans[name]:,}", turns.middle(speeds).text(0), *cells], times=times, speeds=speeds)
    report.notes += [about, method.note()]
    report.finish(options)


def _verdict(ratio: turns.Figure) -> str:
    is_certain = ratio.lo >= GOAL or ratio.hi < GOAL
    return ("met" if ratio.value >= GOAL else "missed") + ("" if is_certain else "?")


if __name__ == "__main__":
    main()
