"""The settings of a block: read by commands, and passed on to the processes that they start."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xsp.collector import Collector, Kernels
from xsp.errors import UsageError
from xsp.levels import parse_levels, rung_name
from xsp.record import budget as budgets
from xsp.schema import Level


@dataclass(frozen=True)
class Settings:
    """The arguments of `xsp.profile`, described there, and further settings for commands only."""

    name: str = "run"
    levels: str = "M/L/G"
    out: str | os.PathLike[str] | None = None
    overwrite: bool = False
    next_free: bool = True
    """Take the next free name, `runs/train-2`, if `out` is taken; False raises an error instead."""

    needs_run: bool = False
    """Raise if no run can be written, because the program runs only for the sake of the run."""

    warmup: int | None = None
    settle: int | None = None
    every: int | None = None
    budget: str | float | None = None
    """A share, or `USE_DEFAULT` of `xsp.record.budget`: the default budget, which gives the first steps away."""

    spread: bool = True
    seed: int = 0
    batch_size: int | None = None
    collectors: Sequence[str | Collector] | None = None
    kernels: str = Kernels.AUTO.value
    only: Level | None = None
    samples: bool = True
    otlp: str | None = None
    otlp_policy: str = "wait"
    typed: tuple[str, ...] = ()
    """The command line after `xsp`, without possible secrets: with it the program can be run again."""

    def __post_init__(self) -> None:
        """Check the settings as far as possible before anything starts; an endpoint is checked on entering the block.

        Raises:
            UsageError: a setting is invalid, for instance a level is unknown.
        """
        rungs = self.rungs
        Kernels.parse(self.kernels)
        if self.budget is not None and self.budget != budgets.USE_DEFAULT:
            budgets.parse(self.budget)
        if self.settle is not None and self.settle < 0:
            raise UsageError(f"settle={self.settle}: the number of steps cannot be negative; write 0 or more")
        if self.every is not None and self.every < 1:
            raise UsageError(f"every={self.every}: one step in this many is recorded; write 1 or more")
        if self.warmup is not None and self.warmup < 0:
            raise UsageError(f"warmup={self.warmup}: the number of warm-up steps cannot be negative; write 0 or more")
        if self.batch_size is not None:
            if sample_count(self.batch_size) is None:
                raise UsageError(f"batch_size={self.batch_size!r}: not a whole number of samples; write 1 or more")
            object.__setattr__(self, "batch_size", sample_count(self.batch_size))
        if self.only is not None and self.only not in rungs:
            names = ", ".join(map(rung_name, rungs))
            raise UsageError(f"{self.only.name} is not among the level sets {names}; name one of them")

    @property
    def rungs(self) -> tuple[Level, ...]:
        """The rungs of `levels`, outermost first."""
        return parse_levels(self.levels)

    @property
    def directory(self) -> Path:
        """The requested run directory."""
        return Path(self.out) if self.out is not None else Path("runs") / _file_name(self.name)

    def options(self) -> list[str]:
        """Return the options that make `xsp run` or `xsp profile` in another process record with these settings.

        That process prints nothing of its own, writes to `out`, and keeps no budget, which is for one run. The delivery
        target is passed in the environment; a command line would show it to everybody.
        """
        options = ["--quiet", "--out", str(self.directory), "--levels", self.levels, "--seed", str(self.seed)]
        options += ["--kernels", self.kernels, "--otlp-policy", self.otlp_policy]
        options += ["--warmup", str(self.warmup)] if self.warmup is not None else []
        options += ["--every", str(self.every)] if self.every is not None else []
        options += ["--only", self.only.name.lower()] if self.only is not None else []
        return [*options, *([] if self.samples else ["--no-samples"])]


def sample_count(samples: object) -> int | None:
    """Return a number of samples (of NumPy, or a tensor) as a Python integer; None if it is not one above 0."""
    try:
        number = operator.index(samples)  # type: ignore[arg-type]
    except Exception:  # the program's own classes may raise anything
        return None
    return number if number > 0 else None


def name_and_path(name: object, out: str | os.PathLike[str] | None) -> tuple[str, str | os.PathLike[str] | None]:
    """Return the name of a run and its directory; a path may have been given in place of the name.

    A `Path`, or text with a prefix that only paths have (`/`, `~/`, `./`, `runs/`), is a path: the run goes there, and
    its name is the last part. Names of models have slashes too (`org/model`); they are names.

    Raises:
        UsageError: `name` is neither a name nor a path; or it is a path, and `out` is another one.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise UsageError(f"name={name!r}: the name of a run is text; write xsp.profile('train', out='runs/train')")
    text = os.fsdecode(name)
    is_path = isinstance(name, os.PathLike) or text.startswith(_PATH_PREFIXES) or Path(text).is_absolute()
    if not is_path:
        return text, out
    run_path = Path(text).expanduser()
    if out is not None and Path(out) != run_path:
        raise UsageError(f"name={text!r} is a path, and out={os.fsdecode(out)!r} is another one; write one of them")
    return run_path.absolute().resolve().name or "run", run_path


_PATH_PREFIXES = ("/", "~/", "./", "../", "runs/", *((".\\", "..\\", "runs\\") if os.name == "nt" else ()))


def _file_name(name: str) -> str:
    safe_name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return safe_name if safe_name.strip(".") else "run"
