"""Graphs by way of `torch.export`: on request, to compare a captured graph with an exported program of the model.

Export must prove what a model decides in Python, so it fails for models that are captured without trouble, and gives no
training steps. Models that check whether they are being exported may behave differently.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xsp import models
from xsp.errors import GraphError, ModelError
from xsp.graph import captured, program
from xsp.graph.node import Graph, Problem
from xsp.models import ModelCall, Settings


def of_name(spec: str, settings: Settings) -> Graph:
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


def of_module(
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
            with program.quiet(), contextlib.redirect_stderr(io.StringIO()):  # it prints the graph at which it failed
                exported = torch.export.export(built.model.eval(), tuple(built.args), dict(built.kwargs), strict=False)
            graph = program.of(exported, name)
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
