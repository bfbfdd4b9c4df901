"""Free weights that no process is attached to.

examples:
  xsp share evict 9f86d081      by the first digits of the key
  xsp share evict --all         all that are not in use
"""

from __future__ import annotations

import argparse

from xsp.cli import progress, share
from xsp.errors import UsageError

SUMMARY = "free weights that no process is attached to"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help="first 8 or more digits of the key; xsp share status lists keys"
    )
    parser.add_argument("--all", action="store_true", help="all weights that no process is attached to")
    share.add_dir_option(parser)


def run(args: argparse.Namespace) -> int:
    """Evict the weights."""
    from xsp.share import client, devices

    if (args.key is None) == (not args.all):
        raise UsageError("give one KEY, or --all")
    key = "*" if args.all else args.key.removeprefix("sha256:")

    def report(text: str) -> None:
        progress.warn(f"xsp share: nothing was evicted at {text}")

    device_count = devices.evict(key, args.dir, report)  # first: the host keeps weights that are on a device
    result = client.evict(key, args.dir)
    suffix = f", {device_count} on devices" if device_count else ""
    progress.echo(f"{result['evicted']} evicted{suffix}, {result['attached']} attached and kept")
    return 0
