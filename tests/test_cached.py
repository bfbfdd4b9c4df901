"""What another process found out is read while nothing that it depends on has changed, and is as if found out anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xsp import cached

OF = {"spec": "torchvision:resnet18", "software": ["torch 2"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cached.VARIABLE, str(tmp_path / "cached"))
    return tmp_path / "cached"


def test_an_entry_is_found_by_all_that_it_depends_on(folder: Path) -> None:
    assert cached.read("graph", OF) is None
    cached.store("graph", OF, '{"a": 1}\n')
    assert cached.read("graph", OF) == '{"a": 1}\n'
    assert cached.read("graph", {**OF, "software": ["torch 3"]}) is None
    assert cached.read("environment", OF) is None
    assert cached.read("graph", None) is None
    assert [entry.suffix for entry in folder.iterdir()] == [".json"]


def _of_another(path: Path) -> bytes:
    cached.store("graph", {"spec": "another"}, "of another")
    other = next(entry for entry in path.parent.iterdir() if entry != path)
    return other.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.read_bytes()[:-1],
        lambda path: path.read_bytes().replace(b"text", b"next"),
        lambda path: b"",
        lambda path: b"\xff\xfe\x00",
        lambda path: b"[1]\ntext",
        _of_another,
    ],
    ids=["cut", "edited", "empty", "binary", "another form", "of another"],
)
def test_a_damaged_or_foreign_entry_counts_as_none_and_is_replaced(folder: Path, damage: object) -> None:
    cached.store("graph", OF, "a text")
    path = next(folder.iterdir())
    path.write_bytes(damage(path))  # type: ignore[operator]
    assert cached.read("graph", OF) is None
    cached.store("graph", OF, "a text")
    assert cached.read("graph", OF) == "a text"


def test_nothing_is_kept_where_that_is_not_wanted_or_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cached.VARIABLE, "")
    cached.store("graph", OF, "a text")
    assert cached.read("graph", OF) is None
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(cached.VARIABLE, str(tmp_path / "file" / "below"))
    cached.store("graph", OF, "a text")
    assert cached.read("graph", OF) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_entries_that_were_not_used_for_longest_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MAX_BYTES", 2500)
    for number in range(2):
        cached.store("graph", {"number": number}, "x" * 1000)
    for place, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (place, place))
    assert cached.read("graph", {"number": 0}) is not None  # used now
    cached.store("graph", {"number": 2}, "x" * 1000)
    assert [cached.read("graph", {"number": number}) is not None for number in range(3)] == [True, False, True]


def test_software_is_of_a_process_without_torch_and_changes_with_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    package = tmp_path / "ourmodels"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = cached.software("ourmodels")
    assert first is not None
    assert first == cached.software("ourmodels")
    (package / "layers.py").write_text("b = 1\n")
    second = cached.software("ourmodels")
    assert second != first
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    assert cached.software("ourmodels") != second
    (tmp_path / "torchlike-2.0.dist-info").mkdir()
    assert cached.software("ourmodels") != second
    assert cached.software("nosuchpackage") is None
    monkeypatch.setitem(sys.modules, "torch", object())  # somebody may have changed it
    assert cached.software("ourmodels") is None


def test_a_kept_graph_is_the_captured_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    from xsp.graph import captured, files
    from xsp.models import Settings

    monkeypatch.setattr(cached, "software", lambda *packages: {"packages": packages})
    made = {name: captured.of_name(name, Settings()) for name in ("micro:path-3", "torchvision:resnet18")}
    trained = captured.of_name("micro:path-3", Settings(train=True))
    assert len(list(folder.iterdir())) == 3

    def again(spec: str, settings: Settings) -> None:
        raise AssertionError(f"{spec} is captured again")

    monkeypatch.setattr(captured, "_captured", again)
    assert captured.of_name("micro:path-3", Settings(train=True)) == trained
    for name, graph in made.items():
        kept = captured.of_name(name, Settings())
        assert kept == graph
        assert json.dumps(files.to_plain(kept)) == json.dumps(files.to_plain(graph))
    with pytest.raises(AssertionError, match="again"):
        captured.of_name("micro:path-3", Settings(batch=2))


def test_of_a_damaged_graph_that_is_kept_with_its_hash_another_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from xsp.graph import captured
    from xsp.models import Settings

    monkeypatch.setattr(cached, "software", lambda *packages: {})
    graph = captured.of_name("micro:path-3", Settings())
    conditions = captured._conditions("micro:path-3", Settings())
    for text in ("[]", "{", "null", '{"calls": 3}'):
        cached.store(captured.KIND, conditions, text)
        assert captured.of_name("micro:path-3", Settings()) == graph
        assert cached.read(captured.KIND, conditions) != text


def test_a_function_of_the_user_is_never_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.graph import captured
    from xsp.models import Settings

    monkeypatch.setattr(cached, "software", lambda *packages: {})
    assert captured._conditions("model.py:build", Settings()) is None
    assert captured._conditions("timm:resnet18", Settings()) is not None


def test_a_configuration_file_counts_by_its_content(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xsp.graph import captured
    from xsp.models import Settings

    monkeypatch.setattr(cached, "software", lambda *packages: {})
    path = tmp_path / "config.json"
    result = []
    for content in ("{}", '{"model_type": "bert"}'):
        path.write_text(content)
        result.append(captured._conditions(f"transformers:{path}?num_hidden_layers=2", Settings()))
    assert result[0] != result[1]


def test_conditions_found_before_torch_is_imported_hold_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_before_torch", None)
    monkeypatch.setitem(sys.modules, "torch", object())
    assert cached.software_before_torch() is None  # not asked in time
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(cached, "_origin", lambda package: Path(cached.__file__).parent)
    monkeypatch.setattr(cached, "_fingerprint", lambda folder, all_sources: "a hash")
    result = cached.software()
    assert cached.software("timm") != result
    assert cached.software_before_torch() == result
    monkeypatch.setitem(sys.modules, "torch", object())
    assert cached.software_before_torch() == result
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert cached.software_before_torch() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [
        [["graph", "torchvision:resnet18", "--format", "json"], ["bound", "torchvision:resnet18"]],
        [["bound", "torchvision:resnet18"], ["graph", "torchvision:resnet18"]],
    ],
    ids=["graph-first", "bound-first"],
)
def test_a_second_process_needs_no_torch_and_says_the_same(tmp_path: Path, commands: list[list[str]]) -> None:
    pytest.importorskip("torchvision")
    code = (
        "import sys; from xsp.cli import main; status = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(status)"
    )
    environment = {**os.environ, cached.VARIABLE: str(tmp_path / "cached"), "XDG_CACHE_HOME": str(tmp_path)}
    imported = []
    for command in commands:
        done = [
            subprocess.run(
                [sys.executable, "-c", code, *command], env=environment, capture_output=True, text=True, check=True
            )
            for _ in range(2)
        ]
        assert done[0].stdout == done[1].stdout
        imported.append([entry.stderr.split()[-1] for entry in done])
    assert [second for _, second in imported] == ["False", "False"]
    assert imported[0][0] == "True"
