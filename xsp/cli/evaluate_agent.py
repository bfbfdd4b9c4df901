"""Start an agent of a Ray cluster on this machine; it continues when this command ends.

It runs the manifests that `xsp evaluate run --ray ADDRESS` sends to it. Files that manifests name are searched in its
folder; programs that they name run only with --trust.

examples:
  ray start --head                                   a cluster of this machine
  xsp evaluate agent --ray auto --label rack=7
  xsp evaluate agent --ray auto --name second
  xsp evaluate agent --ray auto --stop second
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from xsp.cli import evaluate_run, progress

SUMMARY = "start an agent of a Ray cluster on this machine"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--ray", required=True, metavar="ADDRESS", help="address of the cluster; auto finds it")
    parser.add_argument("--name", metavar="NAME", help="name of the agent (default: that of the machine)")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        type=evaluate_run.label,
        metavar="NAME=VALUE",
        help="label that hardware.labels of a manifest can require",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="folder of files that manifests name (default: here)"
    )
    parser.add_argument("--trust", action="store_true", help="run programs that manifests name")
    parser.add_argument("--stop", metavar="NAME", help="end an agent instead")


def run(args: argparse.Namespace) -> int:
    """Start or end an agent."""
    from xsp.evaluate import rayagents

    rayagents.connect(args.ray)
    if args.stop:
        rayagents.stop(args.stop)
        progress.echo(f"the agent {args.stop} has ended")
        return 0
    facts = rayagents.start(args.name or socket.gethostname(), dict(args.label), args.folder, args.trust)
    progress.echo(f"the agent {facts.name} has started: {facts.cores} cores, {', '.join(facts.gpus) or 'no GPU'}")
    progress.echo(f"next: xsp evaluate run MANIFEST --ray {args.ray} --agents {facts.name}")
    return 0
