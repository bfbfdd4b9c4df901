"""Graphs of models and modules: one step runs under a recorder, on tensors without values if possible.

| rung | tried | what it cannot do |
|---|---|---|
| built on meta | first | initialisers that compute with values |
| moved to meta | if building on meta failed | operators whose result depends on values |
| on the CPU | if running on meta failed | models that do not fit into half of the free memory |

A failed rung is recorded as a problem of the graph, with the class and the place of the error. Without values nothing
is computed: a model of any size is captured in the memory that its description takes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import cached, causal, modelname, models, processes
from xsp.cost.held import bytes_of
from xsp.errors import GraphError, ModelError
from xsp.graph import files
from xsp.graph.node import Graph, Problem, Role, Source

if TYPE_CHECKING:
    from xsp.models import ModelCall, Settings

RUNGS = ("built on meta", "moved to meta", "on the CPU")

KIND = "graph"
"""Kind of the cache entries that this module writes."""

LIBRARIES = {
    "torchvision": ("torchvision",), "timm": ("timm", "torchvision"), "transformers": ("transformers",), "micro": ()
}  # fmt: skip
"""Sources whose models are cached, and the packages that define them."""


@dataclass(frozen=True)
class _Step:
    """A step that is ready to run, and the model that it runs, if known."""

    run: Callable[[], object]
    built: ModelCall | None


def of_name(spec: str, settings: Settings) -> Graph:
    """Capture a step of a model by name, or return the cached graph of the same software.

    The graph of a library's model is cached (see `xsp.cached`), so that another process gets it without PyTorch.

    Args:
        spec: name as `xsp.models` reads it.
        settings: batch, training or inference, seed, shape of the input; the device only affects the last rung.

    Raises:
        ModelError: there is no such model, or its library is missing.
        GraphError: no rung of the ladder worked; the message has the reason of each.
    """
    conditions = _conditions(spec, settings)
    text = cached.read(KIND, conditions)
    if text is not None:
        with contextlib.suppress(LookupError, ValueError, TypeError, AttributeError, RecursionError):
            return files.from_plain(json.loads(text))
    try:
        graph = _captured(spec, settings)
    except GraphError as error:
        if settings.train and settings.batch == 1 and _is_captured(spec, replace(settings, batch=2)):
            raise GraphError(f"{error}; it can at a larger batch: give --batch 2") from error
        raise
    if conditions is not None:
        cached.store(KIND, conditions, json.dumps(files.to_plain(graph), separators=(",", ":")))
    return graph


def _conditions(spec: str, settings: Settings) -> dict[str, Any] | None:
    """Return all conditions that a model's graph depends on; None if unknown, as for a user's function."""
    parsed = modelname.parse(spec)
    if parsed.source not in LIBRARIES:
        return None
    software = cached.software(*LIBRARIES[parsed.source])
    if software is None:
        return None
    try:
        content = None if parsed.file is None else Path(parsed.file).read_bytes().hex()
    except OSError:
        return None
    return {"spec": spec, "file": content, "settings": asdict(settings), "software": software}


def _is_captured(spec: str, settings: Settings) -> bool:
    try:
        _captured(spec, settings)
    except (GraphError, ModelError):
        return False
    return True


def _captured(spec: str, settings: Settings) -> Graph:
    is_built = False

    def build_on_meta() -> _Step:
        nonlocal is_built
        built = models.build(spec, settings, device="meta")
        is_built = True
        return ready(built, "meta")

    def move_to_meta() -> _Step | None:
        return None if is_built else ready(models.build(spec, settings), "meta")

    def build_on_cpu() -> _Step:
        return ready(models.build(spec, settings), "cpu")

    def ready(built: ModelCall | Callable[[], object], device: str) -> _Step:
        if isinstance(built, models.ModelCall):
            return _ready(spec, built, settings, device)
        if device == "meta":
            raise GraphError("a function that runs a step creates its own tensors")
        built()
        return _Step(built, None)

    return _climb(spec, settings, dict(zip(RUNGS, (build_on_meta, move_to_meta, build_on_cpu), strict=True)))


def of_module(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, batch: int | None = None
) -> Graph:
    """Capture a step of a module with its arguments; copies of both run, and the originals stay unchanged.

    The batch is the one that the caller states for the arguments, otherwise it is unknown.

    Raises:
        GraphError: no rung of the ladder worked; the message has the reason of each.
    """
    name = type(module).__name__

    def move_to_meta() -> _Step:
        return ready(without_values(module), "meta")

    def build_on_cpu() -> _Step:
        check_memory(module)
        return ready(copy_module(module), "cpu")

    def ready(model: Any, device: str) -> _Step:
        built = models.ModelCall(model, *copy_arguments(args, kwargs, device))
        if settings.prefill is not None or settings.decode is not None:
            built = models.of_phase(name, built, settings)
        return _ready(name, built, settings, device)

    graph = _climb(name, settings, {RUNGS[1]: move_to_meta, RUNGS[2]: build_on_cpu})
    step_batch = batch if settings.prefill is None and settings.decode is None else settings.batch
    return replace(graph, settings={**graph.settings, "batch": step_batch})


def _ready(name: str, built: ModelCall, settings: Settings, device: str) -> _Step:
    if device == "cpu":
        check_memory(built.model)
    settings = replace(settings, device=device)
    built = models.on_device(name, built, settings)
    return _Step(models.step_of(built, settings), built)


def _climb(name: str, settings: Settings, rungs: dict[str, Callable[[], _Step | None]]) -> Graph:
    problems: list[Problem] = []
    for rung, prepare in rungs.items():
        try:
            with _isolated(), contextlib.nullcontext() if rung == RUNGS[2] else _known_values():
                step = prepare()
                if step is not None:
                    return _capture(name, settings, rung, step, problems)
        except Exception as error:
            cause = error.__cause__
            if isinstance(error, ModelError) and (cause is None or isinstance(cause, (ImportError, SyntaxError))):
                raise
            problems.append(Problem(rung, describe_error(error)))
    rungs_by_reason: dict[str, list[str]] = {}
    for problem in problems:
        rungs_by_reason.setdefault(problem.reason, []).append(problem.where)
    reasons = "; ".join(f"{', '.join(rungs)}: {reason}" for reason, rungs in rungs_by_reason.items())
    raise GraphError(f"{name} cannot be captured ({reasons})")


def _capture(name: str, settings: Settings, rung: str, step: _Step, problems: list[Problem]) -> Graph:
    from xsp.graph.ondevice import FOREACH, DeviceOperators
    from xsp.graph.recorder import Recorder

    # a mode, even an idle one, turns fast paths of torch off; predictions have the same operators on every device
    is_substituted = settings.train and settings.operators != "cpu" and rung != RUNGS[2]
    mode = DeviceOperators(settings.operators) if is_substituted else None
    if settings.train:
        with mode or contextlib.nullcontext():
            step.run()  # the first step makes the state of the optimizer; the second is typical
    recorder = Recorder()
    if step.built is not None:
        recorder.modules.register(step.built.model)
        recorder.set_role((step.built.args, step.built.kwargs), Role.INPUT)
        if step.built.state is not None:
            recorder.set_role(list(causal.tensors(step.built.state())), Role.STATE)
    with recorder.recording(), mode or contextlib.nullcontext():
        result = step.run()
    facts = {
        "batch": settings.batch,
        "train": settings.train,
        "rung": rung,
        "dtype": None if step.built is None else _dtype(step.built.model),
    }
    if step.built is not None and step.built.kwargs:
        facts["inputs"] = {
            name: list(value.shape) for name, value in step.built.kwargs.items() if hasattr(value, "shape")
        }
    if settings.operators != "cpu":
        used = {*(mode.used if mode is not None else ()), *([FOREACH] if settings.train else ())}
        facts |= {"device": settings.operators, "substitutions": sorted(used)}
    facts |= {name: value for name in ("prefill", "decode") if (value := getattr(settings, name)) is not None}
    return recorder.finish(result).graph(name, Source.CAPTURED, facts, problems=problems)


def _dtype(model: Any) -> str | None:
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def without_values(module: Any) -> Any:
    """Return a copy of a module whose parameters and buffers have shapes but no values.

    Parameters with the same memory, as after `one.weight.data = other.weight.data`, have the same memory in the copy.
    """
    import torch

    from xsp.graph.recorder import memory_of

    shapes: dict[int, Any] = {}
    empty_by_memory: dict[Any, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            continue
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        memory = memory_of(tensor)
        if memory is not None:
            empty = empty_by_memory.setdefault(memory, empty).detach()
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        shapes[id(tensor)] = empty
    shapes |= {
        id(tensor): torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in _results_in(module)
    }
    return copy.deepcopy(module, shapes)


def _results_in(module: Any) -> Iterator[Any]:
    """Yield tensors with a history that modules keep as attributes, such as their last output; copies refuse them."""
    import torch

    for submodule in module.modules():
        yield from (
            attribute
            for attribute in vars(submodule).values()
            if isinstance(attribute, torch.Tensor) and not attribute.is_leaf
        )


def copy_module(module: Any) -> Any:
    """Return a copy of a module; tensors that `copy.deepcopy` refuses, sparse ones and results, are cloned."""
    import torch

    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.layout is not torch.strided]
    tensors += _results_in(module)
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in tensors})


def copy_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of arguments on a device: a step may write to them, and a training step gives them gradients."""
    from xsp.graph.recorder import flat_tensors

    tensors = flat_tensors([args, kwargs])
    copies = {
        id(tensor): tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad) for tensor in tensors
    }
    try:
        return copy.deepcopy((args, kwargs), copies)
    except Exception:  # arguments that cannot be copied are used directly
        return args, kwargs


def _known_values() -> contextlib.AbstractContextManager[object]:
    from xsp.graph.knownvalues import KnownValues

    return KnownValues()


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Restore the program's random state at the end, and run the body outside of its inference and no-grad modes."""
    import torch

    state = torch.get_rng_state()
    try:
        with torch.inference_mode(False), torch.enable_grad():  # a step sets its own modes
            yield
    finally:
        torch.set_rng_state(state)


def check_memory(model: Any) -> None:
    """Refuse to run a model whose parameters and buffers take more than half of the free memory.

    Raises:
        GraphError: they take more.
    """
    import torch

    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not torch.nn.parameter.is_lazy(tensor)]
    required_bytes = sum(map(bytes_of, tensors))
    free_bytes = processes.free_memory_bytes()
    if free_bytes is not None and required_bytes > free_bytes // 2:
        raise GraphError(
            f"its weights take {required_bytes / 2**30:.1f} GiB, more than half of the {free_bytes / 2**30:.1f} free"
        )


def describe_error(error: BaseException) -> str:
    """Return class, first sentence and place of an error; of a `GraphError` only the sentence."""
    root = error.__cause__ or error
    sentence = (str(root).strip().split("\n")[0].split(". ")[0] or "no message").rstrip(".")[:200]
    if isinstance(root, GraphError):
        return sentence
    frames = traceback.extract_tb(root.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(root).__name__}: {sentence}{place}"
