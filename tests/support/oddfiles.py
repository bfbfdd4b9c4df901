"""Files that are no ordinary ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def socket_file(path: Path) -> None:
    """Make a socket that nobody listens to."""
    here = Path.cwd()
    os.chdir(path.parent)  # a path of a socket may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def holes(path: Path) -> None:
    """Make a file of a terabyte that takes no room on the disk."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)
