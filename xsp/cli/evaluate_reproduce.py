"""Run a stored manifest again, and judge whether the result is the same.

Outputs and environment are judged by one repeat, latencies by several, up to --turns. Exit code 0: the same; 1:
different; 3: cannot tell.

examples:
  xsp evaluate reproduce 4f1c2a9b03de-0001
  xsp evaluate reproduce 4f1c --turns 5
  xsp evaluate reproduce 4f1c --label rack=7                 if the manifest requires that label
  xsp evaluate reproduce 4f1c --ray auto --agents rack7      by that agent of a Ray cluster
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import evaluate_run, options, progress
from xsp.errors import UsageError

if TYPE_CHECKING:
    from xsp.evaluate.agents import Agent
    from xsp.evaluate.manifest import Manifest

SUMMARY = "run a stored manifest again, and judge the difference"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("result", metavar="RESULT", help="name or path of a result")
    parser.add_argument(
        "--turns", type=options.positive_int, default=5, metavar="N", help="maximal number of repeats (default: 5)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where files of the manifest are (default: here)"
    )
    parser.add_argument(
        "--agents",
        metavar="NAME",
        help="local or process (default: process, a new one each time); with --ray one of its agents (default: the one "
        "that made the result, if it is there and satisfies the manifest, or any that does)",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster with the agents; auto finds it")
    evaluate_run.add_label_option(parser)
    evaluate_run.add_store_option(parser)
    options.add_format_option(parser)
    options.add_quiet_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the manifest again, and print the judgement."""
    from xsp.evaluate import agents, reading, results, standings, tables

    original = results.find(args.result, args.store)
    manifest = reading.read(original.path / results.MANIFEST).manifest
    agent = _agent(args, manifest, str(original.content["agent"]["name"]))
    settings = agents.Options(args.store, trusted=True)
    repeats: list[results.Result] = []
    with progress.progress_bar(args.quiet) as show:

        def run_again() -> results.Result:
            repeats.append(results.read(agent.submit(manifest, args.folder, settings, show)))
            return repeats[-1]

        judgement = standings.reproduce(original, run_again, args.turns)
    if args.format == "json":
        payload = tables.judgement_json(judgement) | {
            "before": original.name,
            "after": [repeat.name for repeat in repeats],
        }
        progress.write(json.dumps(payload, indent=1) + "\n")
    else:
        times = "once" if len(repeats) == 1 else f"{len(repeats)} times"
        agent_name = agent.facts().name
        progress.echo(f"{original.name}, repeated {times} by {agent_name}: {tables.judgement_text(judgement)}")
    return {"same": 0, "different": 1}.get(judgement.verdict.value, 3)


def _agent(args: argparse.Namespace, manifest: Manifest, original_agent: str) -> Agent:
    """Return the agent that runs a manifest again: on a cluster, the named agent or the one that made the result.

    Raises:
        UsageError: there is no such agent, several are named, or labels are given to agents that have their own.
    """
    from xsp.evaluate import agents, transports

    if args.ray is None:
        candidates = transports.local_agents(args.agents or "process", dict(args.label))
        if len(candidates) != 1:
            raise UsageError("--agents: give one agent to reproduce a result, local or process")
        return candidates[0]
    if args.label:
        raise UsageError("--label is for agents of this machine; agents of --ray have their own labels")
    cluster_agents = evaluate_run.find_cluster_agents(args.ray, None if args.agents is None else [args.agents])
    suitable, reasons = agents.match_agents(manifest, cluster_agents)
    if not suitable:
        details = ". ".join(f"{name}: {'; '.join(misses)}" for name, misses in reasons.items())
        raise UsageError(f"no agent of the cluster satisfies the manifest. {details}")
    return next((agent for agent in suitable if agent.facts().name == original_agent), suitable[0])
