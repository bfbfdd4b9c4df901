"""Run the store of this machine until Ctrl-C: weights in sealed memory, handed out over a Unix socket of this user.

Nothing listens on the network. Where the capacity is reached, what was used longest ago goes, or what `--evict` says,
never what a process is attached to. Clients that are attached when the store ends keep their weights; the next store
begins empty.

examples:
  xsp share serve
  xsp share serve --capacity 8GiB
  xsp share serve --dir /run/user/1000/models --capacity 512MiB
  xsp share serve --evict gdsf      what is large, quickly copied and seldom asked for goes first
"""

from __future__ import annotations

import argparse
import re
import signal

from xsp.cli import progress, share
from xsp.errors import UsageError

SUMMARY = "the store, until Ctrl-C"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--capacity", metavar="SIZE", help="of all weights together, such as 8GiB (default: half of what is free)"
    )
    parser.add_argument(
        "--evict",
        choices=("lru", "lfu", "gdsf"),
        default="lru",
        help="what goes first where there is no room: what was used longest ago (lru, the default), what was asked for "
        "least often (lfu), or by uses, time to copy and size together (gdsf)",
    )
    share.placed(parser)


def run(given: argparse.Namespace) -> int:
    """Serve until a signal."""
    from xsp.share import shelf, store, wire

    capacity = _free() // 2 if given.capacity is None else size(given.capacity)
    serving = store.Store(wire.directory(given.dir), capacity, shelf.Eviction(given.evict))
    earlier = signal.set_wakeup_fd(serving.wakes, warn_on_full_buffer=False)  # any thread may get the signal
    before = {each: signal.signal(each, lambda *_: serving.end()) for each in (signal.SIGINT, signal.SIGTERM)}
    progress.tell(f"xsp share: up to {shelf.size_text(capacity)} at {serving.folder}; Ctrl-C ends it", flush=True)
    try:
        serving.serve()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(earlier)
    return 0


def size(text: str) -> int:
    """Read `8GiB`.

    Raises:
        UsageError: something else.
    """
    found = re.fullmatch(r"(\d+)(|KiB|MiB|GiB|TiB)", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--capacity {text!r}: write 8GiB, 512MiB or a number of bytes")
    return int(found[1]) * _UNITS[found[2]]


def _free() -> int:
    """Return how much memory is free, in bytes; 1 GiB where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            told = dict(line.split(":", 1) for line in lines)
        return int(told["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 1 << 30
