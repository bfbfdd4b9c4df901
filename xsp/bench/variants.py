"""Alternative ways to compute a block; the shortest is `best` of a bound. Imports torch: import it where it is needed.

A variant is checked against float64 when it is first timed; it is `different` if its results are further off than those
of the block as it runs, and than its type allows. Variants in another precision (`PRECISIONS`) are not refused for
that: how far their results are from those of the block as it runs is stored with their time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from xsp import plugins
from xsp.bench.environment import Environment
from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import AS_RUN, OTHER_PRECISION, RUNTIMES, Spec
from xsp.bench.torchcalls import Prepared
from xsp.device.contract import Device
from xsp.graph.node import Tensor
from xsp.graph.recorder import flat_tensors

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference from float64, relative to the largest result."""


class ResultMismatch(Exception):
    """Raised if results differ from those of the block; the message reports by how much."""

    def __init__(self, message: str, error: float | None = None) -> None:
        super().__init__(message)
        self.error = error


def unchanged(kind: str) -> AbstractContextManager[Any]:
    """Return a context that changes nothing: that of variants which only arrange their inputs."""
    return nullcontext()


@dataclass(frozen=True)
class Variant:
    """Another way to compute a block."""

    name: str
    may_change: Callable[[Spec], bool]
    """Whether the variant may differ from the block as it runs."""

    context: Callable[[str], AbstractContextManager[Any]] = unchanged
    """What calls run in, on a device of a kind in torch's words (`cpu`, `cuda`)."""

    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that rearranges each input in memory."""

    on_host: bool | None = None
    """Whether it is only of a device that is the host, or only of others; None for any."""

    def is_for(self, environment: Environment | None) -> bool:
        """Return whether the variant exists on the device of an environment; None is the processor."""
        is_host = environment is None or environment.device is None
        return self.on_host in (None, is_host)


def _inputs(spec: Spec) -> Iterable[Tensor]:
    return (tensor for call in spec.block.calls for tensor in call.inputs)


def _has_plane(spec: Spec) -> bool:
    """Return whether the block has convolutions, pooling, norms or resampling of images."""
    words = ("conv", "pool", "norm", "upsample", "interpolate", "pixel_shuffle")
    return any(word in spec.block.op for word in words) and any(
        len(tensor.shape or ()) == 4 for tensor in _inputs(spec)
    )


def _has_strides(spec: Spec) -> bool:
    return any(tensor.stride is not None for tensor in _inputs(spec))


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _uses_onednn(spec: Spec) -> bool:
    words = ("conv", "linear", "mm", "matmul", "pool", "norm", "softmax", "gelu", "lstm", "attention")
    return torch.backends.mkldnn.is_available() and any(word in spec.block.op for word in words)


def _has_attention(spec: Spec) -> bool:
    return "scaled_dot_product_attention" in spec.block.op


def _backend(backend: Any) -> Callable[[str], AbstractContextManager[Any]]:
    return lambda kind: sdpa_kernel([backend])


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("channels-last", _has_plane, arrange=_channels_last),
        Variant("contiguous", _has_strides, arrange=torch.Tensor.contiguous),
        Variant("onednn-off", _uses_onednn, lambda _: torch.backends.mkldnn.flags(enabled=False), on_host=True),
        Variant(
            "cudnn-benchmark",
            lambda spec: "conv" in spec.block.op,
            lambda _: torch.backends.cudnn.flags(benchmark=True),
            on_host=False,
        ),
        Variant("attention-math", _has_attention, context=_backend(SDPBackend.MATH)),
        Variant("attention-flash", _has_attention, context=_backend(SDPBackend.FLASH_ATTENTION)),
        Variant("attention-efficient", _has_attention, _backend(SDPBackend.EFFICIENT_ATTENTION), on_host=False),
    )
}


def _has_products(spec: Spec) -> bool:
    """Return whether autocast would compute a call of the block in lower precision, from float32 inputs."""
    words = ("conv", "linear", "addmm", "matmul", "::mm", "bmm", "baddbmm", "scaled_dot_product_attention", "einsum")
    return any(word in spec.block.op for word in words) and any(tensor.dtype == "float32" for tensor in _inputs(spec))


@contextlib.contextmanager
def _tf32(kind: str) -> Iterator[None]:
    """Let products and convolutions of float32 use the tensor cores."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


PRECISIONS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            "autocast-bfloat16",
            _has_products,
            context=lambda kind: torch.autocast(kind, torch.bfloat16),
        ),
        Variant("tf32", _has_products, _tf32, on_host=False),
    )
}
"""Variants that change numbers: not part of `--variants all`, and never in a bound."""


def variant_by_name(name: str) -> Variant | None:
    """Return a variant by its name; None if there is none."""
    return VARIANTS.get(name) or PRECISIONS.get(name)


def prepare(
    spec: Spec, rotated_bytes: int, limit_bytes: int, device: Device | None = None
) -> tuple[Prepared, float | None]:
    """Return a spec ready to be called, and the error of its variant's results; None if it has no variant.

    Args:
        spec: spec to prepare.
        rotated_bytes: see `xsp.bench.torchcalls.Torch.prepare`, like `limit_bytes`.
        limit_bytes: most bytes of its tensors.
        device: where it runs; default: the processor.

    Raises:
        NotTimeable: the block cannot be run on its own, or the variant changes nothing.
        MemoryError: the tensors exceed the limit.
        ResultMismatch: the variant does not compute the same.
        PluginError: there is no such runtime, or it cannot be imported.
    """
    runtime = plugins.load(RUNTIMES, spec.runtime)()
    if device is None or device.is_host:
        prepared: Prepared = runtime.prepare(spec, rotated_bytes, limit_bytes)
    elif "device" in inspect.signature(runtime.prepare).parameters:
        prepared = runtime.prepare(spec, rotated_bytes, limit_bytes, device)
    else:
        raise NotTimeable(f"the runtime {spec.runtime} runs on the processor only")
    if spec.variant == AS_RUN:
        return prepared, None
    variant = variant_by_name(spec.variant)
    if variant is None:
        raise NotTimeable(f"there is no variant {spec.variant!r}; there are {', '.join((*VARIANTS, *PRECISIONS))}")
    if not variant.may_change(spec):
        raise NotTimeable(f"{variant.name} changes nothing here")
    if variant.arrange is not None and _writes_arranged(prepared, variant.arrange):
        raise NotTimeable("it writes to its inputs, whose layout the variant changes")
    with torch.inference_mode():
        plain = prepared.function(*prepared.sets[0])
        prepared.restore()
        if variant.arrange is not None:
            by_id = {id(tensor): tensor for arguments in prepared.sets for tensor in arguments}
            arranged = {number: variant.arrange(tensor) for number, tensor in by_id.items()}  # keeps sharing
            prepared = replace(
                prepared, sets=[tuple(arranged[id(tensor)] for tensor in arguments) for arguments in prepared.sets]
            )
        kind = "cpu" if device is None else device.torch_type
        prepared.context = functools.partial(variant.context, kind)
        with prepared.context():
            results = prepared.function(*prepared.sets[0])
        prepared.restore()
        if variant.name in OTHER_PRECISION:
            return prepared, distance(plain, results)
        exact = _in_float64(prepared)
    return prepared, check(plain, results, exact)


def _writes_arranged(prepared: Prepared, arrange: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether the block changes an input that the variant would rearrange."""
    written_pointers = {storage.untyped_storage().data_ptr() for storage, _ in prepared.written}
    return any(
        tensor.untyped_storage().data_ptr() in written_pointers and arrange(tensor) is not tensor
        for arguments in prepared.sets
        for tensor in arguments
        if written_pointers
    )


def distance(plain: Any, results: Any) -> float:
    """Return the error of results in another precision, relative to the largest result of the block as it runs.

    Raises:
        ResultMismatch: the results have other shapes or other integers, or are not finite where those of the block are.
    """
    expected, actual = list(flat_tensors(plain)), list(flat_tensors(results))
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise ResultMismatch("its results have different shapes")
    worst = 0.0
    for result, reference in zip(actual, expected, strict=True):
        if not reference.is_floating_point():
            if not torch.equal(result, reference):
                raise ResultMismatch("its integer results differ")
            continue
        error = _relative_error(result, reference)
        if not error < float("inf"):
            raise ResultMismatch("its results are not finite", error)
        worst = max(worst, error)
    return worst


def check(plain_results: Any, results: Any, exact: Any | None) -> float:
    """Return the error of a variant's results, relative to the largest result.

    Args:
        plain_results: results of the block as it runs.
        results: results of the variant.
        exact: results in float64; None if an operator does not support it, in which case `plain_results` is used.

    Raises:
        ResultMismatch: the results have other shapes or integers, or their error is too large.
    """
    references = list(flat_tensors(plain_results if exact is None else exact))
    actual, expected = list(flat_tensors(results)), list(flat_tensors(plain_results))
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise ResultMismatch("its results have different shapes")
    worst = 0.0
    for result, plain_result, reference in zip(actual, expected, references, strict=True):
        if not result.is_floating_point():
            if not torch.equal(result, plain_result):
                raise ResultMismatch("its integer results differ")
            continue
        error, usual_error = _relative_error(result, reference), _relative_error(plain_result, reference)
        worst = max(worst, error)
        if not error <= max(TOLERANCE.get(result.dtype, 1e-2), 4 * usual_error):
            raise ResultMismatch(f"its results are off by {error:.2g} of the largest one", error)
    return worst


def _relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    if not result.numel():
        return 0.0
    is_equal = (result.double() == reference.double()) | (result.isnan() & reference.isnan())
    difference = torch.where(is_equal, 0.0, (result.double() - reference.double()).abs())
    return float(difference.max() / reference.double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30))


def _in_float64(prepared: Prepared) -> Any | None:
    """Return the results in float64; None if an operator does not support it."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor.clone() for tensor in prepared.sets[0]]
    with contextlib.suppress(Exception):
        return prepared.function(*wide)
    return None
