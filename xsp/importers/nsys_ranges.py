"""Classify NVTX ranges in an export of nsys.

By its text, a range is the first of these that fits:

- **a collective or a library call**, in a domain of NCCL, cuBLAS and the like, or named `ncclAllReduce`, `nccl:…`;
- **an operator**, written by torch.autograd.profiler.emit_nvtx: `aten::mm, seq = 12, op_id = 3, sizes = [[2, 3]]`;
- **a step**: `ProfilerStep#3`, `step 12`, `iter_3`, `batch 5`, or a `train_step` that occurs more than once. Only the
  outermost such ranges of a process count, on the one of their threads that calls CUDA most;
- **a phase of a step**: forward, backward, optimizer, data; unless it is inside a layer;
- **a module**: `nn.Module: Linear_3`, a dotted path such as `model.layers.0`, and the forms of vLLM and Lightning;
- **a range of the user**: a layer. Around a step it belongs to the application, inside a module to the operators.
"""

from __future__ import annotations

import duckdb

from xsp import table
from xsp.importers.contract import MAX_TIME_NS, Losses
from xsp.importers.nsys_activities import sql_list
from xsp.importers.nsys_tables import Export
from xsp.schema import ANNOTATION, Kind, Level

_COLUMNS = {
    "start": "BIGINT", "end": "BIGINT", "eventType": "BIGINT", "text": "VARCHAR", "textId": "BIGINT",
    "globalTid": "BIGINT", "endGlobalTid": "BIGINT", "domainId": "BIGINT", "binaryData": "VARCHAR",
}  # fmt: skip

PUSH_POP, START_END, DOMAINS = (59, 70), (60, 71), (75,)
"""Event types: push/pop ranges, start/end ranges, and names of domains."""

LIBRARY_DOMAINS = "(?i)^(nccl|nvshmem|cublas|cublaslt|cudnn|cusparse|cusolver|cufft|cccl|cub|thrust|mpi|ucx)$"
NCCL = "^nccl(All|Reduce|Broadcast|Bcast|Send|Recv|Group|Gather|Scatter|Comm|Mem|Win)"
INTERPRETER_LOCK = "^(Holding|Waiting for) GIL$"
FIELDS = ", (stashed seq|seq|op_id|sizes|input_op_ids) = "
BACKWARD = r"(Backward\d*|Backwards|AccumulateGrad|GraphRoot)$|^autograd::engine::evaluate_function"

_STEP = r"((train|training|eval|inference|global|decode|prefill)[ _-]?)?(step|iter|iteration)"
NUMBERED = rf"(?i)^(ProfilerStep|batch|{_STEP})[ _#:=-]*\d+\*?$"
STEP_ASSIGNMENT = r"(?i)(^|[ _,])(step|iter|iteration)\s?=\s?\d+"
UNNUMBERED = f"(?i)^{_STEP}$"

PHASES = {
    Kind.OPTIMIZER: r"(?i)^(optimi[sz]er|opt)([ ._]?(step|zero_grad))?(\(\))?$|^Optimizer\.(step|zero_grad)#",
    Kind.DATA: r"(?i)^(load[ _])?data([ _]?(load(ing|er)?|next))?$|^enumerate\(DataLoader\)#",
    Kind.BACKWARD: r"(?i)^(bwd|backward([ _]pass)?|loss\.backward(\(\))?)$",
    Kind.FORWARD: r"(?i)^(fwd|forward([ _]pass)?|\w+\.forward)$",
}

MODULES = (
    r"^nn\.Module: (.+)$",
    r"^\[pl\]\[module\][\w.]+: (.+)$",
    r"^\{['\"]Module['\"]: ['\"]([^'\"]+)['\"]",
    r"^([A-Za-z_]\w*(?:\.\w+)+)$",
)
"""Patterns for the ranges of modules; the group is the name."""

COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "bcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "send": "send", "recv": "recv", "barrier": "barrier",
}  # fmt: skip
"""Names of collectives, by the names in NCCL and torch in lower case, without underscores and prefix."""


def copy(con: duckdb.DuckDBPyConnection, export: Export) -> None:
    """Make the table `nsys_nvtx` of the engine."""
    export.copy(con, "NVTX_EVENTS", "nsys_nvtx", _COLUMNS)


def names() -> str:
    """Return the SQL of the ids of all needed strings."""
    return "SELECT textId AS id FROM nsys_nvtx"


def fill(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Append the spans of the ranges to `raw_spans`.

    Args:
        con: holds `nsys_nvtx`, `nsys_strings` and `raw_spans` with the CUPTI records.
        losses: counts what is left out.
    """
    _leave_out(con, losses)
    con.execute(f"CREATE OR REPLACE TEMP TABLE nsys_ranges AS {_RANGES}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE nsys_steps AS {_STEPS}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE nsys_users AS {_USERS}")
    ((gil,),) = con.execute("SELECT count(*) FROM nsys_ranges WHERE role = 'interpreter'").fetchall()
    if gil:
        losses.skipped["NVTX: the interpreter's lock was held or awaited"] += gil
    for part in (_OPERATORS, _CALLS, _STEP_SPANS, _USER_SPANS):
        con.execute(f"INSERT INTO raw_spans BY NAME {part}")


def _leave_out(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Make the table `nsys_domains`, delete rows that are not ranges, and count these and ranges without an end."""
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE nsys_domains AS
        SELECT pid_of(n.globalTid) AS process, n.domainId AS domain, any_value(coalesce(n.text, s.value)) AS name
        FROM nsys_nvtx n LEFT JOIN nsys_strings s ON s.id = n.textId
        WHERE n.eventType IN ({sql_list(DOMAINS)}) GROUP BY ALL
        """
    )
    kinds = sql_list(PUSH_POP + START_END)
    for reason, condition in {
        "NVTX: marks and names, not ranges": f"eventType NOT IN ({kinds})",
        "NVTX: no time, or an end before the start": f'''
            coalesce("start" < -{MAX_TIME_NS} OR greatest("start", "end") >= {MAX_TIME_NS}, true) OR "start" > "end"''',
    }.items():
        ((deleted,),) = con.execute(f"DELETE FROM nsys_nvtx WHERE {condition}").fetchall()
        if deleted:
            losses.skipped[reason] += deleted
    ((payloads,),) = con.execute("SELECT count(*) FROM nsys_nvtx WHERE binaryData IS NOT NULL").fetchall()
    if payloads:
        losses.skipped["NVTX: binary payloads of ranges; the ranges themselves were read"] += payloads
    ((unclosed,),) = con.execute('SELECT count(*) FROM nsys_nvtx WHERE "end" IS NULL').fetchall()
    if unclosed:
        losses.changed["NVTX: ranges without an end, taken to last until the last one"] += unclosed


def _matches(pattern: str, column: str = "text") -> str:
    return f"regexp_matches({column}, {table.literal(pattern)})"


def _module_name() -> str:
    expressions = ", ".join(f"nullif(regexp_extract(text, {table.literal(pattern)}, 1), '')" for pattern in MODULES)
    return f"coalesce({expressions})"


def _phase() -> str:
    cases = " ".join(f"WHEN {_matches(pattern)} THEN '{kind}'" for kind, pattern in PHASES.items())
    return f"CASE {cases} END"


_RANGES = f"""
    WITH texts AS (
        SELECT coalesce(n.text, s.value, '') AS text, pid_of(n.globalTid) AS process,
               CASE WHEN n.eventType IN ({sql_list(PUSH_POP)}) OR coalesce(n.endGlobalTid, n.globalTid) = n.globalTid
                    THEN tid_of(n.globalTid) END AS thread,
               n.eventType IN ({sql_list(START_END)}) AS free, n."start" AS start_ns,
               coalesce(n."end", greatest(n."start", max(n."end") OVER (), max(n."start") OVER ())) AS end_ns,
               n."end" IS NULL AS open, d.name AS domain
        FROM nsys_nvtx n LEFT JOIN nsys_strings s ON s.id = n.textId
        LEFT JOIN nsys_domains d ON d.process = pid_of(n.globalTid) AND d.domain = n.domainId
    ), split_texts AS (
        SELECT * EXCLUDE (text), regexp_split_to_array(text, {table.literal(FIELDS)})[1] AS text,
               text AS full_text, {_matches(FIELDS)} AS has_fields
        FROM texts
    )
    SELECT *, CASE
        WHEN coalesce({_matches(LIBRARY_DOMAINS, "domain")}, false) OR {_matches(NCCL)} OR text LIKE 'nccl:%'
        THEN 'call'
        WHEN {_matches(INTERPRETER_LOCK)} THEN 'interpreter'
        WHEN has_fields AND ({_matches("::")} OR {_matches(", (stashed )?seq = ", "full_text")}
            OR text = 'record_param_comms'
            OR text IN (SELECT replace(text, 'aten::', '') FROM split_texts WHERE text LIKE 'aten::%')) THEN 'operator'
        ELSE 'user' END AS role
    FROM split_texts
"""

_OPERATORS = f"""
    SELECT {int(Level.OP)} AS level, '{Kind.OP}' AS kind, text AS name, process, thread, start_ns,
           end_ns - start_ns AS dur_ns, CASE WHEN open THEN 'unclosed' ELSE 'ok' END AS status,
           TRY_CAST(nullif(regexp_extract(full_text, 'seq = ([0-9]+)', 1), '') AS BIGINT) AS sequence_nr,
           CASE WHEN {_matches(BACKWARD)} OR full_text LIKE '%, stashed seq = %' THEN 'backward' END AS phase,
           nullif(regexp_extract(full_text, ', sizes = (\\[[0-9\\[\\], ]*\\])', 1), '') AS sizes,
           CASE WHEN json_valid(sizes) THEN sizes END AS input_shapes
    FROM nsys_ranges WHERE role = 'operator'
"""
_OPERATORS = f"SELECT * EXCLUDE (sizes) FROM ({_OPERATORS})"

_COLLECTIVE = (
    "CASE regexp_extract(lower(replace(text, '_', '')), '^nccl:?([a-z]+)', 1) "
    + " ".join(f"WHEN '{key}' THEN '{name}'" for key, name in COLLECTIVES.items())
    + " END"
)

# torch's range names the collective; NCCL's ranges inside it are parts of it
_CALLS = f"""
    SELECT {int(Level.LIBRARY)} AS level, '{Kind.CALL}' AS kind, text AS name, process, thread, start_ns,
           end_ns - start_ns AS dur_ns, CASE WHEN open THEN 'unclosed' ELSE 'ok' END AS status,
           CASE WHEN {_COLLECTIVE} IS NOT NULL AND (contains(text, ':') OR NOT has_torch_ranges)
                THEN json_object('xsp.collective.name', {_COLLECTIVE}) END AS attributes
    FROM nsys_ranges, (SELECT count(*) > 0 AS has_torch_ranges FROM nsys_ranges WHERE text LIKE 'nccl:%')
    WHERE role = 'call'
"""

_STEPS = f"""
    WITH marked AS (
        SELECT * FROM nsys_ranges WHERE role = 'user' AND thread IS NOT NULL AND (
            {_matches(NUMBERED)} OR {_matches(STEP_ASSIGNMENT)} OR {_matches(UNNUMBERED)})
    ), outermost AS (
        SELECT *, coalesce(max(end_ns) OVER inside, start_ns) > start_ns AS within FROM marked
        WINDOW inside AS (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    ), repeated AS (
        SELECT *, count(*) OVER (PARTITION BY process, thread, text) AS times FROM outermost WHERE NOT within
    ), busiest AS (
        SELECT process, arg_max(thread, calls) AS thread FROM (
            SELECT process, thread, count(*) AS calls FROM raw_spans
            WHERE level = {int(Level.RUNTIME)} AND (process, thread) IN (SELECT process, thread FROM marked)
            GROUP BY ALL
        ) GROUP BY process
    )
    SELECT repeated.* FROM repeated LEFT JOIN busiest USING (process)
    WHERE (times > 1 OR NOT {_matches(UNNUMBERED)}) AND repeated.thread = coalesce(busiest.thread, repeated.thread)
"""

_STEP_SPANS = f"""
    SELECT {int(Level.MODEL)} AS level, '{Kind.STEP}' AS kind, text AS name, process, thread, start_ns,
           end_ns - start_ns AS dur_ns, CASE WHEN open THEN 'unclosed' ELSE 'ok' END AS status
    FROM nsys_steps
"""

_USERS = f"""
    WITH users AS (
        SELECT r.* EXCLUDE (role, domain, has_fields, full_text), {_module_name()} AS module, {_phase()} AS phase
        FROM nsys_ranges r ANTI JOIN nsys_steps s
        ON s.process = r.process AND s.thread = r.thread AND s.start_ns = r.start_ns AND s.text = r.text
        WHERE r.role = 'user'
    ), user_ranges AS (
        SELECT u.*, coalesce(s.end_ns <= u.end_ns, false) AS around_step
        FROM users u ASOF LEFT JOIN nsys_steps s
        ON u.process = s.process AND u.thread = s.thread AND u.start_ns <= s.start_ns
    )
    SELECT *, coalesce(max(CASE WHEN phase IS NULL AND module IS NOT NULL AND NOT around_step AND NOT free
                                THEN end_ns END) OVER inside >= end_ns, false) AS in_module,
           coalesce(max(CASE WHEN phase IS NULL AND NOT around_step AND NOT free
                             THEN end_ns END) OVER inside >= end_ns, false) AS in_layer
    FROM user_ranges
    WINDOW inside AS (PARTITION BY process, thread ORDER BY start_ns, end_ns DESC
                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

_USER_SPANS = f"""
    SELECT CASE WHEN free OR around_step THEN {int(Level.APPLICATION)}
                WHEN phase IS NOT NULL AND NOT in_layer THEN {int(Level.MODEL)}
                WHEN module IS NULL AND in_module THEN {int(Level.OP)} ELSE {int(Level.LAYER)} END AS level,
           CASE level WHEN {int(Level.MODEL)} THEN phase
                      WHEN {int(Level.LAYER)} THEN CASE WHEN module IS NULL THEN '{Kind.USER}' ELSE '{Kind.MODULE}' END
                      ELSE '{Kind.USER}' END AS kind,
           CASE WHEN kind = '{Kind.USER}' AND level = {int(Level.LAYER)} THEN '{ANNOTATION}'
                WHEN starts_with(text, 'nn.Module: ') THEN regexp_replace(module, '_[0-9]+$', '') END AS type,
           coalesce(module, text) AS name, process, thread, start_ns, end_ns - start_ns AS dur_ns,
           CASE WHEN open THEN 'unclosed' ELSE 'ok' END AS status
    FROM (SELECT * REPLACE (CASE WHEN NOT free THEN thread END AS thread) FROM nsys_users)
"""
