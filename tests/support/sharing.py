"""A store in a separate process, for tests."""

from __future__ import annotations

import contextlib
import os
import random
import resource
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


class StoreProcess:
    """A store that can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        capacity: str,
        *words: str,
        env: dict[str, str] | None = None,
        most_descriptors: int | None = None,
    ) -> None:
        self.folder = folder
        self._most_descriptors = most_descriptors
        self._words = ["share", "serve", "--dir", str(folder), "--capacity", capacity, *words]
        self._env = {**os.environ, **env} if env is not None else None
        self.start()

    def start(self) -> None:
        with open(self.folder.with_suffix(".stderr"), "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *self._words], stdout=subprocess.PIPE, stderr=errors, env=self._env,
                preexec_fn=self._limit_descriptors,
            )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.complaints()

    def _limit_descriptors(self) -> None:
        if (most := self._most_descriptors) is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(WITHIN_S)

    def complaints(self) -> str:
        """Return what it wrote to stderr."""
        return self.folder.with_suffix(".stderr").read_text()

    def descriptors(self) -> int:
        """Count the store's descriptors, without sockets and without those that it closes soon after an answer."""
        folder = Path(f"/proc/{self.process.pid}/fd")

        def now() -> int:
            count = 0
            for link in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    count += not os.readlink(link).startswith("socket:")
            return count

        counts = []
        for _ in range(20):
            counts.append(now())
            time.sleep(0.002)
        return min(counts)

    def attached(self) -> list[int]:
        return sorted(pid for entry in client.status(self.folder)["objects"] for pid in entry["attached"])

    def wait_for(self, pids: list[int]) -> None:
        """Wait until exactly these processes are attached; the store notices the end of a process a moment later."""
        deadline = time.monotonic() + WITHIN_S
        while (attached := self.attached()) != sorted(pids):
            assert time.monotonic() < deadline, (attached, sorted(pids))
            time.sleep(0.002)


@contextlib.contextmanager
def running_store(
    folder: Path, capacity: str = "1GiB", *words: str, env: dict[str, str] | None = None
) -> Iterator[StoreProcess]:
    store = StoreProcess(folder, capacity, *words, env=env)
    try:
        yield store
    finally:
        if store.process.poll() is None:
            store.end(signal.SIGKILL)


def is_absent(folder: Path) -> bool:
    with contextlib.suppress(ShareError):
        client.status(folder)
        return False
    return True


def kill_some(living: list[int], draw: random.Random, message: str) -> None:
    """Kill random children until at most three are left; each must have been alive until then."""
    while len(living) > draw.randrange(4):
        pid = living.pop(draw.randrange(len(living)))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, message


def kill_all(living: list[int]) -> None:
    """Kill the children that are left."""
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    living.clear()
