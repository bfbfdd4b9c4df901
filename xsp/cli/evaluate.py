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
import os
import socket
from pathlib import Path
from typing import Any

from xsp import terminal
from xsp.cli import evaluate_run, options, progress
from xsp.errors import UsageError

SUMMARY = "evaluate models by manifests, and keep the results"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """List the subcommands."""
    del args
    return progress.list_parts("evaluate", PARTS)


ORDER_KEYS = ("inputs_per_s", "p50_ms", "p90_ms", "p99_ms", "rate", "top1")


class List:
    """List the results of evaluations, newest last.

    examples:
      xsp evaluate list
      xsp evaluate list --store results --format json
    """

    SUMMARY = "list the results"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        evaluate_run.add_store_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """List the results."""
        from xsp.evaluate import tables

        results = evaluate_run.read_results(args.store)
        if args.format == "json":
            progress.write_json([dict(result.content) | {"path": str(result.path)} for result in results])
        elif not results:
            progress.echo(f"no results in {args.store}; make some with `xsp evaluate run MANIFEST`")
        else:
            progress.echo(tables.results_table(results))
        return 0


class Compare:
    """Compare results of evaluations: figures, outputs, and differences in manifest, software and machine.

    Each result is compared with the first.

    examples:
      xsp evaluate compare 4f1c2a9b03de-0001 4f1c2a9b03de-0002
      xsp evaluate compare 4f1c 77aa 01ee --format json
    """

    SUMMARY = "compare results side by side"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "result",
            nargs="+",
            metavar="RESULT",
            help="names or paths of results, or the beginning of a manifest's hash",
        )
        evaluate_run.add_store_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Compare the results, and print the comparison."""
        from xsp.evaluate import results, standings, tables

        comparisons = standings.compare([results.find(name, args.store) for name in args.result])
        if args.format == "json":
            progress.write_json([tables.comparison_json(comparison) for comparison in comparisons])
        else:
            progress.echo("\n\n".join(tables.comparison_text(comparison) for comparison in comparisons))
        return 0


class Leaderboard:
    """Show the results of a task in order, the best first.

    There is a row per manifest, batch size, software and machine. Below are conclusions: the Pareto front of
    throughput, latency and accuracy, the batch size from which doubling no longer pays, rank correlations of accuracy,
    and with --prices what a million inputs cost at full load.

    examples:
      xsp evaluate leaderboard --task image-classification
      xsp evaluate leaderboard --by p99_ms
      xsp evaluate leaderboard --by rate             results of max-rate scenarios
      xsp evaluate leaderboard --prices prices.csv   cost of a million inputs
    """

    SUMMARY = "show the results of a task, the best first"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument("--task", metavar="NAME", help="task of the models (default: all)")
        parser.add_argument(
            "--by",
            choices=ORDER_KEYS,
            default=ORDER_KEYS[0],
            help="figure to order by; rate: the highest rate within a limit; top1: accuracy (default: inputs_per_s)",
        )
        parser.add_argument(
            "--rows", type=options.positive_int, default=40, metavar="N", help="rows to show (default: 40)"
        )
        parser.add_argument(
            "--prices",
            metavar="FILE",
            help="CSV with the columns machine (as in the table), per_hour, currency, date (YYYY-MM-DD), source",
        )
        evaluate_run.add_store_option(parser)
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the leaderboard."""
        from xsp.evaluate import standings, tables
        from xsp.evaluate.quality import choices

        prices = choices.prices(args.prices) if args.prices is not None else ()
        results = evaluate_run.read_results(args.store)
        rows = standings.leaderboard(results, args.task, args.by)
        if args.format == "json":
            progress.write_json([tables.standing_json(row) for row in rows])
        elif not rows:
            scope = f" of the task {args.task!r}" if args.task else ""
            progress.echo(f"no results{scope} in {args.store}; make some with `xsp evaluate run MANIFEST`")
        else:
            progress.echo(tables.standing(rows, args.rows, args.by))
            for line in standings.conclusions(rows[: args.rows], prices):
                for part in terminal.wrapped(line):
                    progress.echo(part)
        return 0


class Pitfalls:
    """Show the effect of small differences in preprocessing: colour order, decoder, crop, resize, normalisation,
    layout.

    Images, weights and readout come from a seed, so equal versions give equal tables. Of your own images (--data), two
    thirds of each class fit the readout, and the others go through each pipeline.

    examples:
      xsp evaluate pitfalls
      xsp evaluate pitfalls --data photographs                  a subfolder of images per class
      xsp evaluate pitfalls --model timm:resnet10t --seed 7 --format json
    """

    SUMMARY = "show the effect of small differences in preprocessing"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        parser.add_argument(
            "--model",
            default="torchvision:squeezenet1_1",
            metavar="MODEL",
            help="image model, with weights from the seed (default: torchvision:squeezenet1_1)",
        )
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and images (default: 0)")
        parser.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help="folder with a subfolder of images per class (default: images from the seed)",
        )
        options.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Measure the effects, and print them."""
        from dataclasses import asdict

        from xsp.evaluate import pitfalls, tables
        from xsp.terminal import column_lines

        effects = pitfalls.rows(args.model, args.seed, data=args.data)
        if args.format == "json":
            progress.write_json([asdict(effect) for effect in effects])
            return 0
        header = ("of", "difference", "accuracy", "agreement", "features apart", "JS")
        rows = [
            (effect.subject or "-", effect.name, f"{100 * effect.accuracy:.0f} %", f"{100 * effect.agreement:.0f} %",
             f"{100 * effect.apart:.2g} %", tables.figure(effect.js))
            for effect in effects
        ]  # fmt: skip
        progress.echo("\n".join(column_lines(header, rows, 2)))
        progress.echo(
            "accuracy: share of images classified correctly; agreement: share classified as by the right steps;"
        )
        progress.echo("features apart: distance relative to the norm of the correct ones; JS: divergence in nats")
        return 0


class Serve:
    """Serve evaluations in a browser and over REST: results, comparisons, new evaluations and their progress.

    It listens on loopback until Ctrl-C. Evaluations run one at a time, each in a separate process. A manifest that
    arrives in this way can only name a model with weights from a seed and synthetic data: no code of it is executed,
    and no file is read. /api/openapi.json describes the REST interface.

    examples:
      xsp evaluate serve
      xsp evaluate serve --store results --port 9000
      xsp evaluate serve --ray auto            agents of a Ray cluster run evaluations too
    """

    SUMMARY = "show evaluations in a browser, and over REST"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        evaluate_run.add_store_option(parser, "--folder")
        parser.add_argument(
            "--port", type=int, default=8610, metavar="N", help="port to listen on; 0: any (default: 8610)"
        )
        parser.add_argument(
            "--host", default="127.0.0.1", metavar="ADDRESS",
            help="address to listen on; everyone who reaches it can evaluate models (default: 127.0.0.1)",
        )  # fmt: skip
        parser.add_argument(
            "--ray", metavar="ADDRESS", help="Ray cluster whose agents run evaluations too; auto finds it"
        )

    @staticmethod
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
            raise UsageError(
                f"--port {args.port}: cannot listen on {args.host} ({reason}); name another port"
            ) from error
        with listener:
            port = listener.getsockname()[1]
            host = f"[{args.host}]" if ":" in args.host else args.host
            progress.echo(f"serving {args.store} at http://{host}:{port}/; Ctrl-C ends it", flush=True)
            try:
                app.server(args.store, args.host, port, agents).run(sockets=[listener])
            except KeyboardInterrupt:
                return 0
        return 0


class Schema:
    """Print the JSON Schema of manifests, for editors and for forms.

    examples:
      xsp evaluate schema > manifest.schema.json
    """

    SUMMARY = "print the JSON Schema of manifests"

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the command's options: none."""
        del parser

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the schema."""
        del args
        from xsp.evaluate import manifest

        progress.write_json(manifest.schema())
        return 0


PARTS: dict[str, Any] = {
    "check": evaluate_run.Check,
    "run": evaluate_run.Run,
    "agent": evaluate_run.StartAgent,
    "agents": evaluate_run.ListAgents,
    "list": List,
    "compare": Compare,
    "leaderboard": Leaderboard,
    "reproduce": evaluate_run.Reproduce,
    "pitfalls": Pitfalls,
    "serve": Serve,
    "schema": Schema,
}
"""Subcommands by name: each has what the module of a command has."""
