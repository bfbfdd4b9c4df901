"""Show the contents of the store, and the attached processes.

examples:
  xsp share status
  xsp share status --format json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import progress, share

SUMMARY = "show the contents of the store, and attached processes"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")
    share.placed(parser)


def run(given: argparse.Namespace) -> int:
    """Ask it."""
    from xsp.share import client, shelf

    found = client.status(given.dir)
    if given.format == "json":
        progress.put(json.dumps(found, indent=1) + "\n")
        return 0
    held, capacity = shelf.size_text(found["held_bytes"]), shelf.size_text(found["capacity_bytes"])
    copying = f", {shelf.size_text(found['copying_bytes'])} being copied" if found["copying_bytes"] else ""
    progress.tell(f"process {found['pid']}: {held} of {capacity}{copying}; {found['evictions']} evicted so far")
    for each in found["objects"]:
        pids = ", ".join(map(str, each["attached"])) or "nobody"
        progress.tell(
            f"  {each['key'][:16]}  {shelf.size_text(each['nbytes']):>10}  {each['tensors']:>5} tensors  "
            f"{each['hits']:>5} hits  attached: {pids}  {each['source']}"
        )
    if not found["objects"]:
        progress.tell("  nothing yet; xsp share put FILE, or attach to one")
    return 0
