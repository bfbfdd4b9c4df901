"""Write a run for another viewer, or send it to a receiver of OpenTelemetry's protocol.

With --format a file is written: chrome (Perfetto's page, chrome://tracing), speedscope, folded (the stacks of a flame
graph as text), csv or parquet (the span table, or what --table names). Differences between the file and the recording
are counted.

Without --format the run is sent to Jaeger or to a Collector: each step becomes a trace, and links to a span of the
run itself. The run directory records what was delivered, so an interrupted export continues with --resume, without
loss and without duplicates. The variables OTEL_EXPORTER_OTLP_* and OTEL_SERVICE_NAME apply where no option is given;
put secrets there, not on the command line.

examples:
  xsp export runs/demo --format chrome -o demo.json.gz     for ui.perfetto.dev
  xsp export trace.json.gz --format folded --weight device -o kernels.txt
  xsp export runs/demo --format csv --table A2 -o layers.csv
  xsp export runs/demo                                     localhost:4318
  xsp export runs/demo --to grpc://localhost:4317
  xsp export runs/demo --steps 9,13 --to step.jsonl        to upload in Jaeger
  xsp export runs/demo --resume                            steps not sent yet
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import UsageError, nearest

if TYPE_CHECKING:
    from xsp.otlp.endpoint import ExportOptions as EndpointOptions
    from xsp.otlp.endpoint import OtlpEndpoint
    from xsp.otlp.send import Counts
    from xsp.store.trace import Trace

SUMMARY = "write a run for Perfetto, speedscope and others, or send it to Jaeger or to a Collector"

_SENDING_OPTIONS = (
    "to", "protocol", "header", "insecure", "ca_file", "cert", "key", "compression", "timeout", "service", "timed",
    "resume",
)  # fmt: skip

_UNSUPPORTED_FORMATS = {
    "otlp": "omit --format, and name the target with --to",
    "flame": "write --format folded, from which speedscope.app and flamegraph.pl draw a flame graph",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory; with --format also a trace, or a folder or files with a trace per rank",
    )
    parser.add_argument("--steps", metavar="N[,N…]", help="only these steps")
    file = parser.add_argument_group("a file for another viewer")
    file.add_argument("--format", metavar="NAME", help="write a file: chrome, speedscope, folded, csv, parquet")
    file.add_argument("-o", "--out", type=Path, metavar="FILE", help="the file; .gz compresses")
    file.add_argument("--table", metavar="NAME", help="for csv and parquet: spans (default), merged, or an analysis")
    file.add_argument("--weight", choices=("host", "device"), help="for folded: time of the host (default) or device")
    sending = parser.add_argument_group("sending")
    sending.add_argument(
        "--to",
        metavar="WHERE",
        help="http://HOST:PORT, grpc://HOST:PORT, or a file .jsonl, .pb (default: the variables)",
    )
    sending.add_argument(
        "--protocol",
        choices=("grpc", "http/protobuf", "http/json"),
        help="protocol of http:// and https:// targets (default: http/protobuf)",
    )
    sending.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="header of each request; repeatable",
    )
    sending.add_argument(
        "--insecure", action="store_true", default=None, help="gRPC without TLS, if the target has no scheme"
    )
    sending.add_argument("--ca-file", metavar="FILE", help="certificates to trust, PEM")
    sending.add_argument("--cert", metavar="FILE", help="the client's certificate, PEM")
    sending.add_argument("--key", metavar="FILE", help="the client's key, PEM")
    sending.add_argument("--compression", choices=("gzip", "none"), help="compression of requests (default: none)")
    sending.add_argument("--timeout", type=float, metavar="SECONDS", help="limit for one request (default: 10)")
    sending.add_argument("--service", metavar="NAME", help="services are named NAME.layer, … (default: xsp)")
    sending.add_argument("--timed", action="store_true", help="only timed steps")
    sending.add_argument("--resume", action="store_true", help="only steps that were not delivered yet")
    sending.add_argument(
        "--fold",
        type=int,
        default=10_000,
        metavar="N",
        help="send traces of more than N spans as an overview with details; 0: never (default: 10000)",
    )
    sending.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="how long a request is retried (default: 60, or 1 if nothing listens on this machine)",
    )
    options.add_quiet_option(sending)


def run(args: argparse.Namespace) -> int:
    """Write or send the run, and print the result."""
    from xsp import rundir

    args.run = args.runs[0]
    if args.format is not None:
        return _write(args)
    _refuse(args, ("out", "table", "weight"), "only with --format")
    if len(args.runs) > 1 or (args.run.exists() and not rundir.is_run_directory(args.run)):
        raise UsageError(
            f"{args.run}: only run directories can be sent, one at a time; import it first: xsp import "
            f"{shlex.join(map(str, args.runs))} -o runs/imported"
        )
    from xsp.cli import progress
    from xsp.ingest import presence
    from xsp.otlp import endpoint

    endpoint.check_installed()
    from xsp.otlp import export

    target = args.to or (export.endpoint_to_resume(args.run) if args.resume else endpoint.FROM_ENVIRONMENT)
    receiver = endpoint.endpoint(target, _options(args))
    job = export.Export(
        run=args.run,
        steps=options.steps(args.steps),
        timed=args.timed,
        resume=args.resume,
        trace_spans=args.fold,
        patience_s=args.patience,
    )
    try:
        with progress.progress_bar(args.quiet) as show:
            counts = export.export(job, receiver, show)
    except KeyboardInterrupt:
        progress.warn(
            f"xsp: interrupted; {'no file was written' if receiver.is_file else f'{_resume_command(args)} continues'}"
        )
        return 130
    _print_counts(counts, receiver, args)
    for run in export.runs_in(args.run):
        noted = presence.with_presence_notes(rundir.read_run(run), run, rundir.segments(run))
        progress.warn_of_missing_files(run, noted)
    return 1 if counts.left or counts.rejected else 0


def _write(args: argparse.Namespace) -> int:
    """Write a file, and print what it contains and what it lacks."""
    from xsp import plugins
    from xsp.exporters import contract
    from xsp.ingest import load

    _refuse(args, _SENDING_OPTIONS, "only for sending, not with --format")
    if args.out is None:
        raise UsageError(f"--format {args.format}: name the file to write with -o FILE")
    if args.format in _UNSUPPORTED_FORMATS:
        raise UsageError(f"--format {args.format}: {_UNSUPPORTED_FORMATS[args.format]}")
    formats = plugins.names(contract.GROUP)
    if args.format not in formats:
        hint = nearest(args.format, formats) or f"; there are {', '.join(formats)}"
        raise UsageError(f"--format {args.format}: there is no such format{hint}")
    write: contract.Exporter = plugins.load(contract.GROUP, args.format)
    trace = load.load(args.run if len(args.runs) == 1 else args.runs)
    progress.warn_of_missing_files(args.run, trace.run)
    choice = contract.Choice(
        options.steps(args.steps), contract.Weight(args.weight or "host"), _rows(trace, args.table or "spans")
    )
    outcome = write(trace, args.out, choice)
    for sentence in outcome.sentences():
        progress.warn(f"xsp: {sentence}")
    progress.echo(f"{outcome.spans:,} {'spans' if args.table is None else 'rows'} in {args.out}")
    return 0


def _rows(trace: Trace, name: str) -> str:
    """Return the name of a table in the trace's engine; an analysis becomes a view."""
    from xsp.analyses import ANALYSES

    if name in ("spans", "merged"):
        return name
    analysis = options.find_analysis(name)
    if analysis is None:
        names = ("spans", "merged", *ANALYSES)
        hint = nearest(name, names) or f"; there are {', '.join(names)}"
        raise UsageError(f"--table {name!r}: there is no such table{hint}")
    analysis(trace).create_view("analysis_rows")
    return "analysis_rows"


def _refuse(args: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')}: {reason}")


def _options(args: argparse.Namespace) -> EndpointOptions:
    from xsp.otlp import endpoint

    return endpoint.ExportOptions(
        protocol=args.protocol,
        headers=tuple(args.header),
        timeout_s=args.timeout,
        compression=args.compression,
        insecure=args.insecure,
        ca_file=args.ca_file,
        cert_file=args.cert,
        key_file=args.key,
        service=args.service,
    )


def _print_counts(counts: Counts, receiver: OtlpEndpoint, args: argparse.Namespace) -> None:
    """Print what was sent; print failures on stderr, with the reason and what to type."""
    from xsp.otlp import send

    progress.echo(
        f"{counts.spans:,} spans of {counts.steps} steps in {counts.requests} requests, {counts.bytes / 1e6:.3g} MB, "
        f"{counts.seconds:.3g} s to {receiver.name}"
    )
    page = send.jaeger_page(receiver, counts.trace_id) if counts.trace_id else None
    if page:
        progress.echo(f"one of the traces: {page}")
    for message in counts.messages:
        progress.warn(f"xsp: {message}")
    if counts.rejected:
        progress.warn(f"xsp: {counts.rejected:,} spans were rejected by {receiver.name}")
    if counts.left:
        hint = "" if receiver.is_file else f"; {_resume_command(args)} sends them"
        progress.warn(f"xsp: {counts.left} traces were not delivered to {receiver.name}{hint}")


def _resume_command(args: argparse.Namespace) -> str:
    return f"`xsp export {shlex.quote(str(args.run))} --resume`"
