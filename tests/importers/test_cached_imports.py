"""A file that was imported once is opened from the user's cache, as if it were imported again."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from depth import deep

import xsp
from xsp import cached, plugins
from xsp.errors import TraceError, UsageError
from xsp.importers import contract
from xsp.ingest import cachedimports
from xsp.store.trace import Trace

KEY = {"a": "key"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cached.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cachedimports, "MIN_SPANS", 1)
    return tmp_path / "cache"


def write(path: Path, rank: int = 0, kernels: int = 3) -> Path:
    """Write a trace of PyTorch's profiler with a step, an operator, and kernels."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 90},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 2, "dur": 80, "args": {}},
    ]
    for number in range(kernels):
        times = {"ts": 3 + number, "dur": 1}
        events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, **times,
             "args": {"correlation": number + 1}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, **times,
             "args": {"correlation": number + 1, "device": 0, "stream": 7}},
        ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json")


def content(trace: Trace) -> list[Any]:
    """Return everything that a trace holds; the cached one also has checksums of its files."""
    tables = [trace.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall() for name in ("spans", "merged", "samples")]
    return [*tables, {**trace.run.content, "checksums": None, "format": None}, trace.rungs, trace.path]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("import-*"))


def forbid_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(source: str) -> contract.Importer:
        raise AssertionError(f"{source} is imported again")

    monkeypatch.setattr(contract, "find_importer", find)


def test_the_second_load_opens_what_the_first_one_imported(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setenv(cached.VARIABLE, "")
        imported = content(xsp.load(file))
    assert content(xsp.load(file)) == imported
    forbid_imports(monkeypatch)
    assert content(xsp.load(file)) == imported
    copy = tmp_path / "elsewhere" / file.name
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    assert content(xsp.load(copy))[:-1] == imported[:-1]
    assert len(entries(folder)) == 1


@pytest.mark.slow
def test_ranks_in_a_folder_are_one_entry(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        write(tmp_path / "job" / f"rank-{rank}.json", rank, kernels=3 + rank)
    first = content(xsp.load(tmp_path / "job"))
    assert first[-1] == tmp_path / "job"
    with monkeypatch.context() as forbidden:
        forbid_imports(forbidden)
        assert content(xsp.load(tmp_path / "job")) == first
    write(tmp_path / "job" / "rank-1.json", 1, kernels=9)
    assert len(xsp.load(tmp_path / "job").spans) == len(first[0]) + 10
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("change", ["content", "name", "code", "importers", "engine"])
def test_it_is_imported_again_when_anything_it_depends_on_changes(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = content(xsp.load(file))
    if change == "content":
        file.write_text(file.read_text().replace("gemm", "conv"))
    elif change == "name":
        file = file.rename(file.with_name("other.json"))
    elif change == "code":
        code = cached.code
        monkeypatch.setattr(cached, "code", lambda package: [*code(package), "changed"])
    elif change == "importers":
        origins = plugins.origins
        monkeypatch.setattr(plugins, "origins", lambda group: {**origins(group), "own": "json.tool:Own"})
    else:
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    after = content(xsp.load(file))
    assert len(entries(folder)) == 2
    assert (after[0] == before[0]) == (change != "content")
    assert after[3]["name"] == file.stem


def _of_another(path: Path) -> None:
    cached.store_folder("import", KEY, lambda out: (out / "file").write_text("of another"))
    other = next(entry for entry in entries(path.parent) if entry != path)
    (path / cached.FILES).write_bytes((other / cached.FILES).read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: os.truncate(entry / "merged.parquet", 100),
        lambda entry: (entry / "run.json").write_text((entry / "run.json").read_text().replace("kineto", "kinetO")),
        deep(lambda entry: (entry / "steps" / "000000.parquet").unlink()),
        deep(lambda entry: (entry / "steps" / "000001.parquet").write_bytes(b"PAR1")),
        lambda entry: (entry / cached.FILES).unlink(),
        deep(lambda entry: (entry / cached.FILES).write_text("[]")),
        deep(lambda entry: (entry / cached.FILES).write_bytes(b"\xff")),
        _of_another,
    ],
    ids=["cut", "edited", "without a table", "with another table", "no list", "another form", "binary", "of another"],
)
def test_a_damaged_entry_is_replaced(file: Path, folder: Path, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content(xsp.load(file))
    (entry,) = entries(folder)
    damage(entry)
    assert content(xsp.load(file)) == first
    forbid_imports(monkeypatch)
    assert content(xsp.load(file)) == first


def test_nothing_is_stored_where_that_is_not_wanted_or_cannot_be(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachedimports, "MIN_SPANS", 100)  # a small trace is imported as fast as it is opened
    xsp.load(file)
    assert entries(folder) == []
    monkeypatch.setattr(cachedimports, "MIN_SPANS", 1)
    monkeypatch.setattr(cached, "MAX_FOLDER_BYTES", 1 << 60)  # more than the disk has room for
    xsp.load(file)
    assert entries(folder) == []
    for value in ("", str(file / "below")):
        monkeypatch.setenv(cached.VARIABLE, value)
        assert len(xsp.load(file).spans) == 8
    assert sorted(path.name for path in tmp_path.iterdir() if path != folder) == ["trace.json"]
    assert cachedimports.key_of(["http://localhost:16686/trace/1"]) is None


def test_nothing_is_stored_of_a_file_that_cannot_be_imported(file: Path, folder: Path) -> None:
    file.write_text(file.read_text()[:-60])
    for _ in range(2):
        with pytest.raises(TraceError, match="truncated"):
            xsp.load(file)
    assert entries(folder) == []


def test_only_the_user_can_read_an_entry(file: Path, folder: Path) -> None:
    before = os.umask(0)
    try:
        xsp.load(file)
    finally:
        os.umask(before)
    for path in (folder, *entries(folder)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


def test_an_entry_that_is_a_link_is_not_followed(file: Path, folder: Path) -> None:
    first = content(xsp.load(file))
    (entry,) = entries(folder)
    entry.rename(folder.parent / "moved")
    entry.symlink_to(folder.parent / "moved")
    assert cached.open_folder(cachedimports.KIND, cachedimports.key_of([str(file)])) is None
    assert content(xsp.load(file)) == first


def test_folders_that_were_not_used_for_longest_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MAX_FOLDER_BYTES", 2500)

    def store(number: int) -> None:
        cached.store_folder("import", {"number": number}, lambda out: (out / "file").write_text("x" * 1000))

    for number in range(2):
        store(number)
    used = cached.open_folder("import", {"number": 0})
    assert used is not None
    for path in entries(folder):
        os.utime(path, (path != used.path, path != used.path))
    store(2)
    assert len(entries(folder)) == 3  # the one that was used longest ago is open
    os.close(used.lock)
    store(3)
    assert len(entries(folder)) == 2
    assert not used.path.exists()


def test_a_trace_is_read_to_its_end_while_others_make_room(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xsp.table.MOST_HELD", 0)  # its tables stay files
    xsp.load(file)
    trace = xsp.load(file)
    monkeypatch.setattr(cached, "MAX_FOLDER_BYTES", 10)
    cached.store_folder("import", KEY, lambda out: (out / "file").write_text("x" * 100))
    assert len(trace.spans) == 8
    assert [path for path in entries(folder) if (path / "steps").is_dir()]


def test_of_writers_that_store_the_same_entry_at_once_each_finds_it_whole(folder: Path) -> None:
    def second() -> None:
        cached.store_folder("import", KEY, lambda out: (out / "file").write_text("second"))

    def fill(out: Path) -> None:
        (out / "file").write_text("first")
        writer = threading.Thread(target=second)
        writer.start()
        writer.join()

    cached.store_folder("import", KEY, fill)
    found = cached.open_folder("import", KEY)
    assert found is not None
    os.close(found.lock)
    assert (found.path / "file").read_text() in ("first", "second")
    assert [path.name for path in folder.iterdir()] == [found.path.name]


def test_a_file_is_read_again_unless_its_times_are_settled(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached.content_hash(file)
    assert not folder.exists()  # a change in the same instant would not show
    monkeypatch.setattr(cached, "SETTLED_NS", -1)
    assert cached.content_hash(file) == first
    assert len([*folder.glob("content-*")]) == 1
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("gemm", "conv"))
    os.utime(file, ns=times)
    assert cached.content_hash(file) != first


def test_a_kind_that_the_trace_does_not_have_is_the_same_error(file: Path) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(UsageError) as error:
            xsp.load(file, kind="evaluation")
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert str(file) in messages[0]


def test_the_code_of_a_module_and_of_a_package_changes_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onemodule.py").write_text("a = 1\n")
    (tmp_path / "manymodules").mkdir()
    (tmp_path / "manymodules" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = [cached.code("onemodule"), cached.code("manymodules")]
    (tmp_path / "onemodule.py").write_text("a = 10\n")
    (tmp_path / "manymodules" / "part.py").write_text("")
    after = [cached.code("onemodule"), cached.code("manymodules")]
    assert before[0] != after[0]
    assert before[1] != after[1]
    with pytest.raises(ImportError):
        cached.code("nosuchmodule")
