"""Time each distinct operator call of a model in isolation, and keep the timings for this machine.

`xsp bench transfers` and `xsp bench collectives` time copies in memory, between processes, to storage, to devices, and
collectives between ranks.

The calls of a model are timed on the processor, even where torch has a GPU, unless --device names it; then whole steps
are timed, too.

The most expensive calls come first. Existing timings are not repeated, even if they were taken for another model. Calls
that cannot be timed are listed, and have no figure. The timings are used by `xsp bound` and `xsp advise`.

examples:
  xsp bench torchvision:resnet50 --budget 60s
  xsp bench timm:vit_tiny_patch16_224 --batch 8 --threads 1,2
  xsp bench transformers:bert --train --budget 3m
  xsp bench torchvision:resnet50 --granularity 1,4      also blocks of four calls
  xsp bench torchvision:resnet50 --variants all         channels-last, without oneDNN, …
  xsp bench torchvision:resnet50 --device cuda:0        on a GPU, and the whole step
  xsp bench --missing-of runs/demo                      the calls of a run
  xsp bench model.onnx --size sequence=128              symbolic dimensions need sizes
  xsp bench transformers:gpt2 --decode 512              the step that adds a token
  xsp bench transfers                                   memory, processes, storage, devices
  xsp bench collectives --ranks 2,4                     gloo on this machine
  xsp bench transfers --families memory --list          existing timings
  xsp bench --list                                      existing timings by environment
  xsp bench --check                                     repeats 20, and compares
  xsp bench --export timings.parquet                    --import FILE reads it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import terminal
from xsp.cli import INTERRUPTED, options, progress
from xsp.errors import UsageError
from xsp.sections import Section, Text

if TYPE_CHECKING:
    from xsp.bench.spec import Spec
    from xsp.bench.timings import Timings
    from xsp.device.contract import Device
    from xsp.graph.node import Graph

SUMMARY = "time each operator call of a model in isolation"

FORMATS = ("table", "json")
STATES = ("warm", "chain", "cold")
TRANSFER_SOURCES = ("transfers", "collectives")
TRANSFER_OPTIONS = ("families", "ranks", "directory", "section")
"""Options of transfers and collectives alone."""

MODEL_OPTIONS = (
    "device",
    "granularity",
    "state",
    "variants",
    "runtime",
    "batch",
    "train",
    "input",
    "size",
    "prefill",
    "decode",
)
"""Options of models, files and runs alone."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="what xsp graph takes: a model by name, a file or a run; or transfers, or collectives",
    )
    parser.add_argument(
        "--budget",
        type=options.duration,
        default="60s",
        metavar="TIME",
        help="time to spend: 90s, 2m (default: %(default)s)",
    )
    parser.add_argument(
        "--missing-of", metavar="RUN", help="in place of SOURCE: the calls of this run, with its number of threads"
    )
    parser.add_argument("--again", action="store_true", help="repeat existing timings too")
    group = parser.add_argument_group("what is timed")
    group.add_argument("--device", metavar="NAME", help="where the calls run, cuda:0 (default: cpu)")
    group.add_argument("--granularity", metavar="N,…", help="calls per block, 1,4 (default: 1)")
    group.add_argument(
        "--state",
        choices=STATES,
        help="state of the caches: chain, as in a step (default); warm; cold",
    )
    group.add_argument("--threads", metavar="N,…", help="numbers of threads, 1,2 (default: all cores)")
    group.add_argument(
        "--variants",
        metavar="NAMES",
        help="other ways to compute the same result: names with commas, or all (default: none)",
    )
    group.add_argument(
        "--runtime",
        metavar="NAME",
        help="what runs the calls (default: torch; of an ONNX file onnxruntime)",
    )
    group = parser.add_argument_group("transfers and collectives")
    group.add_argument(
        "--families",
        metavar="NAMES",
        help="memory, processes, storage, device, or single ones with commas (default: all)",
    )
    group.add_argument("--ranks", metavar="N,…", help="numbers of ranks of collectives (default: 2,3,4)")
    group.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where storage is timed (default: the directory of temporary files)",
    )
    group.add_argument("--section", type=Path, metavar="RUN", help="add the results to the report of this run")
    group = parser.add_argument_group("the model and its input")
    options.add_step_options(group)
    options.add_size_option(group)
    options.add_phase_options(group)
    options.add_seed_option(group)
    group = parser.add_argument_group("the timings")
    options.add_timings_option(group)
    group.add_argument("--list", action="store_true", help="list the existing timings by environment")
    group.add_argument("--check", action="store_true", help="repeat 20 timings, compare, keep nothing")
    group.add_argument("--compact", action="store_true", help="merge the files of this machine into one")
    group.add_argument("--export", type=Path, metavar="FILE", help="write all timings into one file")
    group.add_argument("--import", type=Path, dest="import_", metavar="FILE", help="add the timings of such a file")
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Time missing calls, or show and move existing timings."""
    from xsp.bench.environment import current_environment
    from xsp.bench.timings import Timings
    from xsp.device import devices

    actions = [
        name
        for name in ("source", "missing_of", "list", "check", "compact", "export", "import_")
        if getattr(args, name) not in (None, False)
    ]
    _check_options(args)
    if args.source in TRANSFER_SOURCES and actions in (["source"], ["source", "list"], ["source", "check"]):
        return _run_transfers(args, args.budget)
    if len(actions) != 1:
        raise UsageError("give one SOURCE, or one of --missing-of, --list, --check, --compact, --export, --import")
    seconds = args.budget
    device = None if args.device is None else devices.of(args.device)
    timings = Timings.open(args.timings, None if device is None else current_environment(device))
    if actions[0] in ("source", "missing_of"):
        return _fill(args, timings, seconds, device)
    document, content = {
        "list": _list, "check": _check, "compact": _compact, "export": _export, "import_": _import,
    }[actions[0]](args, timings, seconds)  # fmt: skip
    _show(args, document, content)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not belong to what is timed, which would otherwise be ignored.

    Raises:
        UsageError: names the option and the command that it belongs to.
    """
    is_transfer = args.source in TRANSFER_SOURCES
    for name in MODEL_OPTIONS if is_transfer else TRANSFER_OPTIONS:
        if getattr(args, name) not in (None, False, {}, []):
            command = "xsp bench MODEL" if is_transfer else f"xsp bench {' or '.join(TRANSFER_SOURCES)}"
            raise UsageError(f"--{name} belongs to {command}, not to {args.source or 'this command'}: omit it")


def _fill(args: argparse.Namespace, timings: Timings, seconds: float, device: Device | None) -> int:
    from xsp import bench
    from xsp import graph as graphs
    from xsp.bench import plan, steps, text
    from xsp.graph import sources
    from xsp.graph.node import Source

    environment = timings.environment
    if environment.device is not None and (args.threads is not None or args.runtime is not None):
        raise UsageError(f"--threads and --runtime are of the processor: omit them, or --device {args.device}")

    # all options are read first: a graph may take long
    granularities, variants = _numbers("--granularity", args.granularity or "1"), _variants(args.variants)
    if args.threads is not None:
        _numbers("--threads", args.threads)
    plan.check_names(variants, () if args.runtime is None else (args.runtime,))
    graph = graphs.of(
        args.missing_of or args.source,
        **options.step_options(args),
        seed=args.seed,
        device=args.device if "device" in sources.supported_options(args.missing_of or args.source) else None,
    )
    pairs = [
        pair
        for threads in _threads(args)
        for granularity in granularities
        for pair in bench.specs(
            graph,
            granularity=granularity,
            state=args.state or "chain",
            threads=threads,
            variants=variants,
            runtime=args.runtime or plan.runtime_of(graph),
            environment=environment,
        )
    ]
    if environment.device is not None:
        if graph.source is Source.ONNX:
            raise UsageError(f"{graph.name}: nodes of ONNX are timed on the processor: omit --device")
        model, settings = _model(args, graph)
        if model:
            pairs = [(spec, 1) for spec in steps.specs(graph, model, settings)] + pairs
    start = time.monotonic()
    start_seconds: list[float] = []
    try:
        with progress.progress_bar(quiet=False) as show:
            result = bench.fill(
                pairs, timings, seconds, show, again=args.again, on_start=start_seconds.append, device=device
            )
    except KeyboardInterrupt:
        progress.warn("xsp: interrupted; all finished timings are kept: run it again to continue")
        return INTERRUPTED
    summary = graph.name, pairs, timings, result, time.monotonic() - start, sum(start_seconds)
    _show(args, text.fill_document(*summary), text.fill_as_json(*summary))
    return 0


def _model(args: argparse.Namespace, graph: Graph) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of the model that a worker process can build, or nothing for other sources."""
    from xsp.graph.node import Source

    if args.missing_of is not None or graph.source is not Source.CAPTURED or ":" not in args.source:
        return "", {}
    names = ("train", "seed", "sequence", "prefill", "decode")
    settings = {name: value for name in names if (value := getattr(args, name)) is not None}
    return args.source, {**settings, "batch": args.batch or 1, "shape": options.shape(args.input)}


def _run_transfers(args: argparse.Namespace, seconds: float) -> int:
    """Time transfers or collectives, or show their existing timings."""
    from xsp import sections
    from xsp.bench import curvetext, links, text
    from xsp.bench.timings import Timings

    if args.section is not None:
        sections.check(args.section)
    timings = Timings.open(args.timings)
    request = links.plan_transfers(
        timings, args.source, args.families, _numbers("--ranks", args.ranks or "2,3,4"),
        None if args.threads is None else _numbers("--threads", args.threads), args.directory,
        for_timing=not (args.list or args.check),
    )  # fmt: skip
    if args.check:
        with links.storage_folder(request.directory):
            _show(args, *_check(args, timings, seconds, request.includes))
        return 0
    start, count = time.monotonic(), 0
    if not args.list:
        for reason in request.refusals if args.format == "table" else ():
            progress.warn(f"xsp: {reason}")
        try:
            with progress.progress_bar(quiet=False) as show:
                count = links.fill(request, timings, seconds, show, again=args.again)
        except KeyboardInterrupt:
            progress.warn("xsp: interrupted; all finished timings are kept: run it again to continue")
            return INTERRUPTED
    curves, missing = links.existing_curves(request, timings)
    summary = args.source, timings, curves, None if args.list else time.monotonic() - start, missing, count
    if args.section is not None:
        sections.write(args.section, curvetext.SECTION[args.source], curvetext.section(args.source, timings, curves))
    lacks: list[str] = []
    if args.source == "collectives" and args.families is None:
        from xsp.predict import measured

        thread_counts = (1,) if args.threads is None else _numbers("--threads", args.threads)
        ranks = _numbers("--ranks", args.ranks or "2,3,4")
        lacks = [sentence for count in thread_counts for sentence in measured.missing(curves, ranks, count)]
    hint = ["run it again with a longer --budget, or fewer --ranks"] if lacks else []
    document = curvetext.document(*summary)
    document = Section(document.title, (*document.parts, *text.problems(timings), *map(Text, [*lacks, *hint])))
    content = {**curvetext.as_json(*summary), "refused": list(request.refusals), "predict_lacks": lacks}
    _show(args, document, content, most_rows=1000)
    return 0


def _threads(args: argparse.Namespace) -> list[int | None]:
    """Return the requested numbers of threads; else that of the run; else None for all cores."""
    if args.threads is not None:
        return list(_numbers("--threads", args.threads))
    if args.missing_of is None or args.device not in (None, "cpu"):
        return [None]
    from xsp.ingest.load import load

    return [load(args.missing_of).run.machine.torch_threads]


def _variants(text: str | None) -> tuple[str, ...]:
    from xsp.bench.spec import AS_RUN

    if text is None:
        return (AS_RUN,)
    if text == "all":
        from xsp.bench.variants import VARIANTS

        return (AS_RUN, *VARIANTS)
    return tuple(dict.fromkeys((AS_RUN, *(name.strip() for name in text.split(",")))))


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10_000 for part in parts):
        raise UsageError(f"{option} {text!r}: write numbers above 0 with commas, 1,4")
    return list(dict.fromkeys(map(int, parts)))


def _list(args: argparse.Namespace, timings: Timings, seconds: float) -> tuple[Section, Any]:
    from xsp.bench import text

    return text.list_document(timings), text.list_as_json(timings)


def _check(
    args: argparse.Namespace, timings: Timings, seconds: float, is_included: Callable[[Spec], bool] = lambda spec: True
) -> tuple[Section, Any]:
    from xsp.bench import repeatability, text
    from xsp.device import devices

    runtime = args.source if args.source in TRANSFER_SOURCES else None
    with progress.progress_bar(quiet=False) as show:
        device = None if args.device is None else devices.of(args.device)
        result = repeatability.check(timings, seconds, show, runtime=runtime, is_eligible=is_included, device=device)
    return text.check_document(result), text.check_as_json(result)


def _compact(args: argparse.Namespace, timings: Timings, seconds: float) -> tuple[Section, Any]:
    from xsp.bench import text

    parts = timings.compact()
    message = f"{len(timings):,} timings of this machine are now in one file; they were in {parts}"
    if parts and not timings:
        message = f"the {parts} files of this machine are unchanged: none of their timings is valid"
    content = {"timings": len(timings), "parts": parts, "problems": timings.remarks}
    return Section(message, text.problems(timings)), content


def _export(args: argparse.Namespace, timings: Timings, seconds: float) -> tuple[Section, Any]:
    from xsp.bench import text

    count = timings.export(args.export)
    message = f"{count:,} timings written to {args.export}; on another machine: xsp bench --import FILE"
    return Section(message, text.problems(timings)), {"exported": count, "problems": timings.remarks}


def _import(args: argparse.Namespace, timings: Timings, seconds: float) -> tuple[Section, Any]:
    from xsp.bench import text

    count, environments = timings.import_file(args.import_)
    message = f"{count:,} timings of {environments} environments were added to {timings.folder}"
    content = {"imported": count, "environments": environments, "problems": timings.remarks}
    return Section(message, text.problems(timings)), content


def _show(args: argparse.Namespace, document: Section, content: Any, most_rows: int = 12) -> None:
    if args.format == "json":
        progress.write_json(content)
    else:
        progress.echo(terminal.page(document, most_rows=most_rows))
