"""Time of modules by path and by class, over all instances, on the device and on the host.

A path is the name of a module in the model, with `*` in place of numbers: `layers.*.attn` stands for the attention of
every layer. Traces of torch.profiler name modules by class and instance (`Attention_3`), so there the path consists of
the class and the classes around it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from xsp import table
from xsp.analyses.contract import Table, analysis
from xsp.analyses.kernel import share
from xsp.schema import Column, Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import LAYERS, NS

NO_MODULE = "(no module)"
"""Name of the row of device work outside modules: of the optimizer, of the loss, or where modules were not recorded."""

_TABLE = "module_chains"
_CHAINS = [Column("layer_id", "VARCHAR", "a call of a module"), Column("chain", "BIGINT", "what is around it")]
_MEMBERS = [
    Column("chain", "BIGINT", "a module's call and those around it, as one sees them"),
    Column("member", "VARCHAR", "path or class of one of them"),
    Column("member_type", "VARCHAR", "its class"),
    Column("grouped_by", "VARCHAR", "path or class"),
    Column("own", "BOOLEAN", "whether it is the call itself"),
]

_PATH, _CLASS = "path", "class"

PATHS = f"""
    paths AS (
        SELECT module_chains.layer_id, member AS path
        FROM module_chains JOIN chain_members ON chain_members.chain = module_chains.chain
        WHERE grouped_by = '{_PATH}' AND own
    )
"""
"""SQL of the path of each module call, for a trace that `make_paths` has prepared."""

Chain = tuple[tuple[str, str | None], ...]
"""Path and class of a module call and of the calls around it, the outermost first."""


@analysis("modules", "Modules by GPU time, else by host time", Level.LAYER)
def modules_by_path(trace: Trace) -> Table:
    """Modules of the same path together (`layers.*.attn`): device time including the modules inside, and host time.

    The figures are those of one step. `device_ms` is the time of all kernels and copies launched inside the modules,
    forward and backward; `self_device_ms` excludes the modules inside and adds up to all device work, of which both
    percentages of device time are. Device work outside every module has a row of its own. `host_ms` and `host_self_ms`
    are host time in the forward calls, and `percent_of_host_time` is a percentage of that of all modules. `modules`
    counts instances, `calls` their calls. Without a device, rows are sorted by host time.
    """
    return _grouped(trace, _PATH, {"path": "member", "type": "member_type"})


@analysis("module-classes", "Classes of modules by GPU time, else by host time", Level.LAYER)
def modules_by_class(trace: Trace) -> Table:
    """Modules of the same class together: device time including the modules inside, and host time.

    Work inside several nested modules of a class counts once.
    """
    return _grouped(trace, _CLASS, {"class": "member"})


def _grouped(trace: Trace, grouping: str, columns: Mapping[str, str]) -> Table:
    make_paths(trace)
    selected, group = ", ".join(f"{column} AS {name}" for name, column in columns.items()), ", ".join(columns)
    first, *other_columns = columns
    missing = ", ".join([f"'{NO_MODULE}'", *["NULL"] * (len(columns) - 1)])
    return trace.sql(
        f"""
        WITH {LAYERS},
        work AS (
            SELECT layer_id, sum({NS})::DOUBLE AS ns, sum({NS}) FILTER (phase = 'backward')::DOUBLE AS backward_ns,
                   count(*) FILTER (kind = '{Kind.KERNEL}') AS kernels
            FROM merged WHERE level = {int(Level.KERNEL)} AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}')
            GROUP BY layer_id
        ),
        each_call AS (
            SELECT {selected}, own, layers.name, self_ns, work.ns, work.backward_ns, work.kernels
            FROM layers JOIN module_chains ON module_chains.layer_id = layers.span_id
            JOIN chain_members ON chain_members.chain = module_chains.chain AND chain_members.grouped_by = '{grouping}'
            LEFT JOIN work ON work.layer_id = layers.span_id
        ),
        summed AS (
            SELECT {group}, count(DISTINCT name) FILTER (own) AS modules, count(*) FILTER (own) AS calls,
                   sum(ns) AS device_ns, sum(ns) FILTER (own) AS self_device_ns, sum(backward_ns) AS backward_ns,
                   sum(kernels)::BIGINT AS kernels, sum(self_ns) AS host_ns, sum(self_ns) FILTER (own) AS host_self_ns
            FROM each_call GROUP BY {group}
            UNION ALL
            SELECT {missing}, NULL, NULL, sum(work.ns), sum(work.ns), sum(backward_ns), sum(kernels)::BIGINT, NULL, NULL
            FROM work LEFT JOIN layers ON layers.span_id = work.layer_id WHERE layers.span_id IS NULL
            HAVING count(*) > 0
        )
        SELECT {first}, modules, device_ns / 1e6 AS device_ms,
               {share("device_ns", "(SELECT sum(ns) FROM work)")} AS percent_of_device_time,
               self_device_ns / 1e6 AS self_device_ms,
               {share("self_device_ns", "(SELECT sum(ns) FROM work)")} AS self_percent_of_device_time,
               calls, kernels, host_ns / 1e6 AS host_ms,
               {share("host_ns", "(SELECT sum(self_ns) FROM layers)")} AS percent_of_host_time,
               host_self_ns / 1e6 AS host_self_ms,
               {", ".join((*other_columns, "backward_ns / 1e6 AS backward_device_ms"))}
        FROM summed ORDER BY device_ms DESC NULLS LAST, host_ms DESC NULLS LAST, {group}
        """
    )


def make_paths(trace: Trace) -> None:
    """Create the tables `module_chains` and `chain_members`, unless this trace already has them."""
    if trace.has_temp_table(_TABLE):
        return
    calls = trace.sql(
        f"""
        SELECT called.span_id, outer_call.layer_id, called.name, called.type
        FROM merged called LEFT JOIN merged outer_call ON outer_call.span_id = called.parent_id
        WHERE called.level = {int(Level.LAYER)} ORDER BY called.start_ns, called.dur_ns DESC, called.depth
        """
    ).fetchall()
    chains: dict[str, Chain] = {}
    names: dict[str, str] = {}
    numbers: dict[Chain, int] = {}
    for span_id, outer_id, name, kind in calls:
        outer = chains.get(outer_id, ())
        path = _path(name, kind, names.get(outer_id), outer[-1][0] if outer else None)
        chains[span_id], names[span_id] = (*outer, (path, kind)), name
        numbers.setdefault(chains[span_id], len(numbers))
    members = [row for chain, number in numbers.items() for row in _members(chain, number)]
    for table_name, columns, rows in (
        ("module_chains_found", _CHAINS, [(span_id, numbers[chain]) for span_id, chain in chains.items()]),
        ("chain_members", _MEMBERS, members),
    ):
        table.create(trace.con, table_name, columns)
        table.insert(trace.con, table_name, rows, columns)
    trace.create_temp_table(_TABLE, "SELECT * FROM module_chains_found")


def _members(chain: Chain, number: int) -> list[tuple[int, str, str | None, str, bool]]:
    """Return the paths and classes that the call at the end of a chain counts for, each once."""
    path, kind = chain[-1]
    paths = dict.fromkeys(chain)
    classes = dict.fromkeys(class_name or "" for _, class_name in chain)
    return [
        *((number, member, member_type, _PATH, (member, member_type) == (path, kind)) for member, member_type in paths),
        *((number, member, member, _CLASS, member == (kind or "")) for member in classes),
    ]


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_INSTANCE = re.compile(r"_\d+$")


def _path(name: str, kind: str | None, parent: str | None, parent_path: str | None) -> str:
    """Return a module's path: its own name if that is a path already, else its class after the path around it."""
    instance = kind is not None and _INSTANCE.sub("", name) == kind and name != kind
    part = _INSTANCE.sub("", name) if instance else _NUMBER.sub("*", name)
    is_path = parent_path is None or parent is None or (not instance and (name.startswith(f"{parent}.") or "." in name))
    return part if is_path else f"{parent_path}.{part}"
