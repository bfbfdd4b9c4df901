"""Does a model load faster from a store that holds its weights on the device than from a file, and is there one copy?

Fresh processes take turns: `safetensors.torch.load_file` onto the device, and `xsp.share.attach` to a store that
already has the weights there. Each process has used the device and run the model before, with other weights, so that
loading and the first call are compared. Then four processes are attached at the same time: the bytes of the store on
the device, plus the bytes that torch has allocated there in each process, are compared with the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import gpu_workloads, share_worker, turns

from xsp import models, processes
from xsp.share import devices, measuring
from xsp.share.loadworker import ATTACH, MMAP, assign

MODELS = ("resnet50", "densenet121", "vit_b_16", "convnext_base", "vgg16")
TOGETHER = 4
COLUMNS = (
    "model", "MB", "rounds", "load_file, ms", "attach, ms", "both and a call, times as fast", "copies for 4 processes",
    "one copy",
)  # fmt: skip

_CODE = processes.call_code("gpu_share", "work")


def work(parent: int, answers: int) -> None:
    """Answer one request for weights in a worker process, and keep the weights until stdin ends."""
    import torch
    from safetensors.torch import load_file

    from xsp import share

    processes.end_with_parent(parent)
    with os.fdopen(answers, "wb", buffering=0) as out:
        asked = json.loads(sys.stdin.readline())
        built = models.build(asked["spec"], models.Settings())
        assert isinstance(built, models.ModelCall)
        args = [each.to(asked["device"]) for each in built.args]
        with torch.inference_mode():
            built.model.eval().to(asked["device"])(*args)
        with share.empty():
            fresh = models.build(asked["spec"], models.Settings())
        assert isinstance(fresh, models.ModelCall)
        del built
        _wait(asked["device"])
        own = torch.cuda.memory_allocated() if asked["device"] != "cpu" else 0
        began = time.perf_counter_ns()
        if asked["way"] == ATTACH:
            share.attach(fresh.model, asked["file"], device=asked["device"], folder=Path(asked["store"]))
        else:
            assign(torch, fresh.model, load_file(asked["file"], device=asked["device"]))
            fresh.model.eval()
        _wait(asked["device"])
        loaded = time.perf_counter_ns()
        with torch.inference_mode():
            fresh.model(*args)
        _wait(asked["device"])
        ended = time.perf_counter_ns()
        own = torch.cuda.memory_allocated() - own if asked["device"] != "cpu" else 0
        out.write(json.dumps({"load": loaded - began, "both": ended - began, "own": own}).encode() + b"\n")
        sys.stdin.read()


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


@contextlib.contextmanager
def asked(way: str, spec: str, file: Path, store: Path, device: str) -> Any:
    """Run a worker process; yield its answer while it holds the weights."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    process = processes.WorkerProcess(_CODE, str(os.getpid()), env={**processes.environment(), "PYTHONPATH": path})
    try:
        process.ask({"way": way, "spec": spec, "file": str(file), "store": str(store), "device": device})
        yield share_worker.answer_of(process)
    finally:
        process.end()


def measure(spec: str, folder: Path, rounds: int, device: str = "cuda:0") -> dict[str, Any]:
    """Measure a model; return the answers by way, the bytes of the file, and the copies on the device for four
    processes."""
    nbytes = share_worker.prepare(spec, folder, 0, 0)
    file, store = folder / "0.safetensors", folder / "s"
    found: dict[str, Any] = {"nbytes": nbytes, MMAP: [], ATTACH: []}
    words = ("--device", "0") if device != "cpu" else ()
    with measuring.store_at(store, 4 * nbytes + (64 << 20), *words), contextlib.ExitStack() as together:
        with asked(ATTACH, spec, file, store, device):
            pass  # from now on the store holds the weights
        for turn in range(rounds):
            for way in (MMAP, ATTACH)[:: 1 - 2 * (turn % 2)]:
                with asked(way, spec, file, store, device) as answer:
                    found[way].append(answer)
        own = [together.enter_context(asked(ATTACH, spec, file, store, device))["own"] for _ in range(TOGETHER)]
        held = sum(each["held_bytes"] for each in devices.status(store))
        found["copies"] = (held + sum(own)) / nbytes
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=7), arguments)
    gpu_workloads.need_a_gpu()
    report = turns.Report("gpu_share", "Weights on a device from a file and from a store there [95 %]", COLUMNS)
    for name in MODELS[:2] if options.quick else MODELS:
        found: dict[str, Any] = {}
        with report.trying(name), tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            found = measure(f"torchvision:{name}", Path(folder), options.rounds)
        if not found:
            continue
        gains = [one["both"] / other["both"] for one, other in zip(found[MMAP], found[ATTACH], strict=True)]
        loads = [turns.middle([each["load"] / 1e6 for each in found[way]]).shown(1) for way in (MMAP, ATTACH)]
        copies = found["copies"]
        report.add(
            [
                name, f"{found['nbytes'] / 1e6:.0f}", str(options.rounds), *loads, turns.middle(gains).shown(2),
                f"{copies:.2f}", "met" if copies <= 1.15 else "missed",
            ],
            **found,
        )  # fmt: skip
    report.notes.append(
        "Copies: the store's bytes on the device and what torch allocated in 4 processes, over the file."
    )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


if __name__ == "__main__":
    main()
