"""Collectives as they ran on each rank, as SQL for a WITH clause: operation, size, start and end.

If a device ran them, they are its communication kernels. If none did, they are the spans that a library on the host
(gloo) reports of its own work. The properties of a collective are attributes of the kernel, or of the call or operator
that launched it; if none of them has the size, it is unknown.
"""

from __future__ import annotations

from xsp.cost.inputs import SIZES
from xsp.device.kernelnames import COLLECTIVE, COMMUNICATION
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import kernel_names

SYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on all ranks at the same time, because each rank needs data of every other."""

ELEMENT_BYTES = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "byte", "char", "bool"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "complexfloat"), 8),
    "complexdouble": 16,
    **{name.lower(): size for name, size in SIZES.items()},
}
"""Bytes of an element, by the lower-case name of its type in PyTorch or in Kineto."""


def _property(name: str) -> str:
    """Return the SQL of a collective's property: the kernel's attribute, else its parent's, else its grandparent's."""
    candidates = (
        f"json_extract_string(described.{side}, '$.\"xsp.collective.{name}\"')"
        for side in ("own_attributes", "parent_attributes", "grandparent_attributes")
    )
    return f"coalesce({', '.join(candidates)})"


def _json(side: str) -> str:
    return f"CASE WHEN json_valid({side}.attributes) THEN {side}.attributes END"


_BYTES = " ".join(f"WHEN '{name}' THEN {size}" for name, size in ELEMENT_BYTES.items())

_CALL = f"level = {int(Level.LIBRARY)} AND kind = '{Kind.CALL}' AND contains(attributes, 'xsp.collective.name')"

COLLECTIVES = f"""
    communication_kernels AS MATERIALIZED (
        SELECT rank, device, recording, step, trace_id, span_id, parent_id, name, start_ns, end_ns, collective
        FROM device_work WHERE purpose = '{COMMUNICATION}'
    ),
    executions AS MATERIALIZED (
        FROM communication_kernels
        UNION ALL
        SELECT rank, NULL, NULL, step, trace_id, span_id, parent_id, name, start_ns, start_ns + dur_ns, NULL
        FROM spans WHERE {_CALL} AND timed IS NOT false AND NOT EXISTS (FROM communication_kernels)
    ),
    parents AS MATERIALIZED (
        SELECT rank, trace_id, span_id, parent_id, name, attributes FROM spans
        WHERE level <= {int(Level.LIBRARY)} AND span_id IN (SELECT parent_id FROM executions)
    ),
    grandparents AS MATERIALIZED (
        SELECT rank, trace_id, span_id, attributes FROM spans
        WHERE level <= {int(Level.LIBRARY)} AND span_id IN (SELECT parent_id FROM parents)
    ),
    described AS (
        SELECT executions.*, parents.name AS caller, {_json("executed")} AS own_attributes,
               {_json("parents")} AS parent_attributes, {_json("grandparents")} AS grandparent_attributes
        FROM executions
        LEFT JOIN (
            SELECT rank, trace_id, span_id, attributes FROM spans
            WHERE attributes IS NOT NULL AND span_id IN (SELECT span_id FROM executions)
        ) executed USING (rank, trace_id, span_id)
        LEFT JOIN parents ON parents.rank = executions.rank AND parents.trace_id = executions.trace_id
                       AND parents.span_id = executions.parent_id
        LEFT JOIN grandparents ON grandparents.rank = parents.rank AND grandparents.trace_id = parents.trace_id
                          AND grandparents.span_id = parents.parent_id
    ),
    properties AS (
        SELECT rank, device, recording, step, span_id, name AS full_name, start_ns, end_ns, collective AS by_kernel,
               coalesce({_property("name")}, CASE WHEN contains(caller, ':') THEN caller END) AS name,
               {_property("communicator")} AS communicator, {_property("group_ranks")} AS group_ranks,
               {_property("id")} AS id, {_property("seq")} AS seq,
               TRY_CAST({_property("group_size")} AS INTEGER) AS group_size,
               TRY_CAST({_property("in_elements")} AS BIGINT) AS in_elements,
               TRY_CAST({_property("out_elements")} AS BIGINT) AS out_elements,
               CASE lower({_property("dtype")}) {_BYTES} END AS element_bytes
        FROM described
    ),
    named_collectives AS (
        SELECT *, coalesce({COLLECTIVE}, by_kernel, trim(split_part(name, ':', -1), '_'), 'unknown') AS collective
        FROM properties
    ),
    collectives AS MATERIALIZED (
        SELECT rank, device, recording, step, span_id, full_name, start_ns, end_ns, communicator, group_size,
               collective, coalesce(id, communicator || ':' || seq || coalesce(' ' || group_ranks, '')) AS id,
               nullif(TRY_CAST(element_bytes * CASE WHEN out_elements IS NULL AND collective = 'all_gather'
                                               THEN in_elements::HUGEINT * group_size
                                               ELSE greatest(in_elements, out_elements)::HUGEINT END AS BIGINT), 0)
               AS bytes
        FROM named_collectives
    )
"""
"""One row per rank and collective; `id` is the same on all of its ranks, or null if the source has none. The ranks of
the group are part of it where they are known: groups without a rank in common may share a name (`split_group`).
`bytes` is the larger of input and output: the size as the benchmarks of NCCL count it (nccl-tests,
doc/PERFORMANCE.md). If a source has only the input, the size of an all-gather is the input times the ranks of the
group."""


def reason_without_collectives(trace: Trace) -> str | None:
    """Return a message that a trace holds no collective, or None if it holds one."""

    def are_there() -> bool:
        kernel_names(trace)
        kernels = f"SELECT 1 FROM kernel_names WHERE class = '{COMMUNICATION}' LIMIT 1"
        return any(
            trace.con.execute(query).fetchall() for query in (kernels, f"SELECT 1 FROM spans WHERE {_CALL} LIMIT 1")
        )

    if trace.cached("collectives", are_there):
        return None
    return f"{trace.name!r} holds no communication kernel and no collective of the host"
