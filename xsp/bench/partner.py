"""The partner process of transfers between processes, and both ends of the channels between the two.

The partner inherits all channels, and none has a name: pipes, socket pairs, a file that both map. So nothing is left
behind, whichever of the two is killed. The partner process needs neither torch nor the table engine.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from xsp import processes

_CODE = processes.calling("xsp.bench.partner", "answer")

MAPPED = ("shared-memory", "mapped-file")
"""Families whose messages lie in memory that both processes map: a memfd, or a file in a folder."""

PATIENCE_S = 15.0
"""Seconds to wait for the partner to start or to answer."""


class Ended(Exception):
    """Raised if the other process has ended."""


class Ends:
    """This process's ends of all channels."""

    def __init__(self, control: int, pipe_in: int, pipe_out: int, local: int, tcp: int, shared: int, size: int) -> None:
        self.control = socket.socket(fileno=control)
        self.pipe_in, self.pipe_out = pipe_in, pipe_out
        self.sockets = {"unix-socket": socket.socket(fileno=local), "tcp-loopback": socket.socket(fileno=tcp)}
        self.memory = mmap.mmap(shared, size)
        self.size = size
        self.held = memoryview(bytearray(size))

    def close(self) -> None:
        """Close all channels."""
        self.held.release()
        self.memory.close()
        for each in (self.control, *self.sockets.values()):
            each.close()
        for number in (self.pipe_in, self.pipe_out):
            os.close(number)

    def send(self, how: str, size: int) -> None:
        """Send a message and wait for its answer."""
        if how.endswith("-duplex"):
            self._exchange(self.sockets[how.removesuffix("-duplex")], size)
        elif how in MAPPED:
            self.memory[:size] = self.held[:size]
            self.control.sendall(b"x")
            _byte(self.control)
        elif how == "pipe":
            _write(self.pipe_out, self.held[:size])
            if not os.read(self.pipe_in, 1):
                raise Ended
        else:
            self.sockets[how].sendall(self.held[:size])
            _byte(self.sockets[how])

    def receive(self, how: str, size: int) -> None:
        """Receive a message and answer it."""
        if how.endswith("-duplex"):
            self._exchange(self.sockets[how.removesuffix("-duplex")], size)
        elif how in MAPPED:
            _byte(self.control)
            self.held[:size] = self.memory[:size]
            self.control.sendall(b"x")
        elif how == "pipe":
            done = 0
            while done < size:
                read = os.readv(self.pipe_in, [self.held[done:size]])
                if not read:
                    raise Ended
                done += read
            os.write(self.pipe_out, b"x")
        else:
            _fill(self.sockets[how], self.held[:size])
            self.sockets[how].sendall(b"x")

    def _exchange(self, over: socket.socket, size: int) -> None:
        """Send and receive `size` bytes at the same time."""
        sent = got = 0
        patience = over.gettimeout()
        over.setblocking(False)
        try:
            while sent < size or got < size:
                wanted = [over] if got < size else [], [over] if sent < size else []
                readable, writable, _ = select.select(*wanted, [], patience)
                if not readable and not writable:
                    raise TimeoutError(f"no byte within {patience} s")
                if writable:
                    sent += over.send(self.held[sent:size])
                if readable:
                    read = over.recv_into(self.held[got:size])
                    if not read:
                        raise Ended
                    got += read
        finally:
            over.settimeout(patience)


def _write(number: int, what: memoryview) -> None:
    while what:
        what = what[os.write(number, what) :]


def _byte(over: socket.socket) -> None:
    if not over.recv(1):
        raise Ended


def _fill(over: socket.socket, what: memoryview) -> None:
    while what:
        read = over.recv_into(what)
        if not read:
            raise Ended
        what = what[read:]


class Partner:
    """The partner process, as seen by the process that times."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """Start the partner process.

        Args:
            size: bytes of the largest message.
            folder: folder for the file that both map; without it, both map a file in memory (a memfd).

        Raises:
            OSError: the process cannot be started, there is no loopback, or the folder has no room.
        """
        self.failed = False
        """Whether a batch failed: the processes no longer agree on which message comes next."""

        control, local, tcp = socket.socketpair(), socket.socketpair(), _tcp_pair()
        shared = _shared(size, folder)
        there, back = os.pipe(), os.pipe()
        theirs = [each[1].detach() for each in (control, local, tcp)]
        numbers = [theirs[0], there[0], back[1], theirs[1], theirs[2], shared]
        try:
            self._process = processes.start_python(
                _CODE, str(os.getpid()), *map(str, numbers), str(size),
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=numbers,
            )  # fmt: skip
            self.ends = Ends(
                control[0].detach(), back[0], there[1], local[0].detach(), tcp[0].detach(), os.dup(shared), size
            )
        except OSError:
            os.close(back[0])
            os.close(there[1])
            raise
        finally:
            for number in numbers:
                os.close(number)
        self.ends.control.settimeout(PATIENCE_S)
        for each in self.ends.sockets.values():
            each.settimeout(PATIENCE_S)

    def timed(self, how: str, size: int) -> Callable[[int], int]:
        """Return a function that times a number of messages; one message before them is not timed."""

        def batch(calls: int) -> int:
            try:
                question = json.dumps([how, size, calls + 1]).encode()
                self.ends.control.sendall(question.ljust(128))
                _byte(self.ends.control)
                self.ends.send(how, size)
                began = time.perf_counter_ns()
                for _ in range(calls):
                    self.ends.send(how, size)
                return time.perf_counter_ns() - began
            except (OSError, Ended) as error:
                self.failed = True
                raise RuntimeError(f"the other process does not answer ({error or 'it ended'})") from error

        return batch

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.ends.close()


def _shared(size: int, folder: Path | None) -> int:
    """Return the descriptor of an unnamed file; its bytes in a folder are reserved, so writes to a mapping cannot fail.

    Raises:
        OSError: there is no room.
    """
    if folder is None:
        number = os.memfd_create("xsp-transfers")
        os.ftruncate(number, size)
        return number
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection on loopback; nothing is listening afterwards."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        one = socket.create_connection(listening.getsockname(), PATIENCE_S)
        other, whose = listening.accept()
        if whose != one.getsockname():  # another process connected first
            raise OSError("another process connected")
    for each in (one, other):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def answer(parent: int, *numbers: int) -> None:
    """Run as the partner process: receive the requested messages until the first process ends."""
    processes.end_with_parent(parent)
    ends = Ends(*numbers)
    with contextlib.suppress(OSError, Ended):
        while True:
            question = memoryview(bytearray(128))
            _fill(ends.control, question)
            how, size, calls = json.loads(bytes(question))
            ends.control.sendall(b"x")
            for _ in range(calls):
                ends.receive(how, size)
    sys.exit(0)
