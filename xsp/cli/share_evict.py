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


def run(given: argparse.Namespace) -> int:
    """Evict the weights."""
    from xsp.share import client, devices

    if (given.key is None) == (not given.all):
        raise UsageError("give one KEY, or --all")
    key = "*" if given.all else given.key.removeprefix("sha256:")

    def told(text: str) -> None:
        progress.warn(f"xsp share: nothing was evicted at {text}")

    on_devices = devices.evict(key, given.dir, told)  # first: the host keeps weights that are on a device
    result = client.evict(key, given.dir)
    suffix = f", {on_devices} on devices" if on_devices else ""
    progress.tell(f"{result['evicted']} evicted{suffix}, {result['attached']} attached and kept")
    return 0
