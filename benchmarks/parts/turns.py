"""The method that all benchmarks share: conditions take turns in one process and are compared round by round.

Conditions that are compared are measured in the same rounds. A round runs every condition once, in a random order
from a seed, so that drift of the machine affects all of them alike, and figures come from pairs: the ratio (or the
difference) of two conditions of one round. The figure is the median over the rounds; its interval is the 95 %
percentile bootstrap of that median, resampling whole rounds.

A step that other processes disturbed is measured again, see `quiet.py`.

Before each measured step, one step runs bare and unmeasured. The work of a tool after a step (storing, decoding)
evicts the caches, and makes the next step 1 to 5 % slower; without the bare step in between, every condition would
pay for the previous one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn, TypeVar

from parts import page
from parts.quiet import Patience, Watch
from xsp import stats
from xsp.device import machine as device
from xsp.errors import XspError
from xsp.version import __version__

RESAMPLES = 1000
Row = TypeVar("Row")
Round = Mapping[str, int]
"""Nanoseconds by condition."""


# --- taking turns -----------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


SKIPPED = 77
"""Exit code of a script whose requirements (a device, a package, an operating system) are not met here."""


@dataclass(frozen=True)
class Condition:
    """One way to run the step, with the callbacks that run around it."""

    name: str
    step: Callable[[], object]
    start: Callable[[], object] = _nothing
    """Runs before the first reading of the clock."""

    finish: Callable[[], object] = _nothing
    """Runs after the step and before the second reading."""

    stop: Callable[[], object] = _nothing
    """Runs after the second reading."""

    def measure(self) -> tuple[int, bool]:
        """Run the step once; return the ns between the two readings, and whether other processes disturbed it."""
        self.start()
        watch = Watch()
        begin = perf_counter_ns()
        self.step()
        self.finish()
        end = perf_counter_ns()
        is_disturbed = watch.is_disturbed
        self.stop()
        return end - begin, is_disturbed


@dataclass(frozen=True)
class Group:
    """Conditions that share an installation (a context manager), which is entered and left once per round."""

    conditions: Sequence[Condition]
    installation: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass
class Turns:
    """The turns of one table: the seed of their order, the patience with other processes, and the counts of both."""

    seed: int = 0
    patience: float = 0.0
    """Seconds for waiting and measuring again, for each row of the table."""

    repeated: int = 0
    disturbed: int = 0
    """Measurements that count although other processes disturbed them, since the patience had ended."""

    total: int = 0

    def take(self, groups: Sequence[Group], rounds: int, settle: Callable[[], object] = _nothing) -> list[Round]:
        """Measure each condition once per round, after two rounds that do not count.

        Args:
            groups: groups of conditions; their order, and that of their conditions, is random in each round.
            rounds: number of rounds that count.
            settle: runs unmeasured before each measured step, and once more after an installation.
        """
        draw = random.Random(self.seed)
        for _ in range(2):
            replace(self)._round(groups, settle, draw, Patience(0))
        patience = Patience(self.patience)
        return [self._round(groups, settle, draw, patience) for _ in range(rounds)]

    def _round(
        self, groups: Sequence[Group], settle: Callable[[], object], draw: random.Random, patience: Patience
    ) -> Round:
        times: dict[str, int] = {}
        for group in draw.sample(groups, k=len(groups)):
            with group.installation():
                settle()
                for condition in draw.sample(group.conditions, k=len(group.conditions)):
                    times[condition.name] = self._undisturbed(condition, settle, patience)
        return times

    def _undisturbed(self, condition: Condition, settle: Callable[[], object], patience: Patience) -> int:
        """Measure until no other process disturbs, or until the patience ends; return the last measurement."""
        while True:
            begin = time.perf_counter()
            settle()
            elapsed_ns, is_disturbed = condition.measure()
            if not is_disturbed or patience.seconds_left <= 0:
                self.total += 1
                self.disturbed += is_disturbed
                return elapsed_ns
            self.repeated += 1
            patience.spend(time.perf_counter() - begin)
            patience.wait()

    def note(self) -> str:
        """Return a sentence on how other processes disturbed the measurements."""
        return (
            f"Measurements taken again because other processes disturbed them: {self.repeated}; "
            f"that count although disturbed: {self.disturbed} of {self.total}."
        )


def time_of(step: Callable[[], object], times: int = 3) -> float:
    """Return the median time of a step in seconds, after a warm-up step."""
    step()
    return stats.percentile([Condition("", step).measure()[0] for _ in range(times)], 0.5) / 1e9


# --- figures ----------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    lo: float
    hi: float

    def text(self, digits: int = 2, factor: float = 1.0, offset: float = 0.0) -> str:
        """Return `value [lo, hi]`, each times `factor` after `offset` was added; a dash if there is no figure."""
        if not all(map(math.isfinite, self)):
            return "–"
        value, lo, hi = ((number + offset) * factor for number in self)
        return f"{value:.{digits}f} [{lo:.{digits}f}, {hi:.{digits}f}]"


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return stats.percentile(values, 0.5)


def bootstrap(rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float], seed: int = 0) -> Figure:
    """Return a statistic of the rows with the percentile interval from resampling the rows."""
    draw = random.Random(seed)
    draws = [statistic(draw.choices(rows, k=len(rows))) for _ in range(RESAMPLES)]
    tail = (1 - stats.CONFIDENCE) / 2
    return Figure(statistic(rows), stats.percentile(draws, tail), stats.percentile(draws, 1 - tail))


def middle(values: Sequence[float]) -> Figure:
    """Return the median and its interval."""
    return bootstrap(values, median)


def ratio(rounds: Sequence[Round], name: str, base: str) -> Figure:
    """Return the median over the rounds of the ratio of one condition's time to another's."""
    return middle([round_times[name] / round_times[base] for round_times in rounds])


def difference(rounds: Sequence[Round], name: str, base: str) -> Figure:
    """Return the median over the rounds of one condition's time minus another's, in nanoseconds."""
    return middle([round_times[name] - round_times[base] for round_times in rounds])


def _without_folders(value: Any) -> Any:
    """Return an option's value with paths reduced to the names of the files."""
    if isinstance(value, list):
        return [_without_folders(element) for element in value]
    return os.path.basename(value) if isinstance(value, (str, os.PathLike)) and os.sep in str(value) else value


def turns_of(options: argparse.Namespace) -> Turns:
    """Return the `Turns` that the options specify."""
    return Turns(options.seed, options.patience)


def verdict(figure: Figure, goal: float) -> str:
    """Return `met` or `missed` for a figure and a goal, with `?` if the interval contains the goal itself."""
    is_certain = figure.hi <= goal or figure.lo > goal
    return ("met" if figure.value <= goal else "missed") + ("" if is_certain else "?")


# --- the report -------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The result of a script: a table, notes on it, and the values behind it."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True
    """Whether all was measured. The report of a part is printed, and never saved in place of earlier figures."""

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """End the block at an interrupt (Ctrl-C, or the timeout of `run_all.py`), and report what was measured."""
        try:
            yield
        except KeyboardInterrupt:
            self.mark_partial("Interrupted: the figures are of what was measured before.")

    @contextlib.contextmanager
    def trying(self, subject: str) -> Iterator[None]:
        """End the block at an error of xsp or of a subprocess, and note it; `subject` names the model or the case."""
        try:
            yield
        except (XspError, subprocess.SubprocessError) as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            say(f"  {subject}: {reason}")
            self.notes.append(f"{subject}: failed ({reason}).")

    def mark_partial(self, note: str) -> None:
        """Note why the report is of a part."""
        self.is_complete = False
        self.notes.append(note)

    def add(self, row: Sequence[str], **data: Any) -> None:
        """Add a row, and store the values behind it under the text of its first cell."""
        self.rows.append(row)
        self.data[row[0]] = data

    def finish(self, options: argparse.Namespace) -> None:
        """Print the table, and with `--save` write it to `benchmarks/results` if all was measured."""
        print("\n".join([self.title, "", *table(self.columns, self.rows), "", *self.notes, machine_line(options)]))
        if options.save and self.is_complete:
            self._save(options)
        elif options.save and getattr(options, "partial", None) is not None:
            self._save(options, options.partial)
            say(f"saved as a part in {options.partial.name}: earlier figures stay")
        elif options.save:
            say("nothing is saved: the figures are of a part")

    def _save(self, options: argparse.Namespace, folder: Path | None = None) -> None:
        to = folder or page.RESULTS
        to.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "xsp": __version__,
            "options": {
                name: _without_folders(value)
                for name, value in vars(options).items()
                if name not in ("save", "load", "partial")
            },
            "load": options.load,
            "machine": device.describe(),
            "table": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": self.notes,
            "data": self.data,
        }
        text = json.dumps(content, ensure_ascii=False, default=str)
        (to / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        if folder is None:
            page.update()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with aligned columns: the first one left, the others right."""
    widths = [max(len(row[column]) for row in (columns, *rows)) for column in range(len(columns))]
    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    return [line(columns), line(rule), *map(line, rows)]


def machine_line(options: argparse.Namespace) -> str:
    """Return one line with the machine, the versions, the seed and the date."""
    description = device.describe()
    packages = [f"{name} {version}" for name, version in description["packages"].items() if name in sys.modules]
    threads = [f"{description['torch_threads']} torch threads"] if "torch_threads" in description else []
    parts = [
        f"{description['cpu']}, {description['cores']} cores",
        *threads,
        f"{description['system']} {description['kernel']}",
        f"Python {description['python']}",
        *packages,
        f"xsp {__version__}",
        f"seed {options.seed}",
        f"load before {options.load:.1f}",
        *(["memory kept"] if options.keep_memory else []),
        time.strftime("%Y-%m-%d", time.gmtime()),
    ]
    return " · ".join(parts)


def stored(path: Path) -> Any:
    """Return the JSON in a file; None if there is no file, or if an interrupted run has left a part of it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def stored_rows(path: Path | None) -> dict[str, Any]:
    """Return the results that `store_row` stored in a file, by name; of equal names the last one."""
    rows: dict[str, Any] = {}
    if path is not None and path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # the line was cut off when a run was interrupted
                rows.update(json.loads(line))
    return rows


def store_row(path: Path | None, name: str, row: Mapping[str, Any]) -> None:
    """Append a result to a file, if there is one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: row}) + "\n")


@contextlib.contextmanager
def working_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder of `--out`, which is created, or else a temporary one."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def skip(reason: str) -> NoReturn:
    """End a script whose requirements are not met here, with the exit code that `run_all.py` recognises."""
    say(reason)
    raise SystemExit(SKIPPED)


def say(text: str) -> None:
    """Print progress to stderr, since stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


KEEP_MEMORY = {"MALLOC_TOP_PAD_": str(1 << 30), "MALLOC_MMAP_MAX_": "0"}
"""Environment variables with which glibc keeps up to 1 GiB of free memory."""


# --- options ----------------------------------------------------------------------------------------------


def parser(documentation: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have.

    Args:
        documentation: docstring of the script; `--help` shows its first line.
        rounds: default number of rounds; None if it depends on the model.
    """
    argument_parser = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    argument_parser.add_argument(
        "--rounds", type=int, help=f"rounds that count, at least 3 (default: {rounds or 'by model'}, quick: 3)"
    )
    argument_parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order of turns and of weights (default: 0)"
    )
    argument_parser.add_argument(
        "--quick", action="store_true", help="small and short: to see that it works, not for figures"
    )
    argument_parser.add_argument("--save", action="store_true", help="write benchmarks/results/<name>.json as well")
    argument_parser.add_argument(
        "--partial", type=Path, metavar="DIR", help="with --save: where to write what was measured before an interrupt"
    )
    argument_parser.add_argument(
        "--patience", type=float,
        help="seconds a row to spend on waiting for other processes and on measuring again (default: 30, quick: 0)",
    )  # fmt: skip
    argument_parser.add_argument(
        "--keep-memory", action="store_true",
        help="with an allocator that keeps free memory, so that no page faults are in the figures (ADR 107)",
    )  # fmt: skip
    argument_parser.set_defaults(default_rounds=rounds)
    return argument_parser


def parse(argument_parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, and record the load of the machine before the benchmark adds to it."""
    options = argument_parser.parse_args(arguments)
    if options.keep_memory and arguments is None and not KEEP_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEP_MEMORY)  # read by the C library when a process starts
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    default = options.__dict__.pop("default_rounds")
    if options.rounds is None:
        options.rounds = 3 if options.quick else default
    if options.rounds is not None and options.rounds < 3:
        argument_parser.error("--rounds: at least 3, fewer have no interval")
    if options.patience is None:
        options.patience = 0 if options.quick else 30
    options.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return options
