"""Read traces of other profilers, OTLP files and Jaeger's traces into a run directory.

It reads traces of PyTorch's profiler (Kineto), Nsight Systems (SQLite), Chrome and Perfetto JSON, OTLP files, Jaeger's
traces by URL or as downloaded, and an execution trace (Chakra) together with its Kineto trace. A folder means the files
in it: the ranks of a job. What was read and what was skipped, with the reason, is printed and recorded under `imported`
in run.json; then the first screen of `xsp analyze`. Names of users, hosts, jobs and paths are not imported.

examples:
  xsp import trace.json.gz -o runs/gpu
  xsp import traces/ -o runs/job                 a file for each rank
  xsp import report.sqlite -o runs/nsys          nsys export --type sqlite
  xsp import et.json kineto.json -o runs/both
  xsp import graphs.json capture.json -o runs/g  operators of replayed graphs
  xsp import broken.json --repair -o runs/back   names with bare quotes
  xsp import http://localhost:16686/trace/TRACE-ID -o runs/back
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from xsp.cli import progress
from xsp.errors import UsageError

SUMMARY = "read traces of other profilers, OTLP files or Jaeger's traces"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sources", nargs="+", metavar="FILE", help="file, folder, or URL of a trace in Jaeger")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="run directory to write")
    parser.add_argument("--keep-names", action="store_true", help="keep names of users, hosts, jobs and paths")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="mend JSON whose names hold quotes or backslashes that are not escaped, in a copy; say how many",
    )


def run(args: argparse.Namespace) -> int:
    """Import the sources completely or not at all, and print what was lost."""
    from xsp import atomic
    from xsp.ingest import sources

    with atomic.temporary_folder() as folder:
        names = _mended(args.sources, Path(folder)) if args.repair else args.sources
        runs = sources.import_atomically(args.out, names, args.overwrite, keep_names=args.keep_names)
    for path, content in runs.items():
        count = sum(source.spans or 0 for source in content.imported.sources) if content.imported is not None else 0
        progress.echo(f"{path}: {count} spans read")
        for note in content.notes:
            if note.source == "import":
                progress.warn(f"  {note.text}")
    if len(runs) == 1:
        _first_screen(next(iter(runs)))
    return 0


def _mended(names: Sequence[str], folder: Path) -> list[str]:
    """Return the sources, with mended copies of the files whose texts were not escaped; print what was changed."""
    from xsp.importers import repair

    mended = []
    for number, name in enumerate(names):
        if not Path(name).is_file():
            raise UsageError(f"{name}: --repair mends files; name them one by one")
        copy = folder / str(number) / Path(name).name.removesuffix(".gz")
        copy.parent.mkdir()
        changed = repair.mend(name, copy)
        progress.warn(
            f"xsp: {name}: {changed} texts were escaped in a copy" if changed else f"xsp: {name}: nothing to mend"
        )
        mended.append(str(copy) if changed else name)
    return mended


def _first_screen(path: Path) -> None:
    from xsp.errors import XspError
    from xsp.ingest import load
    from xsp.report import firstscreen

    try:
        screen = firstscreen.first_screen(load.load(path), str(path))
    except XspError:
        return  # it was imported; what it lacks is said by the commands that read it
    progress.echo("\n" + firstscreen.text(screen, progress.terminal_width()))
