"""Evaluate models as manifests say: the same evaluation anywhere, and again.

A manifest (YAML) says what to evaluate: model, software, hardware, data and load. Results are kept under the hash of
its canonical form, one directory each.

examples:
  xsp evaluate check resnet18.yaml          what is wrong with it, and who can run it
  xsp evaluate run resnet18.yaml            carry it out, and keep the result
  xsp evaluate list                         what was found
  xsp evaluate compare 4f1c-0001 77aa-0001  two results, and what differs
  xsp evaluate leaderboard --task image-classification
  xsp evaluate run --set builtin            132 manifests that need nothing else
  xsp evaluate pitfalls                     what small differences before the model cost
  xsp evaluate reproduce 4f1c               carry it out again, and judge the difference
  xsp evaluate serve                        all of it in a browser, and over REST
  xsp evaluate agent --ray auto             an agent on this machine of a Ray cluster
  xsp evaluate schema                       the JSON Schema of manifests
"""

from __future__ import annotations

import argparse

from xsp.cli import progress

SUMMARY = "evaluate models as manifests say, and keep the results"

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
"""Second words that are commands of their own."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(given: argparse.Namespace) -> int:
    """Say which parts there are."""
    del given
    from importlib import import_module

    progress.tell("xsp evaluate is several commands; each has its --help:")
    for name, module in PARTS.items():
        progress.tell(f"  xsp evaluate {name:<12} {import_module(module).SUMMARY}")
    return 2
