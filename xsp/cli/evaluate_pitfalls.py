"""Show the effect of small differences in preprocessing: colour order, decoder, crop, resize, normalisation, layout.

Images, weights and readout come from a seed, so equal versions give equal tables. Of your own images (--data), two
thirds of each class fit the readout, and the others go through each pipeline.

examples:
  xsp evaluate pitfalls
  xsp evaluate pitfalls --data photographs                  a subfolder of images per class
  xsp evaluate pitfalls --model timm:resnet10t --seed 7 --format json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xsp.cli import options, progress

SUMMARY = "show the effect of small differences in preprocessing"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model",
        default="torchvision:squeezenet1_1",
        metavar="MODEL",
        help="image model, with weights from the seed (default: torchvision:squeezenet1_1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and images (default: 0)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with a subfolder of images per class (default: images from the seed)",
    )
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the effects, and print them."""
    from dataclasses import asdict

    from xsp.evaluate import pitfalls, tables
    from xsp.terminal import column_lines

    effects = pitfalls.rows(args.model, args.seed, data=args.data)
    if args.format == "json":
        progress.write(json.dumps([asdict(effect) for effect in effects], indent=1) + "\n")
        return 0
    header = ("of", "difference", "accuracy", "agreement", "features apart", "JS")
    rows = [
        (effect.subject or "-", effect.name, f"{100 * effect.accuracy:.0f} %", f"{100 * effect.agreement:.0f} %",
         f"{100 * effect.apart:.2g} %", tables.figure(effect.js))
        for effect in effects
    ]  # fmt: skip
    progress.echo("\n".join(column_lines(header, rows, 2)))
    progress.echo("accuracy: share of images classified correctly; agreement: share classified as by the right steps;")
    progress.echo("features apart: distance relative to the norm of the correct ones; JS: divergence in nats")
    return 0
