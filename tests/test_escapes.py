"""No text of a run reaches a terminal as a command: every field of `run.json`, every column, on every command."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from depth import deep
from sources import tree_of

from xsp import cli, rundir, table
from xsp.cli import progress

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
        return {name: spoiled(entry) for name, entry in value.items()}
    return [spoiled(entry) for entry in value] if isinstance(value, list) else value


def spoil(run: Path, columns: set[str] | None = None) -> None:
    """Put escapes into every field of a run, and every column of text of its tables, or into some columns alone."""
    content = json.loads((run / "run.json").read_text())
    if columns is None:
        content = {name: entry if name in KEPT else spoiled(entry) for name, entry in content.items()}
        content["absent"] = {f"a{ESCAPES}": ESCAPES}
        content["notes"] = [*content["notes"], {"source": ESCAPES, "text": f"a note{ESCAPES}"}]
        content[ESCAPES] = ESCAPES
    (run / "run.json").write_text(json.dumps(content))
    con = table.connect()
    for file in [*rundir.segments(run), run / rundir.MERGED_FILE, run / rundir.LOOP_FILE, *rundir.portions(run)]:
        source = table.parquet(file)
        types = con.execute(f"SELECT column_name, column_type FROM (DESCRIBE FROM {source})").fetchall()
        expected = [
            name for name, kind in types if kind == "VARCHAR" and (name in columns if columns else name not in IDS)
        ]
        values = [
            f"""replace({name}, '": "', '": "{json.dumps(ESCAPES)[1:-1]}') AS {name}"""
            if name == "attributes"
            else f"{name} || {table.literal(ESCAPES)} AS {name}"
            for name in expected
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
    output = io.StringIO()
    given = [command[0], *([] if command[0] == "doctor" else [str(run)])]
    rest = [*more, *names] if command[0] == "compare" else [*names, *more]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = cli.main([*given, *rest])
    return code, output.getvalue()


@pytest.fixture(scope="module")
def hostile(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = shutil.copytree(small_run, tmp_path_factory.mktemp("escapes") / "run")
    spoil(run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_ONE, ids=" ".join)
def test_escapes_in_every_field_and_column_reach_no_terminal(command: list[str], hostile: Path, tmp_path: Path) -> None:
    code, output = printed(command, hostile, tmp_path)
    assert code in (0, 1, 2, 3)
    assert not FORBIDDEN & set(output), [line for line in output.splitlines() if FORBIDDEN & set(line)][:3]


@pytest.mark.slow
@pytest.mark.parametrize("column", sorted(IDS))
def test_escapes_in_a_column_that_says_what_a_row_is_reach_no_terminal(
    column: str, small_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    spoil(run, {column})
    _, output = printed(["analyze", "all"], run, tmp_path)
    assert not FORBIDDEN & set(output), [line for line in output.splitlines() if FORBIDDEN & set(line)][:3]


@pytest.mark.parametrize("field", [entry if entry in ("id", "rungs") else deep(entry) for entry in sorted(KEPT)])
def test_escapes_in_a_field_that_tells_what_is_there_reach_no_terminal(
    field: str, small_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, field: spoiled(content.get(field) or [""])}))
    _, output = printed(["analyze"], run, tmp_path)
    assert not FORBIDDEN & set(output)


def test_tables_that_hold_what_xsp_does_not_write_are_an_error_of_one_line(small_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    for file in [*rundir.segments(run), run / rundir.MERGED_FILE]:
        source = table.parquet(file)
        beside = file.with_suffix(".spoiled")
        con = table.connect()
        con.execute(f"COPY (SELECT * REPLACE ('{{' AS attributes) FROM {source}) TO '{beside}' (FORMAT parquet)")
        beside.replace(file)
    code, output = printed(["analyze", "health"], run, tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "Malformed JSON" in output


NAMES = [("aten::mm", "cpu_op"), ("k", "kernel"), ("ProfilerStep#1", "cpu_op")]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_file_format_is_only_shown_on_a_terminal_and_exact_in_a_pipe(
    form: str, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr("sys.stdout", stream)
        assert cli.main(["analyze", str(hostile), "A2", "--format", form]) == 0
    assert not FORBIDDEN & set(terminal.getvalue())
    assert "\x9b1A" in pipe.getvalue()


@pytest.mark.slow
def test_escapes_in_a_trace_and_in_its_name_reach_no_terminal_while_it_is_imported(tmp_path: Path) -> None:
    shown = [
        {"ph": "X", "name": f"{name}{ESCAPES}", "cat": f"{category}{ESCAPES * odd}", "pid": 1, "tid": f"t{ESCAPES}",
         "ts": 10 * place, "dur": 5, "args": {f"a{ESCAPES}": ESCAPES}}
        for place, (name, category) in enumerate(NAMES)
        for odd in (0, 1)
    ]  # fmt: skip
    content = {"traceEvents": shown, ESCAPES: ESCAPES, "deviceProperties": [{"id": 0, "name": ESCAPES}]}
    trace = tmp_path / f"trace{ESCAPES.replace(chr(7), '')}.json"
    trace.write_text(json.dumps(content))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        assert cli.main(["import", str(trace), "-o", str(tmp_path / f"run{ESCAPES}"), "--keep-names"]) == 0
        assert cli.main(["import", str(trace), "-o", str(tmp_path / f"run{ESCAPES}")]) == 2  # it is there
        assert cli.main(["analyze", str(trace), "ops"]) in (0, 1)
        assert cli.main(["analyze", str(trace)]) == 0
        assert cli.main(["report", str(trace)]) == 0
        assert cli.main(["export", str(trace), "--to", str(tmp_path / f"o{ESCAPES}.jsonl")]) in (0, 2)
        assert cli.main(["export", str(trace), "--format", "chrome", "-o", str(tmp_path / f"c{ESCAPES}.json")]) == 0
    assert not FORBIDDEN & set(output.getvalue())


def test_escapes_in_what_is_received_reach_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.receiver.limits import RequestLimits
    from xsp.receiver.server import Receiver, address

    output = io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    server = Receiver(tmp_path / f"in{ESCAPES}", address("127.0.0.1:0"), None, RequestLimits(), progress.echo)
    server.start()
    attributes = [{"key": f"{key}{odd}", "value": {"stringValue": f"{key}{ESCAPES}"}}
                  for odd in ("", ESCAPES) for key in ("service.name", "xsp.run.id", "host.name")]  # fmt: skip
    span = {"traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1", "name": ESCAPES, "startTimeUnixNano": "1",
            "endTimeUnixNano": "2", "attributes": attributes}  # fmt: skip
    content = {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [{"spans": [span]}]}]}
    url = next(word for word in output.getvalue().split() if word.startswith("http://"))
    request = urllib.request.Request(url, json.dumps(content).encode(), {"content-type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request).close()
    server.close()
    assert "spans received" in output.getvalue()
    assert not FORBIDDEN & set(output.getvalue())


def test_escapes_in_the_words_of_a_plugin_reach_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp import doctor

    finding = doctor.Recordable(f"mine{ESCAPES}", ESCAPES, f"it says {ESCAPES}")
    monkeypatch.setattr(doctor, "collectors", lambda: [finding])
    monkeypatch.setattr(doctor, "broken_plugins", lambda: [f"exporter {ESCAPES}"])
    monkeypatch.setattr(doctor, "machine", lambda: [("system", ESCAPES)])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(["doctor"]) == 0
    assert not FORBIDDEN & set(output.getvalue())


def test_commands_print_through_one_place() -> None:
    own = {"progress.py", "__init__.py"}  # which makes text plain; and the line of an error, which is plain too
    for file in sorted(Path(cli.__file__).parent.glob("*.py")):
        calls = [node.func for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        names = [ast.unparse(entry) for entry in calls]
        assert file.name in own or not {"print", "sys.stdout.write", "sys.stderr.write"} & set(names), file.name
