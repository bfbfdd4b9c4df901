"""The socket of a user's store, and its messages: one JSON object each, with an optional descriptor."""

from __future__ import annotations

import array
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from xsp.errors import ShareError

SOCKET = "store.sock"
DIRECTORY = "XSP_SHARE_DIR"
"""Environment variable with the directory of the store's socket."""

PROTOCOL = 1
"""Version of the messages and of the layout of weights in memory; each message carries it."""

MOST_MESSAGE = 64 << 10
LONGEST_NUMBER = 9
"""Most digits of a device's number."""

LONGEST_PATH = 107
"""Maximum length of a Unix socket's path in bytes."""


def directory(folder: Path | None = None) -> Path:
    """Return the directory of the store's socket: `folder`, else `XSP_SHARE_DIR`, else this user's default."""
    if folder is not None:
        return folder
    if os.environ.get(DIRECTORY):
        return Path(os.environ[DIRECTORY])
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_folder) / "xsp-share" if runtime_folder else Path("/tmp") / f"xsp-share-{os.getuid()}"


def socket_of(folder: Path, name: str = SOCKET) -> str:
    """Return the path of a socket in a directory that only this user can enter.

    Raises:
        ShareError: the directory is missing, another user's or open to others, or the path is too long.
    """
    try:
        info = os.lstat(folder)
    except OSError as error:
        raise ShareError(f"{folder}: no store runs there ({error.strerror}); start one: xsp share serve") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ShareError(f"{folder}: must be your directory, without access for others (chmod 700)")
    path = str(folder / name)
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ShareError(f"{folder}: its path is too long for a socket; give a shorter one with --dir or {DIRECTORY}")
    return path


def device_socket(uuid: str) -> str:
    """Return the socket name of a device's store; it depends on the device's UUID, not on a process's numbering."""
    return f"device-{uuid[:12]}.sock"


def lock_of(name: str) -> str:
    """Return the name of the file that the store of a socket locks; that of a device's store holds its number."""
    return f"{name.removesuffix('.sock')}.lock"


def device_number(folder: Path, name: str) -> str:
    """Return the number of the device whose store had a socket in a directory; empty if none was noted there."""
    try:
        text = (folder / lock_of(name)).read_text(encoding="ascii")[:LONGEST_NUMBER]
    except (OSError, ValueError):
        return ""
    return text if text.isdecimal() else ""


def device_sockets(folder: Path) -> list[str]:
    """Return the socket names of the device stores in a directory; empty if there are none."""
    return sorted(path.name for path in folder.glob("device-*.sock"))


def in_memory(data: bytes) -> int:
    """Return the descriptor of a memfd that contains `data`."""
    memory = os.memfd_create("xsp-share", os.MFD_CLOEXEC)
    with open(memory, "wb", closefd=False) as file:
        file.write(data)
    return memory


def send(connection: socket.socket, message: dict[str, Any], memory: int | None = None) -> None:
    """Send a message, with a descriptor if given.

    Raises:
        OSError: it could not be sent.
    """
    ancillary = [] if memory is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
    connection.sendmsg([json.dumps({**message, "protocol": PROTOCOL}).encode()], ancillary, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors, which the caller has to close; empty at the end of the connection.

    Raises:
        OSError: nothing could be read.
        ShareError: the message exceeds the maximum length.
    """
    text, ancillary, flags, _ = connection.recvmsg(MOST_MESSAGE, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ShareError("a message that is too long")
    return text, list(descriptors)
