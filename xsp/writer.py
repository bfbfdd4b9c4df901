"""A second process that correlates and stores steps, so that neither happens in the measured one.

The measured process sends a step's raw rows through a pipe and waits for the word that they are stored: so
its next step is not disturbed, and what was reported as stored survives its death. Both ends are the same
Python, so rows travel as `marshal`, the format of the interpreter itself.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from xsp.errors import OutputError, PluginError
from xsp.span import Span

if TYPE_CHECKING:
    from xsp.store import Store

_LENGTH = struct.Struct("<Q")
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from xsp.writer import main; main(sys.argv[2])"


class Writer:
    """The measured process's end of the pipe."""

    def __init__(self, run: Path) -> None:
        """Start the second process and wait until it is ready.

        Raises:
            OutputError: it does not start.
        """
        package = str(Path(__file__).resolve().parent.parent)
        command = [sys.executable, "-c", _CODE, package, str(run)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",  # the program's own directory may hold a file called duckdb.py
                start_new_session=True,  # an interrupt in the terminal is for the program
            )
        except OSError as error:
            raise OutputError(f"{run}: the process that stores spans did not start ({error})") from error
        self._owner = os.getpid()
        self.failed: str | None = None
        if self._answer("ready") is None:
            self.close()
            raise OutputError(f"{run}: the process that stores spans did not start; try `xsp doctor`")

    def deliver_to(self, target: str, policy: str) -> None:
        """Have each step delivered once it is stored. The target travels by the pipe: it may hold a password.

        Raises:
            PluginError: what delivers cannot be loaded.
        """
        if self._send(("deliver", target, policy), "delivering") is None:
            reason = self.failed
            self.close()
            raise PluginError(f"spans cannot be delivered: {reason}")

    def sample(self, rank: int, devices: Sequence[str]) -> bool:
        """Have power, clocks and memory read from now on, see `xsp.samples`; return whether it began. Never raises."""
        return self._send(("sample", os.getpid(), rank, list(devices)), "sampling") is not None

    def store(self, step: int, rows: Iterable[Span]) -> bool:
        """Store a step; return whether it is on the disk now. Never raises."""
        return self._send(("step", step, [tuple(row) for row in rows]), "stored") is not None

    def finish(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """Write the final `run.json` and the merged step; return what is to be said of them. Never raises."""
        return self._send(("finish", json.dumps(run)), "finished")

    def close(self) -> None:
        """End the second process. A forked child of the measured process leaves it alone."""
        if os.getpid() != self._owner:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)

    def _send(self, message: tuple[Any, ...], awaited: str) -> dict[str, Any] | None:
        if self.failed is not None or os.getpid() != self._owner:
            return None
        content = marshal.dumps(message)
        try:
            pipe = self._process.stdin
            assert pipe is not None
            pipe.write(_LENGTH.pack(len(content)))
            pipe.write(content)
            pipe.flush()
        except (OSError, ValueError) as error:
            self.failed = f"the process that stores spans is gone ({error})"
            return None
        return self._answer(awaited)

    def _answer(self, awaited: str) -> dict[str, Any] | None:
        """Wait for an answer; one that nobody waited for any more, after an interrupt, is skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                self.failed = str(answer["error"])
                return None
            if awaited in answer:
                return dict(answer)
        self.failed = "the process that stores spans ended"
        return None


def main(run: str) -> NoReturn:
    """Run the second process: read messages until the pipe ends, then end at once, whatever hangs."""
    from xsp.store import Store

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing but answers may reach the pipe
    store = Store(Path(run))
    _say(answers, {"ready": True})
    while (message := _receive(sys.stdin.buffer)) is not None:
        try:
            _say(answers, _answer_to(store, message))
        except Exception as error:  # whatever it is, the measured process must hear of it and go on
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
    store.close()
    sys.stderr.flush()
    os._exit(0)  # a thread may be waiting for a receiver that never answers


def _answer_to(store: Store, message: tuple[Any, ...]) -> dict[str, Any]:
    """Do what a message asks for, and return the answer."""
    kind, *content = message
    if kind == "step":
        store.add(content[0], [Span._make(row) for row in content[1]])
        return {"stored": content[0]}
    if kind == "deliver":
        store.deliver_to(*content)
        return {"delivering": True}
    if kind == "sample":
        store.sample(*content)
        return {"sampling": True}
    return {"finished": store.finish(json.loads(content[0]))}


def _receive(pipe: IO[bytes]) -> Any:
    """Return the next message, or None at the end of the pipe, also in the middle of a message."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = pipe.read(length)
    return marshal.loads(content) if len(content) == length else None


def _say(answers: IO[str], answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
