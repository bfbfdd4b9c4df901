"""Runs graphs: the calls of a captured step, or of what rewriting made of it, one after the other on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from xsp.bench import torchcalls
from xsp.graph.draft import PreparedTensor
from xsp.graph.node import Call, Graph, Origin, Role, Source, Tensor
from xsp.graph.recorder import Recorder, flat_tensors
from xsp.graph.rewrite import RewrittenGraph


class Held(Recorder):
    """A recorder that holds what comes from outside, as it was before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[torch.Tensor] = []
        self._whole: dict[Any, torch.Tensor] = {}

    def _outside_origin(self, tensor: Any, number: int) -> Origin:
        storage = self._storage(tensor)
        if storage not in self._whole:
            self._whole[storage] = torchcalls._flat_storage(tensor.detach()).clone()
        with torch.inference_mode(False):
            view = self._whole[storage].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self.outside.append(view)
        return super()._outside_origin(tensor, number)


def recorded(model: Any, *args: Any, grad: bool = False, **kwargs: Any) -> tuple[Graph, list[torch.Tensor], Any]:
    """Return the graph of a call of a module or function with real tensors, what came from outside, and its result."""
    recorder = Held()
    if isinstance(model, torch.nn.Module):
        recorder.modules.register(model)
    recorder.set_role((args, kwargs), Role.INPUT)
    with torch.set_grad_enabled(grad), torch.inference_mode(not grad), recorder.recording():
        result = model(*args, **kwargs)
    graph = recorder.finish(result).graph("recorded", Source.CAPTURED, {"train": grad})
    return graph, recorder.outside, result


def evaluated(graph: Graph, outside: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a graph, with what comes from outside as it is given; that is copied first."""
    whole: dict[int, torch.Tensor] = {}
    made: dict[Origin, torch.Tensor] = {}
    for number, tensor in enumerate(outside):
        place = tensor.untyped_storage()._cdata
        if place not in whole:
            whole[place] = torchcalls._flat_storage(tensor).clone()
        made[-1, number] = whole[place].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    with torch.inference_mode():
        for place, node in enumerate(graph.nodes):
            result = _called(node.call, [made[each] for each in node.origins if each is not None])
            for number, tensor in enumerate(flat_tensors(result)):
                wanted = node.call.outputs[number]
                assert tuple(tensor.shape) == wanted.shape, (
                    f"{place} {node.call.op}: {tensor.shape}, not {wanted.shape}"
                )
                assert str(tensor.dtype) == f"torch.{wanted.dtype}", f"{place} {node.call.op}"
                made[place, number] = tensor
        return [made[each].clone() for each in graph.outputs]


def both(rewritten: RewrittenGraph, outside: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs of the original graph and of the rewritten one."""
    ready = dict(rewritten.prepared)
    others = [
        _prepared(ready[number], outside) if number in ready else outside[origin[1]]
        for number, origin in enumerate(rewritten.outside)
    ]
    return evaluated(rewritten.original, outside), evaluated(rewritten.graph, others)


def close(rewritten: RewrittenGraph, outside: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Check that both graphs compute the same."""
    before, after = both(rewritten, outside)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


def _called(call: Call, tensors: list[torch.Tensor]) -> Any:
    operator, declared = torchcalls._operator(call)
    left = iter(tensors)
    known = dict(call.arguments)
    places, named = [], {}
    for each in declared:
        if each.name not in known:
            continue
        value = _value(each, known[each.name], left)
        if torch.Tag.inplace_view in operator.tags and each.name == "self":
            value = value.detach()
        if call.op in ("aten::view",) and each.name == "self":
            value = value if _viewable(value, known["size"]) else value.contiguous()
        if each.kwarg_only:
            named[each.name] = value
        else:
            places.append(value)
    return operator(*places, **named)


def _viewable(value: torch.Tensor, size: Any) -> bool:
    try:
        value.view(size)
    except (RuntimeError, TypeError):
        return False
    return True


def _value(declared: Any, value: Any, left: Any) -> Any:
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
        return [next(left) if isinstance(each, Tensor) else each for each in value]
    return torchcalls._constant(declared, value)


def _prepared(prepared: PreparedTensor, outside: list[torch.Tensor]) -> torch.Tensor:
    of = [None if each is None else outside[each[1]] for each in prepared.sources]
    if prepared.recipe == "join":
        return torch.cat([each for each in of if each is not None])
    if not prepared.recipe.startswith("fold"):
        return of[0].to(getattr(torch, prepared.recipe))  # type: ignore[union-attr]
    weight, bias, scale, shift, mean, variance = of
    assert weight is not None
    assert mean is not None
    assert variance is not None
    factor = (variance + prepared.options[0]).rsqrt() * (1 if scale is None else scale)
    if prepared.recipe == "fold weight":
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    moved = ((0 if bias is None else bias) - mean) * factor
    return moved + (0 if shift is None else shift)
