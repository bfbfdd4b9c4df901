"""A store with a device that is a stand-in: `fakecuda.c` in the place of NVIDIA's driver."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharing

from xsp.share import devices

_SOURCE = Path(__file__).with_suffix(".c")
UUID = "00" + "5a" * 15
"""Of its first device."""


def built(folder: Path) -> Path:
    """Compile it, and return the library. It has no name of its own inside, so that nobody else finds it by that."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stand-in for a GPU's driver is made by a C compiler (cc), and there is none")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-lpthread"], check=True)
    return library


class Standing:
    """The stand-in, and what it complained about."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.log = library.with_name("violations.txt")

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables for a process that is to find it."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "STANDIN_LOG": str(self.log), **more}

    def violations(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def serving(standing: Standing, folder: Path, *words: str, **more: str) -> Iterator[sharing.Running]:
    """Run a store with the stand-in's first device; at the end its process must have ended, without a complaint."""
    with sharing.running(folder, "64MiB", "--device", "0", *words, env=standing.environment(**more)) as there:
        keeper = status(folder)["pid"]
        yield there
        gc.collect()  # tracebacks of errors hold what the test had
        if there.process.poll() is None:
            there.end()
    wait_for(lambda: has_ended(keeper))
    assert not standing.violations()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is only not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def status(folder: Path) -> dict[str, Any]:
    (found,) = devices.status(folder)
    return found


def attached(folder: Path) -> list[int]:
    """Return the processes that are attached on the device, also to what is corrupted."""
    return sorted(pid for each in status(folder)["objects"] for pid in each["attached"])


def wait_for(true: Any) -> None:
    until = time.monotonic() + sharing.WITHIN_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def memory_of(pid: int) -> int:
    """Return how many allocations of the stand-in a process has."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "stand-in-device" in os.readlink(each)
    return found
