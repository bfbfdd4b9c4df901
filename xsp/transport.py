"""Messages to a second process of xsp and its answers, for work that must not happen in the measured process.

Both processes run the same Python, so messages use `marshal`, the interpreter's own format.

Either process may die at any moment, and an interrupt may hit the first one while it sends a message or waits for an
answer. So messages are numbered, an answer belongs to the message with its number, and a message that was cut off is
filled up with zeros, which the reader skips.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from xsp import processes
from xsp.errors import XspError

_MARK = b"xsp\x1e"
_HEADER = struct.Struct("<4sIQI")
"""Mark, number, length and CRC-32 of a message."""

_CODE = (
    "import os, sys; os.fork() and os._exit(0); "  # not a child of the program, whose os.wait() expects only its own
    "sys.path.insert(0, sys.argv[1]); import importlib; importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # SIGPIPE would kill a program that does not ignore it
_CHUNK_BYTES = 1 << 16

START_S = 60.0
STUCK_S = 300.0
"""Longest wait in seconds for the second process to read, or to do one piece of work; a disk takes less or is lost."""

END_S = 60.0


class SecondProcess:
    """The first process's side; all its threads may use it. No method raises: `failure` has the reason."""

    def __init__(self, module: str, *arguments: str, purpose: str) -> None:
        """Start a second process, and wait until it is ready.

        Args:
            module: a module of xsp whose `main` calls `serve`.
            arguments: arguments of that `main`.
            purpose: what it does, for messages: "the process that …".
        """
        self.failure: str | None = None
        """Reason of the last failure."""

        self.is_gone = False
        """Whether the second process no longer answers."""

        self._name = f"the process that {purpose}"
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, tuple[Any, str | None] | None] = {0: None}
        """Answers that were not fetched yet, by message number; None if an answer has not arrived."""

        self._socket, child_end = socket.socketpair()
        self._messages = _Messages(self._socket)
        with child_end:
            os.set_blocking(child_end.fileno(), True)  # the program may have set a default timeout
            try:
                process = processes.start_python(_CODE, module, *arguments, stdin=child_end.fileno())
                try:
                    process.wait(START_S)  # it forks the process that stays, and exits
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    self._give_up(f"did not start within {START_S:.0f} s")
            except OSError as error:
                self._give_up(f"did not start ({error})")
        self.process: int | None = self.answer(0, START_S)
        """Id of the second process; None if it did not start, or refused its work (`is_refused`)."""

        self.is_refused = self.process is None and not self.is_gone
        if self.process is None:
            self.close(0.0)

    # --- one message, one answer --------------------------------------------------------------------------

    def ask(self, message: Any, patience_s: float | None = None) -> Any | None:
        """Send a message and return its answer; None if there is none. Arguments as for `post` and `answer`."""
        number = self.post(message)
        return None if number is None else self.answer(number, patience_s)

    def post(self, message: Any) -> int | None:
        """Send a message: a value that `marshal` accepts, or the bytes that `marshal` made of one.

        Returns:
            The message number for `is_answered` and `answer`; None if it could not be sent.
        """
        if not self._is_usable:
            return None
        try:
            content = message if isinstance(message, bytes) else marshal.dumps(message)
            with self._lock:
                self._number += 1
                self._socket.settimeout(STUCK_S)
                self._messages.send(self._number, content)
                self._answers[self._number] = None
                return self._number
        except (ValueError, OSError) as error:
            if processes.is_from_signal_handler(error):
                raise
            if isinstance(error, OSError):
                self._give_up(f"is gone ({error.strerror or error})")
            else:
                self.failure = f"a value that is no text and no number ({error})"
        return None

    def is_answered(self, number: int, patience_s: float = 0.0) -> bool:
        """Return whether `answer` would return without waiting, as soon as it would, and after `patience_s` at last."""
        deadline = time.monotonic() + patience_s
        with self._lock:
            while (is_waiting := self._answers.get(number) is None and self._is_usable) and (
                self._receive(0.0) or self._is_readable(deadline - time.monotonic())
            ):
                pass
            return not is_waiting or self.is_gone

    def _is_readable(self, patience_s: float) -> bool:
        """Wait until the second process has sent something; return False if it has not within this time."""
        return patience_s > 0 and not self.is_gone and bool(select.select([self._socket], [], [], patience_s)[0])

    def answer(self, number: int, patience_s: float | None = None) -> Any | None:
        """Wait for the answer to a message, and return it; None after a failure, or if the second process is gone.

        Args:
            number: message number; each answer can be fetched once.
            patience_s: longest wait in seconds, after which the second process counts as gone; None for no limit.
        """
        with self._lock:
            try:
                while self._answers.get(number) is None and self._is_usable:
                    self._receive(patience_s)
            finally:
                answer, error = self._answers.pop(number, None) or (None, None)
            self.failure = error or self.failure
            return answer

    def close(self, patience_s: float = END_S, kill: bool = False) -> None:
        """Let the second process finish its work and end, and wait; if it takes longer, kill it if `kill` is set.

        In a forked child this does nothing.
        """
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(patience_s)
            while self._socket.recv(_CHUNK_BYTES):
                pass
        except OSError:  # it has ended already, or takes too long
            if kill:
                self.kill()
        self._socket.close()
        self.is_gone = True

    def kill(self) -> None:
        """Kill the second process; threads that wait for an answer get none."""
        if self.process is not None and self._is_usable:
            with contextlib.suppress(OSError):
                os.kill(self.process, signal.SIGKILL)

    def forget(self) -> None:
        """Close the socket in a forked child: the second process ends with the first one, not with its children."""
        self._socket.close()

    @property
    def _is_usable(self) -> bool:
        return not self.is_gone and os.getpid() == self._owner

    def _receive(self, patience_s: float | None) -> bool:
        """Store the next answer; return False if none came. Drop answers that nobody awaits because of an interrupt."""
        try:
            self._socket.settimeout(patience_s)
            message = self._messages.receive()
        except BlockingIOError:
            return False
        except OSError as error:
            if processes.is_from_signal_handler(error):
                raise
            timed_out = isinstance(error, TimeoutError)
            self._give_up(
                f"did not answer within {patience_s} s" if timed_out else f"is gone ({error.strerror or error})"
            )
        else:
            if message is None:
                self._give_up("ended")
            elif message[0] in self._answers:
                self._answers[message[0]] = marshal.loads(message[1])
        return not self.is_gone

    def _give_up(self, reason: str) -> None:
        self.failure, self.is_gone = f"{self._name} {reason}", True


class _Messages:
    """Numbered messages over a socket, each complete or not at all."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._cut_bytes, self._is_cut = 0, False

    def send(self, number: int, content: bytes) -> None:
        """Send a message, after the padding for a message that an interrupt cut off.

        Raises:
            OSError: nobody reads the message.
        """
        message = bytes(self._cut_bytes) + _HEADER.pack(_MARK, number, len(content), zlib.crc32(content)) + content
        self._cut_bytes = len(message)  # an interrupt may come anywhere below, and hide how much was sent
        remaining = memoryview(message)
        while remaining:
            remaining = remaining[self._socket.send(remaining, _NO_SIGNAL) :]
        self._cut_bytes = 0

    def receive(self) -> tuple[int, bytes] | None:
        """Return number and content of the next complete message; None at the end, also in the middle of a message.

        Raises:
            OSError: from the socket; the received part of a message is kept.
        """
        while (message := self._next_message()) is None:
            if self._is_cut:  # an interrupt lost a received piece: the next one does not continue the message
                self._buffer.clear()
            self._is_cut = True
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except OSError as error:
                self._is_cut = processes.is_from_signal_handler(error)
                raise
            self._buffer += chunk
            self._is_cut = False
            if not chunk:
                return None
        return message

    def _next_message(self) -> tuple[int, bytes] | None:
        """Remove a complete message from the received bytes and return it; skip the rest of those that were cut off."""
        buffer = self._buffer
        while (start := buffer.find(_MARK)) >= 0:
            del buffer[:start]
            if len(buffer) < _HEADER.size:
                return None
            _, number, length, checksum = _HEADER.unpack_from(buffer)
            end = _HEADER.size + length
            if len(buffer) < end:
                return None
            content = bytes(memoryview(buffer)[_HEADER.size : end])
            if zlib.crc32(content) == checksum:
                del buffer[:end]
                return number, content
            del buffer[: len(_MARK)]
        del buffer[: 1 - len(_MARK)]  # the last bytes may be the beginning of a mark
        return None


# --- in the second process --------------------------------------------------------------------------------


def serve(work: contextlib.AbstractContextManager[Callable[[Any], Any]], home: Path | None = None) -> NoReturn:
    """Answer messages until they end, then exit at once, whatever still hangs.

    Args:
        work: context manager; yields the function that answers messages by values that `marshal` accepts, but None. If
            it raises, the first process gets the error, and may go on; an `XspError` on entering is a refusal.
        home: a folder whose path is shortened to its name in errors.
    """
    messages = _Messages(socket.socket(fileno=os.dup(0)))

    def reply(number: int, answer: Any, error: str | None = None) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            messages.send(number, marshal.dumps((answer, error)))

    with contextlib.suppress(OSError):  # the program may have closed its stderr
        os.dup2(2, 1)
    try:
        with work as handle, contextlib.suppress(ConnectionError):  # the first process may be killed
            reply(0, os.getpid())
            while (message := messages.receive()) is not None:
                number, content = message
                try:
                    reply(number, handle(marshal.loads(content)))
                except Exception as error:  # whatever it is, the first process must hear of it and go on
                    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                    reply(number, None, reason if home is None else reason.replace(str(home), home.name))
    except XspError as error:
        reply(0, None, str(error))
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # a thread may be waiting for a receiver that never answers
