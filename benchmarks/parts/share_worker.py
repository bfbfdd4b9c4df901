"""A worker process for requests: it loads weights, calls the model once, reports the time of both, and frees the model.

Requests arrive as lines of JSON on stdin, answers leave on a file descriptor, as in `xsp.processes.WorkerProcess`.
Modules without values are built once and copied before the timer starts, so that loading and the first call are
compared. A request may be answered by a forked child. With the way `FORK` this is a pre-forked server: the weights are
already in the module.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsp import models, processes
from xsp.errors import ShareError
from xsp.share.loadworker import ATTACH, assign

FORK = "pre-forked"
ANSWER_S = 300.0
_CODE = processes.call_code("parts.share_worker", "work")


def start_worker() -> processes.WorkerProcess:
    """Start a worker process."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return processes.WorkerProcess(_CODE, str(os.getpid()), env={**processes.environment(), "PYTHONPATH": path})


def read_answer(worker: processes.WorkerProcess) -> dict[str, Any]:
    """Return the next answer of a worker.

    Raises:
        ShareError: there is none within `ANSWER_S`.
    """
    line = worker.answer(time.monotonic() + ANSWER_S)
    if not line:
        raise ShareError(f"a client ended, or did not answer within {ANSWER_S:.0f} s")
    content: dict[str, Any] = json.loads(line)
    return content


def prepare(spec: str, folder: Path, number: int, seed: int) -> int:
    """Write a model's weights and its input; return the size in bytes of the file of weights."""
    import torch
    from safetensors.torch import save_model

    torch.manual_seed(seed)
    built = models.build(spec, models.Settings(seed=seed))
    assert isinstance(built, models.ModelCall)
    torch.save((built.args, built.kwargs), folder / f"{number}.pt")
    save_model(built.model, str(folder / f"{number}.safetensors"))
    return (folder / f"{number}.safetensors").stat().st_size


def work(parent: int, answers: int) -> None:
    """Answer requests to `open`, `request` and `prepare` until stdin ends."""
    import torch
    from safetensors.torch import load_file

    from xsp import share

    processes.end_with_parent(parent)
    torch.set_num_threads(1)
    modules: dict[int, Any] = {}
    inputs: dict[int, Any] = {}
    with os.fdopen(answers, "wb", buffering=0) as out:
        for line in sys.stdin:
            request = json.loads(line)
            number, folder = request["number"], Path(request["folder"])
            answer: dict[str, Any] = {}
            if request["do"] == "prepare":
                answer["nbytes"] = prepare(request["spec"], folder, number, request["seed"])
            elif request["do"] == "open":
                if number not in modules:
                    with share.empty():
                        built = models.build(request["spec"], models.Settings())
                    assert isinstance(built, models.ModelCall)
                    modules[number] = built.model.eval()
                    inputs[number] = torch.load(folder / f"{number}.pt", weights_only=False)
                    if request.get("way") == FORK:
                        tensors = load_file(folder / f"{number}.safetensors")
                        assign(torch, modules[number], {name: tensor.clone() for name, tensor in tensors.items()})
            elif request.get("child"):
                answer["ns"] = _in_child(torch, modules[number], inputs[number], request)
            else:
                module, path = copy.deepcopy(modules[number]), folder / f"{number}.safetensors"
                args, kwargs = inputs[number]
                answer["hit"] = None
                start = time.perf_counter_ns()
                if request["way"] == ATTACH:
                    try:
                        attachment = share.attach(module, path, folder=folder / "s", strict=False)
                        answer["hit"] = attachment.hit
                    except ShareError:  # no room: everything in the shared memory is in use
                        assign(torch, module, load_file(path))
                else:
                    assign(torch, module, load_file(path))
                with torch.inference_mode():
                    module(*args, **kwargs)
                answer["ns"] = time.perf_counter_ns() - start
                del module
            out.write(json.dumps(answer).encode() + b"\n")


def _in_child(torch: Any, module: Any, inputs: Any, request: Mapping[str, Any]) -> int:
    """Load and call the model in a forked child; return the nanoseconds from before the fork to the answer."""
    from xsp import share

    reading, writing = os.pipe()
    start = time.perf_counter_ns()
    child = os.fork()
    if not child:
        folder = Path(request["folder"])
        if request["way"] == ATTACH:
            share.attach(module, folder / f"{request['number']}.safetensors", folder=folder / "s", strict=False)
        with torch.inference_mode():
            module(*inputs[0], **inputs[1])
        os.write(writing, b"!")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        reply = answers.read(1)
    elapsed_ns = time.perf_counter_ns() - start
    os.waitpid(child, 0)
    if not reply:
        raise ChildProcessError("a child ended before it answered")
    return elapsed_ns
