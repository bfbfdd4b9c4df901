"""A second process that correlates and stores steps, so that neither happens in the measured one.

The measured process sends a step's raw rows, and counts the step as stored at the word that it is on the disk: so what
was reported as stored survives its death. It need not wait for that word (`send_step`, `is_answered`, `is_stored`).
Both ends are the same Python, so rows travel as `marshal`, the format of the interpreter itself.

Either process may die at any moment, and an interrupt may cut off the first one in the middle of a message or of
its wait. So messages are numbered, an answer counts only for the message of its number, and what was cut off is
filled up with zeros, which the reader skips.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from xsp import processes, rundir
from xsp.errors import PluginError, UnwritableError, XspError
from xsp.schema import Span

if TYPE_CHECKING:
    from xsp.store.write import Store

_MARK = b"xsp\x1e"
_HEAD = struct.Struct("<4sIQI")
"""Mark, number, length and CRC-32 of a message."""

_CODE = (
    "import os, sys; os.fork() and os._exit(0); "  # it is no child of the program's, whose os.wait() means its own
    "sys.path.insert(0, sys.argv[1]); from xsp.record.writer import main; main(sys.argv[2])"
)
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program that leaves SIGPIPE to the system would die of it
_PIECE = 1 << 16

START_S = 60.0
STUCK_S = 300.0
"""The longest that a program waits for one step to be stored; a disk that takes longer counts as gone."""

END_S = 60.0


class Writer:
    """The measured process's end; all threads may use it."""

    def __init__(self, run: Path) -> None:
        """Start the second process and wait until it holds the run directory.

        Raises:
            UnwritableError: it does not start, or another process writes to the directory.
        """
        self.failed: str | None = None
        """What went wrong last."""

        self.gone = False
        """Nothing can be stored any more."""

        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._number = self._torn = 0
        self._heard = b""
        self._awaited: dict[int, dict[str, Any] | None] = {}
        """Answers to messages that nobody waits for at present, by number; None if it was not heard yet."""

        self._start(run)
        ready = self._answer(0, START_S)
        if ready is None:
            self.close()
            raise UnwritableError(self.failed if not self.gone else f"{run}: {self.failed}; try `xsp doctor`")
        self.process = int(ready["process"])
        """Number of the second process."""

    def _start(self, run: Path) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(None)  # whatever default the program has set
        os.set_blocking(theirs.fileno(), True)
        try:
            process = processes.start_python(_CODE, str(run), stdin=theirs.fileno())
            try:
                process.wait(START_S)  # it forks the one that stays, and ends
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.wait()
                raise OSError(f"it took more than {START_S:.0f} s") from error
        except OSError as error:
            self._socket.close()
            raise UnwritableError(
                f"{run}: the process that stores spans did not start ({error}); try `xsp doctor`"
            ) from error
        finally:
            theirs.close()

    def deliver_to(self, target: str, policy: str) -> None:
        """Have each step delivered once it is stored. The target travels by the pipe: it may hold a password.

        Raises:
            PluginError: what delivers cannot be loaded.
        """
        if self._ask(("deliver", target, policy)) is None:
            reason = self.failed
            self.close()
            raise PluginError(f"spans cannot be delivered: {reason}")

    def sample(self, rank: int, devices: Sequence[str]) -> bool:
        """Have power, clocks and memory read from now on, see `xsp.samples`; return whether it began. Never raises."""
        return self._ask(("sample", os.getpid(), rank, list(devices))) is not None

    def store(self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int) -> bool:
        """Store a step; return whether it is on the disk now. One that is not stands alone: the next one may be.

        Args:
            step: its number.
            rows: its spans, at least one.
            common: what all of them have in common, by column; put in by the second process.
            loop, offset_ns: see `add_to_loop`.
        """
        return self._ask(("step", step, _columns(rows), common, loop, offset_ns), STUCK_S) is not None

    def send_step(
        self, step: int, rows: Sequence[Span], common: dict[str, Any], loop: bytes, offset_ns: int
    ) -> int | None:
        """Have a step stored while the program goes on.

        Args:
            step, rows, common, loop, offset_ns: as of `store`.

        Returns:
            What to ask `is_answered` and `is_stored` for; None if it could not be sent.
        """
        content = self._packed(("step", step, _columns(rows), common, loop, offset_ns))
        if content is None:
            return None
        with self._turn:
            number = self._post(content)
            if number is not None:
                self._awaited[number] = None
            return number

    def is_answered(self, number: int) -> bool:
        """Return, at once, whether `is_stored` would not wait."""
        with self._turn:
            if self.gone or self._awaited.get(number) is not None or os.getpid() != self._owner:
                return True
            try:
                self._socket.settimeout(0)
                while self._awaited[number] is None:
                    line = self._line()
                    if line is None:
                        self._give_up("the process that stores spans ended")
                        break
                    self._keep(line)
            except BlockingIOError:
                return False
            except OSError as error:
                self._give_up(f"the process that stores spans is gone ({error.strerror or error})")
            return True

    def is_stored(self, number: int) -> bool:
        """Wait for the answer to `send_step`, and return whether the step is on the disk. It can be asked once."""
        with self._turn:
            if (answer := self._awaited.pop(number, None)) is None:
                return not self.gone and os.getpid() == self._owner and self._answer(number, STUCK_S) is not None
            self.failed = answer.get("error", self.failed)
            return answer.get("answer") is not None

    def add_to_loop(self, loop: bytes, offset_ns: int) -> bool:
        """Store rows of the loop; return whether they are on the disk now.

        Args:
            loop: see `xsp.record.loop.Loop.take`.
            offset_ns: what puts their times on the epoch.
        """
        return self._ask(("loop", loop, offset_ns), STUCK_S) is not None

    def finish(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """Write the final `run.json` and the merged step; return what is to be said of them, None if that failed."""
        return self._ask(("finish", json.dumps(run)))

    def close(self) -> None:
        """End the second process. A forked child of the measured process leaves it alone."""
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(END_S)
            while self._socket.recv(_PIECE):
                pass
        self._socket.close()
        self.gone = True

    def forget(self) -> None:
        """Let go in a forked child: the second process ends when the measured one does, not with its children."""
        self._socket.close()

    # --- one message, one answer --------------------------------------------------------------------------

    def _ask(self, message: tuple[Any, ...], patience_s: float | None = None) -> dict[str, Any] | None:
        content = self._packed(message)
        if content is None:
            return None
        with self._turn:
            number = self._post(content)
            return self._answer(number, patience_s) if number is not None else None

    def _packed(self, message: tuple[Any, ...]) -> bytes | None:
        """Return a message as it travels, None if nobody would read it, or it holds what cannot."""
        if self.gone or os.getpid() != self._owner:
            return None
        try:
            return marshal.dumps(message)
        except ValueError as error:
            self.failed = f"a value that is no text and no number ({error})"
            return None

    def _post(self, content: bytes) -> int | None:
        """Send a message and return its number, None if nobody reads it."""
        self._number += 1
        try:
            self._send(self._number, content)
        except OSError as error:
            self._give_up(f"the process that stores spans is gone ({error.strerror or error})")
            return None
        return self._number

    def _send(self, number: int, content: bytes) -> None:
        message = bytes(self._torn) + _HEAD.pack(_MARK, number, len(content), zlib.crc32(content)) + content
        self._torn = len(message)  # an interrupt may come anywhere below, and hide how much was sent
        self._socket.settimeout(STUCK_S)
        rest = memoryview(message)
        while rest:
            rest = rest[self._socket.send(rest, _NO_SIGNAL) :]
        self._torn = 0

    def _answer(self, number: int, patience_s: float | None) -> dict[str, Any] | None:
        """Wait for the answer to a message; those that an interrupt kept from being waited for are skipped."""
        try:
            self._socket.settimeout(patience_s)
            while (line := self._line()) is not None:
                answer = self._keep(line)
                if answer.get("number") == number:
                    self.failed = answer.get("error", self.failed)
                    found: dict[str, Any] | None = answer.get("answer")
                    return found
        except TimeoutError:
            self._give_up(f"the process that stores spans did not answer within {patience_s} s")
        except OSError as error:
            self._give_up(f"the process that stores spans is gone ({error.strerror or error})")
        else:
            self._give_up("the process that stores spans ended")
        return None

    def _keep(self, line: bytes) -> dict[str, Any]:
        """Return the answer that was heard, empty for the rest of one that an interrupt cut off; keep it if awaited."""
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            return {}
        if answer["number"] in self._awaited:
            self._awaited[answer["number"]] = answer
        return answer

    def _line(self) -> bytes | None:
        """Return the next line that was heard, None at the end."""
        while b"\n" not in self._heard:
            received = self._socket.recv(_PIECE)
            if not received:
                return None
            self._heard += received
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _give_up(self, reason: str) -> None:
        self.failed, self.gone = reason, True


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
    """Run the second process: read messages until they end, then end at once, whatever hangs."""
    from xsp.store.write import Store

    answers = os.fdopen(os.dup(0), "w", encoding="utf-8")
    with contextlib.suppress(OSError):  # a program may have closed its own
        os.dup2(2, 1)
    try:
        rundir.hold(Path(run))
        store = Store(Path(run))
    except XspError as error:
        _say(answers, 0, {"error": str(error)})
        os._exit(1)
    _say(answers, 0, {"answer": {"process": os.getpid()}})
    while (message := _receive(sys.stdin.buffer)) is not None:
        number, content = message
        try:
            answer: dict[str, Any] = {"answer": _answer_to(store, marshal.loads(content))}
        except Exception as error:  # whatever it is, the measured process must hear of it and go on
            answer = {"error": _reason(error, run)}
        _say(answers, number, answer)
    store.close()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # a thread may be waiting for a receiver that never answers


def _answer_to(store: Store, message: tuple[Any, ...]) -> dict[str, Any]:
    """Do what a message asks for, and return the answer."""
    kind, *content = message
    if kind == "step":
        step, columns, common, *of_loop = content
        store.add(step, _completed(columns, common))
        store.add_to_loop(*of_loop)
        return {"stored": step}
    if kind == "loop":
        store.add_to_loop(*content)
        return {"stored": True}
    if kind == "deliver":
        store.deliver_to(*content)
        return {"delivering": True}
    if kind == "sample":
        store.sample(*content)
        return {"sampling": True}
    return store.finish(json.loads(content[0]))


def _reason(error: Exception, run: str) -> str:
    """Return what went wrong on one line, without the place of the run: it goes into `run.json`."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first.replace(run, Path(run).name)}"


def _receive(pipe: IO[bytes]) -> tuple[int, bytes] | None:
    """Return number and content of the next whole message, or None at the end, also in the middle of a message."""
    with contextlib.suppress(ConnectionError):  # the program was killed before it took an answer
        while (head := _next_head(pipe)) is not None:
            _, number, length, checksum = _HEAD.unpack(head)
            content = pipe.read(length)
            if zlib.crc32(content) == checksum and len(content) == length:
                return number, content
    return None


def _next_head(pipe: IO[bytes]) -> bytes | None:
    """Return the head of the next message, past what is left of one that was cut off."""
    head = pipe.read(_HEAD.size)
    while len(head) == _HEAD.size and not head.startswith(_MARK):
        begin = head.find(_MARK[:1], 1)
        skipped = begin if begin > 0 else _HEAD.size
        head = head[skipped:] + pipe.read(skipped)
    return head if len(head) == _HEAD.size else None


def _say(answers: IO[str], number: int, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        answers.write(json.dumps({"number": number, **answer}) + "\n")
        answers.flush()
