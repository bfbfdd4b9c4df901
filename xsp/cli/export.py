"""Send a run to a receiver of OpenTelemetry's protocol: Jaeger, a Collector, or a file.

Each step becomes a trace, and links to a span of the run itself. What was delivered is kept in the run
directory, so an export that was broken off goes on with --resume, without loss and without duplicates.

The variables OTEL_EXPORTER_OTLP_* and OTEL_SERVICE_NAME count where no option is given; secrets are better
there than on a command line.

examples:
  xsp export runs/resnet50                                 to http://localhost:4318, or as the variables say
  xsp export runs/resnet50 --to grpc://localhost:4317
  xsp export runs/resnet50 --steps 9,13 --to step.jsonl    a file that Jaeger's page can upload
  xsp export runs/resnet50 --resume                        what is still missing, to where it was sent before
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options

if TYPE_CHECKING:
    from xsp.exporters.courier import Counts
    from xsp.exporters.endpoint import Endpoint
    from xsp.exporters.endpoint import Options as EndpointOptions

SUMMARY = "send a run to Jaeger or to a Collector, over OTLP"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a directory of runs")
    parser.add_argument(
        "--to",
        metavar="WHERE",
        help="http://HOST:PORT, grpc://HOST:PORT, or a file .jsonl, .pb (default: the variables)",
    )
    parser.add_argument(
        "--protocol", choices=("grpc", "http/protobuf", "http/json"), help="where the URL leaves it open"
    )
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="gRPC without TLS, where the URL leaves it open"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust, PEM")
    parser.add_argument("--cert", metavar="FILE", help="the client's certificate, PEM")
    parser.add_argument("--key", metavar="FILE", help="the client's key, PEM")
    parser.add_argument("--compression", choices=("gzip", "none"), help="of requests (default: none)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of one request (default: 10)")
    parser.add_argument("--service", metavar="NAME", help="services are called NAME.layer, … (default: xsp)")
    parser.add_argument("--steps", metavar="N[,N…]", help="only these steps")
    parser.add_argument("--timed", action="store_true", help="only steps whose times count")
    parser.add_argument("--resume", action="store_true", help="only what was not delivered yet")
    parser.add_argument(
        "--fold",
        type=int,
        default=10_000,
        metavar="N",
        help="from N spans on, an overview and details; 0: never (10000)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a request is tried again (default: 60)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run(given: argparse.Namespace) -> int:
    """Send, and say what became of it."""
    from xsp.cli import progress
    from xsp.exporters import endpoint

    endpoint.check_installed()
    from xsp.exporters import export

    target = given.to or (export.endpoint_to_resume(given.run) if given.resume else endpoint.FROM_ENVIRONMENT)
    to = endpoint.endpoint(target, _options(given))
    what = export.Export(
        run=given.run,
        steps=options.steps(given.steps),
        timed=given.timed,
        resume=given.resume,
        trace_spans=given.fold,
        patience_s=given.patience,
    )
    try:
        with progress.shown(given.quiet) as show:
            counts = export.export(what, to, show)
    except KeyboardInterrupt:
        print(f"xsp: broken off; `xsp export {given.run} --resume` goes on", file=sys.stderr)
        return 130
    _say(counts, to, given)
    return 1 if counts.left or counts.rejected else 0


def _options(given: argparse.Namespace) -> EndpointOptions:
    from xsp.exporters import endpoint

    return endpoint.Options(
        protocol=given.protocol,
        headers=tuple(given.header),
        timeout_s=given.timeout,
        compression=given.compression,
        insecure=given.insecure,
        ca_file=given.ca_file,
        cert_file=given.cert,
        key_file=given.key,
        service=given.service,
    )


def _say(counts: Counts, to: Endpoint, given: argparse.Namespace) -> None:
    """Print what was sent; what was not goes to stderr with the reason and what to type."""
    from xsp.exporters import otlp

    print(
        f"{counts.spans:,} spans of {counts.steps} steps in {counts.requests} requests, {counts.bytes / 1e6:.3g} MB, "
        f"{counts.seconds:.3g} s to {to.name}"
    )
    page = otlp.jaeger_page(to, counts.trace_id) if counts.trace_id else None
    if page:
        print(f"one of them: {page}")
    for message in counts.messages:
        print(f"xsp: {message}", file=sys.stderr)
    if counts.rejected:
        print(f"xsp: {counts.rejected:,} spans were rejected by {to.name}", file=sys.stderr)
    if counts.left:
        again = f"`xsp export {given.run} --resume` sends them"
        print(f"xsp: {counts.left} traces were not delivered to {to.name}; {again}", file=sys.stderr)
