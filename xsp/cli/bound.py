"""Show what a step costs at least, rung by rung, and why it costs more.

The ladder goes from the ceiling of the machine over timings of each call to the step as it was measured; each
difference between two rungs has a name. Timings are those of `xsp bench`; what is missing is named; --fill takes it.

examples:
  xsp bound torchvision:resnet50                    from the timings that there are
  xsp bound torchvision:resnet50 --fill 60s         and times what is missing first
  xsp bound timm:vit_tiny_patch16_224 --batch 8 --train
  xsp bound timm:vit_tiny_patch16_224 --train --phases      what each layer takes, and its gradients
  xsp bound runs/demo                               joined with its trace, layer by layer
  xsp bound model.onnx --run runs/mine              a graph, held against a run of it
  xsp bound trace.json.gz --device H100             ceilings of a device, for another profiler's trace
  xsp bound runs/demo --curve --fill 5m             the step from blocks of 1 to 16 calls
  xsp bound transformers:gpt2 --decode 64:1024      a language model over the number of tokens
  xsp bound runs/demo --format json
  xsp bound runs/demo --html bound.html
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.cli import options, progress
from xsp.errors import UsageError

if TYPE_CHECKING:
    from xsp.bound import Bound

SUMMARY = "what a step costs at least, and why it costs more"

FORMATS = ("table", "json")

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Return a duration in seconds: 60, 60s, 2m, 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.strip())
    value = float(found[1]) * _SECONDS[found[2]] if found is not None else 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration above 0, such as 60s or 2m")
    return value


def lengths(text: str) -> int | tuple[int, int]:
    """Return a number of tokens, 512, or the ends of a range of them, 64:1024."""
    low, colon, high = text.partition(":")
    if not colon:
        return options.rows(text)
    found = options.rows(low), options.rows(high)
    if found[0] >= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: give the smaller number first, 64:1024")
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="torchvision:NAME, timm:NAME, transformers:NAME, path/to/file.py:function, an ONNX file, a program of "
        "torch.export (.pt2), a run or a trace, or a saved graph",
    )
    parser.add_argument("--fill", type=seconds, metavar="TIME", help="time what is missing first, for so long: 60s, 2m")
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run or a trace of SOURCE, to hold it against")
    parser.add_argument(
        "--device", metavar="NAME", help="ceilings of this device (H100, MI300X), as its maker states them"
    )
    parser.add_argument(
        "--construct", type=options.rows, metavar="G", help="a rung from timings of blocks of so many calls"
    )
    parser.add_argument(
        "--curve",
        action="store_true",
        help="the step from blocks of 1 to 16 calls: time, error against a run, best cover",
    )
    parser.add_argument(
        "--phases",
        action="store_true",
        help="of a training step: forward, backward and update, in all and of each layer, with its gradients",
    )
    parser.add_argument("--timings", type=Path, metavar="DIR", help="folder of timings (default: in the user's cache)")
    parser.add_argument(
        "--like", metavar="HASH", help="timings of this environment where there are none of this machine"
    )
    parser.add_argument(
        "--partial", action="store_true", help="totals of which less than 95 %% is known too: at least so much"
    )
    parser.add_argument(
        "--threads", type=options.rows, metavar="N", help="of the step (default: as the run had, or all)"
    )
    options.step_of_model(parser)
    options.sizes(parser)
    parser.add_argument(
        "--prefill", type=lengths, metavar="N", help="of a language model of transformers: the step that reads N tokens"
    )
    parser.add_argument(
        "--decode",
        type=lengths,
        metavar="N|A:B",
        help="and the one that adds the N-th, with a cache of those before it; A:B: curves of both over the tokens",
    )
    parser.add_argument(
        "--measure", type=seconds, metavar="TIME", help="with --decode A:B: measure whole steps in turns, for so long"
    )
    parser.add_argument(
        "--skew",
        type=float,
        metavar="S",
        help="with --decode A:B: the i-th expert is chosen in proportion to i^-S (default: 0, all alike)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page: ladder, waterfall by layer")
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default) or json")


def run(given: argparse.Namespace) -> int:
    """Make the bound, show or write it."""
    from xsp import bound as bounds
    from xsp.bound import section, text
    from xsp.report import html

    if isinstance(given.decode, tuple) or isinstance(given.prefill, tuple):
        return _language(given)
    if given.measure is not None or given.skew is not None:
        raise UsageError("--measure and --skew are of curves of a language model: --decode 64:1024")
    if given.like is not None and given.device is not None:
        raise UsageError("--like is of timings, of which --device has none: give one of both")
    if given.curve and given.phases:
        raise UsageError("--curve and --phases are two tables: give one of both")
    if given.curve:
        return _curve(given)
    with progress.shown(quiet=given.fill is None) as show:
        found = bounds.of(
            given.source,
            device=given.device,
            granularity=given.construct,
            partial=given.partial,
            progress=show,
            **_of_step(given),
        )
    if given.phases:
        return _phases(given, found)
    if given.html is not None:
        html.write_sections(given.html, f"What {found.graph.name} costs at least", [section.section(found)])
    section.keep(found, given.run or given.source)
    if given.format == "json":
        progress.put(json.dumps(text.as_json(found), indent=2) + "\n")
    else:
        progress.tell(text.page(found, given.source, given.partial, _typed(given)))
    return 0


def _phases(given: argparse.Namespace, found: Bound) -> int:
    """Show a training step by its phases and layers."""
    from xsp.bound import phases, phasestext

    if given.html is not None:
        raise UsageError("--phases prints tables, or --format json: omit --html")
    training = phases.of(found)
    if given.format == "json":
        progress.put(json.dumps(phasestext.as_json(training), indent=2) + "\n")
    else:
        progress.tell(phasestext.page(training, given.source, _typed(given)))
    return 0


def _typed(given: argparse.Namespace) -> str:
    """Return the options of the step as they are typed, for the command that comes next."""
    names = ("batch", "input", "sequence", "prefill", "decode", "threads", "run", "timings", "like")
    usual = {"sequence": 128}
    words = ["--train"] if given.train else []
    for name in names:
        value = getattr(given, name)
        if value is not None and value != usual.get(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _of_step(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that bounds and curves share: of the model, of its timings, of its run."""
    return {
        "fill": given.fill,
        "trace": given.run,
        "timings": given.timings,
        "like": given.like,
        "threads": given.threads,
        "batch": given.batch,
        "train": given.train,
        "shape": options.shape(given.input),
        "sequence": given.sequence,
        "prefill": given.prefill,
        "decode": given.decode,
        "sizes": given.size,
    }


def _curve(given: argparse.Namespace) -> int:
    """Show the step constructed from blocks of each size."""
    from xsp.bound import curves, curvetext
    from xsp.report import html

    if given.device is not None or given.construct is not None or given.partial:
        raise UsageError("--curve has blocks of all sizes, timed here: omit --device, --construct and --partial")
    with progress.shown(quiet=given.fill is None) as show:
        found = curves.of(
            given.source,
            progress=show,
            **_of_step(given),
        )
    if given.html is not None:
        html.write_sections(given.html, f"{found.graph.name} from its blocks", [curvetext.section(found)])
    curvetext.keep(found, given.run or given.source)
    if given.format == "json":
        progress.put(json.dumps(curvetext.as_json(found), indent=2) + "\n")
    else:
        progress.tell(curvetext.page(found, given.source, _typed(given)))
    return 0


def _language(given: argparse.Namespace) -> int:
    """Show the curves of a language model over the number of tokens."""
    from xsp.bound import language, languagetext
    from xsp.report import html

    asked = [each for each in (given.decode, given.prefill) if each is not None]
    if len(asked) > 1:
        raise UsageError("--decode A:B has the curves of both steps: omit --prefill")
    others = ("run", "construct", "curve", "phases", "train", "input")
    typed = [f"--{name}" for name in others if getattr(given, name)]
    if typed:
        raise UsageError(f"{', '.join(typed)}: not with the curves of a language model")
    with progress.shown(quiet=given.fill is None and given.measure is None) as show:
        found = language.of(
            given.source,
            asked[0],
            batch=given.batch or 1,
            fill=given.fill,
            measure=given.measure,
            device=given.device,
            timings=given.timings,
            like=given.like,
            threads=given.threads,
            partial=given.partial,
            skew=given.skew or 0.0,
            progress=show,
        )
    if given.html is not None:
        html.write_sections(given.html, f"{found.name} by length", [languagetext.section(found)])
    if given.format == "json":
        progress.put(json.dumps(languagetext.as_json(found), indent=2) + "\n")
    else:
        typed_lengths = f"--decode {asked[0][0]}:{asked[0][1]}"
        progress.tell(languagetext.page(found, given.source, typed_lengths))
    return 0
