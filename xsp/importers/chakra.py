"""Read execution traces of PyTorch (Chakra's JSON), and add their content to the trace recorded at the same time.

An execution trace has shapes, types, scalars and the forward operator of each operator, but no times. Its `rf_id` is
Kineto's `Record function id`, or its `External id` if Kineto does not write the former. Operators match only if they
have the same name in both files. Numbers of different sorts are equal by chance, and some such operators have the same
name: numbers count only if most operators with equal numbers have equal names, and the matches are in order. Else the
operators of each thread of the file are matched with those of the thread of the trace on which exactly these run in
this order; if there is no such thread, nothing is matched.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers.contract import Enricher, Losses
from xsp.importers.jsonstream import elements
from xsp.schema import Column, Level

MARKS = (b'"rf_id"', b"execution_trace|", b"chakra")
"""An execution trace has one of these in its first bytes, which distinguishes it from other JSON with nodes."""

BATCH = 4096

_NODES = (
    Column("id", "BIGINT", ""), Column("rf_id", "BIGINT", ""), Column("fw_parent", "BIGINT", ""),
    Column("sequence_nr", "BIGINT", ""), Column("thread", "BIGINT", ""), Column("name", "VARCHAR", ""),
    Column("input_shapes", "VARCHAR", ""), Column("dtypes", "VARCHAR", ""), Column("scalars", "VARCHAR", ""),
    Column("outputs", "VARCHAR", ""),
)  # fmt: skip

_ORDERED = (Column("number", "BIGINT", ""), Column("node", "BIGINT", ""))

LEAST_AGREEMENT = 0.5
"""Least share of operators with equal numbers in both files that have equal names."""

LEAST_ORDER = 0.9
"""Least share of consecutive matches on a thread that are in order."""

SCALAR = "Scalar"
"""Kineto's type of an input that is not a tensor; an omitted input has an empty type."""


class Chakra(Enricher):
    """Execution traces of PyTorch, of schemas 1.0.1 to 1.1.1."""

    name = "chakra"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is JSON with nodes of an execution trace."""
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        return (
            start == b"{"
            and b'"nodes"' in head
            and b'"traceEvents"' not in head
            and any(mark in head for mark in MARKS)
        )

    def enrich(self, con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> None:
        """Add shapes, types, scalars, outputs and forward operators to the operators in `raw_spans`.

        Args:
            con: holds `raw_spans`; optionally `operators` (number, record_function_id).
            source: path of the file, possibly gzip.
            losses: receives the numbers of operators that match, and that do not.

        Raises:
            TraceError: the file cannot be read, or belongs to another trace.
        """
        table.create(con, "chakra_nodes", _NODES)
        nodes = (_node(node) for node in elements(source, "nodes") if isinstance(node, dict))
        while batch := list(islice(nodes, BATCH)):
            table.insert(con, "chakra_nodes", batch, _NODES)
        _match(con, source, losses)
        for update in (_ENRICH, _FORWARD):
            con.execute(update)
        for name in ("chakra_nodes", "chakra_pairs"):
            con.execute(f"DROP TABLE {name}")


# --- nodes ------------------------------------------------------------------------------------------------


def _node(node: dict[str, Any]) -> tuple[Any, ...]:
    """Return a node of any schema as a row."""
    entries = node.get("attrs")
    attributes = {
        str(attribute.get("name")): attribute.get("value")
        for attribute in _list(entries)
        if isinstance(attribute, dict)
    } | node
    inputs, outputs = _part(node, "input"), _part(node, "output")
    return (
        _integer(attributes.get("id")),
        _integer(attributes.get("rf_id")),
        _integer(attributes.get("fw_parent")),
        _integer(attributes.get("seq_id")),
        _integer(attributes.get("tid")),
        str(attributes.get("name", ""))[:4096].encode("utf-8", "replace").decode(),
        _text(_shapes(*inputs[1:])),
        _text([_type(kind) for kind in inputs[2]]),
        _text(
            [
                "" if "Tensor" in str(kind) or value == "<None>" else str(value)[:256]
                for value, kind in zip(inputs[0], inputs[2], strict=False)
            ]
        ),
        _text(_shapes(*outputs[1:])),
    )


def _part(node: dict[str, Any], direction: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return values, shapes and types of the inputs or the outputs."""
    part = node.get(f"{direction}s")
    if isinstance(part, dict):
        return _list(part.get("values")), _list(part.get("shapes")), _list(part.get("types"))
    return _list(part), _list(node.get(f"{direction}_shapes")), _list(node.get(f"{direction}_types"))


def _shapes(shapes: Iterable[Any], types: Iterable[Any]) -> list[Any]:
    """Return shapes of tensors; other values have an empty shape, as in Kineto."""
    return [shape if "Tensor" in str(kind) else [] for shape, kind in zip(shapes, types, strict=False)]


def _type(kind: Any) -> str:
    """Return a type under Kineto's name: `Tensor(float)` is float."""
    text = str(kind)
    if text.startswith("Tensor("):
        return text[7:].rstrip(")")
    if "Tensor" in text:
        return "TensorList"
    return "" if text in ("None", "Device") else SCALAR


def _text(values: list[Any]) -> str | None:
    return json.dumps(values) if values else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- joining ----------------------------------------------------------------------------------------------


def _match(con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> None:
    """Make the table `chakra_pairs` of spans and nodes, with the numbering that gives more matches."""
    ((nodes, with_id),) = con.execute(
        "SELECT count(*), count(*) FILTER (rf_id > 0) FROM chakra_nodes WHERE name NOT LIKE '[pytorch|%'"
    ).fetchall()
    if not with_id:
        con.execute(_PAIRS.format(numbers="SELECT NULL::BIGINT AS number, NULL::BIGINT AS id WHERE false"))
        losses.note(f"{Path(source).name}: its {nodes} operators have no rf_id, so none could be matched")
        return
    most_matches, how = 0, ""
    # queries of spans with the number that may be their `rf_id`
    has_operators = con.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'operators'").fetchall()
    by_record = ["SELECT number, record_function_id AS id FROM operators"] if has_operators else []
    for numbering in [*by_record, "SELECT number, operator AS id FROM raw_spans"]:
        con.execute(_PAIRS.format(numbers=numbering).replace("chakra_pairs", "chakra_candidates"))
        ((matches,),) = con.execute("SELECT count(*) FROM chakra_candidates").fetchall()
        if matches > most_matches and _fits(con, numbering, matches):
            most_matches = matches
            con.execute("CREATE OR REPLACE TEMP TABLE chakra_pairs AS FROM chakra_candidates")
    con.execute("DROP TABLE chakra_candidates")
    if not most_matches:
        most_matches, how = _match_by_order(con), ", by name and order"
    if not most_matches:
        raise TraceError(
            f"{source}: its {nodes} operators are not those of the trace by number and name, nor by name and order; it "
            "was recorded with another trace"
        )
    losses.note(
        f"{Path(source).name}: {most_matches} of its {nodes} operators and named blocks were found in the trace{how}"
    )
    if with_id < nodes:
        losses.skipped["operators of the execution trace without rf_id"] += nodes - with_id
    if most_matches < with_id:
        losses.skipped["operators of the execution trace that are not in the trace"] += with_id - most_matches


def _fits(con: duckdb.DuckDBPyConnection, numbering: str, matches: int) -> bool:
    """Return whether matches are no chance: most operators with equal numbers have equal names, and are in order."""
    ((both,),) = con.execute(
        f"""
        SELECT count(DISTINCT node.rf_id)
        FROM ({numbering}) AS numbers JOIN raw_spans USING (number) JOIN chakra_nodes AS node ON node.rf_id = numbers.id
        WHERE node.rf_id > 0 AND raw_spans.device IS NULL AND raw_spans.level < {int(Level.RUNTIME)}
        """
    ).fetchall()
    ((order,),) = con.execute(
        """
        SELECT avg(CASE WHEN start_ns >= last_ns THEN 1 ELSE 0 END) FROM (
            SELECT start_ns, lag(start_ns) OVER (PARTITION BY thread ORDER BY rf_id) AS last_ns
            FROM (SELECT number, rf_id FROM chakra_candidates) JOIN raw_spans USING (number)
        ) WHERE last_ns IS NOT NULL
        """
    ).fetchall()
    return bool(matches >= LEAST_AGREEMENT * both) and (order is None or order >= LEAST_ORDER)


def _match_by_order(con: duckdb.DuckDBPyConnection) -> int:
    """Make `chakra_pairs` of threads whose names follow each other in exactly one place of a thread of the trace."""
    nodes: dict[int | None, list[tuple[int, str]]] = defaultdict(list)
    for thread, row, name in con.execute(
        "SELECT thread, rowid, name FROM chakra_nodes WHERE rf_id > 0 ORDER BY rf_id"
    ).fetchall():
        nodes[thread].append((row, name))
    spans: dict[int | None, list[tuple[int, str]]] = defaultdict(list)
    for thread, number, name in con.execute(
        f"SELECT thread, number, name FROM raw_spans WHERE device IS NULL AND level < {int(Level.RUNTIME)} "
        "ORDER BY start_ns, dur_ns DESC"
    ).fetchall():
        spans[thread].append((number, name))
    texts = {thread: "\n".join(["", *(name for _, name in known), ""]) for thread, known in spans.items()}
    pairs: list[tuple[int, int]] = []
    for own in nodes.values():
        text = "\n".join(["", *(name for _, name in own), ""])
        places = [(thread, known.find(text)) for thread, known in texts.items() if text in known]
        if len(places) == 1 and texts[places[0][0]].find(text, places[0][1] + 1) < 0:
            thread, place = places[0]
            first = texts[thread].count("\n", 0, place)
            numbers = (number for number, _ in spans[thread][first : first + len(own)])
            pairs += [(number, row) for number, (row, _) in zip(numbers, own, strict=True)]
    table.create(con, "chakra_ordered", _ORDERED)
    table.insert(con, "chakra_ordered", pairs, _ORDERED)
    con.execute(
        "CREATE OR REPLACE TEMP TABLE chakra_pairs AS SELECT number, node.* EXCLUDE (name, thread) FROM chakra_ordered "
        "JOIN chakra_nodes AS node ON node.rowid = chakra_ordered.node"
    )
    con.execute("DROP TABLE chakra_ordered")
    return len(pairs)


_PAIRS = f"""
    CREATE OR REPLACE TEMP TABLE chakra_pairs AS
    SELECT raw_spans.number, node.* EXCLUDE (name, thread)
    FROM ({{numbers}}) numbers JOIN raw_spans USING (number) JOIN chakra_nodes node
        ON node.rf_id = numbers.id AND node.rf_id > 0 AND node.name = raw_spans.name
    WHERE raw_spans.device IS NULL AND raw_spans.level < {int(Level.RUNTIME)}
    QUALIFY count(*) OVER (PARTITION BY node.rf_id) = 1
"""

_ENRICH = f"""
    UPDATE raw_spans SET
        input_shapes = coalesce(raw_spans.input_shapes, pair.input_shapes),
        dtypes = CASE WHEN raw_spans.input_shapes IS NULL THEN pair.dtypes
                 ELSE coalesce(raw_spans.dtypes, pair.dtypes) END,
        scalars = coalesce(raw_spans.scalars, pair.scalars),
        dtype = coalesce(raw_spans.dtype, list_filter(TRY_CAST(pair.dtypes AS VARCHAR[]),
                         lambda type: type NOT IN ('', '{SCALAR}', 'TensorList'))[1]),
        sequence_nr = coalesce(raw_spans.sequence_nr, CASE WHEN pair.sequence_nr >= 0 THEN pair.sequence_nr END),
        attributes = CASE WHEN pair.outputs IS NULL THEN raw_spans.attributes ELSE json_merge_patch(
            coalesce(raw_spans.attributes, '{{}}'), json_object('output_shapes', pair.outputs::JSON)) END
    FROM chakra_pairs pair WHERE raw_spans.number = pair.number
"""

_FORWARD = """
    UPDATE raw_spans SET phase = 'backward', forward_thread = creator.thread,
        sequence_nr = coalesce(creator.sequence_nr, raw_spans.sequence_nr)
    FROM chakra_pairs pair JOIN chakra_pairs forward ON forward.id = pair.fw_parent AND forward.number <> pair.number
    JOIN raw_spans creator ON creator.number = forward.number
    WHERE raw_spans.number = pair.number AND pair.fw_parent > 0
"""
"""Set the forward operator that the file names, replacing the one inferred from thread numbers."""
