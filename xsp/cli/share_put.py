"""Copy weights into the store before the first client needs them.

The key of each file is printed; `attach` accepts it instead of the file.

examples:
  xsp share put model.safetensors
  xsp share put a.safetensors b.safetensors
  xsp share put model.safetensors.index.json      all shards; or give their folder
"""

from __future__ import annotations

import argparse

from xsp.cli import progress, share

SUMMARY = "copy weights into the store"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="safetensors files, indexes of shards, or folders with one of them"
    )
    share.placed(parser)


def run(given: argparse.Namespace) -> int:
    """Copy the files, one by one."""
    from xsp import clock
    from xsp.share import client, shelf, weights

    for name in [each for source in given.files for each in weights.shards(source)]:
        began = clock.monotonic_ns()
        held = client.attach(name, given.dir)
        took = (clock.monotonic_ns() - began) / 1e6
        what = "was there" if held.hit else "copied"
        size = shelf.size_text(held.mapping.nbytes)
        progress.tell(f"{name}: sha256:{held.key[:16]}, {size}, {len(held.tensors)} tensors, {what}, {took:.1f} ms")
        del held  # detached, so that the store can evict it for the next file
    return 0
