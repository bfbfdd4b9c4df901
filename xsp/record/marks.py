"""Steps of a program that marks their ends: `prof.step()` by itself, as torch.profiler has it.

`prof.step()` returns the context of a step. Where the one before was never entered, the calls are marks: from there on
each ends a step and begins the next one.
"""

from __future__ import annotations

from xsp.record.steps import Step, Steps

NOTE = "prof.step() was called without `with`: each call ends a step and begins the next one, waits for data in it"


class Marks:
    """Tells marks from contexts, and opens and closes the steps between marks."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._last: Step | None = None
        self._open: Step | None = None

    @property
    def only_one(self) -> bool:
        """Whether the program asked for a context once, or last, and did not enter it."""
        return self._last is not None and not self._last.was_entered

    def called(self, step: Step) -> bool:
        """Take in that the program asked for the context of a step, and return whether it enters them."""
        before, self._last = self._last, step
        if before is None or before.was_entered:
            return True
        if self._open is None:
            self._steps.collecting.note("program", NOTE)
        else:
            self._open.__exit__(None, None, None)
        self._open = Step(self._steps, step.batch_size)
        self._open.__enter__()
        return False

    def end(self) -> None:
        """Leave out what follows the last mark: it is no step."""
        ended, self._open = self._open, None
        if ended is not None and self._steps.open is ended:
            ended.abandon()
