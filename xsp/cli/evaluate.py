"""Evaluate models by manifests, so that an evaluation can be repeated and compared.

A manifest is a YAML file that says what to evaluate: model, software, hardware, data and load. Each result has a
directory, named after the hash of the manifest.

examples:
  xsp evaluate check resnet18.yaml          check it, and whether it can run here
  xsp evaluate run resnet18.yaml            run it, and keep the result
  xsp evaluate list                         list the results
  xsp evaluate compare 4f1c-0001 77aa-0001  compare two results
  xsp evaluate leaderboard --task image-classification
  xsp evaluate run --set builtin            132 manifests that need nothing else
  xsp evaluate pitfalls                     effects of preprocessing
  xsp evaluate reproduce 4f1c               run it again: same or different?
  xsp evaluate serve                        all of it in a browser, and over REST
  xsp evaluate agent --ray auto             start an agent of a Ray cluster here
  xsp evaluate schema                       the JSON Schema of manifests
"""

from __future__ import annotations

import argparse

from xsp.cli import progress

SUMMARY = "evaluate models by manifests, and keep the results"

PARTS = {
    "check": "xsp.cli.evaluate_check",
    "run": "xsp.cli.evaluate_run",
    "agent": "xsp.cli.evaluate_agent",
    "agents": "xsp.cli.evaluate_agents",
    "list": "xsp.cli.evaluate_list",
    "compare": "xsp.cli.evaluate_compare",
    "leaderboard": "xsp.cli.evaluate_leaderboard",
    "reproduce": "xsp.cli.evaluate_reproduce",
    "pitfalls": "xsp.cli.evaluate_pitfalls",
    "serve": "xsp.cli.evaluate_serve",
    "schema": "xsp.cli.evaluate_schema",
}
"""Modules of the subcommands, by name."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """List the subcommands."""
    del args
    from importlib import import_module

    progress.echo("xsp evaluate is several commands; each has its --help:")
    for name, module in PARTS.items():
        progress.echo(f"  xsp evaluate {name:<12} {import_module(module).SUMMARY}")
    return 2
