"""Read traces in Chrome's JSON format of programs other than PyTorch's profiler.

Such a trace has no layers and no operators: its spans are those of the application, which nest by time on each thread.
Device work is recognised if the metadata names a device. What XLA's profiler exported for JAX or TensorFlow
(`.trace.json.gz`) has more, see `xsp.importers.xla`. Other arguments of events are not imported: they can name people
and machines.
"""

from __future__ import annotations

import duckdb

from xsp import callnames, table
from xsp.importers import proton, traceevents, xla
from xsp.importers.contract import MAX_TIME_NS, RAW_COLUMNS, Losses, SourceInfo, TableImporter
from xsp.importers.kineto import Kineto, is_kineto
from xsp.importers.kineto_rows import CATEGORIES
from xsp.schema import Kind, Level

NOT_SPANS = {
    "i": "instants", "I": "instants", "R": "instants", "n": "instants", "T": "instants", "p": "instants",
    "C": "values of counters", "P": "samples", "N": "objects", "O": "objects", "D": "objects",
    "v": "dumps of memory", "V": "dumps of memory", "s": "arrows", "t": "arrows", "f": "arrows",
}  # fmt: skip
"""Phases that are not spans and are counted as left out; M (metadata), c and the like are not counted."""


class Chrome(TableImporter):
    """Chrome's JSON format: VizTracer, JAX and TensorFlow, Chrome itself."""

    name = "chrome"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is JSON with trace events of neither PyTorch nor Proton."""
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        events = (text[:1] == b"{" and b'"traceEvents"' in text) or (text[:1] == b"[" and b'"ph"' in text)
        return events and not is_kineto(head) and not proton.is_timeline(head)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file cannot be read.
        """
        envelope = traceevents.read(con, source, _Events())
        if con.execute(FROM_TORCH).fetchall():
            con.execute("DROP TABLE events")  # as large as the file, and not needed any more
            return Kineto().fill(con, source)
        losses = Losses(self.name)
        if envelope.is_unclosed:
            losses.note("the list of trace events is not closed: the program that wrote it ended early")
        return interpret(con, source, losses)


def interpret(con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> SourceInfo:
    """Make the table `raw_spans` from trace events, and drop their table.

    Args:
        con: holds the table `events`, with the columns of `traceevents.Events` and arguments as `ARGS` gives them.
        source: path of the file, for errors.
        losses: counts what is left out.

    Raises:
        TraceError: it is from XLA's profiler, and holds no event.
    """
    _count(con, losses)
    if con.execute(_FROM_XLA).fetchall():
        return _from_xla(con, source, losses)
    _fill(con, losses)
    devices = con.execute("SELECT DISTINCT device FROM raw_spans WHERE device IS NOT NULL").fetchall()
    return SourceInfo({"machine": {"devices": ["unknown"] * (max(devices)[0] + 1)}} if devices else {}, losses)


# --- arguments --------------------------------------------------------------------------------------------


def _argument(name: str) -> str:
    return f"args ->> {table.literal(f'$.{name}')}"


ARGS = f"""
    CASE WHEN ph IN ('X', 'M') THEN {{
        'name': substr({_argument("name")}, 1, 1024), 'step': TRY_CAST({_argument("step_num")} AS BIGINT),
        'correlation': TRY_CAST({_argument("correlation_id")} AS BIGINT),
        'details': substr(coalesce({_argument("kernel_details")}, {_argument("memcpy_details")},
                                   {_argument("memset_details")}), 1, 1024),
        'op': substr({_argument("hlo_op")}, 1, 256), 'scope': substr({_argument("tf_op")}, 1, 1024),
        'module': substr(coalesce({_argument("hlo_module")}, {_argument("module_name")}), 1, 256),
        'flops': TRY_CAST({_argument("flops")} AS BIGINT), 'bytes': TRY_CAST({_argument("bytes_accessed")} AS BIGINT),
        'replayed': coalesce({_argument("cuda_graph_id")}, {_argument("cuda_graph_exec_id")}) IS NOT NULL,
        'has_stream': lower(cat) = 'kernel' AND {_argument("stream")} IS NOT NULL
    }} END
"""


class _Events(traceevents.Events):
    args = ARGS


_SHARED_CATEGORIES = ("runtime", "driver", "kernel", "memory", "overhead", "operator")
"""Categories that other programs use too."""

_OWN_CATEGORIES = {name for names in CATEGORIES.values() for name in names} - {*_SHARED_CATEGORIES}

FROM_TORCH = f"""
    SELECT 1 FROM events
    WHERE ph = 'X' AND (lower(cat) IN ({", ".join(map(table.literal, sorted(_OWN_CATEGORIES)))})
                        OR args.has_stream)
    LIMIT 1
"""
"""Whether PyTorch wrote the file; its first bytes do not always show it."""


# --- XLA's profiler -----------------------------------------------------------------------------------------

_FROM_XLA = f"""
    SELECT 1 FROM events WHERE ph = 'M' AND name = 'process_name'
        AND regexp_matches(args.name, {table.literal(xla.PLANE)}) LIMIT 1
"""

_NUMBERED = "coalesce(TRY_CAST({0} AS BIGINT), dense_rank() OVER (ORDER BY {0}) + 1000000000)"

_XLA_EVENTS = f"""
    SELECT {_NUMBERED.format("e.pid")} AS process, {_NUMBERED.format("e.tid")} AS line,
           coalesce(owner, '/host:') AS plane, line_name, coalesce(e.name, 'unnamed') AS name, ts_ns AS start_ns,
           dur_ns, args.correlation AS correlation, args.step AS step, nullif(args.op, '') AS op,
           nullif(args.module, '') AS module, args.details AS details, args.flops AS flops, args.bytes AS bytes,
           args.replayed AS replayed,
           rtrim(CASE WHEN contains(args.scope, '/') AND NOT starts_with(args.scope, 'XlaModule') THEN args.scope
                      WHEN contains(args.name, '/') THEN args.name END, ':') AS scope
    FROM events e LEFT JOIN (
        SELECT pid, any_value(args.name) AS owner FROM events WHERE ph = 'M' AND name = 'process_name' GROUP BY pid
    ) owners ON owners.pid IS NOT DISTINCT FROM e.pid LEFT JOIN (
        SELECT pid, tid, any_value(args.name) AS line_name FROM events
        WHERE ph = 'M' AND name = 'thread_name' GROUP BY ALL
    ) lines ON lines.pid IS NOT DISTINCT FROM e.pid AND lines.tid IS NOT DISTINCT FROM e.tid
    WHERE ph = 'X'
"""


def _from_xla(con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> SourceInfo:
    """Read the trace events that XLA's profiler exported."""
    ((others,),) = con.execute("SELECT count(*) FROM events WHERE ph IN ('B', 'E', 'b', 'e', 'S', 'F')").fetchall()
    if others:
        losses.skipped["begins and ends, which XLA's profiler does not write"] += others
    owners = con.execute("SELECT DISTINCT args.name FROM events WHERE ph = 'M' AND name = 'process_name'").fetchall()
    xla.create(con)
    con.execute(f"INSERT INTO xla_events BY NAME {_XLA_EVENTS}")
    con.execute("DROP TABLE events")
    run = xla.fill(con, source, losses, losses.importer)
    devices = [device for (owner,) in owners if owner and (device := xla.device_of(owner)) is not None]
    return SourceInfo({**run, "machine": {"devices": ["unknown"] * (max(devices, default=-1) + 1)}}, losses)


# --- the table --------------------------------------------------------------------------------------------


def _count(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Count events that are not spans, and remove events without a usable time."""
    con.execute("DELETE FROM events WHERE ph IS NULL AND name IS NULL AND ts_ns IS NULL")  # `{}` ends XLA's lists
    rows = con.execute("SELECT ph, count(*) FROM events GROUP BY ph ORDER BY 2 DESC").fetchall()
    for phase, count in rows:
        if phase in NOT_SPANS:
            losses.skipped[f"{NOT_SPANS[phase]}, not spans"] += count
        elif phase is None or phase not in "XBEbeSFMc(),":
            losses.skipped[f"events of the unknown phase {str(phase)[:20]!r}"] += count
    invalid = f"ph <> 'M' AND coalesce(ts_ns < 0 OR ts_ns >= {MAX_TIME_NS}, true)"
    invalid += f" OR ph = 'X' AND coalesce(dur_ns < 0 OR dur_ns >= {MAX_TIME_NS}, true)"
    ((count, first),) = con.execute(f"SELECT count(*), min(number) FROM events WHERE {invalid}").fetchall()
    if count:
        losses.skipped[f"without a time, or with a negative one (the first is event {first})"] += count
        con.execute(f"DELETE FROM events WHERE {invalid}")
    ((latest,),) = con.execute("SELECT max(ts_ns) FROM events WHERE ph <> 'M'").fetchall()
    if latest is not None and latest < 10**18:
        losses.note("times count from an origin that the file does not name, not from 1970")


def _fill(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    table.create(con, "raw_spans", RAW_COLUMNS)
    for name, query in {"chrome_threads": _THREADS, "chrome_pairs": PAIRS, "chrome_async": _ASYNC}.items():
        con.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}")
    for part in (_COMPLETE, _PAIRED, _PAIRED_ASYNC):
        con.execute(f"INSERT INTO raw_spans BY NAME {part}")
    for reasons, reason, rows in (
        (losses.changed, "spans without an end, taken to last until the last event", "chrome_pairs WHERE no_end"),
        (losses.skipped, "ends without a begin", "chrome_pairs WHERE no_begin"),
        (losses.skipped, "asynchronous spans without an end, a begin or an id",
         "chrome_async WHERE no_begin OR no_end"),
    ):  # fmt: skip
        ((count,),) = con.execute(f"SELECT count(*) FROM {rows}").fetchall()
        if count:
            reasons[reason] += count
    ((losses.spans,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
    for name in ("chrome_threads", "chrome_pairs", "chrome_async", "events"):
        con.execute(f"DROP TABLE {name}")


_ON_THREAD = "ON p.pid IS NOT DISTINCT FROM e.pid AND p.tid IS NOT DISTINCT FROM e.tid"

_THREADS = r"""
    WITH owners AS (
        SELECT pid, any_value(args.name) AS owner FROM events WHERE ph = 'M' AND name = 'process_name' GROUP BY pid
    ), thread_names AS (
        SELECT pid, tid, any_value(args.name) AS line FROM events WHERE ph = 'M' AND name = 'thread_name' GROUP BY ALL
    ), event_threads AS (
        SELECT DISTINCT pid, tid FROM events WHERE ph <> 'M'
    ), named_threads AS (
        SELECT event_threads.pid, event_threads.tid, line, owner,
               TRY_CAST(nullif(regexp_extract(owner, '(?i)^gpu ?#?(\d{1,4})$', 1), '') AS INTEGER) AS device
        FROM event_threads LEFT JOIN owners ON owners.pid IS NOT DISTINCT FROM event_threads.pid
        LEFT JOIN thread_names ON thread_names.pid IS NOT DISTINCT FROM event_threads.pid
             AND thread_names.tid IS NOT DISTINCT FROM event_threads.tid
    )
    SELECT pid, tid, device, CASE WHEN device IS NULL THEN
               coalesce(TRY_CAST(pid AS BIGINT), dense_rank() OVER (ORDER BY pid) + 1000000000) END AS process,
           CASE WHEN device IS NOT NULL THEN coalesce(TRY_CAST(regexp_extract(line, '#(\d+)', 1) AS BIGINT),
                                                      TRY_CAST(tid AS BIGINT), 0) END AS stream,
           CASE WHEN device IS NULL THEN
               coalesce(TRY_CAST(tid AS BIGINT), dense_rank() OVER (ORDER BY tid) + 1000000000) END AS thread
    FROM named_threads
"""
"""Process and thread, or device and stream, for each pair of `pid` and `tid`."""

_NAME = r"coalesce(regexp_replace(e.name, '\((/|[A-Za-z]:\\)[^()]*[/\\]([^/\\()]+:\d+)\)', '(\2)'), 'unnamed')"
"""Names without directories: VizTracer adds the path of the file to the name of a function."""

_COMPLETE = f"""
    SELECT number, {_NAME} AS name, process, thread, device, stream, ts_ns AS start_ns, dur_ns,
           CASE WHEN device IS NOT NULL THEN {int(Level.KERNEL)} WHEN e.args.step IS NOT NULL THEN {int(Level.MODEL)}
                WHEN e.args.correlation IS NOT NULL THEN {int(Level.RUNTIME)}
                ELSE {int(Level.APPLICATION)} END AS level,
           CASE WHEN device IS NOT NULL AND regexp_matches(e.name, '(?i)^mem(cpy|set)') THEN '{Kind.COPY}'
                WHEN device IS NOT NULL THEN '{Kind.KERNEL}' WHEN e.args.step IS NOT NULL THEN '{Kind.STEP}'
                WHEN e.args.correlation IS NOT NULL THEN {callnames.KIND}
                ELSE '{Kind.USER}' END AS kind,
           e.args.correlation AS correlation_id, 'ok' AS status, 'chrome' AS collector, false AS replayed
    FROM events e JOIN chrome_threads p {_ON_THREAD} WHERE ph = 'X'
"""


def _brackets(begin_phases: str, end_phases: str, line: str) -> str:
    """Return the SQL of begin events paired with end events, like brackets.

    Within a line each event gets its nesting depth; at one depth begins and ends alternate. An end that lowers the
    depth below its minimum so far has no begin, and sets a new minimum.

    Args:
        begin_phases: the phases of begin events, as a list in SQL.
        end_phases: the phases of end events, likewise.
        line: the columns in which the events of a line agree.
    """
    order = f"(PARTITION BY {line} ORDER BY ts_ns, number)"
    return f"""
    WITH nesting AS (
        SELECT *, ph IN ({begin_phases}) AS is_begin,
               sum(CASE WHEN ph IN ({begin_phases}) THEN 1 ELSE -1 END) OVER {order} AS running
        FROM events WHERE ph IN ({begin_phases}, {end_phases})
    ), minima AS (
        SELECT *, least(0, min(running) OVER {order}) AS ground FROM nesting
    ), depths AS (
        SELECT *, running - ground + CASE WHEN is_begin THEN 0 ELSE 1 END AS depth,
               NOT is_begin AND ground < coalesce(lag(ground) OVER {order}, 0) AS no_begin
        FROM minima
    ), pairs AS (
        SELECT *, CASE WHEN NOT lead(is_begin) OVER box THEN lead(ts_ns) OVER box END AS end_ns
        FROM depths WHERE NOT no_begin WINDOW box AS (PARTITION BY {line}, depth ORDER BY ts_ns, number)
    )
    SELECT number, name, pid, tid, ts_ns, coalesce(end_ns, greatest(ts_ns, (SELECT max(ts_ns + coalesce(dur_ns, 0))
               FROM events WHERE ph IN ('X', 'B', 'E')))) AS end_ns,
           end_ns IS NULL AS no_end, false AS no_begin
    FROM pairs WHERE is_begin
    UNION ALL SELECT number, name, pid, tid, ts_ns, ts_ns, false, true FROM depths WHERE no_begin
    """


PAIRS = _brackets("'B'", "'E'", "pid, tid")
_ASYNC = _brackets("'b', 'S'", "'e', 'F'", "pid, cat, id, name, CASE WHEN id IS NULL THEN number END")
"""Asynchronous spans of one id and one name nest; without an id, no end belongs to a begin."""

_LOCATION = "process, thread, device, stream"
_HOST = f"""
    CASE WHEN device IS NULL THEN {int(Level.APPLICATION)} ELSE {int(Level.KERNEL)} END AS level,
    CASE WHEN device IS NULL THEN '{Kind.USER}' ELSE '{Kind.KERNEL}' END AS kind,
    'chrome' AS collector, false AS replayed
"""

_PAIRED = f"""
    SELECT number, {_NAME} AS name, {_LOCATION}, ts_ns AS start_ns, end_ns - ts_ns AS dur_ns,
           CASE WHEN no_end THEN 'unclosed' ELSE 'ok' END AS status, {_HOST}
    FROM chrome_pairs e JOIN chrome_threads p {_ON_THREAD} WHERE NOT no_begin
"""

_PAIRED_ASYNC = f"""
    SELECT number, {_NAME} AS name, process, ts_ns AS start_ns, end_ns - ts_ns AS dur_ns, 'ok' AS status,
           {int(Level.APPLICATION)} AS level, '{Kind.USER}' AS kind, 'chrome' AS collector, false AS replayed
    FROM chrome_async e JOIN chrome_threads p {_ON_THREAD} WHERE NOT no_begin AND NOT no_end
"""
