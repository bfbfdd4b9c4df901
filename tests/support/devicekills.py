"""A process that never uses the device itself, and forks clients that do: FOLDER fork, or FOLDER kill TIMES SEED.

A child that was forked after its parent used CUDA cannot use it, so this is no part of the test's own process.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import fakecuda
import sharing
from test_share_store import file_of

from xsp.errors import ShareError
from xsp.share import client, devices, driver

MIB = 1 << 20


def attached(path: Path, folder: Path) -> devices.DeviceWeights:
    return devices.attach(client.attach(path, folder), driver.device(0), "w", folder)


def content(held: devices.DeviceWeights) -> bytes:
    first = held.tensors[0]
    return ctypes.string_at(held.mapping.address + first.offset, first.nbytes)


def fork(folder: Path, files: Path) -> None:
    """Fork after an attachment: the child cannot use it, and the parent's end is the end of it."""
    path = file_of(files, "a", 7)
    reads, writes = os.pipe()
    parent = os.fork()
    if parent == 0:
        held = attached(path, folder)
        child = os.fork()
        if child == 0:
            try:
                attached(path, folder)
                os._exit(1)
            except ShareError as error:
                if "cannot be used in a child that was forked" not in str(error):
                    os._exit(2)
            del held  # closes nothing
            os.write(writes, b"x")
            time.sleep(60)
        os.read(reads, 1)
        assert fakecuda.attached(folder).count(os.getpid()) == 1
        assert content(held) == b"\7" * (64 << 10)
        os.write(writes, child.to_bytes(4, "little"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    child = int.from_bytes(os.read(reads, 4), "little")
    fakecuda.wait_for(lambda: fakecuda.attached(folder) == [])  # though the child has the connection still
    assert not fakecuda.has_ended(child)
    os.kill(child, signal.SIGKILL)


def kill(folder: Path, files: Path, times: int, seed: int) -> None:
    """Kill clients at any moment; look at counts and memory again and again."""
    drawn = random.Random(seed)
    paths = [file_of(files, f"k{at}", at + 1, 3 * MIB) for at in range(4)]  # there is room for two
    keeper = fakecuda.status(folder)["pid"]
    living: list[int] = []
    for at in range(times):
        path, wrote = paths[drawn.randrange(4)], drawn.random() < 0.1
        child = os.fork()
        if child == 0:
            try:
                held = attached(path, folder)
                assert len(set(content(held))) == 1 or wrote
                if wrote:
                    ctypes.memset(held.mapping.address, 0xEE, 1)
                time.sleep(60)
            except ShareError:  # no room
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        living.append(child)
        time.sleep(drawn.random() * 0.02)
        sharing.kill_some(living, drawn, f"seed {seed}, kill {at}")
        if at % 50 == 49 or at == times - 1:
            sharing.kill_all(living)
            settle(folder, keeper, seed)


def settle(folder: Path, keeper: int, seed: int) -> None:
    """Wait until nobody is attached, and compare the counts with the memory that is really there."""

    def is_quiet() -> bool:
        found = fakecuda.status(folder)
        return not found["copying_bytes"] and found["connections"] == 1 and not fakecuda.attached(folder)

    fakecuda.wait_for(is_quiet)
    found = fakecuda.status(folder)
    assert found["held_bytes"] == sum(each["nbytes"] for each in found["objects"]) <= found["capacity_bytes"]
    assert fakecuda.memory_of(keeper) == len(found["objects"]), f"seed {seed}"
    (on_host,) = {tuple(each["attached"]) for each in client.status(folder)["objects"] if each["attached"]} or {()}
    assert set(on_host) <= {keeper}
    pidfds = [each for each in Path(f"/proc/{keeper}/fd").iterdir() if "pidfd" in os.readlink(each)]
    assert not pidfds, f"seed {seed}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        if sys.argv[2] == "fork":
            fork(Path(sys.argv[1]), Path(made))
        else:
            kill(Path(sys.argv[1]), Path(made), int(sys.argv[3]), int(sys.argv[4]))
