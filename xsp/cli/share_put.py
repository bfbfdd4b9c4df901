"""Copy weights into the store before the first client needs them.

The key of each file is printed; `attach` accepts it instead of the file.

examples:
  xsp share put model.safetensors
  xsp share put a.safetensors b.safetensors
  xsp share put model.safetensors.index.json      all shards; or give their folder
"""

from __future__ import annotations

import argparse

from xsp import texts
from xsp.cli import progress, share

SUMMARY = "copy weights into the store"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="safetensors files, indexes of shards, or folders with one of them"
    )
    share.add_dir_option(parser)


def run(args: argparse.Namespace) -> int:
    """Copy the files, one by one."""
    from xsp import clock
    from xsp.share import client, weights

    for name in [shard for source in args.files for shard in weights.shards(source)]:
        start = clock.monotonic_ns()
        attachment = client.attach(name, args.dir)
        ms = (clock.monotonic_ns() - start) / 1e6
        state = "was there" if attachment.hit else "copied"
        size = texts.size_text(attachment.mapping.nbytes)
        progress.echo(
            f"{name}: sha256:{attachment.key[:16]}, {size}, {len(attachment.tensors)} tensors, {state}, {ms:.1f} ms"
        )
        del attachment  # detached, so that the store can evict it for the next file
    return 0
