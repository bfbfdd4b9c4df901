"""The worker process, which times specs: it reads them as lines of JSON and writes timings in the same form. It loads
neither xsp's table engine nor any state of the parent."""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import time
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from xsp import processes
from xsp.bench.spec import Spec, Timing
from xsp.errors import first_sentence

if TYPE_CHECKING:
    from xsp.device.contract import Device

CELL = struct.Struct("qq")
"""Place of the running spec, and the start of its run in nanoseconds of the monotonic clock.

A place below 0 is that of work beside the specs, see `BESIDE`.
"""

BESIDE = ("other work", "an empty call", "a matrix product", "a copy", "a convolution")
"""What runs beside the specs; the place of the first is -1, that of the next -2."""


def place_beside(work: str) -> int:
    """Return the place in the cell of work beside the specs."""
    return -1 - BESIDE.index(work)


LOST = 3
"""Exit code of a worker whose device is lost to it."""

LEAST_KNOWN_BYTES = 4 << 30
"""Bytes that are taken to be free if the system does not say how many are."""


def work(parent: int, threads: int, cell: int, limit_bytes: int, answers: int) -> None:
    """Report that the process is ready, then time the sittings that arrive on stdin, one per line.

    The first line names the device. If it cannot be used, the reason is the only answer.

    Args:
        parent: process ID of the parent; this process ends with it.
        threads: number of torch threads.
        cell: file to map, which records the running spec: the parent reads it if this process crashes.
        limit_bytes: most bytes that tensors may take; 0 for half of the memory of the device that is free.
        answers: descriptor to which answers are written.
    """
    processes.end_with_parent(parent)
    import torch

    from xsp.device import devices
    from xsp.device.contract import DeviceLost

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    with processes.Questions(answers) as questions, mmap.mmap(cell, CELL.size) as running:

        def mark(place: int) -> None:
            running[:] = CELL.pack(place, time.monotonic_ns())

        device = devices.of(next(iter(questions))["device"])
        reason = device.obstacle()
        if reason is not None:
            questions.answer({"obstacle": reason})
            return
        # the parent must not ask an accelerator for its memory: that would take some of it
        limit_bytes = limit_bytes or (device.free_bytes() or LEAST_KNOWN_BYTES) // 2
        device.begin(limit_bytes)
        memory = {"memory_bytes": limit_bytes, "rotated_bytes": device.rotated_bytes()}
        questions.answer({"ready": True, **memory})
        for request in questions:
            mark(place_beside("other work"))
            try:
                _sit(request, mark, questions.answer, limit_bytes, device)
            except DeviceLost:
                _leave(questions)
            except Exception as error:  # of the fixed work beside the blocks
                fault = device.fault(error)
                if fault is None:
                    raise
                questions.answer({"fault": fault.value, "reason": first_sentence(error)})
                _leave(questions)


def _leave(questions: processes.Questions) -> NoReturn:
    """End this process, whose device is lost to it: another one gets it anew, if it still answers."""
    questions.close()
    os._exit(LOST)  # libraries that find the device lost may wait for it at the exit


def _sit(request: dict[str, Any], mark: Any, send: Any, limit_bytes: int, device: Device) -> None:
    from xsp.bench import rounds

    specs = [Spec.from_plain(spec) for spec in request["specs"]]
    ratio = rounds.sit(
        specs,
        lambda place, timing: send({"place": place, "timing": to_plain(timing)}),
        mark,
        seconds=request["seconds"],
        rotated_bytes=request["rotated_bytes"],
        limit_bytes=limit_bytes,
        seed=request["seed"],
        device=device,
    )
    send({"canary_ratio": ratio, "note": device.disturbance()})


def to_plain(timing: Timing) -> dict[str, Any]:
    """Return a timing as plain values for JSON, without the fields that its spec determines."""
    left_out = {"calls", "key", "work_key", "op", "variant", "state", "threads", "runtime", "environment"}
    values = dataclasses.asdict(timing)
    return {name: value for name, value in values.items() if name not in left_out}
