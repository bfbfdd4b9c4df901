"""Profile a model over batch sizes and choose the optimal one (XSP's A1).

Each size is measured at the model level unless --levels says more. The optimum is given by both readings of
XSP's rule that doubling the size must gain more than 5 % of throughput, and by a latency target.

examples:
  xsp sweep torchvision:resnet50 --batch 1,2,4,8,16
  xsp sweep timm:vit_tiny_patch16_224 --batch 1,2,4,8 --latency-target 50
"""

from __future__ import annotations

import argparse
import math

from xsp.cli import options, progress
from xsp.errors import UsageError

SUMMARY = "find the optimal batch size of a model"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_model_options(parser)
    parser.add_argument("--batch", default="1,2,4,8", metavar="N,N…", help="batch sizes (default: 1,2,4,8)")
    parser.add_argument("--latency-target", type=float, metavar="MS", help="the longest acceptable latency of a step")
    options.add_recording_options(parser)
    parser.set_defaults(levels="M")


def run(args: argparse.Namespace) -> int:
    """Measure each batch size, and print A1 and the optimum."""
    from rich.console import Console

    from xsp.ingest import load
    from xsp.launch import models
    from xsp.report import text

    sizes = options.batches(args.batch)
    if args.latency_target is not None and not 0 < args.latency_target < math.inf:
        raise UsageError(f"--latency-target {args.latency_target:g}: give milliseconds above 0")
    settings = options.model_settings(args, sizes[0])
    run_settings = options.recording_settings(args, f"{models.short_name(args.model)}-sweep")
    recording = models.ModelRecording(run_settings, args.repeats)
    with progress.progress_bar(False) as show:
        out = models.sweep(args.model, settings, sizes, recording, show)
    Console().print(text.sweep([load.load(run) for run in load.parts(out)], args.latency_target))
    return 0
