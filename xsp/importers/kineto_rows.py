"""The table `seen` of Kineto's trace events, in SQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import duckdb

from xsp import table
from xsp.cost.inputs import NO_TENSOR
from xsp.importers.contract import FURTHEST, SEEN
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
"""What Kineto calls each sort of row, in all its years, in lower case."""

_LINKS = "('ac2g', 'async', 'async_cpu_to_gpu', 'async_gpu', 'fwdbwd', 'fwd_bwd')"

LONGEST = FURTHEST // 2
"""Nanoseconds: a duration from it on, or a time after the base, is damage."""

BASE = "baseTimeNanoseconds"
"""The top-level key of the nanoseconds since the epoch at which times begin."""

_BASE_NS = "BASE_NS"
"""Stands in the SQL for their number."""

_SORTS = " ".join(f"WHEN {table.literal(name)} THEN '{sort}'" for sort, names in CATEGORIES.items() for name in names)

READ = {
    "process": "TRY_CAST(pid AS BIGINT)",
    "thread": "coalesce(TRY_CAST(tid AS BIGINT), TRY_CAST(regexp_extract(tid, '(\\d+)$', 1) AS BIGINT))",
    "category": "lower(coalesce(cat, ''))",
    "sorted": "CASE WHEN name = '[memory]' AND ph IN ('i', 'I') THEN 'memory' WHEN ph <> 'X' OR ph IS NULL THEN NULL "
    f"WHEN category = 'python_function' AND name NOT LIKE 'nn.Module: %' THEN NULL ELSE CASE category {_SORTS} END END",
    "sort": f"CASE WHEN ts_ns BETWEEN 0 AND {LONGEST} AND (sorted = 'memory' OR dur_ns BETWEEN 0 AND {LONGEST}) "
    "THEN sorted END",
}
"""Columns that a portion has besides its own: process and thread as numbers, the category in lower case, what sort of
row an event would be, and what it is: without a time none."""


STEP = "name LIKE 'ProfilerStep#%'"
_LIBRARY = "(starts_with(name, 'nccl:') OR starts_with(name, 'rccl:') OR starts_with(name, 'gloo:'))"
_COMPILED = "name LIKE '## Call CompiledFxGraph %' OR name LIKE 'Torch-Compiled Region%'"


class _Arguments(NamedTuple):
    """Those arguments of an event that a sort of rows needs: taken out of the JSON in one go."""

    names: tuple[str, ...]

    def rows(self, where: str) -> str:
        """Return the SQL of the rows for which a condition holds, with their arguments."""
        paths = ", ".join(table.literal(f'$."{name}"') for name in self.names)
        return f"(SELECT *, json_extract_string(args, [{paths}]) AS found FROM portion WHERE {where})"

    def text(self, *names: str) -> str:
        """Return the SQL of an argument as text, by the first of its names that is there; of JSON, its text."""
        return f"coalesce({', '.join(f'found[{self.names.index(name) + 1}]' for name in names)})"

    def whole(self, *names: str) -> str:
        """Return the SQL of an argument as an integer."""
        return f"TRY_CAST({self.text(*names)} AS BIGINT)"

    def quoted(self, name: str) -> str:
        """Return the SQL of a text argument as JSON."""
        return f"CAST(to_json({self.text(name)}) AS VARCHAR)"


def _object(parts: dict[str, str]) -> str:
    """Return the SQL of a JSON object of those parts that are there; each is the SQL of JSON text.

    A file may hold text where numbers stand usually: it is quoted.
    """
    plain = _joined(parts)
    mended = {
        key: f"CASE WHEN NOT json_valid({value}) THEN CAST(to_json({value}) AS VARCHAR) ELSE {value} END"
        for key, value in parts.items()
    }
    return f"CASE WHEN json_valid({plain}) THEN nullif({plain}, '{{}}') ELSE {_joined(mended)} END"


def _joined(parts: dict[str, str]) -> str:
    members = ", ".join(f"',\"{key}\":' || {value}" for key, value in parts.items())
    return f"concat('{{', substr(concat({members}), 2), '}}')"


_TOLD_OF_COLLECTIVES = ("Collective name", "Process Group Name", "Seq", "In msg nelems", "Out msg nelems", "dtype",
                        "Group size", "Process Group Ranks")  # fmt: skip


def _collective(given: _Arguments) -> dict[str, str]:
    """Return the SQL of what a row says of a collective, by attribute."""
    return {
        "xsp.collective.name": given.quoted("Collective name"),
        "xsp.collective.communicator": given.quoted("Process Group Name"),
        "xsp.collective.seq": given.text("Seq"),
        "xsp.collective.in_elements": given.text("In msg nelems"),
        "xsp.collective.out_elements": given.text("Out msg nelems"),
        "xsp.collective.dtype": given.quoted("dtype"),
        "xsp.collective.group_size": given.text("Group size"),
        "xsp.collective.group_ranks": given.quoted("Process Group Ranks"),
    }


def _sized(given: _Arguments) -> dict[str, str]:
    """Return the SQL of what the shapes of a collective's inputs say of its size, of traces without `In msg nelems`."""
    dims, kind = given.text("Input Dims", "Input dims"), given.text("Input type", "Input types")
    sizes = f"coalesce(TRY_CAST({dims} AS HUGEINT[][]), TRY_CAST({dims} ->> '$[0]' AS HUGEINT[][]))"
    each = "list_aggregate(list_transform(size, lambda one: one::DOUBLE), 'product')"
    count = f"list_sum(list_transform({sizes}, lambda size: CASE WHEN len(size) > 0 THEN {each} ELSE 0 END))"
    return {
        "xsp.collective.in_elements": f"nullif(TRY_CAST({count} AS BIGINT), 0)::VARCHAR",
        "xsp.collective.dtype": f"CAST(to_json({kind} ->> '$[0]') AS VARCHAR)",
    }


_IS_OP = "sort = 'op'"
_OP = _Arguments(("Fwd thread id", "Sequence number", "Input Dims", "Input dims", "Input type", "Input types",
                  "Concrete Inputs", "Concrete inputs", "External id", "external id", "Record function id",
                  *_TOLD_OF_COLLECTIVES))  # fmt: skip
_FORWARD = _OP.whole("Fwd thread id")
_BACKWARD = f"({_FORWARD} > 0 OR name LIKE 'autograd::engine::%')"
_SEQUENCE = _OP.whole("Sequence number")
_TYPES = _OP.text("Input type", "Input types")
_TENSORS = (
    f"list_filter(TRY_CAST({_TYPES} AS VARCHAR[]), lambda each: each NOT IN {(*sorted(NO_TENSOR), 'TensorList')})"
)


_OPS = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, name,
           CASE WHEN {STEP} OR name LIKE 'Optimizer.%' OR name LIKE 'enumerate(DataLoader)%' THEN {int(Level.MODEL)}
                WHEN {_COMPILED} THEN {int(Level.LAYER)}
                WHEN {_LIBRARY} THEN {int(Level.LIBRARY)}
                ELSE {int(Level.OP)} END AS level,
           CASE WHEN {STEP} THEN '{Kind.STEP}'
                WHEN name LIKE 'Optimizer.%' THEN '{Kind.OPTIMIZER}'
                WHEN name LIKE 'enumerate(DataLoader)%' THEN '{Kind.DATA}'
                WHEN {_LIBRARY} THEN '{Kind.CALL}'
                WHEN category = 'user_annotation' OR {_COMPILED} THEN '{Kind.USER}'
                ELSE '{Kind.OP}' END AS kind,
           CASE WHEN {_COMPILED} THEN 'compiled' END AS type,
           CASE WHEN {_BACKWARD} THEN 'backward' WHEN name LIKE 'Optimizer.%' THEN 'optimizer' END AS phase,
           CASE WHEN {_SEQUENCE} >= 0 THEN {_SEQUENCE} END AS sequence_nr, {_FORWARD} AS forward_thread,
           CASE WHEN category <> 'user_annotation' THEN {_OP.text("Input Dims", "Input dims")} END AS input_shapes,
           CASE WHEN category <> 'user_annotation' THEN {_TYPES} END AS dtypes,
           ({_TENSORS})[1] AS dtype,
           CASE WHEN category <> 'user_annotation' THEN {_OP.text("Concrete Inputs", "Concrete inputs")} END AS scalars,
           {_OP.whole("External id", "external id")} AS operator,
           CASE WHEN {_OP.text("Collective name")} IS NOT NULL THEN {_object(_collective(_OP))}
                WHEN {_LIBRARY} THEN {_object(_sized(_OP))}
                WHEN name LIKE '## Call CompiledFxGraph %' THEN
                    json_object('compiled', regexp_extract(name, 'CompiledFxGraph (\\w+)', 1))::VARCHAR
                WHEN name LIKE 'triton\\_%' ESCAPE '\\' THEN
                    json_object('fused', regexp_extract(name, '^triton_\\w+?_fused_(.*)_\\d+$', 1))::VARCHAR
           END AS attributes
    FROM {_OP.rows(_IS_OP)}
"""
"""Operators, and whatever else Kineto files among them. Their forward thread is Kineto's own number of it."""

_MODULES = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, substr(name, 12) AS name,
           {int(Level.LAYER)} AS level, '{Kind.MODULE}' AS kind,
           regexp_replace(substr(name, 12), '_\\d+$', '') AS type
    FROM portion WHERE sort = 'module'
"""

_CALL = _Arguments(("correlation",))

_RUNTIME = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, process, thread, name, {int(Level.RUNTIME)} AS level,
           CASE WHEN contains(name, 'Launch') OR contains(name, 'Memcpy') OR contains(name, 'Memset')
                THEN '{Kind.LAUNCH}'
                WHEN name LIKE '%Synchronize%' THEN '{Kind.SYNC}'
                ELSE '{Kind.CALL}' END AS kind,
           nullif({_CALL.whole("correlation")}, 0) AS correlation_id,
           CASE WHEN name LIKE '%Synchronize%' THEN json_object('sync', CASE
               WHEN name LIKE '%Stream%' THEN 'stream' WHEN name LIKE '%Event%' THEN 'event'
               WHEN name LIKE '%Ctx%' THEN 'context' ELSE 'device' END)::VARCHAR END AS attributes
    FROM {_CALL.rows("sort = 'runtime'")}
"""

_WORK = _Arguments(("device", "stream", "correlation", "External id", "external id", "grid", "block", "context",
                    "registers per thread", "shared memory", "blocks per SM", "warps per SM", "graph id",
                    "graph node id", "est. achieved occupancy %", "bytes", *_TOLD_OF_COLLECTIVES))  # fmt: skip
_OCCUPANCY = _WORK.text("est. achieved occupancy %")
_IN_GRAPH = f"coalesce({_WORK.whole('graph id', 'graph node id')} > 0, false)"
_CORRELATION = _WORK.whole("correlation")
_EXTERNAL = _WORK.whole("External id", "external id")

_LAUNCHED = {
    "grid": _WORK.text("grid"),
    "block": _WORK.text("block"),
    "registers": _WORK.text("registers per thread"),
    "shared_bytes": _WORK.text("shared memory"),
    "blocks_per_sm": _WORK.text("blocks per SM"),
    "warps_per_sm": _WORK.text("warps per SM"),
    "context": _WORK.text("context"),
    "graph": f"CASE WHEN {_IN_GRAPH} THEN 'true' END",
}
_COPIED = {
    "bytes": _WORK.text("bytes"),
    "copy": "CAST(to_json(CASE WHEN name LIKE 'Memset%' THEN 'memset' ELSE "
    "coalesce(nullif(regexp_extract(name, '([A-Z]to[A-Z])', 1), ''), name) END) AS VARCHAR)",
}

_DEVICE = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, name, {int(Level.KERNEL)} AS level,
           CASE WHEN sort = 'kernel' THEN '{Kind.KERNEL}' ELSE '{Kind.COPY}' END AS kind,
           coalesce(TRY_CAST(coalesce({_WORK.whole("device")}, process) AS INTEGER), 0) AS device,
           coalesce({_WORK.whole("stream")}, thread) AS stream,
           nullif({_CORRELATION}, 0) AS correlation_id,
           CASE WHEN {_EXTERNAL} IS DISTINCT FROM {_CORRELATION} THEN {_EXTERNAL} END AS operator,
           {_IN_GRAPH} AS replayed, TRY_CAST({_OCCUPANCY} AS DOUBLE) / 100 AS occupancy,
           CASE WHEN {_OCCUPANCY} IS NOT NULL THEN 'estimate' END AS occupancy_source,
           CASE WHEN sort = 'copy' THEN {_object(_COPIED)}
                WHEN {_WORK.text("Collective name")} IS NOT NULL THEN {_object(_LAUNCHED | _collective(_WORK))}
                ELSE {_object(_LAUNCHED)} END AS attributes
    FROM {_WORK.rows("sort IN ('kernel', 'copy')")}
"""

_ALLOCATION = _Arguments(("Bytes", "Device Type", "Device Id", "Total Allocated", "Total Reserved", "Addr"))
_MOVED = {
    "device_type": _ALLOCATION.text("Device Type"),
    "device": _ALLOCATION.text("Device Id"),
    "total_allocated_bytes": _ALLOCATION.text("Total Allocated"),
    "total_reserved_bytes": _ALLOCATION.text("Total Reserved"),
    "address": _ALLOCATION.text("Addr"),
}

_MEMORY = f"""
    SELECT number, ts_ns AS start_ns, 0 AS dur_ns, process, thread, 'memory' AS name,
           {int(Level.OP)} AS level, '{Kind.ALLOC}' AS kind, {_ALLOCATION.whole("Bytes")} AS alloc_bytes,
           {_object(_MOVED)} AS attributes
    FROM {_ALLOCATION.rows("sort = 'memory'")}
"""

_OVERHEAD = f"""
    SELECT number, ts_ns AS start_ns, dur_ns, name, {int(Level.RUNTIME)} AS level, '{Kind.OVERHEAD}' AS kind
    FROM portion WHERE sort = 'overhead'
"""


_RANGES = """
    SELECT number, name, coalesce(process, 0) AS device, ts_ns AS start_ns, dur_ns, CAST(args AS VARCHAR) AS args
    FROM portion WHERE sort = 'range'
"""


BESIDE = {
    "ranges": "number BIGINT, name VARCHAR, device BIGINT, start_ns BIGINT, dur_ns BIGINT, args VARCHAR",
    "arrows": "id VARCHAR, ph VARCHAR, pid BIGINT, tid BIGINT, ts_ns BIGINT",
    "left_out": "phase VARCHAR, category VARCHAR, number BIGINT",
    "portions": "place BIGINT, number BIGINT, untimed BIGINT, first_untimed BIGINT",
    "operators": "number BIGINT, record_function_id BIGINT",
}
"""Columns of the tables beside `seen`."""

_UNTIMED = "sorted IS NOT NULL AND sort IS NULL"
_RECORD_FUNCTION = _Arguments(("Record function id",))
_IS_NUMBERED = f"{_IS_OP} AND contains(args, 'Record function id')"  # few traces number them: their text tells sooner


_ROWS = {
    ("op",): _OPS,
    ("module",): _MODULES,
    ("runtime",): _RUNTIME,
    ("kernel", "copy"): _DEVICE,
    ("memory",): _MEMORY,
    ("overhead",): _OVERHEAD,
}
"""The SQL of rows of `seen`, by the sorts of events that they are made of."""


def _spans(there: Collection[str]) -> str:
    """Return the SQL of rows of `seen` of the sorts that are there; of a small file most of the time is its plan."""
    wanted = [select for sorts, select in _ROWS.items() if any(sort in there for sort in sorts)]
    rows = " UNION ALL BY NAME ".join(f"({select})" for select in wanted)
    return f"SELECT * REPLACE (start_ns + {_BASE_NS} AS start_ns), 'kineto' AS collector, 'ok' AS status FROM ({rows})"


_TAKE = {
    "ranges": f"SELECT * REPLACE (start_ns + {_BASE_NS} AS start_ns) FROM ({_RANGES})",
    "arrows": f"SELECT id, ph, process AS pid, thread AS tid, ts_ns + {_BASE_NS} AS ts_ns FROM portion "
    f"WHERE category IN ('fwdbwd', 'fwd_bwd') AND ts_ns BETWEEN 0 AND {LONGEST}",
    "left_out": "SELECT left(ph, 60) AS phase, left(category, 60) AS category, count(*) AS number FROM portion "
    f"WHERE sorted IS NULL AND category NOT IN {_LINKS} AND ph IS DISTINCT FROM 'M' GROUP BY ALL",
    "portions": f"SELECT min(number) AS place, count(*) AS number, count(*) FILTER ({_UNTIMED}) AS untimed, "
    f"min(number) FILTER ({_UNTIMED}) AS first_untimed FROM portion",
    "operators": f"SELECT number, {_RECORD_FUNCTION.whole('Record function id')} AS record_function_id "
    f"FROM {_RECORD_FUNCTION.rows(_IS_NUMBERED)} WHERE record_function_id > 0",
}
"""What goes into each table beside `seen` of a portion's rows."""


def whole(value: Any, below: int = FURTHEST) -> int | None:
    """Return an integer that may stand there as text; None where it is none, negative, or too large."""
    try:
        found = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        return None
    return found if 0 <= found < below else None


class Rows:
    """Takes trace events of Kineto into `seen`, without what only all together tell (`xsp.importers.kineto_whole`).

    Other tables say what else was there: `ranges` (of the range profiler, see `xsp.importers.kineto_counters`),
    `arrows` (between forward and backward operators), `left_out` (events that are not kept), `portions`, and
    `operators` (with what execution traces number them by, see `xsp.importers.chakra`).
    """

    args: ClassVar[str] = "args"
    more: ClassVar[Mapping[str, str]] = READ

    def begin(self, con: duckdb.DuckDBPyConnection, before: Mapping[str, Any]) -> None:
        """Make the tables."""
        self.base_ns = whole(before.get(BASE)) or 0
        table.create(con, "seen", SEEN)
        for name, columns in BESIDE.items():
            con.execute(f"CREATE OR REPLACE TABLE {name} ({columns})")

    def take(self, con: duckdb.DuckDBPyConnection) -> None:
        """Fill them from a portion."""
        found = con.execute("SELECT DISTINCT sort FROM portion WHERE sort IS NOT NULL").fetchall()
        there = {sort for (sort,) in found} - {"range"}
        for name, select in (({"seen": _spans(there)} if there else {}) | _TAKE).items():
            con.execute(f"INSERT INTO {name} BY NAME {select.replace(_BASE_NS, str(self.base_ns))}")
