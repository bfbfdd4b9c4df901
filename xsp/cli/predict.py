"""Predict how long a training step takes on N data-parallel ranks, from a run or a trace of one rank, or a model.

The step becomes tasks on resources: input, forward and backward of each layer, buckets of gradients, their collectives
over a link, the update. They are simulated for each number of ranks, with the same batch on each. The sources of all
figures are printed.

examples:
  xsp predict runs/train --ranks 2,4,8,64 --link nvlink4
  xsp predict runs/train --ranks 8 --link 30us,1.2GB/s         latency and bandwidth of a link
  xsp predict runs/train --ranks 8 --link rack.json            a link from a file
  xsp predict runs/train --ranks 2,4 --link measured           this machine, by xsp bench collectives
  xsp predict runs/train --link nvlink4 --bucket 100MiB        other buckets
  xsp predict runs/train --link nvlink4 --straggler 1.3        one rank is slower; also 1.3:turns, 1.3:together
  xsp predict runs/train --link nvlink4 --loader 5ms,40ms,8    reading, decoding, workers
  xsp predict runs/train --link nvlink4 --loader 12MB,40ms,8   reading by xsp bench transfers
  xsp predict rank0.json.gz --ranks 16,32 --link infiniband-ndr --sharded     another profiler's trace
  xsp predict runs/train --ranks 8 --link pcie4 --chakra step8    for simulators that read Chakra
  xsp predict runs/train --ranks 64 --link nvlink4 --what-if link=ethernet-25g --what-if 'compress=2 bucket=50MiB'
  xsp predict runs/train --ranks 1 --format json
  xsp predict torchvision:resnet50 --device cuda:0 --fill 60s --batch 32 --link nvlink4    without a run
  xsp predict torchvision:resnet50 --device H200 --link nvlink4    from imported timings of xsp bench
  xsp predict fit table.csv                                    from many configurations
  xsp predict at batch=64 threads=2                            a configuration that was not recorded
  xsp predict next                                             which configuration to record next
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.cli import options, progress
from xsp.errors import UsageError
from xsp.texts import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from xsp.predict.recorded import RecordedStep
    from xsp.predict.training import Job, Straggler
    from xsp.run import Machine

SUMMARY = "predict the time of a training step on N ranks"

PARTS = {"fit": "xsp.cli.predict_fit", "at": "xsp.cli.predict_at", "next": "xsp.cli.predict_next"}
"""Modules of the subcommands, by name; a run with such a name is typed as ./fit."""

ALGORITHMS = ("auto", "ring", "double-tree", "halving-doubling", "recursive-doubling", "binary-tree")

MOST_NUMBERS = 32


def ranks(text: str) -> tuple[int, ...]:
    """Return numbers of ranks: 2,4,8,64."""
    parts = [part.strip() for part in text.split(",")]
    if (
        not all(part.isascii() and part.isdigit() and 0 < len(part) <= 10 for part in parts)
        or len(parts) > MOST_NUMBERS
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of up to {MOST_NUMBERS} rank counts, such as 2,4,8")
    return tuple(map(int, parts))


class Bytes(int):
    """Bytes of a batch, whose time of reading comes from timings of the storage."""


def loader(text: str) -> tuple[float | Bytes, float, int]:
    """Return seconds (or bytes) of reading a batch, seconds of decoding it, and workers: 5ms,40ms,8 or 12MB,40ms,8."""
    parts = [part.strip() for part in text.split(",")]
    nbytes = parse_bytes(parts[0]) if parts[0][-1:] in ("b", "B") else None
    times = (parts[1:2] if nbytes is not None else parts[:2]) if len(parts) == 3 else [""]
    seconds = [parse_seconds(part) if part[-1:].isalpha() else None for part in times]
    if None in seconds or not re.fullmatch(r"\d{1,4}", parts[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a loader: READ,DECODE,WORKERS of a batch, such as 5ms,40ms,8 or 12MB,40ms,8"
        )
    *read_s, decode_s = (time for time in seconds if time is not None)
    return read_s[0] if nbytes is None else Bytes(nbytes), decode_s, int(parts[2])


def straggler(text: str) -> tuple[float, str]:
    """Return the factor of slowness, and which ranks are slow: 1.3, 1.3:turns, 1.3:together."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(?::(one|turns|together))?", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor above 0, such as 1.3, 1.3:turns or 1.3:together")
    return float(match[1]), match[2] or "one"


def factor(text: str) -> float:
    """Return a factor above 0: 0.5."""
    if not re.fullmatch(r"\d{1,6}(?:\.\d{1,9})?", text.strip()) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor above 0, such as 0.5 or 2")
    return float(text)


CHANGES: Mapping[str, Callable[[str], Any]] = {
    "link": str, "algorithm": str, "bucket": options.size, "batch": options.positive_int,
    "accumulate": options.positive_int, "straggler": straggler, "loader": loader, "on-link": options.positive_int,
    "on-disk": options.positive_int, "compute": factor, "compress": factor,
}  # fmt: skip
"""Options with a value that --what-if may change; `sharded` has none."""


def change(text: str) -> tuple[str, dict[str, Any]]:
    """Return a set of changes by option: link=nvlink4 bucket=100MiB sharded."""
    changes: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        is_change = (name in CHANGES and value) or (name == "sharded" and not equals)
        if not is_change or name.replace("-", "_") in changes or (value not in ALGORITHMS and name == "algorithm"):
            raise argparse.ArgumentTypeError(
                f"{word!r} is not a change, or is repeated: write OPTION=VALUE of {', '.join(CHANGES)}, or sharded; "
                "several with spaces between them"
            )
        changes[name.replace("-", "_")] = CHANGES[name](value) if value else True
    if not changes:
        raise argparse.ArgumentTypeError("no change given: write OPTION=VALUE, such as link=nvlink4")
    return " ".join(text.split()), changes


def _add_options_of_model(parser: argparse.ArgumentParser) -> None:
    """Add the options on timings, which a model without a run needs."""
    options.add_timings_option(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="of a model: where its calls are timed, as in xsp advise (default: cpu)",
    )
    parser.add_argument(
        "--fill",
        type=options.duration,
        metavar="TIME",
        help="of a model: first time missing calls, for at most this long: 60s",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "run",
        nargs="+",
        metavar="RUN",
        help="a run of a training program, or a trace that xsp imports; a folder or files with a trace per rank; or a "
        "model, torchvision:NAME",
    )
    parser.add_argument(
        "--ranks", type=ranks, default=(1, 2, 4, 8), metavar="N,N", help="numbers of ranks (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--link",
        metavar="LINK",
        help="link between ranks: nvlink2 to 5, pcie3 to 5, ethernet-10g, -25g, -100g, infiniband-hdr, -ndr (published "
        "figures); LATENCY,BANDWIDTH (30us,1.2GB/s); a JSON file; or measured: this machine, by `xsp bench "
        "collectives`; required for more than one rank",
    )
    _add_options_of_model(parser)
    parser.add_argument(
        "--algorithm",
        default="auto",
        choices=ALGORITHMS,
        help="algorithm of the all-reduce (default: auto, the faster of ring and double-tree for each bucket)",
    )
    parser.add_argument(
        "--bucket", type=options.size, metavar="SIZE", help="size of gradient buckets (default: 25MiB, the first 1MiB)"
    )
    parser.add_argument(
        "--batch", type=options.positive_int, metavar="N", help="samples per batch and rank (default: as recorded)"
    )
    parser.add_argument(
        "--accumulate", type=options.positive_int, metavar="N", help="batches per update (default: as recorded)"
    )
    parser.add_argument("--sharded", action="store_true", help="parameters are sharded, and gathered for each pass")
    parser.add_argument(
        "--straggler",
        type=straggler,
        default=(1.0, "one"),
        metavar="FACTOR[:WHO]",
        help="factor by which ranks are slower: one rank (default), each in turn, or all together in one step of N",
    )
    parser.add_argument(
        "--loader",
        type=loader,
        metavar="READ,DECODE,WORKERS",
        help="time to read and to decode a batch, and workers, instead of the recorded wait for data; READ can be "
        "bytes (12MB): then timings of the storage here are used",
    )
    parser.add_argument("--on-link", type=options.positive_int, default=1, metavar="N", help="ranks that share a link")
    parser.add_argument("--on-disk", type=options.positive_int, default=1, metavar="N", help="ranks that share a disk")
    parser.add_argument(
        "--gradients",
        type=options.size,
        metavar="SIZE",
        help="bytes of all gradients, for a trace that does not have them",
    )
    parser.add_argument(
        "--compute",
        type=factor,
        default=1.0,
        metavar="FACTOR",
        help="factor on the time of all work of a rank (0.5: a device that is twice as fast)",
    )
    parser.add_argument(
        "--compress",
        type=factor,
        default=1.0,
        metavar="FACTOR",
        help="factor by which gradients are compressed for the link (2: 16 bits instead of 32)",
    )
    parser.add_argument(
        "--what-if",
        type=change,
        action="append",
        default=[],
        metavar="'OPTION=VALUE …'",
        help="also predict the largest number of ranks with these other options: link=ethernet-25g, "
        "'compress=2 bucket=50MiB', sharded; can be repeated",
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        help="kind of step, by number or name (default: the training steps that take most time)",
    )
    parser.add_argument(
        "--chakra", type=Path, metavar="DIR", help="write the step on the most ranks as Chakra's traces, rank.N.et"
    )
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Predict the step, and print the prediction."""
    from xsp.predict import chakra, collectives, measured, scaling, text

    if args.link is None and max(args.ranks) > 1:
        raise UsageError(
            "several ranks need a link: --link nvlink4, --link 30us,1.2GB/s or a file; "
            f"there are {', '.join(collectives.LINKS)}"
        )
    for link in (args.link, *(changes.get("link") for _, changes in args.what_if)):
        if link not in (None, measured.NAME):
            collectives.link(link)  # refused before the run is loaded
    if args.chakra is not None:
        chakra.check(args.chakra, max(args.ranks))
    original, machine = _original(args)
    step, job = _configure(args, original, machine)
    variants = [(name, argparse.Namespace(**{**vars(args), **changes})) for name, changes in args.what_if]
    what_ifs = [scaling.WhatIf(name, *_configure(variant, original, machine)) for name, variant in variants]
    prediction = scaling.of(step, job, args.ranks, original, what_ifs)
    text.save_section(prediction, args.run[0])
    if args.chakra is not None:
        files = scaling.to_chakra(prediction, args.chakra)
        progress.warn(f"xsp: {files:,} traces in {args.chakra}")
    if args.format == "json":
        progress.write(json.dumps(text.as_json(prediction), indent=2, allow_nan=False) + "\n")
    else:
        progress.echo(text.page(prediction))
    return 0


def _original(args: argparse.Namespace) -> tuple[RecordedStep, Machine]:
    """Return the step to start from: that of a run or, of a model, from timings; and the machine of the link.

    Raises:
        UsageError: an option belongs to the other kind of source.
    """
    from xsp.predict import recorded, timedstep

    if not (len(args.run) == 1 and timedstep.is_model(args.run[0])):
        wrong = [f"--{name}" for name in ("device", "fill") if getattr(args, name) is not None]
        if wrong:
            raise UsageError(f"{' and '.join(wrong)}: for a model; a run has the times of its device: omit it")
        trace = recorded.load_trace(args.run[0] if len(args.run) == 1 else args.run, args.kind)
        return recorded.of(trace, args.gradients), trace.run.machine
    wrong = [f"--{name}" for name in ("kind", "gradients") if getattr(args, name) is not None]
    if wrong:
        raise UsageError(f"{' and '.join(wrong)}: for a run or a trace, not for a model: omit it")
    from xsp.device import machine
    from xsp.run import Machine

    with progress.progress_bar(quiet=args.fill is None) as show:
        step = timedstep.of(
            args.run[0], device=args.device, timings=args.timings, fill=args.fill, batch=args.batch, progress=show
        )
    args.batch = None  # it is that of the timings
    return step, Machine.of(machine.describe())


def _configure(args: argparse.Namespace, original: RecordedStep, machine: Machine) -> tuple[RecordedStep, Job]:
    """Return the step and the job that result from a recorded step and the options."""
    from xsp.predict import collectives, measured
    from xsp.predict.collectives import Algorithm
    from xsp.predict.training import NO_LINK, Job

    if args.link == measured.NAME:
        from xsp.bench.timings import Timings

        link = measured.of(Timings.open(args.timings), machine.torch_threads, machine.cpu)
    else:
        link = NO_LINK if args.link is None else collectives.link(args.link)
    step = original if args.batch is None else original.of_batch(args.batch)
    step = step.computing(args.compute)
    if args.loader is not None:
        reading, decode_s, workers = args.loader
        source = None
        if isinstance(reading, Bytes):
            from xsp.bench.timings import Timings

            reading, source = measured.read_time(Timings.open(args.timings), reading)
        step = step.with_loader(reading, decode_s, workers, source)
    job = Job(
        1, link, Algorithm(args.algorithm), args.bucket, step.plan if args.bucket is None else None,
        accumulate=args.accumulate or step.accumulated_batches, sharded=args.sharded,
        straggler=_straggler(args.straggler),
        ranks_per_link=args.on_link, ranks_per_disk=args.on_disk, compress=args.compress,
    )  # fmt: skip
    return step, job


def _straggler(args: tuple[float, str]) -> Straggler:
    from xsp.predict.training import SlowRanks, Straggler

    return Straggler(args[0], SlowRanks(args[1]))
