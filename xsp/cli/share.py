"""Keep weights once on this machine: a store in memory, and processes that attach to it in milliseconds.

A process attaches by `xsp.share.attach(module, "model.safetensors")`: the parameters become views of memory that nobody
can write. What is not in the store yet is copied there first. A client that is killed is counted no more; a store that
is killed takes nothing from its clients.
safetensors' own loader maps the file, too: measure whether a store pays before you use one.

examples:
  xsp share estimate model.safetensors        would it pay, by size and number of tensors?
  xsp share measure torchvision:resnet50      does it pay for this model, on this machine?
  xsp share serve --capacity 8GiB             the store, until Ctrl-C
  xsp share put model.safetensors             copy weights before the first client asks
  xsp share status                            what it holds, and who is attached
  xsp share evict 9f86d081                    free what nobody is attached to
  xsp share serve --device 0                  the store, and copies of weights on a GPU, once for all processes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xsp.cli import progress

SUMMARY = "keep weights once a machine, and attach to them"

PARTS = {
    "serve": "xsp.cli.share_serve",
    "put": "xsp.cli.share_put",
    "status": "xsp.cli.share_status",
    "evict": "xsp.cli.share_evict",
    "check": "xsp.cli.share_check",
    "measure": "xsp.cli.share_measure",
    "estimate": "xsp.cli.share_estimate",
}
"""Second words that are commands of their own."""


def placed(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where the store's socket is."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory of the store's socket (default: $XSP_SHARE_DIR, or one of this user)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(given: argparse.Namespace) -> int:
    """Say which parts there are."""
    del given
    from importlib import import_module

    progress.tell("xsp share is several commands; each has its --help:")
    for name, module in PARTS.items():
        progress.tell(f"  xsp share {name:<8} {import_module(module).SUMMARY}")
    return 2
