"""The partner process of transfers between processes, and both ends of the channels between the two.

The partner inherits all channels, and none has a name: pipes, socket pairs, a file that both map. So nothing remains
if either of the two is killed. The partner process needs neither torch nor the table engine.
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

_CODE = processes.call_code("xsp.bench.partner", "answer")

MAPPED = ("shared-memory", "mapped-file")
"""Families whose messages are in memory that both processes map: a memfd, or a file in a folder."""

PATIENCE_S = 15.0
"""Seconds to wait for the partner to start or to answer."""


class PartnerEnded(Exception):
    """Raised if the other process has ended."""


class Channels:
    """This process's ends of all channels."""

    def __init__(self, control: int, pipe_in: int, pipe_out: int, local: int, tcp: int, shared: int, size: int) -> None:
        self.control = socket.socket(fileno=control)
        self.pipe_in, self.pipe_out = pipe_in, pipe_out
        self.sockets = {"unix-socket": socket.socket(fileno=local), "tcp-loopback": socket.socket(fileno=tcp)}
        self.memory = mmap.mmap(shared, size)
        self.size = size
        self.buffer = memoryview(bytearray(size))

    def close(self) -> None:
        """Close all channels."""
        self.buffer.release()
        self.memory.close()
        for channel in (self.control, *self.sockets.values()):
            channel.close()
        for descriptor in (self.pipe_in, self.pipe_out):
            os.close(descriptor)

    def send(self, family: str, size: int) -> None:
        """Send a message and wait for its answer."""
        if family.endswith("-duplex"):
            self._exchange(self.sockets[family.removesuffix("-duplex")], size)
        elif family in MAPPED:
            self.memory[:size] = self.buffer[:size]
            self.control.sendall(b"x")
            _byte(self.control)
        elif family == "pipe":
            view = self.buffer[:size]
            while view:
                view = view[os.write(self.pipe_out, view) :]
            if not os.read(self.pipe_in, 1):
                raise PartnerEnded
        else:
            self.sockets[family].sendall(self.buffer[:size])
            _byte(self.sockets[family])

    def receive(self, family: str, size: int) -> None:
        """Receive a message and answer it."""
        if family.endswith("-duplex"):
            self._exchange(self.sockets[family.removesuffix("-duplex")], size)
        elif family in MAPPED:
            _byte(self.control)
            self.buffer[:size] = self.memory[:size]
            self.control.sendall(b"x")
        elif family == "pipe":
            received = 0
            while received < size:
                count = os.readv(self.pipe_in, [self.buffer[received:size]])
                if not count:
                    raise PartnerEnded
                received += count
            os.write(self.pipe_out, b"x")
        else:
            _fill(self.sockets[family], self.buffer[:size])
            self.sockets[family].sendall(b"x")

    def _exchange(self, connection: socket.socket, size: int) -> None:
        """Send and receive `size` bytes at the same time."""
        sent = received = 0
        patience = connection.gettimeout()
        connection.setblocking(False)
        try:
            while sent < size or received < size:
                waiting = [connection] if received < size else [], [connection] if sent < size else []
                readable, writable, _ = select.select(*waiting, [], patience)
                if not readable and not writable:
                    raise TimeoutError(f"no byte within {patience} s")
                if writable:
                    sent += connection.send(self.buffer[sent:size])
                if readable:
                    count = connection.recv_into(self.buffer[received:size])
                    if not count:
                        raise PartnerEnded
                    received += count
        finally:
            connection.settimeout(patience)


def _byte(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise PartnerEnded


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise PartnerEnded
        view = view[count:]


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
        self.has_failed = False
        """Whether a batch failed: the processes no longer agree on which message comes next."""

        control, local, tcp = socket.socketpair(), socket.socketpair(), _tcp_pair()
        shared = _shared(size, folder)
        outgoing, incoming = os.pipe(), os.pipe()
        partner_ends = [pair[1].detach() for pair in (control, local, tcp)]
        descriptors = [partner_ends[0], outgoing[0], incoming[1], partner_ends[1], partner_ends[2], shared]
        try:
            self._process = processes.start_python(
                _CODE, str(os.getpid()), *map(str, descriptors), str(size),
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=descriptors,
            )  # fmt: skip
            self.channels = Channels(
                control[0].detach(), incoming[0], outgoing[1], local[0].detach(), tcp[0].detach(), os.dup(shared), size
            )
        except OSError:
            os.close(incoming[0])
            os.close(outgoing[1])
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.channels.control.settimeout(PATIENCE_S)
        for connection in self.channels.sockets.values():
            connection.settimeout(PATIENCE_S)

    def timer(self, family: str, size: int) -> Callable[[int], int]:
        """Return a function that times a number of messages; one message before them is not timed."""

        def batch(calls: int) -> int:
            try:
                request = json.dumps([family, size, calls + 1]).encode()
                self.channels.control.sendall(request.ljust(128))
                _byte(self.channels.control)
                self.channels.send(family, size)
                start = time.perf_counter_ns()
                for _ in range(calls):
                    self.channels.send(family, size)
                return time.perf_counter_ns() - start
            except (OSError, PartnerEnded) as error:
                self.has_failed = True
                raise RuntimeError(f"the other process does not answer ({error or 'it ended'})") from error

        return batch

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.channels.close()


def _shared(size: int, folder: Path | None) -> int:
    """Return the descriptor of an unnamed file; its bytes in a folder are reserved, so writes to a mapping cannot fail.

    Raises:
        OSError: there is no room.
    """
    if folder is None:
        descriptor = os.memfd_create("xsp-transfers")
        os.ftruncate(descriptor, size)
        return descriptor
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection on loopback; nothing is listening afterwards."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = socket.create_connection(listener.getsockname(), PATIENCE_S)
        server, address = listener.accept()
        if address != client.getsockname():  # another process connected first
            raise OSError("another process connected")
    for connection in (client, server):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def answer(parent: int, *numbers: int) -> None:
    """Run as the partner process: receive the requested messages until the first process ends."""
    processes.end_with_parent(parent)
    channels = Channels(*numbers)
    with contextlib.suppress(OSError, PartnerEnded):
        while True:
            request = memoryview(bytearray(128))
            _fill(channels.control, request)
            family, size, calls = json.loads(bytes(request))
            channels.control.sendall(b"x")
            for _ in range(calls):
                channels.receive(family, size)
    sys.exit(0)
