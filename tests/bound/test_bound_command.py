"""What `xsp bound` and `xsp graph` say to type next, and what they do where nothing can be written."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from xsp import atomic, cli, scrub
from xsp.bench import environment
from xsp.bench.spec import Status, untimed
from xsp.bench.timings import Timings
from xsp.bound import text
from xsp.cli import bound
from xsp.device import ceilings, machine
from xsp.device.ceilings import Ceiling

pytest.importorskip("torch")


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "timings"


def _said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["bound", *words]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    return next(line for line in reversed(lines) if line.startswith("next: "))


def test_the_next_command_is_of_the_same_step(timings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--train", "--batch", "4", "--threads", "1", "--timings", str(timings)]
    words = _said(capsys, "micro:path-3", *options).removeprefix("next: xsp bound micro:path-3 ")
    assert set(words.split()) == {*options, "--fill", "60s"}


def test_the_next_command_repeats_the_device_and_the_sizes_and_takes_no_run_that_is_not_there(
    timings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(capsys, "micro:path-3", "--batch", "4", "--device", "H100")
    assert said == "next: xsp bound micro:path-3 --batch 4 --device H100 --html bound.html"
    given = argparse.Namespace(**dict.fromkeys(bound._REPEATED_OPTIONS), train=False)
    given.sequence, given.size, given.decode = 64, {"n": 3, "tokens": 5}, (64, 1024)
    assert bound._repeated_options(given) == "--sequence 64 --decode 64:1024 --size n=3,tokens=5"


def test_the_run_to_compare_with_is_recorded_with_the_options_of_the_step() -> None:
    typed = ["--train", "--batch", "4", "--threads", "1", "--timings", "a b", "--decode", "8"]
    assert text._profile_options(typed) == ["--train", "--batch", "4", "--decode", "8"]


def test_tables_of_phases_have_no_page_and_nothing_is_timed_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bound", "no such source", "--phases", "--html", "x.html", "--fill", "60s"]) == 2
    assert "omit --html" in capsys.readouterr().err


def test_what_cannot_be_timed_is_not_to_be_timed_again(timings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xsp import bench, graph

    name = machine.cpu_model() or "cpu"
    ceilings.store({name: Ceiling(name, {"fp32": 1e11}, {}, 1e10, "measured")})
    known = Timings.open(timings, environment.current_environment())
    specs = [spec for spec, _ in bench.specs(graph.of("micro:path-3"), threads=1)]
    ok = {"samples": 9, "trimmed_ns": 1e4, "low_ns": 9e3, "high_ns": 1.1e4, "least_ns": 9e3, "taken_ns": 1}
    small = min(specs, key=lambda spec: len(str(spec.block.calls)))
    known.add(
        replace(untimed(spec), status=Status.OK, **ok) if spec is small else untimed(spec, Status.FAILED, "died")
        for spec in specs
    )
    options = ("micro:path-3", "--threads", "1", "--timings", str(timings))
    assert _said(capsys, *options).endswith("--partial")
    assert "--fill" not in _said(capsys, *options, "--partial")


def test_a_place_without_a_name_is_an_error_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path(), Path("/")):
        with pytest.raises(IsADirectoryError), atomic.replacing(place):
            pass
    for option in ("--html", "--dot", "--save"):
        assert cli.main(["graph", "micro:path-3", option, "."]) == 2
        assert "irectory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_if_the_run_of_a_section_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "graph.json"
    assert cli.main(["graph", "micro:path-3", "--save", str(place), "--section", str(tmp_path / "nosuch")]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_micro_model_keeps_the_name_of_its_model() -> None:
    command = ["xsp", "profile", "micro:path-3", "--repeats", "5"]
    assert scrub.command(command) == command
