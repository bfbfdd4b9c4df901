"""A store with a stand-in device: `fakecuda.c` replaces NVIDIA's driver."""

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
"""UUID of its first device."""


def build_library(folder: Path) -> Path:
    """Compile the stand-in, and return the library. It has no soname, so that nothing else finds it by that."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stand-in for a GPU's driver is made by a C compiler (cc), and there is none")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-lpthread"], check=True)
    return library


class StandIn:
    """The stand-in, and the violations that it logged."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.log = library.with_name("violations.txt")

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment variables with which a process finds it."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "STANDIN_LOG": str(self.log), **variables}

    def violations(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def serving(standing: StandIn, folder: Path, *words: str, **variables: str) -> Iterator[sharing.StoreProcess]:
    """Run a store with the stand-in's first device; at the end its process must have ended without violations."""
    with sharing.running_store(
        folder, "64MiB", "--device", "0", *words, env=standing.environment(**variables)
    ) as store:
        keeper = status(folder)["pid"]
        yield store
        gc.collect()  # tracebacks of errors keep the test's objects alive
        if store.process.poll() is None:
            store.end()
    wait_for(lambda: has_ended(keeper))
    assert not standing.violations()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def status(folder: Path) -> dict[str, Any]:
    (device_status,) = devices.status(folder)
    return device_status


def attached_pids(folder: Path) -> list[int]:
    """Return the processes that are attached on the device, also to corrupted weights."""
    return sorted(pid for entry in status(folder)["objects"] for pid in entry["attached"])


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + sharing.WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def allocation_count(pid: int) -> int:
    """Return how many allocations of the stand-in a process has."""
    allocations = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            allocations += "stand-in-device" in os.readlink(link)
    return allocations
