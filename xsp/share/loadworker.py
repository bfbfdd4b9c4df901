"""A process under measurement: it loads weights in one of the ways, calls the model once, and reports both times.

Modules are imported and the model is built without values before the clock starts, and all ways put tensors into the
module in the same manner. The comparison therefore covers loading and the first call, and nothing common to all ways.

Starting Python and importing torch takes seconds. Therefore a process that has built the model forks children, one
after the other, each of which loads and calls for the first time. Until then it computes on one thread, because a
thread pool does not survive a fork, and uses no device, which does not either. A child that loads onto a device uses it
before the clock starts: making a context and loading libraries is common to all ways.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xsp import clock, models, processes
from xsp.device import devices
from xsp.device.contract import Device
from xsp.errors import ShareError, XspError

MMAP, PICKLE, ATTACH = "load_file", "torch.load", "attach"
WAYS = (MMAP, PICKLE, ATTACH)

TOLD = 64
"""Exit code of a child that was told to end: a model may end its process with any other, 0 included."""


def work(parent: int, answers: int) -> None:
    """Execute the requests on stdin, and answer each with a line: `prepare`, `build`, `load`, `memory`.

    After `fork` the child answers, until the request `end`; when the child has ended, this process continues.

    Args:
        parent: process ID of the process that sends requests; this process ends with it.
        answers: descriptor to write answers to.
    """
    processes.end_with_parent(parent)
    state: dict[str, Any] = {}
    is_child = False
    with processes.Questions(answers) as questions:
        for request in questions:
            answer: dict[str, Any] = {}
            if request["do"] == "fork":
                child = os.fork()
                is_child = not child
                answer = _begin_child(state) if is_child else _wait(child)
            elif request["do"] == "end" and is_child:
                os._exit(TOLD)
            else:
                try:
                    answer = _HANDLERS[request["do"]](request, state)
                except XspError as error:
                    answer = {"error": str(error)}
                except Exception as error:  # of a model or a library: the requesting process reports it
                    message = (str(error).splitlines() or [""])[0]
                    answer = {"error": f"{type(error).__name__}: {message}"}
            questions.answer(answer)


def _begin_child(state: Mapping[str, Any]) -> dict[str, Any]:
    """Set up a child: copy the memory of Python objects, so that it is not shared with the parent."""
    processes.end_with_parent(os.getppid())
    gc.collect()
    state["torch"].set_num_threads(state["threads"])
    return {}


def _wait(child: int) -> dict[str, Any]:
    """Wait for a child to end, and return an answer for it: to `end`, or to what it has not answered or not read."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {} if code == TOLD else {"error": f"the process ended ({processes.exit_description(code)})"}


def _prepare(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Write the files that all processes read: the model's input, and the weights in both formats."""
    import torch
    from safetensors.torch import load_file, save_model

    del state
    obstacle = devices.of(request.get("device") or "cpu").obstacle()
    if obstacle is not None:
        raise ShareError(obstacle)
    os.chdir(request["cwd"])
    folder = Path(request["folder"])
    module = None
    if request["module"]:
        torch.manual_seed(0)
        settings = models.Settings()
        built = models.build(request["module"], settings)
        if not isinstance(built, models.ModelCall):
            raise ShareError(f"{request['module']} runs a step itself; it must return a model and its input")
        built = models.on_device(request["module"], built, settings)
        if built.state is not None:
            raise ShareError(f"{request['module']}: its input depends on the model, and cannot be passed to others")
        torch.save((built.args, built.kwargs), folder / "input.pt")
        module = built.model
    if not request["weights"]:
        assert module is not None
        save_model(module, str(folder / "model.safetensors"))
    weights = load_file(request["weights"] or str(folder / "model.safetensors"))
    torch.save(weights, folder / "model.pt")
    return {"nbytes": sum(tensor.nbytes for tensor in weights.values()), "tensors": len(weights)}


def _build(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Import the libraries, and build the module without values; with `forks`, on one thread, for children to use."""
    import safetensors.torch
    import torch

    from xsp import share

    os.chdir(request["cwd"])
    threads = torch.get_num_threads()
    if request.get("forks"):
        torch.set_num_threads(1)
    state.update(request, torch=torch, load_file=safetensors.torch.load_file, attach=share.attach, built=None)
    state["threads"] = threads
    if request["module"]:
        with share.empty():
            built = models.build(request["module"], models.Settings())
        assert isinstance(built, models.ModelCall)
        built.model.eval()
        inputs = torch.load(Path(request["folder"]) / "input.pt", weights_only=False)
        state.update(built=built, inputs=inputs)
    return {"ready": True}


def _load(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Load in the given `way`, call the model, and return the nanoseconds of both."""
    state["way"] = request["way"]
    torch, device = state["torch"], _device(state)
    if state["built"] is not None:
        args, kwargs = models.moved(state["inputs"], device.torch_name)
    results: dict[str, Any] = {}

    def load() -> None:
        tensors = results["tensors"] = _tensors(state, device)
        if state["built"] is not None and tensors is not None:
            assign(torch, state["built"].model, tensors, device.torch_name)

    def call() -> None:
        if state["built"] is not None:
            results["output"] = state["built"].model(*args, **kwargs)
        else:
            tensors = results["tensors"].values()
            results["output"] = [tensor.reshape(-1).view(torch.uint8).max() for tensor in tensors if tensor.numel()]

    loading = device.waited(load)
    with torch.inference_mode():
        calling = device.waited(call)
    state["results"] = results  # not freed, so that the memory can be measured
    return {"load_ns": loading.ns, "call_ns": calling.ns}


def _device(state: dict[str, Any]) -> Device:
    """Return the device to load onto, after it was used once."""
    device = devices.of(state.get("device") or "cpu")
    if device.is_host:
        return device
    torch = state["torch"]
    with torch.inference_mode():
        values = torch.ones(1, 4, 8, 8, device=device.torch_name)
        torch.conv2d(values, torch.ones(4, 4, 3, 3, device=device.torch_name)).flatten(1).mm(
            torch.ones(144, 8, device=device.torch_name)
        )
    device.synchronize()
    del values
    state["held_before"] = device.held_bytes()
    return device


def _tensors(state: Mapping[str, Any], device: Device) -> dict[str, Any] | None:
    """Return the weights by name; None if they are in the module already."""
    way, store, place = state["way"], Path(state["store"]), device.torch_name
    if way == MMAP:
        mapped_tensors: dict[str, Any] = state["load_file"](state["weights"], device=place)
        return mapped_tensors
    if way == PICKLE:
        unpickled_tensors: dict[str, Any] = state["torch"].load(
            Path(state["folder"]) / "model.pt", weights_only=True, map_location=None if device.is_host else place
        )
        return unpickled_tensors
    from xsp.share import modules

    if state["built"] is not None:
        state["attach"](state["built"].model, state["weights"], device=place, folder=store, strict=False)
        return None
    return {
        tensor.name: modules.view_of(weights, tensor)
        for weights in modules.attached(state["weights"], place, store)
        for tensor in weights.tensors
    }


def assign(torch: Any, module: Any, tensors: Mapping[str, Any], place: str = "cpu") -> None:
    """Put tensors into a module without copies; unlike `load_state_dict`, keep tied parameters tied.

    Buffers that are not among the tensors are moved to `place`, where the tensors are.
    """
    replacements: dict[int, tuple[Any, Any]] = {}  # the replaced parameter is kept, so that its id is not reused
    for name, owner, attribute in _slots(module):
        current = owner._parameters.get(attribute)
        if current is None:
            buffer = owner._buffers.get(attribute)
            if name in tensors:
                owner._buffers[attribute] = tensors[name]
            elif place != "cpu" and buffer is not None and not buffer.is_meta:
                owner._buffers[attribute] = buffer.to(place)
        elif name in tensors and id(current) not in replacements:
            replacements[id(current)] = current, torch.nn.Parameter(tensors[name], requires_grad=False)
    for name, owner, attribute in _slots(module):
        current = owner._parameters.get(attribute)
        if current is not None and id(current) in replacements:
            owner._parameters[attribute] = replacements[id(current)][1]
        elif current is not None and current.is_meta:
            raise ShareError(f"the file lacks {name}")


def _slots(module: Any) -> Iterator[tuple[str, Any, str]]:
    for path, submodule in module.named_modules(remove_duplicate=False):
        for attribute in (*submodule._parameters, *submodule._buffers):
            yield (f"{path}.{attribute}" if path else attribute), submodule, attribute


def _memory(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that this process takes, and how many of them are weights that can be shared; `held`: on the
    device."""
    del request
    if state.get("device"):
        held, before = devices.of(state["device"]).held_bytes(), state.get("held_before")
        return {} if held is None else {"held": held - (before or 0)}
    weights = os.path.realpath(state["weights"])
    return memory_of("self", lambda path: path == weights or path.startswith("/memfd:xsp-share"))


def memory_of(process: int | str, is_weights: Any = lambda path: False) -> dict[str, Any]:
    """Return the proportional set size (PSS) of a process in bytes: its own memory and its part of the shared memory.

    Args:
        process: process ID, or "self".
        is_weights: whether a mapping of this path holds weights.

    Returns:
        `pss`; `libraries`, the PSS of mapped files other than weights; `weights`, the PSS of mappings of weights. Empty
        if the system does not report them.
    """
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="ascii", errors="replace") as lines:
            sizes = dict(line.split(":", 1) for line in lines if line[:1] == "P")
        with open(f"/proc/{process}/smaps", encoding="utf-8", errors="replace") as lines:
            weight_bytes = file_bytes = 0
            is_counted = False
            for line in lines:
                field, _, value_text = line.partition(" ")
                if not field.endswith(":"):
                    path = value_text.split(None, 4)[4].strip() if len(value_text.split(None, 4)) > 4 else ""
                    is_counted = bool(path) and is_weights(path.removesuffix(" (deleted)"))
                    is_file = not path.startswith("/memfd:")
                elif field == "Pss:" and is_counted:
                    weight_bytes += int(value_text.split()[0]) << 10
                    file_bytes += (int(value_text.split()[0]) << 10) * is_file
        kib = {name: int(value.split()[0]) << 10 for name, value in sizes.items()}
        return {"pss": kib["Pss"], "libraries": max(0, kib["Pss_File"] - file_bytes), "weights": weight_bytes}
    except (OSError, KeyError, ValueError, IndexError):
        return {}


def _small(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Write files of many small tensors, in both formats."""
    import torch
    from safetensors.torch import load_file, save_file

    state.update(torch=torch, load_file=load_file)
    for count in request["counts"]:
        tensors = {name: torch.zeros(8) for name in _names(count)}
        save_file(tensors, Path(request["folder"]) / f"{count}.safetensors")
        torch.save(tensors, Path(request["folder"]) / f"{count}.pt")
    return {}


def _names(count: int) -> list[str]:
    return [f"t{number // 2}.{('weight', 'bias')[number % 2]}" for number in range(count)]


def _time(request: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Load a small file into a module of pairs of tensors, twice, and return the nanoseconds of the second time."""
    torch = state["torch"]
    pickle_path = Path(request["folder"]) / f"{request['count']}.pt"
    elapsed_ns = 0
    for _ in range(2):
        module = torch.nn.Module()
        for name in _names(request["count"]):
            parent, _, attribute = name.partition(".")
            if parent not in module._modules:
                module.register_module(parent, torch.nn.Module())
            empty = torch.nn.Parameter(torch.empty(8, device="meta"))
            module._modules[parent].register_parameter(attribute, empty)
        module.eval()
        if request["way"] == ATTACH:
            from xsp.share import modules

            start = clock.monotonic_ns()
            modules.attach(
                module, Path(request["folder"]) / f"{request['count']}.safetensors", folder=Path(request["store"])
            )
        else:
            start = clock.monotonic_ns()
            if request["way"] == MMAP:
                tensors = state["load_file"](Path(request["folder"]) / f"{request['count']}.safetensors")
            else:
                tensors = torch.load(pickle_path, weights_only=True)
            assign(torch, module, tensors)
        elapsed_ns = clock.monotonic_ns() - start
    return {"load_ns": elapsed_ns}


_HANDLERS = {"prepare": _prepare, "build": _build, "load": _load, "memory": _memory, "small": _small, "time": _time}
