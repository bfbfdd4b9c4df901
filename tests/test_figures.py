"""The page of figures is made of what the benchmarks saved, and what the README quotes stands on it."""

from __future__ import annotations

import re
from pathlib import Path

from parts import page

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|^    [^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\([^)]*\)")
RATIO = re.compile(r"(\d[\d.,]*) (?:times|×)")


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page_text(page.results()), "run make figures"


def test_every_number_that_the_readme_quotes_is_a_ratio_of_the_page() -> None:
    readme = CODE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    section = readme.partition("## Figures")[2].partition("\n## ")[0]
    quoted = re.findall(r"\d[\d.,]*\d|\d", LINK.sub("", section))
    assert len(quoted) >= 4
    assert set(quoted) - {ratio.value.split()[0] for ratio in page.against_peers(page.results())} == set()
    assert RATIO.findall(readme) == RATIO.findall(section), "ratios stand in the section that names the page"


def test_a_ratio_names_its_peer_its_script_and_its_day() -> None:
    for ratio in page.against_peers(page.results()):
        assert re.search(r"\d", ratio.value)
        assert (ROOT / "benchmarks" / f"{ratio.script}.py").is_file()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", ratio.date)
