"""Parsing of the programs that a comparison runs in turns under xsp: a command, or a model by name."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from xsp.errors import UsageError

_SETTING = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_MODEL = re.compile(r"(torchvision|timm|transformers|micro):\S+|[^:]+\.py:[A-Za-z_]\w*")
_WITH_VALUE = ("-W", "-X")
_START_CODE = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; from xsp.cli import main; sys.exit(main())"
)
"""Code that starts xsp without the working directory in `sys.path`, as the `xsp` command starts."""


@dataclass(frozen=True)
class ComparedProgram:
    """One side of a comparison: the program and how to start it under xsp."""

    text: str
    python: tuple[str, ...]
    """The interpreter, with its own options."""
    verb: str
    """`run` or `profile`."""
    args: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables given before the command."""

    @property
    def name(self) -> str:
        """The name of its runs: that of the script or the model."""
        scripts = [Path(word).stem for word in self.args if word.endswith(".py")]
        target = self.args[0].partition(":")[2] if self.verb == "profile" else self.args[-1]
        return re.sub(r"\W+", "-", scripts[0] if scripts else target).strip("-") or "program"

    def command(self, out: Path, levels: str, seed: int) -> list[str]:
        """Return the command that records a run of the program into a directory."""
        options = ["--quiet", "--no-samples", "--overwrite", "--out", str(out), "--levels", levels]
        options += ["--seed", str(seed)] if self.verb == "run" else []
        return [*self.python, "-c", _START_CODE, self.verb, *options, *self.args]


def program(text: str) -> ComparedProgram:
    """Parse a command such as `python train.py --epochs 1`, or a model such as `torchvision:resnet18 --batch 8`.

    Settings NAME=VALUE before the command are added to its environment. An interpreter that is given with its path runs
    the command; otherwise the current interpreter does. The command may also begin with `xsp run` or `xsp profile` and
    their options, which are not checked here: `xsp.cli.options` knows them.

    Raises:
        UsageError: the text is not a command that can run under xsp.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from None
    settings = []
    while words and _SETTING.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        settings.append((name, value))
    if not words:
        raise UsageError(f"{text!r}: no command; write 'python train.py', or a model such as torchvision:resnet18")
    python, verb, args = _split(words, text)
    if not args or (args[0] == "-m" and len(args) < 2):
        raise UsageError(f"{text!r}: names no script; write 'python train.py'")
    return ComparedProgram(text, python, verb, tuple(args), tuple(settings))


def _split(words: list[str], text: str) -> tuple[tuple[str, ...], str, list[str]]:
    """Return the interpreter, the verb and the arguments of the verb."""
    current = (sys.executable,)
    if words[0] == "xsp" and words[1:2] in (["run"], ["profile"]):
        return current, words[1], words[2:]
    if _MODEL.fullmatch(words[0]):
        return current, "profile", words
    if _PYTHON.fullmatch(Path(words[0]).name):
        python, arguments = _interpreter(words, text)
        return python, "run", arguments
    return current, "run", words


def _interpreter(words: list[str], text: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the interpreter with its options, and the program that it runs."""
    interpreter = words[0]
    python = [str(Path(interpreter).expanduser().absolute()) if "/" in interpreter else sys.executable]
    remaining = words[1:]
    while remaining and remaining[0].startswith("-") and remaining[0] != "-m":
        if remaining[0] in ("-c", "-"):
            raise UsageError(f"{text!r}: put the program into a file; code after -c cannot be run in turns")
        count = 2 if remaining[0] in _WITH_VALUE else 1
        python += remaining[:count]
        remaining = remaining[count:]
    return tuple(python), remaining
