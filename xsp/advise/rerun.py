"""The program of a run, to run it again: from the command line that the run recorded, or as the user types it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from xsp.comparison import commands
from xsp.comparison.commands import ComparedProgram
from xsp.errors import UsageError
from xsp.run import Run
from xsp.scrub import HIDDEN
from xsp.trials import child

MOST_FOLDERS = 2000
MOST_DEPTH = 4
"""Maximum depth, below the working directory, of the folders that are searched for a program's file; at most
`MOST_FOLDERS` are searched."""

SKIPPED_FOLDERS = ("site-packages", "node_modules", "__pycache__")


@dataclass(frozen=True)
class TrialProgram(ComparedProgram):
    """A program that runs with a trial applied, or with none; the trial's report is written beside the output."""

    trial: str = ""

    def command(self, out: Path, levels: str, seed: int) -> list[str]:
        """Return the command that records a run of the program into a directory."""
        arguments = super().command(out, levels, seed)
        position = arguments.index("-c", len(self.python)) + 1
        return [
            *arguments[:position],
            child.CODE,
            child.encode_options(self.trial, report(out)),
            *arguments[position + 1 :],
        ]


def report(out: Path) -> Path:
    """Return the path to which the process of a run writes the report of a trial."""
    return out.parent / "output" / f"{out.name}.json"


def runs_folder(source: Path) -> Path:
    """Return the folder for the runs of trials: inside a run's directory; for a trace file, in `runs/` here."""
    return source / "trials" if source.is_dir() else Path("runs") / f"trials-{source.name.partition('.')[0]}"


def program(run: Run, source: str, command_line: str | None = None) -> ComparedProgram:
    """Return the program of a run.

    Args:
        run: description of the run.
        source: path of the run as the user named it.
        command_line: the command if the user gives it, in the form of `xsp compare --turns`.

    Raises:
        UsageError: the run does not record its program, or the file is not found; the message says what to type.
    """
    if command_line is not None:
        return commands.program(command_line)
    hint = hint_to_name(source)
    if run.is_job or run.ranks:
        raise UsageError(f"{source}: programs of several ranks cannot be tried; {hint}, for one of its ranks")
    words = list(run.typed) or _of_command(run.command)
    if not words:
        raise UsageError(f"{source}: it does not record its program; {hint}")
    if HIDDEN in " ".join(words):
        arguments = " ".join(words[1:])
        raise UsageError(f"{source}: it does not keep the arguments of its program ({arguments}); {hint}")
    try:
        return commands.program(shlex.join(["xsp", words[0], *_with_path(words[1:])]))
    except UsageError as error:
        raise UsageError(f"{error}; {hint}") from None


def hint_to_name(source: str) -> str:
    """Return the hint to name the program of a run, given its path as the user named it."""
    return f"name the program: xsp advise {shlex.quote(source)} --try 3 --program 'python train.py'"


def with_trial(base: ComparedProgram, trial: str) -> TrialProgram:
    """Return a program with a trial applied; an empty name applies none."""
    from xsp.trials.trial import parse

    variables = {
        name: value for change in (parse(trial) if trial else ()) for name, value in change.environment().items()
    }
    typed = f"{base.text} ({trial})" if trial else base.text
    result = TrialProgram(typed, base.python, base.verb, base.args, base.settings, trial)
    return replace(result, settings=(*base.settings, *variables.items()))


def _of_command(command: Sequence[str]) -> list[str]:
    """Return the typed words for a run of another version: for a script, `run` with its name and arguments."""
    words = list(command)
    return ["run", *words] if words and words[0].endswith(".py") else []


def _with_path(words: list[str]) -> list[str]:
    """Return the words with the name of the program's file, which a run records, replaced by its path."""
    index = next((position for position, word in enumerate(words) if ".py" in word and word[:1] != "-"), None)
    if index is None or words[max(0, index - 1)] in ("-m", "--step"):
        return words
    file, colon, function = words[index].partition(":")
    return [*words[:index], f"{_locate(file)}{colon}{function}", *words[index + 1 :]]


def _locate(name: str) -> str:
    """Return the path of a file of that name, in or below the working directory.

    Raises:
        UsageError: there is no such file, or more than one.
    """
    if Path(name).is_file():
        return name
    paths: list[str] = []
    for folder, subfolders, files in islice(os.walk("."), MOST_FOLDERS):
        is_too_deep = folder.count(os.sep) >= MOST_DEPTH
        subfolders[:] = (
            [] if is_too_deep else [inner for inner in subfolders if inner[:1] != "." and inner not in SKIPPED_FOLDERS]
        )
        paths += [os.path.relpath(os.path.join(folder, name))] if name in files else []
    if len(paths) != 1:
        location = f"{len(paths)} of them: {', '.join(sorted(paths)[:3])}" if paths else "not found"
        raise UsageError(f"{name}: {location} in and below {os.path.basename(os.getcwd()) or os.sep}")
    return paths[0]
