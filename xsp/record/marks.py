"""Steps of a program that marks their ends by a bare `prof.step()`, as with torch.profiler.

`prof.step()` returns the context of a step. If the previous context was never entered, the calls are marks: from then
on each call ends a step and begins the next one.
"""

from __future__ import annotations

from xsp.record.steps import Step, Steps

NOTE = "prof.step() was called without `with`: each call ends a step and begins the next, including waits for data"


class Marks:
    """The distinction of marks from contexts, and the steps between marks."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._last: Step | None = None
        self._open: Step | None = None

    @property
    def only_one(self) -> bool:
        """Whether the last context that the program requested was not entered."""
        return self._last is not None and not self._last.was_entered

    def called(self, step: Step) -> bool:
        """Handle a request for the context of a step, and return whether the program enters its contexts."""
        previous, self._last = self._last, step
        quiet = self._steps.quiet
        quiet.by_mark = previous is not None and not previous.was_entered
        if not quiet.by_mark:
            return True
        if self._open is None:
            self._steps.collecting.note("program", NOTE)
        else:
            quiet.marked()
            self._open.__exit__(None, None, None)
        if not quiet.has_begun:
            self._open = Step(self._steps, step.batch_size)
            self._open.__enter__()
        return False

    def end(self) -> None:
        """Abandon the step after the last mark: it was not ended."""
        step, self._open = self._open, None
        if step is not None and self._steps.open is step:
            step.abandon()
