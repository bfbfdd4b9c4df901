"""The process of a program with a trial, which is applied at the start and at the first calls of outermost modules.

Both sides run in such a process, including the side without a trial, so that its cost is the same on both: two Python
calls for each call of a module. Random generators start from the same seeds.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xsp import atomic
from xsp.trials import settings
from xsp.trials.outputs import Outputs
from xsp.trials.trial import Trial, parse

CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
argument = sys.argv.pop(1)
from xsp.trials import child
with child.trial_session(argument):
    from xsp.cli import main
    sys.exit(main())
"""
"""The code that Python runs: as in `xsp.comparison.commands`, with the text of `encode_options` before the command."""

MOST_WATCHED = 64
"""Number of outermost calls without a new module after which calls are no longer watched."""

MOST_LINES = 20


def encode_options(trial: str, report: Path, seed: int = 0) -> str:
    """Return the argument for such a process.

    Args:
        trial: name of the trial, or empty.
        report: the file that the process writes: changes, reasons why nothing was changed, and results.
        seed: seed of the random generators.
    """
    return json.dumps({"trial": trial, "report": str(report), "seed": seed})


@contextlib.contextmanager
def trial_session(text: str) -> Iterator[None]:
    """Apply a trial to this process, run the block, and write the report at its end.

    Args:
        text: the result of `encode_options`.
    """
    options = json.loads(text)
    try:
        import torch
    except ImportError:
        yield
        return
    seed = options["seed"]
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    watch = CallObserver(parse(options["trial"]) if options["trial"] else [])
    watch.start()
    call = torch.nn.Module.__call__
    torch.nn.Module.__call__ = watch.wrap(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        report = Path(options["report"])
        content = watch.content()
        with contextlib.suppress(OSError), atomic.replacing(report) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")


class CallObserver:
    """An observer of outermost module calls, which applies trials to new modules and stores results."""

    def __init__(self, trials: list[Trial]) -> None:
        self.trials = trials
        self.outputs = Outputs()
        self.facts: dict[str, Any] = {}
        self.modules: list[str] = []
        self._visited: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls_since_new = 0
        self._failures: dict[str, None] = {}

    def start(self) -> None:
        """Apply the trials' changes of the process."""
        for trial in self.trials:
            self._try(trial, trial.start)

    def wrap(self, original: Any) -> Any:
        """Return the replacement of `Module.__call__`."""
        import torch

        thread = threading.local()
        is_tracing = torch.compiler.is_dynamo_compiling

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tracing() or self._calls_since_new >= MOST_WATCHED or getattr(thread, "inside", False):
                return original(module, *args, **kwargs)
            thread.inside = True
            try:
                is_new = self._record_call(module, args, kwargs)
                result = original(module, *args, **kwargs)
                if module in self._visited:
                    # a result whose values cannot be read (under vmap, on a meta device, nested) is left out
                    with contextlib.suppress(Exception):
                        self.outputs.keep(module, result)
                for trial in self.trials if is_new else ():
                    self._try(trial, trial.after, module, args, kwargs)
                return result
            finally:
                thread.inside = False

        return __call__

    def _record_call(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Record a call, and return whether it is the first call of its module."""
        self._calls_since_new += 1
        if module in self._visited or type(module).__module__.startswith("xsp_collectors"):  # from their calibration
            return False
        self._calls_since_new = 0
        self._visited.add(module)
        self.modules.append(type(module).__name__)
        if not self.facts:
            self.facts = settings.facts()
        for trial in self.trials:
            self._try(trial, trial.before, module, args, kwargs)
        return True

    def _try(self, trial: Trial, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # the program continues; the report states that nothing was changed
            line = str(error).strip().split("\n")[0][:200]
            self._failures[f"{type(trial).__name__} could not be applied: {type(error).__name__}: {line}"] = None

    def content(self) -> dict[str, Any]:
        """Return the content of the report, as plain data."""
        return {
            "applied": [line for trial in self.trials for line in trial.applied][:MOST_LINES],
            "reasons": [*self._failures, *(line for trial in self.trials for line in trial.reasons)][:MOST_LINES],
            "modules": self.modules[:MOST_LINES],
            "facts": self.facts,
            "outputs": self.outputs.content(),
        }
