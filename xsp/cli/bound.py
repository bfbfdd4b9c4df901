"""Estimate the least time of a step call by call, with PyTorch's own kernels, and explain the rest of its time.

The result is a ladder of estimates: the peak rates of the machine, the sum of each call's time in isolation, and the
measured step. Each difference has a name, such as choice of algorithm or framework. Timings are those of `xsp bench`;
missing ones are listed, and --fill takes them.

examples:
  xsp bound torchvision:resnet50                    from existing timings
  xsp bound torchvision:resnet50 --fill 60s         times missing calls first
  xsp bound timm:vit_tiny_patch16_224 --batch 8 --train
  xsp bound timm:vit_tiny_patch16_224 --train --phases      by layer, with gradients
  xsp bound runs/demo                               a run, layer by layer
  xsp bound model.onnx --run runs/mine              a graph, compared with a run of it
  xsp bound torchvision:resnet50 --device cuda:0 --fill 60s     on a GPU: also replayed, and issued by the host
  xsp bound trace.json.gz --device H100             peak rates of a device, for another profiler's trace
  xsp bound runs/demo --curve --fill 5m             the step from blocks of 1 to 16 calls
  xsp bound transformers:gpt2 --decode 64:1024      a language model by number of tokens
  xsp bound runs/demo --format json
  xsp bound runs/demo --html bound.html
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.cli import options, progress
from xsp.errors import UsageError

if TYPE_CHECKING:
    pass

SUMMARY = "estimate the least time of a step call by call, and explain the rest"

SEQUENCE = 128
"""Default of --sequence."""


def lengths(text: str) -> int | tuple[int, int]:
    """Return a number of tokens, 512, or the ends of a range of them, 64:1024."""
    low, colon, high = text.partition(":")
    if not colon:
        return options.positive_int(text)
    interval = options.positive_int(low), options.positive_int(high)
    if interval[0] >= interval[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: give the smaller number first, 64:1024")
    return interval


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="torchvision:NAME, timm:NAME, transformers:NAME, path/to/file.py:function, an ONNX file, a program of "
        "torch.export (.pt2), a run or a trace (a file, or several with a trace per rank), or a saved graph",
    )
    parser.add_argument(
        "--fill", type=options.duration, metavar="TIME", help="first time missing calls, for at most this long: 60s, 2m"
    )
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run or a trace of SOURCE to compare with")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="a device of this machine, cuda:0; or a product, H100: the peak rates that its manufacturer states, and "
        "imported timings of it (default: cpu)",
    )
    parser.add_argument(
        "--construct", type=options.positive_int, metavar="G", help="also estimate the step from blocks of G calls"
    )
    parser.add_argument(
        "--curve",
        action="store_true",
        help="estimate the step from blocks of 1 to 16 calls, with the error against a run",
    )
    parser.add_argument(
        "--phases",
        action="store_true",
        help="forward, backward and update of a training step, in total and by layer, with gradients",
    )
    options.add_timings_option(parser)
    parser.add_argument("--like", metavar="HASH", help="use timings of this environment where this machine has none")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="print totals although less than 95 %% of the time is known, as lower limits",
    )
    options.add_threads_option(parser)
    options.add_step_options(parser)
    options.add_size_option(parser)
    parser.add_argument(
        "--prefill",
        type=lengths,
        metavar="N",
        help="language models of transformers: the step that reads N tokens at once",
    )
    parser.add_argument(
        "--decode",
        type=lengths,
        metavar="N|A:B",
        help="language models: the step that adds the N-th token, with a cache of N - 1; A:B: curves of both steps",
    )
    parser.add_argument(
        "--measure",
        type=options.duration,
        metavar="TIME",
        help="with --decode A:B: also measure whole steps in turns, for at most this long",
    )
    parser.add_argument(
        "--skew",
        type=float,
        metavar="S",
        help="with --decode A:B: the i-th expert is chosen with probability ~ i^-S (default: 0, equal)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page: ladder, waterfall by layer, calls with the longest path",
    )
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compute the bound, and show or write it."""
    from xsp import bound as bounds
    from xsp.bound import phases, section, text
    from xsp.report import html

    options.check_writable(args.html)
    args.source = args.sources[0]
    if isinstance(args.decode, tuple) or isinstance(args.prefill, tuple):
        return _language(args)
    if args.measure is not None or args.skew is not None:
        raise UsageError("--measure and --skew are for curves of a language model: --decode 64:1024")
    if args.curve and args.phases:
        raise UsageError("--curve and --phases are different outputs: give one of them")
    if args.phases and args.html is not None:
        raise UsageError("--phases has no page, only tables and --format json: omit --html")
    if args.curve:
        return _curve(args)
    with progress.progress_bar(quiet=args.fill is None) as show:
        bound = bounds.of(
            options.one_subject(args.sources),
            device=args.device,
            granularity=args.construct,
            partial=args.partial,
            progress=show,
            check=phases.check if args.phases else None,
            **_step_options(args),
        )
    if args.phases:
        from xsp import terminal
        from xsp.bound import phases, phasestext

        training = phases.of(bound)
        if args.format == "json":
            progress.write_json(phasestext.as_json(training))
        else:
            progress.echo(terminal.page(phasestext.section(training, args.source, _repeated_options(args))))
        return 0
    if args.html is not None:
        html.write_sections(args.html, f"Least time of {bound.graph.name}", [section.section(bound)])
    section.write_section(bound, args.run or args.source)
    if args.format == "json":
        progress.write_json(text.as_json(bound))
    else:
        progress.echo(text.page(bound, args.source, args.partial, _repeated_options(args)))
    return 0


_REPEATED_OPTIONS = (
    "batch", "input", "sequence", "prefill", "decode", "size", "threads", "run", "timings", "like", "device", "skew",
)  # fmt: skip
"""Options that a suggested next command repeats."""


def _repeated_options(args: argparse.Namespace, names: Sequence[str] = _REPEATED_OPTIONS) -> str:
    """Return the options of the step as a user types them, for the suggested next command."""
    defaults = {"sequence": SEQUENCE}
    words = ["--train"] if args.train else []
    for name in names:
        value = getattr(args, name)
        if isinstance(value, tuple):
            value = ":".join(map(str, value))
        elif isinstance(value, dict):
            value = ",".join(f"{dimension}={number}" for dimension, number in value.items())
        if value is not None and value != defaults.get(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _step_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that bounds and curves share: those of the model, its timings and its run."""
    return {
        "fill": args.fill,
        "trace": args.run,
        "timings": args.timings,
        "like": args.like,
        "threads": args.threads,
        **options.step_options(args),
    }


def _curve(args: argparse.Namespace) -> int:
    """Show the step constructed from blocks of each size."""
    from xsp.bound import curves, curvetext
    from xsp.report import html

    if args.construct is not None or args.partial:
        raise UsageError("--curve uses blocks of all sizes: omit --construct and --partial")
    with progress.progress_bar(quiet=args.fill is None) as show:
        curve = curves.of(
            options.one_subject(args.sources),
            device=args.device,
            progress=show,
            **_step_options(args),
        )
    if args.html is not None:
        html.write_sections(args.html, f"{curve.graph.name} from its blocks", [curvetext.section(curve)])
    curvetext.write_section(curve, args.run or args.source)
    if args.format == "json":
        progress.write_json(curvetext.as_json(curve))
    else:
        progress.echo(curvetext.page(curve, args.source, _repeated_options(args)))
    return 0


def _language(args: argparse.Namespace) -> int:
    """Show the curves of a language model by number of tokens."""
    from xsp.bound import language, languagetext
    from xsp.report import html

    if len(args.sources) > 1:
        raise UsageError("give one model, whose curves --decode A:B and --prefill A:B show")
    requested = [tokens for tokens in (args.decode, args.prefill) if tokens is not None]
    if len(requested) > 1:
        raise UsageError("--decode A:B includes the curves of both steps: omit --prefill")
    unsupported = ("run", "construct", "curve", "phases", "train", "input")
    conflicting = [f"--{name}" for name in (*unsupported, "size") if getattr(args, name)]
    conflicting += ["--sequence"] if args.sequence != SEQUENCE else []
    if conflicting:
        raise UsageError(f"{', '.join(conflicting)}: cannot be used with the curves of a language model")
    with progress.progress_bar(quiet=args.fill is None and args.measure is None) as show:
        result = language.of(
            args.source,
            requested[0],
            batch=args.batch or 1,
            fill=args.fill,
            measure=args.measure,
            device=args.device,
            timings=args.timings,
            like=args.like,
            threads=args.threads,
            partial=args.partial,
            skew=args.skew or 0.0,
            progress=show,
        )
    if args.html is not None:
        html.write_sections(args.html, f"{result.name} by length", [languagetext.section(result)])
    if args.format == "json":
        progress.write_json(languagetext.as_json(result))
    else:
        # what is timed on the processor has no quoted peak rates
        names = [name for name in _REPEATED_OPTIONS if name != "device" or result.settings.get("device")]
        progress.echo(languagetext.page(result, args.source, _repeated_options(args, names)))
    return 0
