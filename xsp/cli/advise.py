"""Say what is wrong with a step, what it costs, and what to type: the best first.

Each piece of advice has its gain in milliseconds of a step with an interval, or a bound ("at most"), the modules and
spans that it is about, and the figures that it rests on. What a trace alone tells is asked of any trace; what needs
timings of single calls is asked where `xsp bench` has taken them.

examples:
  xsp advise runs/demo                              everything, the best first
  xsp advise runs/demo --only data --only stall     these questions alone
  xsp advise runs/demo --fill 60s                   times single calls first: layouts, threads, precision
  xsp advise runs/demo --same-numbers               nothing that changes results
  xsp advise trace.json.gz                          another profiler's trace
  xsp advise torchvision:resnet50                   a model, from timings alone
  xsp advise runs/demo --format json --limit 3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from xsp.cli import options, progress
from xsp.cli.bound import seconds

SUMMARY = "what to change, what it gains, and where"

FORMATS = ("table", "json")

OF_MODEL = ("batch", "train", "sequence", "threads", "timings", "device", "fill")
"""Options that are handed on, under their names, where they are given."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run, a trace that xsp imports, or a model: torchvision:NAME, timm:NAME, transformers:NAME, "
        "path/to/file.py:function, an ONNX file, a program of torch.export (.pt2)",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="QUESTION", help="ask this question; may be given several times"
    )
    parser.add_argument("--same-numbers", action="store_true", help="nothing that changes results beyond rounding")
    parser.add_argument("--limit", type=options.rows, metavar="N", help="pieces of advice that are shown (default: 10)")
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default) or json")
    parser.add_argument(
        "--fill", type=seconds, metavar="TIME", help="time single calls that questions need first, for so long: 60s, 2m"
    )
    parser.add_argument("--timings", type=Path, metavar="DIR", help="folder of timings (default: in the user's cache)")
    parser.add_argument("--device", metavar="NAME", help="ceilings of this device (H100, MI300X), for a trace of one")
    group = parser.add_argument_group("the model, where SOURCE is one")
    group.add_argument("--threads", type=options.rows, metavar="N", help="of the step (default: as it ran, or all)")
    group.add_argument("--batch", type=options.rows, metavar="N", help="samples in a step (default: 1)")
    group.add_argument("--train", action="store_true", help="forward, backward and optimizer instead of a prediction")
    group.add_argument("--input", metavar="SHAPE", help="shape of one sample, 3x224x224 (default: the model's own)")
    group.add_argument("--sequence", type=options.rows, metavar="N", help="tokens of one sample (default: 128)")


def run(given: argparse.Namespace) -> int:
    """Ask, and show what is advised."""
    from xsp import advise
    from xsp.advise import text

    with progress.shown(quiet=given.fill is None) as show:
        settings = {**_settings(given), "progress": show}
        found = advise.of(given.source, only=given.only, same_numbers=given.same_numbers, settings=settings)
    if given.format == "json":
        from xsp.evidence import advising, form

        source = {"run": given.source, "name": found.name}
        said = form.fitted(advising.of(found, source, limit=given.limit), form.MOST_BYTES_OF_A_FILE)
        progress.put(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    else:
        progress.tell(text.page(found, given.limit))
    return 0


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model and of its timings that were given."""
    found = {name: getattr(given, name) for name in OF_MODEL}
    found["shape"] = options.shape(given.input)
    return {name: value for name, value in found.items() if value}
