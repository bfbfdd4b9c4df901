"""Whole steps of models on an accelerator, for the runtime `steps`: waited for, with the host's time, and replayed.

A step is a block of one call, `step::waited` or `step::replayed`, so it has a key, a status and a row like any other
block. The key covers the work of all calls of the step; the model and its settings only say how to run it, so that the
timing is found for a saved graph, too. Torch is imported when a step is prepared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp import modelname
from xsp.bench.spec import AS_RUN, CacheState, Spec, Timing
from xsp.bench.timings import Timings
from xsp.graph import keys
from xsp.graph.blocks import Block, Wires
from xsp.graph.node import Call, Graph

if TYPE_CHECKING:
    from xsp.bench.torchcalls import Prepared
    from xsp.device.contract import Device, Elapsed

STEPS = "steps"
"""Name of the runtime."""

WAITED, REPLAYED = "step::waited", "step::replayed"
"""Operators: a step that is waited for, whose `host_ns` is the time to issue it; a captured step that is replayed."""

MOST_STEPS = 20
"""Most steps of a batch."""


def specs(graph: Graph, model: str = "", settings: Mapping[str, Any] | None = None) -> list[Spec]:
    """Return the specs of a graph's whole step.

    Args:
        graph: the graph of the step.
        model: name of the model, as `xsp.models.load` takes it; empty only finds existing timings.
        settings: fields of `xsp.models.Settings`, as plain values.
    """
    work = hashlib.blake2b("".join(keys.work_key(node.call) for node in graph.computing).encode(), digest_size=16)
    if model and modelname.parse(model).is_python:
        path, colon, function = model.rpartition(":")
        model = f"{Path(path).absolute()}{colon}{function}"  # the worker process has another working directory
    how = (("model", model), ("settings", json.dumps(dict(settings or {}), sort_keys=True)))
    arguments, wires = (("work", work.hexdigest()), *how), Wires((), (), ())
    blocks = [Block((Call(op, arguments),), (wires,)) for op in (WAITED, REPLAYED)]
    return [Spec(block, AS_RUN, CacheState.WARM, 1, STEPS) for block in blocks]


def of(graph: Graph, timings: Timings) -> dict[str, Timing]:
    """Return the timings of a graph's step that were tried, by operator."""
    found = {spec.op: timings.get(spec.key) for spec in specs(graph)}
    return {op: timing for op, timing in found.items() if timing is not None}


def with_gradients(step: Callable[[], object]) -> Callable[[], object]:
    """Return a step that records gradients, although blocks of single calls are timed without."""
    import torch

    def trained() -> object:
        with torch.inference_mode(False), torch.enable_grad():
            return step()

    return trained


class Steps:
    """The runtime that prepares specs of whole steps."""

    name = STEPS

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int, device: Device) -> Prepared:
        """Return a step ready to be timed.

        Raises:
            NotTimeable: the model or its settings are unknown, or the device cannot capture the step.
            ModelError: the model cannot be built here.
        """
        from xsp import models
        from xsp.bench.inputs import NotTimeable

        arguments = dict(spec.block.calls[0].arguments)
        if not arguments.get("model"):
            raise NotTimeable("the step of a saved graph or of a trace cannot be run: name its model")
        settings = json.loads(arguments["settings"])
        shape = settings.pop("shape", None)
        settings = models.Settings(
            **settings, shape=None if shape is None else tuple(shape), device=device.torch_name
        )  # fmt: skip
        step = models.load(arguments["model"], settings).step
        if settings.train:
            step = with_gradients(step)
        if spec.op == WAITED:

            def waited(calls: int) -> Elapsed:
                return device.waited(step, calls)

            return _measured(device, waited, waited)
        try:
            replay = device.capture(step)
        except NotImplementedError as error:
            raise NotTimeable(str(error)) from error
        return _measured(
            device,
            lambda calls: device.timed(replay, [()] * calls),
            lambda calls: device.waited(lambda: [replay() for _ in range(calls)]),  # without the spin of `timed`
        )


def _measured(device: Device, timed: Callable[[int], Elapsed], repeat: Callable[[int], object]) -> Prepared:
    """Return steps that are timed by `timed`, and whose energy is that of `repeat`."""
    from xsp.bench.torchcalls import self_timed
    from xsp.device import energy

    return self_timed(timed, MOST_STEPS, lambda: energy.joules_per_call(device, repeat))
