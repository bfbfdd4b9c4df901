"""Measure whether sharing pays for a model on this machine, compared with loading without a store.

Fresh processes take turns: `safetensors.torch.load_file`, which maps the file, `torch.load`, and `xsp.share.attach`.
It compares the time of loading and of the first call, and memory by the number of processes, with a store of its own.
It takes some minutes on an idle machine, and ends as soon as the answer is known. With --device all ways load onto that
device, where the store keeps one copy.

examples:
  xsp share measure torchvision:resnet50                           weights from a seed
  xsp share measure model.safetensors torchvision:resnet50
  xsp share measure model.safetensors                              without a call: each tensor is read once
  xsp share measure torchvision:resnet50 --device cuda:0           onto a GPU
  xsp share measure torchvision:resnet50 --processes 8             8 processes load at once, for memory
"""

from __future__ import annotations

import argparse
import json

from xsp import terminal
from xsp.cli import options, progress

SUMMARY = "measure whether sharing pays"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("source", metavar="SOURCE", help="a safetensors file, or torchvision:NAME and the like")
    parser.add_argument("module", nargs="?", default="", metavar="MODULE", help="the model, if SOURCE is a file")
    parser.add_argument(
        "--turns",
        type=options.positive_int,
        default=12,
        metavar="N",
        help="maximal number of turns, 3 or more (default: 12)",
    )
    parser.add_argument("--device", metavar="NAME", help="load onto this device, cuda:0 (default: the host's memory)")
    parser.add_argument(
        "--processes",
        type=options.positive_int,
        default=3,
        metavar="N",
        help="processes that load at once, 2 or more (default: 3)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order within turns (default: 0)")
    options.add_quiet_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the result."""
    from xsp.errors import UsageError
    from xsp.share import measuring, savings

    if args.seed < 0:
        raise UsageError("--seed: 0 or more")
    if args.processes < 2:
        raise UsageError("--processes: 2 or more, one is measured in any case")
    with progress.progress_bar(args.quiet) as show:
        result = measuring.measure(
            args.source, args.module, args.turns, args.seed, show, concurrent=args.processes, device=args.device
        )
    text = json.dumps(savings.as_json(result), indent=1)
    progress.write((text if args.format == "json" else terminal.page(savings.document(result))) + "\n")
    return 0
