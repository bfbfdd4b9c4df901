"""Keep one copy of a model's weights in shared memory, to which the processes of this machine attach.

A process attaches by `xsp.share.attach(module, "model.safetensors")`: its parameters become read-only views of the
shared memory. Weights that are not in the store yet are copied there first. Killed clients are detached; clients of a
killed store keep their weights. `safetensors.torch.load_file` also maps the file without copying: measure whether a
store pays before you use one.

examples:
  xsp share estimate model.safetensors        would it pay, by bytes and tensors?
  xsp share measure torchvision:resnet50      does it pay for this model, on this machine?
  xsp share serve --capacity 8GiB             the store, until Ctrl-C
  xsp share put model.safetensors             copy weights in advance
  xsp share status                            contents, and attached processes; reads no weights
  xsp share check                             compare weights on devices with the store's
  xsp share evict 9f86d081                    free weights that are not in use
  xsp share serve --device 0                  also one copy of weights on a GPU for all processes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xsp.cli import progress

SUMMARY = "share one copy of weights between processes"

PARTS = {
    "serve": "xsp.cli.share_serve",
    "put": "xsp.cli.share_put",
    "status": "xsp.cli.share_status",
    "evict": "xsp.cli.share_evict",
    "check": "xsp.cli.share_check",
    "measure": "xsp.cli.share_measure",
    "estimate": "xsp.cli.share_estimate",
}
"""Modules of the subcommands, by name."""


def add_dir_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the directory of the store's socket."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory of the store's socket (default: $XSP_SHARE_DIR, or one of this user)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """List the subcommands."""
    del args
    from importlib import import_module

    progress.echo("xsp share is several commands; each has its --help:")
    for name, module in PARTS.items():
        progress.echo(f"  xsp share {name:<8} {import_module(module).SUMMARY}")
    return 2
