"""Serve evaluations in a browser and over REST: results, comparisons, new evaluations and their progress.

It listens on loopback until Ctrl-C. Evaluations run one at a time, each in a separate process. A manifest that arrives
in this way can only name a model with weights from a seed and synthetic data: no code of it is executed, and no file is
read. /api/openapi.json describes the REST interface.

examples:
  xsp evaluate serve
  xsp evaluate serve --store results --port 9000
  xsp evaluate serve --ray auto            agents of a Ray cluster run evaluations too
"""

from __future__ import annotations

import argparse
import os
import socket

from xsp.cli import evaluate_run, progress
from xsp.errors import UsageError

SUMMARY = "show evaluations in a browser, and over REST"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    evaluate_run.add_store_option(parser, "--folder")
    parser.add_argument("--port", type=int, default=8610, metavar="N", help="port to listen on; 0: any (default: 8610)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen on; everyone who reaches it can evaluate models (default: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster whose agents run evaluations too; auto finds it")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    from xsp.evaluate import transports
    from xsp.evaluate.web import app

    if args.store.exists() and not args.store.is_dir():
        raise UsageError(f"--store {args.store}: this is a file; name the folder of results")
    agents = [
        transports.SubprocessAgent(),
        *(evaluate_run.find_cluster_agents(args.ray) if args.ray is not None else []),
    ]
    try:
        family, *_, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((address[0], args.port), family=family, backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number is not None and number > 0 else str(error)
        raise UsageError(f"--port {args.port}: cannot listen on {args.host} ({reason}); name another port") from error
    with listener:
        port = listener.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        progress.echo(f"serving {args.store} at http://{host}:{port}/; Ctrl-C ends it", flush=True)
        try:
            app.server(args.store, args.host, port, agents).run(sockets=[listener])
        except KeyboardInterrupt:
            return 0
    return 0
