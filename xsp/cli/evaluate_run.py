"""Run manifests, and keep the results.

Latencies are measured without recording; a trace is recorded afterwards, in steps of its own. A manifest is given to
one agent, or with --agents all to each that satisfies it; for the others the reasons are printed. Exit code 3: a
manifest was not run.

examples:
  xsp evaluate run resnet18.yaml
  xsp evaluate run resnet18.yaml --agents process          in a process of its own
  xsp evaluate run resnet18.yaml --trace M/L/G --bound     with a trace and a bound
  xsp evaluate run manifests/*.yaml --store results
  xsp evaluate run manifests/*.yaml --ray auto --agents any     on a cluster, each by one agent
  xsp evaluate run --set builtin --missing --seconds 540    run it again to continue
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import UsageError, XspError

if TYPE_CHECKING:
    from xsp.evaluate.agents import Agent, Options
    from xsp.evaluate.reading import LoadedManifest
    from xsp.evaluate.results import Result

SUMMARY = "run manifests, and keep the results"

STORE = Path("evaluations")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("manifest", nargs="*", type=Path, metavar="MANIFEST", help="YAML files")
    parser.add_argument(
        "--set", choices=("builtin",), metavar="NAME", help="builtin: 44 models under three loads, weights from a seed"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only manifests without a result of this software on this machine"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no further manifest after this time")
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that runs manifests."""
    parser.add_argument(
        "--agents",
        default="local",
        metavar="NAMES",
        help="local (this process, default), process (a separate one), or all that satisfy the manifest; with --ray "
        "names of its agents, all, or any (one of them)",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster with the agents; auto finds it")
    parser.add_argument("--trace", default="", metavar="LEVELS", help="also record a trace: M, M/L or M/L/G")
    parser.add_argument("--bound", action="store_true", help="also compute the bound of a batch, see xsp bound")
    add_label_option(parser)
    add_store_option(parser)
    options.add_format_option(parser)
    options.add_quiet_option(parser)


def add_label_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command whose agents are on this machine."""
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        type=label,
        metavar="NAME=VALUE",
        help="label of this machine that hardware.labels of a manifest can require",
    )


def add_store_option(parser: argparse.ArgumentParser, former_name: str | None = None) -> None:
    """Add the option of every command that reads or writes results.

    Args:
        parser: parser of the command.
        former_name: an earlier name of the option, which is still read and not listed.
    """
    parser.add_argument(
        "--store", type=Path, default=STORE, metavar="DIR", help="folder of results (default: evaluations)"
    )
    if former_name is not None:
        parser.add_argument(former_name, dest="store", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def read_results(store: Path) -> list[Result]:
    """Return the results of a store, the newest last, and warn of files that are not results."""
    from xsp.evaluate import results

    stored_results, problems = results.read_all(store)
    for problem in problems:
        progress.warn(f"xsp: {problem}")
    return stored_results


def label(text: str) -> tuple[str, str]:
    """Return name and value of a label, `rack=7`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def run(args: argparse.Namespace) -> int:
    """Run the manifests, and print the results."""
    from xsp.evaluate import builtin, dialects, reading, standings

    entries = [reading.read(path) for path in args.manifest]
    if args.set is not None:
        entries += [reading.LoadedManifest(manifest, dialects.XSP, Path()) for manifest in builtin.manifests()]
    if not entries:
        raise UsageError("name manifests, or a set of them: --set builtin")
    if args.missing:
        manifests = [entry.manifest for entry in entries]
        identities = {manifest.identity for manifest in standings.without_result(manifests, read_results(args.store))}
        missing = [entry for entry in entries if entry.manifest.identity in identities]
        progress.warn(f"xsp: {len(entries) - len(missing):,} of {len(entries):,} have a result already")
        entries = missing
        if not entries:
            return 0
    return run_manifests(args, entries)


def run_manifests(args: argparse.Namespace, entries: list[LoadedManifest]) -> int:
    """Run manifests, and print the results; return 3 if one could not be run."""
    from xsp.evaluate import agents, transports
    from xsp.levels import parse_levels

    if args.trace:
        parse_levels(args.trace)
    options = agents.Options(args.store, args.trace, args.bound, trusted=True)
    if args.ray is not None:
        return _print_results(args, *_run_on_cluster(args, entries, options))
    local_agents = transports.local_agents(args.agents, dict(args.label))
    paths, failure_count, start = [], 0, time.monotonic()
    with progress.progress_bar(args.quiet) as show:
        for number, entry in enumerate(entries):
            if number and args.seconds is not None and time.monotonic() - start > args.seconds:
                progress.warn(f"xsp: {len(entries) - number:,} manifests are left; run it again with --missing")
                break
            suitable, reasons = agents.match_agents(entry.manifest, local_agents)
            for name, misses in reasons.items():
                progress.warn(f"xsp: {entry.manifest.title}: not by {name}: {'; '.join(misses)}")
            failure_count += not suitable
            for agent in suitable:
                try:
                    paths.append(agent.submit(entry.manifest, entry.folder, options, show))
                except XspError as error:
                    failure_count += 1
                    progress.warn(f"xsp: {entry.manifest.title}: {error}")
    return _print_results(args, paths, failure_count)


def _run_on_cluster(
    args: argparse.Namespace, entries: list[LoadedManifest], options: Options
) -> tuple[list[Path], int]:
    """Run manifests on the agents of a Ray cluster, and return the results and the number of missing results."""
    from xsp.evaluate import dispatch

    if args.seconds is not None or args.label:
        raise UsageError("--seconds and --label are for agents of this machine; agents of --ray have their own labels")
    names = None if args.agents in ("all", "any", "local") else [name.strip() for name in args.agents.split(",")]
    agents = find_cluster_agents(args.ray, names)
    work, reasons = dispatch.pieces(entries, agents, on_each_agent=args.agents not in ("any", "local"))
    for title, misses_by_agent in reasons.items():
        for name, misses in misses_by_agent.items():
            progress.warn(f"xsp: {title}: not by {name}: {'; '.join(misses)}")
    with progress.progress_bar(args.quiet) as show:
        dispatch.run_pieces(work, agents, options, show)
    for piece in work:
        if piece.lost_agents and piece.result is not None:
            progress.warn(f"xsp: {piece.request.manifest.title}: lost by {piece.lost_agents[0]}, and run again")
        if piece.result is None:
            progress.warn(f"xsp: {piece.request.manifest.title}: {piece.failure}")
    return [piece.result for piece in work if piece.result is not None], sum(piece.result is None for piece in work)


def find_cluster_agents(address: str, names: Sequence[str] | None = None) -> list[Agent]:
    """Return the agents of a Ray cluster, and warn of those that do not answer.

    Args:
        address: address of the cluster.
        names: names of the agents; None for all.

    Raises:
        ManifestError: there is no cluster, or no agent of one of the names.
        UsageError: no agent answers.
    """
    from xsp.evaluate import rayagents

    rayagents.connect(address)
    agents, silent = rayagents.connected_agents(names)
    for name, reason in silent.items():
        progress.warn(f"xsp: {name}: {reason}")
    if not agents:
        raise UsageError("no agent of the cluster answers; on each machine: xsp evaluate agent --ray ADDRESS")
    return list(agents)


def _print_results(args: argparse.Namespace, paths: list[Path], failure_count: int) -> int:
    """Print results; return 3 if one is missing."""
    from xsp.evaluate import results, tables

    if not paths:
        raise UsageError("nothing was evaluated; see the reasons above")
    records = [results.read(path) for path in paths]
    if args.format == "json":
        progress.write(
            json.dumps([dict(record.content) | {"path": str(record.path)} for record in records], indent=1) + "\n"
        )
    else:
        progress.echo(tables.results_table(records))
        for result in records:
            for note in result.content.get("notes", ()):
                progress.echo(f"  {result.name}: {note}")
        run = records[-1].path / results.RUN
        store_option = "" if args.store == STORE else f" --store {shlex.quote(str(args.store))}"
        report = f", or xsp report {shlex.quote(str(run))}" if run.is_dir() else ""
        progress.echo(f"\nstored in {args.store}; next: xsp evaluate list{store_option}{report}")
    return 3 if failure_count else 0
