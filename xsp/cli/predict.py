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
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.cli import options, progress
from xsp.errors import UsageError
from xsp.texts import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from xsp.predict.configurations import Factor
    from xsp.predict.crossvalidation import Evaluation
    from xsp.predict.recorded import RecordedStep
    from xsp.predict.training import Job
    from xsp.run import Machine

SUMMARY = "predict the time of a training step on N ranks"


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
        progress.write_json(text.as_json(prediction))
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
    from xsp.predict.training import SlowRanks, Straggler

    job = Job(
        1, link, Algorithm(args.algorithm), args.bucket, step.plan if args.bucket is None else None,
        accumulate=args.accumulate or step.accumulated_batches, sharded=args.sharded,
        straggler=Straggler(args.straggler[0], SlowRanks(args.straggler[1])),
        ranks_per_link=args.on_link, ranks_per_disk=args.on_disk, compress=args.compress,
    )  # fmt: skip
    return step, job


def names(text: str) -> tuple[str, ...]:
    """Return names of columns: batch,threads."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def count(text: str) -> int:
    """Return the number of resampled fits: at least 20, so that there are percentiles."""
    if not (text.isascii() and text.isdigit() and 20 <= int(text) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 20 to 10000")
    return int(text)


MOST_POINTS = 1_000


def factor_values(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a factor and its values: batch=64,128."""
    name, equals, values = text.partition("=")
    parts = tuple(part.strip() for part in values.split(","))
    if not name.strip() or not equals or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not FACTOR=VALUE, such as batch=64 or batch=64,128")
    return name.strip(), parts


def combinations(fit: Evaluation, values: list[tuple[str, tuple[str, ...]]]) -> list[dict[str, float | str]]:
    """Return all combinations of the given values; a factor with only one recorded value may be omitted.

    Raises:
        UsageError: a name is given twice, a value is not a number, or there are too many combinations.
    """
    from itertools import product
    from math import prod

    from xsp.errors import UsageError

    names = [name for name, _ in values]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"{repeated} is given twice: write {repeated}=A,B for several values")
    if prod(len(texts) for _, texts in values) > MOST_POINTS:
        raise UsageError(f"more than {MOST_POINTS:,} combinations: give fewer values")
    factors = {factor.name: factor for factor in fit.table.factors}
    parsed = [_values(name, texts, factors.get(name)) for name, texts in values]
    constants: dict[str, float | str] = {
        factor.name: factor.low if factor.is_numeric else factor.levels[0]
        for factor in factors.values()
        if (factor.low == factor.high if factor.is_numeric else len(factor.levels) == 1)
    }
    return [{**constants, **dict(zip(names, combination, strict=True))} for combination in product(*parsed)]


def _values(name: str, texts: tuple[str, ...], factor: Factor | None) -> list[float | str]:
    """Return the values of a factor; a recorded text may have commas itself (`layers=64,64`)."""
    if factor is not None and factor.is_numeric:
        return [_value(factor, text) for text in texts]
    levels = () if factor is None else factor.levels
    matches = [level for level in levels if tuple(part.strip() for part in level.split(",")) == texts]
    return [*(matches[:1] or texts)]


def _value(factor: Factor, text: str) -> float:
    """Return a number in the unit of a factor; it may have that unit, or one that can be converted to it."""
    from xsp.errors import UsageError
    from xsp.predict import quantities

    found = quantities.quantity(text)
    scales = quantities.scales({found.unit, factor.unit}) if found is not None and found.unit else None
    if found is None or (found.unit and (scales is None or not factor.unit)):
        unit = f", or one with a unit such as {factor.unit}" if factor.unit else ""
        raise UsageError(f"{factor.name}={text} is not a number above 0{unit}")
    return found.number * (scales[found.unit] / scales[factor.unit] if scales else 1.0)


def seconds(text: str) -> float:
    """Return a number of seconds, at least 0."""
    value = parse_seconds(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


class Fit:
    """Fit a model of step times to recorded configurations, and test it on held-out configurations.

    Sources are tables (CSV, JSON, Parquet; a row for each configuration, with a column of times) and runs. The model is
    t = (Σ a·I^p) · (Π E^q) + C: intrinsic columns are added up, all others multiply. It is used only if its error on
    held-out groups of configurations is below that of each baseline, such as the nearest configuration, a power law or
    ridge regression; otherwise the best baseline is used. The fit is kept in a file for `xsp predict at` and
    `xsp predict next`.

    examples:
      xsp predict fit table.csv --time step_ms
      xsp predict fit table.csv --intrinsic filters,kernel --extrinsic batch,threads
      xsp predict fit table.parquet --each model --group machine
      xsp predict fit runs/sweep-1 runs/sweep-2 --extrinsic batch,threads
    """

    SUMMARY = "fit step times to recorded configurations"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("sources", nargs="+", metavar="SOURCE", help="tables and runs; directories hold runs")
        parser.add_argument(
            "--time", metavar="COLUMN", help="column of times (default: step_s, step_ms, seconds, ms, …)"
        )
        parser.add_argument(
            "--unit", choices=("s", "ms", "us", "ns"), help="unit of the times (default: the end of the column's name)"
        )
        parser.add_argument("--intrinsic", type=names, default=(), metavar="A,B", help="columns that are added up")
        parser.add_argument(
            "--extrinsic", type=names, default=(), metavar="A,B", help="columns that multiply (default: all others)"
        )
        parser.add_argument(
            "--category", type=names, default=(), metavar="A,B", help="columns whose numbers are categories"
        )
        parser.add_argument("--each", metavar="COLUMN", help="fit a separate model for each value of this category")
        parser.add_argument(
            "--group", type=names, default=(), metavar="A,B",
            help="rows equal in these are held out together (default: equal configurations)"
        )  # fmt: skip
        parser.add_argument(
            "--resamples",
            type=count,
            default=200,
            metavar="N",
            help="number of resampled fits for intervals (default: 200)",
        )
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="seed of search and resampling (default: 0)"
        )
        parser.add_argument(
            "-o", "--out", type=Path, metavar="FILE", help="where the fit is kept (default: xsp-fit.json)"
        )
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Fit a model, judge it, store it, and print it."""
        from dataclasses import replace

        from xsp.errors import UsageError
        from xsp.predict import configurations, crossvalidation, fitfile, fittext, fromruns

        if args.seed < 0:
            raise UsageError(f"--seed {args.seed}: give a number of 0 or more")
        path = args.out or Path(fitfile.NAME)
        fitfile.check(path)  # before a fit, which takes long
        options.check_writable(path)
        rows, omitted = fromruns.rows(args.sources)
        factor_columns = (*args.intrinsic, *args.extrinsic)
        required = (*factor_columns, *((args.each,) if args.each else ()))
        columns, notes = (required if factor_columns else ()), list(omitted)
        if required and not args.extrinsic:  # columns that are not named multiply
            full_table = configurations.of_rows(rows, args.time, args.unit, (), args.category, args.group)
            columns = tuple(
                dict.fromkeys((*factor_columns, *(factor.name for factor in full_table.factors), *required))
            )
            notes = [*full_table.notes, *notes]
        table = configurations.of_rows(rows, args.time, args.unit, columns, args.category, args.group)
        table = replace(table, notes=tuple(dict.fromkeys((*table.notes, *notes))))
        split = crossvalidation.split_of(table, args.intrinsic, args.extrinsic, args.each)
        fit = crossvalidation.judge(table, split, args.seed, args.resamples)
        fitfile.write(fit, path)
        if args.format == "json":
            progress.write_json(fittext.as_json(fit))
        else:
            progress.echo(f"{fittext.page(fit)}\nkept in {path}")
        return 0


class At:
    """Predict how long a step takes in configurations that were not recorded, from a fit of `xsp predict fit`.

    Give each factor of the fit one value or several. The interval comes from resampled fits and the errors of held-out
    configurations. Configurations outside the recorded ranges are marked as extrapolated.

    examples:
      xsp predict at batch=64 threads=2
      xsp predict at batch=64,128,256 threads=1,2
      xsp predict at batch=64 threads=2 --fit cnn.json --format json
    """

    SUMMARY = "predict the time of other configurations from a fit"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "values", nargs="+", type=factor_values, metavar="FACTOR=VALUE", help="a factor with one value or several"
        )
        options.add_fit_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Predict the configurations, and print the predictions."""
        from xsp.predict import crossvalidation, fitfile, fittext

        fit = fitfile.read(args.fit or Path(fitfile.NAME))
        predictions = crossvalidation.predict(fit, combinations(fit, args.values))
        if args.format == "json":
            progress.write_json(fittext.points_json(fit, predictions))
        else:
            progress.echo(fittext.points_text(fit, predictions))
        return 0


class Next:
    """Propose configurations to record next: those that reduce the uncertainty of a fit most for the time they take.

    Candidates are the combinations of recorded values that were not recorded. With FACTOR=VALUE for each factor, the
    uncertainty of this one configuration counts.

    examples:
      xsp predict next
      xsp predict next --count 10 --steps 50 --start 20
      xsp predict next batch=512 threads=2 --fit cnn.json
    """

    SUMMARY = "propose configurations to record next"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "values", nargs="*", type=factor_values, metavar="FACTOR=VALUE", help="the configuration to predict"
        )
        options.add_fit_option(parser)
        parser.add_argument(
            "--count", type=options.positive_int, default=5, metavar="N", help="number of proposals (default: 5)"
        )
        parser.add_argument(
            "--steps", type=options.positive_int, default=100, metavar="N", help="steps per recording (default: 100)"
        )
        parser.add_argument(
            "--start", type=seconds, default=5.0, metavar="SECONDS", help="start-up time of each recording (default: 5)"
        )
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Choose configurations, and print them."""
        from xsp.errors import UsageError
        from xsp.predict import fitfile, fittext, nextrun

        fit = fitfile.read(args.fit or Path(fitfile.NAME))
        point = None
        if args.values:
            points = combinations(fit, args.values)
            if len(points) > 1:
                raise UsageError("xsp predict next takes one configuration: one value for each factor")
            point = points[0]
        proposals = nextrun.choose(fit, min(args.count, 1_000), point, args.steps, args.start)
        if args.format == "json":
            progress.write_json(fittext.proposals_json(fit, proposals))
        else:
            progress.echo(fittext.proposals_text(fit, proposals, point))
        return 0


PARTS: dict[str, Any] = {
    "fit": Fit,
    "at": At,
    "next": Next,
}
"""Subcommands by name; a run with such a name is typed as ./fit."""
