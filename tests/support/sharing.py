"""A store in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from xsp.errors import ShareError
from xsp.share import client

_SERVE = "import sys; from xsp.cli import main; sys.exit(main(sys.argv[1:]))"
WITHIN_S = 60.0


class Running:
    """A store that can be killed and started again."""

    def __init__(self, folder: Path, capacity: str, *words: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._words = ["share", "serve", "--dir", str(folder), "--capacity", capacity, *words]
        self._env = {**os.environ, **env} if env is not None else None
        self.start()

    def start(self) -> None:
        with open(self.folder.with_suffix(".stderr"), "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *self._words], stdout=subprocess.PIPE, stderr=errors, env=self._env
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.complaints()

    def end(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(WITHIN_S)

    def complaints(self) -> str:
        """Return what it wrote to stderr."""
        return self.folder.with_suffix(".stderr").read_text()

    def descriptors(self) -> int:
        """Count the store's descriptors, but for sockets and for what it closes a moment after it has answered."""
        folder = Path(f"/proc/{self.process.pid}/fd")

        def now() -> int:
            found = 0
            for each in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found += not os.readlink(each).startswith("socket:")
            return found

        counts = []
        for _ in range(20):
            counts.append(now())
            time.sleep(0.002)
        return min(counts)

    def attached(self) -> list[int]:
        return sorted(pid for each in client.status(self.folder)["objects"] for pid in each["attached"])

    def wait_for(self, pids: list[int]) -> None:
        """Wait until just these processes are attached: an end of theirs is heard of a moment later."""
        until = time.monotonic() + WITHIN_S
        while (found := self.attached()) != sorted(pids):
            assert time.monotonic() < until, (found, sorted(pids))
            time.sleep(0.002)


@contextlib.contextmanager
def running(folder: Path, capacity: str = "1GiB", *words: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    store = Running(folder, capacity, *words, env=env)
    try:
        yield store
    finally:
        if store.process.poll() is None:
            store.end(signal.SIGKILL)


def there_is_none(folder: Path) -> bool:
    with contextlib.suppress(ShareError):
        client.status(folder)
        return False
    return True


def kill_some(living: list[int], drawn: random.Random, when: str) -> None:
    """Kill drawn children until at most three live; each was alive until then."""
    while len(living) > drawn.randrange(4):
        gone = living.pop(drawn.randrange(len(living)))
        os.kill(gone, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(gone, 0)[1]) == -signal.SIGKILL, when


def kill_all(living: list[int]) -> None:
    """Kill the children that are left."""
    for gone in living:
        os.kill(gone, signal.SIGKILL)
        os.waitpid(gone, 0)
    living.clear()
