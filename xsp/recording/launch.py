"""Run somebody's script as Python would, inside a profile."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from xsp import rundir
from xsp.collector import Kernels
from xsp.counters import secondrun
from xsp.errors import UsageError
from xsp.exporters import endpoint
from xsp.recording import measure
from xsp.recording.autostep import AutoStep, OneAtATime, StepRule
from xsp.recording.collecting import Listener
from xsp.recording.schedule import parse_levels, rung_name
from xsp.recording.session import of_this_rank, profile
from xsp.span import Level

_DECORATOR = "__xsp_step__"


@dataclass(frozen=True)
class Launch:
    """What is to be run, and how."""

    script: Path
    args: tuple[str, ...]
    out: Path
    levels: str = "M/L/G"
    step: str = StepRule.AUTO.value
    """A `StepRule`, or the function whose calls are steps: `train_one`, `Trainer.fit_batch`, `pkg.mod:function`."""

    warmup: int | None = None
    every: int | None = None
    budget: str | None = None
    shows_line: bool = False
    """Draw in the terminal how far the run is."""

    seed: int = 0
    overwrite: bool = False
    only: Level | None = None
    kernels: str = Kernels.AUTO.value
    one_at_a_time: bool = False
    counting: bool = False
    """Mark the step that describes for Nsight Compute, which runs this process, and record nothing of the others."""

    samples: bool = True
    otlp: str | None = None
    otlp_policy: str = "wait"


def launch(how: Launch) -> int:
    """Run the script in this process, and return its exit code.

    A script that raises has its traceback printed and the code 1, as Python does it; what was recorded until
    then is kept. `KeyboardInterrupt` passes through.

    Raises:
        UsageError: there is no such script, or no such function for --step.
        OutputError: the run directory exists or cannot be written.
        PluginError: device work cannot come from where it was asked for.
    """
    measure.before_the_first_use_of_libraries(how.kernels)
    os.environ.pop(endpoint.VARIABLE, None)  # the script's own children are not meant
    function = how.step if how.step not in {rule.value for rule in StepRule} else None
    code = _compile(how.script, function)
    session = profile(
        how.script.stem,
        levels=how.levels,
        out=how.out,
        overwrite=how.overwrite,
        warmup=how.warmup,
        every=how.every,
        budget=how.budget,
        seed=how.seed,
        only=how.only,
        kernels=how.kernels,
        collectors=secondrun.collectors() if how.counting else None,
        listener=functools.partial(_listener, how=how),
        hosts=True,
        samples=how.samples,
        otlp=how.otlp,
        otlp_policy=how.otlp_policy,
    )
    if how.shows_line:
        session.show_line()
    if how.counting:
        session.describe_once()
    sys.argv = [str(how.script), *how.args]
    sys.path.insert(0, str(how.script.resolve().parent))
    with session:
        if function is not None:
            session.has_explicit_steps = True
            _step_in_module(session, function)
            setattr(builtins, _DECORATOR, functools.partial(_stepping, session))
        try:
            return _execute(code)
        finally:
            if function is not None:
                delattr(builtins, _DECORATOR)


def once_each(how: Launch) -> int:
    """Run the script once per level, each time in a fresh process, into one run.

    Returns:
        0, or the exit code of the first run that failed; what was recorded until then is kept.
    """
    with rundir.created_for_several(how.out, how.overwrite) as out:
        return _each(how, out)


def _each(how: Launch, out: Path) -> int:
    rungs = parse_levels(how.levels)
    parts: list[str] = []
    content: dict[str, Any] = {"name": how.script.stem, "levels": how.levels, "parts": parts, "finished": False}
    content["rungs"] = [rung_name(rung) for rung in rungs]
    code = 0
    for rung in rungs:
        parts.append(rung.name.lower())
        rundir.write_run(out, content)
        code = _again(how, out / parts[-1], ["--only", rung.name.lower()])
        if code:
            break
    recorded = [
        rundir.read_run(out / part)
        for part in parts
        if (out / part / rundir.RUN_FILE).is_file()  # a script that could not be started leaves none
    ]
    rundir.write_run(out, {**content, **_of_parts(recorded), "finished": code == 0})
    return code


def _of_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is to be said of a run in parts: what is theirs alike from the last, what is counted in sum."""
    if not parts:
        return {}
    alike = (
        "xsp",
        "created",
        "command",
        "warmup",
        "settle",
        "seed",
        "clock",
        "collectors",
        "absent",
        "kernels",
        "costs",
        "machine",
    )
    counted = {name: sum(part["steps"][name] for part in parts) for name in parts[-1]["steps"]}
    notes = [note for part in parts for note in part["notes"]]
    different = [note for place, note in enumerate(notes) if note not in notes[:place]]
    return {**{name: parts[-1][name] for name in alike}, "steps": counted, "notes": different}


def resolve(how: Launch) -> tuple[int, int]:
    """Run the script once more with one thing at a time, and decide what was ambiguous in its run.

    Returns:
        How many spans found a parent, and the exit code of the re-run.
    """
    from xsp.recording.store import resolve_run  # the table engine, after the measured program has ended

    out = of_this_rank(how.out)
    serialised = out / rundir.SERIALISED
    code = _again(
        replace(how, otlp=None), serialised, ["--one-at-a-time"], {"OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    )
    return (resolve_run(out, serialised) if rundir.segments(serialised) else 0), code


def count(how: Launch) -> dict[str, Any]:
    """Run the script once more under Nsight Compute, and join the counters of one step to its run.

    Returns:
        How much was joined, see `xsp.counters.storing.attach`.

    Raises:
        CounterError: there are none; the run is as it was, and says why.
    """
    again = replace(how, otlp=None, samples=False, kernels=Kernels.KINETO.value)  # CUPTI is ncu's
    return secondrun.count(of_this_rank(how.out), lambda run: _command(again, run, ["--counting"]))


def _again(how: Launch, out: Path, extra: list[str], environment: dict[str, str] | None = None) -> int:
    """Run this command again in a process of its own."""
    environment = {**os.environ, **otlp_environment(how), **(environment or {})}
    return subprocess.run(_command(how, out, extra), env=environment, check=False).returncode


def _command(how: Launch, out: Path, extra: list[str]) -> list[str]:
    """Return this command, for a process of its own."""
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", str(out), "--levels", how.levels]
    command += ["--step", how.step, "--seed", str(how.seed), *extra]
    if how.warmup is not None:
        command += ["--warmup", str(how.warmup)]
    if how.every is not None:
        command += ["--every", str(how.every)]
    command += [] if how.samples else ["--no-samples"]
    command += ["--kernels", how.kernels]
    return [*command, "--otlp-policy", how.otlp_policy, str(how.script), *how.args]


def otlp_environment(how: Launch) -> dict[str, str]:
    """Return what tells a further `xsp run` where to deliver to; a command line would show it to everybody."""
    return {endpoint.VARIABLE: how.otlp} if how.otlp is not None else {}


def _listener(session: profile, how: Launch) -> Listener:
    """Return what the collectors signal the program's boundaries to."""
    rules = {rule.value: rule for rule in StepRule}
    steps = AutoStep(session, rules.get(how.step, StepRule.AUTO))
    return OneAtATime(session, steps) if how.one_at_a_time else steps


def _compile(script: Path, function: str | None) -> CodeType:
    """Compile the script; a function of its own that makes the steps gets a decorator."""
    try:
        tree = ast.parse(script.read_bytes(), filename=str(script))
    except OSError as error:
        raise UsageError(f"{script}: cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script}: is not Python ({error})") from error
    if function is not None and ":" not in function:
        found = _find(tree, function.split("."))
        if found is None:
            raise UsageError(f"--step {function}: {script} has no such function; for another module's, module:function")
        found.decorator_list.append(ast.copy_location(ast.Name(_DECORATOR, ast.Load()), found))
    return compile(tree, str(script.absolute()), "exec", dont_inherit=True)  # as Python names its main module


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and path == [node.name]:
            return node
        if isinstance(node, ast.ClassDef) and path[0] == node.name and len(path) > 1:
            return _find(node, path[1:])
        if isinstance(node, (ast.If, ast.Try, ast.With)) and (found := _find(node, path)) is not None:
            return found
    return None


def _step_in_module(session: profile, function: str) -> None:
    """Make the calls of a function of an importable module steps."""
    module, colon, path = function.partition(":")
    if not colon:
        return
    try:
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, _stepping(session, getattr(owner, name)))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--step {function}: {error}") from error


def _stepping(session: profile, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return function(*args, **kwargs)

    return step


_executed: list[ModuleType] = []
"""Main modules, whose objects live as long as the interpreter: a `__del__` comes after the handlers at exit."""


def _execute(code: CodeType) -> int:
    """Execute the code as the main module."""
    main = ModuleType("__main__")
    main.__file__ = code.co_filename
    main.__dict__["__builtins__"] = builtins
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = main
    _executed.append(main)
    try:
        exec(code, main.__dict__)
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as error:
        _from_script(error, code.co_filename)
        sys.excepthook(type(error), error, error.__traceback__)  # the script may have one of its own
        return 1
    except BaseException:  # an interrupt: Python itself shows it, and ends by its signal
        sys.excepthook = functools.partial(_show, sys.excepthook, code.co_filename)
        raise
    finally:
        if before is not None:
            sys.modules["__main__"] = before
    return 0


def _show(hook: Callable[..., Any], script: str, kind: type[BaseException], error: BaseException, _: object) -> None:
    _from_script(error, script)
    hook(kind, error, error.__traceback__)


def _from_script(error: BaseException, script: str) -> None:
    """Let an error's traceback, which Python's own hook shows, begin in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
