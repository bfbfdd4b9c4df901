"""Commands of third parties: one that works is as ours are, one that cannot be used says why and stops no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from xsp import doctor
from xsp.cli import main

WORKS = """
SUMMARY = "says what it was given"

def arguments(parser):
    parser.add_argument("word")

def run(options):
    print("given", options.word)
    return 3
"""

BROKEN = {
    "absent": ("", "absent_module", "ModuleNotFoundError: No module named 'absent_module'"),
    "raises": ("raise RuntimeError('no luck')", "raises_module", "RuntimeError: no luck"),
    "exits": ("raise SystemExit('no luck')", "exits_module", "SystemExit: no luck"),
    "partial": ("SUMMARY = 'x'", "partial_module", "has no arguments, run; docs/extend/plugins.md says"),
    "stumbles": (WORKS.replace("parser.add", "parser.no_such"), "stumbles_module", "AttributeError: 'ArgumentParser'"),
}


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a command that works, and those that do not."""
    site = tmp_path / "site"
    (site / "theirs-1.dist-info").mkdir(parents=True)
    (site / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    points = [
        "[xsp.commands]",
        "works = works_module",
        *(f"{name} = {module}" for name, (_, module, _) in BROKEN.items()),
    ]
    (site / "theirs-1.dist-info" / "entry_points.txt").write_text("\n".join(points))
    (site / "works_module.py").write_text(WORKS)
    for text, module, _ in BROKEN.values():
        if text:
            (site / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(site)


def test_a_command_of_a_third_party_runs_and_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["works", "this"]) == 3
    assert capsys.readouterr() == ("given this\n", "")


@pytest.mark.parametrize("name", BROKEN)
def test_a_command_that_cannot_be_used_says_why_where_it_is_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--whatever"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("xsp: error: ")
    assert BROKEN[name][2] in printed.err


@pytest.mark.parametrize("name", BROKEN)
def test_doctor_lists_a_command_that_cannot_be_used_with_the_reason(name: str) -> None:
    (line,) = (line for line in doctor.broken_plugins() if f"{name!r}" in line)
    assert BROKEN[name][2] in line


def test_help_lists_every_command_and_which_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert "says what it was given" in listed["works"]
    assert "doctor" in listed
    assert all("cannot be used; `xsp doctor` says why" in listed[name] for name in BROKEN)


def test_a_name_that_is_like_that_of_a_third_party_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workd"]) == 2
    assert "did you mean works" in capsys.readouterr().err
