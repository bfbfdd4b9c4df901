"""Read all weights on devices, and compare them with the read-only memory of the store.

Nothing stops a process from writing weights on a device. At each attachment a sample of blocks is compared; this
command compares all blocks, which takes the time of reading them. Weights that differ are not shared any more:
processes that attach later get another copy, and the attached processes are listed. Memory of the host cannot be
written, so without a device there is nothing to compare.

`xsp share status` reads no weights: it shows what the store holds, and differences that were found before.

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
from typing import Any

from xsp import texts
from xsp.cli import options, progress, share

SUMMARY = "compare weights on devices with the store's; exit code 1 if any differ"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_format_option(parser)
    share.add_dir_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the weights, and return the exit code."""
    from xsp.share import client, devices

    served = devices.status(args.dir)
    if not served:
        client.status(args.dir)  # raises if there is no store
    results = devices.check(args.dir) if served else []
    different_count = sum(result["corrupted"] is not None for result in results)
    failed_count = sum(result["error"] is not None for result in results)
    if args.format == "json":
        progress.write(json.dumps(results, indent=1) + "\n")
    elif not served:
        progress.echo("the store serves no device, and memory of the host cannot be written: nothing to compare")
    elif not results:
        progress.echo("nothing is on a device: nothing to compare")
    else:
        progress.echo("compared, block by block, with the memory of the store:")
        for result in results:
            progress.echo(_line(result))
        counts = [f"{len(results) - different_count - failed_count} of {len(results)} equal"]
        counts += [f"{different_count} differ"] * (different_count > 0) + [f"{failed_count} not compared"] * (
            failed_count > 0
        )
        progress.echo(", ".join(counts))
    return 1 if different_count or failed_count else 0


def _line(result: dict[str, Any]) -> str:
    """Return the line for the comparison of one object."""
    from xsp.device import devices

    pids = ", ".join(map(str, result["attached"])) or "nobody"
    verdict = "equal"
    if result["error"]:
        verdict = f"not compared: {result['error']}"
    elif result["corrupted"]:
        verdict = f"DIFFERS from the host at {result['corrupted']}; end the processes that are attached"
    label = devices.sharing_device(result["device"]["ordinal"]).id
    return (
        f"  {label}  {result['key'][:16]}  {texts.size_text(result['nbytes']):>10}  "
        f"attached: {pids}  {result['source']}: {verdict}"
    )
