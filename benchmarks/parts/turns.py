"""The method that all benchmarks share: conditions take turns in one process and are compared round by round.

What is compared is measured in the same rounds. A round holds every condition once, in a random order from a
seed, so that drift of the machine hits all of them alike, and figures come from pairs: the ratio (or the
difference) of two conditions of one round. The figure is the median over the rounds, its interval the 95 %
percentile bootstrap of that median, resampling whole rounds.

A step that other processes disturbed is measured again, see `quiet.py`.

Before each measured step one runs bare and unmeasured. What a tool does after a step (storing, decoding)
empties the caches, and the step after it is 1 to 5 % slower; without the bare step between, every condition
would pay for the one before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn, TypeVar

from parts import page
from parts.quiet import Patience, Watch
from xsp import summary
from xsp.device import machine as device
from xsp.version import __version__

RESAMPLES = 1000
Row = TypeVar("Row")
Round = Mapping[str, int]
"""Nanoseconds by condition."""


# --- taking turns -----------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


SKIPPED = 77
"""Exit code of a script that needs what is not here."""


@dataclass(frozen=True)
class Condition:
    """One way to run the step, and what is switched around it."""

    name: str
    step: Callable[[], object]
    start: Callable[[], object] = _nothing
    """Before the first reading of the clock."""

    last: Callable[[], object] = _nothing
    """After the step and before the second reading."""

    stop: Callable[[], object] = _nothing
    """After the second reading."""

    def measure(self) -> tuple[int, bool]:
        """Run the step once; return the nanoseconds between the two readings, and whether others disturbed it."""
        self.start()
        watch = Watch()
        begin = perf_counter_ns()
        self.step()
        self.last()
        end = perf_counter_ns()
        disturbed = watch.disturbed
        self.stop()
        return end - begin, disturbed


@dataclass(frozen=True)
class Group:
    """Conditions that need the same thing installed; it is installed and removed once a round."""

    conditions: Sequence[Condition]
    installed: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass
class Turns:
    """Takes the turns of one table: the order's seed, and the patience with others on the machine."""

    seed: int = 0
    patience: float = 0.0
    """Seconds for each row of the table."""

    again: int = 0
    disturbed: int = 0
    """Measurements that count although others took part of the machine: there was no time for more."""

    counted: int = 0

    def take(self, groups: Sequence[Group], rounds: int, settle: Callable[[], object] = _nothing) -> list[Round]:
        """Measure each condition once a round, after two rounds that do not count.

        Args:
            groups: drawn in random order each round, and so are the conditions of each.
            rounds: how many count.
            settle: what runs unmeasured before each measured step, twice where something was just installed.
        """
        draw = random.Random(self.seed)
        for _ in range(2):
            replace(self)._round(groups, settle, draw, Patience(0))
        patience = Patience(self.patience)
        return [self._round(groups, settle, draw, patience) for _ in range(rounds)]

    def _round(
        self, groups: Sequence[Group], settle: Callable[[], object], draw: random.Random, patience: Patience
    ) -> Round:
        taken: dict[str, int] = {}
        for group in draw.sample(groups, k=len(groups)):
            with group.installed():
                settle()
                for condition in draw.sample(group.conditions, k=len(group.conditions)):
                    taken[condition.name] = self._undisturbed(condition, settle, patience)
        return taken

    def _undisturbed(self, condition: Condition, settle: Callable[[], object], patience: Patience) -> int:
        """Measure until nobody disturbs, or patience ends; the last measurement counts."""
        while True:
            begin = time.perf_counter()
            settle()
            taken, disturbed = condition.measure()
            if not disturbed or patience.left <= 0:
                self.counted += 1
                self.disturbed += disturbed
                return taken
            self.again += 1
            patience.spend(time.perf_counter() - begin)
            patience.wait()

    def note(self) -> str:
        """Say what others did to the figures."""
        return (
            f"Measurements taken again because other processes disturbed them: {self.again}; "
            f"that count although disturbed: {self.disturbed} of {self.counted}."
        )


def time_of(step: Callable[[], object], times: int = 3) -> float:
    """Return the median seconds of a step, after one that warms up."""
    step()
    return summary.percentile([Condition("", step).measure()[0] for _ in range(times)], 0.5) / 1e9


# --- figures ----------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    lo: float
    hi: float

    def shown(self, digits: int = 2, factor: float = 1.0, offset: float = 0.0) -> str:
        """Return `value [lo, hi]`, each times `factor` after `offset` was added; a dash if there is no figure."""
        if not all(map(math.isfinite, self)):
            return "–"
        value, lo, hi = ((each + offset) * factor for each in self)
        return f"{value:.{digits}f} [{lo:.{digits}f}, {hi:.{digits}f}]"


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return summary.percentile(values, 0.5)


def bootstrap(rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float], seed: int = 0) -> Figure:
    """Return a statistic of the rows with the interval that resampling the rows gives."""
    draw = random.Random(seed)
    draws = [statistic(draw.choices(rows, k=len(rows))) for _ in range(RESAMPLES)]
    tail = (1 - summary.CONFIDENCE) / 2
    return Figure(statistic(rows), summary.percentile(draws, tail), summary.percentile(draws, 1 - tail))


def middle(values: Sequence[float]) -> Figure:
    """Return the median and its interval."""
    return bootstrap(values, median)


def ratio(rounds: Sequence[Round], name: str, base: str) -> Figure:
    """Return the median over the rounds of one condition's time over another's."""
    return middle([each[name] / each[base] for each in rounds])


def difference(rounds: Sequence[Round], name: str, base: str) -> Figure:
    """Return the median over the rounds of one condition's time less another's, in nanoseconds."""
    return middle([each[name] - each[base] for each in rounds])


def _without_folders(value: Any) -> Any:
    """Return an option's value with the names of files, and nothing of where they lie."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return os.path.basename(value) if isinstance(value, (str, os.PathLike)) and os.sep in str(value) else value


def turns_of(options: argparse.Namespace) -> Turns:
    """Return what takes the turns that the options ask for."""
    return Turns(options.seed, options.patience)


def verdict(figure: Figure, at_most: float) -> str:
    """Say whether a figure keeps a goal, with `?` where its interval holds the goal itself."""
    sure = figure.hi <= at_most or figure.lo > at_most
    return ("met" if figure.value <= at_most else "missed") + ("" if sure else "?")


# --- the report -------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What one script found: a table, what it means, and the values behind it."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Sequence[str], **data: Any) -> None:
        """Add a row, and under its first cell the values behind it."""
        self.rows.append(row)
        self.data[row[0]] = data

    def finish(self, options: argparse.Namespace) -> None:
        """Print the table, and write it to `benchmarks/results` if that was asked for."""
        print("\n".join([self.title, "", *table(self.columns, self.rows), "", *self.notes, machine_line(options)]))
        if options.save:
            self._save(options)

    def _save(self, options: argparse.Namespace) -> None:
        page.RESULTS.mkdir(exist_ok=True)
        content = {
            "benchmark": self.name,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "xsp": __version__,
            "options": {
                name: _without_folders(each) for name, each in vars(options).items() if name not in ("save", "load")
            },
            "load": options.load,
            "machine": device.describe(),
            "table": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": self.notes,
            "data": self.data,
        }
        text = json.dumps(content, ensure_ascii=False, default=str)
        (page.RESULTS / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        page.update()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table that is also aligned for eyes: the first column left, others right."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    rule = ["-" * width if place == 0 else "-" * (width - 1) + ":" for place, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    return [line(columns), line(rule), *map(line, rows)]


def machine_line(options: argparse.Namespace) -> str:
    """Return the machine, the versions, the seed and the day, in one line."""
    found = device.describe()
    packages = [f"{name} {version}" for name, version in found["packages"].items() if name in sys.modules]
    threads = [f"{found['torch_threads']} torch threads"] if "torch_threads" in found else []
    parts = [
        f"{found['cpu']}, {found['cores']} cores",
        *threads,
        f"{found['system']} {found['kernel']}",
        f"Python {found['python']}",
        *packages,
        f"xsp {__version__}",
        f"seed {options.seed}",
        f"load before {options.load:.1f}",
        *(["memory kept"] if options.keep_memory else []),
        time.strftime("%Y-%m-%d", time.gmtime()),
    ]
    return " · ".join(parts)


def skip(reason: str) -> NoReturn:
    """End a script that needs what is not here, with the exit code by which `run_all.py` knows that."""
    say(reason)
    raise SystemExit(SKIPPED)


def say(text: str) -> None:
    """Show progress, where somebody reads it and the table does not go."""
    print(text, file=sys.stderr, flush=True)


KEEPING = {"MALLOC_TOP_PAD_": str(1 << 30), "MALLOC_MMAP_MAX_": "0"}
"""Variables with which glibc keeps up to 1 GiB of free memory."""


# --- options ----------------------------------------------------------------------------------------------


def parser(documentation: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return the options that all scripts have.

    Args:
        documentation: of the script; its first line is shown.
        rounds: how many there are unless told otherwise; None if that depends on the model.
    """
    made = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    made.add_argument(
        "--rounds", type=int, help=f"rounds that count, at least 3 (default: {rounds or 'by model'}, quick: 3)"
    )
    made.add_argument("--seed", type=int, default=0, help="of the order of turns and of weights (default: 0)")
    made.add_argument("--quick", action="store_true", help="small and short: to see that it works, not for figures")
    made.add_argument("--save", action="store_true", help="write benchmarks/results/<name>.json as well")
    made.add_argument(
        "--patience", type=float,
        help="seconds a row to spend on waiting for other processes and on measuring again (default: 30, quick: 0)",
    )  # fmt: skip
    made.add_argument(
        "--keep-memory", action="store_true",
        help="with an allocator that keeps free memory, so that no page faults are in the figures (ADR 107)",
    )  # fmt: skip
    made.set_defaults(default_rounds=rounds)
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, and note how busy the machine is before the benchmark makes it so."""
    options = made.parse_args(arguments)
    if options.keep_memory and arguments is None and not KEEPING.items() <= os.environ.items():
        os.environ.update(KEEPING)  # read by the C library when a process starts
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    default = options.__dict__.pop("default_rounds")
    if options.rounds is None:
        options.rounds = 3 if options.quick else default
    if options.rounds is not None and options.rounds < 3:
        made.error("--rounds: at least 3, fewer have no interval")
    if options.patience is None:
        options.patience = 0 if options.quick else 30
    options.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return options
