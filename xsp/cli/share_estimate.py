"""Estimate whether sharing would pay for a file, from its bytes and tensors and constants of this machine.

Bandwidths come from `xsp bench transfers`; the time per tensor and per request to the store is measured on two small
files, in some seconds. Only the header of the file is read. Memory and the first call are not estimated:
`xsp share measure` measures them.

examples:
  xsp bench transfers --families copy,read-cached,first-touch --threads 1      once per machine
  xsp share estimate model.safetensors
  xsp share estimate model.safetensors.index.json --format json                all shards
"""

from __future__ import annotations

import argparse
import json
import os

from xsp import terminal
from xsp.cli import options, progress

SUMMARY = "estimate whether sharing would pay"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("source", metavar="FILE", help="a safetensors file, an index of shards, or a folder with one")
    options.add_timings_option(parser)
    options.add_quiet_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Read the header, measure the missing constants, and print the estimate."""
    from xsp.bench.timings import Timings
    from xsp.errors import ShareError
    from xsp.share import estimate, savings, weights

    tensors = []
    for name in weights.shards(args.source):
        try:
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShareError(f"{name}: cannot be read ({error.strerror})") from error
        try:
            tensors += weights.read_header(file, name)
        finally:
            os.close(file)
    curves = estimate.curves(Timings.open(args.timings))
    with progress.progress_bar(args.quiet) as show:
        constants = estimate.Constants(estimate.costs(show), curves, estimate.digest_ns())
    if args.format == "json":
        progress.write(json.dumps(savings.estimate_json(args.source, tensors, constants), indent=1) + "\n")
    else:
        progress.write(terminal.page(savings.estimate_document(args.source, tensors, constants)) + "\n")
    return 0
