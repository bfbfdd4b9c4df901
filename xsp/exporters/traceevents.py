"""The trace events of a Chrome JSON file as SQL over `track_spans`: spans, memory counters, flows."""

from __future__ import annotations

import duckdb

from xsp.schema import COLUMNS, Column, Kind, Level

_CATEGORIES = {
    Kind.MODULE: "python_function", Kind.OP: "cpu_op", Kind.LAUNCH: "cuda_runtime", Kind.SYNC: "cuda_runtime",
    Kind.KERNEL: "kernel", Kind.OVERHEAD: "overhead", Kind.PRIMITIVE: "primitive",
}  # fmt: skip
"""Kineto's category for each kind of span; it has none for primitives of a CPU library. Other kinds are annotations."""

_OMITTED_COLUMNS = {
    "trace_id", "span_id", "parent_id", "parent_rule", "name", "start_ns", "dur_ns", "process", "thread", "rank",
    "level", "layer_id", "correlation_id", "sequence_nr", "forward_thread", "device", "stream", "input_shapes",
    "collector", "attributes", "rung", "timed",
}  # fmt: skip
"""Columns that are not repeated in `args`: the format has fields for them, or only the table needs them."""

_KINETO_NAMES = {
    "grid": "grid", "block": "block", "registers": "registers per thread", "shared_bytes": "shared memory",
    "blocks_per_sm": "blocks per SM", "warps_per_sm": "warps per SM", "bytes": "bytes",
    "xsp.collective.name": "Collective name", "xsp.collective.in_elements": "In msg nelems",
    "xsp.collective.out_elements": "Out msg nelems", "xsp.collective.dtype": "dtype",
    "xsp.collective.group_size": "Group size", "xsp.collective.communicator": "Process Group Name",
}  # fmt: skip
"""Names in Kineto's traces of attributes that tools for them look for."""


def make_views(con: duckdb.DuckDBPyConnection) -> None:
    """Create the tables that events are joined with: names of layers, true times, and attributes that are JSON."""
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE layer_names AS
        SELECT trace_id, span_id AS layer_id, any_value(name) AS layer_name
        FROM timed_spans WHERE level = {int(Level.LAYER)} GROUP BY ALL
        """
    )
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE true_times AS
        SELECT trace_id, span_id, any_value(true_ns) AS true_ns FROM merged WHERE true_ns IS NOT NULL GROUP BY ALL
        """
    )
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW drawn_spans AS
        SELECT track_spans.* REPLACE (
                   CASE WHEN json_valid(attributes) THEN attributes END AS attributes,
                   CASE WHEN json_valid(input_shapes) THEN input_shapes END AS input_shapes),
               pid, tid, layer_name, true_ns
        FROM track_spans JOIN track_ids USING (track)
        LEFT JOIN layer_names USING (trace_id, layer_id) LEFT JOIN true_times USING (trace_id, span_id)
        """
    )


def _argument(name: str, value: str) -> str:
    """Return the SQL of an argument; NULL if its value is NULL."""
    return f"""'"{name}":' || {value}"""


def _column_argument(column: Column) -> str:
    value = column.name if column.type != "VARCHAR" else f"to_json({column.name})"
    if column.name == "status":
        value = f"CASE WHEN status <> 'ok' THEN {value} END"
    return _argument(column.name, value)


_ON_DEVICE = f"device IS NOT NULL AND level >= {int(Level.KERNEL)}"
_NUMBER_OF = "TRY_CAST('0x' || substr({}, 4) AS BIGINT)"
"""SQL of a number for a span id that fits a double; if two spans get the same number, a tool may link the wrong one."""

_LEVEL = (
    "CASE level " + " ".join(f"WHEN {int(level)} THEN '{level.name}'" for level in Level) + " ELSE level::VARCHAR END"
)

_ARGUMENTS = [
    _argument("level", f"to_json({_LEVEL})"),
    _argument("layer", "to_json(layer_name)"),
    _argument("true_ns", "true_ns::BIGINT"),
    *[_column_argument(column) for column in COLUMNS if column.name not in _OMITTED_COLUMNS],
    _argument("rung", f"CASE WHEN kind = '{Kind.STEP}' THEN rung END"),
    _argument("timed", f"CASE WHEN kind = '{Kind.STEP}' THEN timed END"),
    _argument("correlation", "correlation_id"),
    _argument("device", "device"),
    _argument("stream", "stream"),
    _argument(
        "External id",
        f"CASE WHEN kind = '{Kind.OP}' THEN {_NUMBER_OF.format('span_id')} "
        f"WHEN level >= {int(Level.RUNTIME)} THEN {_NUMBER_OF.format('parent_id')} END",
    ),
    _argument("Sequence number", "sequence_nr"),
    _argument("Fwd thread id", "forward_thread"),
    _argument("Input Dims", "input_shapes"),
    _argument(
        "est. achieved occupancy %", "CASE WHEN occupancy_source = 'estimate' THEN round(occupancy * 100)::INTEGER END"
    ),
    *[
        _argument(kineto_name, f"""json_extract(attributes, '$."{name}"')::VARCHAR""")
        for name, kineto_name in _KINETO_NAMES.items()
    ],
    _argument("attributes", "attributes"),
    _argument("recorded_ns", "CASE WHEN begin_ns <> start_ns OR width_ns <> dur_ns THEN '[' || start_ns - $5 || ',' || "
              "dur_ns || ']' END"),
]  # fmt: skip

_CATEGORY = (
    f"CASE WHEN kind = '{Kind.COPY}' THEN CASE WHEN name ILIKE 'memset%' "
    "OR json_extract_string(attributes, '$.copy') = 'memset' THEN 'gpu_memset' ELSE 'gpu_memcpy' END "
    f"WHEN kind = '{Kind.CALL}' AND level = {int(Level.RUNTIME)} THEN 'cuda_runtime' "
    f"WHEN kind = '{Kind.SYNC}' AND device IS NOT NULL THEN 'cuda_sync' "
    + " ".join(f"WHEN kind = '{kind}' THEN '{category}'" for kind, category in _CATEGORIES.items())
    + " WHEN device IS NOT NULL THEN 'gpu_user_annotation' ELSE 'user_annotation' END"
)

_NAME = (
    f"CASE WHEN kind = '{Kind.STEP}' AND step IS NOT NULL AND NOT starts_with(name, 'ProfilerStep#') "
    "THEN 'ProfilerStep#' || step "
    f"WHEN kind = '{Kind.MODULE}' THEN 'nn.Module: ' || name ELSE name END"
)


def microseconds(nanoseconds: str) -> str:
    """Return the SQL of nanoseconds as microseconds with three decimals."""
    return f"({nanoseconds}) // 1000 || '.' || lpad((({nanoseconds}) % 1000)::VARCHAR, 3, '0')"


EVENTS = f"""
    SELECT '{{"ph":"X","cat":"' || {_CATEGORY} || '","name":' || to_json({_NAME})
        || ',"pid":' || pid || ',"tid":' || tid
        || ',"ts":' || {microseconds("begin_ns - $5")} || ',"dur":' || {microseconds("width_ns")}
        || ',"args":{{' || concat_ws(',', {", ".join(_ARGUMENTS)}) || '}}}}'
    FROM drawn_spans WHERE kind <> '{Kind.ALLOC}' AND ($1 IS NULL OR begin_ns >= $2) AND ($3 IS NULL OR begin_ns < $4)
    ORDER BY begin_ns, width_ns DESC, level, depth, span_id
"""
"""A line for each span of a time interval; of spans that begin together, the outer one comes first."""

_MEMORY_COLUMNS = [
    f"json_extract(attributes, '$.{name}')::VARCHAR AS {name}"
    for name in ("device_type", "total_allocated_bytes", "total_reserved_bytes", "address")
]
_POSITION = f"""',"pid":' || pid || ',"tid":' || tid || ',"ts":' || {microseconds("begin_ns - $1")} || ',"args":{{'"""

MEMORY = f"""
    WITH changes AS (
        SELECT begin_ns, alloc_bytes, {_POSITION} AS event_start, {", ".join(_MEMORY_COLUMNS)}
        FROM drawn_spans WHERE kind = '{Kind.ALLOC}' ORDER BY begin_ns, span_id
    ), lines AS (
        SELECT unnest([
            '{{"ph":"i","s":"t","cat":"cpu_instant_event","name":"[memory]"' || event_start || concat_ws(',',
                {_argument("Bytes", "alloc_bytes")}, {_argument("Device Type", "device_type")},
                {_argument("Total Allocated", "total_allocated_bytes")},
                {_argument("Total Reserved", "total_reserved_bytes")}, {_argument("Addr", "address")}) || '}}}}',
            '{{"ph":"C","name":"memory of ' || CASE device_type WHEN '0' THEN 'the host' ELSE 'devices' END || '"'
                || event_start || {_argument("allocated bytes", "total_allocated_bytes")}
                || coalesce(',' || {_argument("reserved bytes", "total_reserved_bytes")}, '') || '}}}}'
        ]) AS line FROM changes
    )
    SELECT line FROM lines WHERE line IS NOT NULL
"""
"""For each change of memory the change and, if known, the bytes held from then on. Parameter: the base time."""

FLOWS = f"""
    WITH launches AS (
        SELECT rank, process, correlation_id, arg_min({{'track': track, 'begin_ns': begin_ns}}, begin_ns) AS launch
        FROM track_spans WHERE device IS NULL AND correlation_id IS NOT NULL GROUP BY ALL
    ), flow_ends AS (
        SELECT launch.begin_ns AS launched_ns, launcher.pid AS launch_pid, launcher.tid AS launch_tid,
               work.begin_ns, track_ids.pid, track_ids.tid,
               row_number() OVER (ORDER BY work.begin_ns, work.span_id) AS flow
        FROM track_spans work JOIN launches ON launches.rank IS NOT DISTINCT FROM work.rank
             AND launches.correlation_id = work.correlation_id
             AND coalesce(work.process, launches.process) IS NOT DISTINCT FROM launches.process
        JOIN track_ids launcher ON launcher.track = launch.track JOIN track_ids ON track_ids.track = work.track
        WHERE {_ON_DEVICE}
    )
    SELECT unnest([
        '{{"ph":"s","cat":"ac2g","name":"ac2g","id":' || flow || ',"pid":' || launch_pid || ',"tid":' || launch_tid
            || ',"ts":' || {microseconds("launched_ns - $1")} || '}}',
        '{{"ph":"f","bp":"e","cat":"ac2g","name":"ac2g","id":' || flow || ',"pid":' || pid || ',"tid":' || tid
            || ',"ts":' || {microseconds("begin_ns - $1")} || '}}'])
    FROM flow_ends
"""
"""Two lines for each piece of device work with a recorded launch: the start and the end of the flow."""
