"""The first screen of a file that was shown once comes from the user's cache, as if it were computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from depth import deep

import xsp
from xsp import cached, plugins
from xsp.cli import main
from xsp.device import ceilings
from xsp.ingest import cachedimports
from xsp.report import cachedscreens, firstscreen
from xsp.run import MISSING, Run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cached.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "90")
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 90},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 2, "dur": 80, "args": {}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["analyze", *words]) == 0
    return capsys.readouterr().out


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("screen-*"))


def forbid_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("the screen is computed again")

    monkeypatch.setattr(firstscreen, "first_screen", compute)


def test_the_second_screen_is_the_first_one_and_nothing_is_computed(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setenv(cached.VARIABLE, "")
        computed = screen(capsys, str(file))
    assert screen(capsys, str(file)) == computed
    assert len(entries(folder)) == 1
    forbid_computing(monkeypatch)
    assert screen(capsys, str(file)) == computed


@pytest.mark.parametrize("change", ["content", "code", *map(deep, ("width", "path", "devices", "options"))])
def test_it_is_computed_again_when_anything_it_depends_on_changes(
    file: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    screen(capsys, str(file))
    words = [str(file)]
    if change == "content":
        file.write_text(file.read_text().replace("aten::mm", "aten::bmm"))
    elif change == "width":
        monkeypatch.setenv("COLUMNS", "70")
    elif change == "path":
        monkeypatch.chdir(tmp_path)
        words = [file.name]
    elif change == "code":
        code = cached.code
        monkeypatch.setattr(cached, "code", lambda package: [*code(package), "changed"])
    elif change == "devices":
        devices = tmp_path / "devices.toml"
        devices.write_text("device = []")
        monkeypatch.setenv(ceilings.VARIABLE, str(devices))
    else:
        words.append("--skip-damaged")
    screen(capsys, *words)
    assert len(entries(folder)) == 2


def test_what_may_depend_on_anything_is_not_cached(
    file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cachedscreens.key_of(str(file), 80) is not None
    assert cachedscreens.key_of(str(tmp_path), 80) is None  # a folder
    assert cachedscreens.key_of("http://localhost:16686/trace/1", 80) is None
    origins = plugins.origins
    monkeypatch.setattr(plugins, "origins", lambda group: {**origins(group), "own": "json.tool:Own"})
    assert cachedscreens.key_of(str(file), 80) is None  # a question of a third party
    screen(capsys, str(file))
    assert entries(folder) == []


def test_limits_without_figures_of_requests_are_refused_however_often(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen(capsys, str(file))
    assert main(["analyze", str(file), "--ttft", "500"]) == 2
    assert "request-figures" in capsys.readouterr().err


def test_a_screen_that_comes_with_warnings_is_not_stored(file: Path, folder: Path) -> None:
    key = cachedscreens.key_of(str(file), 80)
    run = Run.of({"imported": {"sources": [], "doubled": 0}})
    cachedscreens.store(key, "text", run | {"notes": [{"source": MISSING, "text": "a file is missing"}]})
    cachedscreens.store(key, "text", Run.of({}))
    assert cachedscreens.read(key) is None
    cachedscreens.store(key, "tëxt", run)
    assert cachedscreens.read(key) == "tëxt"


def test_the_screen_is_printed_before_the_import_is_stored(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachedimports, "MIN_SPANS", 1)
    printed = []
    store_folder = cached.store_folder

    def store(*arguments: Any) -> None:
        printed.append(capsys.readouterr().out)
        store_folder(*arguments)

    monkeypatch.setattr(cached, "store_folder", store)
    assert main(["analyze", str(file)]) == 0
    assert len(printed) == 1
    assert "grade" in printed[0]
    assert len(list(folder.glob("import-*"))) == 1


def test_an_import_of_a_screen_that_fails_is_not_stored(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachedimports, "MIN_SPANS", 1)
    with monkeypatch.context() as failing:
        failing.setattr(firstscreen, "first_screen", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["analyze", str(file)])
    assert entries(folder) == []
    assert not list(folder.glob("import-*"))
    xsp.load(file)  # outside of a screen it is stored at once
    assert len(list(folder.glob("import-*"))) == 1
