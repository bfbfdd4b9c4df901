"""List the agents of a Ray cluster, with their hardware, software and labels.

examples:
  xsp evaluate agents --ray auto
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import options, progress

SUMMARY = "list the agents of a Ray cluster"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--ray", required=True, metavar="ADDRESS", help="address of the cluster; auto finds it")
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """List the agents."""
    from xsp.evaluate import rayagents, results, tables
    from xsp.terminal import column_lines

    rayagents.connect(args.ray)
    agents, silent = rayagents.connected_agents()
    facts = [agent.facts() for agent in agents]
    if args.format == "json":
        progress.write(json.dumps([results.plain_facts(info) for info in facts], indent=1) + "\n")
    elif facts:
        rows = [
            (info.name, info.host, str(info.cores), tables.figure(info.memory_gib), ", ".join(info.gpus) or "-",
             info.packages.get("torch", "-"), " ".join(f"{name}={value}" for name, value in info.labels.items()) or "-")
            for info in facts
        ]  # fmt: skip
        header = ("agent", "machine", "cores", "GiB", "GPUs", "torch", "labels")
        progress.echo("\n".join(column_lines(header, rows, 2)))
    elif not silent:
        progress.echo(f"no agents; on each machine: xsp evaluate agent --ray {args.ray}")
    for name, reason in silent.items():
        progress.warn(f"xsp: {name}: {reason}")
    return 0
