"""The subcommands of `xsp evaluate` that run manifests, and the options that they share with the others."""

from __future__ import annotations

import argparse
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import UsageError, XspError

if TYPE_CHECKING:
    from xsp.evaluate.agents import Agent, Options
    from xsp.evaluate.manifest import Manifest
    from xsp.evaluate.reading import LoadedManifest
    from xsp.evaluate.results import Result


STORE = Path("evaluations")
CANNOT_RUN = 3
MOST_NOTES = 4
"""Most unused fields of a manifest that are named before it runs: manifests of other dialects have many."""


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


def add_label_option(parser: argparse.ArgumentParser, text: str = "label of this machine that") -> None:
    """Add the option of every command whose agents are on this machine; `text` begins its help."""
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        type=label,
        metavar="NAME=VALUE",
        help=f"{text} hardware.labels of a manifest can require",
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


def run_manifests(args: argparse.Namespace, entries: list[LoadedManifest]) -> int:
    """Run manifests, and print the results; return 3 if one could not be run."""
    from xsp.evaluate import agents, transports
    from xsp.levels import parse_levels

    if args.trace:
        parse_levels(args.trace)
    options = agents.Options(args.store, args.trace, args.bound, trusted=True)
    _warn_of_unused(entries)
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


def _warn_of_unused(entries: Sequence[LoadedManifest]) -> None:
    """Warn of fields that are kept but not used, such as a misspelled one that was to choose a device."""
    for entry in entries:
        for note in entry.notes[:MOST_NOTES]:
            progress.warn(f"xsp: {entry.manifest.title}: {note}")
        if len(entry.notes) > MOST_NOTES:
            more = len(entry.notes) - MOST_NOTES
            progress.warn(f"xsp: {entry.manifest.title}: {more} more: xsp evaluate check lists them")


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
        progress.write_json([dict(record.content) | {"path": str(record.path)} for record in records])
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
    cluster_agents = find_cluster_agents(args.ray, None if args.agents is None else [args.agents])
    suitable, reasons = agents.match_agents(manifest, cluster_agents)
    if not suitable:
        details = ". ".join(f"{name}: {'; '.join(misses)}" for name, misses in reasons.items())
        raise UsageError(f"no agent of the cluster satisfies the manifest. {details}")
    return next((agent for agent in suitable if agent.facts().name == original_agent), suitable[0])


class Check:
    """Check a manifest: its fields, and whether it can run here.

    It does what `xsp evaluate run` does before the load, by the same code, and stores nothing: it opens the model,
    reads and prepares the samples, and predicts once for each of the first samples and for each batch size. Manifests
    of MLModelScope and DLSpec are accepted too. Exit code 0: it can run here; 3: it is valid, but cannot.

    examples:
      xsp evaluate check resnet18.yaml
      xsp evaluate check resnet18.yaml --canonical        as a sorted manifest of xsp
    """

    SUMMARY = "check a manifest, and whether it can run here"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("manifest", type=Path, metavar="MANIFEST", help="a YAML file")
        parser.add_argument(
            "--canonical", action="store_true", help="print the canonical form, as YAML, and nothing else"
        )
        add_label_option(parser)
        options.add_quiet_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Check the manifest, and print the result."""
        from xsp.evaluate import agents, reading, running, yamltext

        parsed = reading.read(args.manifest)
        manifest = parsed.manifest
        if args.canonical:
            progress.write(yamltext.write(manifest.plain()))
            return 0
        progress.echo(f"{manifest.title}: a manifest of {parsed.dialect}, identity {manifest.identity[:16]}")
        for note in parsed.notes:
            progress.echo(f"  note: {note}")
        facts = agents.local_facts(labels=dict(args.label), devices=manifest.hardware.gpu not in ("", "none"))
        reasons, notes = running.objections(manifest, facts), []
        if not reasons:
            try:
                with progress.progress_bar(args.quiet) as show:
                    notes = running.check(manifest, parsed.folder, agents.Options(trusted=True), facts, show)
            except XspError as error:
                reasons = [str(error)]
        for note in notes:
            progress.echo(f"  note: {note}")
        for reason in reasons:
            progress.echo(f"  cannot run here: {reason}")
        if not reasons:
            progress.echo(f"  can run here; next: xsp evaluate run {shlex.quote(str(args.manifest))}")
        return CANNOT_RUN if reasons else 0


class Run:
    """Run manifests, and keep the results.

    Latencies are measured without recording; a trace is recorded afterwards, in steps of its own. A manifest is given
    to one agent, or with --agents all to each that satisfies it; for the others the reasons are printed. Exit code 3: a
    manifest was not run.

    examples:
      xsp evaluate run resnet18.yaml
      xsp evaluate run resnet18.yaml --agents process          in a process of its own
      xsp evaluate run resnet18.yaml --trace M/L/G --bound     with a trace and a bound
      xsp evaluate run manifests/*.yaml --store results
      xsp evaluate run manifests/*.yaml --ray auto --agents any     on a cluster, each by one agent
      xsp evaluate run --set builtin --missing --seconds 540    run it again to continue
    """

    SUMMARY = "run manifests, and keep the results"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("manifest", nargs="*", type=Path, metavar="MANIFEST", help="YAML files")
        parser.add_argument(
            "--set",
            choices=("builtin",),
            metavar="NAME",
            help="builtin: 44 models under three loads, weights from a seed",
        )
        parser.add_argument(
            "--missing", action="store_true", help="only manifests without a result of this software on this machine"
        )
        parser.add_argument("--seconds", type=float, metavar="N", help="begin no further manifest after this time")
        add_run_options(parser)

    @staticmethod
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
            identities = {
                manifest.identity for manifest in standings.without_result(manifests, read_results(args.store))
            }
            missing = [entry for entry in entries if entry.manifest.identity in identities]
            progress.warn(f"xsp: {len(entries) - len(missing):,} of {len(entries):,} have a result already")
            entries = missing
            if not entries:
                return 0
        return run_manifests(args, entries)


class StartAgent:
    """Start an agent of a Ray cluster on this machine; it continues when this command ends.

    It runs the manifests that `xsp evaluate run --ray ADDRESS` sends to it. Files that manifests name are searched in
    its folder; programs that they name run only with --trust.

    examples:
      ray start --head                                   a cluster of this machine
      xsp evaluate agent --ray auto --label rack=7
      xsp evaluate agent --ray auto --name second
      xsp evaluate agent --ray auto --stop second
    """

    SUMMARY = "start an agent of a Ray cluster on this machine"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("--ray", required=True, metavar="ADDRESS", help="address of the cluster; auto finds it")
        parser.add_argument("--name", metavar="NAME", help="name of the agent (default: that of the machine)")
        add_label_option(parser, "label that")
        parser.add_argument(
            "--folder",
            type=Path,
            default=Path(),
            metavar="DIR",
            help="folder of files that manifests name (default: here)",
        )
        parser.add_argument("--trust", action="store_true", help="run programs that manifests name")
        parser.add_argument("--stop", metavar="NAME", help="end an agent instead")

    @staticmethod
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


class ListAgents:
    """List the agents of a Ray cluster, with their hardware, software and labels.

    examples:
      xsp evaluate agents --ray auto
    """

    SUMMARY = "list the agents of a Ray cluster"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("--ray", required=True, metavar="ADDRESS", help="address of the cluster; auto finds it")
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """List the agents."""
        from xsp.evaluate import rayagents, results, tables
        from xsp.terminal import column_lines

        rayagents.connect(args.ray)
        agents, silent = rayagents.connected_agents()
        facts = [agent.facts() for agent in agents]
        if args.format == "json":
            progress.write_json([results.plain_facts(info) for info in facts])
        elif facts:
            rows = [
                (info.name, info.host, str(info.cores), tables.figure(info.memory_gib), ", ".join(info.gpus) or "-",
                 info.packages.get("torch", "-"),
                 " ".join(f"{name}={value}" for name, value in info.labels.items()) or "-")
                for info in facts
            ]  # fmt: skip
            header = ("agent", "machine", "cores", "GiB", "GPUs", "torch", "labels")
            progress.echo("\n".join(column_lines(header, rows, 2)))
        elif not silent:
            progress.echo(f"no agents; on each machine: xsp evaluate agent --ray {args.ray}")
        for name, reason in silent.items():
            progress.warn(f"xsp: {name}: {reason}")
        return 0


class Reproduce:
    """Run a stored manifest again, and judge whether the result is the same.

    Outputs and environment are judged by one repeat, latencies by several, up to --turns. Exit code 0: the same; 1:
    different; 3: cannot tell.

    examples:
      xsp evaluate reproduce 4f1c2a9b03de-0001
      xsp evaluate reproduce 4f1c --turns 5
      xsp evaluate reproduce 4f1c --label rack=7                 if the manifest requires that label
      xsp evaluate reproduce 4f1c --ray auto --agents rack7      by that agent of a Ray cluster
    """

    SUMMARY = "run a stored manifest again, and judge the difference"

    @staticmethod
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
            help="local or process (default: process, a new one each time); with --ray one of its agents (default: the "
            "one that made the result, if it is there and satisfies the manifest, or any that does)",
        )
        parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster with the agents; auto finds it")
        add_label_option(parser)
        add_store_option(parser)
        options.add_format_option(parser)
        options.add_quiet_option(parser)

    @staticmethod
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
            progress.write_json(payload)
        else:
            times = "once" if len(repeats) == 1 else f"{len(repeats)} times"
            agent_name = agent.facts().name
            progress.echo(f"{original.name}, repeated {times} by {agent_name}: {tables.judgement_text(judgement)}")
        return {"same": 0, "different": 1}.get(judgement.verdict.value, 3)
