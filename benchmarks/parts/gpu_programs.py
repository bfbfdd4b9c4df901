"""Small training and inference programs for a GPU, each with one flaw, and five without.

`python gpu_programs.py NAME` runs one for `SECONDS` (environment, 3), and prints its own time per step, waited for at
both ends. `--mended` leaves the flaw out, `--small` is for a check without figures.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

FLAWED, SMALL = "--mended" not in sys.argv, "--small" in sys.argv
DEVICE = os.environ.get("DEVICE", "cuda")
Step = Callable[[], object]


def size(large: int) -> int:
    """Return a size of a tensor: a power of 2 below it if the run is only a check."""
    return min(large, 16) if SMALL else large


def mlp(width: int, depth: int) -> nn.Sequential:
    """Return linear layers with ReLU."""
    return nn.Sequential(*(each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU()))).to(DEVICE)


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random values on the device."""
    return torch.randn(count, width, device=DEVICE, dtype=dtype)


def trained(model: nn.Module, batch: Callable[[], torch.Tensor], after: Callable[[], object] = lambda: None) -> Step:
    """Return a training step on a placeholder loss, with a fused optimizer where there is one."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=DEVICE != "cpu")

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).float().square().mean().backward()
        after()
        optimizer.step()

    return step


def predicted(model: nn.Module, *inputs: torch.Tensor, dtype: torch.dtype | None = None) -> Step:
    """Return a step of inference, under autocast in a type if one is given."""

    def step() -> Any:
        with torch.inference_mode(), torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            return model(*inputs)

    return step


# --- host ---------------------------------------------------------------------------------------------------------


def sync_item() -> Step:
    model, x = mlp(size(512), 24), rows(size(256), size(512))

    def norms() -> object:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if FLAWED:
            return max(gradient.norm().item() for gradient in gradients)
        return torch.stack(torch._foreach_norm(gradients)).max().item()

    return trained(model, lambda: x, norms)


def synchronize_in_hooks() -> Step:
    model, x = mlp(size(1024), 16), rows(size(512), size(1024))
    if FLAWED:
        for layer in model:
            layer.register_forward_hook(lambda *_: torch.cuda.synchronize() if DEVICE == "cuda" else None)
    return trained(model, lambda: x)


def values_in_hooks() -> Step:
    model, x, seen = mlp(size(512), 16), rows(size(256), size(512)), []

    def watch(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        seen.append(output.detach().abs().mean().item() if FLAWED else output.detach().abs().mean())

    for layer in model:
        layer.register_forward_hook(watch)

    def forget() -> None:
        if not FLAWED:
            torch.stack(seen).tolist()
        seen.clear()

    return trained(model, lambda: x, forget)


def mask_index() -> Step:
    x, weight = rows(size(1 << 16), size(64)), rows(size(64), size(64))

    def step() -> torch.Tensor:
        value = x
        for _ in range(8):
            mask = value[:, 0] > 0
            value = torch.tanh(value @ weight)
            kept = value[mask].sum() if FLAWED else (value * mask[:, None]).sum()
            value = value + kept * 1e-9
        return value

    return step


def small_kernels() -> Step:
    model, x = mlp(size(128), 60), rows(8, size(128))
    step = predicted(model, x)
    if FLAWED or DEVICE == "cpu":
        return step
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def samples_one_by_one() -> Step:
    model, x = mlp(size(512), 4), rows(size(64), size(512))
    if not FLAWED:
        return predicted(model, x)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack([model(each) for each in x])

    return step


def optimizer_one_by_one() -> Step:
    width = size(256)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(60)))
    model.to(DEVICE)
    fused = DEVICE != "cpu"
    optimizer = torch.optim.Adam(model.parameters(), **({"foreach": False} if FLAWED else {"fused": fused}))
    x = rows(size(2048), width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def empty_cache() -> Step:
    model, x = mlp(size(2048), 8), rows(size(4096), size(2048))
    return trained(model, lambda: x, lambda: torch.cuda.empty_cache() if FLAWED and DEVICE == "cuda" else None)


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take the host a millisecond each."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        return torch.full((size(512),), float(index % 7))


def loader_without_workers() -> Step:
    workers = 0 if FLAWED or SMALL else 8
    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=16, num_workers=workers, pin_memory=not FLAWED))
    return trained(mlp(size(512), 8), lambda: next(batches).to(DEVICE, non_blocking=not FLAWED))


# --- copies -------------------------------------------------------------------------------------------------------


def pageable() -> Step:
    images = [torch.randn(size(16384), size(2048)) for _ in range(2)]
    if not FLAWED and DEVICE == "cuda":
        images = [image.pin_memory() for image in images]
    turn = iter(range(1 << 30))
    return trained(mlp(size(2048), 4), lambda: images[next(turn) % 2].to(DEVICE, non_blocking=not FLAWED))


def small_copies() -> Step:
    model, numbers = mlp(size(512), 4), [[float(number)] * size(512) for number in range(64)]

    def batch() -> torch.Tensor:
        if FLAWED:
            return torch.stack([torch.tensor(row).to(DEVICE) for row in numbers])
        return torch.tensor(numbers).to(DEVICE)

    return trained(model, batch)


def results_to_host() -> Step:
    model, x, kept = mlp(size(2048), 4), rows(size(16384), size(2048)), []

    def step() -> None:
        with torch.inference_mode():
            y = model(x)
            kept[:] = [y.cpu().mean() if FLAWED else y.mean()]

    return step


def copies_within() -> Step:
    x = rows(size(1 << 14), size(4096), torch.bfloat16)

    def step() -> torch.Tensor:
        value = x
        for _ in range(6):
            value = value.clone() if FLAWED else value
            value = value.relu_() if FLAWED else torch.relu(value)
        return value

    return step


# --- kernels ------------------------------------------------------------------------------------------------------


def fp32_matmul() -> Step:
    if not FLAWED:
        torch.set_float32_matmul_precision("high")
    x = rows(size(2048), size(4096))
    return trained(mlp(size(4096), 3), lambda: x)


class Images(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        channels = [3, *(size(128) for _ in range(8))]
        self.layers = nn.Sequential(
            *(
                each
                for before, after in itertools.pairwise(channels)
                for each in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def layout() -> Step:
    layouts = torch.contiguous_format if FLAWED else torch.channels_last
    model = Images().to(DEVICE).to(memory_format=layouts).eval()
    x = torch.randn(size(64), 3, size(112), size(112), device=DEVICE).contiguous(memory_format=layouts)
    return predicted(model, x, dtype=torch.bfloat16 if DEVICE == "cpu" else torch.float16)


class Attention(nn.Module):
    """Causal self-attention, written out or by torch's function."""

    def __init__(self, width: int, heads: int, written: bool) -> None:
        super().__init__()
        self.heads, self.written = heads, written
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.written:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(width // self.heads)
            mask = torch.ones(tokens, tokens, device=x.device, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


def blocks(written: bool, layers: int = 4) -> tuple[nn.Module, torch.Tensor]:
    """Return attention layers in bfloat16, and an input."""
    width = size(1024)
    model = nn.Sequential(*(Attention(width, min(16, width // 8), written) for _ in range(layers)))
    return model.to(DEVICE, torch.bfloat16), torch.randn(4, size(2048), width, device=DEVICE, dtype=torch.bfloat16)


def attention() -> Step:
    model, x = blocks(FLAWED)
    return predicted(model, x)


class Wave(nn.Module):
    """A chain of elementwise functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x * torch.sigmoid(x) + 0.1 * torch.tanh(x) - 0.01 * x.square()
        return x


def pointwise() -> Step:
    model: Any = Wave()
    if not FLAWED and not SMALL:
        model = torch.compile(model)
    return predicted(model, rows(size(1 << 16), size(512), torch.bfloat16))


def double() -> Step:
    kind = torch.float64 if FLAWED else torch.float32
    model, x = mlp(size(2048), 4).to(kind), rows(size(2048), size(2048), kind)
    return trained(model, lambda: x)


def dense_gradient() -> Step:
    table = nn.Embedding(size(1 << 21), size(64), sparse=not FLAWED, device=DEVICE)
    indices = torch.randint(0, size(1 << 21), (size(4096),), device=DEVICE)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        table(indices).square().mean().backward()
        optimizer.step()

    return step


def without_cudnn_benchmark() -> Step:
    torch.backends.cudnn.benchmark = not FLAWED
    model = Images().to(DEVICE).to(memory_format=torch.channels_last)
    x = torch.randn(size(32), 3, size(64), size(64), device=DEVICE).contiguous(memory_format=torch.channels_last)
    return trained(model, lambda: x)


# --- without a flaw -----------------------------------------------------------------------------------------------


def sound_transformer() -> Step:
    model, x = blocks(False)
    return trained(model, lambda: x)


def sound_convolutions() -> Step:
    torch.backends.cudnn.benchmark = True
    model = Images().to(DEVICE).to(memory_format=torch.channels_last).eval()
    x = torch.randn(size(64), 3, size(112), size(112), device=DEVICE).contiguous(memory_format=torch.channels_last)
    return predicted(model, x, dtype=torch.bfloat16)


def sound_products() -> Step:
    torch.set_float32_matmul_precision("high")
    x = rows(size(4096), size(4096))
    return predicted(mlp(size(4096), 6), x)


def sound_graph() -> Step:
    global FLAWED
    FLAWED = False
    return small_kernels()


def sound_inference() -> Step:
    model, x = blocks(False, layers=8)
    return predicted(model, x)


FLAWS: dict[str, Callable[[], Step]] = {
    made.__name__: made
    for made in (
        sync_item, optimizer_one_by_one, pageable, layout, attention, pointwise, fp32_matmul, synchronize_in_hooks,
        mask_index, results_to_host, empty_cache, double, dense_gradient, small_kernels, loader_without_workers,
        values_in_hooks, samples_one_by_one, copies_within, small_copies, without_cudnn_benchmark,
    )
}  # fmt: skip
SOUND: dict[str, Callable[[], Step]] = {
    made.__name__: made
    for made in (sound_transformer, sound_convolutions, sound_products, sound_graph, sound_inference)
}


def loop(step: Step, seconds: float, warm_up: int = 8) -> None:
    """Run a step, and print its time."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for _ in range(1 if SMALL else warm_up):
        step()
    wait()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step()
        count += 1
    wait()
    print(f"LOOP {(time.perf_counter() - begin) / count * 1e3:.4f} ms per step, {count} steps", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    loop({**FLAWS, **SOUND}[sys.argv[1]](), float(os.environ.get("SECONDS", "3")))
