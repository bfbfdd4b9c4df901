"""Receive spans over OpenTelemetry, without a Collector, and write run directories.

It listens on loopback until it is interrupted (Ctrl-C). A request is acknowledged when its spans are on the disk. All
ranks of a distributed program become one run; spans that are sent twice count once. It ends within 5 seconds; spans
that are not in order by then can be loaded, and the next receiver of the directory puts them in order.

examples:
  xsp serve                              HTTP on 4318, gRPC on 4317
  xsp serve --out runs/today --grpc off
  xsp export runs/demo --to http://localhost:4318
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from xsp.cli import options, progress
from xsp.errors import UsageError

SUMMARY = "receive spans over OpenTelemetry into run directories"

MOST_BYTES = 1 << 30
"""Highest limit of a request; a larger `--max-body` means this one."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("runs/received"),
        metavar="DIR",
        help="directory of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--http", default="127.0.0.1:4318", metavar="HOST:PORT", help="OTLP over HTTP, or off (default: %(default)s)"
    )
    parser.add_argument(
        "--grpc", default="127.0.0.1:4317", metavar="HOST:PORT", help="OTLP over gRPC, or off (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body",
        type=options.size,
        default="64MiB",
        metavar="SIZE",
        help="limit of a request, decompressed (default: %(default)s)",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=64,
        metavar="N",
        help="limit of concurrent connections; a further one takes the place of one that waits for its client, else it "
        "gets 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="limit for the body of a request, and for its answer (default: 30)",
    )


def run(args: argparse.Namespace) -> int:
    """Receive until a signal, then put everything in order."""
    from xsp.connections import ConnectionLimits
    from xsp.receiver.limits import RequestLimits
    from xsp.receiver.server import Receiver, address

    if args.connections < 1 or not 0 < args.timeout < float("inf"):
        raise UsageError("--connections and --timeout must be above 0")
    defaults = ConnectionLimits()
    clients = ConnectionLimits(
        args.connections, header_s=min(args.timeout, defaults.header_s), body_s=args.timeout, answer_s=args.timeout
    )
    limits = RequestLimits(min(args.max_body, MOST_BYTES), clients)
    http, grpc = address(args.http), address(args.grpc)
    if http is None and grpc is None:
        raise UsageError("--http off and --grpc off: nothing would be received; leave one of them on")
    with _signals() as wakeup:  # a second signal ends it at once; received data still loads
        server = Receiver(args.out, http, grpc, limits, lambda line: progress.echo(line, flush=True))
        server.start()
        wakeup.recv(1)
    if not server.close():  # a thread still puts spans in order; the next receiver continues
        sys.stdout.flush()
        os._exit(0)
    return 0


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket on which a byte arrives with the first interrupt or termination.

    The system may deliver a signal to any thread, as it does if the process was stopped when the signal came; then a
    main thread that waits for a lock does not wake up.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer:
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        previous_handlers = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield reader
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
