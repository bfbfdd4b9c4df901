"""A folder, or several files, with a trace per rank is accepted wherever one file is; a damaged file is one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from depth import deep
from wire import Plane, xspace

import xsp
from xsp.cli import main
from xsp.errors import TraceError
from xsp.ingest.ranks import subjects

Command = Callable[[list[str], Path], list[str]]
"""From paths and an empty folder to the words of a command line."""

COMMANDS: dict[str, Command] = {
    "analyze": lambda paths, out: ["analyze", *paths],
    "analyze ops": lambda paths, out: ["analyze", *paths, "ops"],
    "advise": lambda paths, out: ["advise", *paths],
    "report": lambda paths, out: ["report", *paths, "-o", str(out / "page.html")],
    "export": lambda paths, out: ["export", *paths, "--format", "parquet", "-o", str(out / "a.parquet")],
    "compare": lambda paths, out: ["compare", *paths, "--with", *paths],
    "import": lambda paths, out: ["import", *paths, "-o", str(out / "run")],
    "graph": lambda paths, out: ["graph", *paths],
    "bound": lambda paths, out: ["bound", *paths, "--device", "H100"],
    "predict": lambda paths, out: ["predict", *paths, "--ranks", "2", "--link", "30us,1.2GB/s"],
}


QUICK = [name if name in ("analyze ops", "export", "import") else deep(name) for name in COMMANDS]


def trace_of_rank(rank: int) -> str:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 10, "dur": 100}
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 20, "dur": 50,
          "args": {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}}  # fmt: skip
    return json.dumps(
        {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
            "traceEvents": [step, op],
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "traces"
    made.mkdir()
    for rank in range(2):
        (made / f"worker{rank}.json").write_text(trace_of_rank(rank), encoding="utf-8")
    return made


def call(name: str, paths: list[Path], out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code, and what was printed."""
    out.mkdir()
    code = main(COMMANDS[name](list(map(str, paths)), out))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out + captured.err


@pytest.mark.parametrize("name", QUICK)
def test_ranks_are_accepted_where_one_file_is(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(folder.iterdir())
    code, said = call(name, files[:1], tmp_path / "one", capsys)
    if name != "predict":  # such a trace has no training step
        assert code == 0, said
    for kind, paths in (("folder", [folder]), ("several", files)):
        other, said = call(name, paths, tmp_path / kind, capsys)
        assert other == code, (kind, said)
        assert "run.json" not in said


@pytest.mark.parametrize("name", QUICK)
def test_a_damaged_file_is_one_error_that_names_it(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = folder / "worker1.json"
    damaged.write_text(trace_of_rank(1)[:-40] + "oops", encoding="utf-8")
    for kind, paths in (("one", [damaged]), ("folder", [folder]), ("several", sorted(folder.iterdir()))):
        code, said = call(name, paths, tmp_path / kind, capsys)
        assert code != 0
        errors = [line for line in said.splitlines() if line.startswith("xsp: error: ")]
        assert len(errors) == 1, said
        assert "worker1.json" in said


@pytest.mark.parametrize("name", ["graph", "bound", "advise"])
def test_several_sources_are_files(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, str(folder / "worker0.json"), "torchvision:resnet18"]) == 2
    assert "torchvision:resnet18: several sources are files with a trace per rank" in capsys.readouterr().err


def test_files_of_ranks_are_told_by_what_they_state(folder: Path, tmp_path: Path) -> None:
    files = sorted(folder.iterdir())
    assert subjects(files) == [[str(file) for file in files]]
    assert subjects([files[0], files[0]]) == [files[0], files[0]]
    assert subjects([folder, files[0]]) == [folder, files[0]]
    named = [tmp_path / f"rank-{rank}.trace" for rank in range(2)]
    for file in named:
        file.write_text("x", encoding="utf-8")
    assert subjects(named) == [[str(file) for file in named]]


def test_sending_traces_says_what_to_type_first(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(folder), "--to", "spans.jsonl"]) == 2
    assert f"import it first: xsp import {folder} -o runs/imported" in capsys.readouterr().err


FOREIGN = {
    "a.csv": (b'"Kind","Agent_Id","Queue_Id"\n"KERNEL",1,2\n', "rocprofv3 --output-format rocpd"),
    "b.csv": (b"name,total ns,calls\ngemm,5,1\n", "nsys export --type sqlite"),
    "c.tar": (b"a.json".ljust(257, b"\0") + b"ustar\x0000" + bytes(300), "tar xf"),
    "d.ncu-rep": (b"NVR\0" + bytes(100), "xsp counters RUN FILE"),
    "e.html": (b"<!DOCTYPE html><html>", "export_memory_timeline"),
    "f.json": (b'{"a": 1}', "export_chrome_trace"),
    "g.pb": (b"\x0a\x05\x0a\x03abcdef", "begins as OTLP's protobuf does"),
    "h.xplane.pb": (b"\x0a\xff\x01\x12\x09/host:CPU", "an XSpace of JAX or TensorFlow"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_error_names_the_form_and_a_command(tmp_path: Path, name: str) -> None:
    content, said = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=name.replace(".", r"\.")) as caught:
        xsp.load(tmp_path / name)
    assert said in str(caught.value)


def test_a_trace_of_the_host_alone_ends_in_a_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = [{"name": "train", "at": 1000 * step, "dur": 900, "stats": {"step_num": step}} for step in range(4)]
    path = tmp_path / "cpu.xplane.pb"
    path.write_bytes(xspace(Plane("/host:CPU").line(1, "python", python)))
    assert main(["analyze", str(path)]) == 0
    said = capsys.readouterr().out
    assert "an iteration" in said
    assert "grade" in said
