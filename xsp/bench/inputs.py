"""Tensors for a block's inputs: synthetic, by rules per operator. Imports torch: import it where it is needed.

Floating-point values are normal with unit scale: zeros let devices skip work, and denormals slow processors down.
Variances are positive. Integers that are positions are within the dimension that they index; masks are true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xsp.device.contract import Device
from xsp.device.processor import Processor
from xsp.graph.node import Call, Tensor

POOL = 1 << 20
"""Number of random values that are drawn; larger tensors repeat them."""


class NotTimeable(Exception):
    """Raised for a block that cannot be run on its own; the message is the reason."""


@dataclass(frozen=True)
class ValueRule:
    """A rule by which the values of an input are generated."""

    high: int | None = None
    """Exclusive upper bound of uniformly drawn integers; None if the values are not positions."""

    is_positive: bool = False
    """Whether floating-point values are above 0.5."""

    is_share: bool = False
    """Whether floating-point values are between 0 and 1."""

    offset_limit: int | None = None
    """Upper end of integers that rise evenly from 0: offsets."""

    are_ends: bool = False
    """Whether the values of `rising` are the ends of groups instead of their starts, so that the last is `rising`."""

    is_one: bool = False
    """Whether all integers are 1."""

    is_guess: bool = False
    """Whether no rule is known although the time may depend on the values."""


POSITIVE = ("var", "invstd", "rstd", "std", "scale")
ROOTS = (
    "sqrt",
    "rsqrt",
    "log",
    "log2",
    "log10",
    "log1p",
    "pow",
    "multinomial",
    "gamma",
    "lgamma",
    "digamma",
    "poisson",
)
SHARES = ("bernoulli", "binary_cross_entropy", "logit")


def rule(call: Call, name: str, index: int) -> ValueRule:
    """Return the rule for the values of an argument's tensor.

    Args:
        call: call with the shapes of all its tensors.
        name: name of the argument.
        index: position of the tensor in the argument, if that is a list.
    """
    op = call.op.partition("::")[2].strip("_").removeprefix("foreach_")
    special = _POSITIONS.get(call.op.partition("::")[2].rstrip("_") or "")
    if special is not None:
        known_rule = special(dict(call.arguments), name, index)
        if known_rule is not None:
            return known_rule
    if any(name.endswith(suffix) or f"{suffix}_" in name for suffix in POSITIVE):
        return ValueRule(is_positive=True)
    if op.startswith(SHARES):
        return ValueRule(is_share=True)
    return ValueRule(is_positive=op.split("_")[0] in ROOTS, is_guess=bool(call.values) and special is None)


def _size(tensor: Any, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.shape else 1


def _along(argument: str) -> Callable[[Mapping[str, Any], str, int], ValueRule | None]:
    """Return a rule for positions along the dimension `dim` of `self`."""

    def positions(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
        return ValueRule(high=_size(arguments["self"], int(arguments["dim"]))) if name == argument else None

    return positions


def _embedding(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(high=_size(arguments["weight"], 0)) if name == "indices" else None


def _bag(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    if name == "offsets":
        return ValueRule(offset_limit=_size(arguments["indices"], 0))
    return _embedding(arguments, name, place)


def _embedding_backward(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(high=int(arguments["num_weights"])) if name == "indices" else None


def _index(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    """Each tensor of the list holds positions along its own dimension; a mask covers as many dimensions as it has."""
    if name != "indices":
        return None
    dim = 0
    for tensor in arguments["indices"][:place]:
        dim += len(tensor.shape or ()) if isinstance(tensor, Tensor) and tensor.dtype in ("bool", "uint8") else 1
    return ValueRule(high=_size(arguments["self"], dim))


def _classes(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    scores = arguments["self"]
    if name == "target":
        return ValueRule(high=_size(scores, 1 if len(scores.shape) > 1 else 0))
    return ValueRule(is_positive=True) if name in ("weight", "total_weight") else None


def _pooled(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    """Return a rule for positions in the plane that was pooled."""
    return ValueRule(high=_size(arguments["self"], -1) * _size(arguments["self"], -2)) if name == "indices" else None


def _one_hot(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(high=max(1, int(arguments["num_classes"])))


def _repeated(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(is_one=True) if name == "repeats" else None


def _grouped(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(offset_limit=_size(arguments["self"], 0), are_ends=True) if name == "offs" else None


def _bincount(arguments: Mapping[str, Any], name: str, place: int) -> ValueRule | None:
    return ValueRule(high=max(1, int(arguments.get("minlength") or 64)))


_POSITIONS: Mapping[str, Callable[[Mapping[str, Any], str, int], ValueRule | None]] = {
    "embedding": _embedding,
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _bag),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(
        "gather index_select index_add index_copy index_fill scatter scatter_add scatter_reduce".split(),
        _along("index"),
    ),
    "take_along_dim": _along("indices"),
    **dict.fromkeys(("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"), _index),
    **dict.fromkeys(
        (
            "nll_loss nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward cross_entropy_loss "
            "nll_loss_nd"
        ).split(),
        _classes,
    ),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_unpool2d", "adaptive_max_pool2d_backward"), _pooled),
    "one_hot": _one_hot,
    "repeat_interleave": _repeated,
    "_grouped_mm": _grouped,
    "bincount": _bincount,
    **dict.fromkeys(
        (
            "sort argsort topk kthvalue median mode unique _unique2 unique_consecutive nonzero masked_select "
            "masked_scatter multinomial searchsorted bucketize histc"
        ).split(),
        lambda arguments, name, place: ValueRule(),  # any values: the operator only compares them
    ),
}


def size(tensors: list[Tensor]) -> int:
    """Return the bytes of a storage that holds all tensors, each of which starts at offset 0.

    Raises:
        NotTimeable: a type is unknown, or dense tensors do not have it.
    """
    return max(_extent(tensor) * dtype(tensor).itemsize for tensor in tensors)


def dtype(tensor: Tensor) -> torch.dtype:
    """Return the type of a tensor.

    Raises:
        NotTimeable: the type is unknown, or dense tensors do not have it.
    """
    kind = getattr(torch, tensor.dtype or "", None)
    if not isinstance(kind, torch.dtype) or kind.is_floating_point is None or str(kind).startswith("torch.q"):
        raise NotTimeable(f"no inputs can be generated of type {tensor.dtype or 'unknown'}")
    return kind


def _extent(tensor: Tensor) -> int:
    """Return the number of elements of its storage that a tensor spans."""
    if tensor.shape is None:
        raise NotTimeable("a shape is unknown")
    if 0 in tensor.shape:
        return 0
    if tensor.stride is None:
        return int(tensor.elements or 0)
    return 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride, strict=True))


class Values:
    """A generator of tensors on a device; equal seeds give equal values on equal devices."""

    def __init__(self, seed: int = 0, device: Device | None = None) -> None:
        device = device or Processor()
        self._place = device.torch_name
        self._generator = device.generator(seed)
        self._normal = torch.randn(POOL, generator=self._generator, device=self._place)

    def storage(self, tensors: list[Tensor], value_rule: ValueRule) -> list[torch.Tensor]:
        """Return tensors that share one storage, each of which starts at offset 0.

        Raises:
            NotTimeable: no values can be made for a tensor's type.
        """
        kind = dtype(tensors[0])
        length = -(-size(tensors) // kind.itemsize)
        flat = self._flat(length, kind, value_rule)
        return [_shaped(flat, tensor) for tensor in tensors]

    def _flat(self, length: int, kind: torch.dtype, value_rule: ValueRule) -> torch.Tensor:
        if kind is torch.bool:
            return torch.ones(length, dtype=kind, device=self._place)
        if not (kind.is_floating_point or kind.is_complex):
            return self._integers(length, kind, value_rule)
        pool = self._normal
        if value_rule.is_share:
            pool = pool.sigmoid()
        elif value_rule.is_positive:
            pool = pool.abs() + 0.5
        parts, part_kind = (2, kind.to_real()) if kind.is_complex else (1, kind)
        real = torch.empty(length * parts, dtype=part_kind, device=self._place)
        pool = pool.to(real.dtype)
        repeats = real.numel() // POOL
        real[: repeats * POOL].view(repeats, POOL).copy_(pool.expand(repeats, POOL))
        real[repeats * POOL :].copy_(pool[: real.numel() - repeats * POOL])
        return torch.view_as_complex(real.view(-1, 2)) if kind.is_complex else real

    def _integers(self, length: int, kind: torch.dtype, value_rule: ValueRule) -> torch.Tensor:
        place = self._place
        if value_rule.offset_limit is not None:
            ranks = torch.arange(length, device=place) + value_rule.are_ends
            return (ranks * value_rule.offset_limit // max(1, length)).to(kind)
        if value_rule.high is not None:
            high = max(1, min(value_rule.high, torch.iinfo(kind).max))
            drawn = torch.randint(0, high, (length,), generator=self._generator, dtype=torch.int64, device=place)
            return drawn.to(kind)
        make = torch.zeros if value_rule.is_guess else torch.ones
        return make(length, dtype=kind, device=place)


def _shaped(flat: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    assert tensor.shape is not None
    kind = dtype(tensor)
    if flat.dtype is not kind:
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() and not kind.is_complex else flat
        flat = flat if flat.dtype is kind else flat.view(kind)
    if tensor.stride is None:
        return flat[: _extent(tensor)].view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride)
