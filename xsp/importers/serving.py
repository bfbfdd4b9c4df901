"""Steps of engines that serve language models: their annotations, which name the kind of step and its batch.

A step of vLLM, SGLang, ATOM or TensorRT-LLM reads prompts (prefill), adds a token to each request (decode), or does
both (mixed); a step without requests is idle. Each form is from the source or the traces of its engine:

| engine | annotation |
|---|---|
| vLLM | `execute_context_1(64)_generation_8(8)`, `execute_72_context_1(sq64sk64…)_generation_8(sq8sk800…)` |
| vLLM, first | `execute_new_1_cached_8` |
| SGLang | `step[EXTEND bs=2 toks=14721]`, `step[DECODE bs=8]`, `step[MIXED bs=9 c=1 g=8 c_sq=64 g_sq=8]` |
| ATOM | `prefill[bs=2 tok=14721 ctx=[7803, 6918]]`, `decode[bs=117/128 tok=117 p=2 d=115]` |
| TensorRT-LLM | `[Executor] _forward_step 25: 1 ctx reqs, 8 gen reqs` |
| diffusion | `execute_diffusion_1_1024x1024` |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import duckdb

from xsp import table
from xsp.importers.contract import Losses
from xsp.schema import Column, Kind, Level
from xsp.texts import ms_text

KINDS = ("prefill", "decode", "mixed", "idle")
"""Names of the kinds of steps by their numbers, which are the same on all ranks; other kinds follow."""

_CANDIDATES = (
    r"^(execute_.*context_|execute_new_|execute_diffusion_|step\[|(prefill|decode)\[bs=)|\d+ ctx reqs, \d+ gen reqs"
)
"""Regular expression that each of the forms meets: few names are read in Python."""

_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\(([^()]*)\)_generation_(\d+)\(([^()]*)\)")
_VLLM_FIRST = re.compile(r"execute_new_(\d+)_cached_(\d+)$")
_SGLANG = re.compile(r"step\[([A-Za-z_]+)\b([^\]]*)\]")
_ATOM = re.compile(r"(prefill|decode)\[(bs=.*)\]$")
_TENSORRT_LLM = re.compile(r"(\d+) ctx reqs, (\d+) gen reqs")
_DIFFUSION = re.compile(r"execute_diffusion_(\d+)_(\d+x\d+)")
_FIELD = re.compile(r"\b(\w+)=(\d+)")
_SUM_OF_LENGTHS = re.compile(r"(?:sq)?(\d+)")


class Annotation(NamedTuple):
    """What an annotation says of a step; None for what it does not say."""

    kind: str
    requests: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None


def parse(name: str) -> Annotation | None:
    """Return what the annotation of an engine says; None if the name is none."""
    if match := _VLLM.match(name):
        lengths = [_SUM_OF_LENGTHS.match(match[index]) for index in (2, 4)]
        tokens = [int(length[1]) if length is not None else None for length in lengths]
        return _of_requests(int(match[1]), int(match[3]), *tokens)
    if match := _VLLM_FIRST.match(name):
        return _of_requests(int(match[1]), int(match[2]), None, None)
    if match := _TENSORRT_LLM.search(name):
        return _of_requests(int(match[1]), int(match[2]), None, None)
    if match := _ATOM.match(name):
        return _atom(match[1], {key: int(value) for key, value in _FIELD.findall(match[2])})
    if match := _DIFFUSION.match(name):
        return Annotation(f"diffusion {match[2]}", int(match[1]))
    if match := _SGLANG.match(name):
        return _sglang(match[1].lower(), {key: int(value) for key, value in _FIELD.findall(match[2])})
    return None


def _of_requests(prefills: int, decodes: int, prefill_tokens: int | None, decode_tokens: int | None) -> Annotation:
    """Return the annotation of a step with so many requests that read their prompts, and that add tokens."""
    kind = KINDS[3 if not prefills + decodes else 2 if prefills and decodes else 1 if decodes else 0]
    return Annotation(
        kind,
        prefills + decodes,
        prefill_tokens if prefills else 0,
        decode_tokens if decodes else 0,
    )


def _sglang(mode: str, fields: Mapping[str, int]) -> Annotation | None:
    mode = "prefill" if mode == "extend" else mode
    if mode not in KINDS and "bs" not in fields:
        return None
    requests = fields.get("bs")
    if mode == "idle":
        return Annotation(mode, 0, 0, 0)
    if mode == "decode":  # several tokens of a request where they are guessed ahead
        return Annotation(mode, requests, 0, fields.get("g_sq", requests))
    if mode == "prefill":
        return Annotation(mode, requests, fields.get("c_sq", fields.get("toks")), 0)
    if mode == "mixed":
        return Annotation(
            mode,
            requests,
            fields.get("c_sq", fields.get("ext")),
            fields.get("g_sq", fields.get("dec", fields.get("g"))),
        )
    return Annotation(mode.replace("_", " "), requests)


def _atom(mode: str, fields: Mapping[str, int]) -> Annotation:
    """Return the annotation of a step of ATOM."""
    tokens = fields.get("tok")
    if mode == "prefill":
        return Annotation(mode, fields.get("bs"), tokens, 0)
    if fields.get("p"):
        return Annotation("mixed" if fields.get("d") else "prefill", fields.get("bs"))
    return Annotation(mode, fields.get("bs"), 0, tokens)


_COLUMNS = (
    Column("name", "VARCHAR", ""),
    Column("step_kind", "INTEGER", ""),
    Column("kind_name", "VARCHAR", ""),
    Column("requests", "BIGINT", ""),
    Column("prefill_tokens", "BIGINT", ""),
    Column("decode_tokens", "BIGINT", ""),
)


def take_steps(con: duckdb.DuckDBPyConnection, losses: Losses) -> list[dict[str, Any]]:
    """Give the steps of `raw_spans` the kinds that an engine annotated; without steps, annotations are the steps.

    Of annotations inside each other the outermost one is the step, and has the tokens of an inner one if it names none.
    A step that the profiler marks has the kind of its one annotation. Requests are the batch size.

    Returns:
        The kinds of steps as for `kinds` in `run.json`; empty without annotations.
    """
    names = con.execute(
        f"SELECT DISTINCT name FROM raw_spans WHERE kind = '{Kind.USER}' AND device IS NULL "
        "AND regexp_matches(name, ?)",
        [_CANDIDATES],
    ).fetchall()
    parsed = {name: found for (name,) in names if (found := parse(name)) is not None}
    if not parsed:
        return []
    kinds = [*KINDS, *sorted({each.kind for each in parsed.values()} - {*KINDS})]
    table.create(con, "annotations", _COLUMNS)
    table.insert(con, "annotations", [(name, kinds.index(each[0]), *each) for name, each in parsed.items()], _COLUMNS)
    con.execute(f"CREATE OR REPLACE TABLE engine_steps AS {_OUTERMOST}")
    has_steps = bool(con.execute(f"SELECT 1 FROM raw_spans WHERE kind = '{Kind.STEP}' LIMIT 1").fetchall())
    if has_steps:
        con.execute(f"CREATE OR REPLACE TABLE engine_steps AS {_IN_MARKED_STEPS}")
    con.execute(_UPDATE)
    counts = con.execute(
        "SELECT any_value(step_kind), any_value(kind_name), count(*), median(dur_ns) FROM engine_steps "
        "JOIN raw_spans USING (number) GROUP BY step_kind ORDER BY 3 DESC, 1"
    ).fetchall()
    con.execute("DROP TABLE annotations; DROP TABLE engine_steps")
    if counts:
        parts = ", ".join(f"{count} {name}, median {ms_text(ns / 1e6)}" for _, name, count, ns in counts)
        steps = "its steps have the kinds" if has_steps else "its steps are those"
        losses.note(f"{steps} that the engine annotated ({parts})")
    return [{"kind": number, "name": name, "steps": count} for number, name, count, _ in sorted(counts)]


_ANNOTATED = f"""
    SELECT raw_spans.number, process, thread, start_ns, start_ns + dur_ns AS end_ns, annotations.* EXCLUDE (name)
    FROM raw_spans JOIN annotations USING (name)
    WHERE kind = '{Kind.USER}' AND device IS NULL
"""

_FIRST_OF_INNER = ", ".join(
    f"coalesce(any_value({name}) FILTER (number = outermost), CASE WHEN count(DISTINCT {name}) = 1 "
    f"THEN any_value({name}) END) AS {name}"
    for name in ("requests", "prefill_tokens", "decode_tokens")
)

_OUTERMOST = f"""
    WITH annotated AS ({_ANNOTATED}), nested AS (
        SELECT *, coalesce(max(end_ns) OVER (
            PARTITION BY process, thread ORDER BY start_ns, end_ns DESC, number
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) >= end_ns, false) AS is_inner FROM annotated
    ), grouped AS (
        SELECT *, max(CASE WHEN NOT is_inner THEN number END) OVER (
            PARTITION BY process, thread, run ORDER BY is_inner ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
        ) AS outermost FROM (
            SELECT *, count(*) FILTER (NOT is_inner) OVER (
                PARTITION BY process, thread ORDER BY start_ns, end_ns DESC, number
            ) AS run FROM nested
        )
    )
    SELECT outermost AS number, any_value(step_kind) FILTER (number = outermost) AS step_kind,
           any_value(kind_name) FILTER (number = outermost) AS kind_name, {_FIRST_OF_INNER}
    FROM grouped GROUP BY outermost
"""

_IN_MARKED_STEPS = f"""
    SELECT step.number, any_value(engine_steps.step_kind) AS step_kind, any_value(kind_name) AS kind_name,
           any_value(requests) AS requests, any_value(prefill_tokens) AS prefill_tokens,
           any_value(decode_tokens) AS decode_tokens
    FROM engine_steps JOIN raw_spans AS annotation USING (number) JOIN raw_spans AS step
         ON step.process IS NOT DISTINCT FROM annotation.process AND step.start_ns <= annotation.start_ns
         AND annotation.start_ns + annotation.dur_ns <= step.start_ns + step.dur_ns
    WHERE step.kind = '{Kind.STEP}' GROUP BY step.number HAVING count(*) = 1
"""

_UPDATE = f"""
    UPDATE raw_spans SET kind = '{Kind.STEP}', level = {int(Level.MODEL)}, batch_size = coalesce(requests, batch_size),
           attributes = json_merge_patch(coalesce(attributes, '{{}}'), json_object(
               'step_kind', step_kind, 'prefill_tokens', prefill_tokens, 'decode_tokens', decode_tokens
           ))::VARCHAR
    FROM engine_steps WHERE raw_spans.number = engine_steps.number
"""
