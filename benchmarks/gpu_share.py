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
PROCESSES = 4
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
        request = json.loads(sys.stdin.readline())
        built = models.build(request["spec"], models.Settings())
        assert isinstance(built, models.ModelCall)
        args = [tensor.to(request["device"]) for tensor in built.args]
        with torch.inference_mode():
            built.model.eval().to(request["device"])(*args)
        with share.empty():
            fresh = models.build(request["spec"], models.Settings())
        assert isinstance(fresh, models.ModelCall)
        del built
        _wait(request["device"])
        allocated = torch.cuda.memory_allocated() if request["device"] != "cpu" else 0
        start = time.perf_counter_ns()
        if request["way"] == ATTACH:
            share.attach(fresh.model, request["file"], device=request["device"], folder=Path(request["store"]))
        else:
            assign(torch, fresh.model, load_file(request["file"], device=request["device"]))
            fresh.model.eval()
        _wait(request["device"])
        load_end = time.perf_counter_ns()
        with torch.inference_mode():
            fresh.model(*args)
        _wait(request["device"])
        call_end = time.perf_counter_ns()
        allocated = torch.cuda.memory_allocated() - allocated if request["device"] != "cpu" else 0
        out.write(json.dumps({"load": load_end - start, "both": call_end - start, "own": allocated}).encode() + b"\n")
        sys.stdin.read()


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


@contextlib.contextmanager
def worker_answer(way: str, spec: str, file: Path, store: Path, device: str) -> Any:
    """Run a worker process; yield its answer while it holds the weights."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    process = processes.WorkerProcess(_CODE, str(os.getpid()), env={**processes.environment(), "PYTHONPATH": path})
    try:
        process.ask({"way": way, "spec": spec, "file": str(file), "store": str(store), "device": device})
        yield share_worker.read_answer(process)
    finally:
        process.end()


def measure(spec: str, folder: Path, rounds: int, device: str = "cuda:0") -> dict[str, Any]:
    """Measure a model; return the answers by way, the bytes of the file, and the copies on the device for four
    processes."""
    nbytes = share_worker.prepare(spec, folder, 0, 0)
    file, store = folder / "0.safetensors", folder / "s"
    results: dict[str, Any] = {"nbytes": nbytes, MMAP: [], ATTACH: []}
    words = ("--device", "0") if device != "cpu" else ()
    with measuring.running_store(store, 4 * nbytes + (64 << 20), *words), contextlib.ExitStack() as stack:
        with worker_answer(ATTACH, spec, file, store, device):
            pass  # from now on the store holds the weights
        for turn in range(rounds):
            for way in (MMAP, ATTACH)[:: 1 - 2 * (turn % 2)]:
                with worker_answer(way, spec, file, store, device) as answer:
                    results[way].append(answer)
        allocated = [
            stack.enter_context(worker_answer(ATTACH, spec, file, store, device))["own"] for _ in range(PROCESSES)
        ]
        store_bytes = sum(device_status["held_bytes"] for device_status in devices.status(store))
        results["copies"] = (store_bytes + sum(allocated)) / nbytes
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=7), arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_share", "Weights on a device from a file and from a store there [95 %]", COLUMNS)
    for name in MODELS[:2] if options.quick else MODELS:
        results: dict[str, Any] = {}
        with report.trying(name), tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            results = measure(f"torchvision:{name}", Path(folder), options.rounds)
        if not results:
            continue
        gains = [
            unshared["both"] / shared["both"] for unshared, shared in zip(results[MMAP], results[ATTACH], strict=True)
        ]
        loads = [turns.middle([answer["load"] / 1e6 for answer in results[way]]).text(1) for way in (MMAP, ATTACH)]
        copies = results["copies"]
        report.add(
            [
                name, f"{results['nbytes'] / 1e6:.0f}", str(options.rounds), *loads, turns.middle(gains).text(2),
                f"{copies:.2f}", "met" if copies <= 1.15 else "missed",
            ],
            **results,
        )  # fmt: skip
    report.notes.append(
        "Copies: the store's bytes on the device and what torch allocated in 4 processes, over the file."
    )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


if __name__ == "__main__":
    main()
