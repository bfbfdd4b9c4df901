"""The page of figures is made of what the benchmarks saved, and what the README quotes stands on it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|^    [^\n]*$", re.MULTILINE | re.DOTALL)
RATIO = re.compile(r"(\d[\d.,]*) (?:times|×)")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    specification = importlib.util.spec_from_file_location("figures_page", BENCHMARKS / "page.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--check"]) == 0, capsys.readouterr().out


def test_what_the_readme_quotes_stands_on_the_page() -> None:
    readme = CODE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    quoted = RATIO.findall(readme.partition("## Figures")[2].partition("\n## ")[0])
    figures = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    values = set(re.findall(r"\d[\d.,]*\d|\d", figures.partition("## Ratios against peers")[2].partition("\n## ")[0]))
    assert len(quoted) >= 4
    assert set(quoted) - values == set()
    assert RATIO.findall(readme) == quoted, "ratios stand in the section that names the page"


def test_a_ratio_names_its_peer_its_script_and_its_day(page: ModuleType) -> None:
    for ratio in page.against_peers(page.results()):
        assert re.search(r"\d", ratio.value)
        assert (BENCHMARKS / f"{ratio.script}.py").is_file()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", ratio.date)


def test_every_script_that_measures_is_run() -> None:
    run_all = (BENCHMARKS / "run_all.py").read_text(encoding="utf-8")
    measuring = [path.stem for path in BENCHMARKS.glob("*.py") if "turns.Report(" in path.read_text(encoding="utf-8")]
    assert [name for name in measuring if f'"{name}"' not in run_all] == []


def test_what_needs_what_is_absent_is_skipped(tmp_path: Path) -> None:
    script = tmp_path / "needs.py"
    script.write_text("import turns\nturns.skip('this needs a moon')\n")
    ended = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (77, "this needs a moon\n")
