"""The program to run, parsed from the words after `xsp run`.

```
train.py ARGS                   a script; also a directory or a zip file with a __main__.py, and a script without .py
-m package.module ARGS          a module, as `python -m` runs it
python [OPTIONS] train.py ARGS  either of them, by an interpreter and with its options
pytest ARGS                     a command of this environment that is a Python script
torchrun, accelerate launch, deepspeed    see `xsp.launch.ranks`
```

A command that is no Python program, or that starts one itself, is refused with the command to type instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from xsp.errors import UsageError
from xsp.record.terminal import say

_PYTHON = re.compile(r"(?:python|pypy)(\d+(?:\.\d+)?t?)?")
_VALUED = "WX"
_BARE = "bBdEIOPqRsSuv"
"""Python's one-letter options: those that take a value, and those that take none and still run a program."""

_STDIN = "xsp does not read a program from standard input; write it to a file: xsp run FILE.py"

_LONG = "--check-hash-based-pycs"
_ASK = "import sys, importlib.util; print(sys.prefix); print(importlib.util.find_spec('xsp') is not None)"

_STARTERS = frozenset(
    "bash conda env hatch ipython jupyter mamba micromamba mpiexec mpirun nice nohup numactl pdm pipenv pixi poetry "
    "ray rye sh srun stdbuf taskset time uv uvx zsh".split()
)
"""Commands that start the program as a separate process."""


@dataclass(frozen=True)
class Program:
    """A Python program with its arguments."""

    target: str
    """Path of a script, a directory or a zip file; or the name of a module."""

    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """The words to type after `xsp run` and its options."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    @property
    def name(self) -> str:
        """The name of its run."""
        name = self.target.removesuffix(".__main__") if self.is_module else Path(os.path.abspath(self.target)).stem
        return name.encode("utf-8", "replace").decode().replace("?", "-")  # undecodable bytes become dashes


@dataclass(frozen=True)
class OtherInterpreter:
    """A program that needs another interpreter, or other options of the interpreter, than this process has."""

    interpreter: str
    options: tuple[str, ...]
    program: Program

    def go_on(self, xsp: Sequence[str]) -> NoReturn:
        """Replace this process by that interpreter, with xsp's own options as they were typed."""
        words = [self.interpreter, *self.options, "-m", "xsp.cli", "run", *xsp, *self.program.words]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.execv(self.interpreter, words)


def read(words: Sequence[str], is_module: bool = False) -> Program | OtherInterpreter:
    """Parse a program from words that do not begin with a launcher.

    Args:
        words: the words, at least one.
        is_module: whether the first word names a module.

    Raises:
        UsageError: the words name no Python program; the message gives the command to type.
    """
    first, rest = words[0], tuple(words[1:])
    if first == "-":
        raise UsageError(f"-: {_STDIN}")
    if is_module:
        return Program(_module(first), rest, is_module=True)
    if _PYTHON.fullmatch(Path(first).name) and not Path(first).is_dir():
        return _interpreted(first, rest)
    if _exists(first):
        _refuse_what_is_no_python(Path(first))
        return Program(first, rest)
    if Path(first).name in _STARTERS:
        raise UsageError(f"{first} starts another program; type `{_behind(words)}`")
    if re.match(r"\w+=", first):
        raise UsageError(f"{first}: put variables before xsp: `{first} xsp run {shlex.join(rest)}`")
    executable = shutil.which(first) if os.sep not in first else None
    if executable is None:
        raise UsageError(
            f"{first}: cannot be read (no such file or directory){_as_module(first)}; give the path of a Python file"
        )
    return _command(first, Path(executable), rest)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give the path of a Python file") from error


def _module(name: str) -> str:
    if name.endswith(".py") and Path(name).is_file():
        raise UsageError(
            f"-m {name}: this is a file; type `xsp run {shlex.quote(name)}`, or -m with the name of a module"
        )
    return name


def _as_module(name: str) -> str:
    """Return a hint if a name is that of a module in this directory, else an empty text."""
    path = Path(*name.split("."))
    is_module = os.sep not in name and (path.with_name(f"{path.name}.py").is_file() or path.is_dir())
    return f"; for a module type `xsp run -m {name}`" if is_module else ""


def _behind(words: Sequence[str]) -> str:
    """Return a command with `xsp run` inserted before its Python program."""
    for index, word in enumerate(words[1:], 1):
        if (
            _PYTHON.fullmatch(Path(word).name)
            or word.endswith(".py")
            or word in ("torchrun", "accelerate", "deepspeed")
        ):
            return shlex.join([*words[:index], "xsp", "run", *words[index:]])
    return f"{words[0]} … xsp run train.py"


# --- files ------------------------------------------------------------------------------------------------


def _refuse_what_is_no_python(path: Path) -> None:
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path}: a notebook; put `with xsp.profile(…)` into a cell, or convert it to a script with "
            f"`jupyter nbconvert --to script {shlex.quote(str(path))}`"
        )
    interpreter = _shebang(path)
    if (interpreter is not None and "python" not in interpreter) or path.suffix == ".sh":
        raise UsageError(f"{path}: for {interpreter or 'a shell'}, not Python; put `xsp run` before the Python command")


def _command(name: str, path: Path, rest: tuple[str, ...]) -> Program:
    """Return the program behind a command of this environment."""
    interpreter = _shebang(path)
    if interpreter is None or "python" not in interpreter:
        raise UsageError(
            f"{path} is not a Python program; if it starts one, put `xsp run` before that: `{name} … xsp run train.py`"
        )
    if not os.path.isabs(interpreter) or _asked(interpreter)[0] != os.path.realpath(sys.prefix):
        raise UsageError(f"{path} runs in {interpreter}, and xsp in {sys.executable}; install xsp there as well")
    return Program(str(path), rest)


_EXEC = "'''exec'"


def _shebang(path: Path) -> str | None:
    """Return the interpreter that a file's first lines name; None if they name none."""
    if not path.is_file():  # a pipe can be read only once
        return None
    try:
        with open(path, "rb") as file:
            first, second = (file.readline(512).decode("utf-8", "replace") for _ in range(2))
    except OSError:
        return None
    if not first.startswith("#!"):
        return None
    if second.startswith(_EXEC):  # installers use this form for long paths and paths with blanks
        with contextlib.suppress(ValueError, IndexError):
            return shlex.split(second.removeprefix(_EXEC))[0]
    words = [word for word in first.removeprefix("#!").split() if not word.startswith("-")]
    return next(iter(words[1:] if words and Path(words[0]).name == "env" else words), None)


# --- interpreters -----------------------------------------------------------------------------------------


def _interpreted(name: str, rest: tuple[str, ...]) -> Program | OtherInterpreter:
    """Parse an interpreter's own options and the program after them."""
    options, program = _split(name, rest)
    interpreter = _interpreter(name, program)
    if interpreter == sys.executable and not options:
        return program
    return OtherInterpreter(interpreter, options, program)


def _split(name: str, rest: tuple[str, ...]) -> tuple[tuple[str, ...], Program]:
    options: list[str] = []
    words = list(rest)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word == _LONG and words:
            options += [word, words.pop(0)]
            continue
        for flag, value in _letters(word):
            if flag == "m" and (value or words):
                return tuple(options), Program(_module(value or words.pop(0)), tuple(words), is_module=True)
            if flag in _VALUED and (value or words):
                options.append(f"-{flag}{value or words.pop(0)}")
            elif flag in _BARE:
                options.append(f"-{flag}")
            elif not word.startswith(_LONG):
                raise UsageError(
                    f"{name} {word}: this names no program to profile; write the code to a file, and run that"
                )
        if word.startswith(f"{_LONG}="):
            options.append(word)
    if not words or words[0] == "-":
        raise UsageError(f"{name}: name the program, `xsp run {name} train.py`; {_STDIN}")
    program = read(words)
    if not isinstance(program, Program):
        raise UsageError(f"{name}: another interpreter, {words[0]}, follows; name one of them, then the program")
    return tuple(options), program


def _letters(word: str) -> Iterator[tuple[str, str]]:
    """Split `-uOm` into its letters; a letter that takes a value comes with the rest of the word."""
    if word.startswith("--"):
        yield word, ""
        return
    for index, letter in enumerate(word[1:], 2):
        takes_value = letter in _VALUED + "m"
        yield letter, word[index:] if takes_value else ""
        if takes_value:
            return


def _interpreter(name: str, program: Program) -> str:
    """Return the path of an interpreter in which xsp can run, or of this one if the name means it.

    Raises:
        UsageError: there is no interpreter of that name, or xsp is not installed in it.
    """
    path = shutil.which(name)
    if path is None:
        if os.sep in name:
            raise UsageError(f"{name}: there is no such interpreter")
        prefix, has_xsp = "", False
    else:
        prefix, has_xsp = _asked(path)
    if prefix == os.path.realpath(sys.prefix):
        return sys.executable
    if has_xsp:
        return os.path.abspath(str(path))
    version = _PYTHON.fullmatch(Path(name).name)[1]  # type: ignore[index]
    versions = (None, str(sys.version_info[0]), f"{sys.version_info[0]}.{sys.version_info[1]}")
    if os.sep in name or version not in versions:
        suggestion = shlex.join(["xsp", "run", *program.words])
        raise UsageError(f"{name} has no xsp; install it there, or type `{suggestion}`, which runs in {sys.executable}")
    if path is not None:
        say(f"{path} has no xsp: the program runs in {sys.executable}")
    return sys.executable


def _asked(interpreter: str) -> tuple[str, bool]:
    """Return the prefix of an interpreter's environment, and whether xsp is there; empty and False if it fails."""
    if os.path.abspath(interpreter) == os.path.abspath(sys.executable):
        return os.path.realpath(sys.prefix), True
    try:
        completed = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        prefix, has_xsp = completed.stdout.splitlines()[-2:]
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", False
    return os.path.realpath(prefix), has_xsp == "True"
