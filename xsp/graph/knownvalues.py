"""Values of small tensors, kept for tensors without values, so that a program that reads them takes its usual path.

On meta tensors a model cannot ask whether a mask is all true, or how many tokens represent an image. Here positions,
masks and tokens also have their values on the CPU: results that depend only on known values are computed there too.
Values that depend on weights or random numbers are not known, and reading them fails as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from xsp.graph import kernels

MAX_ELEMENTS = 1 << 21
"""Most elements of a tensor whose values are kept; enough for masks of a thousand tokens or of an image."""

_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
_READ_SCALAR = "aten::_local_scalar_dense"
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_MASKED_SELECT = "aten::masked_select"
_ATTENTION = "aten::scaled_dot_product_attention"


class KnownValues(TorchDispatchMode):
    """A mode that keeps values for small tensors without values while it is active."""

    def __init__(self) -> None:
        """Start without known values, except those of tensors on the CPU."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakTensorKeyDictionary()
        self._constants = _Constants(self)
        self._forgotten: dict[int, Any] = {}
        """Storages whose values are no longer known, because unknown values were written to them."""

    def __enter__(self) -> KnownValues:
        """Start to keep values."""
        self._constants.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop; known values stay known."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._constants.__exit__(*error)  # type: ignore[no-untyped-call]

    def constant(self, make: Callable[[], Any]) -> Any:
        """Return a constant without values for a tensor that a function makes on the CPU; its values are known."""
        with _disable_current_modes():
            value = make()
            tensor = value.to("meta")
        self._known[tensor] = value
        return torch.ops.aten.lift_fresh(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and run it on the values too if they are known."""
        keywords = dict(kwargs or {})
        name = func._schema.name
        tensors = [tensor for tensor in tree_flatten((args, keywords))[0] if isinstance(tensor, torch.Tensor)]
        if not (_is_for_device(keywords, "meta") or any(tensor.device.type == "meta" for tensor in tensors)):
            return func(*args, **keywords)
        if name == _READ_SCALAR and (value := self.of(args[0])) is not None:
            return value.item()
        if name == "aten::_to_copy" and _is_for_device(keywords, "cpu") and (value := self.of(args[0])) is not None:
            return func(value, *args[1:], **keywords)
        if name == _MASKED_SELECT and (mask := self.of(args[1])) is not None:
            count = int(mask.expand(torch.broadcast_shapes(mask.shape, args[0].shape)).sum())
            return args[0].new_empty(count)
        known_result = self._run_on_values(func, name, args, keywords, tensors)
        try:
            result = func(*self._without_masks(name, args), **keywords)
        except Exception:
            if known_result is None or func._schema.is_mutable:
                raise
            result = tree_map(
                lambda value: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value,
                known_result,
            )
        if name == _ATTENTION:
            result = kernels.attention(result, *args, **keywords)
        elif name in kernels.CONVOLUTIONS:
            result = kernels.convolution(result, args[0], args[1])
        self._keep(func, tensors, result, known_result)
        return result

    def of(self, tensor: Any) -> Any:
        """Return the values of a tensor; None if they are not known."""
        if tensor.device.type == "cpu":
            return tensor if _is_small(tensor) else None
        value = self._known.get(tensor)
        return None if value is None or value.untyped_storage()._cdata in self._forgotten else value

    def _run_on_values(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> Any:
        """Return the result of an operator on known values; None if they are not known."""
        tags = (torch.Tag.nondeterministic_seeded,)
        if name in _EMPTY or any(tag in func.tags for tag in tags):
            return None
        values = {id(tensor): self.of(tensor) for tensor in tensors}
        if any(value is None for value in values.values()) or (not tensors and not _makes_small_result(args)):
            return None

        def known_value(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return values[id(value)]
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

        try:
            return func(
                *tree_map(known_value, args), **{key: tree_map(known_value, value) for key, value in kwargs.items()}
            )
        except Exception:  # the CPU refuses it: unknown; the operator itself raises the error
            return None

    def _without_masks(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments in which known masks, among indices, are replaced by the positions that they select."""
        if name not in _INDEXED or len(args) < 2:
            return args
        indices: list[Any] = []
        for index in args[1]:
            value = self.of(index) if isinstance(index, torch.Tensor) else None
            if value is not None and value.dtype in (torch.bool, torch.uint8):
                indices += [positions.to("meta") for positions in value.nonzero(as_tuple=True)]
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _keep(self, func: Any, tensors: list[Any], result: Any, known_result: Any) -> None:
        """Remember the values of an operator's results, and forget those of tensors into which it wrote unknowns."""
        if known_result is None:
            if func._schema.is_mutable:
                self._forget(tensors)
            return
        for tensor, value in zip(tree_flatten(result)[0], tree_flatten(known_result)[0], strict=False):
            is_like = isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and tensor.shape == value.shape
            if is_like and _is_small(value) and value.layout is torch.strided:
                self._known[tensor] = value

    def _forget(self, tensors: list[Any]) -> None:
        """Forget the values of tensors, and of those that share their storage."""
        for tensor in tensors:
            value = self._known.get(tensor)
            if value is not None:  # simplified: all arguments count as written, without a look at the schema
                storage = value.untyped_storage()
                self._forgotten[storage._cdata] = storage


class _Constants(TorchFunctionMode):
    """A mode that keeps the values of Python numbers and lists that become tensors: dispatch does not see them."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if (
            func in (torch.tensor, torch.as_tensor)
            and _is_for_device(keywords, "meta")
            and not any(isinstance(element, torch.Tensor) for element in tree_flatten(args)[0])
        ):
            return self._values.constant(lambda: func(*args, **{**keywords, "device": "cpu"}))
        if func is torch.Tensor.tolist and args[0].device.type == "meta":
            value = self._values.of(args[0])
            return func(args[0]) if value is None else value.tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type == "meta":
            args = (args[0], self._indices(args[1]), *args[2:])
        if func is torch.nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            result = kernels.differentiable_attention(*args, **keywords)
            if result is not None:
                return result
        return func(*args, **keywords)

    def _indices(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        constants = tuple(
            self._values.constant(functools.partial(torch.tensor, part))
            if isinstance(part, list) and part and all(isinstance(element, int) for element in part)
            else part
            for part in parts
        )
        return constants if isinstance(index, tuple) else constants[0]


def _is_for_device(kwargs: dict[str, Any], device_type: str) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == device_type


def _is_small(tensor: Any) -> bool:
    return bool(tensor.numel() <= MAX_ELEMENTS)


def _makes_small_result(args: tuple[Any, ...]) -> bool:
    """Return whether a result made only from numbers is small: its sizes are among the arguments."""
    count = 1
    for number in tree_flatten(args)[0]:
        if isinstance(number, int) and abs(number) > 1:
            count *= abs(number)
    return count <= MAX_ELEMENTS
