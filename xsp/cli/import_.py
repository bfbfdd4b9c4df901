"""Write what others give back into a run directory: OTLP files, Jaeger's traces by URL or as downloaded.

A span that is in two of the files counts once. What was read, skipped and why stands under `imported` in run.json
and is printed. Several runs in one file become several directories under the one that is named.

examples:
  xsp import traces.jsonl -o runs/back
  xsp import rank0.pb rank1.pb -o runs/job
  xsp import http://localhost:16686/trace/0af7651916cd43dd8448eb211c80319c -o runs/back
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SUMMARY = "write a run directory from OTLP files or from Jaeger"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sources", nargs="+", metavar="FILE", help="file, or URL of a trace in Jaeger")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="run directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is there")


def run(given: argparse.Namespace) -> int:
    """Import beside the place, move it there whole, say what was lost."""
    from xsp.intake import importing

    written = importing.import_whole(given.out, given.sources, overwrite=given.overwrite)
    for place, content in written.items():
        _say(place, content)
    return 0


def _say(place: Path, run: dict[str, Any]) -> None:
    imported = run["imported"]
    read = sum(source["spans"] for source in imported["sources"])
    print(f"{place}: {read} spans read")
    for note in run["notes"]:
        if note["source"] == "import":
            print(f"  {note['text']}", file=sys.stderr)
