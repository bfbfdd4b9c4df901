"""Write one page with the timeline, the charts and the tables of a run. It opens offline.

examples:
  xsp report runs/demo
  xsp report runs/demo -o demo.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xsp.errors import OutputError

SUMMARY = "write a run's page: timeline, charts, tables"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("path", type=Path, metavar="RUN", help="run directory, or Parquet file of spans")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged segments out")


def run(given: argparse.Namespace) -> int:
    """Load the run, write the page, say where it is."""
    from xsp import runs
    from xsp.report import html

    loaded = runs.load(given.path, skip_damaged=given.skip_damaged)
    default = given.path / "report.html" if given.path.is_dir() else given.path.with_suffix(".html")
    try:
        page = html.write(loaded, given.out or default)
    except OSError as error:
        raise OutputError(f"{given.out or default}: cannot be written ({error.strerror})") from error
    print(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0
