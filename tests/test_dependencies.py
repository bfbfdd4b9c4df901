"""The page of dependencies names exactly what pyproject.toml declares, each with a licence that can be kept."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import dependencies
import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (\S+) \| `([^`]+)` \| ([^|]*) \|[^|]*\|[^|]*\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_page_names_what_is_declared() -> None:
    rows = ROW.findall(dependencies.PAGE.read_text(encoding="utf-8"))
    named = [(extra, name, expected.strip()) for extra, name, expected, _, _ in rows]
    declared = [(extra, name, expected.strip()) for extra, name, expected in dependencies.declared()]
    assert named == [row for row in declared if row[0] != "dev"], "make audit"
    assert all(reason.strip() for *_, reason in rows)


def test_no_licence_asks_more_of_us_than_to_be_named() -> None:
    page = dependencies.PAGE.read_text(encoding="utf-8")
    for _, name, _, licence, _ in ROW.findall(page):
        assert not re.search(r"(?<!L)GPL|AGPL|proprietary|commercial", licence, re.IGNORECASE) or name == "cupti-python"


def test_the_core_has_few_dependencies() -> None:
    assert [name for extra, name, _ in dependencies.declared() if extra == "core"] == [
        "duckdb",
        "numpy",
        "rich",
        "tomli",
    ]


def test_the_analyser_installs_in_less_than_150_mb() -> None:
    pending, held = [name for extra, name, _ in dependencies.declared() if extra == "core"], {}
    while pending:
        name = pending.pop()
        if name in held or name == "tomli":  # of Python 3.10 alone
            continue
        result = metadata.distribution(name)
        held[name] = sum(file.locate().stat().st_size for file in result.files or () if file.locate().is_file())
        expected = [entry for entry in result.requires or () if "extra ==" not in entry]
        pending += [re.split(r"[^\w.-]", entry)[0] for entry in expected if "python_version <" not in entry]
    assert held.keys() >= {"duckdb", "numpy", "rich", "pygments"}
    assert sum(held.values()) < 150e6, held


def test_what_could_not_be_audited_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    result = [
        {"name": "a", "version": "1", "vulns": []},
        {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]},
        {"name": "c", "skip_reason": "not found"},
    ]
    assert (dependencies.said(result[:1]), dependencies.said(result)) == (0, 1)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "b 2: CVE-1, mended in 3",
        "2 of 3 packages audited, 1 vulnerabilities known",
        "not audited, because the index here has no data of them: c",
    ]
