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

from xsp.cli import progress
from xsp.errors import UsageError, XspError

if TYPE_CHECKING:
    from xsp.evaluate.agents import Agent, Options
    from xsp.evaluate.reading import Read
    from xsp.evaluate.results import Result
    from xsp.launch.models import Progress

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
    running(parser)


def running(parser: argparse.ArgumentParser) -> None:
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
    labelled(parser)
    stored(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def labelled(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command whose agents are on this machine."""
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        type=label,
        metavar="NAME=VALUE",
        help="label of this machine that hardware.labels of a manifest can require",
    )


def stored(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command that reads or writes results."""
    parser.add_argument(
        "--store", type=Path, default=STORE, metavar="DIR", help="folder of results (default: evaluations)"
    )


def every_result(store: Path) -> list[Result]:
    """Return the results of a store, the newest last, and warn of files that are not results."""
    from xsp.evaluate import results

    found, wrong = results.every(store)
    for each in wrong:
        progress.warn(f"xsp: {each}")
    return found


def label(text: str) -> tuple[str, str]:
    """Return name and value of a label, `rack=7`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def run(given: argparse.Namespace) -> int:
    """Run the manifests, and print the results."""
    from xsp.evaluate import builtin, dialects, reading, standings

    found = [reading.read(each) for each in given.manifest]
    if given.set is not None:
        found += [reading.Read(each, dialects.OURS, Path()) for each in builtin.manifests()]
    if not found:
        raise UsageError("name manifests, or a set of them: --set builtin")
    if given.missing:
        asked = [each.manifest for each in found]
        left = {each.identity for each in standings.missing(asked, every_result(given.store))}
        progress.warn(f"xsp: {len(found) - len(left):,} of {len(found):,} have a result already")
        found = [each for each in found if each.manifest.identity in left]
        if not found:
            return 0
    return carry_out(given, found)


def carry_out(given: argparse.Namespace, found: list[Read]) -> int:
    """Run manifests, and print the results; return 3 if one could not be run."""
    from xsp.evaluate import agents, transports
    from xsp.levels import parse_levels

    if given.trace:
        parse_levels(given.trace)
    options = agents.Options(given.store, given.trace, given.bound, trusted=True)
    if given.ray is not None:
        return _shown(given, *_by_cluster(given, found, options))
    there = transports.named(given.agents, dict(given.label))
    made, failed, begin = [], 0, time.monotonic()
    with progress.shown(given.quiet) as show:
        for number, each in enumerate(found):
            if number and given.seconds is not None and time.monotonic() - begin > given.seconds:
                progress.warn(f"xsp: {len(found) - number:,} manifests are left; run it again with --missing")
                break
            fit, reasons = agents.matching(each.manifest, there)
            for name, why in reasons.items():
                progress.warn(f"xsp: {each.manifest.title}: not by {name}: {'; '.join(why)}")
            failed += not fit
            for agent in fit:
                try:
                    made.append(_submitted(agent, each, options, show))
                except XspError as error:
                    failed += 1
                    progress.warn(f"xsp: {each.manifest.title}: {error}")
    return _shown(given, made, failed)


def _by_cluster(given: argparse.Namespace, found: list[Read], options: Options) -> tuple[list[Path], int]:
    """Run manifests on the agents of a Ray cluster, and return the results and the number of missing results."""
    from xsp.evaluate import dispatch

    if given.seconds is not None or given.label:
        raise UsageError("--seconds and --label are for agents of this machine; agents of --ray have their own labels")
    named = None if given.agents in ("all", "any", "local") else [each.strip() for each in given.agents.split(",")]
    there = of_cluster(given.ray, named)
    work, reasons = dispatch.pieces(found, there, each=given.agents not in ("any", "local"))
    for title, others in reasons.items():
        for name, why_not in others.items():
            progress.warn(f"xsp: {title}: not by {name}: {'; '.join(why_not)}")
    with progress.shown(given.quiet) as show:
        dispatch.carry_out(work, there, options, show)
    for piece in work:
        if piece.lost and piece.result is not None:
            progress.warn(f"xsp: {piece.asked.manifest.title}: lost by {piece.lost[0]}, and run again")
        if piece.result is None:
            progress.warn(f"xsp: {piece.asked.manifest.title}: {piece.why}")
    return [each.result for each in work if each.result is not None], sum(each.result is None for each in work)


def of_cluster(address: str, named: Sequence[str] | None = None) -> list[Agent]:
    """Return the agents of a Ray cluster, and warn of those that do not answer.

    Args:
        address: address of the cluster.
        named: names of the agents; None for all.

    Raises:
        ManifestError: there is no cluster, or no agent of one of the names.
        UsageError: no agent answers.
    """
    from xsp.evaluate import onray

    onray.connect(address)
    there, silent = onray.found(named)
    for name, why in silent.items():
        progress.warn(f"xsp: {name}: {why}")
    if not there:
        raise UsageError("no agent of the cluster answers; on each machine: xsp evaluate agent --ray ADDRESS")
    return list(there)


def _shown(given: argparse.Namespace, made: list[Path], failed: int) -> int:
    """Print results; return 3 if one is missing."""
    from xsp.evaluate import results, tables

    if not made:
        raise UsageError("nothing was evaluated; see the reasons above")
    there_now = [results.read(each) for each in made]
    if given.format == "json":
        progress.put(json.dumps([dict(each.content) | {"path": str(each.path)} for each in there_now], indent=1) + "\n")
    else:
        progress.tell(tables.listed(there_now))
        for result in there_now:
            for note in result.content.get("notes", ()):
                progress.tell(f"  {result.name}: {note}")
        run = there_now[-1].path / results.RUN
        where = "" if given.store == STORE else f" --store {shlex.quote(str(given.store))}"
        report = f", or xsp report {shlex.quote(str(run))}" if run.is_dir() else ""
        progress.tell(f"\nstored in {given.store}; next: xsp evaluate list{where}{report}")
    return 3 if failed else 0


def _submitted(agent: Agent, each: Read, options: Options, show: Progress) -> Path:
    return agent.submit(each.manifest, each.folder, options, show)
