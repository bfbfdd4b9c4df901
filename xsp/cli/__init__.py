"""The `xsp` command: one file a command, no logic of its own.

A command is a module with `SUMMARY`, a docstring that is its help, `arguments(parser)` and `run(options)`.
Only here do errors become exit codes: 2 for what xsp cannot do, with one line that says why and what to do.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from importlib import import_module

from xsp.errors import XspError
from xsp.version import __version__

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

EXAMPLES = """examples:
  xsp profile torchvision:resnet50 --out runs/resnet50     profile a model by name
  xsp run train.py --epochs 1                              profile a script as it is
  xsp watch runs/train                                     figures while a run goes on
  xsp sweep torchvision:resnet50 --batch 1,2,4,8           find the optimal batch size
  xsp analyze runs/resnet50 A2 A6                          print tables
  xsp compare runs/before runs/after                       what became slower, and how surely
  xsp report runs/resnet50                                 write the page with timeline and charts
  xsp export runs/resnet50 --to http://localhost:4318      send it to Jaeger or to a Collector
  xsp import traces.jsonl -o runs/back                     read what a Collector or Jaeger gives back
  xsp counters runs/train report.csv                       join a report of Nsight Compute
  xsp serve                                                receive spans without a Collector
  xsp doctor                                               what can be seen on this machine
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    typed = sys.argv[1:] if argv is None else argv
    if not typed:
        parser.print_help()
        return 2
    options = parser.parse_args(typed)
    try:
        return int(options.command.run(options))
    except XspError as error:
        from xsp.report.fitting import plain

        # what it quotes of a trace or of a file's name is somebody else's text
        print("xsp: error: " + "\n".join(map(plain, str(error).split("\n"))), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xsp",
        description="Profile deep learning across the stack, and know what the profiling costs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xsp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = import_module(f"xsp.cli.{name}_" if keyword.iskeyword(name) else f"xsp.cli.{name}")
        entry = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(entry)
        entry.set_defaults(command=command)
    return parser
