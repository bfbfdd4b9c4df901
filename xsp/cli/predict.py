"""Predict how long a training step takes on N data-parallel ranks, from a run or a trace of one rank.

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
  xsp predict runs/train --ranks 1 --format json
  xsp predict fit table.csv                                    from many configurations
  xsp predict at batch=64 threads=2                            a configuration that was not recorded
  xsp predict next                                             which configuration to record next
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import UsageError

if TYPE_CHECKING:
    from xsp.predict.training import Straggler

SUMMARY = "predict the time of a training step on N ranks"

PARTS = {"fit": "xsp.cli.predict_fit", "at": "xsp.cli.predict_at", "next": "xsp.cli.predict_next"}
"""Second words that are commands of their own; a run of such a name is ./fit."""

FORMATS = ("table", "json")

MOST_NUMBERS = 32

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def ranks(text: str) -> tuple[int, ...]:
    """Return numbers of ranks: 2,4,8,64."""
    parts = [each.strip() for each in text.split(",")]
    if (
        not all(each.isascii() and each.isdigit() and 0 < len(each) <= 10 for each in parts)
        or len(parts) > MOST_NUMBERS
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of up to {MOST_NUMBERS} numbers of ranks, such as 2,4,8")
    return tuple(map(int, parts))


def size(text: str) -> int:
    """Return bytes: 25MiB, 100MB, 4096."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _BYTES or not 0 < float(found[1]) * _BYTES[found[2]] < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above 0, such as 25MiB")
    return max(1, round(float(found[1]) * _BYTES[found[2]]))


class Bytes(int):
    """Of a batch, of which storage was timed."""


def loader(text: str) -> tuple[float | Bytes, float, int]:
    """Return seconds of reading (or its bytes) and of decoding a batch, and workers: 5ms,40ms,8 or 12MB,40ms,8."""
    parts = [each.strip() for each in text.split(",")]
    much = Bytes(size(parts[0])) if re.fullmatch(r"\d+(?:\.\d+)?\s*[kmg]?i?b", parts[0].lower()) else None
    times = [
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)", each)
        for each in ("0s" if much is not None else parts[0], *parts[1:2])
    ]
    if len(parts) != 3 or None in times or not re.fullmatch(r"\d{1,4}", parts[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no loader: READ,DECODE,WORKERS of a batch, such as 5ms,40ms,8 or 12MB,40ms,8"
        )
    read, decode = (float(each[1]) * _TIMES[each[2]] for each in times if each is not None)
    return read if much is None else much, decode, int(parts[2])


def straggler(text: str) -> tuple[float, str]:
    """Return how much slower, and who: 1.3, 1.3:turns, 1.3:together."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(?::(one|turns|together))?", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor above 0, such as 1.3, 1.3:turns or 1.3:together")
    return float(found[1]), found[2] or "one"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", help="a run of a training program, or a trace that xsp imports")
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
    parser.add_argument("--timings", type=Path, metavar="DIR", help="folder of timings (default: that of xsp bench)")
    parser.add_argument(
        "--algorithm",
        default="auto",
        choices=("auto", "ring", "double-tree", "halving-doubling", "recursive-doubling", "binary-tree"),
        help="algorithm of the all-reduce (default: auto, the faster of ring and double-tree for each bucket)",
    )
    parser.add_argument(
        "--bucket", type=size, metavar="SIZE", help="size of gradient buckets (default: 25MiB, the first 1MiB)"
    )
    parser.add_argument(
        "--batch", type=options.rows, metavar="N", help="samples per batch and rank (default: as recorded)"
    )
    parser.add_argument(
        "--accumulate", type=options.rows, metavar="N", help="batches per update (default: as recorded)"
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
    parser.add_argument("--on-link", type=options.rows, default=1, metavar="N", help="ranks that share a link")
    parser.add_argument("--on-disk", type=options.rows, default=1, metavar="N", help="ranks that share a disk")
    parser.add_argument(
        "--gradients", type=size, metavar="SIZE", help="bytes of all gradients, for a trace that does not have them"
    )
    parser.add_argument(
        "--chakra",
        type=Path,
        metavar="DIR",
        help="write the step on the largest number of ranks as Chakra traces, rank.N.et",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default) or json")


def run(given: argparse.Namespace) -> int:
    """Predict, and show it."""
    from dataclasses import replace

    from xsp.ingest import load
    from xsp.predict import collectives, measured, recorded, scaling, text
    from xsp.predict.collectives import Algorithm
    from xsp.predict.training import NO_LINK, Job

    if given.link is None and max(given.ranks) > 1:
        raise UsageError(
            "several ranks need a link: --link nvlink4, --link 30us,1.2GB/s or a file; "
            f"there are {', '.join(collectives.LINKS)}"
        )
    trace = load.load(given.run)
    if given.link == measured.NAME:
        from xsp.bench.timings import Timings

        link = measured.of(Timings.open(given.timings), trace.run.machine.torch_threads)
    else:
        link = NO_LINK if given.link is None else collectives.link(given.link)
    step = original = recorded.of(trace, given.gradients)
    if given.batch is not None:
        step = step.of_batch(given.batch)
    if given.loader is not None:
        read, decode, workers = given.loader
        if isinstance(read, Bytes):
            from xsp.bench.timings import Timings

            read, told = measured.reading(Timings.open(given.timings), read)
            step = replace(step, told=(*step.told, told))
        made = replace(step.work.input, read=read, decode=decode, workers=workers)
        step = replace(step, work=replace(step.work, input=made))
    job = Job(
        1, link, Algorithm(given.algorithm), given.bucket, step.plan if given.bucket is None else None,
        accumulate=given.accumulate or step.accumulated, sharded=given.sharded, straggler=_straggler(given.straggler),
        on_link=given.on_link, on_disk=given.on_disk,
    )  # fmt: skip
    found = scaling.of(step, job, given.ranks, original)
    text.keep(found, given.run)
    if given.chakra is not None:
        files = scaling.to_chakra(found, given.chakra)
        progress.warn(f"xsp: {files:,} traces in {given.chakra}")
    if given.format == "json":
        progress.put(json.dumps(text.as_json(found), indent=2, allow_nan=False) + "\n")
    else:
        progress.tell(text.page(found))
    return 0


def _straggler(given: tuple[float, str]) -> Straggler:
    from xsp.predict.training import Slow, Straggler

    return Straggler(given[0], Slow(given[1]))
