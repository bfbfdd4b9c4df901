"""The table `raw_spans` of Kineto's trace events, in SQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import duckdb

from xsp import callnames, table
from xsp.cost.inputs import NO_TENSOR
from xsp.importers.contract import KERNEL_NAME, MAX_TIME_NS, RAW_COLUMNS
from xsp.schema import Kind, Level

CATEGORIES = {
    "op": ("cpu_op", "operator", "user_annotation"),
    "runtime": ("cuda_runtime", "cuda_driver", "runtime", "driver", "xpu_runtime", "xpu_driver", "hip_runtime",
                "mtia_runtime", "privateuse1_runtime", "privateuse1_driver", "hpu_runtime"),
    "kernel": ("kernel", "concurrent_kernel", "mtia_ccp_events", "hpu_op", "privateuse1_kernel"),
    "copy": ("gpu_memcpy", "memcpy", "gpu_memset", "memset"),
    "module": ("python_function",),
    "memory": ("cpu_instant_event",),
    "overhead": ("overhead",),
    "range": ("cuda_profiler_range",),
}  # fmt: skip
"""Kineto's categories for each sort of row, of all versions, in lower case."""

_LINKS = """('ac2g', 'async', 'async_cpu_to_gpu', 'async_gpu', 'async_npu', 'async_task_queue', 'hosttodevice',
    'fwdbwd', 'fwd_bwd')"""

MAX_DURATION_NS = MAX_TIME_NS // 2
"""Maximum nanoseconds of a duration, and of a time after the base; larger values are damage."""

BASE = "baseTimeNanoseconds"
"""The top-level key of the base of all times, in nanoseconds since the epoch."""

_BASE_NS = "BASE_NS"
"""Placeholder for this number in the SQL."""

_SORTS = " ".join(f"WHEN {table.literal(name)} THEN '{sort}'" for sort, names in CATEGORIES.items() for name in names)

_LIBRARY = "(starts_with(name, 'nccl:') OR starts_with(name, 'rccl:') OR starts_with(name, 'gloo:'))"
_HAS_COLLECTIVE = "contains(args, 'Collective name')"
_ALL_REDUCE = "(contains(name, 'all_reduce') AND contains(name, '::') AND NOT contains(name, 'c10d'))"
"""An all-reduce of symmetric memory, or of a serving engine: an operator whose first tensor is what it reduces."""

_SORT_WITHOUT_CATEGORY = """
    CASE WHEN contains(args, '"Task Type"') AND contains(args, '"Stream Id"')
         THEN CASE WHEN NOT regexp_matches(args, '"Task Type": *"[A-Z_]*(WAIT|RECORD|NOTIFY|PLACE_HOLDER)')
                   THEN 'task' END
         WHEN starts_with(name, 'AscendCL@') THEN 'runtime'
         WHEN pid = 'CPU functions' OR regexp_matches(name, '^(aten|autograd|torch|prim|c10d)::') THEN 'op' END
"""
"""SQL of the sort of an event without a category: of Ascend's profiler, tasks of a device, of which those that wait for
others or signal them are no work, and calls of its runtime; of `EventList.export_chrome_trace`, operators."""

PORTION_COLUMNS = {
    "process": "TRY_CAST(pid AS BIGINT)",
    "thread": "coalesce(TRY_CAST(tid AS BIGINT), TRY_CAST(regexp_extract(tid, '(\\d+)$', 1) AS BIGINT))",
    "category": "lower(coalesce(cat, ''))",
    "raw_sort": "CASE WHEN name = '[memory]' AND ph IN ('i', 'I') THEN 'memory' WHEN ph <> 'X' OR ph IS NULL THEN NULL "
    f"WHEN category = 'python_function' AND name NOT LIKE 'nn.Module: %' THEN NULL "
    f"WHEN category = '' THEN {_SORT_WITHOUT_CATEGORY} "
    "WHEN category = 'mtia_ccp_events' AND name IN ('event_wait', 'event_record') THEN NULL "
    "WHEN category = 'mtia_ccp_events' AND name = 'dma_request' THEN 'copy' "
    f"ELSE CASE category {_SORTS} END END",
    "sort": f"CASE WHEN ts_ns BETWEEN 0 AND {MAX_DURATION_NS} "
    f"AND (raw_sort = 'memory' OR dur_ns BETWEEN 0 AND {MAX_DURATION_NS}) "
    "THEN raw_sort END",
    "has_details": f"coalesce(CASE sort WHEN 'kernel' THEN {_HAS_COLLECTIVE} WHEN 'op' THEN {_HAS_COLLECTIVE} "
    "OR starts_with(name, 'triton_') "
    "OR starts_with(name, '## Call CompiledFxGraph ') "
    f"OR (({_LIBRARY} OR {_ALL_REDUCE}) AND contains(args, 'Input ')) END, false)",
}
"""Additional columns of a portion: process and thread as numbers, the category in lower case, the sort of row of an
event (`raw_sort`), the same but null without a valid time (`sort`), and whether the name or arguments of an operator or
kernel have additional data (`has_details`): a query for these takes longer to plan than most files take to read."""


STEP = "name LIKE 'ProfilerStep#%'"
_COMPILED = "name LIKE '## Call CompiledFxGraph %' OR name LIKE 'Torch-Compiled Region%'"


class _Arguments(NamedTuple):
    """The arguments of an event that a sort of rows needs, extracted from the JSON in a single call."""

    names: tuple[str, ...]

    def rows(self, where: str) -> str:
        """Return the SQL of the rows that meet a condition, with their arguments."""
        paths = ", ".join(table.literal(f'$."{name}"') for name in self.names)
        return f"(SELECT *, json_extract_string(args, [{paths}]) AS arguments FROM portion WHERE {where})"

    def text(self, *names: str) -> str:
        """Return the SQL of an argument as text, under the first of its names that is present; JSON stays text."""
        return f"coalesce({', '.join(f'arguments[{self.names.index(name) + 1}]' for name in names)})"

    def integer(self, *names: str) -> str:
        """Return the SQL of an argument as an integer."""
        return f"TRY_CAST({self.text(*names)} AS BIGINT)"

    def quoted(self, name: str) -> str:
        """Return the SQL of a text argument as JSON."""
        return f"CAST(to_json({self.text(name)}) AS VARCHAR)"


def _object(parts: dict[str, str]) -> str:
    """Return the SQL of a JSON object with the parts that are not null; each part is the SQL of JSON text.

    If a file contains text instead of a number, the text is quoted.
    """
    plain = _join_members(parts)
    escaped = {
        key: f"CASE WHEN NOT json_valid({value}) THEN CAST(to_json({value}) AS VARCHAR) ELSE {value} END"
        for key, value in parts.items()
    }
    return f"CASE WHEN json_valid({plain}) THEN nullif({plain}, '{{}}') ELSE {_join_members(escaped)} END"


def _join_members(parts: dict[str, str]) -> str:
    members = ", ".join(f"',\"{key}\":' || {value}" for key, value in parts.items())
    return f"concat('{{', substr(concat({members}), 2), '}}')"


_COLLECTIVE_ARGUMENTS = ("Collective name", "Process Group Name", "Seq", "In msg nelems", "Out msg nelems", "dtype",
                         "Group size", "Process Group Ranks")  # fmt: skip


def _collective(args: _Arguments) -> dict[str, str]:
    """Return the SQL of the data on a collective in a row, by attribute."""
    return {
        "xsp.collective.name": args.quoted("Collective name"),
        "xsp.collective.communicator": args.quoted("Process Group Name"),
        "xsp.collective.seq": args.text("Seq"),
        "xsp.collective.in_elements": args.text("In msg nelems"),
        "xsp.collective.out_elements": args.text("Out msg nelems"),
        "xsp.collective.dtype": args.quoted("dtype"),
        "xsp.collective.group_size": args.text("Group size"),
        "xsp.collective.group_ranks": args.quoted("Process Group Ranks"),
    }


def _collective_size(args: _Arguments, most: int) -> dict[str, str]:
    """Return the SQL of a collective's size from the shapes of its inputs, for traces without `In msg nelems`.

    Args:
        args: the arguments.
        most: number of inputs that count.
    """
    dims, kind = (
        f"CASE WHEN json_valid({text}) THEN {text} END"
        for text in (args.text("Input Dims", "Input dims"), args.text("Input type", "Input types"))
    )
    sizes = f"coalesce(TRY_CAST({dims} AS HUGEINT[][]), TRY_CAST({dims} ->> '$[0]' AS HUGEINT[][]))[:{most}]"
    product = "list_aggregate(list_transform(size, lambda extent: extent::DOUBLE), 'product')"
    count = f"list_sum(list_transform({sizes}, lambda size: CASE WHEN len(size) > 0 THEN {product} ELSE 0 END))"
    return {
        "xsp.collective.in_elements": f"nullif(TRY_CAST({count} AS BIGINT), 0)::VARCHAR",
        "xsp.collective.dtype": f"CAST(to_json({kind} ->> '$[0]') AS VARCHAR)",
    }


_OP_ARGUMENTS = ("Fwd thread id", "Sequence number", "Input Dims", "Input dims", "Input type", "Input types",
                 "Concrete Inputs", "Concrete inputs", "External id", "external id")  # fmt: skip
_NO_TENSORS = ", ".join(table.literal(name) for name in (*sorted(NO_TENSOR), "TensorList"))
_TYPES = f"list_filter(TRY_CAST(types AS VARCHAR[]), lambda type: type NOT IN ({_NO_TENSORS}))"
_FIRST_TYPE = 'regexp_extract(types, \'^\\["([^"\\\\]+)"[,\\]]\', 1)'


def _ops(args: _Arguments, where: str, attributes: str) -> str:
    """Return the SQL of operators, and of other rows that Kineto stores as operators.

    The forward thread is Kineto's own thread number. Values that several columns need are computed in a subquery.

    Args:
        args: the arguments that these rows need.
        where: condition for rows of `portion`.
        attributes: SQL of their attributes.
    """
    return f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, name,
           CASE role WHEN '{Kind.OP}' THEN {int(Level.OP)} WHEN '{Kind.USER}' THEN {int(Level.OP)}
                WHEN '{Kind.CALL}' THEN {int(Level.LIBRARY)} WHEN 'compiled' THEN {int(Level.LAYER)}
                ELSE {int(Level.MODEL)} END AS level,
           CASE role WHEN 'compiled' THEN '{Kind.USER}' ELSE role END AS kind,
           CASE role WHEN 'compiled' THEN role END AS type,
           CASE WHEN forward_thread > 0 OR name LIKE 'autograd::engine::%' THEN 'backward'
                WHEN role = '{Kind.OPTIMIZER}' THEN 'optimizer' END AS phase,
           CASE WHEN sequence >= 0 THEN sequence END AS sequence_nr, forward_thread,
           CASE WHEN category <> 'user_annotation' THEN {args.text("Input Dims", "Input dims")} END AS input_shapes,
           CASE WHEN category <> 'user_annotation' THEN types END AS dtypes,
           CASE WHEN types IS NULL THEN NULL WHEN first_type NOT IN ('', {_NO_TENSORS}) THEN first_type
                ELSE ({_TYPES})[1] END AS dtype,
           CASE WHEN category <> 'user_annotation' THEN {args.text("Concrete Inputs", "Concrete inputs")} END
           AS scalars, {args.integer("External id", "external id")} AS operator, {attributes} AS attributes
    FROM (SELECT *, {_FIRST_TYPE} AS first_type FROM (
        SELECT *, {args.integer("Fwd thread id")} AS forward_thread, {args.integer("Sequence number")} AS sequence,
               {args.text("Input type", "Input types")} AS types,
               CASE WHEN {STEP} THEN '{Kind.STEP}'
                    WHEN name LIKE 'Optimizer.%' THEN '{Kind.OPTIMIZER}'
                    WHEN name LIKE 'enumerate(DataLoader)%' THEN '{Kind.DATA}'
                    WHEN {_LIBRARY} THEN '{Kind.CALL}'
                    WHEN {_COMPILED} THEN 'compiled'
                    WHEN category = 'user_annotation' THEN '{Kind.USER}'
                    ELSE '{Kind.OP}' END AS role
        FROM {args.rows(where)}))
    """


_IS_OP = "sort = 'op'"
_OP = _Arguments(_OP_ARGUMENTS)
_COLLECTIVE = _Arguments((*_OP_ARGUMENTS, *_COLLECTIVE_ARGUMENTS))
_ATTRIBUTES = f"""
    CASE WHEN {_COLLECTIVE.text("Collective name")} IS NOT NULL THEN {_object(_collective(_COLLECTIVE))}
         WHEN {_LIBRARY} AND coalesce({_COLLECTIVE.text("Input Dims", "Input dims")}, types) IS NOT NULL
         THEN {_object(_collective_size(_COLLECTIVE, most=1000))}
         WHEN {_ALL_REDUCE} AND types IS NOT NULL THEN {_object(_collective_size(_COLLECTIVE, most=1))}
         WHEN name LIKE '## Call CompiledFxGraph %' THEN
             json_object('compiled', regexp_extract(name, 'CompiledFxGraph (\\w+)', 1))::VARCHAR
         WHEN name LIKE 'triton\\_%' ESCAPE '\\' THEN
             json_object('fused', regexp_extract(name, '^triton_\\w+?_fused_(.*)_\\d+$', 1))::VARCHAR
    END
"""
_OPS = _ops(_OP, f"{_IS_OP} AND NOT has_details", "NULL::VARCHAR")
_DETAILED_OPS = _ops(_COLLECTIVE, f"{_IS_OP} AND has_details", _ATTRIBUTES)

_MODULES = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, substr(name, 12) AS name,
           {int(Level.LAYER)} AS level, '{Kind.MODULE}' AS kind,
           regexp_replace(substr(name, 12), '_\\d+$', '') AS type
    FROM portion WHERE sort = 'module'
"""

_CALL = _Arguments(("correlation", "kernel"))

_RUNTIME = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, name, {int(Level.RUNTIME)} AS level,
           {callnames.KIND} AS kind,
           nullif({_CALL.integer("correlation")}, 0) AS correlation_id,
           CASE WHEN {callnames.AWAITED} IS NOT NULL THEN json_object('sync', {callnames.AWAITED})::VARCHAR
               WHEN {_CALL.text("kernel")} IS NOT NULL
               THEN json_object('{KERNEL_NAME}', {_CALL.text("kernel")})::VARCHAR END AS attributes
    FROM {_CALL.rows("sort = 'runtime'")}
"""

_WORK_ARGUMENTS = ("device", "stream", "correlation", "External id", "external id", "graph id", "graph node id",
                   "est. achieved occupancy %")  # fmt: skip
_KERNEL_ARGUMENTS = (*_WORK_ARGUMENTS, "grid", "block", "context", "registers per thread", "shared memory",
                     "blocks per SM", "warps per SM")  # fmt: skip


def _work(args: _Arguments, where: str, attributes: str) -> str:
    """Return the SQL of device work; arguments as for `_ops`, with at least `_WORK_ARGUMENTS` in `args`."""
    external = args.integer("External id", "external id")
    occupancy = args.text("est. achieved occupancy %")
    return f"""
    SELECT number, ts_ns AS start_ns, dur_ns, name, {int(Level.KERNEL)} AS level,
           CASE WHEN sort = 'kernel' THEN '{Kind.KERNEL}' ELSE '{Kind.COPY}' END AS kind,
           coalesce(TRY_CAST(coalesce({args.integer("device")}, process) AS INTEGER), 0) AS device,
           coalesce({args.integer("stream")}, thread) AS stream, nullif(correlation, 0) AS correlation_id,
           CASE WHEN external IS DISTINCT FROM correlation THEN external END AS operator,
           replayed, TRY_CAST({occupancy} AS DOUBLE) / 100 AS occupancy,
           CASE WHEN {occupancy} IS NOT NULL THEN 'estimate' END AS occupancy_source, {attributes} AS attributes
    FROM (SELECT *, {args.integer("correlation")} AS correlation, {external} AS external,
                 coalesce({args.integer("graph id", "graph node id")} > 0, false) AS replayed FROM {args.rows(where)})
    """


def _launch_parameters(args: _Arguments) -> dict[str, str]:
    """Return the SQL of the launch parameters of a kernel, by attribute."""
    return {
        "grid": args.text("grid"),
        "block": args.text("block"),
        "registers": args.text("registers per thread"),
        "shared_bytes": args.text("shared memory"),
        "blocks_per_sm": args.text("blocks per SM"),
        "warps_per_sm": args.text("warps per SM"),
        "context": args.text("context"),
        "graph": "CASE WHEN replayed THEN 'true' END",
        "graph_node": f"CASE WHEN replayed THEN {args.text('graph node id')} END",
    }


_KERNEL, _COLLECTIVE_KERNEL = _Arguments(_KERNEL_ARGUMENTS), _Arguments((*_KERNEL_ARGUMENTS, *_COLLECTIVE_ARGUMENTS))
_COPY = _Arguments((*_WORK_ARGUMENTS, "bytes", "size", "direction"))
_COPY_ATTRIBUTES = {
    "bytes": _COPY.text("bytes", "size"),
    "copy": "CAST(to_json(CASE WHEN name LIKE 'Memset%' THEN 'memset' ELSE "
    "coalesce(nullif(regexp_extract(name, '([A-Z]to[A-Z])', 1), ''), "
    f"regexp_replace({_COPY.text('direction')}, '^([A-Z])[A-Z]*_TO_([A-Z]).*', '\\1to\\2'), name) END) AS VARCHAR)",
}
_COLLECTIVE_KERNEL_ATTRIBUTES = (
    f"CASE WHEN {_COLLECTIVE_KERNEL.text('Collective name')} IS NULL "
    f"THEN {_object(_launch_parameters(_COLLECTIVE_KERNEL))} "
    f"ELSE {_object(_launch_parameters(_COLLECTIVE_KERNEL) | _collective(_COLLECTIVE_KERNEL))} END"
)
_KERNELS = _work(_KERNEL, "sort = 'kernel' AND NOT has_details", _object(_launch_parameters(_KERNEL)))
_DETAILED_KERNELS = _work(_COLLECTIVE_KERNEL, "sort = 'kernel' AND has_details", _COLLECTIVE_KERNEL_ATTRIBUTES)
_COPIES = _work(_COPY, "sort = 'copy'", _object(_COPY_ATTRIBUTES))

_TASK = _Arguments(("Task Type", "Stream Id"))
_TASKS = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, name, {int(Level.KERNEL)} AS level,
           CASE WHEN regexp_matches({_TASK.text("Task Type")}, 'MEMCPY|SDMA') THEN '{Kind.COPY}'
                ELSE '{Kind.KERNEL}' END AS kind,
           0 AS device, coalesce({_TASK.integer("Stream Id")}, thread) AS stream
    FROM {_TASK.rows("sort = 'task'")}
"""

_ALLOCATION = _Arguments(("Bytes", "Device Type", "Device Id", "Total Allocated", "Total Reserved", "Addr"))
_ALLOCATION_ATTRIBUTES = {
    "device_type": _ALLOCATION.text("Device Type"),
    "device": _ALLOCATION.text("Device Id"),
    "total_allocated_bytes": _ALLOCATION.text("Total Allocated"),
    "total_reserved_bytes": _ALLOCATION.text("Total Reserved"),
    "address": _ALLOCATION.text("Addr"),
}

_MEMORY = f"""
    SELECT number, ts_ns AS start_ns, 0 AS dur_ns, process, thread, 'memory' AS name,
           {int(Level.OP)} AS level, '{Kind.ALLOC}' AS kind, {_ALLOCATION.integer("Bytes")} AS alloc_bytes,
           {_object(_ALLOCATION_ATTRIBUTES)} AS attributes
    FROM {_ALLOCATION.rows("sort = 'memory'")}
"""

_OVERHEAD = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, name, {int(Level.RUNTIME)} AS level, '{Kind.OVERHEAD}' AS kind
    FROM portion WHERE sort = 'overhead'
"""


_RANGES = f"""
    SELECT number, name, coalesce(process, 0) AS device, ts_ns + {_BASE_NS} AS start_ns, dur_ns,
           CAST(args AS VARCHAR) AS args
    FROM portion WHERE sort = 'range'
"""


OTHER_TABLES = {
    "ranges": "number BIGINT, name VARCHAR, device BIGINT, start_ns BIGINT, dur_ns BIGINT, args VARCHAR",
    "arrows": "id VARCHAR, ph VARCHAR, pid BIGINT, tid BIGINT, ts_ns BIGINT",
    "flows": "id VARCHAR, ph VARCHAR, pid BIGINT, tid BIGINT, ts_ns BIGINT",
    "unnumbered_calls": "number BIGINT, external BIGINT",
    "left_out": "phase VARCHAR, category VARCHAR, number BIGINT",
    "portions": "place BIGINT, number BIGINT, untimed BIGINT, first_untimed BIGINT",
    "operators": "number BIGINT, record_function_id BIGINT",
    "frames": "name VARCHAR, thread BIGINT, start_ns BIGINT, dur_ns BIGINT",
}
"""Columns of the other tables, by the name of the table."""

_UNTIMED = "raw_sort IS NOT NULL AND sort IS NULL"
_RECORD_FUNCTION = _Arguments(("Record function id",))
_IS_NUMBERED = f"{_IS_OP} AND contains(args, 'Record function id')"  # few traces have it: a text search is faster


_EXTERNAL = _Arguments(("External id", "external id"))
_HAS_CORRELATION = "contains(args, '\"correlation\"')"
_IS_UNNUMBERED_CALL = f"sort = 'runtime' AND NOT {_HAS_CORRELATION}"


_ROWS = {
    ("op", False): _OPS,
    ("op", True): _DETAILED_OPS,
    ("module", False): _MODULES,
    ("runtime", False): _RUNTIME,
    ("kernel", False): _KERNELS,
    ("kernel", True): _DETAILED_KERNELS,
    ("copy", False): _COPIES,
    ("task", False): _TASKS,
    ("memory", False): _MEMORY,
    ("overhead", False): _OVERHEAD,
}
"""The SQL of rows of `raw_spans`, by the columns `sort` and `has_details` of the events that they are made of."""


def _spans(sorts: Collection[tuple[str, bool]]) -> str:
    """Return the SQL of rows of `raw_spans` for the sorts that occur: planning costs small files most."""
    rows = " UNION ALL BY NAME ".join(f"({select})" for sort, select in _ROWS.items() if sort in sorts)
    return f"SELECT * REPLACE (start_ns + {_BASE_NS} AS start_ns), 'kineto' AS collector, 'ok' AS status FROM ({rows})"


LONG_FRAME_NS = 1_000_000
"""Least duration, in nanoseconds, of a call of Python that is kept as a frame."""

_TABLE_QUERIES = {
    "frames": f"SELECT name, thread, ts_ns + {_BASE_NS} AS start_ns, dur_ns FROM portion "
    f"WHERE category = 'python_function' AND raw_sort IS NULL AND dur_ns BETWEEN {LONG_FRAME_NS} AND {MAX_DURATION_NS} "
    f"AND ts_ns BETWEEN 0 AND {MAX_DURATION_NS}",
    "arrows": f"SELECT id, ph, process AS pid, thread AS tid, ts_ns + {_BASE_NS} AS ts_ns FROM portion "
    f"WHERE category IN ('fwdbwd', 'fwd_bwd') AND ts_ns BETWEEN 0 AND {MAX_DURATION_NS}",
    "unnumbered_calls": f"SELECT number, {_EXTERNAL.integer('External id', 'external id')} AS external "
    f"FROM {_EXTERNAL.rows(_IS_UNNUMBERED_CALL)}",
    "left_out": "SELECT left(ph, 60) AS phase, left(category, 60) AS category, count(*) AS number FROM portion "
    f"WHERE raw_sort IS NULL AND category NOT IN {_LINKS} AND ph IS DISTINCT FROM 'M' GROUP BY ALL",
    "portions": f"SELECT min(number) AS place, count(*) AS number, count(*) FILTER ({_UNTIMED}) AS untimed, "
    f"min(number) FILTER ({_UNTIMED}) AS first_untimed FROM portion",
    "operators": f"SELECT number, {_RECORD_FUNCTION.integer('Record function id')} AS record_function_id "
    f"FROM {_RECORD_FUNCTION.rows(_IS_NUMBERED)} WHERE record_function_id > 0",
}
"""The query on a portion that fills each of the tables other than `raw_spans` and `flows`."""

_FLOWS = (
    f"SELECT id, ph, process AS pid, thread AS tid, ts_ns + {_BASE_NS} AS ts_ns FROM portion "
    "WHERE category IN ('ac2g', 'async_cpu_to_gpu', 'async_gpu', 'async_npu') AND ph IN ('s', 'f') "
    f"AND ts_ns BETWEEN 0 AND {MAX_DURATION_NS}"
)
"""The query on a portion that fills `flows`. Traces with correlation ids, which say the same, need none."""


def parse_integer(value: Any, below: int = MAX_TIME_NS) -> int | None:
    """Return an integer that may be given as text; None if it is not an integer, negative, or too large."""
    try:
        number = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < below else None


class Rows:
    """Stores trace events of Kineto in `raw_spans`; `xsp.importers.kineto_whole` completes these when all are stored.

    Further tables are `ranges` (of the range profiler, see `xsp.importers.kineto_counters`), `arrows` (flows between
    forward and backward operators), `flows` (from calls to device work) and `unnumbered_calls` (calls without a
    correlation id, with their external ids), `left_out` (events that are not imported), `portions`, and `operators`
    (with their numbers in execution traces, see `xsp.importers.chakra`).
    """

    args: ClassVar[str] = "args"
    extra_columns: ClassVar[Mapping[str, str]] = PORTION_COLUMNS

    def begin(self, con: duckdb.DuckDBPyConnection, keys: Mapping[str, Any]) -> None:
        """Make the tables."""
        self.base_ns = parse_integer(keys.get(BASE)) or 0
        self._needs_flows = True
        table.create(con, "raw_spans", RAW_COLUMNS)
        for name, columns in OTHER_TABLES.items():
            con.execute(f"CREATE OR REPLACE TABLE {name} ({columns})")

    def store(self, con: duckdb.DuckDBPyConnection) -> None:
        """Fill the tables from a portion."""
        pairs = con.execute("SELECT DISTINCT sort, has_details FROM portion WHERE sort IS NOT NULL").fetchall()
        ranges = {("range", False)} & set(pairs)
        sorts = set(pairs) - ranges
        queries = (
            ({"raw_spans": _spans(sorts)} if sorts else {}) | ({"ranges": _RANGES} if ranges else {}) | _TABLE_QUERIES
        )
        self._needs_flows &= not con.execute(
            f"SELECT 1 FROM portion WHERE sort = 'runtime' AND {_HAS_CORRELATION} LIMIT 1"
        ).fetchall()
        if self._needs_flows:
            queries["flows"] = _FLOWS
        for name, select in queries.items():
            con.execute(f"INSERT INTO {name} BY NAME {select.replace(_BASE_NS, str(self.base_ns))}")
