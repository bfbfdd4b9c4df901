"""Profile a model by name, with leveled experimentation.

The steps take turns at the levels, so the overhead of each level is measured and subtracted.

examples:
  xsp profile torchvision:resnet50
  xsp profile timm:vit_tiny_patch16_224 --batch 8 --out runs/vit
  xsp profile transformers:GPT2LMHeadModel --train --sequence 64
  xsp profile torchvision:resnet18 --batch 1,2,4,8 --levels M/L
  xsp profile mymodel.py:build --repeats 30
  xsp profile torchvision:resnet50 --counters     hardware counters (ncu)
"""

from __future__ import annotations

import argparse

from xsp.cli import counters, options, progress
from xsp.errors import UsageError

SUMMARY = "profile a model by name"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_model_options(parser)
    parser.add_argument("--batch", default="1", metavar="N[,N…]", help="batch sizes; several make a sweep (default: 1)")
    options.add_recording_options(parser)
    options.add_counter_options(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no tables")
    options.add_advice_option(parser)


def run(args: argparse.Namespace) -> int:
    """Profile the model, print the first tables, and suggest the next commands."""
    from xsp.launch import models

    sizes = options.batches(args.batch)
    options.check_counting(args)
    if args.counters and len(sizes) > 1:
        raise UsageError("--counters needs a single batch size: omit the others")
    settings = options.model_settings(args, sizes[0])
    run_settings = options.recording_settings(args, models.short_name(args.model))
    recording = models.ModelRecording(run_settings, args.repeats, args.counting)
    with progress.progress_bar(args.quiet) as show:
        if len(sizes) == 1:
            out = models.measure(args.model, settings, recording, show)
        else:
            out = models.sweep(args.model, settings, sizes, recording, show)
    if args.counters:
        counters.rerun_and_count(lambda: models.count(args.model, settings, recording, out))
    if not args.quiet:
        progress.show_result(out, not args.no_advice)
    return 0
