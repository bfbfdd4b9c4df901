"""Steps of a program that marks their ends by a bare `prof.step()`, as with torch.profiler.

`prof.step()` returns the context of a step. If the previous context was never entered, the calls are marks: from then
on each call ends a step and begins the next one.
"""

from __future__ import annotations

from xsp.record.step import Step
from xsp.record.steps import Steps

NOTE = "prof.step() was called without `with`: each call ends a step and begins the next, including waits for data"


class Marks:
    """The distinction between marks and contexts, and the steps between marks."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._last_step: Step | None = None
        self._open_step: Step | None = None

    @property
    def has_unentered_context(self) -> bool:
        """Whether the last context that the program requested was not entered."""
        return self._last_step is not None and not self._last_step.was_entered

    def handle_request(self, step: Step) -> bool:
        """Handle a request for a step's context, and return whether the program enters its contexts."""
        previous, self._last_step = self._last_step, step
        quiet = self._steps.quiet
        quiet.by_mark = previous is not None and not previous.was_entered
        if not quiet.by_mark:
            return True
        if self._open_step is None:
            self._steps.collecting.note("program", NOTE)
        else:
            quiet.on_mark()
            self._open_step.__exit__(None, None, None)
        if not quiet.has_begun:
            self._open_step = Step(self._steps, step.batch_size)
            self._open_step.__enter__()
        return False

    def end(self) -> None:
        """Abandon the step after the last mark: it was not ended."""
        step, self._open_step = self._open_step, None
        if step is not None and self._steps.open is step:
            step.abandon()
