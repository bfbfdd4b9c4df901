"""The `xsp` command: one file per command, without logic.

A command is a module with `SUMMARY`, a docstring that is its help, `arguments(parser)` and `run(options)`. One with
subcommands names them in `PARTS`: classes with the same members.
Only here do errors become exit codes: 2 if xsp cannot do something, with one line that says why and what to do.
"""

from __future__ import annotations

import argparse
import keyword
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import cleandoc
from typing import Any, NoReturn

from xsp import clock, plugins
from xsp.errors import PluginError, UsageError, XspError, nearest

COMMANDS = (
    "run",
    "profile",
    "watch",
    "sweep",
    "analyze",
    "compare",
    "report",
    "export",
    "import",
    "counters",
    "serve",
    "doctor",
)
"""Commands of the profiler; commands that build on it (graphs, third parties) are found through entry points."""

EXAMPLES = """examples:
  xsp profile torchvision:resnet50 --out runs/demo  profile a model by name
  xsp run train.py --epochs 1                       profile a program
  xsp watch runs/train                              figures during a run
  xsp sweep torchvision:resnet50 --batch 1,2,4,8    the optimal batch size
  xsp analyze runs/demo A2 A6                       print tables
  xsp compare runs/before runs/after                what became slower
  xsp report runs/demo                              HTML: timeline, charts
  xsp export runs/demo --to http://localhost:4318   send it to Jaeger
  xsp import trace.json.gz -o runs/gpu              traces of other profilers
  xsp counters runs/train report.csv                add hardware counters
  xsp mcp runs                                      answer MCP clients
  xsp serve                                         receive spans over OTLP
  xsp advise runs/demo                              what to change, best first
  xsp graph torchvision:resnet50                    operators and measures
  xsp bench torchvision:resnet50 --budget 60s       time each distinct call
  xsp bound torchvision:resnet50 --fill 60s         least time, call by call
  xsp predict runs/train --ranks 8 --link nvlink4   a step on several ranks
  xsp share serve                                   one copy of weights
  xsp evaluate run resnet18.yaml                    evaluate a manifest
  xsp doctor                                        what can be recorded here
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that wraps prose to the terminal; paragraphs with indented lines (examples) stay unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in parts)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage; options may come between positional arguments."""

    may_intermix = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.may_intermix or any(
            action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions
        ):
            return super().parse_known_args(args, namespace)
        self.may_intermix = False  # the call below calls this method for the options, and then for the others
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.may_intermix = True

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"xsp: error: {message}; see `{self.prog} --help`\n")


class _Version(argparse.Action):
    """`--version`: the commit is looked up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from xsp.version import with_commit

        print(f"xsp {with_commit()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    began_ns = clock.monotonic_ns()
    typed = sys.argv[1:] if argv is None else argv
    if not typed:
        _parser().print_help()
        return 2
    from xsp.cli import progress

    if typed[0] != "run":  # its streams belong to the program
        progress.replace_unencodable()
    try:
        words = list(typed)
        if typed[0].startswith("-"):
            parser = _parser()
        elif typed[0] in COMMANDS or typed[0] in plugins.names(plugins.COMMANDS):
            if typed[1:2] and typed[1] in _parts(typed[0]):
                words[:2] = [f"{typed[0]} {typed[1]}"]
            parser = _parser(words[0])
        else:
            hint = nearest(typed[0], names()) or "; `xsp --help` lists them"
            raise UsageError(f"there is no command {typed[0]!r}{hint}")
        options, unknown = parser.parse_known_args(words)
        if unknown:
            command = "" if typed[0].startswith("-") else f" {words[0]}"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; see `xsp{command} --help`")
        if "command" not in options:
            raise UsageError("name a command; `xsp --help` lists them")
        options.typed, options.began_ns = list(typed), began_ns
        return int(options.command.run(options))
    except XspError as error:
        from xsp.scrub import plain

        # the message may quote foreign text from a trace or a file name
        print("xsp: error: " + "\n".join(map(plain, str(error).split("\n"))), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if typed[0] == "run" or sys.excepthook is not sys.__excepthook__:  # the program's own, or a hook reports it
            raise
        print("xsp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stderr.close()
        return 0
    except Exception as error:
        if typed[0] in PROGRAM_COMMANDS or not _is_engine_error(error):
            raise
        from xsp.scrub import plain

        reason = plain(next(iter(str(error).splitlines()), ""))
        print(f"xsp: error: the tables contain data that xsp does not write ({reason})", file=sys.stderr)
        return 2


INTERRUPTED = 130
"""Exit code after an interrupt, as in a shell."""

PROGRAM_COMMANDS = ("run", "profile", "sweep")
"""Commands that run a user's program, whose errors are not those of xsp."""


def _is_engine_error(error: Exception) -> bool:
    """Return whether the table engine, if it is loaded, raised an error."""
    engine = sys.modules.get("duckdb")
    return engine is not None and isinstance(error, engine.Error)


def names() -> tuple[str, ...]:
    """Return the names of all commands."""
    return (*COMMANDS, *(name for name in plugins.names(plugins.COMMANDS) if name not in COMMANDS))


def _parts(name: str) -> Mapping[str, Any]:
    """Return the subcommands of a command by name."""
    try:
        return getattr(_command(name), "PARTS", {})
    except PluginError:
        return {}


def _command(name: str) -> Any:
    """Return the module of a command; for `predict fit`, the class of the subcommand.

    Raises:
        PluginError: it comes from an entry point, and cannot be used.
    """
    name, _, part = name.partition(" ")
    if part:
        return _parts(name)[part]
    if name in COMMANDS:
        return import_module(f"xsp.cli.{name}_" if keyword.iskeyword(name) else f"xsp.cli.{name}")
    return plugins.command(name)


def _full_names() -> list[str]:
    """Return the names of all commands and subcommands; this imports the commands."""
    return [full_name for name in names() for full_name in (name, *(f"{name} {part}" for part in _parts(name)))]


def _parser(selected: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of one command, or of all; it lists a third party's unusable command as such.

    Raises:
        PluginError: `selected` is given, and cannot be used.
    """
    parser = _Parser(
        prog="xsp",
        description="Profile PyTorch programs across the stack: where the time of a step goes, how reliable each "
        "figure is, and what to change.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and its commit, and exit")
    commands = parser.add_subparsers(metavar="COMMAND")  # not required, so that an unknown option is reported first
    for name in _full_names() if selected is None else (selected,):
        try:
            command = _command(name)
        except PluginError:
            if selected is not None:
                raise
            commands.add_parser(name, help="cannot be used; `xsp doctor` says why")
            continue
        entry = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=cleandoc(command.__doc__ or ""),
            formatter_class=_Help,
        )
        command.arguments(entry)
        entry.set_defaults(command=command)
    return parser
