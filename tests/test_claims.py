"""What the pages claim about safety is linked to a test that is there, and the network section names every server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_connections import SERVERS

from xsp.cli import evaluate

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
TESTS = {
    name for path in (ROOT / "tests").rglob("test_*.py") for name in _TEST.findall(path.read_text(encoding="utf-8"))
}

PAGES = ("understand/guarantees.md", "use/evaluate.md")

COMMANDS = {
    "xsp/receiver/loopback.py": "xsp serve",
    "xsp/receiver/grpc.py": "xsp serve",
    "xsp/evaluate/web/app.py": "xsp evaluate serve",
    "xsp/report/serve.py": "xsp report --serve",
    "xsp/share/serving.py": "xsp share serve",
}

HELP = {"no code of it is executed": "use/evaluate.md", "no file is read": "use/evaluate.md",
        "listens on loopback": "understand/guarantees.md", "can only name a model": "use/evaluate.md"}  # fmt: skip
"""What `xsp evaluate serve --help` claims, and the page with the tests of it."""


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables with a column of tests."""
    found: list[list[str]] = []
    is_claim = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            is_claim = False
        elif cells[-1] in ("tested by", "test"):
            is_claim = True
        elif is_claim and not set("".join(cells)) <= set("-:"):
            found.append(cells)
    return found


def missing(text: str) -> list[str]:
    """Return the tests that a text names and that are not there; a name may end in `…`, a path may be a file's."""
    names = re.findall(r"`(test_\w+…?)`", text)
    absent = [
        name
        for name in names
        if not (any(test.startswith(name[:-1]) for test in TESTS) if name.endswith("…") else name in TESTS)
    ]
    return absent + [path for path in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", text)
                     if not (ROOT / path).exists()]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_each_claim_names_tests_that_are_there(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert missing(text) == []
    claims = rows(text)
    assert claims
    assert [claim[0] for claim in claims if not re.search(r"`test_|`tests/", claim[-1])] == []


def test_a_claim_without_a_test_is_found() -> None:
    assert missing("`test_that_nobody_wrote`, `test_that_nobody_…`, `tests/no/test_such.py`") == [
        "test_that_nobody_wrote", "test_that_nobody_…", "tests/no/test_such.py"
    ]  # fmt: skip
    assert rows("| claim | tested by |\n|---|---|\n| it is safe | |\n") == [["it is safe", ""]]


def test_the_network_section_names_every_server() -> None:
    assert COMMANDS.keys() == SERVERS.keys()
    section = (DOCS / PAGES[0]).read_text(encoding="utf-8").partition("### Network")[2].partition("\n### ")[0]
    named = {row[0].strip("`") for row in rows(section)}
    assert set(COMMANDS.values()) <= named


def test_what_the_help_claims_is_on_a_page_with_its_test() -> None:
    said = " ".join((evaluate.Serve.__doc__ or "").split())
    for claim, page in HELP.items():
        assert claim in said
        text = (DOCS / page).read_text(encoding="utf-8")
        assert any(claim in row[0] for row in rows(text)) or claim == "listens on loopback"
        assert "127.0.0.1" in text
    absolutes = re.findall(r"[^.:,]*\b(?:no|never|nothing|only)\b[^.:,]*", said)
    assert [each for each in absolutes if not any(claim in each for claim in HELP)] == []
