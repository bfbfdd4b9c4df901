"""Run the store until Ctrl-C: weights in sealed shared memory, offered over a Unix socket of this user.

Nothing listens on the network. If the capacity is reached, the least recently used weights are evicted, or those that
--evict chooses, never weights that a process is attached to. Attached clients keep their weights when the store ends;
the next store begins empty.

examples:
  xsp share serve
  xsp share serve --capacity 8GiB
  xsp share serve --dir /run/user/1000/models --capacity 512MiB
  xsp share serve --evict gdsf      also by size and time to copy
"""

from __future__ import annotations

import argparse
import re
import signal

from xsp.cli import progress, share
from xsp.errors import UsageError

SUMMARY = "run the store, until Ctrl-C"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--capacity", metavar="SIZE", help="memory for all weights, such as 8GiB (default: half of the free memory)"
    )
    parser.add_argument(
        "--evict",
        choices=("lru", "lfu", "gdsf"),
        default="lru",
        help="what is evicted first: the least recently used (lru, the default), the least frequently requested (lfu), "
        "or by uses, time to copy and size together (gdsf)",
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
