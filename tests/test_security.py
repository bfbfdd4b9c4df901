"""What comes from others runs nothing, leaves no directory, and is shown as text; see docs/understand/guarantees.md."""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import duckdb
import oddfiles
import pytest
from depth import deep
from sources import sources, tree_of

import xsp
from xsp import cli, rundir, sections, table
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError, TraceError, XspError
from xsp.ingest import jobs
from xsp.otlp import delivery, export
from xsp.receiver.journal import RunWriter
from xsp.report import html, watch
from xsp.run import Run
from xsp.schema import COLUMNS
from xsp.testing import spans, trace_of

HOSTILE = (
    "<script>window.hacked=1</script>",
    "</script><img src=x onerror=window.hacked=1>",
    "{{constructor.constructor('window.hacked=1')()}}",
    "__DATA__ ${window.hacked=1} `x`",
    "a'b\"c\\d",
    "'; DROP TABLE spans; --",
    "\") UNION SELECT 1; COPY (SELECT 1) TO 'owned'; --",
    "=cmd|' /C calc'!A0",
    "+1+cmd",
    "@SUM(A1)",
    "[red]red[/red] [/]",
    "\x1b]0;hacked\x07\x1b[2J\r\n\x9b31m",
    "\u202etxt.exe\u2066",
    "a;b 1\nc;d 2",
    "/etc/passwd",
    "https://example.invalid/x.parquet",
)
"""Names that a kernel, a layer or a run may have in a trace of somebody else's."""


def hostile_trace() -> Any:
    """Return a step on a device in which all names are hostile."""
    lines = ["step train 0-4000"]
    for place, _ in enumerate(HOSTILE):
        lines += [f"  module m{place} {100 * place}-{100 * place + 90} type=T{place}"]
        lines += [f"    op aten::o{place} {100 * place + 5}-{100 * place + 60}"]
        launch = f"      launch cudaLaunchKernel {100 * place + 10}-{100 * place + 20} correlation_id={place + 1}"
        lines += [launch, f"kernel k{place} {100 * place + 30}-{100 * place + 80} correlation_id={place + 1}"]
    made = [
        span._replace(
            name=HOSTILE[int(span.name.lstrip("mk"))]
            if span.name[:1] in "mk" and span.name[1:].isdigit()
            else span.name,
            type=HOSTILE[int(span.type[1:])] if span.type else span.type,
        )
        for span in spans("\n".join(lines))
    ]
    return trace_of(made, {"name": HOSTILE[0], "machine": {"devices": [HOSTILE[1]], "cpu": HOSTILE[2]}})


@pytest.fixture(scope="module")
def hostile() -> Any:
    return hostile_trace()


@pytest.fixture(scope="module")
def hostile_file(hostile: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.parquet"
    table.write(hostile.con, hostile.spans, path, "parquet")
    return path


# --- names in a trace -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_analysis_takes_names_as_text(hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: set[Any] = set()
    for entry in ANALYSES.values():
        try:
            seen.update(cell for row in entry(hostile).fetchall() for cell in row if isinstance(cell, str))
        except AnalysisError:
            continue
    assert set(HOSTILE) - {name for name in HOSTILE if name in seen} == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_page_holds_no_element_of_theirs(hostile: Any) -> None:
    page = html.render(hostile)
    assert page.count("<script") == page.count("</script>") == 1 + len(html.SCRIPTS)
    assert "<img" not in page.partition('id="data"')[2].partition("</script>")[0]
    assert "connect-src" not in page
    assert "default-src 'none'" in page


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[], ["A2"], ["A8"], ["A10", "--format", "csv"], ["A10", "--format", "json"]])
def test_a_terminal_gets_no_commands(
    hostile_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    cli.main(["analyze", str(hostile_file), *asked])
    printed = "".join(capsys.readouterr())
    if "csv" not in asked:  # which is written as it is, for other programs
        assert not {letter for letter in printed if letter < " " and letter not in "\t\n"}
    if "--format" not in asked:
        assert not set("\x9b\u202e\u2066\t") & set(printed)
    if asked == ["A10"]:
        assert "[red]red[/red] [/]" in printed


@pytest.mark.slow
def test_a_comparison_gives_a_terminal_no_commands(hostile_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["compare", str(hostile_file), str(hostile_file)])
    assert not set("\x1b\x9b\u202e\r") & set("".join(capsys.readouterr()))


def test_an_error_message_is_text_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", str(tmp_path / "\x1b[2J.json")]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("form", ["chrome", "speedscope", "folded"])
def test_exports_are_well_formed(hostile_file: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(hostile_file), "--format", form, "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    if form in ("chrome", "speedscope"):
        assert all(name in {*_strings(json.loads(text))} for name in HOSTILE[:4])
    else:
        assert all(line.rpartition(" ")[2].isdigit() for line in text.splitlines())


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for entry in value.values() for text in _strings(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in _strings(entry)]
    return [value] if isinstance(value, str) else []


def test_a_spreadsheet_computes_nothing(hostile_file: Path, tmp_path: Path) -> None:
    con = duckdb.connect()
    rows = con.sql("SELECT * FROM (VALUES ('=cmd', -1), ('-1.5e3', -2), ('@x', 3), ('plain', 4)) v(name, figure)")
    table.write(con, rows, tmp_path / "rows.csv", "csv")
    with open(tmp_path / "rows.csv", newline="") as file:
        assert list(csv.reader(file))[1:] == [["'=cmd", "-1"], ["-1.5e3", "-2"], ["'@x", "3"], ["plain", "4"]]
    out = tmp_path / "spans.csv"
    assert cli.main(["export", str(hostile_file), "--format", "csv", "-o", str(out)]) == 0
    with open(out, newline="") as file:
        assert not [cell for row in csv.reader(file) for cell in row if cell[:1] in ("=", "@", "+")]


# --- run directories of others ----------------------------------------------------------------------------


def run_of_others(place: Path, content: str | dict[str, Any], extra: str = "") -> Path:
    """Write a run directory as somebody else might have."""
    (place / "steps").mkdir(parents=True)
    trace = trace_of(spans("step net 0-10"))
    trace.con.execute(f"COPY (SELECT * {extra} FROM spans) TO {table.literal(str(rundir.segment(place, 1)))}")
    (place / "run.json").write_text(content if isinstance(content, str) else json.dumps({"format": 1, **content}))
    return place


@pytest.mark.parametrize(
    "part",
    [
        "..", "../other", "/etc", *map(deep, ("../../../../etc", "steps/../..", ".")), "", "link", "\0",
        deep("rank-0000/../../x"),
    ],
)  # fmt: skip
def test_a_part_does_not_lead_out_of_the_directory(tmp_path: Path, part: str) -> None:
    run_of_others(tmp_path / "other", {})
    run = run_of_others(tmp_path / "run", {"parts": [part]})
    (run / "link").symlink_to(tmp_path / "other")
    with pytest.raises(TraceError):
        xsp.load(run)
    with pytest.raises(TraceError):
        xsp.load(run_of_others(tmp_path / "sweep", {"kind": "sweep", "parts": [part]}))


@pytest.mark.parametrize("name", ["steps", "steps/000001.parquet", "merged.parquet", "samples", "arrived"])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    other = run_of_others(tmp_path / "other", {})
    for folder in ("samples", "arrived"):
        (other / folder).mkdir()
        (other / folder / "000000.parquet").write_bytes(rundir.segment(other, 1).read_bytes())
    (other / "merged.parquet").write_bytes(rundir.segment(other, 1).read_bytes())
    run = run_of_others(tmp_path / "run", {"finished": True})
    if name == "steps":
        rundir.segment(run, 1).unlink()
        (run / "steps").rmdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other / name)
    with pytest.raises(TraceError, match="leads out of its directory"):
        xsp.load(run)


@pytest.mark.parametrize("name", ["loop.parquet", "loop3.rows"])
def test_a_loop_behind_a_link_out_of_the_directory_is_left_out(tmp_path: Path, name: str) -> None:
    other, run = tmp_path / "other", run_of_others(tmp_path / "run", {})
    other.write_bytes(bytes(8 * 15 * 3))
    (run / name).symlink_to(other)
    result = xsp.load(run)
    assert len(result.loop) == 0
    assert any("leads out of its directory" in note.text for note in result.run.notes)


def test_a_run_that_is_a_link_itself_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run_of_others(tmp_path / "run", {}))
    assert xsp.load(tmp_path / "latest").name


def test_a_link_does_not_make_overwriting_remove_anything_outside(tmp_path: Path) -> None:
    other = run_of_others(tmp_path / "other", {})
    run = run_of_others(tmp_path / "run", {"parts": ["../other", "link", str(other)]})
    (run / "link").symlink_to(other)
    rundir.create(run, overwrite=True)
    assert rundir.segment(other, 1).is_file()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"format": 1, "x": ' + "[" * 100_000, "null", "7", '{"format": true}']
)
def test_a_bomb_of_json_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError):
        xsp.load(run_of_others(tmp_path / "run", content))


@pytest.mark.parametrize(
    "content", [b'{"traceEvents":[{"name":"' + b"a" * (40 << 20), b'{"traceEvents":' + b"[" * (4 << 20)]
)
def test_a_small_archive_of_something_large_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(content, 1))
    with pytest.raises(TraceError):
        xsp.load(tmp_path / "bomb.json.gz")


def test_a_run_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    run = run_of_others(tmp_path / "run", {})
    with open(run / "run.json", "wb") as file:
        file.truncate(rundir.MAX_RUN_BYTES + 1)
    with pytest.raises(TraceError, match="larger than"):
        xsp.load(run)


ODD = (7, {"a": [1]})
MORE_ODD = ("x", None, [1], [[{}]], True, -(2**80), 1e308)
FOUND_BY = ("parts", "ranks", "notes", "checksums", "kind", "finished", "received")
TOLD = ("machine", "name", "levels", "otel", "costs", "warmup", "steps", "rungs", "absent", "batch_size", "imported",
        "created", "command", "collectors", "world_size", "counters", "samples", "clock", "seed")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("value", [*ODD, *map(deep, MORE_ODD)], ids=repr)
def test_any_run_json_is_loaded_or_refused(tmp_path: Path, value: Any) -> None:
    for field in FOUND_BY:
        with contextlib.suppress(XspError):
            xsp.load(run_of_others(tmp_path / field, {field: value}))
    html.render(xsp.load(run_of_others(tmp_path / "run", dict.fromkeys(TOLD, value))))


def test_a_column_of_parquet_runs_no_sql(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    injected = (
        f"""7 AS {table.quoted(f'name") IS NOT NULL; COPY (SELECT 1) TO {table.literal(str(owned))}; SELECT ("name')}"""
    )
    run = run_of_others(tmp_path / "run", {}, f", {injected}")
    assert xsp.load(run).sql("SELECT count(*) FROM spans").fetchall() == [(1,)]
    assert not owned.exists()


@pytest.mark.slow
def test_a_name_of_a_file_means_that_file_alone(tmp_path: Path) -> None:
    run_of_others(tmp_path / "ab", {})
    assert xsp.load(run_of_others(tmp_path / "a[b]", {})).path == tmp_path / "a[b]"
    trace = xsp.load(run_of_others(tmp_path / "name=hive" / "level=7", {}))
    assert trace.sql("SELECT name FROM spans").fetchall() == [("net",)]
    with_pattern = run_of_others(tmp_path / "pattern", {})
    rundir.segment(with_pattern, 1).rename(with_pattern / "steps" / "0*.parquet")
    (with_pattern / "steps" / "000002.parquet").write_bytes((with_pattern / "steps" / "0*.parquet").read_bytes())
    # a file whose name is no number is no step of the run, and its name no pattern for others
    assert xsp.load(with_pattern).sql("SELECT count(*) FROM spans").fetchall() == [(1,)]


@pytest.mark.parametrize("name", [column.name for column in COLUMNS if column.type != "VARCHAR"][:6])
def test_a_column_of_another_type_is_refused(tmp_path: Path, name: str) -> None:
    extra = f"REPLACE ('1); COPY (SELECT 1) TO ''owned''; --' AS {name})"
    with pytest.raises(TraceError):
        xsp.load(run_of_others(tmp_path / "run", {}, extra))


def test_what_waits_in_a_receivers_directory_is_no_sql(tmp_path: Path) -> None:
    run = run_of_others(tmp_path / "run", {}, "REPLACE ('0 OR true; --' AS step)")
    (run / "arrived").mkdir()
    rundir.segment(run, 1).rename(run / "arrived" / "000000000.parquet")
    with pytest.raises(TraceError):
        xsp.load(run)


@pytest.mark.parametrize("identity", ["/tmp/x", "../../x", "a/../../../x", "..", "\0"])
def test_the_directory_of_an_imported_run_lies_where_it_was_asked_for(tmp_path: Path, identity: str) -> None:
    for run in ({"id": identity}, {"name": identity, "id": identity}):
        assert (tmp_path / jobs.name_of(Run.of(run))).resolve().parent == tmp_path


@pytest.mark.slow
def test_the_engine_loads_no_extension_and_asks_no_network() -> None:
    con = table.connect()
    for query in (
        "FROM 'https://example.invalid/x.parquet'",
        "FROM 's3://bucket/x.parquet'",
        "LOAD httpfs",
        "INSTALL spatial",
    ):
        with pytest.raises(duckdb.Error):
            con.execute(query)


CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "shelve", "dill", "joblib", "cloudpickle", "yaml"}


@pytest.mark.slow
def test_nothing_that_is_read_is_run() -> None:
    """Only `xsp run` executes code: its script. A block is timed by a function whose source consists of
    names that xsp made: `tests/bench/test_torchcalls.py`. What the storing process unmarshals is its parent's, through
    a pipe. A snapshot of memory is read by an unpickler that makes plain values alone:
    `tests/importers/test_torchmemory.py`. Manifests are composed by YAML's safe loader into nodes, without objects:
    `tests/evaluate/test_manifests.py`.
    """
    result = set()
    for path in sources("xsp"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
                result.add((path.name, node.func.id))
            named = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            result.update((path.name, name) for name in named if name.partition(".")[0] in MODULES)
            is_shell = isinstance(node, ast.keyword) and node.arg == "shell"
            result.update({(path.name, "shell")} if is_shell else set())
            reads = (
                isinstance(node, ast.Attribute)
                and node.attr in ("load", "loads")
                and ast.unparse(node.value) == "marshal"
            )
            result.update({(path.name, "marshal")} if reads else set())
    pipe = {("transport.py", "marshal")}
    run = {(name, how) for name in ("script.py", "torchcalls.py") for how in ("exec", "compile")}
    assert result <= {*run, ("torchmemory.py", "pickle"), ("yamltext.py", "yaml"), *pipe}


# --- files of a run that are no files ---------------------------------------------------------------------------------

RUN_FILES = (
    "run.json", "steps", "steps/000001.parquet", "merged.parquet", "loop.parquet", "loop3.rows", "samples",
    "samples/000000.parquet", "sections", "sections/x.json", "delivery.json", "progress.json", "arrived",
    "arrived/000000000.parquet", "rank-0000", "rank-0000/run.json",
)  # fmt: skip


NO_FILES: dict[str, Any] = {
    "pipe": os.mkfifo,
    "socket": oddfiles.socket_file,
    "link out": lambda path: path.symlink_to(path.parents[2] / "other" / "file"),
    "link to a folder": lambda path: path.symlink_to("/proc/self"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("kind", [kind if kind in ("pipe", "link out") else deep(kind) for kind in NO_FILES])
def test_no_entry_of_a_run_is_followed_out_or_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe would be waited for without end: the alarm ends the test."""
    (tmp_path / "a" / "other").mkdir(parents=True)
    (tmp_path / "a" / "other" / "file").write_text('{"format": 1, "name": "secret"}')
    run = run_of_others(tmp_path / "a" / "b" / "run", {"finished": True, "steps": {"stored": 1, "seen": 1}})
    path = run / name
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"waited for {name}, a {kind}"))
    signal.alarm(30)
    try:
        with contextlib.suppress(XspError):
            trace = xsp.load(run)
            assert "secret" not in str(dict(trace.run))
            assert "secret" not in str(sections.read(run))
        with contextlib.suppress(XspError):
            watch.read_figures(run)
        with contextlib.suppress(XspError):
            export.runs_in(run)
            delivery.steps_in(run)
        assert delivery.read_entries(run) == {}
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "link out", "folder"])
def test_a_segment_that_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a" / "other").mkdir(parents=True)
    (tmp_path / "a" / "other" / "file").write_bytes(b"PAR1")
    run = run_of_others(tmp_path / "a" / "run", {})
    NO_FILES[kind](rundir.segment(run, 2))
    with pytest.raises(TraceError, match=r"000002\.parquet: (not a plain file|a link that leads out)"):
        xsp.load(run)


def test_a_checksum_of_holes_is_not_computed(tmp_path: Path) -> None:
    run = run_of_others(tmp_path / "run", {"checksums": {"steps/000001.parquet": "00000000"}})
    with open(rundir.segment(run, 1), "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(TraceError, match="damaged"):
        xsp.load(run)


@pytest.mark.parametrize("name", ["arrived/000000001.parquet", "steps/000002.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "link out"])
def test_a_receiver_leaves_a_directory_with_such_an_entry_as_it_is(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "other").mkdir()
    run = run_of_others(tmp_path / "out" / "run", {"received": {"requests": 1}, "id": "a" * 16})
    (run / "arrived").mkdir()
    NO_FILES[kind](run / name)
    said: list[str] = []
    receiving = RunWriter(tmp_path / "out", said.append)
    receiving.close()
    assert [name.rpartition("/")[2] in line for line in said] == [True]
