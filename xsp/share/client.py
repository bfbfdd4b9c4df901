"""The client side: request weights from the store and map them, without torch.

The connection lives as long as the mapping. A forked child inherits both, so the attachment ends with the last process
that has them.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsp import clock
from xsp.errors import ShareError
from xsp.record.blocks import add_span, span
from xsp.share import pages, store, weights, wire

PATIENCE_S = 300.0
"""Seconds to wait for the store, which may have to copy the weights first."""

_NO_STORE = "no store runs there ({}); start one: xsp share serve"
_STORE_ENDED = "the store ended before it answered; start one (xsp share serve) and attach again"
_OTHER_VERSION = "the store is of another version of xsp; end it, and start one of this version: xsp share serve"


class StoreEndedError(ShareError):
    """A store that ended before it answered."""


class Mapping:
    """Weights mapped for reading, with the connection that represents their attachment.

    A process that writes to them ends with SIGSEGV. The memory is sealed, so it cannot be mapped for writing either.
    The mapping ends with its last view.
    """

    def __init__(self, memory: int, nbytes: int, connection: socket.socket) -> None:
        """Map a descriptor, which the caller closes.

        Raises:
            ShareError: the memory is not sealed, or cannot be mapped.
        """
        import fcntl

        try:
            is_sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS) & store.SEALS == store.SEALS
        except OSError:
            is_sealed = False
        if not is_sealed or os.fstat(memory).st_size != nbytes:
            raise ShareError("the store provided memory that is not sealed")
        try:
            self.address = pages.map_shared(memory, nbytes)
        except OSError as error:
            raise ShareError(f"the weights cannot be mapped ({error.strerror})") from error
        self.nbytes = nbytes
        self.connection = connection

    def bytes(self) -> ctypes.Array[ctypes.c_char]:
        """Return the whole mapping as an array, which keeps the mapping alive. It must not be written."""
        array: Any = _array(self.nbytes).from_address(self.address)
        array.mapping = self
        return array  # type: ignore[no-any-return]

    def __del__(self, unmap: Any = pages.unmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.nbytes)
            self.connection.close()


def _array(nbytes: int) -> Any:
    return type("Weights", (ctypes.c_char * nbytes,), {})


class AttachedWeights:
    """Weights that this process is attached to."""

    def __init__(self, answer: dict[str, Any], mapping: Mapping) -> None:
        self.key: str = answer["key"]
        self.hit: bool = answer["hit"]
        self.generation: str = answer["generation"]
        self.mapping = mapping
        self.array = mapping.bytes()
        self.tensors = weights.read_table(memoryview(self.array))


def connect(
    folder: Path | None = None,
    patience_s: float = PATIENCE_S,
    name: str = wire.SOCKET,
    missing_message: str = _NO_STORE,
) -> socket.socket:
    """Return a connection to the store of a directory.

    Args:
        folder: directory of the store's socket.
        patience_s: seconds to wait for each of the store's answers.
        name: file name of the socket.
        missing_message: the message if no store runs there.

    Raises:
        ShareError: no store runs there.
    """
    directory = wire.directory(folder)
    path = wire.socket_of(directory, name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(patience_s)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                connection.connect(path)
                return connection
            except BlockingIOError:  # more clients than the socket's queue holds are waiting to be accepted
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.01)
    except TimeoutError:
        connection.close()
        raise ShareError(f"{directory}: the store there did not answer within {patience_s:.0f} s") from None
    except OSError as error:
        connection.close()
        raise ShareError(f"{directory}: {missing_message.format(error.strerror)}") from error


def ask(
    connection: socket.socket, request: dict[str, Any], file: int | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Send a message and return the answer, with descriptors that the caller has to close.

    Raises:
        StoreEndedError: the store has ended.
        ShareError: the store refuses, has another version, or does not answer in time.
    """
    try:
        try:
            wire.send(connection, request, file)
            text, descriptors = wire.receive(connection)
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # a store without a place answers before it is asked, and closes
            text, descriptors = wire.receive(connection)
    except TimeoutError:
        raise ShareError(f"the store did not answer within {connection.gettimeout():.0f} s") from None
    except OSError as error:
        raise StoreEndedError(f"{_STORE_ENDED} ({error.strerror})") from error
    if not text:
        raise StoreEndedError(_STORE_ENDED)
    try:
        return _understood(text), descriptors
    except ShareError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _understood(text: bytes) -> dict[str, Any]:
    """Return a store's answer; an error that it names, and an answer of another version, are errors."""
    try:
        answer: Any = json.loads(text)
    except ValueError as error:
        raise ShareError(_OTHER_VERSION) from error
    if not isinstance(answer, dict) or answer.pop("protocol", None) != wire.PROTOCOL:
        raise ShareError(_OTHER_VERSION)
    if "error" in answer:
        raise ShareError(str(answer["error"]))
    return answer


def attach(
    source: str | os.PathLike[str] | int, folder: Path | None = None, patience_s: float = PATIENCE_S
) -> AttachedWeights:
    """Attach to the weights of a file; the store copies them if it does not hold them.

    Args:
        source: a safetensors file; a key of the store, as 8 or more hexadecimal digits after `sha256:`; or the
            descriptor of a file.
        folder: directory of the store's socket, see `xsp.share.wire.directory`.
        patience_s: seconds to wait for the store.

    Raises:
        ShareError: there is no store or no such file, or the store refuses the file; the message gives the reason.
    """
    connection, answer, descriptors = request_attachment(
        "share", lambda: connect(folder, patience_s), lambda connection: _request_weights(connection, source)
    )
    with span("share.map"):
        try:
            mapping = Mapping(descriptors[0], answer["nbytes"], connection)
        except BaseException:
            connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return AttachedWeights(answer, mapping)


def request_attachment(
    span_name: str,
    open_connection: Callable[[], socket.socket],
    send_request: Callable[[socket.socket], tuple[dict[str, Any], list[int]]],
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Return the connection of an attachment, the answer and its descriptors; record spans, the store's work included.

    Args:
        span_name: prefix of the span names; `.hit` or `.miss` follows.
        open_connection: returns a connection, which is closed if `send_request` fails.
        send_request: sends the request over the connection and returns the answer and its descriptors.

    Raises:
        ShareError: `open_connection` or `send_request` failed.
    """
    with span(f"{span_name}.hit") as block:
        request_ns = clock.monotonic_ns()
        connection = open_connection()
        try:
            answer, descriptors = send_request(connection)
        except BaseException:
            connection.close()
            raise
        block.name = f"{span_name}.hit" if answer["hit"] else f"{span_name}.miss"
        for name, start_ns, end_ns in answer["spans"]:  # the copy may have begun earlier, for another process
            add_span(name, min(max(start_ns, request_ns), end_ns), end_ns)
    return connection, answer, descriptors


def _request_weights(
    connection: socket.socket, source: str | os.PathLike[str] | int
) -> tuple[dict[str, Any], list[int]]:
    if isinstance(source, int):
        return ask(connection, {"ask": "attach", "source": "a state dict"}, source)
    text = os.fsdecode(source)
    if text.startswith("sha256:"):
        return ask(connection, {"ask": "attach", "key": text.partition(":")[2]})
    try:
        file = os.open(text, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not block on a named pipe
    except (OSError, ValueError) as error:
        raise ShareError(f"{text}: cannot be read ({getattr(error, 'strerror', error)})") from error
    try:
        return ask(connection, {"ask": "attach", "source": os.path.abspath(text)}, file)
    finally:
        os.close(file)


def status(folder: Path | None = None, name: str = wire.SOCKET) -> dict[str, Any]:
    """Return the contents of the store of a socket and its attached processes, from the store's `status`.

    Raises:
        ShareError: there is no store.
    """
    with connect(folder, name=name) as connection:
        state: dict[str, Any] = ask_large(connection, {"ask": "status"})
    return state


def ask_large(connection: socket.socket, request: dict[str, Any]) -> Any:
    """Return an answer that is too long for a message, so the store sends it in memory.

    Raises:
        ShareError: see `ask`.
    """
    _, descriptors = ask(connection, request)
    with open(descriptors[0], "rb") as file:
        return json.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))


def evict(key: str, folder: Path | None = None, name: str = wire.SOCKET) -> dict[str, Any]:
    """Free an object that no process is attached to, by the first digits of its key; `*` frees all such objects.

    Args:
        key: the first digits, or `*`.
        folder: directory of the store's socket.
        name: file name of the socket.

    Returns:
        How many objects were `evicted`, and how many are `attached` and stay.

    Raises:
        ShareError: there is no store or no such object, or a process is attached to the object.
    """
    with connect(folder, name=name) as connection:
        return ask(connection, {"ask": "evict", "key": key})[0]
