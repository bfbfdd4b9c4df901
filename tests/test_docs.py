"""The docs name everything there is, their examples run, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import generate
import pytest

import xsp
from xsp import rundir
from xsp.analyses import ANALYSES
from xsp.cli import COMMANDS, main
from xsp.levels import RUNG_NAMES
from xsp.schema import COLUMNS, MERGED_COLUMNS, SAMPLE_COLUMNS, Kind, Level, Rule

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("xsp", "tests", "benchmarks", "collectors", "deploy", "docs", "notebooks")
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)  # environments of peers bring their own
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"\bxsp ([a-z]+)\b([^\n`#]*)")
OF_THE_SCRIPT = re.compile(r"\S+\.py\b|\b(?:torchrun|accelerate|deepspeed|python)\b|\s-m\s|\s{3,}|\bxsp\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(read(name)) if kind == language]


# --- everything is documented -------------------------------------------------------------------------


def test_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_documented(command: str) -> None:
    page = read("docs/use/cli.md").partition(f"## xsp {command}\n")[2].partition("\n## ")[0]
    assert page
    for action in generate.visible_arguments(generate.commands(generate._parser())[command]):
        for option in action.option_strings or [action.metavar]:
            assert option in page, f"xsp {command} {option}"
        assert action.help, f"xsp {command} {action.dest} has no help"
    assert f"xsp {command}" in read("README.md")


@pytest.mark.parametrize("identity", ANALYSES)
def test_every_analysis_is_documented(identity: str) -> None:
    page = read("docs/understand/analyses.md").partition(f"### {identity}: ")[2].partition("\n### ")[0]
    assert ANALYSES[identity].about in page
    assert ANALYSES[identity].title in page


def test_every_percentage_says_of_what() -> None:
    page = read("docs/understand/analyses.md")
    shared = page.partition("**Percentages.**")[2].partition("\n\n")[0]
    for identity in ANALYSES:
        section = page.partition(f"### {identity}: ")[2].partition("\n### ")[0]
        prose, _, columns = section.partition("\nColumns: ")
        for column in re.findall(r"`(\w*percent\w*)`", columns):
            assert "percent_of_" in column or f"`{column}`" in prose + shared, (identity, column)


def test_every_column_level_kind_and_rule_is_documented() -> None:
    page = read("docs/understand/table.md")
    for column in (*COLUMNS, *MERGED_COLUMNS, *SAMPLE_COLUMNS):
        assert f"| `{column.name}` | {column.type} |" in page, column.name
    for level in Level:
        assert f"| {int(level)} | {level.name} |" in page
    for choice in (*Kind, *Rule):
        assert f"| `{choice}` |" in page, choice


def test_levels_rungs_and_rules_are_explained() -> None:
    concepts, correlation = read("docs/understand/concepts.md"), read("docs/understand/correlation.md")
    assert [level.name for level in Level if f"| {level.name} |" not in concepts] == []
    assert [rung for rung in RUNG_NAMES.values() if f"| `{rung}` |" not in concepts] == []
    assert [rule.value for rule in Rule if f"| `{rule}` |" not in correlation] == []


def test_every_collector_of_ours_is_documented() -> None:
    page = read("docs/use/recording.md")
    ours = [point for point in entry_points(group="xsp.collectors") if point.value.startswith("xsp_collectors")]
    assert [point.name for point in ours if f"| `{point.name}` |" not in page] == []


def test_every_public_name_is_documented() -> None:
    page = read("docs/use/python.md")
    assert [name for name in xsp.__all__ if f"`xsp.{name}`" not in page] == []


def test_the_map_of_the_tree_names_every_package_and_module() -> None:
    tree = read("docs/design.md").partition("## The tree\n")[2].partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in tree.splitlines() if line.startswith("| `"))
    modules = [path.name for path in (ROOT / "xsp").glob("*.py") if not path.name.startswith("__")]
    packages = [f"{path.parent.name}/" for path in (ROOT / "xsp").glob("*/__init__.py")]
    assert sorted(re.findall(r"`([^`]+)`", rows)) == sorted(modules + packages)


def test_every_field_of_a_run_is_documented(tmp_path: Path) -> None:
    with xsp.profile("empty", out=tmp_path / "run", collectors=[]):
        pass
    page = read("docs/understand/table.md").partition("### Fields of run.json")[2].partition("\n### ")[0]
    fields = rundir.read_run(tmp_path / "run")
    assert [field for field in [*fields, "kind", "parts"] if f"`{field}`" not in page] == []


# --- examples run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/use/python.md", "collectors/README.md"])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(blocks(page, "python"))
    for library, sign in (("torch", "import torch"), ("pandas", ".df()"), ("polars", ".pl()"), ("pyarrow", ".pl()")):
        if sign in text:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    assert list((tmp_path / "runs").glob("*/merged.parquet"))


def test_the_collector_of_the_example_is_short() -> None:
    example = next(block for block in blocks("collectors/README.md", "python") if "class " in block)
    assert len([line for line in example.splitlines() if line.strip()]) < 50


def test_blocks_of_python_are_python() -> None:
    for page in PAGES:
        for block in blocks(name_of(page), "python"):
            compile(block, name_of(page), "exec")


SHOWN = re.compile(r"^<!-- output of: (\S+)(.*?) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "arguments", "shown"), [result.groups() for result in SHOWN.finditer(read("docs/use/gpu-trace.md"))]
)
def test_outputs_of_public_traces_are_those_of_today(
    trace: str,
    arguments: str,
    shown: str,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shared / "traces" / trace
    if not source.is_file():
        pytest.skip(f"{trace} is not in the folder of sample traces")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["analyze", str(source), *arguments.split()]) == 0
    rest = " ".join(capsys.readouterr().out.split())
    for part in (" ".join(part.split()) for part in re.split(r"(?<!\S)…", shown)):
        _, result, rest = rest.partition(part)
        assert result == part, f"docs/use/gpu-trace.md shows this of {trace}, and it is not printed (any more): {part}"


# --- nothing leads astray -----------------------------------------------------------------------------


def links(page: Path) -> Iterator[tuple[str, str]]:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if not target.startswith(("http://", "https://", "mailto:")):
            file, _, heading = target.partition("#")
            yield file, heading


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for file, heading in links(page):
        target = (page.parent / file).resolve() if file else page
        assert ROOT in [target, *target.parents], f"{file} leads out of the repository"
        assert target.exists(), f"{file} is not there"
        if heading:
            assert heading in anchors(target), f"{file}#{heading}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_commands_have_the_options_that_pages_give_them() -> None:
    known = {
        name: {option for action in command._actions for option in action.option_strings}
        for name, command in generate.commands(generate._parser()).items()
    }
    unknown = [
        f"{name_of(page)}: xsp {command} {word}"
        for page in PAGES
        for first, rest in TYPED.findall(page.read_text(encoding="utf-8"))
        for command in [" ".join([first, *(part for part in rest.split()[:1] if f"{first} {part}" in known)])]
        for word in re.findall(r"(?<!\S)--[a-z-]+", OF_THE_SCRIPT.split(rest)[0])
        if command in known and word not in known[command]
    ]
    assert unknown == []


EXAMPLE = re.compile(r"^  xsp (.+?)(?: > \S+\.\w+)?(?:\s{3,}.*)?$", re.MULTILINE)


@pytest.mark.parametrize("name", sorted(generate.commands(generate._parser())))
def test_examples_of_the_help_can_be_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = generate.commands(generate._parser())
    for line in EXAMPLE.findall((every[name].description or "").partition("examples:")[2]):
        words = shlex.split(line)
        command = next(entry for entry in (" ".join(words[:2]), words[0]) if entry in every)
        try:
            given, unknown = every[command].parse_known_args(words[len(command.split()) :])
        except SystemExit:
            raise AssertionError(f"{line}: {capsys.readouterr().err}") from None
        assert not unknown, line
        if command == "predict":
            assert given.link or max(given.ranks) == 1, f"{line}: several ranks need a link"


def test_tables_to_csv_are_one_or_go_to_a_folder_where_pages_type_it() -> None:
    """Several tables in one CSV are refused."""
    several = re.compile(r"xsp analyze (\S+) ((?:[\w-]+ )*)--format csv(?!.*--out)")
    typed = [
        (page.name, names)
        for page in PAGES
        for _, names in several.findall(page.read_text(encoding="utf-8"))
        if len(names.split()) > 1
    ]
    assert not typed


def test_no_page_holds_a_conflict_of_a_merge() -> None:
    marks = re.compile(r"(^|\s)(<{7}|={7}|>{7})(\s|$)", re.MULTILINE)
    assert [name_of(page) for page in PAGES if marks.search(page.read_text(encoding="utf-8"))] == []


def test_files_that_pages_name_are_there() -> None:
    missing = [
        f"{name_of(page)}: {file}"
        for page in PAGES
        for file in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
        if "NAME" not in file and not (ROOT / file).exists()
    ]
    assert missing == []


def test_pages_that_the_source_names_are_there() -> None:
    sources = [path for path in committed() if path.suffix in (".py", ".toml", ".yaml", ".yml", ".sh", ".ipynb")]
    missing = [
        f"{name_of(path)}: {page}"
        for path in sources
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
        if not (ROOT / page).is_file()
    ]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    linked = {(ROOT / "docs" / file).resolve() for file, _ in links(ROOT / "docs" / "index.md")}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md" and not page.name[:3].isdigit()]
    assert [name_of(page) for page in pages if page not in linked] == []


def test_decisions_are_numbered_and_short() -> None:
    decisions = sorted((ROOT / "docs" / "adr").rglob("[0-9]*.md"))
    numbers = [int(path.name[:3]) for path in decisions]
    assert len(set(numbers)) == len(numbers)  # one may be missing: branches that are under way take theirs in advance
    for path in decisions:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:3]} "), path.name
        assert len(text.partition("**Context.**")[2].splitlines()) <= 40, path.name
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences")), path.name


def test_a_decision_that_was_replaced_says_so_and_is_in_the_archive() -> None:
    for path in sorted((ROOT / "docs" / "adr").rglob("[0-9]*.md")):
        text = path.read_text(encoding="utf-8")
        for replaced in re.findall(r"^(?:This r|R)eplaces \[(\d{3})\]", text, re.MULTILINE):
            (old,) = (ROOT / "docs" / "adr").rglob(f"{replaced}-*.md")
            assert "**Status.**" in old.read_text(encoding="utf-8"), old.name
        if "**Status.** Replaced" in text:
            assert path.parent.name == "archive", path.name
    (numpy,) = (ROOT / "docs" / "adr").rglob("015-*.md")
    assert "**Status.** Replaced by [051]" in numpy.read_text(encoding="utf-8")


def words(*pages: Path) -> int:
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def test_the_docs_stay_short() -> None:
    docs = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "archive"]
    assert words(ROOT / "README.md") <= 900
    assert words(ROOT / "docs" / "understand" / "concepts.md") <= 600
    assert words(*docs, ROOT / "README.md", ROOT / "benchmarks" / "README.md") <= 75_000
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## 0.1.0")[2].encode()) <= 8_000


OWN_WORD = re.compile(
    r"\b(rungs?|outlines?|stretch(es)?|shelf|seats?|sittings?|canar(y|ies)|settle|settling|coldness|alike)\b",
    re.IGNORECASE,
)
"""Words of our own that gave way to those of the field; columns and keys of these names are written as code."""


def test_pages_use_the_words_of_the_field() -> None:
    quoting = ("CHANGELOG.md", "benchmarks.md")  # the second has notes of saved results
    pages = [page for page in PAGES if not {"adr", "tests"} & {*page.parts} and page.name not in quoting]
    found = [
        f"{name_of(page)}: {match.group()}"
        for page in pages
        for match in OWN_WORD.finditer(LINK.sub("", CODE.sub("", page.read_text(encoding="utf-8"))))
    ]
    assert found == []


def committed() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in result.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and "assets" not in path.parts]


def test_nothing_committed_names_a_machine_or_a_registry() -> None:
    hosts = [
        "py" + "pi.org",
        "pythonhosted" + ".org",
        "npmjs" + ".org",
        "anaconda" + ".org",
        "download.py" + "torch.org",
    ]
    registry = re.compile("|".join(map(re.escape, hosts)))
    place = re.compile(r"(?<![\w.<>~])/(?:home|Users|root|work|mnt|tmp/w)/[\w.]")
    for path in committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert not registry.search(text), f"{name_of(path)}: {registry.search(text)}"
        if path.relative_to(ROOT).parts[0] != "tests":  # tests of what is scrubbed have to write paths down
            assert not place.search(text), f"{name_of(path)}: {place.search(text)}"


def test_the_notice_names_what_is_included() -> None:
    assert "Apache ECharts" in read("NOTICE")
    assert "The xsp authors" in read("NOTICE")


SYSTEMS = {
    "graph": ("graph", "graphs", "graph"),
    "bench": ("bench", "bounds", "transfers"),
    "bound": ("bound", "bounds", "bound"),
    "advise": ("advise", "bounds", "advise"),
    "predict": ("predict", "predict", "predict"),
    "evaluate": ("evaluate", "evaluate", "evaluate"),
    "share": ("share", "share", "share"),
    "tiles": ("jupyter lab notebooks/tiles.ipynb", "tiles", "tiles"),
}
"""Command, notebook and picture of each system of the second line."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_has_one_page_one_command_one_notebook_and_one_picture(system: str) -> None:
    command, notebook, picture = SYSTEMS[system]
    page = (ROOT / "docs" / "use" / f"{system}.md").read_text(encoding="utf-8")
    transfers = (ROOT / "docs" / "use" / "transfers.md").read_text(encoding="utf-8") if system == "bench" else ""
    assert f"`{command if ' ' in command else f'xsp {command}'}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"](../../notebooks/{notebook}.ipynb)" in page
    assert f"](../images/{picture}.png)" in page + transfers
    assert (ROOT / "notebooks" / f"{notebook}.ipynb").is_file()
    assert (ROOT / "docs" / "images" / f"{picture}.png").is_file()
