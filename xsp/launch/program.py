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
_VALUE_OPTIONS = "WX"
_FLAG_OPTIONS = "bBdEIOPqRsSuv"
"""Python's one-letter options: those that take a value, and those that take none and still run a program."""

_STDIN = "xsp does not read a program from standard input; write it to a file: xsp run FILE.py"

_LONG_OPTION = "--check-hash-based-pycs"
_PROBE_CODE = "import sys, importlib.util; print(sys.prefix); print(importlib.util.find_spec('xsp') is not None)"

_STARTERS = frozenset(
    "bash conda env hatch ipython jupyter mamba micromamba mpiexec mpirun nice nohup numactl pdm pipenv pixi poetry "
    "ray rye sh srun stdbuf taskset time uv uvx zsh".split()
)
"""Commands that start the program as a separate process."""


@dataclass(frozen=True)
class LaunchedProgram:
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
    program: LaunchedProgram

    def replace_process(self, options: Sequence[str]) -> NoReturn:
        """Replace this process by that interpreter; `options` has the typed options of `xsp run`."""
        words = [self.interpreter, *self.options, "-m", "xsp.cli", "run", *options, *self.program.words]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.execv(self.interpreter, words)


def parse_program(words: Sequence[str], is_module: bool = False) -> LaunchedProgram | OtherInterpreter:
    """Parse a program from words that do not begin with a launcher.

    Args:
        words: the words, at least one.
        is_module: whether the first word names a module.

    Raises:
        UsageError: the words name no Python program; the message gives the command to type.
    """
    target, arguments = words[0], tuple(words[1:])
    if target == "-":
        raise UsageError(f"-: {_STDIN}")
    if is_module:
        return LaunchedProgram(_check_module(target), arguments, is_module=True)
    if _PYTHON.fullmatch(Path(target).name) and not Path(target).is_dir():
        # parse an interpreter's own options and the program after them
        options, program = _split(target, arguments)
        interpreter = _interpreter(target, program)
        if interpreter == sys.executable and not options:
            return program
        return OtherInterpreter(interpreter, options, program)
    if _exists(target):
        _check_is_python(Path(target))
        return LaunchedProgram(target, arguments)
    if Path(target).name in _STARTERS:
        raise UsageError(f"{target} starts another program; type `{_insert_xsp(words)}`")
    if re.match(r"\w+=", target):
        raise UsageError(f"{target}: put variables before xsp: `{target} xsp run {shlex.join(arguments)}`")
    executable = shutil.which(target) if os.sep not in target else None
    if executable is None:
        raise UsageError(
            f"{target}: cannot be read (no such file or directory){_module_hint(target)}; "
            "give the path of a Python file"
        )
    return _from_command(target, Path(executable), arguments)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give the path of a Python file") from error


def _check_module(name: str) -> str:
    if name.endswith(".py") and Path(name).is_file():
        raise UsageError(
            f"-m {name}: this is a file; type `xsp run {shlex.quote(name)}`, or -m with the name of a module"
        )
    return name


def _module_hint(name: str) -> str:
    """Return a hint if a name is that of a module in this directory, else an empty text."""
    path = Path(*name.split("."))
    is_module = os.sep not in name and (path.with_name(f"{path.name}.py").is_file() or path.is_dir())
    return f"; for a module type `xsp run -m {name}`" if is_module else ""


def _insert_xsp(words: Sequence[str]) -> str:
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


def _check_is_python(path: Path) -> None:
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path}: a notebook; put `with xsp.profile(…)` into a cell, or convert it to a script with "
            f"`jupyter nbconvert --to script {shlex.quote(str(path))}`"
        )
    interpreter = _shebang(path)
    if (interpreter is not None and "python" not in interpreter) or path.suffix == ".sh":
        raise UsageError(f"{path}: for {interpreter or 'a shell'}, not Python; put `xsp run` before the Python command")


def _from_command(name: str, path: Path, arguments: tuple[str, ...]) -> LaunchedProgram:
    """Return the program behind a command of this environment."""
    interpreter = _shebang(path)
    if interpreter is None or "python" not in interpreter:
        raise UsageError(
            f"{path} is not a Python program; if it starts one, put `xsp run` before that: `{name} … xsp run train.py`"
        )
    if not os.path.isabs(interpreter) or _probe(interpreter)[0] != os.path.realpath(sys.prefix):
        raise UsageError(f"{path} runs in {interpreter}, and xsp in {sys.executable}; install xsp there as well")
    return LaunchedProgram(str(path), arguments)


_EXEC = "'''exec'"


def _shebang(path: Path) -> str | None:
    """Return the interpreter that a file's first lines name; None if they name none."""
    if not path.is_file():  # a pipe can be read only once
        return None
    try:
        with open(path, "rb") as file:
            first_line, second_line = (file.readline(512).decode("utf-8", "replace") for _ in range(2))
    except OSError:
        return None
    if not first_line.startswith("#!"):
        return None
    if second_line.startswith(_EXEC):  # installers use this form for long paths and paths with blanks
        with contextlib.suppress(ValueError, IndexError):
            return shlex.split(second_line.removeprefix(_EXEC))[0]
    words = [word for word in first_line.removeprefix("#!").split() if not word.startswith("-")]
    return next(iter(words[1:] if words and Path(words[0]).name == "env" else words), None)


# --- interpreters -----------------------------------------------------------------------------------------


def _split(name: str, arguments: tuple[str, ...]) -> tuple[tuple[str, ...], LaunchedProgram]:
    options: list[str] = []
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word == _LONG_OPTION and words:
            options += [word, words.pop(0)]
            continue
        for flag, value in _letters(word):
            if flag == "m" and (value or words):
                return tuple(options), LaunchedProgram(
                    _check_module(value or words.pop(0)), tuple(words), is_module=True
                )
            if flag in _VALUE_OPTIONS and (value or words):
                options.append(f"-{flag}{value or words.pop(0)}")
            elif flag in _FLAG_OPTIONS:
                options.append(f"-{flag}")
            elif not word.startswith(_LONG_OPTION):
                raise UsageError(
                    f"{name} {word}: this names no program to profile; write the code to a file, and run that"
                )
        if word.startswith(f"{_LONG_OPTION}="):
            options.append(word)
    if not words or words[0] == "-":
        raise UsageError(f"{name}: name the program, `xsp run {name} train.py`; {_STDIN}")
    program = parse_program(words)
    if not isinstance(program, LaunchedProgram):
        raise UsageError(f"{name}: another interpreter, {words[0]}, follows; name one of them, then the program")
    return tuple(options), program


def _letters(word: str) -> Iterator[tuple[str, str]]:
    """Split `-uOm` into its letters; a letter that takes a value is paired with the remaining letters."""
    if word.startswith("--"):
        yield word, ""
        return
    for index, letter in enumerate(word[1:], 2):
        takes_value = letter in _VALUE_OPTIONS + "m"
        yield letter, word[index:] if takes_value else ""
        if takes_value:
            return


def _interpreter(name: str, program: LaunchedProgram) -> str:
    """Return the path of an interpreter in which xsp can run, or of this one if the name refers to it.

    Raises:
        UsageError: there is no interpreter of that name, or xsp is not installed in it.
    """
    path = shutil.which(name)
    if path is None:
        if os.sep in name:
            raise UsageError(f"{name}: there is no such interpreter")
        prefix, has_xsp = "", False
    else:
        prefix, has_xsp = _probe(path)
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


def _probe(interpreter: str) -> tuple[str, bool]:
    """Return the prefix of an interpreter's environment, and whether xsp is there; empty and False if it fails."""
    if os.path.abspath(interpreter) == os.path.abspath(sys.executable):
        return os.path.realpath(sys.prefix), True
    try:
        completed = subprocess.run(
            [interpreter, "-c", _PROBE_CODE], capture_output=True, text=True, timeout=60, check=True
        )
        prefix, has_xsp = completed.stdout.splitlines()[-2:]
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", False
    return os.path.realpath(prefix), has_xsp == "True"
