"""Show the operators of a step as a graph: layers, parameters, FLOPs, bytes, longest path, distinct layers.

Nothing is timed. A model by name runs one step on tensors without values, so it needs neither a device nor memory for
weights; weights are never loaded.

examples:
  xsp graph torchvision:resnet50
  xsp graph timm:vit_tiny_patch16_224 --batch 8
  xsp graph transformers:bert --sequence 64 --train
  xsp graph transformers:bert --train --device cuda     the operators of a GPU, without one
  xsp graph transformers:gpt2 --decode 512              a language model adds the 512th token
  xsp graph torchvision:resnet50 --save resnet50.json   keep it; a saved graph is a source too
  xsp graph resnet50.json --format json
  xsp graph resnet50.json --html resnet50.html          a page with a tree of modules
  xsp graph model.onnx --batch 8
  xsp graph program.pt2
  xsp graph runs/demo                                   a run, or a trace of another profiler
  xsp graph runs/demo --compare torchvision:resnet50    calls and measures that differ
  xsp graph file.py:model --by export --compare file.py:model    the graph of torch.export
  xsp graph torchvision:resnet50 --section runs/demo    add it to the report of a run
  xsp graph file.py:model --rewrite                     calls that could be removed
  xsp graph --all torchvision,timm --out corpus         all models; run it again to continue
  xsp graph corpus                                      which layers they share
  xsp graph corpus --only 'torchvision:resnet*'         the same for some models
  xsp graph corpus --against latencies.csv              which measure correlates with latency
"""

from __future__ import annotations

import argparse
import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import sections
from xsp.cli import INTERRUPTED, options, progress
from xsp.errors import UsageError

if TYPE_CHECKING:
    from xsp.graph.node import Graph

SUMMARY = "show the operators of a model, their data flow and measures"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="torchvision:NAME, timm:NAME, transformers:NAME, path/to/file.py:function, an ONNX file, a program of "
        "torch.export (.pt2), a run or a trace (a file, or several with a trace per rank), a saved graph, or a folder "
        "that --all wrote",
    )
    options.add_step_options(parser)
    options.add_size_option(parser)
    options.add_phase_options(parser)
    options.add_seed_option(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="take the operators of this device, cuda, which need not be here (default: cpu)",
    )
    parser.add_argument(
        "--all",
        metavar="SOURCES",
        help="capture all models of torchvision, timm, transformers or micro; several with commas",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="with --all: the folder; existing graphs are kept"
    )
    parser.add_argument(
        "--only",
        metavar="PATTERNS",
        help="of a folder that --all wrote: only models with these names, 'timm:vit*,timm:deit*'",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CSV",
        help="of such a folder: correlate measures with latencies; columns model, latency_ms, device, batch, threads",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the graph as JSON; xsp graph reads it again")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page: measures and a tree of modules; for a folder, its charts",
    )
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write it for Graphviz: dot -Tsvg FILE")
    parser.add_argument("--section", type=Path, metavar="RUN", help="add it to the report of this run")
    parser.add_argument(
        "--compare", metavar="OTHER", help="print the differences to another source, with the same options"
    )
    parser.add_argument(
        "--by",
        choices=("capture", "export"),
        default="capture",
        help="capture runs the step and records its operators (default); export uses torch.export, to --compare with",
    )
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="print calls that could be removed or replaced, and the measures before and after",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=2,
        metavar="N",
        help="levels of modules in the table of modules (default 2; 0: no table)",
    )
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Make the graph, and show or write it."""
    from xsp.device import devices
    from xsp.graph import corpus
    from xsp.graph.node import Source

    args.source = args.sources[0] if args.sources else None
    if (args.all is None) == (args.source is None):
        raise UsageError("give one SOURCE, or --all SOURCES --out DIR")
    if args.all is not None:
        return _corpus(args)
    if args.depth < 0:
        raise UsageError(f"--depth {args.depth}: give a number of levels, 0 or more")
    if args.out is not None:
        raise UsageError("--out is for --all; use --save FILE for a single graph")
    if os.path.isfile(Path(args.source) / corpus.FILE):  # the source may be too long for a path
        return _show_shared_layers(args)
    if args.only is not None or args.against is not None:
        raise UsageError("--only and --against are for a folder that --all wrote")
    # before the graph, which may take long
    outputs = [name for name in ("html", "dot", "section", "compare") if getattr(args, name) is not None]
    if args.rewrite and outputs:
        raise UsageError(f"--{outputs[0]}: not with --rewrite; save the graph with --save FILE, and show the file")
    if args.section is not None:
        sections.check(args.section)
    options.check_writable(args.save, args.html, args.dot)
    graph = _graph(args, options.one_subject(args.sources), compared_source=args.compare, method=args.by)
    if args.device is None and graph.source is Source.CAPTURED and (here := devices.accelerators()):
        names = ", ".join(dict.fromkeys(device.name for device in here))
        progress.warn(f"xsp: the operators are those of the processor, not of {names}: --device {here[0].kind}")
    if args.rewrite:
        return _show_rewrite(args, graph)
    if args.save is not None:
        graph.save(args.save)
    if args.html is not None:
        from xsp.graph import section
        from xsp.report import html

        html.write_sections(args.html, graph.name, [section.section(graph)])
    if args.dot is not None:
        from xsp.graph import dot

        dot.write(graph, args.dot)
    if args.section is not None:
        from xsp.graph import section

        section.write(graph, args.section)
    if args.compare is not None:
        return _show_difference(args, graph)
    if args.format == "json":
        from xsp.graph.measures import as_json

        progress.write_json(as_json(graph))
    else:
        from xsp import terminal
        from xsp.graph import section

        progress.echo(terminal.page(section.section(graph, args.depth), most_rows=section.MOST_MODULES))
    return 0


def _graph(args: argparse.Namespace, source: Any, compared_source: str | None = None, method: str = "capture") -> Graph:
    """Return the graph of a source, without the options that only the compared source (`compared_source`) takes."""
    from xsp.graph import sources

    settings = {**options.step_options(args), "by": method, "device": args.device}
    unsupported = (
        sources.supported_options(compared_source) - sources.supported_options(source) - {"by"}
        if compared_source is not None
        else frozenset()
    )
    return sources.of(
        source, seed=args.seed, **{name: value for name, value in settings.items() if name not in unsupported}
    )


def _show_rewrite(args: argparse.Namespace, graph: Graph) -> int:
    """Show the calls that a graph does not need, and save the graph without them."""
    from xsp import terminal
    from xsp.graph import rewrite

    result = rewrite.of(graph)
    if args.save is not None:
        result.graph.save(args.save)
    if args.format == "json":
        progress.write_json(rewrite.as_json(result))
    else:
        progress.echo(terminal.page(rewrite.section(result)))
    return 0


def _show_difference(args: argparse.Namespace, graph: Graph) -> int:
    """Show the differences between a graph and that of another source."""
    from xsp import terminal
    from xsp.graph import difference

    result = difference.of(graph, _graph(args, args.compare, compared_source=args.source))
    if args.format == "json":
        progress.write_json(result.as_json())
    else:
        progress.echo(terminal.page(difference.section(result)))
    return 0


def _corpus(args: argparse.Namespace) -> int:
    """Make the graphs of all models of some sources, and print the models that fail."""
    from xsp import models
    from xsp.graph import corpus

    if args.out is None:
        raise UsageError("--all writes a graph for each model: give --out DIR")
    excluded = ("save", "html", "dot", "section", "compare", "input", "only", "against", "prefill", "decode", "size")
    conflicting = [f"--{name}" for name in excluded if getattr(args, name) is not None]
    conflicting += _single_graph_options(args)
    if conflicting:
        raise UsageError(f"{', '.join(conflicting)}: not with --all; show the folder afterwards with xsp graph DIR")
    specs = [name for source in args.all.split(",") for name in models.names(source.strip())]
    try:
        with progress.progress_bar(quiet=False) as show:
            rows = corpus.collect(specs, args.out, batch=args.batch or 1, train=args.train, progress=show)
    except KeyboardInterrupt:
        progress.warn(f"xsp: interrupted; finished graphs are kept in {args.out}: run it again to continue")
        return INTERRUPTED
    failed = [row for row in rows if "error" in row]
    if args.format == "json":
        progress.write_json(rows)
        return 0
    for row in failed:
        progress.echo(f"{row['spec']}: {row['error']}")
    progress.echo(f"{len(rows) - len(failed)} of {len(rows)} models captured; measures in {args.out / corpus.FILE}")
    return 0


def _single_graph_options(args: argparse.Namespace) -> list[str]:
    """Return the given options that apply only to a single graph and whose default is not None."""
    defaults = {"by": "capture", "sequence": 128, "rewrite": False, "depth": 2}
    return [f"--{name}" for name, value in defaults.items() if getattr(args, name) != value]


def _show_shared_layers(args: argparse.Namespace) -> int:
    """Show which layers the models of a corpus share, or how its measures correlate with latencies."""
    from xsp import terminal
    from xsp.graph import corpustext, sharing
    from xsp.report import html

    excluded = ("save", "input", "batch", "dot", "section", "compare", "prefill", "decode", "size")
    conflicting = [f"--{name}" for name in excluded if getattr(args, name) is not None]
    conflicting += [*(["--train"] if args.train else []), *_single_graph_options(args)]
    if conflicting:
        raise UsageError(f"{', '.join(conflicting)}: only for one model, not for a folder of graphs")
    options.check_writable(args.html)
    patterns = tuple(filter(None, (args.only or "").split(",")))
    if args.against is not None:
        return _show_correlation(args, patterns)
    with progress.progress_bar(quiet=False) as show:
        shared = sharing.read(Path(args.source), patterns, show)
    if args.html is not None:
        html.write_sections(args.html, Path(args.source).resolve().name, [corpustext.section(shared)])
    if args.format == "json":
        progress.write_json(corpustext.as_json(shared))
    else:
        progress.echo(terminal.page(corpustext.section(shared)))
    return 0


def _show_correlation(args: argparse.Namespace, patterns: Sequence[str]) -> int:
    """Show how latencies in a file correlate with the measures of a corpus."""
    from xsp.bound import correlate, correlatetext, latencies
    from xsp.graph import sharing
    from xsp.report import html

    latency_rows, holes = latencies.read(args.against)
    corpus = sharing.read(Path(args.source), patterns, graphs=False)
    groups = correlate.groups(corpus.rows, latency_rows)
    if not groups:
        raise UsageError(
            f"no model of {args.against} is in {args.source}: the file has names like {latency_rows[0].model!r}, the "
            f"folder like {corpus.rows[0]['spec']!r}"
        )
    notes, omitted = correlate.omissions(corpus.rows, latency_rows, corpus.settings.get("batch"))
    if args.html is not None:
        title = f"{Path(args.source).resolve().name} against {args.against.name}"
        html.write_sections(args.html, title, correlatetext.sections(groups, notes, [*holes, *omitted]))
    if args.format == "json":
        content = {"groups": correlate.as_json(groups), "notes": notes, "holes": [*holes, *omitted]}
        progress.write_json(content)
    else:
        progress.echo(correlatetext.page(groups, notes, [*holes, *omitted]))
    return 0
