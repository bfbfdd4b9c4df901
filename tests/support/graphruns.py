"""Execution of graphs: the calls of a captured or a rewritten step, one after the other on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import xsp
from xsp.bench import torchcalls
from xsp.graph.draft import PreparedTensor
from xsp.graph.node import Call, Graph, Origin, Role, Source, Tensor
from xsp.graph.recorder import Recorder, flat_tensors
from xsp.graph.rewrite import RewrittenGraph


def graph_of(function: Callable[..., object], *tensors: Any) -> Graph:
    """Return the captured graph of a function of tensors."""

    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> object:
            return function(*given)

    return xsp.graph.of(Model(), *tensors)


class HoldingRecorder(Recorder):
    """A recorder that keeps the tensors from outside of the step, as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []
        self._copies: dict[Any, torch.Tensor] = {}

    def _outside_origin(self, tensor: Any, number: int) -> Origin:
        storage = self._storage(tensor)
        if storage not in self._copies:
            self._copies[storage] = torchcalls._flat_storage(tensor.detach()).clone()
        with torch.inference_mode(False):
            view = self._copies[storage].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self.inputs.append(view)
        return super()._outside_origin(tensor, number)


def record(model: Any, *args: Any, grad: bool = False, **kwargs: Any) -> tuple[Graph, list[torch.Tensor], Any]:
    """Return the graph of a call of a module or function on real tensors, the tensors from outside, and the result."""
    recorder = HoldingRecorder()
    if isinstance(model, torch.nn.Module):
        recorder.modules.register(model)
    recorder.set_role((args, kwargs), Role.INPUT)
    with torch.set_grad_enabled(grad), torch.inference_mode(not grad), recorder.recording():
        result = model(*args, **kwargs)
    graph = recorder.finish(result).graph("recorded", Source.CAPTURED, {"train": grad})
    return graph, recorder.inputs, result


def evaluate(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a graph for tensors from outside, which are copied first."""
    storages: dict[int, torch.Tensor] = {}
    values: dict[Origin, torch.Tensor] = {}
    for number, tensor in enumerate(inputs):
        place = tensor.untyped_storage()._cdata
        if place not in storages:
            storages[place] = torchcalls._flat_storage(tensor).clone()
        values[-1, number] = storages[place].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    with torch.inference_mode():
        for place, node in enumerate(graph.nodes):
            result = _call(node.call, [values[origin] for origin in node.origins if origin is not None])
            for number, tensor in enumerate(flat_tensors(result)):
                expected = node.call.outputs[number]
                assert tuple(tensor.shape) == expected.shape, (
                    f"{place} {node.call.op}: {tensor.shape}, not {expected.shape}"
                )
                assert str(tensor.dtype) == f"torch.{expected.dtype}", f"{place} {node.call.op}"
                values[place, number] = tensor
        return [values[origin].clone() for origin in graph.outputs]


def evaluate_both(
    rewritten: RewrittenGraph, inputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs of the original graph and of the rewritten one."""
    prepared_inputs = dict(rewritten.prepared)
    rewritten_inputs = [
        _prepared(prepared_inputs[number], inputs) if number in prepared_inputs else inputs[origin[1]]
        for number, origin in enumerate(rewritten.outside)
    ]
    return evaluate(rewritten.original, inputs), evaluate(rewritten.graph, rewritten_inputs)


def assert_same_outputs(rewritten: RewrittenGraph, inputs: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Check that both graphs compute the same."""
    before, after = evaluate_both(rewritten, inputs)
    assert len(before) == len(after)
    for expected, actual in zip(before, after, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _call(call: Call, tensors: list[torch.Tensor]) -> Any:
    operator, declared = torchcalls._operator(call)
    remaining = iter(tensors)
    arguments = dict(call.arguments)
    positional, keywords = [], {}
    for argument in declared:
        if argument.name not in arguments:
            continue
        value = _value(argument, arguments[argument.name], remaining)
        if torch.Tag.inplace_view in operator.tags and argument.name == "self":
            value = value.detach()
        if call.op in ("aten::view",) and argument.name == "self":
            value = value if _viewable(value, arguments["size"]) else value.contiguous()
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return operator(*positional, **keywords)


def _viewable(value: torch.Tensor, size: Any) -> bool:
    try:
        value.view(size)
    except (RuntimeError, TypeError):
        return False
    return True


def _value(declared: Any, value: Any, remaining: Any) -> Any:
    if isinstance(value, Tensor):
        return next(remaining)
    if isinstance(value, tuple) and any(isinstance(element, Tensor) for element in value):
        return [next(remaining) if isinstance(element, Tensor) else element for element in value]
    return torchcalls._constant(declared, value)


def _prepared(prepared: PreparedTensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    tensors = [None if origin is None else inputs[origin[1]] for origin in prepared.sources]
    if prepared.recipe == "join":
        return torch.cat([tensor for tensor in tensors if tensor is not None])
    if not prepared.recipe.startswith("fold"):
        return tensors[0].to(getattr(torch, prepared.recipe))  # type: ignore[union-attr]
    weight, bias, scale, shift, mean, variance = tensors
    assert weight is not None
    assert mean is not None
    assert variance is not None
    factor = (variance + prepared.options[0]).rsqrt() * (1 if scale is None else scale)
    if prepared.recipe == "fold weight":
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    moved = ((0 if bias is None else bias) - mean) * factor
    return moved + (0 if shift is None else shift)
