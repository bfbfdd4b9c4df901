"""Writes the trace that two of the notebooks read: a forward pass of a GPT as torch.profiler would record it on an H100.

Nothing was recorded: no GPU took part. The events are those of a real trace of torch.profiler (modules, operators with
the shapes of their inputs, calls of the runtime, kernels), their times come from a simple model: an operator takes the
host some microseconds, a kernel the device as long as its operations or its bytes need at a stated share of the peak,
and kernels of one stream run one after the other. So the file shows what xsp reads and how, and no figure in it says
anything about a GPU.

    python notebooks/make_trace.py
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gpt_forward.json.gz")
BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 8, 1024, 1024, 16, 12, 50304
ROWS = BATCH * LENGTH
BF16 = 2
FLOP_PER_US, BYTE_PER_US = 989e6, 3.35e6
"""Of the device, by its maker's data sheet."""

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 3ul> >(int, ...)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{}_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, ...> >(flash::Flash_fwd_params)"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, ...)"
GATHER = "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, ...>(...)"


class Recording:
    """Events as they come, on a clock of microseconds: the host's, and when the one stream is free again."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = self.free = 1_000.0
        self._random = random.Random(0)
        self._ids = {"external": 0, "correlation": 7_000, "python": 0}
        self._modules: list[int | None] = [None]
        self._instances: dict[str, int] = {}

    def passes(self, us: float) -> None:
        """Let the host spend about that time."""
        self.now += us * self._random.lognormvariate(0, 0.15)

    def _next(self, name: str) -> int:
        self._ids[name] += 1
        return self._ids[name]

    def _add(self, cat: str, name: str, begin: float, dur: float, on_device: bool = False, **args: Any) -> None:
        place = {"pid": 0, "tid": 7} if on_device else {"pid": 100, "tid": 100}
        times = {"ts": round(begin, 3), "dur": round(dur, 3)}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, **times, "args": args})

    @contextmanager
    def module(self, kind: str) -> Iterator[None]:
        """Record a module's call around what is inside."""
        number = self._instances[kind] = self._instances.get(kind, -1) + 1
        this, parent, begin = self._next("python"), self._modules[-1], self.now
        self._modules.append(this)
        self.passes(8)
        yield
        self.passes(3)
        self._modules.pop()
        parts = {"Python id": this, "Python parent id": parent, "Python module id": number}
        self._add("python_function", f"nn.Module: {kind}_{number}", begin, self.now - begin, **parts)

    @contextmanager
    def op(self, name: str, *dims: list[int], types: str = "c10::BFloat16") -> Iterator[int]:
        """Record an operator around what is inside, and give its id."""
        external, begin = self._next("external"), self.now
        self.passes(3)
        yield external
        self.passes(2)
        shapes = {"Input Dims": list(dims), "Input type": [types] * len(dims)}
        self._add("cpu_op", name, begin, self.now - begin, **{"External id": external}, **shapes)

    def launch(self, external: int, kernel: str, flop: float, size: float, share: float) -> None:
        """Record a launch, and the kernel that waits for those before it."""
        correlation, begin = self._next("correlation"), self.now
        self.passes(4)
        ids = {"External id": external, "correlation": correlation}
        self._add("cuda_runtime", "cudaLaunchKernel", begin, self.now - begin, cbid=211, **ids)
        took = 2.0 + max(flop / (FLOP_PER_US * share), size / (BYTE_PER_US * share))
        self.kernel(kernel, self.now + 3.0, took, ids)

    def kernel(self, name: str, earliest: float, took: float, ids: dict[str, int]) -> None:
        """Record a kernel on the stream."""
        begin = max(self.free, earliest)
        self.free = begin + took * self._random.lognormvariate(0, 0.02) + 1.0
        grid = {"grid": [max(132, math.ceil(took * 8)), 1, 1], "block": [256, 1, 1], "registers per thread": 64}
        where = {"device": 0, "context": 1, "stream": 7, "shared memory": 0}
        self._add("kernel", name, begin, self.free - 1.0 - begin, on_device=True, **where, **grid, **ids)


def elementwise(on: Recording, name: str, functor: str, *dims: list[int]) -> None:
    size = BF16 * (sum(math.prod(each) for each in dims) + math.prod(dims[0]))
    with on.op(name, *dims) as external:
        on.launch(external, ELEMENTWISE.format(functor), 0, size, 0.75)


def linear(on: Recording, inside: int, outside: int, bias: bool = True, tile: str = "128x128x64") -> None:
    operands = [[ROWS, inside], [inside, outside]]
    size = BF16 * (ROWS * inside + inside * outside + ROWS * outside)
    with on.module("Linear"), on.op("aten::linear", [BATCH, LENGTH, inside], [outside, inside]):
        with on.op("aten::t", [outside, inside]):
            pass
        dims = [[outside], *operands] if bias else operands
        with on.op("aten::addmm" if bias else "aten::mm", *dims) as external:
            on.launch(external, GEMM.format(tile), 2.0 * ROWS * inside * outside, size, 0.62)


def norm(on: Recording) -> None:
    shape = [BATCH, LENGTH, WIDTH]
    outer, inner = (on.op(f"aten::{name}", shape, [], [WIDTH], [WIDTH]) for name in ("layer_norm", "native_layer_norm"))
    with on.module("LayerNorm"), outer, inner as external:
        on.launch(external, NORM, 0, 2 * BF16 * ROWS * WIDTH, 0.7)


def attention(on: Recording) -> None:
    heads = [BATCH, HEADS, LENGTH, WIDTH // HEADS]
    with on.module("Attention"):
        linear(on, WIDTH, 3 * WIDTH)
        with on.op("aten::split", [BATCH, LENGTH, 3 * WIDTH]):
            pass
        outer = on.op("aten::scaled_dot_product_attention", heads, heads, heads)
        middle = on.op("aten::_scaled_dot_product_flash_attention", heads, heads, heads)
        inner = on.op("aten::_flash_attention_forward", *[[BATCH, LENGTH, HEADS, WIDTH // HEADS]] * 3)
        flop = 4.0 * BATCH * HEADS * LENGTH * LENGTH * (WIDTH // HEADS)
        with outer, middle, inner as external:
            on.launch(external, FLASH, flop, 4 * BF16 * ROWS * WIDTH, 0.25)
        linear(on, WIDTH, WIDTH)


def block(on: Recording) -> None:
    shape = [BATCH, LENGTH, WIDTH]
    with on.module("Block"):
        norm(on)
        attention(on)
        elementwise(on, "aten::add", "CUDAFunctor_add<c10::BFloat16>", shape, shape)
        norm(on)
        with on.module("MLP"):
            linear(on, WIDTH, 4 * WIDTH, tile="256x128x64")
            with on.module("GELU"):
                elementwise(on, "aten::gelu", "GeluCUDAKernelImpl(...)", [BATCH, LENGTH, 4 * WIDTH])
            linear(on, 4 * WIDTH, WIDTH)
        elementwise(on, "aten::add", "CUDAFunctor_add<c10::BFloat16>", shape, shape)


def recorded() -> dict[str, Any]:
    """Return the whole trace."""
    on = Recording()
    begin = on.now
    # What the step before left in the queue: the profiler was switched on after its launches.
    for number in range(10):
        on.kernel(GEMM.format("128x128x64") if number % 2 else NORM, on.now, 15.0, {"correlation": 100 + number})
    with on.module("GPT"):
        with on.module("Embedding"), on.op("aten::embedding", [VOCABULARY, WIDTH], [BATCH, LENGTH]) as external:
            on.launch(external, GATHER, 0, 2 * BF16 * ROWS * WIDTH, 0.5)
        for _ in range(LAYERS):
            block(on)
        norm(on)
        linear(on, WIDTH, VOCABULARY, bias=False, tile="256x128x64")
    synchronize = on.now
    on.now = max(on.now, on.free) + 5.0
    ids = {"cbid": 165, "correlation": 9_999}
    on._add("cuda_runtime", "cudaDeviceSynchronize", synchronize, on.now - synchronize, **ids)
    on._add("user_annotation", "ProfilerStep#1", begin, on.now - begin + 5.0, **{"External id": 0})
    on._add("Trace", "PyTorch Profiler (0)", begin - 10.0, on.now - begin + 20.0)
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "computeMinor": 0, "numSms": 132}
    device |= {"totalGlobalMem": 85_018_279_936, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65_536}
    return {
        "schemaVersion": 1,
        "deviceProperties": [device],
        "made_by": "notebooks/make_trace.py; not a recording",
        "record_shapes": 1,
        "with_modules": 1,
        "with_stack": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_750_000_000_000_000_000,
        "traceEvents": on.events,
    }


if __name__ == "__main__":
    with FILE.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(json.dumps(recorded(), separators=(",", ":")).encode())
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")
