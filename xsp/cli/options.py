"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xsp import scrub
from xsp.collector import Kernels
from xsp.errors import UnwritableError, UsageError
from xsp.levels import parse_levels
from xsp.schema import Level
from xsp.texts import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from xsp import models
    from xsp.analyses import Analysis
    from xsp.comparison.commands import ComparedProgram
    from xsp.record.settings import Settings


class _KeepArguments(argparse.Action):
    """An option that child processes get through the environment, because every rank writes its own run."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, *_: Any) -> None:
        os.environ[scrub.KEEP_VARIABLE] = "1"


class _NameOnly(argparse.Action):
    """An option whose name is kept; its effect in its command is ignored."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), option_string])


class _RaisingParser(argparse.ArgumentParser):
    """A parser that raises its errors, for a caller that adds to them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_recording_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that records a run."""
    from xsp.record.settings import Settings  # commands that record nothing load nothing of this package

    group = parser.add_argument_group("what is recorded, and where")
    group.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="DIR",
        help="run directory (default: runs/<name>, or the next free name, runs/<name>-2)",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing run")
    group.add_argument(
        "--keep-arguments",
        action=_KeepArguments,
        help="keep all values of the program's arguments in the run, not only numbers, switches and models",
    )
    group.add_argument(
        "--levels",
        default=Settings.levels,
        metavar="LEVELS",
        help="M (model), M/L (and layers, operators), M/L/G (and kernels) (default: %(default)s), or names: "
        "model/layer/op",
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="warm-up steps, which are not kept (default: 1 per set of levels; 0 with a budget, as `xsp run` has by "
        "default)",
    )
    group.add_argument(
        "--seed", type=int, default=Settings.seed, metavar="N", help="seed of the weights and of the order of levels"
    )
    group.add_argument(
        "--kernels",
        choices=[str(source) for source in Kernels],
        default=Settings.kernels,
        help="source of device work: cupti, kineto (torch.profiler), or auto, the first that works (default)",
    )
    group.add_argument(
        "--no-samples", action="store_false", dest="samples", help="do not sample power, clocks, memory and utilisation"
    )
    add_otlp_options(parser)


def add_advice_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that suppresses the advice at the end."""
    parser.add_argument("--no-advice", action="store_true", help="print no advice at the end")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that records some steps of a long run."""
    group = parser.add_argument_group("long runs")
    group.add_argument(
        "--every", type=int, metavar="N", help="record one step in N on average; the others run unrecorded"
    )
    group.add_argument(
        "--budget",
        metavar="SHARE",
        help="upper limit of the overhead of recording, in percent of the time, 1%% for example (default: 10%%, and "
        "one second for start, end and first steps; off: record every third step)",
    )


def add_counter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that runs again for hardware counters."""
    group = parser.add_argument_group("hardware counters")
    group.add_argument(
        "--counters",
        action="store_true",
        help="run again under Nsight Compute (ncu), and add the hardware counters of the kernels of one step",
    )
    group.add_argument("--counting", action="store_true", help=argparse.SUPPRESS)


_FIXED_IN_TURNS = ("-o", "--out", "--overwrite", "-q", "--quiet", "--levels", "--resolve", "--counters", "--otlp")
"""Options of `xsp run` and `xsp profile` that a comparison sets itself, or that require further runs."""


def one_subject(sources: Sequence[str]) -> Any:
    """Return the only source, or the trace of several files with a trace per rank."""
    if len(sources) == 1:
        return sources[0]
    for source in sources:
        if not os.path.exists(source) and "://" not in source:
            raise UsageError(f"{source}: several sources are files with a trace per rank; there is no such file")
    from xsp.ingest.load import load

    return load(sources)


def check_in_turns(program: ComparedProgram) -> None:
    """Check the options of xsp in the command of a program that runs in turns.

    Raises:
        UsageError: a comparison sets one of them itself, or one of them lacks its value.
    """
    try:
        names = _option_names(program.verb, program.args)
    except UsageError as error:
        raise UsageError(f"{program.text!r}: {error}") from None
    option = next((name for name in names if name in _FIXED_IN_TURNS), None)
    if option is not None:
        raise UsageError(f"{program.text!r}: omit {option}; `xsp compare` itself sets the directory and the levels")


def _option_names(command: str, words: Sequence[str]) -> list[str]:
    """Return the names of the options before the program, in full: those in `-qoX` are `-q` and `-o`.

    Raises:
        UsageError: an option is unknown, or the words end where a value or the program is missing.
    """
    parser, reader = argparse.ArgumentParser(), _RaisingParser(add_help=False)
    import_module(f"xsp.cli.{command}").arguments(parser)
    reader.allow_abbrev = parser.allow_abbrev
    for action in parser._actions:
        if action.option_strings:
            reader.add_argument(*action.option_strings, dest="names", default=[], nargs=action.nargs, action=_NameOnly)
        elif action.nargs == argparse.PARSER:  # the program, with all words after it
            reader.add_argument("words", nargs=action.nargs, metavar=action.metavar)
    known, others = reader.parse_known_args(words)
    if unknown := [word for word in others if word.startswith("-") and word != "--"]:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; see `xsp {command} --help`")
    names: list[str] = known.names
    return names


def check_writable(*files: Path | None) -> None:
    """Refuse files that cannot be written, before time is spent on computing their content; None is no file.

    Raises:
        UnwritableError: a path is that of a folder, or its folder is missing or not writable.
    """
    for file in files:
        if file is None:
            continue
        folder = os.path.dirname(os.path.abspath(file))
        code = 0
        if os.path.isdir(file):
            code = errno.EISDIR
        elif not os.path.isdir(folder):
            code = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
        elif not os.access(folder, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code:
            raise UnwritableError(f"{file}: cannot be written ({os.strerror(code)})")


def check_counting(args: argparse.Namespace) -> None:
    """Check that the other options allow hardware counters.

    Raises:
        UsageError: they do not.
    """
    if args.counters and args.otlp is not None:
        raise UsageError(
            "--counters adds counters after the run: omit --otlp, and send the run afterwards with `xsp export`"
        )
    if args.counters and Level.KERNEL not in parse_levels(args.levels):
        raise UsageError("--counters needs kernels: use --levels M/L/G")


def add_otlp_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that delivers a run while it is recorded."""
    from xsp.otlp import endpoint
    from xsp.record.settings import Settings

    group = parser.add_argument_group("sending over OpenTelemetry's protocol during the run")
    group.add_argument(
        "--otlp",
        default=os.environ.get(endpoint.VARIABLE),
        metavar="WHERE",
        help="send each step to http://HOST:PORT or grpc://HOST:PORT; env: to the target of OTEL_EXPORTER_OTLP_* "
        f"(default: the variable {endpoint.VARIABLE})",
    )
    group.add_argument(
        "--otlp-policy",
        choices=("wait", "shed"),
        default=Settings.otlp_policy,
        help="if the receiver is slow: wait between steps (default), or leave steps on disk",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that builds a model by name."""
    group = parser.add_argument_group("the model and its input")
    sources = "torchvision:NAME, timm:NAME, transformers:NAME or file.py:function"
    parser.add_argument("model", metavar="MODEL", help=sources)
    group.add_argument("--repeats", type=int, default=12, metavar="N", help="timed steps per level (default: 12)")
    add_sample_options(group)
    add_phase_options(group)
    group.add_argument("--device", default=None, metavar="NAME", help="cpu, cuda, … (default: cuda if there is one)")


def add_step_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of every command that takes one step of a model: its batch, and those of `add_sample_options`."""
    parser.add_argument(
        "--batch", type=positive_int, metavar="N", help="samples in a step (default: 1, or that of the file)"
    )
    add_sample_options(parser)


def add_sample_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the kind of step of a model, and for the size of one sample."""
    parser.add_argument("--train", action="store_true", help="forward, backward and optimizer instead of a prediction")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample: 3x224x224 (default: the model's own)")
    parser.add_argument(
        "--sequence", type=positive_int, default=128, metavar="N", help="tokens of one sample (default: 128)"
    )


def add_size_option(parser: argparse._ActionsContainer) -> None:
    """Add the option for the sizes of named dimensions in an ONNX file."""
    parser.add_argument(
        "--size",
        type=_sizes,
        metavar="NAME=N,…",
        help="sizes of symbolic dimensions of an ONNX file, for example sequence=128",
    )


def _sizes(text: str) -> dict[str, int]:
    """Return the sizes in `sequence=128,past=0`, by name.

    Raises:
        ArgumentTypeError: the text has another form, or repeats a name.
    """
    by_name: dict[str, int] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        if not name or not number.isdecimal() or name in by_name:
            raise argparse.ArgumentTypeError(f"{text!r}: write each name once, with a number: sequence=128,past=0")
        by_name[name] = int(number)
    return by_name


def add_format_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that prints tables for people, or JSON."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")


def add_quiet_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that shows how far it is."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def add_skip_damaged_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that loads runs."""
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged segments out")


def add_timings_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that reads timings of calls."""
    parser.add_argument(
        "--timings",
        type=Path,
        metavar="DIR",
        help="folder of timings (default: the variable XSP_TIMINGS, or in the user's cache)",
    )


def add_threads_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that explains a step by timings of its calls."""
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of the step (default: those of the run, or all cores)",
    )


def add_fit_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that uses a fit of `xsp predict fit`."""
    parser.add_argument("--fit", type=Path, metavar="FILE", help="the fit (default: xsp-fit.json)")


def add_seed_option(parser: argparse._ActionsContainer) -> None:
    """Add the seed of a command in which only weights and inputs are random."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and inputs (default: 0)")


def add_phase_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of every command that builds one of the two steps of a language model."""
    parser.add_argument(
        "--prefill",
        type=positive_int,
        metavar="N",
        help="language models of transformers: the step that reads N tokens at once",
    )
    parser.add_argument(
        "--decode",
        type=positive_int,
        metavar="N",
        help="language models: the step that adds the N-th token, with a cache of N - 1",
    )


def positive_int(text: str) -> int:
    """Return a number above 0, such as the rows of a table to print.

    Raises:
        ArgumentTypeError: the text is not a number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return int(text)


def duration(text: str) -> float:
    """Return the seconds in `60s`, `2m`, `1.5h` or `90`.

    Raises:
        ArgumentTypeError: the text is not a time above 0.
    """
    seconds = parse_seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: give a time above 0, 60s or 2m")
    return seconds


def size(text: str) -> int:
    """Return the bytes in `25MiB`, `100MB` or `4096`.

    Raises:
        ArgumentTypeError: the text is not a size above 0.
    """
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0: write 8GiB, 512MiB or a number of bytes")
    return nbytes


def find_analysis(name: str) -> Analysis | None:
    """Return the analysis with a name, in upper or lower case; None if there is none."""
    from xsp.analyses import ANALYSES

    return {key.lower(): analysis for key, analysis in ANALYSES.items()}.get(name.lower())


def batches(text: str) -> list[int]:
    """Return the numbers in `1,2,4,8`.

    Raises:
        UsageError: they are not different positive numbers.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or len(set(sizes)) != len(sizes):
        raise UsageError(f"--batch {text!r}: write distinct positive numbers with commas between them: 1,2,4,8")
    return sizes


def steps(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers in `5,7,9`; None for None.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--steps {text!r}: write numbers with commas between them: 5,7,9") from None


def shape(text: str | None) -> tuple[int, ...] | None:
    """Return the sizes in `3x224x224`; None for None.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--input {text!r}: write the shape of one sample like 3x224x224")
    return sizes


def model_settings(args: argparse.Namespace, batch: int) -> models.Settings:
    """Return the settings for running the model, from the options of `add_model_options`."""
    from xsp import models
    from xsp.launch.models import default_device

    return models.Settings(
        batch=batch,
        train=args.train,
        seed=args.seed,
        shape=shape(args.input),
        sequence=args.sequence,
        device=args.device or default_device(),
        prefill=args.prefill,
        decode=args.decode,
    )


def step_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that say which step of a model is looked at, as the functions that build one take them."""
    return {
        "batch": args.batch,
        "train": args.train,
        "shape": shape(args.input),
        "sequence": args.sequence,
        "prefill": args.prefill,
        "decode": args.decode,
        "sizes": args.size,
    }


def recording_settings(args: argparse.Namespace, name: str) -> Settings:
    """Return the settings for recording the run, from its options and possibly those of sampling.

    Args:
        args: the command's options; an option with the name of a setting sets it.
        name: name of the run, and of its directory if none was given.

    Raises:
        UsageError: the settings are invalid.
    """
    from xsp.record.settings import Settings

    values = {field.name: getattr(args, field.name) for field in fields(Settings) if field.name in args}
    values |= {"name": name, "out": args.out or Path("runs") / name, "next_free": args.out is None}
    return Settings(**values)
