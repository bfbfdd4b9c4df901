"""Compare all weights on devices with the memory of the store, which is read-only.

Nothing stops a process from writing weights on a device. At each attachment a sample of blocks is compared; this
command compares all blocks. Weights that differ are not shared any more: processes that attach later get another copy,
and the attached processes are listed. On the host there is nothing to compare.

exit codes:
  0  nothing differs
  1  something differs, or could not be compared

examples:
  xsp share check
  xsp share check --format json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import progress, share

SUMMARY = "compare all weights on devices with the memory of the store"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")
    share.placed(parser)


def run(given: argparse.Namespace) -> int:
    """Have the weights compared, and return the exit code."""
    from xsp.share import client, devices, shelf

    if not devices.status(given.dir):
        client.status(given.dir)  # raises if there is no store
        progress.tell("the store serves no device, and memory of the host cannot be written: nothing to compare")
        return 0
    found = devices.check(given.dir)
    if given.format == "json":
        progress.put(json.dumps(found, indent=1) + "\n")
    else:
        for each in found:
            pids = ", ".join(map(str, each["attached"])) or "nobody"
            said = "equal"
            if each["error"]:
                said = f"not compared: {each['error']}"
            elif each["corrupted"]:
                said = f"DIFFERS from the host at {each['corrupted']}; end the processes that are attached"
            progress.tell(
                f"cuda:{each['device']['ordinal']}  {each['key'][:16]}  {shelf.size_text(each['nbytes']):>10}  "
                f"attached: {pids}  {each['source']}: {said}"
            )
        if not found:
            progress.tell("nothing is on a device")
    return 1 if any(each["corrupted"] or each["error"] for each in found) else 0
