"""A second process that correlates and stores steps, to keep that work out of the measured process.

The measured process sends a step's raw rows. It counts a step as stored when the second process confirms that it is on
the disk, so stored steps survive its death. It need not wait for that (`send_step`, `is_answered`, `is_stored`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xsp import rundir, transport
from xsp.errors import PluginError, UnwritableError
from xsp.schema import Span

if TYPE_CHECKING:
    from xsp.store.write import StepWriter


class Writer(transport.SecondProcess):
    """The measured process's side; thread-safe."""

    def __init__(self, run: Path) -> None:
        """Start the second process and wait until it holds the run directory; it then loads the table engine.

        Raises:
            UnwritableError: the process does not start, or another process writes to the directory.
        """
        super().__init__("xsp.record.writer", str(run), purpose="stores spans")
        if self.process is None:
            raise UnwritableError(self.failure if self.is_refused else f"{run}: {self.failure}; try `xsp doctor`")
        self._sampling: int | None = None
        self._opening = self.post(("open",))

    @property
    def is_open(self) -> bool:
        """Whether the second process has loaded the table engine, or is gone."""
        return self.wait_until_open(0.0)

    def wait_until_open(self, patience_s: float) -> bool:
        """Wait at most these seconds until the second process has loaded; return whether it has, or is gone."""
        return self._opening is None or self.is_answered(self._opening, patience_s)

    def deliver_to(self, target: str, policy: str) -> None:
        """Deliver each step once it is stored. The target is sent through the pipe, because it may contain a password.

        Raises:
            PluginError: the sender cannot be loaded.
        """
        if self.ask(("deliver", target, policy)) is None:
            reason = self.failure
            self.close()
            raise PluginError(f"spans cannot be delivered: {reason}")

    def sample(self, rank: int, devices: Sequence[str]) -> None:
        """Sample power, clocks and memory from now on, see `xsp.samples`. Never raises, and does not wait."""
        self._sampling = self.post(("sample", os.getpid(), rank, list(devices)))

    def has_sampled(self) -> bool:
        """Return whether sampling began; to be called once, after `sample`."""
        return self._sampling is not None and self.answer(self._sampling, transport.STUCK_S) is not None

    def store(self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int) -> bool:
        """Store a step; return whether it is on the disk now. After a failure, the next step may succeed.

        Args:
            step: number of the step.
            rows: its spans, at least one.
            common: values that all rows have in common, by column; the second process fills them in.
            loop, offset_ns: see `add_to_loop`.
        """
        number = self.send_step(step, rows, common, loop, offset_ns)
        return number is not None and self.is_stored(number)

    def send_step(
        self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int
    ) -> int | None:
        """Send a step to be stored while the program continues.

        Args:
            step, rows, common, loop, offset_ns: as for `store`.

        Returns:
            The number for `is_answered` and `is_stored`; None if it could not be sent.
        """
        return self.post(("step", step, _columns(rows), common, loop, offset_ns))

    def is_stored(self, number: int) -> bool:
        """Wait for the answer to `send_step`, and return whether the step is on the disk. Call it once per step."""
        return self.answer(number, transport.STUCK_S) is not None

    def add_to_loop(self, loop: bytes, offset_ns: int) -> bool:
        """Store rows of the loop; return whether they are on the disk now.

        Args:
            loop: rows from `xsp.record.loop.Loop.take`.
            offset_ns: offset that converts their times to the epoch.
        """
        return self.ask(("loop", loop, offset_ns), transport.STUCK_S) is not None

    def add_requests(self, rows: Sequence[Span]) -> bool:
        """Store requests and engine steps, at least one row; return whether they are on the disk now."""
        return self.ask(("requests", _columns(rows)), transport.STUCK_S) is not None

    def finish(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """Write the final `run.json` and the merged step; return a report on them, None if that failed."""
        return self.ask(("finish", json.dumps(run)))


_LEVEL = Span._fields.index("level")


def _columns(rows: Sequence[Span]) -> list[Sequence[Any]]:
    """Return rows as columns, which are sent in half of the time, with levels as plain numbers."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    columns[_LEVEL] = list(map(int, columns[_LEVEL]))
    return columns


# --- in the second process --------------------------------------------------------------------------------


def main(run: str) -> NoReturn:
    """Run the second process."""
    transport.serve(_storing(Path(run)), Path(run))


@contextlib.contextmanager
def _storing(run: Path) -> Iterator[Callable[[tuple[Any, ...]], Any]]:
    rundir.reserve(run)
    stores: list[StepWriter] = []

    def store() -> StepWriter:
        """Return the store; loading the table engine takes longer than the program should wait for the directory."""
        if not stores:
            from xsp.store.write import StepWriter

            stores.append(StepWriter(run))
        return stores[0]

    def add(step: int, columns: list[Sequence[Any]], common: dict[str, Any], *loop_rows: Any) -> None:
        count = len(columns[0])
        for name, value in common.items():
            columns[Span._fields.index(name)] = [value] * count
        store().add(step, columns)
        store().add_to_loop(*loop_rows)

    handlers: dict[str, Callable[..., Any]] = {
        "open": lambda: store() is not None,
        "step": add,
        "loop": lambda *rows: store().add_to_loop(*rows),
        "requests": lambda columns: store().add_requests(columns),
        "deliver": lambda *target: store().deliver_to(*target),
        "sample": lambda *sources: store().sample(*sources),
    }

    def handle(message: tuple[Any, ...]) -> Any:
        kind, *content = message
        return store().finish(json.loads(*content)) if kind == "finish" else handlers[kind](*content) or True

    yield handle
    for opened in stores:
        opened.close()
