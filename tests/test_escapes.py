"""No text of a run reaches a terminal as a command: every field of `run.json`, every column, on every command."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from xsp import cli, rundir, table

ESCAPES = "\x1b[2J\x9b1A\x07\u202e"
FORBIDDEN = set("\x1b\x9b\x07\u202e\r")

KEPT = {"format", "id", "otel", "checksums", "parts", "created", "rungs", "levels"}
"""Fields of `run.json` whose text is relied on to find what else is there; each of them is damaged alone elsewhere."""

IDS = {"trace_id", "span_id", "parent_id", "kind", "layer_id", "status", "parent_rule", "grade", "phase"}
"""Columns whose text decides what a row is; each of them is damaged alone."""

ON_ONE = [
    ["analyze"],
    ["analyze", "all"],
    ["report"],
    ["watch", "--once"],
    ["export", "--to"],
    ["export", "--format", "chrome"],
    ["export", "--format", "folded"],
    ["doctor"],
    ["counters"],
    ["compare"],
    ["compare", "--format", "markdown"],
]


def spoiled(value: Any) -> Any:
    """Return JSON with escapes in each of its texts."""
    if isinstance(value, str):
        return value + ESCAPES
    if isinstance(value, dict):
        return {name: spoiled(each) for name, each in value.items()}
    return [spoiled(each) for each in value] if isinstance(value, list) else value


def spoil(run: Path, columns: set[str] | None = None) -> None:
    """Put escapes into every field of a run, and every column of text of its tables, or into some columns alone."""
    content = json.loads((run / "run.json").read_text())
    if columns is None:
        content = {name: each if name in KEPT else spoiled(each) for name, each in content.items()}
        content["absent"] = {f"a{ESCAPES}": ESCAPES}
        content["notes"] = [*content["notes"], {"source": ESCAPES, "text": f"a note{ESCAPES}"}]
        content[ESCAPES] = ESCAPES
    (run / "run.json").write_text(json.dumps(content))
    con = table.connect()
    for file in [*rundir.segments(run), run / rundir.MERGED_FILE, run / rundir.LOOP_FILE, *rundir.portions(run)]:
        source = table.parquet(file)
        types = con.execute(f"SELECT column_name, column_type FROM (DESCRIBE FROM {source})").fetchall()
        wanted = [
            name for name, kind in types if kind == "VARCHAR" and (name in columns if columns else name not in IDS)
        ]
        values = [
            f"""replace({name}, '": "', '": "{json.dumps(ESCAPES)[1:-1]}') AS {name}"""
            if name == "attributes"
            else f"{name} || {table.literal(ESCAPES)} AS {name}"
            for name in wanted
        ]
        if values:
            beside = file.with_suffix(".spoiled")
            con.execute(f"COPY (SELECT * REPLACE ({', '.join(values)}) FROM {source}) TO '{beside}' (FORMAT parquet)")
            beside.replace(file)


def printed(command: list[str], run: Path, tmp_path: Path) -> tuple[int, str]:
    """Return how a command ended on a run, and all that it printed."""
    from xsp.analyses import ANALYSES

    names = list(ANALYSES) if command[1:] == ["all"] else command[1:]
    last = names[-1:] if names else []
    more = {
        "report": ["--out", str(tmp_path / "report.html")],
        "export": [str(tmp_path / "out.jsonl")] if last == ["--to"] else ["--out", str(tmp_path / "out.json")],
        "counters": [str(run / "run.json")],
        "compare": [str(run)],
    }.get(command[0], [])
    told = io.StringIO()
    given = [command[0], *([] if command[0] == "doctor" else [str(run)])]
    rest = [*more, *names] if command[0] == "compare" else [*names, *more]
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = cli.main([*given, *rest])
    return code, told.getvalue()


@pytest.fixture(scope="module")
def hostile(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = shutil.copytree(small_run, tmp_path_factory.mktemp("escapes") / "run")
    spoil(run)
    return run


@pytest.mark.parametrize("command", ON_ONE, ids=" ".join)
def test_escapes_in_every_field_and_column_reach_no_terminal(command: list[str], hostile: Path, tmp_path: Path) -> None:
    code, told = printed(command, hostile, tmp_path)
    assert code in (0, 1, 2, 3)
    assert not FORBIDDEN & set(told), [line for line in told.splitlines() if FORBIDDEN & set(line)][:3]


@pytest.mark.slow
@pytest.mark.parametrize("column", sorted(IDS))
def test_escapes_in_a_column_that_says_what_a_row_is_reach_no_terminal(
    column: str, small_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    spoil(run, {column})
    _, told = printed(["analyze", "all"], run, tmp_path)
    assert not FORBIDDEN & set(told), [line for line in told.splitlines() if FORBIDDEN & set(line)][:3]


@pytest.mark.parametrize("field", sorted(KEPT))
def test_escapes_in_a_field_that_tells_what_is_there_reach_no_terminal(
    field: str, small_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, field: spoiled(content.get(field) or [""])}))
    _, told = printed(["analyze"], run, tmp_path)
    assert not FORBIDDEN & set(told)


def test_tables_that_hold_what_xsp_does_not_write_are_an_error_of_one_line(small_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    for file in [*rundir.segments(run), run / rundir.MERGED_FILE]:
        source = table.parquet(file)
        beside = file.with_suffix(".spoiled")
        con = table.connect()
        con.execute(f"COPY (SELECT * REPLACE ('{{' AS attributes) FROM {source}) TO '{beside}' (FORMAT parquet)")
        beside.replace(file)
    code, told = printed(["analyze", "health"], run, tmp_path)
    assert (code, len(told.splitlines())) == (2, 1), told
    assert "Malformed JSON" in told
