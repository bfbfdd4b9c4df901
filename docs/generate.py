"""Write the pages of the docs, and the parts of pages, that are generated from the source.

python docs/generate.py            write them
python docs/generate.py --check    exit with 1, and name them, if they are not up to date

Nothing here needs torch. The columns of an analysis are those of its table for a small fabricated run.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from xsp import semconv, testing
from xsp.analyses import ANALYSES, Analysis
from xsp.cli import _parser
from xsp.errors import AnalysisError
from xsp.schema import (
    COLUMNS,
    DESCRIPTION_KEYS,
    LOOP_COLUMNS,
    MERGED_COLUMNS,
    SAMPLE_COLUMNS,
    SCHEMA_VERSION,
    Column,
    Kind,
    Level,
    Rule,
)
from xsp.store.trace import Trace

DOCS = Path(__file__).resolve().parent
NOTICE = "<!-- Written by docs/generate.py from the source. Change the source, then run `make docs`. -->"

COLLECTIVE = '{"xsp.collective.name":"all_reduce","xsp.collective.communicator":"0","xsp.collective.seq":1}'
STEP = f"""
    step train 0-100
      forward Net 5-60 batch_size=8
        module net 10-50 type=Net
          op aten::addmm 20-40 flops=1000 flops_source=shapes dram_read_bytes=99 dram_write_bytes=9 bytes_source=shapes
            launch cudaLaunchKernel 25-35 correlation_id=1
            alloc memory 36-36 alloc_bytes=64
    kernel sm90_xmma_gemm 40-60 correlation_id=1 attributes={{"counters":{{"dram__bytes_read.sum":64}}}}
    kernel ncclDevKernel_AllReduce_Sum_f32 70-80 attributes={COLLECTIVE}
"""
"""A step with the data that every analysis needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check all pages, and return the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not up to date")
    check = parser.parse_args(argv).check
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(DOCS.parent)}: {'not up to date; run make docs' if check else 'written'}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and stale else 0


def pages() -> dict[Path, str]:
    """Return the expected content of each page with a generated part."""
    table, analysing = DOCS / "understand" / "table.md", DOCS / "understand" / "analyses.md"
    design = DOCS / "design.md"
    with_columns = with_part(table.read_text(encoding="utf-8"), "table", table_part())
    return {
        DOCS / "use" / "cli.md": cli_page(),
        table: with_part(with_columns, "names", names_part()),
        DOCS / "adr" / "archive" / "README.md": archive_page(),
        design: with_part(design.read_text(encoding="utf-8"), "decisions", decisions_part()),
        analysing: with_part(analysing.read_text(encoding="utf-8"), "analyses", analyses_part()),
    }


def with_part(page: str, name: str, part: str, notice: str = NOTICE) -> str:
    """Return the text of a hand-written page with the content between the marks of a part replaced."""
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, marked, remainder = page.partition(begin)
    _, closed, after = remainder.partition(end)
    if not marked or not closed:
        raise SystemExit(f"the marks {begin} and {end} are missing")
    return f"{before}{begin}\n{notice}\n\n{part}\n{end}{after}"


# --- the decisions ------------------------------------------------------------------------------------


def decisions_part() -> str:
    """Return the table of the decisions that hold and shape the code."""
    body = [(f"[{number}](adr/{name})", title, status) for number, name, title, status in decisions("adr")]
    return "\n".join(rows(("number", "decision", "status"), body))


def archive_page() -> str:
    """Return the index of the archive: number, title and status of each decision in it."""
    lines = [
        NOTICE,
        "",
        "# Archive of decisions",
        "",
        "Decisions on one part of the code, and decisions that later ones replaced. Those that shape the whole are in",
        "[Design](../../design.md#decisions). Their texts are of the day on which they were made.",
        "",
    ]
    body = [(f"[{number}]({name})", title, status) for number, name, title, status in decisions("adr/archive")]
    return "\n".join([*lines, *rows(("number", "title", "status"), body), ""])


def decisions(folder: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield number, file, title and status of the decisions in a folder, in the order of numbers."""
    for path in sorted((DOCS / folder).glob("[0-9]*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix(f"# {path.name[:3]} ")
        status = " ".join(text.partition("**Status.** ")[2].partition("\n\n")[0].split()) or "in force"
        if folder == "adr":  # the page that shows it is one folder above the file
            status = re.sub(r"\]\((?!http)", "](adr/", status)
        yield path.name[:3], path.name, title, status


# --- the table ----------------------------------------------------------------------------------------


def table_part() -> str:
    """Return the part on the columns, levels, kinds and rules of the span table."""
    return "\n".join(
        [
            f"The version of this schema is {SCHEMA_VERSION}. It rises when a column changes its meaning, not when a",
            "column is added.",
            "",
            "### Columns of `spans` and `merged`",
            "",
            *columns(COLUMNS),
            "",
            "### Columns of `merged` alone",
            "",
            *columns(MERGED_COLUMNS),
            "",
            "### Columns of `loop`",
            "",
            "See [concepts.md](concepts.md#the-loop).",
            "",
            *columns(LOOP_COLUMNS),
            "",
            "### Columns of `samples`",
            "",
            "See [gpu.md](../use/gpu.md#power-clocks-memory-and-utilisation).",
            "",
            *columns(SAMPLE_COLUMNS),
            "",
            "### Attributes of describing steps",
            "",
            "The spans of a describing step, and the matching spans of the merged step, have these keys in the column",
            "`attributes`.",
            "",
            "| key | meaning |",
            "|---|---|",
            *(f"| `{name}` | {meaning} |" for name, meaning in DESCRIPTION_KEYS.items()),
            "",
            "### Levels",
            "",
            "`level` and `rung` hold these numbers. The gaps are for levels of third parties.",
            "",
            *rows(("number", "level"), ((str(int(level)), level.name) for level in Level)),
            "",
            "### Kinds",
            "",
            *rows(("kind", "what it is an interval of"), meanings(Kind)),
            "",
            "### Rules",
            "",
            "`parent_rule` holds one of these; [correlation.md](correlation.md) has their order of strength.",
            "",
            *rows(("rule", "evidence"), meanings(Rule)),
            "",
        ]
    )


def columns(table: Iterable[Column]) -> Iterator[str]:
    """Yield the Markdown table of some columns."""
    yield from rows(("column", "type", "meaning"), ((f"`{c.name}`", c.type, c.description) for c in table))


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table, a line an item."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in body:
        yield f"| {' | '.join(map(cell, row))} |"


def cell(text: str) -> str:
    """Return text as a cell: no bar ends it, and nothing outside code is taken for HTML."""
    return text.replace("|", "\\|") if text.startswith("`") else text.replace("|", "\\|").replace("<", "&lt;")


def meanings(choices: type[enum.Enum]) -> Iterator[tuple[str, str]]:
    """Yield each choice and the comment beside it in the source."""
    for value, about in re.findall(r'^    [A-Z]+ = "(\w+)"  # (.+)$', inspect.getsource(choices), re.MULTILINE):
        yield f"`{value}`", about


# --- the names in OpenTelemetry -----------------------------------------------------------------------


def names_part() -> str:
    """Return the part on the attributes of spans and resources."""
    sent = [c for c in COLUMNS if c.attribute is not None]
    other = [f"`{c.attribute}` (column `{c.name}`)" for c in sent if c.attribute != f"xsp.{c.name}"]
    fields = ", ".join(f"`{c.name}`" for c in COLUMNS if c.attribute is None)
    return "\n".join(
        [
            f"These columns have a field of a span of their own: {fields}.",
            "The end is `start_ns` plus `dur_ns`; a `status` other than `ok` is the status ERROR with its text.",
            "",
            "### On spans, from columns",
            "",
            "The other columns are attributes, with `xsp.` before their name.",
            f"Other names: {', '.join(other)}." if other else "",
            "",
            "`xsp.level` has the name of the level, not its number. What `attributes` holds is sent key by key: a key",
            f"with a dot under its own name, another one under `{semconv.PREFIX}`. `process.pid` and `xsp.rank` are",
            "attributes of the resource.",
            "",
            "### On spans, from elsewhere",
            "",
            *rows(("attribute", "meaning"), ((f"`{name}`", about) for name, about in semconv.EXTRA_ATTRIBUTES.items())),
            "",
            "### On resources",
            "",
            "A resource is one level of one process.",
            "",
            *rows(("attribute", "meaning"), ((f"`{name}`", about) for name, about in semconv.RESOURCE.items())),
            "",
        ]
    )


# --- the command line ---------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the page on the commands; options that several commands share are explained once."""
    parser = _parser()
    found = commands(parser)
    described = [pair for command in found.values() for pair in map(describe, visible_arguments(command))]
    shared = {pair for pair in described if pair[0].startswith("`-") and described.count(pair) > 1}
    lines = [
        NOTICE,
        "",
        "# Commands",
        "",
        f"{parser.description} `xsp COMMAND --help` prints the same, with the usage in one line and examples.",
        "",
        "Exit codes: 0: done. 1: partly done, with the reason on stderr. 2: not done, with one line that says why.",
        "130: interrupted. `xsp run` has the exit code of the program. Some commands have more codes, named below.",
        "",
        "Options that mean the same in several commands, named there as *shared*:",
        "",
        *(f"- {option}: {about}" for option, about in sorted(shared)),
    ]
    for name, command in found.items():
        about = (command.description or "").partition("examples:")[0]
        arguments = list(map(describe, visible_arguments(command)))
        lines += ["", f"## xsp {name}", "", about.strip(), ""]
        lines += [f"- {option}: {text}" for option, text in arguments if (option, text) not in shared]
        if both := [option for option, text in arguments if (option, text) in shared]:
            lines += [f"- shared: {', '.join(both)}"]
        if not arguments:
            lines += ["No arguments."]
    return "\n".join([*lines, ""])


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    actions = parser._actions
    parsers: dict[str, argparse.ArgumentParser] = {}
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers.update(action.choices)
    return parsers


def visible_arguments(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return a command's arguments without hidden ones."""
    return [
        action
        for action in command._actions
        if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]


def value(action: argparse.Action) -> str:
    """Return the place-holder of an argument's value, after a space; empty for a switch."""
    if action.option_strings and action.nargs == 0:
        return ""
    name = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or action.dest.upper()
    if action.choices is not None and action.metavar is None:
        name = "|".join(map(str, action.choices))
    if action.nargs in ("*", argparse.REMAINDER):
        return f" [{name} …]"
    if action.nargs == "?":
        return f" [{name}]"
    return f" {name} [{name} …]" if action.nargs == "+" else f" {name}"


def describe(action: argparse.Action) -> tuple[str, str]:
    """Return an argument as it is written, and its help."""
    names = ", ".join(action.option_strings)
    return f"`{names}{value(action)}`" if names else f"`{value(action).strip()}`", help_text(action)


def help_text(action: argparse.Action) -> str:
    """Return an argument's help as a terminal shows it, with its default."""
    return (action.help or "") % {"default": action.default}


# --- the analyses -------------------------------------------------------------------------------------


def analyses_part() -> str:
    """Return the part on each analysis: name, needs, what it says of itself, columns."""
    turns = [(rank, place, rung) for rank in (0, 1) for place, rung in enumerate((20, 30, 40, 70))]
    trace = testing.trace_of(
        [row for rank, place, rung in turns for row in testing.spans(STEP, step=place, rung=rung, rank=rank)],
        {"machine": {"devices": ["NVIDIA H200"]}},
    )
    trace = testing.with_loop(trace, [{"step": step, "dur_ns": 100.0, "iteration_ns": 110.0} for step in range(8)])
    lines: list[str] = []
    for analysis in ANALYSES.values():
        about = inspect.cleandoc(analysis.function.__doc__ or "").strip()
        lines += [
            f"### {analysis.id}: {analysis.title}",
            "",
            *_name_and_needs(analysis),
            about,
            "",
            *columns_of(analysis, trace),
        ]
    return "\n".join(lines)


def _name_and_needs(analysis: Analysis) -> list[str]:
    """Return the line on an analysis's name in Python, if that is another one, and on the levels that it needs."""
    name = [] if analysis.name == analysis.id.replace("-", "_") else [f"`xsp.analyses.{analysis.name}`"]
    needs = [f"needs {', '.join(level.name for level in analysis.needs)}"] if analysis.needs else []
    return [" · ".join([*name, *needs]), ""] if name or needs else []


def columns_of(analysis: Analysis, trace: Trace) -> list[str]:
    """Return the line on the columns of an analysis; none if the fabricated run lacks its data."""
    try:
        return ["Columns: " + ", ".join(f"`{name}`" for name in analysis(trace).columns) + ".", ""]
    except AnalysisError:
        return []


if __name__ == "__main__":
    sys.exit(main())
