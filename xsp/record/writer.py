"""A second process that correlates and stores steps, so that neither happens in the measured one.

The measured process sends a step's raw rows, and counts the step as stored at the word that it is on the disk: so what
was reported as stored survives its death. It need not wait for that word (`send_step`, `is_answered`, `is_stored`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from xsp import rundir, transport
from xsp.errors import PluginError, UnwritableError
from xsp.schema import Span


class Writer(transport.SecondProcess):
    """The measured process's end; all threads may use it."""

    def __init__(self, run: Path) -> None:
        """Start the second process and wait until it holds the run directory.

        Raises:
            UnwritableError: it does not start, or another process writes to the directory.
        """
        super().__init__("xsp.record.writer", str(run), does="stores spans")
        if self.process is None:
            raise UnwritableError(self.failed if self.refused else f"{run}: {self.failed}; try `xsp doctor`")

    def deliver_to(self, target: str, policy: str) -> None:
        """Have each step delivered once it is stored. The target travels by the pipe: it may hold a password.

        Raises:
            PluginError: what delivers cannot be loaded.
        """
        if self.ask(("deliver", target, policy)) is None:
            reason = self.failed
            self.close()
            raise PluginError(f"spans cannot be delivered: {reason}")

    def sample(self, rank: int, devices: Sequence[str]) -> bool:
        """Have power, clocks and memory read from now on, see `xsp.samples`; return whether it began. Never raises."""
        return self.ask(("sample", os.getpid(), rank, list(devices))) is not None

    def store(self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int) -> bool:
        """Store a step; return whether it is on the disk now. One that is not stands alone: the next one may be.

        Args:
            step: its number.
            rows: its spans, at least one.
            common: what all of them have in common, by column; put in by the second process.
            loop, offset_ns: see `add_to_loop`.
        """
        number = self.send_step(step, rows, common, loop, offset_ns)
        return number is not None and self.is_stored(number)

    def send_step(
        self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int
    ) -> int | None:
        """Have a step stored while the program goes on.

        Args:
            step, rows, common, loop, offset_ns: as of `store`.

        Returns:
            What to ask `is_answered` and `is_stored` for; None if it could not be sent.
        """
        return self.post(("step", step, _columns(rows), common, loop, offset_ns))

    def is_stored(self, number: int) -> bool:
        """Wait for the answer to `send_step`, and return whether the step is on the disk. It can be asked once."""
        return self.answer(number, transport.STUCK_S) is not None

    def add_to_loop(self, loop: bytes, offset_ns: int) -> bool:
        """Store rows of the loop; return whether they are on the disk now.

        Args:
            loop: see `xsp.record.loop.Loop.take`.
            offset_ns: what puts their times on the epoch.
        """
        return self.ask(("loop", loop, offset_ns), transport.STUCK_S) is not None

    def finish(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """Write the final `run.json` and the merged step; return what is to be said of them, None if that failed."""
        return self.ask(("finish", json.dumps(run)))


_LEVEL = Span._fields.index("level")


def _columns(rows: Sequence[Span]) -> list[Sequence[Any]]:
    """Return rows as columns, which travel in half of the time; levels as plain numbers."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    columns[_LEVEL] = list(map(int, columns[_LEVEL]))
    return columns


def _completed(columns: list[Sequence[Any]], common: dict[str, Any]) -> list[Sequence[Any]]:
    """Return columns with what all rows have in common."""
    count = len(columns[0])
    for name, value in common.items():
        columns[Span._fields.index(name)] = [value] * count
    return columns


# --- in the second process --------------------------------------------------------------------------------


def main(run: str) -> NoReturn:
    """Run the second process."""
    transport.serve(_storing(Path(run)), Path(run))


@contextlib.contextmanager
def _storing(run: Path) -> Iterator[Callable[[tuple[Any, ...]], Any]]:
    from xsp.store.write import Store

    rundir.hold(run)
    store = Store(run)

    def add(step: int, columns: list[Sequence[Any]], common: dict[str, Any], *of_loop: Any) -> None:
        store.add(step, _completed(columns, common))
        store.add_to_loop(*of_loop)

    does: dict[str, Callable[..., Any]] = {
        "step": add,
        "loop": store.add_to_loop,
        "deliver": store.deliver_to,
        "sample": store.sample,
    }

    def answer_to(message: tuple[Any, ...]) -> Any:
        kind, *content = message
        return store.finish(json.loads(*content)) if kind == "finish" else does[kind](*content) or True

    yield answer_to
    store.close()
