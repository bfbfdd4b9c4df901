"""Graphs of programs that `torch.export` made: the program runs under the recorder, on tensors without values.

So a program has the same form as a captured step, with views and edges by storages, and its weights are never loaded
into tensors here. The batch is the one with which the program was exported.

A model can be exported here, to compare its captured graph with its program. Export must prove what a model decides in
Python, so it fails for models that are captured without trouble, and gives no training steps. Models that check whether
they are being exported may behave differently.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from xsp import models
from xsp.errors import GraphError, ModelError, causes, first_line
from xsp.graph import captured
from xsp.graph.node import Graph, Problem, Role, Source
from xsp.models import ModelCall, Settings
from xsp.plugins import importing


def load(path: Path) -> Graph:
    """Read a `.pt2` file. PyTorch reads it: open only programs whose authors you would let run code.

    Raises:
        GraphError: PyTorch is missing, or cannot read the file; the message has the reason.
    """
    _check_archive(path)
    with importing(GraphError, "programs need torch ({error}); pip install 'xsp[torch]'"):
        import torch
    with quiet() as logged:
        try:
            program = torch.export.load(path)
        except Exception as error:  # errors of archive, schema and unpickler have no common class
            # the original error: torch logs it, and then raises a less specific one
            *_, root = causes(logged[0] if logged else error)
            reason = first_line(root)[:200]
            raise GraphError(
                f"{path}: torch {torch.__version__} cannot read this program ({reason}); it is damaged, not "
                "a program of torch.export, or written by another version: export it again with this one"
            ) from error
    return of(program, path.name)


def _check_archive(path: Path) -> None:
    """Refuse a file that is no archive with a program before PyTorch is imported, which is slow and reports less.

    Raises:
        GraphError: the file is no such archive; the message names what it is instead.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except OSError as error:
        raise GraphError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise GraphError(
            f"{path}: not a program of torch.export, which is a zip archive, or an incomplete one ({error}); "
            "export it again"
        ) from error
    if not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _PROGRAMS):
        raise GraphError(
            f"{path}: this archive has no program of torch.export; a file of torch.save cannot be read: give the "
            "model by file.py:function"
        )


_PROGRAMS = ("*/models/*.json", "models/*.json", "*serialized_exported_program.json")
"""Paths of programs in an archive, since PyTorch 2.8 and before."""


def of(program: Any, name: str) -> Graph:
    """Return the graph of an `ExportedProgram`.

    Raises:
        GraphError: an operator of the program does not run on tensors without values.
    """
    import torch

    from xsp.graph.knownvalues import KnownValues
    from xsp.graph.recorder import Recorder, memory_of

    recorder = Recorder()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    inputs = []
    parameters = 0
    shared: dict[Any, Any] = {}
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = _without_values(node.meta.get("val"))
        kind = specs[node.name].kind.name if node.name in specs else "USER_INPUT"
        lasting = kind in ("PARAMETER", "BUFFER")  # a program takes each of several tied weights
        memory = memory_of(program.state_dict.get(specs[node.name].target)) if lasting else None
        tensor = value if memory is None else shared.setdefault(memory, value)
        recorder.set_role(tensor, _ROLES.get(kind, Role.CONSTANT))
        if kind == "PARAMETER" and isinstance(value, torch.Tensor) and tensor is value:
            parameters += value.numel()
        inputs.append(tensor)
    runner = _runner(program.graph_module, recorder)
    try:
        with quiet(), torch.inference_mode(), KnownValues(), recorder.recording():
            result = runner.run(*inputs)
    except Exception as error:
        location = f" at {runner.current_target}" if runner.current_target else ""
        raise GraphError(
            f"{name}: the program does not run on tensors without values{location} ({first_line(error)[:200]})"
        ) from error
    tensor = next(
        (candidate for candidate in inputs if isinstance(candidate, torch.Tensor) and candidate.is_floating_point()),
        None,
    )
    settings = {"train": False, "dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch.")}
    return recorder.finish(result).graph(name, Source.PROGRAM, settings, parameters=parameters)


_ROLES = {
    "PARAMETER": Role.WEIGHT,
    "BUFFER": Role.BUFFER,
    "USER_INPUT": Role.INPUT,
    "CONSTANT_TENSOR": Role.CONSTANT,
}


GUARDS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
"""Checks of assumptions that the export inserts; they are not calls of the model."""


def _runner(module: Any, recorder: Any) -> Any:
    """Return an interpreter that runs the nodes of a program one by one, each in its module, all without values."""
    import torch

    guards = {getattr(torch.ops.aten, name) for name in GUARDS}

    class Runner(torch.fx.Interpreter):
        current_target = ""

        def run_node(self, node: Any) -> Any:
            self.current_target = f"{node.target}"
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            with recorder.modules.scope(str(stack[-1][0]) if stack else ""):
                return super().run_node(node)

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "_overloadpacket", None) in guards:
                return None
            if isinstance(kwargs.get("device"), (str, torch.device)):
                kwargs = {**kwargs, "device": "meta"}
            return super().call_function(target, args, kwargs)

        def fetch_attr(self, target: str) -> Any:
            return _without_values(super().fetch_attr(target))

    return Runner(module)


def _without_values(value: Any) -> Any:
    """Return a tensor of the same shape, type and strides without values; variable sizes are those of the example."""
    import torch

    if isinstance(value, torch.Tensor):
        shape, stride = [_size(size) for size in value.shape], [_size(size) for size in value.stride()]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _size(value)
    return value


def _size(value: Any) -> Any:
    """Return a number; for a variable size, its value when the program was exported."""
    node = getattr(value, "node", None)
    return value if node is None else node.hint


@contextlib.contextmanager
def quiet() -> Iterator[list[BaseException]]:
    """Keep torch's log messages while it reads a program off the terminal; yield a list of the errors among them."""
    errors: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])
        return False

    loggers = [
        logging.getLogger(name)
        for name in (
            "torch.export",
            "torch.export.pt2_archive._package",
            "torch._export.serde.serialize",
            "torch.fx.experimental.symbolic_shapes",
        )
    ]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def export_model(spec: str, settings: Settings) -> Graph:
    """Export a model by name, and return the graph of its program.

    Raises:
        ModelError: there is no such model, or its library is missing.
        GraphError: the model cannot be exported; the message has the reasons, with and without values.
    """

    def on(device: str) -> ModelCall:
        built = models.build(spec, settings, device=device)
        if not isinstance(built, ModelCall):
            raise GraphError("export needs a module, and this function runs a step")
        return built

    graph = _first_export(spec, settings, {"exported on meta": lambda: on("meta"), "on the CPU": lambda: on("cpu")})
    return replace(graph, settings={**graph.settings, "batch": settings.batch})


def export_module(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, batch: int | None
) -> Graph:
    """Export a copy of a module with its arguments, and return the graph of its program.

    Raises:
        GraphError: the module cannot be exported.
    """
    arguments = dict(kwargs)
    builders = {
        "exported on meta": lambda: ModelCall(captured.without_values(module), args, arguments),
        "on the CPU": lambda: ModelCall(copy.deepcopy(module), args, arguments),
    }
    graph = _first_export(type(module).__name__, settings, builders)
    return replace(graph, settings={**graph.settings, "batch": batch})


def _first_export(name: str, settings: Settings, builders: Mapping[str, Callable[[], ModelCall]]) -> Graph:
    import torch

    if settings.train or settings.prefill is not None or settings.decode is not None:
        raise GraphError(f"{name}: export supports only inference, no training steps and no steps with a cache")
    problems: list[Problem] = []
    for rung, build in builders.items():
        device = "cpu" if rung == "on the CPU" else "meta"
        try:
            built = build()
            if device == "cpu":
                captured.check_memory(built.model)
            built = models.on_device(name, built, replace(settings, device=device))
            with quiet(), contextlib.redirect_stderr(io.StringIO()):  # it prints the graph at which it failed
                exported = torch.export.export(built.model.eval(), tuple(built.args), dict(built.kwargs), strict=False)
            graph = of(exported, name)
            return replace(
                graph, settings={**graph.settings, "rung": rung}, problems=(*problems, *graph.problems)
            )  # fmt: skip
        except Exception as error:
            if isinstance(error, ModelError) and (error.__cause__ is None or isinstance(error.__cause__, ImportError)):
                raise
            problems.append(Problem(rung, captured.describe_error(error)))
    raise GraphError(
        f"{name} cannot be exported ({'; '.join(f'{problem.where}: {problem.reason}' for problem in problems)})"
    )
