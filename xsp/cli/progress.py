"""Output of commands: lines, tables for a terminal or a pipe, progress between steps, a run's first tables."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import clock
from xsp.run import MISSING
from xsp.scrub import plain, plain_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xsp.launch.models import Progress
    from xsp.run import Run

LINE_S = 10.0
"""Seconds between two lines of progress in a file or a pipe."""

FILE_WIDTH = 160
"""Width in characters of tables that are written to a file."""


def echo(text: str, flush: bool = False) -> None:
    """Print lines on stdout; text quoted from a trace, a path or a plugin cannot control the terminal."""
    print(plain_lines(text), flush=flush)


def warn(text: str, flush: bool = False) -> None:
    """Print lines on stderr, as `echo` does on stdout."""
    print(plain_lines(text), file=sys.stderr, flush=flush)


def warn_of_missing_files(path: object, run: Run) -> None:
    """Print a line for each note on files that a run states and that are not there, so that its figures say so."""
    for note in run.notes:
        if note.source == MISSING:
            warn(f"xsp: {path}: {note.text}")


def terminal_width() -> int:
    """Return the width in characters of the terminal: `COLUMNS`, else that of the first standard stream, else 80."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            if width := os.get_terminal_size(descriptor).columns:  # a pseudo-terminal may have none
                return width
    return 80


def list_parts(command: str, parts: Mapping[str, Any]) -> int:
    """Print the subcommands of a command that does nothing without one, and return the exit code for that."""
    echo(f"xsp {command} is several commands; each has its --help:")
    width = max(map(len, parts))
    for name, part in parts.items():
        echo(f"  xsp {command} {name:<{width}} {part.SUMMARY}")
    return 2


def write(content: str) -> None:
    """Write a table to stdout: to a terminal without control characters, to a pipe or a file unchanged."""
    sys.stdout.write(plain_lines(content) if sys.stdout.isatty() else content)


def put(content: str, out: Path | None) -> None:
    """Write a table to a file, or if None to stdout, as `write` does.

    Raises:
        OutputError: the file cannot be written.
    """
    if out is None:
        write(content)
    else:
        from xsp.report import tablefiles

        tablefiles.write_text(content, out)


def rendered(tables: Iterable[RenderableType], for_file: bool) -> str:
    """Return tables as text, formatted for the width of this terminal, or for that of a file."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=FILE_WIDTH if for_file else Console().width)
    for table in tables:
        console.print(table)
    return buffer.getvalue()


def write_json(content: Any) -> None:
    """Write a result for programs to stdout.

    Raises:
        ValueError: it contains a number that JSON has not.
    """
    write(json.dumps(content, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar on stderr, or a line every `LINE_S` if that is no terminal.

    It is drawn only between steps: it has no thread that would disturb them.
    """
    if quiet:
        from xsp.launch.models import show_no_progress

        yield show_no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # FORCE_COLOR, which notebooks and CI set, would make the bar add a line to a file at each update
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if the descriptor is closed
    console = Console(stderr=True, force_terminal=None if is_terminal else False)
    bar = Bar(*columns, console=console, auto_refresh=False)
    printed_s, printed = time.monotonic(), ""
    with ExitStack() as stack:

        def show(label: str, completed: int, total: int) -> None:
            nonlocal printed_s, printed
            line = f"xsp: {label}: {completed:,} of {total:,}"
            # a bar is drawn once there, at its end
            if not is_terminal and line != printed and time.monotonic() - printed_s > LINE_S:
                printed_s, printed = time.monotonic(), line
                warn(line, flush=True)
            if not bar.task_ids:
                stack.enter_context(bar)  # not earlier: a command that fails at once prints no bar
            label = plain(label)
            task = bar.task_ids[0] if bar.task_ids else bar.add_task(label, total=total)
            bar.update(task, description=label, completed=completed, total=total)
            bar.refresh()

        yield show


def replace_unencodable() -> None:
    """Make stdout and stderr print a question mark for characters that their encoding, such as Latin-1, lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


SILENT_S = 2.0
"""Seconds after the end of a program without a line of what the terminal waits for."""


class Ending:
    """The end of a profiled program, which waits for its first screen."""

    def __init__(self) -> None:
        self.began_ns: int | None = None
        """When it began, of `xsp.clock.monotonic_ns`; None before, and if no step was stored."""

        self._line: threading.Timer | None = None

    def prepare(self, began_ns: int) -> None:
        """Import what `show_result` uses for a single run, while its storing process finishes it.

        If that and the first screen take longer than `SILENT_S`, a line in the terminal says what they do.
        """
        self.began_ns = began_ns
        if sys.stderr is not None and sys.stderr.isatty():
            text = "xsp: the program has ended; its recorded steps are merged, then the first screen follows"
            passed_s = (clock.monotonic_ns() - began_ns) / 1e9
            self._line = threading.Timer(max(0.0, SILENT_S - passed_s), warn, [text], {"flush": True})
            self._line.daemon = True
            self._line.start()
        from xsp.advise import Needs, questions

        for name in ("xsp.account.assembly", "xsp.ingest.load", "xsp.record.output", "xsp.report.firstscreen"):
            import_module(name)
        questions(Needs.TRACE)

    def end(self) -> None:
        """Print no line from now on: the screen is there, or there will be none."""
        if self._line is not None:
            self._line.cancel()


def show_result(out: Path, remarks: bool = True, ending: Ending | None = None) -> None:
    """Print a run's first screen, or a sweep's table, and on stderr the remarks of plugins about the run.

    Args:
        out: the run, or the sweep.
        remarks: whether to give advice; a sweep has none.
        ending: the end of the program, if it was recorded in this process.
    """
    began_ns = clock.monotonic_ns()
    replace_unencodable()
    from xsp.ingest import load
    from xsp.record.output import display_path as shown_path

    runs = load.parts(out)
    if len(runs) > 1:
        from rich.console import Console

        from xsp.report import text

        Console().print(text.sweep([load.load(run) for run in runs]))
        echo(f"\nstored in {shown_path(out)}; next: xsp report {shlex.quote(shown_path(runs[0]))}")
        return
    from xsp import plugins, rundir
    from xsp.report import firstscreen

    trace = load.load(out)
    screen = firstscreen.first_screen(trace, shown_path(runs[0]), None if remarks else ())
    budget = trace.run.budget
    if budget is not None:
        screen_ns = clock.monotonic_ns() - began_ns
        if ending is not None and ending.began_ns is not None:
            # also what finishing took beyond the merge, which the budget contains
            screen_ns = max(screen_ns, clock.monotonic_ns() - ending.began_ns - round(budget.end_ns))
        screen = replace(screen, cost=budget.with_screen(screen_ns))
    if ending is not None:
        ending.end()
    echo(firstscreen.text(screen, terminal_width(), stored=shown_path(out)))
    run = rundir.read_run(runs[0])
    if screen.cost is not None and run.budget is not None:  # the budget of a job is that of its first rank
        rundir.write_run(runs[0], run | {"budget": run.budget.with_screen(round(screen.cost.screen_ns))})
    if remarks:
        sys.stdout.flush()
        for line in plugins.remarks(trace):
            warn(line)
