"""Operators and modules of the kernels of replayed graphs, from the order of kernels that were launched one by one.

A replay launches its kernels with one call, in no operator. The same kernels run in the same order where the graph was
captured (a trace that contains the capture names the kernel of each launch) and in each step that runs the same code
without a graph. So the names of a replay's kernels, in order, are looked for

1. in the captures: consecutive replays of one step in consecutive captures, as many as possible at once, up to one of a
   part of the model that is among them already: it was captured again, for another size;
2. in the work that was launched one by one, and inside captures: if a replay occurs as often in one step as the same
   kernels in another one, in this order, else anywhere.

Where the source states the nodes of graphs, the order is also that of the nodes, which streams do not change.

Nothing is paired unless all names of a replay agree. Where several places fit, what they do not agree on stays
unknown: shapes, modules; if it is the operators, the replay is refused. Of captures of several sizes the smallest one
counts that holds the tokens of the step. A replay gets copies of the operators and modules of its place, without a time
of their own, and its kernels become children of these, with the rule `order`, which makes a layer an inferred one.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import duckdb

from xsp import table
from xsp.importers.contract import KERNEL_NAME, Losses
from xsp.schema import COLUMNS, MAX_NESTING, Column, Grade, Kind, Level, Rule

CAPTURE_BEGINS, CAPTURE_ENDS = "%StreamBeginCapture%", "%StreamEndCapture%"
_REPLAYS = "%GraphLaunch%"
_SIZE = re.compile(r"capture_(\d+)_")
"""Annotation around a capture of vLLM and SGLang: the number of tokens that its graph is for."""

MAX_CAPTURES = 1000
"""Most captures that are compared with consecutive replays at once: a step has one for each part of a model."""

MAX_PLACES = 2000
"""Most places of a sequence of kernels that are compared with each other."""


def _work_name(name: str) -> str:
    """Return the SQL of the name of device work by which replays are compared; drivers name fills and copies anew."""
    return f"""CASE WHEN {name} LIKE '%emset%' OR {name} LIKE '%fillBuffer%' THEN 'memset'
        WHEN {name} LIKE '%emcpy%' OR {name} LIKE '%copyBuffer%' THEN 'memcpy' ELSE {name} END"""


class _Replay(NamedTuple):
    """A launch of a graph, with the names of its work and their spans, in the order in which they ran."""

    launch: str
    start_ns: int
    lane: tuple[int, int, int]
    """Step, process and thread of the launch."""

    tokens: int | None
    names: tuple[str, ...]
    work: list[str]
    by_node: tuple[tuple[str, ...], list[str]] | None = None
    """The same in the order of the graph's nodes, as they were captured; None if the source does not state nodes."""


class _Call(NamedTuple):
    """A call that launched one piece of work, or that a graph recorded."""

    span: str
    name: str
    step: tuple[int, int] = (-1, -1)
    """Number of the trace and of the step."""


@dataclass
class _Source:
    """Where the same work was launched one by one."""

    captures: list[list[_Call]] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    runs: list[list[_Call]] = field(default_factory=list)
    """The calls of each thread that were no part of a capture."""


class _Place(NamedTuple):
    """Calls that have the names of a replay's work."""

    calls: Sequence[_Call]
    size: int | None = None


def has_captures(con: duckdb.DuckDBPyConnection, spans: str) -> bool:
    """Return whether a table of spans contains the capture of a graph."""
    query = f"SELECT 1 FROM {spans} WHERE level = {int(Level.RUNTIME)} AND name LIKE '{CAPTURE_BEGINS}' LIMIT 1"
    return bool(con.execute(query).fetchall())


def attribute(con: duckdb.DuckDBPyConnection, losses: Losses, captures: Sequence[str] = ()) -> bool:
    """Give the kernels of replayed graphs in `correlated` the operators and modules that their order shows.

    Args:
        con: holds `correlated`, the spans of a trace with their parents; gets the table `attributed`, the same with
            what was found, if there is something.
        losses: gets a note on what was found, and on what was not.
        captures: SQL of tables of spans of other traces with the captures of the graphs.

    Returns:
        Whether something was found.
    """
    any_replay = f"SELECT 1 FROM correlated WHERE level = {int(Level.RUNTIME)} AND name LIKE '{_REPLAYS}' LIMIT 1"
    replays = _replays(con) if con.execute(any_replay).fetchall() else []
    if not replays:
        return False
    con.execute(f"CREATE OR REPLACE TEMP VIEW source_spans AS {_source_spans(captures)}")
    con.execute(
        "CREATE OR REPLACE TEMP TABLE source_parents AS "
        "SELECT span_id, parent_id, level, kind, type, name, input_shapes "
        f"FROM source_spans WHERE level <= {int(Level.RUNTIME)}"
    )
    source = _source(con)
    pairs, refused = _Search(con, source).pairs(replays)
    found = len({launch for launch, *_ in pairs})
    if found:
        _store(con, pairs)
        work = sum(len(replay.work) for replay in replays)
        losses.note(
            f"{len(pairs):,} of {work:,} kernels and copies of replayed graphs have the operator at their place in "
            f"{'the capture of the graph' if source.captures else 'a step without graphs'}, by the order of their names"
        )
    missing = len(replays) - found
    if missing:
        reason = "; ".join(f"{count} {text}" for text, count in refused.items() if count)
        losses.note(f"of {len(replays):,} replays of graphs {missing:,} {REFUSED}: {reason}; {_HINT}")
    con.execute("DROP TABLE source_parents; DROP VIEW source_spans")
    return bool(found)


def _source_spans(captures: Sequence[str]) -> str:
    """Return the SQL of the spans of the trace itself and of the captures, with ids that differ."""
    parts = ["SELECT 0 AS source, * FROM correlated"]
    for number, spans in enumerate(captures, 1):
        ids = ", ".join(f"'{number}:' || {name} AS {name}" for name in ("span_id", "parent_id", "layer_id"))
        parts.append(f"SELECT {number} AS source, * REPLACE ({ids}) FROM {spans}")
    return " UNION ALL BY NAME ".join(parts)


def _replays(con: duckdb.DuckDBPyConnection) -> list[_Replay]:
    rows = con.execute(
        f"""
        WITH launches AS (
            SELECT span_id, start_ns, correlation_id, coalesce(step, -1) AS step, coalesce(process, -1) AS process,
                   coalesce(thread, -1) AS thread FROM correlated
            WHERE level = {int(Level.RUNTIME)} AND name LIKE '{_REPLAYS}' AND correlation_id IS NOT NULL
        ), tokens AS (
            SELECT step, max(TRY_CAST(attributes ->> '$.prefill_tokens' AS BIGINT)
                             + TRY_CAST(attributes ->> '$.decode_tokens' AS BIGINT)) AS tokens
            FROM correlated WHERE kind = '{Kind.STEP}' AND json_valid(attributes) GROUP BY step
        )
        SELECT launches.span_id, any_value(launches.start_ns), any_value(launches.step), any_value(launches.process),
               any_value(launches.thread), any_value(tokens),
               list({_work_name("work.name")} ORDER BY work.start_ns, work.span_id),
               list(work.span_id ORDER BY work.start_ns, work.span_id),
               CASE WHEN count(node) = count(*) THEN list({_work_name("work.name")} ORDER BY node) END,
               CASE WHEN count(node) = count(*) THEN list(work.span_id ORDER BY node) END
        FROM (
            SELECT *, CASE WHEN json_valid(attributes) THEN TRY_CAST(attributes ->> '$.graph_node' AS BIGINT) END
                      AS node FROM correlated
        ) AS work JOIN launches USING (correlation_id) LEFT JOIN tokens ON tokens.step = launches.step
        WHERE work.level = {int(Level.KERNEL)} AND work.kind IN ('{Kind.KERNEL}', '{Kind.COPY}')
          AND coalesce(work.parent_rule, '') NOT IN ('{Rule.CAPTURE}', '{Rule.ORDER}')
        GROUP BY launches.span_id ORDER BY 2
        """
    ).fetchall()
    return [
        _Replay(
            launch, start_ns, (step, process, thread), tokens, tuple(names), work,
            (tuple(node_names), node_work) if node_names else None,
        )
        for launch, start_ns, step, process, thread, tokens, names, work, node_names, node_work in rows
    ]  # fmt: skip


def _source(con: duckdb.DuckDBPyConnection) -> _Source:
    rows = con.execute(
        f"""
        WITH work AS (
            SELECT source, correlation_id, any_value(name) AS name FROM source_spans
            WHERE level = {int(Level.KERNEL)} AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}') GROUP BY ALL
            HAVING count(*) = 1
        ), sizes AS (
            SELECT source, process, thread, start_ns, start_ns + dur_ns AS end_ns, name FROM source_spans
            WHERE kind = '{Kind.USER}' AND name LIKE 'capture\\_%' ESCAPE '\\'
        ), calls AS (
            SELECT source, process, thread, start_ns, span_id, coalesce(step, -1) AS step,
                   CASE WHEN calls.name LIKE '{CAPTURE_BEGINS}' THEN 1 WHEN calls.name LIKE '{CAPTURE_ENDS}' THEN 2
                        ELSE 0 END AS mark,
                   {
            _work_name(f'''coalesce(
                       work.name, CASE WHEN json_valid(attributes) THEN attributes ->> '$.{KERNEL_NAME}' END,
                       CASE WHEN calls.name LIKE '%Memset%' OR calls.name LIKE '%Memcpy%' THEN calls.name END)''')
        }
                   AS work_name
            FROM source_spans AS calls LEFT JOIN work USING (source, correlation_id)
            WHERE level = {int(Level.RUNTIME)} AND kind <> '{Kind.OVERHEAD}' AND calls.name NOT LIKE '{_REPLAYS}'
        )
        SELECT source, coalesce(process, -1), coalesce(thread, -1), span_id, step, mark, work_name,
               CASE WHEN mark = 1 THEN (
                   SELECT any_value(sizes.name) FROM sizes WHERE sizes.source = calls.source
                   AND calls.start_ns BETWEEN sizes.start_ns AND sizes.end_ns
               ) END
        FROM calls WHERE mark > 0 OR work_name IS NOT NULL ORDER BY source, process, thread, start_ns
        """
    ).fetchall()
    found = _Source()
    lanes: dict[tuple[int, int, int], list[_Call]] = {}
    capturing: dict[tuple[int, int, int], list[_Call]] = {}
    for source, process, thread, span, step, mark, name, size in rows:
        lane = source, process, thread
        if mark == 1:
            capturing[lane] = []
            match = _SIZE.search(size or "")
            found.captures.append(capturing[lane])
            found.sizes.append(int(match[1]) if match is not None else None)
        elif mark == 2:
            capturing.pop(lane, None)
        else:
            calls = capturing[lane] if lane in capturing else lanes.setdefault(lane, [])
            calls.append(_Call(span, name, (source, step)))
    found.runs = list(lanes.values())
    return found


_Pair = tuple[str, str, str, bool, bool]
"""Launch, work, call; whether shapes are known, and whether modules are."""


class _Search:
    """Finds the calls that have the names of replays."""

    def __init__(self, con: duckdb.DuckDBPyConnection, source: _Source) -> None:
        """Take an engine with the view `source_spans`, and the calls in it."""
        self._con = con
        self._captures = source.captures
        self._sizes = source.sizes
        self._codes: dict[tuple[str, ...], int] = {}
        self._by_code: dict[int, list[int]] = defaultdict(list)
        self._capture_codes = [self._code(tuple(call.name for call in calls)) for calls in source.captures]
        for number, code in enumerate(self._capture_codes):
            self._by_code[code].append(number)
        # a capture may record a call for which a replay has no work: then part of it fits
        self._calls = [call for run in [*source.runs, *source.captures] for call in [*run, _Call("", "")]]
        self._starts: dict[str, list[int]] = defaultdict(list)
        for position, call in enumerate(self._calls):
            self._starts[call.name].append(position)
        self._chains: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {}
        self._parts: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._in_order: dict[tuple[int, ...], tuple[int, list[_Place]]] = {}
        self._in_order_of_steps: dict[tuple[tuple[str, ...], int, int], list[_Place]] = {}
        self._compared: dict[tuple[int, int | None], tuple[Sequence[_Call], bool, bool] | None] = {}
        self._known: dict[tuple[str, ...], list[_Place]] = {}

    def _code(self, names: tuple[str, ...]) -> int:
        return self._codes.setdefault(names, len(self._codes))

    def pairs(self, replays: Sequence[_Replay]) -> tuple[list[_Pair], dict[str, int]]:
        """Return work with its calls, and the number of replays without, by the reason."""
        lanes: dict[tuple[int, int, int], list[_Replay]] = defaultdict(list)
        for replay in replays:
            if replay.by_node is not None and self._occurs(replay.by_node[0]):
                replay = replay._replace(names=replay.by_node[0], work=replay.by_node[1])
            lanes[replay.lane].append(replay)
        pairs: list[_Pair] = []
        refused = {_NOWHERE: 0, _AMBIGUOUS: 0}
        for lane in lanes.values():
            place = 0
            codes = [self._code(replay.names) for replay in lane]
            alike: dict[tuple[str, ...], int] = Counter(replay.names for replay in lane)
            seen: dict[tuple[str, ...], int] = Counter()
            while place < len(lane):
                names = lane[place].names
                count, places = self._in_captures(codes, place)
                if not places:
                    places = self._in_steps(names, seen[names], alike[names])
                seen[names] += 1
                group = lane[place : place + count]
                compared = id(places), group[0].tokens  # the lists of places stay in the tables of this object
                if compared not in self._compared:
                    self._compared[compared] = self._agreed(places, group[0].tokens)
                chosen = self._compared[compared]
                if chosen is None:
                    refused[_AMBIGUOUS if places else _NOWHERE] += count
                else:
                    calls, shapes, modules = chosen
                    work = [(replay.launch, span) for replay in group for span in replay.work]
                    pairs += [
                        (launch, span, call.span, shapes, modules)
                        for (launch, span), call in zip(work, calls, strict=True)
                        if any(self._chains[call.span][: 2 if modules else 1])
                    ]
                place += count
        return pairs, refused

    def _occurs(self, names: tuple[str, ...]) -> bool:
        return bool(self._by_code.get(self._code(names)) or self._in_calls(names))

    def _in_captures(self, codes: Sequence[int], first: int) -> tuple[int, list[_Place]]:
        """Return how many replays follow each other as captures do, and where; 1 and no place if none fits the first.

        Args:
            codes: of the names of the replays of a step.
            first: index of the first replay.
        """
        key = tuple(codes[first : first + MAX_CAPTURES])
        if key in self._in_order:
            return self._in_order[key]
        count = 1
        places: list[_Place] = []
        for start in self._by_code.get(codes[first], []):
            length, parts = 1, {self._part(start)}
            while (
                first + length < len(codes)
                and length < MAX_CAPTURES
                and start + length < len(self._capture_codes)
                and self._capture_codes[start + length] == codes[first + length]
                and self._part(start + length) not in parts
            ):
                parts.add(self._part(start + length))
                length += 1
            if length > count:
                count, places = length, []
            if length == count:
                calls = [call for capture in self._captures[start : start + length] for call in capture]
                places.append(_Place(calls, self._sizes[start]))
        self._in_order[key] = count, places
        return count, places

    def _part(self, capture: int) -> tuple[tuple[str, ...], ...]:
        """Return the operators and modules of the first call of a capture: which part of the model it is."""
        if capture not in self._parts:
            firsts = [calls[0].span for calls in self._captures if calls]
            self._read_chains(firsts)
            self._parts = {
                number: self._chains[calls[0].span][:2] if calls else ((), ())
                for number, calls in enumerate(self._captures)
            }
        return self._parts[capture]

    def _in_steps(self, names: tuple[str, ...], number: int, count: int) -> list[_Place]:
        """Return where calls have these names: in a step that has them `count` times, only the one of this number."""
        key = names, number, count
        if key not in self._in_order_of_steps:
            places = self._in_calls(names)
            by_step: dict[tuple[int, int], list[_Place]] = defaultdict(list)
            for place in places:
                by_step[place.calls[0].step].append(place)
            of_number = [own[number] for own in by_step.values() if len(own) == count]
            self._in_order_of_steps[key] = of_number or places
        return self._in_order_of_steps[key]

    def _in_calls(self, names: tuple[str, ...]) -> list[_Place]:
        """Return where calls that launched work one by one have these names, one after another."""
        if names not in self._known:
            rarest = min(range(len(names)), key=lambda index: len(self._starts.get(names[index], ())))
            found = []
            for position in self._starts.get(names[rarest], ()):
                calls = self._calls[max(0, position - rarest) : position - rarest + len(names)]
                if len(calls) == len(names) and all(call.name == name for call, name in zip(calls, names, strict=True)):
                    found.append(_Place(calls))
            self._known[names] = found
        return self._known[names]

    def _agreed(self, places: Sequence[_Place], tokens: int | None) -> tuple[Sequence[_Call], bool, bool] | None:
        """Return the calls of a place, and whether all places have the same shapes, and the same modules.

        None if there is no place, or places differ in an operator.
        """
        sizes = [place.size for place in places if place.size is not None and place.size >= (tokens or math.inf)]
        if sizes:
            places = [place for place in places if place.size == min(sizes)]
        if not places or len(places) > MAX_PLACES:
            return None
        self._read_chains([call.span for place in places for call in place.calls])
        shapes = modules = True
        for calls in zip(*(place.calls for place in places), strict=True):
            chains = [self._chains[call.span] for call in calls]
            if any(chain[0] != chains[0][0] for chain in chains):
                return None
            modules = modules and all(chain[1] == chains[0][1] for chain in chains)
            shapes = shapes and all(chain[2] == chains[0][2] for chain in chains)
        return places[0].calls, shapes, modules

    def _read_chains(self, calls: Sequence[str]) -> None:
        """Read the operators and modules around calls, the innermost first."""
        missing = {call for call in calls if call not in self._chains}
        if not missing:
            return
        rows = self._con.execute(
            f"WITH RECURSIVE {_CHAINS} SELECT call, level, name, coalesce(input_shapes, '') FROM chains "
            "ORDER BY call, distance",
            [list(missing)],
        ).fetchall()
        found: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        for call, level, name, shapes in rows:
            found[call].append((level, name, shapes))
        for call in missing:
            own = found.get(call, [])
            operators = [(name, shapes) for level, name, shapes in own if level >= Level.OP]
            self._chains[call] = (
                tuple(name for name, _ in operators),
                tuple(name for level, name, _ in own if level < Level.OP),
                " ".join(shapes for _, shapes in operators),
            )


REFUSED = "have no operators"
"""Part of the note on replays that were not paired."""

_HINT = "a trace of the capture that names the kernels gives them (xsp import TRACE CAPTURE)"
_NOWHERE = "whose kernels, by their names in order, run nowhere else in the recording"
_AMBIGUOUS = "whose kernels run in places with different operators"

_IS_CALLER = f"""(kind = '{Kind.OP}' OR kind = '{Kind.MODULE}' OR kind = '{Kind.CALL}' AND level = {int(Level.LIBRARY)}
    OR kind = '{Kind.USER}' AND type = 'compiled')"""
"""Operators, modules, calls of libraries and compiled code; an annotation is none of them."""

_CHAINS = f"""
    up AS (
        SELECT span_id AS call, parent_id AS next_id, 0 AS distance FROM source_parents
        WHERE span_id IN (SELECT unnest(?::VARCHAR[])) AND level = {int(Level.RUNTIME)}
        UNION ALL
        SELECT call, parent_id, distance + 1 FROM up JOIN source_parents ON span_id = next_id
        WHERE distance < {MAX_NESTING}
    ), chains AS (
        SELECT call, distance, source_parents.* FROM up JOIN source_parents ON span_id = next_id WHERE {_IS_CALLER}
    )
"""
"""The operators and modules around calls, the innermost first, as SQL for a WITH RECURSIVE clause."""


def _store(con: duckdb.DuckDBPyConnection, pairs: Sequence[_Pair]) -> None:
    """Make the table `attributed` of `correlated`, with the work of pairs as that of copies of the operators and
    modules of its call."""
    columns = [Column(name, "VARCHAR", "") for name in ("launch", "work", "call")]
    columns += [Column(name, "BOOLEAN", "") for name in ("shapes", "modules")]
    table.create(con, "replayed_work", columns)
    table.insert(con, "replayed_work", pairs, columns)
    calls = [call for (call,) in con.execute("SELECT DISTINCT call FROM replayed_work").fetchall()]
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE callers AS WITH RECURSIVE {_CHAINS} "
        "SELECT call, row_number() OVER (PARTITION BY call ORDER BY distance) AS place, source_spans.* "
        "FROM chains JOIN source_spans USING (span_id)",
        [calls],
    )
    con.execute("CREATE TABLE attributed AS FROM correlated")
    con.execute(f"CREATE OR REPLACE TEMP TABLE copies AS {_COPIES}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE places AS {_PLACES}")
    con.execute(f"INSERT INTO attributed BY NAME {_COPIED_SPANS}")
    con.execute(
        f"""
        UPDATE attributed SET parent_id = places.parent_id, parent_rule = '{Rule.ORDER}',
               layer_id = coalesce(places.layer_id, attributed.layer_id),
               phase = coalesce(places.phase, attributed.phase),
               grade = CASE WHEN coalesce(places.layer_id, attributed.layer_id) IS NULL THEN '{Grade.UNKNOWN}'
                            ELSE '{Grade.INFERRED}' END
        FROM places WHERE attributed.span_id = places.work
        """
    )
    con.execute("DROP TABLE replayed_work; DROP TABLE callers; DROP TABLE copies; DROP TABLE places")


_COPIES = f"""
    WITH RECURSIVE around(launch, span_id, parent_id, level, name) AS (  -- modules that launched the replay
        SELECT span_id, span_id, parent_id, level, name FROM correlated
        WHERE span_id IN (SELECT launch FROM replayed_work)
        UNION ALL
        SELECT launch, spans.span_id, spans.parent_id, spans.level, spans.name
        FROM around JOIN correlated AS spans ON spans.span_id = around.parent_id
    ), modules AS (
        SELECT launch, name, any_value(span_id) AS span_id FROM around WHERE level = {int(Level.LAYER)} GROUP BY ALL
    ), used AS (
        SELECT launch, callers.span_id AS source_id, any_value(callers.name) AS name, any_value(level) AS level,
               bool_and(shapes) AS shapes
        FROM replayed_work JOIN callers USING (call) WHERE modules OR level >= {int(Level.OP)} GROUP BY ALL
    )
    SELECT used.*, modules.span_id IS NULL AS is_new,
           coalesce(modules.span_id, left(md5(used.launch || '/' || source_id), 16)) AS target_id
    FROM used LEFT JOIN modules ON modules.launch = used.launch AND modules.name = used.name
         AND used.level = {int(Level.LAYER)}
"""
"""Copies of operators and modules in each replay; a module that launched the replay stands for the one of its name."""

_PLACES = f"""
    SELECT work, arg_min(target_id, place) AS parent_id, arg_min(phase, place) AS phase,
           arg_min(target_id, place) FILTER (copies.level = {int(Level.LAYER)}) AS layer_id
    FROM replayed_work JOIN callers USING (call)
    JOIN copies ON copies.launch = replayed_work.launch AND copies.source_id = callers.span_id GROUP BY work
"""

_UNKNOWN_IN_COPIES = ("correlation_id", "sequence_nr", "forward_thread", "alloc_bytes", "activation_bytes")
_OF_SHAPES = ("input_shapes", "dtype", "flops", "flops_source", "dram_read_bytes", "dram_write_bytes", "bytes_source")
_OF_LAUNCH = ("trace_id", "process", "thread", "step", "rank", "rung", "timed", "collector", "start_ns")
_REPLACED = {
    "span_id": "copies.target_id",
    "parent_id": "coalesce(outer_copy.target_id, launch.parent_id)",
    "parent_rule": f"'{Rule.ORDER}'",
    "key": "printf('%016x', hash(launch.key, caller.key))",
    "dur_ns": "0",
    "status": "'ok'",
    "layer_id": f"CASE WHEN copies.level = {int(Level.LAYER)} THEN copies.target_id "
    "ELSE coalesce(layer_copy.target_id, launch.layer_id) END",
    **dict.fromkeys(_UNKNOWN_IN_COPIES, "NULL"),
    **{name: f"CASE WHEN copies.shapes THEN caller.{name} END" for name in _OF_SHAPES},
    **{name: f"launch.{name}" for name in _OF_LAUNCH},
}
_COPIED_SPANS = f"""
    WITH caller AS (SELECT * FROM callers QUALIFY row_number() OVER (PARTITION BY span_id ORDER BY call) = 1),
    outer_caller AS (  -- the next operator or module around it
        SELECT inner_one.span_id, any_value(outer_one.span_id) AS outer_id
        FROM caller AS inner_one JOIN callers AS outer_one
             ON outer_one.call = inner_one.call AND outer_one.place = inner_one.place + 1 GROUP BY 1
    )
    SELECT {", ".join(f"{_REPLACED.get(column.name, f'caller.{column.name}')} AS {column.name}" for column in COLUMNS)}
    FROM copies JOIN caller ON caller.span_id = copies.source_id
    JOIN correlated AS launch ON launch.span_id = copies.launch
    LEFT JOIN outer_caller ON outer_caller.span_id = copies.source_id
    LEFT JOIN copies AS outer_copy ON outer_copy.launch = copies.launch AND outer_copy.source_id = outer_caller.outer_id
    LEFT JOIN copies AS layer_copy ON layer_copy.launch = copies.launch AND layer_copy.source_id = caller.layer_id
    WHERE copies.is_new
"""
