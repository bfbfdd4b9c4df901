"""List what to change in a program, with the gain and the place, the largest gain first.

Each piece of advice has its gain in milliseconds of a step, as an estimate with a confidence interval or as an upper
limit ("at most"), the modules and spans concerned, and the figures behind it. Some questions are answered from any
trace, others need timings of single calls: --fill takes them, as `xsp bench` does.

examples:
  xsp advise runs/demo                              all advice, the best first
  xsp advise runs/demo --only data --only stall     only these questions
  xsp advise runs/demo --fill 60s                   times single calls first: layouts, threads, precision
  xsp advise runs/demo --same-numbers               only what does not change results
  xsp advise trace.json.gz                          another profiler's trace
  xsp advise torchvision:resnet50                   a model, only from timings
  xsp advise torchvision:resnet50 --device cuda:0 --fill 60s    on a GPU of this machine
  xsp advise runs/demo --format json --limit 3
  xsp advise runs/demo --try 3                      try the best three here, in turns
  xsp advise runs/train --try 3 --program 'python train.py --steps 50'
  xsp advise --history                              how accurate advice has been here
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.cli import INTERRUPTED, options, progress
from xsp.errors import UsageError
from xsp.record import output

if TYPE_CHECKING:
    from xsp.advise.advice import AdviceContext
    from xsp.advise.advisor import AdviceReport
    from xsp.advise.experiment import TrialPlan

SUMMARY = "list what to change, with the gain and the place"

FORMATS = ("table", "json")
MODEL_OPTIONS = ("batch", "train", "sequence", "threads", "timings", "device", "fill")
"""Options that are passed on under their names, if they are given."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a run, a trace of another profiler, a folder or several files with a trace per rank, or a model: "
        "torchvision:NAME, timm:NAME, transformers:NAME, "
        "path/to/file.py:function, an ONNX file, a program of torch.export (.pt2)",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="QUESTION", help="ask this question; may be given several times"
    )
    parser.add_argument(
        "--same-numbers", action="store_true", help="only advice that changes results by rounding at most"
    )
    parser.add_argument(
        "--limit", type=options.positive_int, metavar="N", help="pieces of advice that are shown (default: 10)"
    )
    options.add_format_option(parser)
    parser.add_argument(
        "--fill", type=options.duration, metavar="TIME", help="first time single calls, for at most this long: 60s, 2m"
    )
    parser.add_argument("--timings", type=Path, metavar="DIR", help="folder of timings (default: in the user's cache)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where single calls are timed: a device here, cuda:0; or a product, H100: its peak rates, imported "
        "timings (default: that of the run; of a model, cpu)",
    )
    trials = parser.add_argument_group("trials: the program without and with a change, in turns")
    trials.add_argument(
        "--try", type=int, dest="tries", metavar="N", help="try the best N pieces that need no change of the code"
    )
    trials.add_argument(
        "--turns", type=int, metavar="N", help="maximal number of turns of each trial, 3 to 100 (default: 6)"
    )
    trials.add_argument(
        "--program",
        metavar="COMMAND",
        help="command of the program, if the run does not know it: 'python train.py --steps 50'",
    )
    trials.add_argument(
        "--history", action="store_true", help="list predicted and measured gain of all trials on this machine"
    )
    options.add_quiet_option(trials)
    group = parser.add_argument_group("the model, if SOURCE is one")
    options.add_threads_option(group)
    options.add_step_options(group)
    parser.set_defaults(sequence=None)  # a run has its own


def run(args: argparse.Namespace) -> int:
    """Print the advice, and try it if requested."""
    from xsp import advise
    from xsp.advise import advisor, pictures, records, text
    from xsp.device import machine
    from xsp.run import Machine

    this_machine = Machine.of(machine.describe())
    if args.history:
        history = records.history(this_machine)
        if args.format == "json":
            progress.write_json(asdict(history))
        else:
            progress.echo(text.history_text(history))
        return 0
    if not args.sources:
        raise UsageError("name a run, a trace or a model: xsp advise runs/demo")
    args.source = args.sources[0]
    for option, value in (("--turns", args.turns), ("--program", args.program)):
        if value is not None and args.tries is None:
            raise UsageError(f"{option} is for trials: add --try 3")
    advisor.check_names(args.only)
    if args.tries is not None:
        _check_trials(args)
    with progress.progress_bar(quiet=args.fill is None or args.quiet) as show:
        subject = options.one_subject(args.sources)
        context = advisor.context_of(subject, {**_settings(args), "progress": show})
        plan = None if args.tries is None else _plan(args, context)
        result = advise.of(context, only=args.only, same_numbers=args.same_numbers)
    if not args.only and not args.same_numbers:
        pictures.save(result, args.source)
    if args.format == "json" and plan is None:
        progress.write(_as_json(args, result))
        return 0
    if args.format != "json":
        # print the first screen and then all advice; for a model, or with questions that were chosen, only the advice
        from xsp.advise import text
        from xsp.report import firstscreen

        if context.trace is not None and not args.only:
            screen = firstscreen.first_screen(context.trace, args.source, ())
            progress.echo(firstscreen.text(screen, progress.terminal_width(), commands=False) + "\n")
        progress.echo(text.page(result, args.limit, records.history(this_machine).line, bool(args.only)), flush=True)
    return 0 if plan is None else _try(args, result, plan)


def _check_trials(args: argparse.Namespace) -> None:
    """Refuse options of trials that make no sense, before a run is loaded or a graph is captured."""
    from xsp.advise import experiment
    from xsp.comparison import evidence
    from xsp.graph import sources

    experiment.select((), args.tries)
    evidence.turn_repeats(experiment.TURNS if args.turns is None else args.turns)
    if ":" in args.source and not sources.is_trace(args.source):
        raise _needs_a_run(args.source)


def _needs_a_run(source: str) -> UsageError:
    return UsageError(f"--try needs a run: xsp profile {shlex.quote(source)}, and then xsp advise runs/NAME --try 3")


def _plan(args: argparse.Namespace, context: AdviceContext) -> TrialPlan:
    """Return the plan of the trials, so that an unknown program is refused before the advice is computed."""
    from xsp.advise import experiment, rerun

    if context.trace is None:
        raise _needs_a_run(args.source)
    program = rerun.program(context.trace.run, args.source, args.program)
    try:
        options.check_in_turns(program)
    except UsageError as error:
        hint = f"; {rerun.hint_to_name(args.source)}" if args.program is None else ""
        raise UsageError(f"{error}{hint}") from None
    trains = any(kind.training for kind in context.trace.run.kinds)
    return experiment.TrialPlan(program, rerun.runs_folder(Path(args.source)), trains, args.turns or experiment.TURNS)


def _try(args: argparse.Namespace, result: AdviceReport, plan: TrialPlan) -> int:
    """Try the best pieces of advice, and show each trial when it is finished; an interrupt keeps finished trials."""
    from xsp.advise import experiment, records, text
    from xsp.device import machine
    from xsp.run import Machine

    selected = experiment.select(result.advice, args.tries)
    as_table = args.format == "table"
    if as_table:
        progress.echo("\n" + (text.trial_head() if selected else "no advice can be tried without editing the code"))
    code = 0
    try:
        with progress.progress_bar(args.quiet) as show:
            for trial in experiment.run_trials(plan, selected, show):
                records.save(trial, Machine.of(machine.describe()))
                if as_table:
                    progress.echo(text.trial_lines(trial), flush=True)
    except KeyboardInterrupt:
        progress.warn(f"xsp: interrupted; {len(plan.results)} of {len(selected)} trials were finished and are kept")
        code = INTERRUPTED
    if not as_table:
        progress.write(_as_json(args, result, tried=[records.plain(trial) for trial in plan.results]))
    if plan.results:
        progress.warn(f"xsp: the runs are in {output.display_path(plan.out)}; all trials: xsp advise --history")
    return code


def _as_json(args: argparse.Namespace, result: AdviceReport, **extra: Any) -> str:
    """Return the advice as JSON, with the trials if there were any."""
    from xsp.evidence import advice, form

    payload = advice.of_report(result, {"run": args.source, "name": result.name}, limit=args.limit)
    return json.dumps(form.fit({**payload, **extra}, form.MOST_FILE_BYTES), indent=2, ensure_ascii=False) + "\n"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model and of its timings that were given."""
    settings = {name: getattr(args, name) for name in MODEL_OPTIONS}
    settings["shape"] = options.shape(args.input)
    return {name: value for name, value in settings.items() if value}
