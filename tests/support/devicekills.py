"""A process that never uses the device itself, and forks clients that do: FOLDER fork, or FOLDER kill TIMES SEED.

A child that is forked after its parent has used CUDA cannot use CUDA, so this does not run in the test's process.
"""

from __future__ import annotations

import contextlib
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

from xsp.device import cudasharing as driver
from xsp.errors import ShareError
from xsp.share import client, devices

MIB = 1 << 20


def attach_weights(path: Path, folder: Path) -> devices.DeviceWeights:
    return devices.attach(client.attach(path, folder), driver.device(0), "w", folder)


def content(weights: devices.DeviceWeights) -> bytes:
    first = weights.tensors[0]
    return ctypes.string_at(weights.mapping.address + first.offset, first.nbytes)


def fork(folder: Path, files: Path) -> None:
    """Fork after an attachment: the child cannot use it, and it ends with the parent."""
    path = file_of(files, "a", 7)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        weights = attach_weights(path, folder)
        child = os.fork()
        if child == 0:
            try:
                attach_weights(path, folder)
                os._exit(1)
            except ShareError as error:
                if "cannot be used in a child that was forked" not in str(error):
                    os._exit(2)
            del weights  # closes nothing
            os.write(writer, b"x")
            time.sleep(60)
        os.read(reader, 1)
        assert fakecuda.attached_pids(folder).count(os.getpid()) == 1
        assert content(weights) == b"\7" * (64 << 10)
        os.write(writer, child.to_bytes(4, "little"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    child = int.from_bytes(os.read(reader, 4), "little")
    fakecuda.wait_for(lambda: fakecuda.attached_pids(folder) == [])  # although the child still has the connection
    assert not fakecuda.has_ended(child)
    os.kill(child, signal.SIGKILL)


def kill(folder: Path, files: Path, times: int, seed: int) -> None:
    """Kill clients at random moments; check counts and memory from time to time."""
    draw = random.Random(seed)
    paths = [file_of(files, f"k{number}", number + 1, 3 * MIB) for number in range(4)]  # there is room for two
    keeper = fakecuda.status(folder)["pid"]
    living: list[int] = []
    for number in range(times):
        path, writes_weights = paths[draw.randrange(4)], draw.random() < 0.1
        child = os.fork()
        if child == 0:
            try:
                weights = attach_weights(path, folder)
                assert len(set(content(weights))) == 1 or writes_weights
                if writes_weights:
                    ctypes.memset(weights.mapping.address, 0xEE, 1)
                time.sleep(60)
            except ShareError:  # no room
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        living.append(child)
        time.sleep(draw.random() * 0.02)
        sharing.kill_some(living, draw, f"seed {seed}, kill {number}")
        if number % 50 == 49 or number == times - 1:
            sharing.kill_all(living)
            settle(folder, keeper, seed)


def settle(folder: Path, keeper: int, seed: int) -> None:
    """Wait until no process is attached, and compare the counts with the allocated memory."""

    def is_quiet() -> bool:
        status = fakecuda.status(folder)
        return not status["pending_jobs"] and status["connections"] == 1 and not fakecuda.attached_pids(folder)

    fakecuda.wait_for(is_quiet)
    status = fakecuda.status(folder)
    assert status["held_bytes"] == sum(entry["nbytes"] for entry in status["objects"]) <= status["capacity_bytes"]
    assert fakecuda.allocation_count(keeper) == len(status["objects"]), f"seed {seed}"
    (on_host,) = {tuple(entry["attached"]) for entry in client.status(folder)["objects"] if entry["attached"]} or {()}
    assert set(on_host) <= {keeper}
    pidfds = []
    for link in Path(f"/proc/{keeper}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the keeper closed it meanwhile
            pidfds += [link] if "pidfd" in os.readlink(link) else []
    assert not pidfds, f"seed {seed}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as files:
        if sys.argv[2] == "fork":
            fork(Path(sys.argv[1]), Path(files))
        else:
            kill(Path(sys.argv[1]), Path(files), int(sys.argv[3]), int(sys.argv[4]))
